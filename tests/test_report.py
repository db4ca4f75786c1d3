"""Reports: what users of serving simulators and load tools ran into, and the numbers as the contract defines them."""

from __future__ import annotations

import io
import json
from fractions import Fraction
from itertools import pairwise
from math import ceil, sqrt
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from sim.distribution import summarise
from sim.policies import POLICIES
from sim.report import Report
from sim.scenario import Scenario
from sim.simulate import simulate
from sim.workload import Workload

SCENARIO = """
name = "small"
[engine]
num_blocks = 4000
block_tokens = 4
max_model_tokens = 1000
[scheduler]
policy = "stall-free"
[latency]
kind = "affine"
step = 1.0
[workload]
requests = 20
seed = 5
arrivals = { kind = "poisson", rate = 1.0 }
lengths = { kind = "uniform", prompt = [1, 40], output = [1, 12] }
"""
DISTRIBUTIONS = ("ttft_s", "tbt_s", "tpot_s", "e2e_s", "scheduling_delay_s")


def scenario(**changes: Any) -> Scenario:
    return Scenario.from_toml(SCENARIO).with_(**changes)


def requests(*rows: tuple[float, int, int]) -> Workload:
    """(arrival, prompt, output) by hand."""
    return Workload(
        arrivals=np.array([arrival for arrival, _, _ in rows], dtype=float),
        prompts=np.array([prompt for _, prompt, _ in rows], dtype=np.int64),
        outputs=np.array([output for _, _, output in rows], dtype=np.int64),
        sessions=None,
        concurrency=None,
        think=0.0,
        counts={},
        notes=(),
    )


def report_of(*rows: tuple[float, int, int], **changes: Any) -> Report:
    return simulate(scenario(**changes), requests=requests(*rows))


def per_request(report: Report, column: str) -> list[Any]:
    return report.requests[column].to_list()


# What users ran into


def test_the_first_token_is_no_gap() -> None:
    """Tokens at 2.0, 2.1 and 2.2 s: TTFT 2.0, two gaps of 0.1, TPOT 0.1."""
    summary = report_of((0.0, 20, 3), latency__step=0.0, latency__token=0.1).summary
    assert summary["ttft_s"]["max"] == summary["ttft_s"]["min"] == 2.0
    assert summary["tbt_s"]["n"] == 2
    assert [summary["tbt_s"][key] for key in ("min", "mean", "max")] == pytest.approx([0.1] * 3, abs=1e-12)
    assert summary["tpot_s"]["n"] == 1
    assert summary["tpot_s"]["mean"] == pytest.approx(0.1, abs=1e-12)
    assert summary["e2e_s"]["max"] == pytest.approx(2.2, abs=1e-12)


def test_the_gaps_are_exact_where_doubles_are() -> None:
    """The same in eighths of a second."""
    report = report_of((1.0, 16, 3), latency__step=0.0, latency__token=0.125)
    assert list(zip(report.record.gaps, report.record.gap_counts, strict=True)) == [(0.125, 1), (0.125, 1)]
    summary = report.summary
    assert (summary["ttft_s"]["p50"], summary["tpot_s"]["p50"], summary["e2e_s"]["p50"]) == (2.0, 0.125, 2.25)
    assert summary["duration_s"] == 2.25
    assert (summary["request_throughput"], summary["output_throughput"]) == (1 / 2.25, 3 / 2.25)


def test_two_means_with_different_weights() -> None:
    """A has two tokens 1 s apart and B 101 tokens 0.01 s apart: the mean TPOT is over two requests, the mean TBT over
    101 gaps. (A waits for the prompt of a third request, which has one token, so no gap and no TPOT.)"""
    latency = {"latency__step": 0.01, "latency__prefill_attention": 0.99 / 5000}
    summary = report_of((0.0, 1, 2), (0.01, 100, 1), (50.0, 1, 101), scheduler__policy="orca", **latency).summary
    assert (summary["tpot_s"]["n"], summary["tbt_s"]["n"]) == (2, 101)
    assert summary["tpot_s"]["mean"] == pytest.approx(0.505, rel=1e-9)
    assert summary["tbt_s"]["mean"] == pytest.approx(2.0 / 101, rel=1e-9)


def test_what_was_not_measured_is_null_and_never_zero() -> None:
    """A request that was refused, one with a single token, one that was cut off before its first."""
    report = report_of((0.0, 2000, 5), (0.0, 4, 1), (8.5, 4, 3), engine__time_limit=9.0)
    assert per_request(report, "status") == ["refused", "completed", "unfinished"]
    assert per_request(report, "reason") == ["too_long", None, None]
    assert per_request(report, "replica") == [None, 0, 0]
    assert per_request(report, "scheduled_s") == [None, 0.0, 8.5]
    assert per_request(report, "first_token_s") == [None, 1.0, None]
    assert per_request(report, "finished_s") == [None, 1.0, None]
    assert per_request(report, "longest_gap_s") == [None, None, None]
    assert per_request(report, "output_tokens") == [0, 1, 0]
    summary = report.summary
    assert [summary[name]["n"] for name in ("ttft_s", "e2e_s", "tpot_s", "tbt_s")] == [1, 1, 0, 0]
    assert summary["tpot_s"] == dict.fromkeys(summary["ttft_s"], None) | {"n": 0}
    assert summary["refused"] == {"too_long": 1}


def test_requests_in_flight_at_the_horizon() -> None:
    """Ten are in flight at 60 s: their tokens count once, their TPOT and E2E not at all, and it is said."""
    report = report_of(*[(float(i), 4, 20) for i in range(1, 61, 3)], engine__time_limit=60.0, latency__step=1.5)
    summary = report.summary
    assert summary["unfinished"] == 10
    assert summary["offered"] == 20 == summary["completed"] + summary["unfinished"]
    tokens = report.requests["output_tokens"]
    unfinished = report.requests.filter(pl.col("status") == "unfinished")
    assert unfinished["finished_s"].to_list() == [None] * 10
    assert 0 < unfinished["output_tokens"].sum() < 200
    assert summary["output_tokens"] == tokens.sum() == 200 + unfinished["output_tokens"].sum()
    emitted = report.steps["decodes"].sum() + len(report.requests.filter(pl.col("first_token_s").is_not_null()))
    assert summary["output_tokens"] == emitted
    assert (summary["e2e_s"]["n"], summary["tpot_s"]["n"]) == (10, 10)
    assert summary["tbt_s"]["n"] == tokens.sum() - summary["ttft_s"]["n"]
    assert any("10 requests were cut off" in note for note in summary["notes"])


def test_the_p99_of_71_is_the_maximum() -> None:
    """And n stands beside it, and it is said; of 100 it is the 99th."""
    report = report_of(*[(0.0, 1 + i, 1) for i in range(71)], engine__max_sequences=1)
    ttft = report.summary["ttft_s"]
    assert (ttft["n"], ttft["p99"], ttft["max"], ttft["p95"], ttft["p50"]) == (71, 71.0, 71.0, 68.0, 36.0)
    assert any("P99" in note and "71" in note for note in report.notes)
    ttft = report_of(*[(0.0, 1, 1)] * 100, engine__max_sequences=1).summary["ttft_s"]
    assert (ttft["p99"], ttft["p999"], ttft["max"]) == (99.0, 100.0, 100.0)


def written(report: Report) -> tuple[str, bytes, bytes]:
    """The run as bytes."""
    files = []
    for frame in (report.requests, report.steps):
        buffer = io.BytesIO()
        frame.write_parquet(buffer)
        files.append(buffer.getvalue())
    return json.dumps(report.summary, allow_nan=False), files[0], files[1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("router", ["round-robin", "power-of-two"])
def test_a_seed_seeds_everything(policy: str, router: str) -> None:
    """The same seed gives the same bytes, another seed another run."""
    base = scenario(scheduler__policy=policy, deployment__router=router, deployment__replicas=3)
    assert written(simulate(base)) == written(simulate(base)) != written(simulate(base.with_(workload__seed=6)))


def test_the_router_draws_from_the_seed() -> None:
    """Requests that are all the same, at once: with another seed they go elsewhere."""
    base = scenario(deployment__router="power-of-two", deployment__replicas=5)
    homes = [
        per_request(simulate(base.with_(workload__seed=seed), requests=requests(*[(0.0, 4, 2)] * 20)), "replica")
        for seed in (1, 1, 2)
    ]
    assert homes[0] == homes[1] != homes[2]


def test_two_policies_meet_the_same_requests() -> None:
    runs = [simulate(scenario(scheduler__policy=policy)).requests for policy in POLICIES]
    columns = ["id", "arrival_s", "prompt_tokens"]
    assert all(run.select(columns).equals(runs[0].select(columns)) for run in runs[1:])
    assert len({tuple(run["finished_s"]) for run in runs}) > 2


def test_warm_up_and_drain_are_cut_by_a_stated_rule() -> None:
    """Off by default. Arrivals at 0 … 19 s: the first 5 s and the last 4 s leave 5 … 15, both ends included."""
    rows = [(float(i), 4, 3) for i in range(20)]
    whole, cut = report_of(*rows), report_of(*rows, metrics__warmup=5.0, metrics__drain=4.0)
    assert whole.summary["left_out"] == 0
    assert cut.summary["left_out"] == 9
    assert [cut.summary[name]["n"] for name in DISTRIBUTIONS] == [11, 22, 11, 11, 11]
    assert any("9 requests" in note for note in cut.notes)
    same = ("offered", "completed", "output_tokens", "duration_s", "iterations", "output_throughput", "bubble_fraction")
    assert {key: whole.summary[key] for key in same} == {key: cut.summary[key] for key in same}


# The numbers


@profile(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.5, 7.0]), st.integers(0, 40)), max_size=12))
def test_a_distribution_is_that_of_the_sorted_list(pairs: list[tuple[float, int]]) -> None:
    """Percentiles of values with counts: rank ceil(n·q) in the list written out, in integers; the population's std."""
    flat = sorted(value for value, count in pairs for _ in range(count))
    values, counts = np.array([value for value, _ in pairs]), np.array([count for _, count in pairs], dtype=np.int64)
    summary = summarise(values, counts)
    assert summary["n"] == len(flat)
    if not flat:
        assert set(summary.values()) == {0, None}
        return
    for name, q in (
        ("p50", "0.5"),
        ("p75", "0.75"),
        ("p90", "0.9"),
        ("p95", "0.95"),
        ("p99", "0.99"),
        ("p999", "0.999"),
    ):
        assert summary[name] == flat[ceil(len(flat) * Fraction(q)) - 1]
    mean = sum(flat) / len(flat)
    assert (summary["min"], summary["max"]) == (flat[0], flat[-1])
    assert summary["mean"] == pytest.approx(mean)
    assert summary["std"] == pytest.approx(sqrt(sum((x - mean) ** 2 for x in flat) / len(flat)))
    each = summarise(np.array(flat))
    assert {name: each[name] for name in ("n", "min", "p50", "p99", "max")} == {
        name: summary[name] for name in ("n", "min", "p50", "p99", "max")
    }


@pytest.mark.parametrize("n", [1, 2, 3, 10, 20, 100, 200, 999, 1000, 1001])
def test_ranks_are_integers(n: int) -> None:
    """No float comes near them: of n = 1 … n the percentile is the rank itself."""
    summary = summarise(np.arange(1.0, n + 1))
    assert summary["p90"] == -(-n * 9 // 10)
    assert summary["p99"] == -(-n * 99 // 100)
    assert summary["p999"] == -(-n * 999 // 1000)


def test_the_std_is_the_populations() -> None:
    """1, 2, 3 and 4 s, one at a time: the variance is 1.25, not 5/3."""
    ttft = report_of(*[(0.0, 1, 1)] * 4, engine__max_sequences=1).summary["ttft_s"]
    assert (ttft["mean"], ttft["std"]) == (2.5, sqrt(1.25))


def recounted(report: Report) -> dict[str, list[float]]:
    """The distributions' values but TBT, from the table of requests alone."""
    rows = report.requests.to_dicts()
    done = [row for row in rows if row["status"] == "completed"]
    return {
        "ttft_s": [row["first_token_s"] - row["arrival_s"] for row in rows if row["first_token_s"] is not None],
        "e2e_s": [row["finished_s"] - row["arrival_s"] for row in done],
        "tpot_s": [
            (row["finished_s"] - row["first_token_s"]) / (row["output_tokens"] - 1)
            for row in done
            if row["output_tokens"] > 1
        ],
        "scheduling_delay_s": [
            (report.record.ended if row["scheduled_s"] is None else row["scheduled_s"]) - row["arrival_s"]
            for row in rows
        ],
    }


@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_summary_is_what_the_tables_say(policy: str, stages: int, limit: float | None) -> None:
    """Every count, rate and distribution, recomputed from the rows."""
    base = scenario(scheduler__policy=policy, engine__num_blocks=300, engine__max_model_tokens=200)
    base = base.with_(deployment__pipeline_parallel=stages, latency__step=0.25, latency__token=0.01)
    report = simulate(base if limit is None else base.with_(engine__time_limit=limit))
    summary, table, steps = report.summary, report.requests, report.steps
    assert summary["offered"] == len(table)
    assert summary["offered"] == summary["completed"] + summary["unfinished"] + sum(summary["refused"].values())
    assert summary["completed"] == len(table.filter(pl.col("status") == "completed"))
    assert (summary["unfinished"] > 0) == (len(table) < 20) == (limit is not None)
    assert summary["duration_s"] == max(steps["end_s"]) - table["arrival_s"][0]
    assert summary["iterations"] == len(steps)
    assert summary["preemptions"] == steps["preempted"].sum()
    assert summary["kv_peak"] == max(steps["kv_blocks_used"])
    assert summary["output_tokens"] == table["output_tokens"].sum()
    assert summary["request_throughput"] == summary["completed"] / summary["duration_s"]
    assert summary["output_throughput"] == summary["output_tokens"] / summary["duration_s"]
    for name, values in recounted(report).items():
        expected = summarise(np.array(values))
        assert summary[name]["n"] == len(values)
        if not values:
            continue
        assert {key: summary[name][key] for key in ("p50", "p99", "max")} == {
            key: expected[key] for key in ("p50", "p99", "max")
        }
        assert summary[name]["mean"] == pytest.approx(np.mean(values))
    assert summary["tbt_s"]["n"] == summary["output_tokens"] - summary["ttft_s"]["n"]
    longest = [gap for gap in table["longest_gap_s"] if gap is not None]
    assert max(longest) == summary["tbt_s"]["max"]
    json.dumps(summary, allow_nan=False)
    assert written(report)[0]


def test_the_bubble_is_the_idle_share() -> None:
    """One iteration of 1 s, 3 s of nothing, one more: 3/5 of one stage; of two replicas of two stages 1 − 4/(4·6)."""
    assert report_of((0.0, 4, 1), (4.0, 4, 1)).summary["bubble_fraction"] == pytest.approx(0.6)
    summary = report_of((0.0, 4, 1), (4.0, 4, 1), deployment__replicas=2, deployment__pipeline_parallel=2).summary
    assert summary["duration_s"] == 6
    assert summary["bubble_fraction"] == pytest.approx(1 - 4 / 24)


def test_an_overloaded_run_cannot_pass_by_what_it_left_out() -> None:
    """A request that was never scheduled counts with the time from its arrival to the end of the run."""
    report = report_of((0.0, 4, 50), (3.0, 4, 50), engine__max_sequences=1, engine__time_limit=20.0)
    delay = report.summary["scheduling_delay_s"]
    assert (delay["n"], delay["min"], delay["max"]) == (2, 0.0, 17.0)
    report = report_of(
        (0.0, 4, 50), (3.0, 4, 50), engine__max_sequences=1, engine__time_limit=20.0, slo={"scheduling_delay_p99": 16.9}
    )
    assert report.summary["slo"]["scheduling_delay_p99"] == {"limit": 16.9, "value": 17.0, "met": False}


def test_the_verdicts_of_percentiles() -> None:
    """Met at the limit, not above it; all must be met."""
    rows = [(0.0, 4, 1), (0.0, 4, 1)]
    slo = {"ttft_p50": 1.0, "ttft_p99": 2.0, "e2e_p99": 1.999}
    summary = report_of(*rows, engine__max_sequences=1, slo=slo).summary
    assert {key: verdict["met"] for key, verdict in summary["slo"].items()} == {
        "ttft_p50": True,
        "ttft_p99": True,
        "e2e_p99": False,
    }
    assert summary["slo_met"] is False
    assert summary["attainment"] is summary["goodput"] is None
    assert report_of(*rows, engine__max_sequences=1, slo={"ttft_p99": 2.0}).summary["slo_met"] is True
    assert report_of(*rows).summary["slo_met"] is None


def test_nothing_measured_meets_no_limit() -> None:
    """n = 0: the value is null and the limit is not met, however generous."""
    summary = report_of((0.0, 4, 1), slo={"tbt_p99": 1e9, "tpot_p50": 1e9, "ttft_p50": 1e9}).summary
    assert summary["slo"]["tbt_p99"] == {"limit": 1e9, "value": None, "met": False}
    assert summary["slo"]["tpot_p50"]["met"] is False
    assert summary["slo"]["ttft_p50"]["met"] is True
    assert summary["slo_met"] is False


def test_nobody_came() -> None:
    """A limit before the first arrival: nulls and zeros, and strict JSON all the same."""
    slo = {"ttft_p99": 1.0, "e2e": 5.0, "attainment": 0.5}
    summary = report_of((2.0, 4, 1), engine__time_limit=1.0, slo=slo).summary
    assert (summary["offered"], summary["completed"], summary["iterations"]) == (0, 0, 0)
    for key in ("duration_s", "request_throughput", "output_throughput", "bubble_fraction", "mfu", "mbu", "attainment"):
        assert summary[key] is None, key
    assert {verdict["met"] for verdict in summary["slo"].values()} == {False}
    assert summary["ttft_s"]["n"] == 0
    json.dumps(summary, allow_nan=False)


def test_everybody_was_refused() -> None:
    """Two reasons, two counts, no iteration."""
    report = report_of((1.0, 2000, 1), (2.0, 30, 20), engine__num_blocks=10, slo={"e2e": 9.0, "attainment": 0.1})
    summary = report.summary
    assert (summary["offered"], summary["refused"]) == (2, {"too_long": 1, "never_fits": 1})
    assert (summary["prompt_tokens"], summary["output_tokens"], summary["duration_s"]) == (0, 0, None)
    assert (summary["attainment"], summary["slo_met"]) == (0.0, False)
    assert (len(report.requests), len(report.steps)) == (2, 0)
    json.dumps(summary, allow_nan=False)


def test_attainment_is_over_what_was_offered() -> None:
    """Of five, one is refused, one is cut off, one is too slow: two of five are good."""
    rows = [(0.0, 4, 2), (0.0, 2000, 1), (4.0, 4, 2), (5.5, 4, 8), (15.0, 4, 9)]
    summary = report_of(*rows, engine__time_limit=18.0, slo={"e2e": 5.0, "attainment": 0.4}).summary
    assert (summary["offered"], summary["completed"], summary["unfinished"]) == (5, 3, 1)
    assert summary["attainment"] == 0.4
    assert summary["goodput"] == 2 / summary["duration_s"]
    assert summary["slo"]["attainment"] == {"limit": 0.4, "value": 0.4, "met": True}
    strict = report_of(*rows, engine__time_limit=18.0, slo={"e2e": 5.0, "attainment": 0.41}).summary
    assert strict["slo_met"] is False


def test_the_limits_per_request() -> None:
    """A good request meets all of them; one without a gap or a TPOT has nothing to miss there."""
    rows = [(0.0, 4, 3), (1.0, 4, 1), (9.0, 4, 3)]  # ttft 1, 1.5, 1.5 (the first decodes beside the second's prompt)
    how = {"latency__step": 0.5, "latency__token": 0.125}
    plain = report_of(*rows, **how)
    longest = per_request(plain, "longest_gap_s")
    assert longest == [1.125, None, 0.625]
    assert plain.summary["attainment"] is None

    def attained(**slo: float) -> float:
        return report_of(*rows, **how, slo=slo).summary["attainment"]

    assert attained(tbt_max=1.125) == 1.0
    assert attained(tbt_max=1.124) == pytest.approx(2 / 3)
    assert attained(tbt_max=0.5) == pytest.approx(1 / 3)
    assert attained(tpot=0.875) == 1.0
    assert attained(tpot=0.874) == pytest.approx(2 / 3)
    assert attained(ttft=1.0) == pytest.approx(2 / 3)
    assert attained(ttft=1.0, tbt_max=0.625) == pytest.approx(1 / 3)
    assert attained(e2e=0.1) == 0.0


def test_the_longest_gap_is_of_the_request_alone() -> None:
    """Gaps of 1 s, but for one across a preemption; each request with its own longest one."""
    report = report_of(
        (0.0, 4, 6), (0.0, 4, 6), engine__num_blocks=4, engine__watermark=0.0, scheduler__policy="prefill-first"
    )
    assert per_request(report, "longest_gap_s") == [1.0, 2.0]
    assert per_request(report, "preemptions") == [0, 1]
    assert report.summary["preemptions"] == 1


def test_the_papers_extra_gap() -> None:
    """first_token_gap adds one gap of 0 s per request that has a first token, and changes nothing else."""
    rows = [(0.0, 4, 3), (1.0, 4, 1), (2.0, 2000, 1), (7.5, 4, 4)]
    plain, quirk = (
        report_of(*rows, engine__time_limit=8.0),
        report_of(*rows, engine__time_limit=8.0, slo={"first_token_gap": True}),
    )
    assert (plain.summary["tbt_s"]["n"], quirk.summary["tbt_s"]["n"]) == (2, 4)
    assert (quirk.summary["tbt_s"]["min"], quirk.summary["tbt_s"]["p50"]) == (0.0, 0.0)
    assert quirk.summary["tbt_s"]["mean"] == plain.summary["tbt_s"]["mean"] / 2
    same = set(plain.summary) - {"tbt_s"}
    assert {key: plain.summary[key] for key in same} == {key: quirk.summary[key] for key in same}


def test_the_tables() -> None:
    """The columns that scripts rely on, in their order, and the clock going on from row to row."""
    report = simulate(scenario())
    assert report.requests.columns[:11] == [
        "id",
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        "status",
        "reason",
        "replica",
        "scheduled_s",
        "first_token_s",
        "finished_s",
        "preemptions",
    ]
    assert report.steps.columns == [
        "replica",
        "start_s",
        "end_s",
        "prefill_tokens",
        "decodes",
        "context_tokens",
        "chunks",
        "kv_blocks_used",
        "waiting",
        "preempted",
    ]
    assert all(early <= late for early, late in pairwise(report.steps["end_s"]))
    for row in report.requests.to_dicts():
        assert row["arrival_s"] <= row["scheduled_s"] < row["first_token_s"] <= row["finished_s"]


def test_steps_may_be_left_out() -> None:
    """Without rows the summary is the same."""
    kept, bare = simulate(scenario()), simulate(scenario(), keep_steps=False)
    assert len(bare.steps) == 0
    assert kept.summary == bare.summary
