"""What people who forecast serving, or load real servers, ran into: sixteen kinds of fault, each by its name.

Each case is tested here as a user meets it; `ELSEWHERE` names the tests that go further into the same fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from sim import Scenario, bench, simulate
from sim.__main__ import status
from sim.cost import per_million
from sim.policies import POLICIES
from sim.report import Report
from sim.simulate import plan

TESTS = Path(__file__).parent
TRACES = TESTS.parents[1] / "shared" / "data" / "traces"
ELSEWHERE = {
    1: ["test_report.py::test_the_first_token_is_no_gap", "test_report.py::test_the_gaps_are_exact_where_doubles_are"],
    2: ["test_report.py::test_two_means_with_different_weights"],
    3: [
        "test_report.py::test_what_was_not_measured_is_null_and_never_zero",
        "test_report.py::test_everybody_was_refused",
    ],
    4: [
        "test_report.py::test_requests_in_flight_at_the_horizon",
        "test_bench.py::test_what_failed_is_as_the_tool_writes_it",
    ],
    5: ["test_report.py::test_the_p99_of_71_is_the_maximum", "test_report.py::test_ranks_are_integers"],
    6: ["test_cli.py::test_not_feasible_is_an_answer", "test_cli.py::test_the_rate_passes_and_the_next_one_fails"],
    7: [
        "test_cluster.py::test_no_livelock_where_memory_is_short",
        "test_exactness.py::test_the_random_workloads_preempt",
    ],
    8: [
        "test_memory.py::test_blocks_agree_with_engine_logs",
        "test_from_vllm.py::test_kv_cache_of_fp8_doubles_the_blocks",
    ],
    9: [
        "test_workload.py::test_azure_code_on_a_4096_token_model",
        "test_workload.py::test_mooncake_sharegpt_and_more_requests_than_rows",
    ],
    10: ["test_traces.py::test_azure_2023_code", "test_traces.py::test_burstgpt_drops_failures_and_a_quiet_first_day"],
    11: [
        "test_cluster.py::test_depths_that_do_not_divide_the_layers",
        "test_hardware.py::test_the_first_stages_take_the_layers_left_over",
    ],
    12: ["test_calibrate.py::test_host_time_is_told_apart", "test_validate.py::test_host_time_is_shown"],
    13: ["test_report.py::test_a_seed_seeds_everything", "test_report.py::test_two_policies_meet_the_same_requests"],
    14: ["test_report.py::test_warm_up_and_drain_are_cut_by_a_stated_rule"],
    15: ["test_cli.py::test_cost_by_hand", "test_cli.py::test_cost_at_a_given_rate_by_hand"],
    16: ["test_bad_input.py::test_a_key_that_is_wrong", "test_bad_input.py::test_a_machine_that_cannot_be"],
}
SCENARIO = """
name = "users"
[engine]
num_blocks = 2000
max_model_tokens = 4096
[latency]
kind = "affine"
step = {step}
token = {token}
[workload]
requests = {requests}
seed = 3
arrivals = {arrivals}
lengths = {lengths}
"""
AT_ONCE, RATE = '{ kind = "at-once" }', '{ kind = "poisson", rate = 4.0 }'
UNIFORM = '{ kind = "uniform", prompt = [10, 300], output = [2, 40] }'
Call = Callable[..., tuple[str, str]]


def scenario(
    requests: int = 1,
    *,
    step: float = 0.01,
    token: float = 0.0,
    arrivals: str = AT_ONCE,
    lengths: str = UNIFORM,
    **changes: Any,
) -> Scenario:
    text = SCENARIO.format(requests=requests, step=step, token=token, arrivals=arrivals, lengths=lengths)
    return Scenario.from_toml(text).with_(**changes)


def fixed(prompt: int, output: int) -> str:
    return f'{{ kind = "fixed", prompt = {prompt}, output = {output} }}'


def rows(path: Path, *lines: tuple[float, int, int]) -> str:
    """A trace of (arrival, prompt, output), as both arrivals and lengths."""
    path.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{a},{p},{o}\n" for a, p, o in lines)
    )
    return f'{{ kind = "trace", path = "{path}" }}'


def result_of(report: Report) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(bench.of_run(report))
    return told


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """A command that must succeed, on s.toml: stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sim.cli.cores", lambda: 1)

    def run(command: str, one: Scenario, *more: str, expect: int = 0) -> tuple[str, str]:
        (tmp_path / "s.toml").write_text(one.to_toml())
        found = status([command, "s.toml", *more])
        out, err = capsys.readouterr()
        assert found == expect, err
        return out, err

    return run


@pytest.mark.parametrize("case", range(1, 17))
def test_the_tests_that_are_named_exist(case: int) -> None:
    """And every case has a test in this file."""
    for name in ELSEWHERE[case]:
        file, _, test = name.partition("::")
        assert f"def {test}(" in (TESTS / file).read_text(), name
    assert re.search(rf"^def test_case_{case}_", Path(__file__).read_text(), re.MULTILINE)


def test_case_1_ttft_is_not_mixed_into_the_gaps(tmp_path: Path) -> None:
    """Arrival 0, tokens at 2.0, 2.1 and 2.2 s: in the summary, the tables and the result for other tools."""
    trace = rows(tmp_path / "t.csv", (0, 20, 3))
    one = scenario(step=0.0, token=0.1, arrivals=trace, lengths=trace)
    report = simulate(one, keep_tokens=True)
    summary, result = report.summary, result_of(report)
    assert (summary["ttft_s"]["max"], summary["tbt_s"]["n"], summary["tpot_s"]["n"]) == (2.0, 2, 1)
    assert summary["tbt_s"]["max"] == pytest.approx(0.1) and summary["tpot_s"]["mean"] == pytest.approx(0.1)
    assert result["ttfts"] == [2.0] and result["itls"] == [pytest.approx([0.1, 0.1])]
    assert report.requests["longest_gap_s"].to_list() == [pytest.approx(0.1)]


def test_case_2_two_means_are_both_shown_with_their_n(tmp_path: Path, call: Call) -> None:
    """A: 2 tokens 1 s apart. B: 101 tokens 0.01 s apart. Mean TPOT 0.505 over 2 requests, mean TBT 0.0198 over 101."""
    trace = rows(tmp_path / "t.csv", (0, 1, 2), (0.01, 100, 1), (50, 1, 101))
    latency = {"latency__prefill_attention": 0.99 / 5000, "scheduler__policy": "orca"}
    page, _ = call("run", scenario(3, arrivals=trace, lengths=trace, **latency))
    lines = {line.split()[0]: line for line in page.splitlines() if line.strip()}
    assert "505 ms" in lines["TPOT"] and lines["TPOT"].split()[-2:] == ["2", "requests"]
    assert "19.8 ms" in lines["TBT"] and lines["TBT"].split()[-2:] == ["101", "gaps"]


def test_case_3_what_was_not_measured_is_never_zero(tmp_path: Path, call: Call) -> None:
    """A refused request has no TTFT, one of a single token no TPOT: null, counted by n, a dash on the page."""
    trace = rows(tmp_path / "t.csv", (0, 100, 1), (0, 900, 5))
    one = scenario(2, arrivals=trace, lengths=trace, engine__num_blocks=50)
    report = simulate(one)
    assert report.requests["first_token_s"].to_list()[1] is None
    assert report.summary["refused"] == {"never_fits": 1}
    assert [report.summary[name]["n"] for name in ("ttft_s", "tpot_s")] == [1, 0]
    assert set(report.summary["tpot_s"].values()) == {0, None} and report.summary["tpot_s"]["mean"] is None
    page, _ = call("run", one)
    assert re.search(r"^TPOT( +–){5} +0 requests", page, re.MULTILINE)
    text = json.dumps(report.summary, allow_nan=False)
    assert '"mean": null' in text


@pytest.mark.parametrize("policy", POLICIES)
def test_case_4_unfinished_requests_at_the_horizon(policy: str) -> None:
    """Offered = completed + unfinished + refused; tokens count once; no latency of what was cut off."""
    one = scenario(400, arrivals='{ kind = "poisson", rate = 12.0 }', step=0.1, scheduler__policy=policy)
    report = simulate(one.with_(engine__time_limit=20.0, engine__num_blocks=2000), keep_tokens=True)
    summary, table = report.summary, report.requests
    assert summary["unfinished"] >= 10
    assert summary["offered"] == summary["completed"] + summary["unfinished"] + sum(summary["refused"].values())
    assert summary["offered"] < 400 and len(table) == summary["offered"]
    cut = table.filter(pl.col("status") == "unfinished")
    assert cut["finished_s"].null_count() == len(cut) == summary["unfinished"]
    assert summary["output_tokens"] == table["output_tokens"].sum()
    assert summary["e2e_s"]["n"] == summary["completed"]
    assert any(f"{summary['unfinished']} requests were cut off" in note for note in summary["notes"])
    result = result_of(report)
    assert (result["completed"], result["failed"]) == (summary["completed"], summary["unfinished"])


@pytest.mark.parametrize("n", [1, 2, 71, 99])
def test_case_5_the_p99_of_a_handful_is_the_maximum(n: int, call: Call) -> None:
    """And n is printed beside it, with a sentence."""
    one = scenario(n)
    ttft = simulate(one).summary["ttft_s"]
    assert (ttft["n"], ttft["p99"]) == (n, ttft["max"])
    page, _ = call("run", one)
    assert f"P99 of a distribution over {n} requests is its maximum" in page


def test_case_6_a_rate_beyond_capacity_is_not_answered_with_another(call: Call) -> None:
    """Asked for several times what is possible: not feasible, at most so much. A run at that rate is of that rate."""
    one = scenario(300, step=0.1, arrivals=RATE, slo={"scheduling_delay_p50": 0.2, "tbt_p99": 0.15})
    asked = ("--rate", "300", "--policies", "stall-free", "--seeds", "3")
    told = json.loads(call("capacity", one, *asked, "--json")[0])["results"][0]
    assert told["asked"] == {"rate": 300.0, "feasible": False} and 0 < told["rate"] < 150
    assert told["interval"][0] <= told["rate"] <= told["interval"][1] * 1.01
    page, _ = call("capacity", one, *asked)
    assert re.search(r"300 requests/s are not feasible with stall-free: at most [\d.]+ \([\d.]+ to [\d.]+\)", page)
    few = ("--rate", "1", "--policies", "stall-free", "--seeds", "1")
    assert json.loads(call("capacity", one, *few, "--json")[0])["results"][0]["asked"]["feasible"] is True
    assert "1 requests/s are feasible with stall-free" in call("capacity", one, *few)[0]
    summary = json.loads(call("run", one, "--rate", "300", "--json")[0])
    assert summary["slo_met"] is False and summary["scheduling_delay_s"]["p50"] > 0.2
    assert summary["request_throughput"] < 150


@pytest.mark.parametrize("policy", ["prefill-first", "stall-free", "alternating"])
@pytest.mark.parametrize("blocks", [49, 120, 999])
def test_case_7_preemption_does_not_livelock(policy: str, blocks: int) -> None:
    """200 requests of 512 in and 256 out at once: it ends, the clock advances, what can never fit is refused."""
    one = scenario(200, lengths=fixed(512, 256), engine__num_blocks=blocks, scheduler__policy=policy)
    report = simulate(one)
    summary, steps = report.summary, report.steps
    if blocks == 999:
        assert summary["completed"] == 200 and summary["preemptions"] > 0
    elif blocks == 120:
        assert summary["completed"] == 200
    assert (summary["completed"] == 0) == (blocks < -(-(512 + 256 - 1) // 16))
    if blocks == 49:
        assert summary["completed"] == 200, "48 blocks are enough for one at a time"
    assert all(early < late for early, late in pairwise(steps["end_s"]))
    refused = simulate(one.with_(engine__num_blocks=47)).summary
    assert refused["refused"] == {"never_fits": 200} and refused["completed"] == 0


def test_case_8_kv_blocks_given_or_derived(call: Call) -> None:
    """num_gpu_blocks of an engine's log is taken as it is; else the count is derived and printed; fp8 KV doubles it."""
    base = Scenario.load(TESTS.parent / "scenarios/chat-mistral-7b.toml").with_(workload__requests=20)
    derived = json.loads(call("check", base, "--json")[0])
    assert derived["kv_blocks_from"] == "derived"
    assert f"{derived['kv_blocks']:,} KV blocks" in call("check", base)[0]
    fp8 = json.loads(call("check", base, "--set", "model.kv_dtype=fp8", "--json")[0])
    assert fp8["kv_blocks"] == pytest.approx(2 * derived["kv_blocks"], abs=1)
    given = json.loads(call("check", base, "--set", "engine.num_blocks=12345", "--json")[0])
    assert (given["kv_blocks"], given["kv_blocks_from"]) == (12345, "given")
    summary = json.loads(call("run", base, "--set", "engine.num_blocks=12345", "--json")[0])
    assert summary["kv_blocks"] == 12345


@pytest.mark.parametrize(
    ("name", "limit", "too_long", "of"),
    [("AzureLLMInferenceTrace_code.csv", 4096, 1257, 8819), ("mooncake_conversation_trace.jsonl", 32768, None, 12031)],
)
def test_case_9_rows_longer_than_the_model(name: str, limit: int, too_long: int | None, of: int, call: Call) -> None:
    """`too_long` decides, and the counts are shown."""
    path = TRACES / name
    if not path.exists():
        pytest.skip("needs the public traces beside the repository")
    trace = f'{{ kind = "trace", path = "{path}" }}'
    one = scenario(of, arrivals=trace, lengths=trace, engine__max_model_tokens=limit)
    _, err = call("check", one, expect=2)
    count = re.search(rf"as have (\d+) of the {of:,}|as have (\d+) of the {of}", err)
    assert count and "too_long" in err and err.count("\n") == 1
    found = int(count[1] or count[2])
    assert found == too_long if too_long else found >= 828
    clipped = json.loads(call("check", one, "--set", "workload.too_long=clip", "--json")[0])
    assert clipped["workload"]["clipped_too_long"] == found and clipped["requests"] == of
    kept = json.loads(call("check", one, "--set", "workload.too_long=drop", "--requests", "1000", "--json")[0])
    assert kept["requests"] == 1000 and kept["workload"]["dropped_too_long"] > 0
    assert any("passed over" in note for note in kept["notes"])


def test_case_9_mooncake_prompts_alone() -> None:
    """828 of the 12,031 conversation prompts exceed 32,768."""
    from sim.traces import read

    path = TRACES / "mooncake_conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("needs the public traces beside the repository")
    assert int((read(path, path.name).prompts > 32768).sum()) == 828


ODD = {
    "crlf.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    + b"".join(b"2023-11-16 18:17:%02d.9799600,%d,9\r\n" % (i, 10 + i) for i in range(40)),
    "bursts.jsonl": b"".join(
        b'{"timestamp": %d, "input_length": 90, "output_length": 5, "hash_ids": [1, 2]}\n' % (3000 * (i // 20))
        for i in range(40)
    ),
    "zeros.csv": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    + b"".join(b"%d,ChatGPT,30,%d,40,API\n" % (90000 + i, 0 if i % 2 else 8) for i in range(80)),
}


@pytest.mark.parametrize(("name", "span"), [("crlf.csv", 39.0), ("bursts.jsonl", 3.0), ("zeros.csv", 78.0)])
def test_case_10_real_files_are_odd(name: str, span: float, tmp_path: Path, call: Call) -> None:
    """CRLF and seven digits; bursts on few timestamps; rows of zero tokens and a quiet first day; too few rows."""
    (tmp_path / name).write_bytes(ODD[name])
    trace = f'{{ kind = "trace", path = "{tmp_path / name}" }}'
    one = scenario(40, arrivals=trace, lengths=trace)
    report = simulate(one)
    arrivals = report.requests["arrival_s"]
    assert (arrivals[0], arrivals[-1]) == (0.0, pytest.approx(span)) and report.summary["completed"] == 40
    assert report.summary["workload"]["dropped_zero_tokens"] == (39 if name == "zeros.csv" else 0) + (
        name == "zeros.csv"
    )
    _, err = call("run", one, "--requests", "41", expect=2)
    assert "41 asked for" in err and "40 usable rows" in err and "repeat = true" in err
    more = one.with_(workload__requests=100, workload__lengths__repeat=True, workload__arrivals__repeat=True)
    assert simulate(more).summary["completed"] == 100


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_case_11_depths_that_do_not_divide_the_layers(stages: int, call: Call) -> None:
    """32 layers in 2 to 5 stages, 1,000 requests at once: it ends, and its bubbles are reported."""
    one = Scenario.from_toml(
        '[model]\nname = "llama-2-7b"\n[device]\nname = "a100-80gb-pcie"\n[latency]\nkind = "roofline"\n'
        '[workload]\nrequests = 1000\narrivals = { kind = "at-once" }\n'
        'lengths = { kind = "fixed", prompt = 64, output = 3 }\n'
    ).with_(deployment__pipeline_parallel=stages)
    report = simulate(one)
    assert report.plan.model is not None
    layers = report.plan.model.stage_layers(stages)
    assert layers == tuple(sorted(layers, reverse=True)) and sum(layers) == 32 and max(layers) - min(layers) <= 1
    assert report.summary["completed"] == 1000 and 0 < report.summary["bubble_fraction"] < 1
    assert "bubbles" in call("run", one)[0]


def test_case_12_host_time_is_a_term_of_its_own() -> None:
    """60 layers, batch 128: per step and per sequence, shown, and zero (which is said) if unset."""
    one = Scenario.from_toml(
        '[model]\nname = "yi-34b"\n[device]\nname = "h100-sxm"\n[deployment]\ntensor_parallel = 2\n'
        '[engine]\nmax_sequences = 128\n[latency]\nkind = "roofline"\n[workload]\nrequests = 128\n'
        'arrivals = { kind = "at-once" }\nlengths = { kind = "fixed", prompt = 16, output = 60 }\n'
    )
    bare = simulate(one)
    assert bare.plan.model is not None and bare.plan.model.layers == 60
    assert bare.summary["time_share"]["host"] == 0 and "no host time" in bare.summary["times_from"]
    host = simulate(one.with_(latency__step=0.004, latency__sequence=2e-5))
    assert "host time as given" in host.summary["times_from"]
    steps = host.summary["iterations"]
    assert steps == bare.summary["iterations"]
    more = host.summary["duration_s"] - bare.summary["duration_s"]
    served = int((host.steps["decodes"] + host.steps["chunks"]).sum())
    assert more == pytest.approx(0.004 * steps + 2e-5 * served)
    assert host.summary["time_share"]["host"] == pytest.approx(more / host.record.busy)


@pytest.mark.parametrize("policy", POLICIES)
def test_case_13_seeds_seed(policy: str, tmp_path: Path, call: Call) -> None:
    """The same seed: byte-identical files, the one for other tools too. Another policy: the same requests."""
    one = scenario(60, arrivals=RATE)
    kept = {}
    for folder in ("a", "b", "other"):
        seed = ("--seed", "9") if folder == "other" else ()
        call("run", one, "--policy", policy, "--out", folder, "--trace-out", f"{folder}.json.gz", *seed)
        kept[folder] = {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        kept[folder]["trace"] = (tmp_path / f"{folder}.json.gz").read_bytes()
    assert kept["a"] == kept["b"] and len(kept["a"]) == 7
    assert all(kept["a"][name] != kept["other"][name] for name in kept["a"])
    mine, base = simulate(one.with_(scheduler__policy=policy)).requests, simulate(one).requests
    for column in ("arrival_s", "prompt_tokens"):
        assert mine[column].equals(base[column])


def test_case_14_warm_up_is_cut_by_a_stated_rule(call: Call) -> None:
    """Off by default; by time of arrival; and the summary says what was cut."""
    one = scenario(100, arrivals=RATE)
    whole = simulate(one)
    assert whole.summary["left_out"] == 0 and whole.summary["ttft_s"]["n"] == 100
    arrivals = whole.requests["arrival_s"].to_numpy()
    expected = int(((arrivals < arrivals[0] + 5.0) | (arrivals > arrivals[-1] - 3.0)).sum())
    cut = one.with_(metrics__warmup=5.0, metrics__drain=3.0)
    summary = simulate(cut).summary
    assert 0 < expected == summary["left_out"] and summary["ttft_s"]["n"] == 100 - expected
    assert summary["request_throughput"] == whole.summary["request_throughput"]
    assert f"{expected} requests of warm-up or drain" in call("run", cut)[0]


def test_case_15_cost(call: Call) -> None:
    """2 per device-hour, 2 devices, 1 request/s, 415 output tokens each: 2.68 per million output tokens."""
    assert per_million(2.0, 2, 1.0, 415.0) == pytest.approx(2.68, abs=0.005)
    one = scenario(
        50,
        arrivals='{ kind = "constant", rate = 1.0 }',
        lengths=fixed(85, 415),
        deployment__replicas=2,
        cost__gpu_hour=2.0,
    )
    told = json.loads(call("cost", one, "--json")[0])
    assert told["per_million_output_tokens"] == pytest.approx(2.68, abs=0.005) and told["devices"] == 2
    assert "2.68" in call("cost", one)[0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["workload.lengths={kind='fixed', prompt=8000, output=10}"], ["8000", "max_model_tokens = 4096"]),
        (["workload.lengths={kind='fixed', prompt=0, output=10}"], ["[workload.lengths] prompt", "0", "1"]),
        (["workload.arrivals={kind='poisson', rate=0}"], ["[workload.arrivals] rate", "0"]),
        (["workload.arrivals={kind='poisson', rate=-2}"], ["[workload.arrivals] rate", "-2"]),
        (["scheduler.policy=stal-free"], ["[scheduler] policy", "did you mean 'stall-free'"]),
        (["engine.max_sequence=8"], ["[engine]", "did you mean 'max_sequences'"]),
        (
            ["scheduler.policy=prefill-first", "engine.max_batch_tokens=100"],
            ["[engine] max_batch_tokens", "max_model_tokens = 4096"],
        ),
    ],
)
def test_case_16_nonsense_is_told(settings: list[str], says: list[str], call: Call) -> None:
    """Each answer is one line that names the key and the limit."""
    options = [word for setting in settings for word in ("--set", setting)]
    out, err = call("run", scenario(), *options, expect=2)
    assert not out and err.count("\n") == 1 and [word for word in says if word not in err] == [], err


def test_case_16_a_model_that_memory_cannot_hold(call: Call) -> None:
    one = Scenario.load(TESTS.parent / "scenarios/chat-mistral-7b.toml")
    _, err = call("run", one, "--set", "model.name=llama-3.1-70b", expect=2)
    assert "[deployment] tensor_parallel: llama-3.1-70b needs" in err and "at least" in err and err.count("\n") == 1
    assert np.isfinite(plan(one).deployment.limits.num_blocks)
