"""Workloads: the same requests for the same seed, traces as one table, too-long requests, too few rows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from sim.errors import BadInput
from sim.workload import Workload, WorkloadTable, build, mean_rate, streams

TRACES = Path(__file__).resolve().parents[2] / "shared/data/traces"
POISSON = {"kind": "poisson", "rate": 2.0}
SHAREGPT = {"kind": "dataset", "name": "openchat-sharegpt4"}
NO_LIMIT = 10**9


def table(arrivals: dict[str, Any] = POISSON, lengths: dict[str, Any] = SHAREGPT, **keys: Any) -> WorkloadTable:
    return WorkloadTable.model_validate({"arrivals": arrivals, "lengths": lengths, **keys})


def trace(name: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "trace", "path": name, **keys}


@pytest.fixture
def real() -> Path:
    if not TRACES.exists():
        pytest.skip("the public traces are not here (../shared/data/traces)")
    return TRACES


@pytest.fixture
def five(tmp_path: Path) -> Path:
    """Five usable rows, arriving at 0, 1, 2, 4, 8 s; rows 3 and 6 are 110 and 210 tokens long; row 5 has no output."""
    rows = ["10,10,1", "11,100,10", "12,20,2", "13,5,0", "14,200,10", "18,30,3"]
    (tmp_path / "t.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows) + "\n")
    return tmp_path


def five_rows(five: Path, limit: int = NO_LIMIT, n: int = 5, **keys: Any) -> Workload:
    way = {key: keys.pop(key) for key in ("repeat", "shuffle", "scale", "rate") if key in keys}
    return build(table(trace("t.csv", **way), trace("t.csv"), requests=n, **keys), limit, five)


def refusal(*args: Any) -> str:
    with pytest.raises(BadInput) as caught:
        build(*args)
    return str(caught.value)


def test_the_default_workload_is_the_contracts() -> None:
    found = table()
    assert (found.requests, found.seed, found.too_long) == (2048, 42, "error")
    w = build(found, 8192, Path())
    assert w.arrivals is not None
    assert len(w.arrivals) == len(w.prompts) == len(w.outputs) == 2048
    assert (w.sessions, w.concurrency, w.think, w.notes) == (None, None, 0.0, ())
    assert set(w.counts) == {"dropped_zero_tokens", "dropped_too_long", "clipped_too_long", "sorted"}
    assert not any(w.counts.values())
    assert w.prompts.dtype == w.outputs.dtype == np.int64


def test_same_seed_same_requests_and_another_seed_others() -> None:
    one, two, other = (build(table(seed=seed), 8192, Path()) for seed in (1, 1, 2))
    for name in ("arrivals", "prompts", "outputs"):
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes()
        assert getattr(one, name).tobytes() != getattr(other, name).tobytes()


def test_arrivals_and_lengths_have_streams_of_their_own() -> None:
    poisson = build(table(), 8192, Path())
    for arrivals in ({"kind": "gamma", "rate": 1.0, "cv": 2.0}, {"kind": "at-once"}, {"kind": "poisson", "rate": 9.0}):
        np.testing.assert_array_equal(build(table(arrivals), 8192, Path()).prompts, poisson.prompts)
    fixed = build(table(lengths={"kind": "fixed", "prompt": 5, "output": 5}), 8192, Path())
    np.testing.assert_array_equal(fixed.arrivals, poisson.arrivals)
    states = [tuple(stream.generate_state(4)) for stream in streams(42)]
    assert len(set(states)) == 4
    assert streams(42)._fields == ("arrivals", "lengths", "routing", "faults")


def test_more_requests_leave_the_earlier_ones_alone() -> None:
    few, many = (build(table(requests=n, too_long="drop"), 4096, Path()) for n in (300, 3000))
    np.testing.assert_array_equal(many.prompts[:300], few.prompts)
    np.testing.assert_array_equal(many.arrivals[:300], few.arrivals)


def test_a_closed_loop_has_no_arrivals_yet() -> None:
    w = build(table({"kind": "closed", "concurrency": 8, "think": 1.5}), 8192, Path())
    assert (w.arrivals, w.concurrency, w.think, len(w.prompts)) == (None, 8, 1.5, 2048)


def test_one_file_for_both_is_one_table(five: Path) -> None:
    w = five_rows(five)
    np.testing.assert_array_equal(w.arrivals, [0, 1, 2, 4, 8])
    np.testing.assert_array_equal(w.prompts, [10, 100, 20, 200, 30])
    np.testing.assert_array_equal(w.outputs, [1, 10, 2, 10, 3])
    assert w.counts["dropped_zero_tokens"] == 1
    assert w.notes == ("t.csv: 1 of 6 rows dropped: zero num_prefill_tokens or num_decode_tokens",)


def test_too_long_error_names_the_row_its_columns_and_the_limit(five: Path) -> None:
    both = table(trace("t.csv"), trace("t.csv"), requests=5)
    assert refusal(both, 100, five) == (
        "t.csv: row 3, columns num_prefill_tokens and num_decode_tokens: request 2 has 100 prompt + 10 output tokens, "
        'over max_model_tokens = 100, as have 2 of the 5 requests; [workload] too_long can "drop" or "clip" them'
    )
    assert len(five_rows(five, limit=210).prompts) == 5  # exactly at the limit is within it


def test_too_long_drop_takes_the_next_row_instead(five: Path) -> None:
    w = five_rows(five, limit=100, n=3, too_long="drop")
    np.testing.assert_array_equal(w.prompts, [10, 20, 30])
    np.testing.assert_array_equal(w.arrivals, [0, 2, 8])
    assert w.counts["dropped_too_long"] == 2
    assert five_rows(five, limit=100, n=2, too_long="drop").counts["dropped_too_long"] == 1


def test_too_long_clip_cuts_the_output_then_the_prompt(five: Path) -> None:
    w = five_rows(five, limit=105, too_long="clip")
    np.testing.assert_array_equal(w.prompts, [10, 100, 20, 104, 30])
    np.testing.assert_array_equal(w.outputs, [1, 5, 2, 1, 3])
    assert w.counts["clipped_too_long"] == 2
    assert "2 requests over max_model_tokens = 105 were cut" in w.notes


def test_generated_lengths_obey_too_long_as_well() -> None:
    assert "[workload] too_long: request " in refusal(table(), 4096, Path())
    dropped = build(table(too_long="drop"), 4096, Path())
    assert len(dropped.prompts) == 2048
    assert (dropped.prompts + dropped.outputs).max() <= 4096
    whole = build(table(), 8192, Path())
    fits = whole.prompts + whole.outputs <= 4096
    np.testing.assert_array_equal(dropped.prompts[: fits.sum()], whole.prompts[fits])
    assert dropped.counts["dropped_too_long"] >= (~fits).sum() > 0
    clipped = build(table(too_long="clip"), 4096, Path())
    assert clipped.counts["clipped_too_long"] == (~fits).sum()
    assert (clipped.prompts + clipped.outputs)[~fits].tolist() == [4096] * int((~fits).sum())


def test_lengths_that_never_fit_are_refused_not_looped_on() -> None:
    fixed = {"kind": "fixed", "prompt": 8000, "output": 200}
    what = refusal(table(lengths=fixed, too_long="drop"), 4096, Path())
    assert what.startswith("[workload] too_long: only 0 of ")
    assert what.endswith("draws have prompt + output tokens within max_model_tokens = 4096")
    assert "request 1 has 8000 prompt + 200 output tokens" in refusal(table(lengths=fixed), 4096, Path())
    assert "[engine] max_model_tokens: 1 leaves no room" in refusal(table(), 1, Path())


def test_too_few_rows_names_both_numbers_unless_repeated(five: Path) -> None:
    both = table(trace("t.csv"), trace("t.csv"), requests=6)
    assert refusal(both, NO_LIMIT, five) == (
        "[workload] requests: 6 asked for, but t.csv has 5 usable rows; ask for at most 5 or set repeat = true"
    )
    what = refusal(table(trace("t.csv"), trace("t.csv"), requests=4, too_long="drop"), 100, five)
    assert "4 asked for, but t.csv has 3 usable rows (without 2 that are too long)" in what
    w = five_rows(five, n=11, repeat=True)
    # The next lap starts the mean gap (8 s / 4) after the last arrival.
    np.testing.assert_array_equal(w.arrivals, [0, 1, 2, 4, 8, 10, 11, 12, 14, 18, 20])
    np.testing.assert_array_equal(w.prompts, [10, 100, 20, 200, 30] * 2 + [10])


def test_repeat_and_drop_go_together(five: Path) -> None:
    w = five_rows(five, limit=100, n=5, repeat=True, too_long="drop")
    np.testing.assert_array_equal(w.prompts, [10, 20, 30, 10, 20])
    np.testing.assert_array_equal(w.arrivals, [0, 2, 8, 10, 12])
    assert "none of the 5 rows of t.csv" in refusal(table(trace("t.csv"), trace("t.csv"), too_long="drop"), 10, five)


def test_shuffle_permutes_lengths_and_leaves_arrivals_sorted(five: Path) -> None:
    shuffled = [five_rows(five, shuffle=True, seed=seed) for seed in (1, 1, 2)]
    for w in shuffled:
        np.testing.assert_array_equal(w.arrivals, [0, 1, 2, 4, 8])
        pairs = sorted(zip(w.prompts.tolist(), w.outputs.tolist(), strict=True))
        assert pairs == [(10, 1), (20, 2), (30, 3), (100, 10), (200, 10)]
    assert shuffled[0].prompts.tolist() == shuffled[1].prompts.tolist() != shuffled[2].prompts.tolist()


def test_shuffled_arrivals_alone_keep_their_gaps(five: Path) -> None:
    orders = set()
    for seed in range(8):
        only = table(trace("t.csv", shuffle=True), {"kind": "fixed", "prompt": 1, "output": 1}, requests=5, seed=seed)
        w = build(only, 100, five)
        assert w.arrivals is not None
        assert w.arrivals[0] == 0
        assert sorted(np.diff(w.arrivals)) == [1, 1, 2, 4]
        orders.add(tuple(w.arrivals))
    assert len(orders) > 2


def test_a_trace_longer_than_the_search_limit_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "3,4\n" * (2**20 + 1000))
    w = build(table(lengths=trace("l.csv"), requests=2, too_long="drop"), 100, tmp_path)
    np.testing.assert_array_equal(w.prompts, [3, 3])


def test_scale_multiplies_the_rate_and_rate_sets_it(five: Path) -> None:
    np.testing.assert_array_equal(five_rows(five, scale=2.0).arrivals, [0, 0.5, 1, 2, 4])
    for n in (3, 5):
        w = five_rows(five, rate=10.0, n=n)
        assert w.arrivals is not None
        assert mean_rate(w.arrivals) == pytest.approx(10.0)


def test_two_files_are_two_independent_tables(five: Path) -> None:
    (five / "l.csv").write_text("num_prefill_tokens,num_decode_tokens\n7,7\n8,8\n9,9\n")
    w = build(table(trace("t.csv"), trace("l.csv"), requests=3), 100, five)
    np.testing.assert_array_equal(w.arrivals, [0, 1, 2])
    np.testing.assert_array_equal(w.prompts, [7, 8, 9])
    what = refusal(table(trace("l.csv"), trace("l.csv"), requests=3), 100, five)
    assert what == "l.csv: [workload.arrivals] path: has no arrival times"
    assert "[workload] requests: 6 asked for, but t.csv has 5" in refusal(
        table(trace("t.csv"), trace("l.csv", repeat=True), requests=6), 100, five
    )


def test_the_same_file_by_two_spellings_is_one_table(five: Path) -> None:
    (five / "sub").mkdir()
    w = build(table(trace("sub/../t.csv"), trace("t.csv"), requests=2, too_long="drop"), 100, five)
    np.testing.assert_array_equal(w.arrivals, [0, 2])


def test_sessions_follow_their_requests(five: Path) -> None:
    (five / "s.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens,session_id\n3,1,1,b\n1,2,1,a\n2,900,1,c\n4,4,1,b\n"
    )
    w = build(table(trace("s.csv"), trace("s.csv"), requests=3, too_long="drop"), 100, five)
    np.testing.assert_array_equal(w.prompts, [2, 1, 4])
    assert w.sessions is not None
    assert w.sessions[1] == w.sessions[2] != w.sessions[0]
    assert w.counts == {"dropped_zero_tokens": 0, "dropped_too_long": 1, "clipped_too_long": 0, "sorted": 1}


def test_a_trace_error_names_the_file_as_given(tmp_path: Path) -> None:
    assert refusal(table(trace("no/such.csv")), 100, tmp_path) == (
        "no/such.csv: [workload.arrivals] path: no such file"
    )
    (tmp_path / "bad.csv").write_text("num_prefill_tokens,num_decode_tokens\n1,x\n")
    assert refusal(table(lengths=trace("bad.csv")), 100, tmp_path).startswith(
        "bad.csv: row 2, column num_decode_tokens"
    )
    assert "cannot be opened" in refusal(table(trace("a\0b")), 100, tmp_path)


def test_azure_code_on_a_4096_token_model(real: Path) -> None:
    both = (trace("AzureLLMInferenceTrace_code.csv"), trace("AzureLLMInferenceTrace_code.csv"))
    assert "as have 1257 of the 8819 requests" in refusal(table(*both, requests=8819), 4096, real)
    w = build(table(*both, requests=8819 - 1257, too_long="drop"), 4096, real)
    assert w.counts["dropped_too_long"] == 1257
    clipped = build(table(*both, requests=8819, too_long="clip"), 4096, real)
    assert clipped.counts["clipped_too_long"] == 1257
    assert (clipped.prompts + clipped.outputs).max() == 4096


def test_mooncake_sharegpt_and_more_requests_than_rows(real: Path) -> None:
    name = "mooncake_conversation_trace.jsonl"
    w = build(table(trace(name, rate=1.0), trace(name), requests=12031), NO_LIMIT, real)
    assert w.arrivals is not None
    assert (w.prompts > 32768).sum() == 828
    assert mean_rate(w.arrivals) == pytest.approx(1.0)
    assert w.notes == (f"{name}: hash_ids ignored: prefix reuse is not modelled",)
    assert "20000 asked for, but" in refusal(table(trace(name), trace(name), requests=20000), NO_LIMIT, real)


def test_a_million_requests_take_about_a_second() -> None:
    start = time.perf_counter()
    w = build(table(requests=1_000_000, too_long="drop"), 4096, Path())
    assert len(w.prompts) == 1_000_000
    assert time.perf_counter() - start < 5  # about 0.5 s on one idle core


@pytest.mark.parametrize("keys", [{"requests": 0}, {"seed": -1}, {"too_long": "cut"}, {"requests": 2.0}, {"rate": 2.0}])
def test_nonsense_is_refused_by_key(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        table(**keys)
    error = caught.value.errors()[0]
    assert next(iter(keys)) in (*error["loc"], error.get("ctx", {}).get("key"))  # an unknown key is in the context
