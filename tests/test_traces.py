"""Trace files: every known format, the oddities of real ones, and one clear line for each broken one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.columns import MAX_LINE
from sim.errors import BadInput
from sim.traces import Trace, read

TRACES = Path(__file__).resolve().parents[2] / "shared/data/traces"
LENGTHS_ONLY = "num_prefill_tokens,num_decode_tokens\n"
TIMED = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
Load = Callable[[str | bytes], Trace]


def real(name: str) -> Trace:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{name} is not here (../shared/data/traces)")
    return read(path, name)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(content: str | bytes) -> Trace:
        path = tmp_path / "trace.any"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read(path, "trace.any")

    return load


def refusal(load: Load, content: str | bytes) -> str:
    with pytest.raises(BadInput) as caught:
        load(content)
    assert "\n" not in str(caught.value)
    assert caught.value.source == "trace.any"
    return str(caught.value)


def test_azure_2023_code() -> None:
    trace = real("AzureLLMInferenceTrace_code.csv")
    totals = trace.prompts + trace.outputs
    assert len(totals) == 8819
    assert (totals > 4096).sum() == 1257
    assert (trace.prompts[0], trace.outputs[0], trace.rows[0]) == (4808, 10, 2)
    assert trace.arrivals is not None
    assert trace.arrivals[:3] == pytest.approx([0.0, 0.052, 0.098189], abs=1e-12)
    assert trace.dropped == trace.out_of_order == 0


@pytest.mark.parametrize("kind", ["code", "conv"])
def test_azure_and_its_splitwise_encoding_agree(kind: str) -> None:
    azure, splitwise = real(f"AzureLLMInferenceTrace_{kind}.csv"), real(f"splitwise_{kind}.csv")
    np.testing.assert_array_equal(azure.prompts, splitwise.prompts)
    np.testing.assert_array_equal(azure.outputs, splitwise.outputs)
    assert azure.arrivals is not None
    assert splitwise.arrivals is not None
    np.testing.assert_allclose(azure.arrivals, splitwise.arrivals, atol=1e-6)


def test_mooncake_conversation() -> None:
    trace = real("mooncake_conversation_trace.jsonl")
    assert len(trace.prompts) == 12031
    assert (trace.prompts > 32768).sum() == 828
    assert trace.arrivals is not None
    assert trace.arrivals[-1] == pytest.approx(3536.999)
    assert len(np.unique(trace.arrivals)) < len(trace.arrivals) / 5  # bursts on few distinct timestamps
    assert trace.notes == ("hash_ids ignored: prefix reuse is not modelled",)


def test_sharegpt_lengths_have_no_arrivals() -> None:
    trace = real("sharegpt_8k_filtered_stats_llama2_tokenizer.csv")
    assert trace.arrivals is None
    assert (len(trace.prompts), np.median(trace.prompts), np.median(trace.outputs)) == (30731, 1730, 415)


def test_azure_2024_dates_carry_a_zone(load: Load) -> None:
    trace = load(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2024-05-10 23:59:59.009930+00:00,10,1\r\n2024-05-11 00:00:00+00:00,20,2\r\n2024-05-11T00:00:01Z,30,3"
    )
    assert trace.arrivals == pytest.approx([0.0, 0.99007, 1.99007])


def test_burstgpt_drops_failures_and_a_quiet_first_day(load: Load) -> None:
    trace = load(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,0,472,Conversation log\n"
        "86405,GPT-4,1087,230,1317,API log\n"
        '86415.5,"GPT-4, turbo",417,276,693,Conversation log\n'
    )
    assert trace.arrivals == pytest.approx([0.0, 10.5])
    assert (list(trace.prompts), list(trace.outputs), list(trace.rows)) == ([1087, 417], [230, 276], [3, 4])
    assert trace.dropped == 1
    assert trace.notes == ("1 of 3 rows dropped: zero Request tokens or Response tokens",)


def test_sessions_become_integer_keys(load: Load) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    trace = load(header + "".join(f"{i},{name},1,m,1,1,2,x\n" for i, name in enumerate(["b", "a", "", "b", ""])))
    assert trace.sessions is not None
    assert trace.sessions.dtype == np.int64
    assert trace.sessions[0] == trace.sessions[3]
    assert len(set(trace.sessions)) == 4  # the two rows without a name are sessions of their own


def test_rows_out_of_order_are_sorted_stably_and_said(load: Load) -> None:
    trace = load(TIMED + "7,1,1\n3,2,1\n7,3,1\n3,4,1\n")
    assert list(trace.prompts) == [2, 4, 1, 3]
    assert list(trace.rows) == [3, 5, 2, 4]
    assert trace.arrivals == pytest.approx([0, 0, 4, 4])
    assert trace.out_of_order == 2
    assert trace.notes == ("sorted by arrival: 2 rows arrived before the row above them",)


def test_column_order_spaces_bom_blank_lines_and_whole_floats_do_not_matter(load: Load) -> None:
    trace = load(b"\xef\xbb\xbfextra, num_decode_tokens,num_prefill_tokens\r\nx,3 ,374.0\r\n\r\n,4,1e3\r\n\r\n")
    assert (list(trace.prompts), list(trace.outputs), list(trace.rows)) == ([374, 1000], [3, 4], [2, 4])


def test_arrivals_shift_after_zero_rows_are_dropped(load: Load) -> None:
    trace = load(TIMED + "0,5,0\n100,5,5\n101,0,5\n103,6,6\n")
    assert trace.arrivals == pytest.approx([0.0, 3.0])
    assert trace.dropped == 2


BENCH: dict[str, Any] = {
    "date": "20260101-000000",
    "completed": 2,
    "request_rate": "inf",
    "request_throughput": 1.0,
    "input_lens": [10, 20, 30],
    "output_lens": [5, 0, 7],
    "ttfts": [0.1, 0.0, 0.2],
    "itls": [[0.01] * 4, [], [0.01] * 6],
    "errors": ["", "refused", ""],
}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_bench_result_without_start_times_gives_lengths(load: Load, indent: int | None) -> None:
    trace = load(json.dumps(BENCH, indent=indent))
    assert (list(trace.prompts), list(trace.outputs), trace.dropped) == ([10, 30], [5, 7], 1)
    assert trace.arrivals is None
    assert "no start_times: lengths only" in trace.notes


def test_a_bench_result_with_start_times_gives_arrivals_too(load: Load) -> None:
    trace = load(json.dumps(BENCH | {"start_times": [1000.5, 1000.0, 1002.0]}))
    assert trace.arrivals == pytest.approx([0.0, 1.5])


def test_a_bench_result_may_be_one_line_of_any_length(load: Load) -> None:
    trace = load(json.dumps({"generated_texts": ["x" * MAX_LINE], **BENCH}))
    assert list(trace.prompts) == [10, 30]


def mooncake(**changes: Any) -> str:
    row = {"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": [0, 1]}
    return json.dumps({key: value for key, value in (row | changes).items() if value is not ...}) + "\n"


def test_mooncake_is_in_milliseconds_and_tolerates_blank_lines(load: Load) -> None:
    trace = load(mooncake(timestamp=500) + "\n" + mooncake(timestamp=3500, input_length=9, hash_ids=[]))
    assert trace.arrivals == pytest.approx([0.0, 3.0])
    assert (list(trace.prompts), list(trace.rows)) == ([5, 9], [1, 3])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        (TIMED, "has a header and no rows"),
        (TIMED + "\n\n", "has a header and no rows"),
        ("a,b\n1,2\n", "row 1: columns a,b fit no known format: arrived_at,num_prefill_tokens,num_decode_tokens; "),
        (LENGTHS_ONLY + "1,nan\n", "row 2, column num_decode_tokens: 'nan' is not a whole number of tokens from 0 to"),
        (LENGTHS_ONLY + "1,1\ninf,1\n", "row 3, column num_prefill_tokens: 'inf' is not a whole number"),
        (LENGTHS_ONLY + "-5,1\n", "row 2, column num_prefill_tokens: '-5' is not"),
        (LENGTHS_ONLY + "1.5,1\n", "row 2, column num_prefill_tokens: '1.5' is not"),
        (LENGTHS_ONLY + "\n5,1\nx,1\n", "row 4, column num_prefill_tokens: 'x' is not"),
        (LENGTHS_ONLY + ",1\n", "row 2, column num_prefill_tokens: an empty cell is not"),
        (LENGTHS_ONLY + "2147483649,1\n", "row 2, column num_prefill_tokens: '2147483649' is not"),
        (LENGTHS_ONLY + "99999999999999999999999,1\n", "row 2, column num_prefill_tokens"),
        (LENGTHS_ONLY + "0,1\n1,0\n", "none of the 2 rows has both num_prefill_tokens and num_decode_tokens above 0"),
        (TIMED + "0,1,1\n-1,1,1\n", "row 3, column arrived_at: '-1' is not a finite time of at least 0 s"),
        (TIMED + "nan,1,1\n", "row 2, column arrived_at: 'nan' is not a finite time"),
        (TIMED + "0,1,1\n1,1\n", "row 3: 2 cells, but the header has 3"),
        (TIMED + "0,1,1\n1,1,1,1\n", "row 3: 4 cells, but the header has 3"),
        (LENGTHS_ONLY.strip() + ",extra\n1,1,1\n1,1\n", "row 3: 2 cells, but the header has 3"),
        (LENGTHS_ONLY + '1,"1\n', "row 2: unexpected end of data"),
        (LENGTHS_ONLY.encode() + b"1,1\n1,\xff\n", "row 3: byte 0xff is not UTF-8"),
        (LENGTHS_ONLY.encode() + b"1,1\xe2", "row 2: byte 0xe2 is not UTF-8"),
        (LENGTHS_ONLY.encode() + b"1,1\n1,1\n1,\0001\n", "row 4: a NUL byte"),
        (LENGTHS_ONLY.encode() + b"1" * (MAX_LINE + 1), "row 2: the line is longer than 1048576 bytes"),
        (b'{"timestamp": 1, "hash_ids": [' + b"1," * MAX_LINE, "row 1: the line is longer than 1048576 bytes"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n16/11/2023 18:17,1,1\n", "row 2, column TIMESTAMP: '16/11/2023"),
        (mooncake() + mooncake()[:30], "row 2: not valid JSON, or cut off"),
        (mooncake() + "[1]\n", "row 2: is not a JSON object"),
        (mooncake() + mooncake(input_length="5"), "row 2, column input_length: '5' is not a number"),
        (mooncake() + mooncake(input_length=True), "row 2, column input_length: True is not a number"),
        (mooncake() + mooncake(output_length=...), "row 2, column output_length: nothing is not a number"),
        (mooncake() + mooncake(output_length=1.5), "row 2, column output_length: 1.5 is not a whole number"),
        (mooncake() + mooncake(timestamp=float("nan")), "row 2, column timestamp: nan is not a finite time"),
        (mooncake() + mooncake(timestamp=-1), "row 2, column timestamp: -1.0 is not a finite time of at least 0 ms"),
        (mooncake() + mooncake(hash_ids=[1.5]), "row 2, column hash_ids: is not a list of integers"),
        (mooncake() + mooncake(hash_ids=[1, None]), "row 2, column hash_ids: is not a list of integers"),
        (mooncake() + mooncake(hash_ids="12"), "row 2, column hash_ids: is not a list of integers"),
        ('{"prompt": 1}\n', "row 1: columns prompt fit no known format"),
        ("{" * 100_000, "not valid JSON, or cut off"),
        (json.dumps(BENCH)[:-40], "not valid JSON, or cut off"),
        (json.dumps(BENCH | {"input_lens": [1]}), "input_lens and output_lens are not lists of one length"),
        (json.dumps(BENCH | {"input_lens": [1, "2", 3]}), "row 2, column input_lens: '2' is not a number"),
        (json.dumps(BENCH | {"input_lens": ..., "x": 1}, default=str), "has no list input_lens: save the bench result"),
        (
            json.dumps(BENCH | {"start_times": [1.0]}),
            "input_lens and start_times are not lists of one length",
        ),
        (json.dumps(BENCH | {"input_lens": [], "output_lens": []}), "holds no requests"),
    ],
)
def test_a_broken_file_is_one_line_that_names_row_and_column(load: Load, content: str | bytes, says: str) -> None:
    assert says in refusal(load, content)


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^a/b.csv: no such file$"):
        read(tmp_path / "b.csv", "a/b.csv")
    with pytest.raises(BadInput, match=r"^d: is a directory, not a file$"):
        read(tmp_path, "d")


def test_a_gigabyte_without_a_line_end_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    with path.open("wb") as file:
        file.write(LENGTHS_ONLY.encode() + b"1" * MAX_LINE)
        file.truncate(2**30)  # sparse: nothing after the first blocks may be read
    with pytest.raises(BadInput, match="row 2: the line is longer"):
        read(path, "long.csv")


def test_the_sort_is_stable_in_a_long_file(load: Load) -> None:
    trace = load(TIMED + "".join(f"{i * 7919 % 5},{i},1\n" for i in range(1, 3001)))
    assert trace.arrivals is not None
    for instant in range(5):
        assert (np.diff(trace.prompts[trace.arrivals == instant]) > 0).all()
