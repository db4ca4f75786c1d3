"""vllm_bench.json: exact against the naive reference, and in agreement with what the tool computes from its lists."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from naive import POLICIES
from reference import run
from test_exactness import MEMORY, STAGES, random_case

from sim import Scenario, bench, simulate
from sim.__main__ import status
from sim.report import Report

SCENARIO = """
name = "tiny"
[engine]
num_blocks = 50
max_model_tokens = 512
max_sequences = 16
[latency]
kind = "affine"
step = 0.0117
token = 0.000131
context = 0.0000017
[workload]
requests = 120
seed = 7
[workload.arrivals]
kind = "poisson"
rate = 4.0
[workload.lengths]
kind = "uniform"
prompt = [1, 300]
output = [1, 90]
"""
# What vLLM 0.33.0 writes, in its order, with `--percentile-metrics ttft,tpot,itl,e2el` and these percentiles.
KEYS = [
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("simulator", "policy", "seed", "times_from"),  # where its --metadata goes
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts"),
    *("errors", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
    *(
        f"{what}_{metric}_ms"
        for metric in ("ttft", "tpot", "itl", "e2el")
        for what in ("mean", "median", "std", "p50", "p75", "p90", "p95", "p99", "p99.9")
    ),
]
LISTS = (
    *("input_lens", "output_lens", "ttfts", "itls", "latencies"),
    *("start_times", "queue_times", "generated_texts", "errors"),
)


def reported(**changes: Any) -> Report:
    return simulate(Scenario.from_toml(SCENARIO).with_(**changes), keep_tokens=True)


def strict(text: str | bytes) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("load", ["open", "limited", "thinking"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_gap_is_the_reference_s(policy: str, stages: int, memory: str, load: str, seed: int) -> None:
    """Of every request, to the last bit; and a run that logs its tokens is otherwise the run that does not."""
    settings, requests = random_case(policy, stages, memory, load, seed)
    logged, plain = run(settings, requests, keep_tokens=True), run(settings, requests)
    assert logged.outcomes == plain.outcomes and logged.record.steps == plain.record.steps
    assert logged.record.tokens is not None
    found = [json.loads(text) for text in bench.gaps(logged.record, logged.record.tokens.stretches())]
    times = [outcome.token_times for outcome in plain.outcomes]
    assert found == [[late - early for early, late in pairwise(own)] for own in times]


def test_replicas_keep_their_tokens_apart() -> None:
    settings, requests = random_case("stall-free", 2, "scarce", "open", 1)
    logged = run(settings, requests, replicas=3, router="least-loaded", keep_tokens=True)
    assert logged.record.tokens is not None
    found = [json.loads(text) for text in bench.gaps(logged.record, logged.record.tokens.stretches())]
    times = [outcome.token_times for outcome in logged.outcomes]
    assert found == [[late - early for early, late in pairwise(own)] for own in times]


def recomputed(result: dict[str, Any]) -> dict[str, Any]:
    """The tool's figures from the per-request lists, request by request and token by token."""
    fine = [i for i, error in enumerate(result["errors"]) if not error]
    start, ttft, latency, outputs, itls = (
        [result[name][i] for i in fine] for name in ("start_times", "ttfts", "latencies", "output_lens", "itls")
    )
    told: dict[str, Any] = {
        "completed": len(fine),
        "failed": len(result["errors"]) - len(fine),
        "total_input_tokens": sum(result["input_lens"][i] for i in fine),
        "total_output_tokens": sum(result["output_lens"]),
    }
    told["request_throughput"] = told["completed"] / result["duration"]
    told["output_throughput"] = told["total_output_tokens"] / result["duration"]
    total = told["total_input_tokens"] + told["total_output_tokens"]
    told["total_token_throughput"] = total / result["duration"]
    pools = {
        "ttft": ttft,
        "tpot": [(e - t) / (o - 1) for e, t, o in zip(latency, ttft, outputs, strict=True) if o > 1],
        "itl": [gap for own in itls for gap in own],
        "e2el": latency,
    }
    for name, pool in pools.items():
        values = np.array(pool or [0.0])
        told |= {f"mean_{name}_ms": np.mean(values) * 1e3, f"median_{name}_ms": np.median(values) * 1e3}
        told[f"std_{name}_ms"] = np.std(values) * 1e3
        told |= {f"p{q:g}_{name}_ms": np.percentile(values, q) * 1e3 for q in (50, 75, 90, 95, 99, 99.9)}
    if fine:
        begin = min(start)
        seconds = [int(s + t - begin) for s, t in zip(start, ttft, strict=True)]
        for s, t, own in zip(start, ttft, itls, strict=True):
            seconds += [int(time - begin) for time in (s + t + np.cumsum(own)).tolist()]
        told["max_output_tokens_per_s"] = np.bincount(seconds).max()
        active = [range(int(s - begin), int(s + e - begin) + 1) for s, e in zip(start, latency, strict=True)]
        told["max_concurrent_requests"] = np.bincount([second for span in active for second in span]).max()
    return told


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scheduler__policy": "prefill-first"},
        {"deployment__pipeline_parallel": 2, "deployment__replicas": 2},
        {"metrics__warmup": 5.0, "metrics__drain": 5.0},
        {"engine__time_limit": 12.0},
        {"engine__num_blocks": 21},
        {"workload__arrivals": {"kind": "closed", "concurrency": 6}},
        {"workload__lengths": {"kind": "fixed", "prompt": 40, "output": 1}},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_the_figures_are_those_of_the_lists(changes: dict[str, Any]) -> None:
    result = strict(bench.of_run(reported(**changes)))
    assert list(result) == KEYS
    for name in LISTS:
        assert len(result[name]) == len(result["errors"]), name
    for key, value in recomputed(result).items():
        assert result[key] == pytest.approx(value, rel=1e-10, abs=1e-10), key


def test_preemptions_happen_in_these_runs() -> None:
    """Else the test above would not see tokens that come with a second prefill."""
    report = reported()
    assert report.summary["preemptions"] > 5 and report.summary["completed"] == 120


def test_the_summary_and_the_result_are_of_one_run() -> None:
    report = reported()
    result, summary = strict(bench.of_run(report)), report.summary
    assert result["mean_itl_ms"] == pytest.approx(summary["tbt_s"]["mean"] * 1e3)
    assert result["mean_ttft_ms"] == pytest.approx(summary["ttft_s"]["mean"] * 1e3)
    assert result["completed"] == summary["completed"] and result["total_output_tokens"] == summary["output_tokens"]
    assert result["duration"] == pytest.approx(summary["duration_s"] + result["start_times"][0])


def test_what_failed_is_as_the_tool_writes_it() -> None:
    """Refused and cut-off requests have a reason, no output length and no latency, and are in no distribution."""
    report = reported(engine__time_limit=12.0, engine__num_blocks=21)
    result, table = strict(bench.of_run(report)), report.requests
    assert {"completed", "unfinished", "refused"} == set(table["status"])
    for i, state in enumerate(table["status"]):
        if state == "completed":
            assert not result["errors"][i] and len(result["itls"][i]) == result["output_lens"][i] - 1
        else:
            assert result["errors"][i].startswith(state) and result["output_lens"][i] == result["latencies"][i] == 0
        if table["first_token_s"][i] is None:
            assert result["ttfts"][i] == 0.0 and result["itls"][i] == []
        elif state == "unfinished":
            assert len(result["itls"][i]) == table["output_tokens"][i] - 1
    assert result["failed"] == (table["status"] != "completed").sum()


def test_nothing_served_is_still_a_result() -> None:
    too_large = {"workload__lengths": {"kind": "fixed", "prompt": 400, "output": 9}, "engine__num_blocks": 20}
    result = strict(bench.of_run(reported(**too_large)))
    assert result["completed"] == 0 and result["failed"] == 120 and result["p99_ttft_ms"] == 0.0
    at_once = strict(bench.of_run(reported(**too_large, workload__arrivals={"kind": "at-once"})))
    assert at_once["duration"] == 0.0 and at_once["request_throughput"] is None


@pytest.mark.parametrize(
    ("arrivals", "told"),
    [
        ({"kind": "poisson", "rate": 4.0}, (4.0, 1.0, None)),
        ({"kind": "gamma", "rate": 3.0, "cv": 2.0}, (3.0, 0.25, None)),
        ({"kind": "constant", "rate": 2.0}, (2.0, "inf", None)),
        ({"kind": "at-once"}, ("inf", 1.0, None)),
        ({"kind": "closed", "concurrency": 6}, ("inf", 1.0, 6)),
    ],
)
def test_arrivals_in_the_tool_s_terms(arrivals: dict[str, Any], told: tuple[Any, ...]) -> None:
    result = strict(bench.of_run(reported(workload__arrivals=arrivals)))
    assert (result["request_rate"], result["burstiness"], result["max_concurrency"]) == told


def test_goodput_needs_limits_that_the_tool_knows() -> None:
    scenario = Scenario.from_toml(SCENARIO + "[slo]\nttft = 0.2\ne2e = 1.5\ntpot = 0.03\n")
    result = strict(bench.of_run(simulate(scenario, keep_tokens=True)))
    rows = zip(result["ttfts"], result["latencies"], result["output_lens"], strict=True)
    tpots = [(t, e, (e - t) / (o - 1) if o > 1 else 0.0) for t, e, o in rows]
    good = sum(t <= 0.2 and e <= 1.5 and tpot <= 0.03 for t, e, tpot in tpots)
    assert 0 < good < 120 and result["request_goodput"] == good / result["duration"]
    other = Scenario.from_toml(SCENARIO + "[slo]\ntbt_max = 0.2\n")
    assert strict(bench.of_run(simulate(other, keep_tokens=True)))["request_goodput"] is None


def test_large_runs_leave_the_gaps_out_and_keep_what_follows_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    report = reported()
    whole = strict(bench.of_run(report))
    monkeypatch.setattr(bench, "MOST_GAPS", whole["total_output_tokens"] - 1)
    part = strict(bench.of_run(report))
    assert part == {key: value for key, value in whole.items() if key != "itls"}


def test_weighted_percentiles_are_numpy_s() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 2, 3, 10, 1000):
        values, counts = rng.standard_exponential(size), rng.integers(1, 9, size)
        told, plain = (bench.statistics("x", pairs) for pairs in ((values, counts), (np.repeat(values, counts), None)))
        assert told == pytest.approx(plain, rel=1e-12)


def test_run_and_compare_write_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside every run, and the same bytes for the same seed."""
    (tmp_path / "s.toml").write_text(SCENARIO)
    for folder in ("one", "two"):
        assert status(["run", str(tmp_path / "s.toml"), "--out", str(tmp_path / folder), "--json"]) == 0
    assert (tmp_path / "one/vllm_bench.json").read_bytes() == (tmp_path / "two/vllm_bench.json").read_bytes()
    assert status(["compare", str(tmp_path / "s.toml"), "--out", str(tmp_path / "all"), "--json"]) == 0
    assert len({path.read_bytes() for path in (tmp_path / "all").glob("*/vllm_bench.json")}) == 4
    capsys.readouterr()


def test_it_is_a_trace_of_the_same_requests(tmp_path: Path) -> None:
    """The result is one of the formats that the simulator reads."""
    report = reported()
    (tmp_path / "r.json").write_bytes(bench.of_run(report))
    trace = {"kind": "trace", "path": str(tmp_path / "r.json")}
    again = reported(workload__arrivals=trace, workload__lengths=trace)
    assert again.requests["prompt_tokens"].equals(report.requests["prompt_tokens"])
    shifted = report.requests["arrival_s"] - report.requests["arrival_s"][0]
    assert (again.requests["arrival_s"] - shifted).abs().max() == 0
