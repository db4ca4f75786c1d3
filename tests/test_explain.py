"""Why tokens came late: what the parts must add up to, and what hand-made cases must be called."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from math import fsum
from pathlib import Path
from typing import Any

import naive
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from sim import explain, output, stories
from sim.__main__ import status
from sim.affine import Affine, AffineTable
from sim.blame import GAP_CAUSES, TTFT_CAUSES, beyond
from sim.catalogue import entry
from sim.errors import BadInput
from sim.executor import LatencyModel, Step
from sim.explain import Explanation
from sim.hardware import Device, Model
from sim.policies import POLICIES
from sim.profile import Coefficients, Errors, Profile, ProfileLatency, Tokens, Validity
from sim.report import Report
from sim.request import Batch, Chunk, Request
from sim.roofline import Roofline, RooflineTable
from sim.scenario import Scenario
from sim.scheduler import Limits
from sim.simulate import Engine, plan, simulate
from sim.watched import Costs, Seen, Watched
from sim.workload import Workload

AFFINE = """
name = "by hand"
[engine]
num_blocks = 100000
max_model_tokens = 20000
max_batch_tokens = 20000
[scheduler]
policy = "stall-free"
token_budget = 512
[latency]
kind = "affine"
step = 0.01
token = 0.0001
[workload]
requests = 40
seed = 5
arrivals = { kind = "poisson", rate = 4.0 }
lengths = { kind = "uniform", prompt = [1, 400], output = [1, 40] }
"""
ROOFLINE = """
name = "an A100"
[model]
name = "mistral-7b"
[device]
name = "a100-80gb-pcie"
[latency]
kind = "roofline"
[workload]
requests = 60
arrivals = { kind = "poisson", rate = 3.0 }
lengths = { kind = "dataset", name = "openchat-sharegpt4" }
"""
Rows = list[tuple[float, int, int]]


def affine(**changes: Any) -> Scenario:
    return Scenario.from_toml(AFFINE).with_(**changes)


def requests(rows: Rows) -> Workload:
    """(arrival, prompt, output) by hand."""
    return Workload(
        arrivals=np.array([arrival for arrival, _, _ in rows], dtype=float),
        prompts=np.array([prompt for _, prompt, _ in rows], dtype=np.int64),
        outputs=np.array([tokens for _, _, tokens in rows], dtype=np.int64),
        sessions=None,
        concurrency=None,
        think=0.0,
        counts={},
        notes=(),
    )


def explained(scenario: Scenario, rows: Rows, **options: Any) -> Explanation:
    return explain(simulate(scenario, requests=requests(rows)), **options)


def main_cause(why: Explanation, key: str = "tbt") -> str:
    return str(why.summary[key]["causes"][0]["cause"])


def seconds(frame: pl.DataFrame, row: int = 0) -> dict[str, float]:
    """The causes of one row that took any time."""
    causes = dict.fromkeys((*GAP_CAUSES, *TTFT_CAUSES))
    told = frame.row(row, named=True)
    return {cause: told[f"{cause}_s"] for cause in causes if told.get(f"{cause}_s")}


def check_sums(why: Explanation) -> None:
    """Parts are not negative, and add up: to each gap, to its excess, to all of the excess."""
    for frame, name, causes, key in (
        (why.gaps, "gap_s", GAP_CAUSES, "tbt"),
        (why.ttfts, "ttft_s", TTFT_CAUSES, "ttft"),
    ):
        told = why.summary[key]
        assert told["late"] == frame.height
        if not frame.height:
            assert told["causes"] == [] and told["excess_s"] == 0
            continue
        for columns, whole in (([f"{c}_s" for c in causes], name), ([f"{c}_excess_s" for c in causes], "excess_s")):
            parts = frame.select(columns).to_numpy()
            assert (parts >= 0).all()
            np.testing.assert_allclose(parts.sum(axis=1), frame[whole].to_numpy(), rtol=1e-9, atol=1e-12)
        assert (frame["excess_s"] > 0).all()
        assert fsum(one["share"] for one in told["causes"]) == pytest.approx(1, abs=1e-9)
        assert fsum(one["excess_s"] for one in told["causes"]) == pytest.approx(frame["excess_s"].sum(), rel=1e-9)
        assert sum(one["main_in"] for one in told["causes"]) == frame.height
        assert frame["main"].is_in([one["cause"] for one in told["causes"]]).all()


# What a latency model says of its parts

MODELS = ("mistral-7b", "llama-3.1-8b", "llama-3.1-70b", "falcon-180b", "mixtral-8x7b", "gpt-oss-20b")
small = st.floats(1e-6, 1e-2)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """What a scheduler could ask for: decodes, chunks in the middle of prompts and at their ends."""
    batch = Batch()
    batch.decodes = draw(st.integers(0, 300))
    batch.context = batch.decodes and draw(st.integers(batch.decodes, batch.decodes * 9000))
    for number in range(draw(st.integers(0 if batch.decodes else 1, 4))):
        start, tokens, left = draw(st.integers(0, 9000)), draw(st.integers(1, 5000)), draw(st.sampled_from([0, 0, 700]))
        request = Request(number, 0.0, start + tokens + left, 5)
        request.computed = start
        batch.add(request, tokens)
    return batch


@st.composite
def models(draw: st.DrawFn) -> LatencyModel:
    """Any latency model there is."""
    kind = draw(st.sampled_from(["affine", "roofline", "profile"]))
    if kind == "affine":
        names = ("step", "token", "sequence", "context", "prefill_attention", "hop")
        return Affine(AffineTable(kind="affine", **{name: draw(small) for name in names}), draw(st.integers(1, 4)))
    if kind == "roofline":
        table = RooflineTable(kind="roofline", step=draw(small), sequence=draw(small))
        model = Model(**entry("model", draw(st.sampled_from(MODELS))))
        tp, pp = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (1, 3)]))
        return Roofline(table, model, Device(**entry("device", "h100-80gb-sxm")), tp, pp)
    rising = sorted(draw(st.lists(small, min_size=3, max_size=3)))
    names = [name for name in Coefficients.model_fields if name not in ("tokens", "few")]
    coefficients = Coefficients(
        **{name: draw(small) for name in names},
        tokens=Tokens(knots=[1, 64, 4096], seconds=rising),
        few=draw(st.sampled_from([None, Tokens(knots=[1, 8], seconds=rising[:2])])),
    )
    return ProfileLatency(
        Profile(
            name="drawn",
            model="mistral-7b",
            device="a100-80gb-pcie",
            scale=draw(st.floats(0.5, 2)),
            coefficients=coefficients,
            validity=Validity(tokens=1, sequences=1, context_tokens=1, prefill_context_tokens=1),
            errors=Errors(rows=1, held_out_median=0.0, held_out_p90=0.0, held_out_bias=0.0),
        )
    )


@given(models(), batches())
@profile(max_examples=150, deadline=None)
def test_parts_are_what_a_batch_lasts(model: LatencyModel, batch: Batch) -> None:
    """Their sum is what `execute` says, and asking for them is not executing: spent and notes stay as they were."""
    before = model.spent(), model.notes()
    parts = model.parts(batch)
    assert (model.spent(), model.notes()) == before
    step = model.execute(batch)
    assert fsum(parts.values()) == pytest.approx(sum(step.seconds) + step.hop * (len(step.seconds) - 1), rel=1e-9)
    assert min(parts.values()) >= 0
    if isinstance(model, Roofline):
        assert model.work(batch) == pytest.approx(model.spent(), rel=1e-9)


@given(models(), batches())
@profile(max_examples=100, deadline=None)
def test_a_batch_without_something_never_lasts_longer(model: LatencyModel, batch: Batch) -> None:
    """So the part of a chunk, of a context and of each further decode is not negative."""
    costs = Costs(model)
    whole = costs.of(batch)
    slack = 1e-12 * whole
    for chunk in batch.chunks:
        if batch.decodes or len(batch.chunks) > 1:
            assert costs.without(batch, chunk) <= whole + slack
    if batch.decodes:
        alone = costs.decodes(batch.decodes, batch.context)
        assert costs.decodes(1, 0) <= costs.decodes(batch.decodes, 0) + slack
        assert costs.decodes(batch.decodes, 0) <= alone + slack
        assert alone <= whole + slack


# Who is blamed

level = st.dictionaries(st.sampled_from(GAP_CAUSES), st.floats(0, 10), min_size=1)


@given(st.lists(level, min_size=1, max_size=4), st.floats(0, 0.999))
@profile(deadline=None)
def test_all_of_the_excess_is_blamed_on_something(levels: list[dict[str, float]], share: float) -> None:
    whole = fsum(seconds for one in levels for seconds in one.values())
    limit = share * whole
    late = beyond(levels, limit)
    assert fsum(late.values()) == pytest.approx(whole - limit, rel=1e-9, abs=1e-12)
    assert all(seconds >= 0 for seconds in late.values())


def test_who_comes_last_is_blamed_first() -> None:
    """Of 1 + 2 + 4 s, 5 s are allowed: the 2 s beyond are of the last level, half of it."""
    levels = [{"iteration": 1.0}, {"decode_batch": 2.0}, {"prefill_beside": 3.0, "prefill_ahead": 1.0}]
    assert beyond(levels, 5.0) == {"prefill_beside": 1.5, "prefill_ahead": 0.5}
    assert beyond(levels, 2.0) == {"decode_batch": 1.0, "prefill_beside": 3.0, "prefill_ahead": 1.0}
    assert beyond(levels, 0.0) == {"iteration": 1.0, "decode_batch": 2.0, "prefill_beside": 3.0, "prefill_ahead": 1.0}


# What holds of any run


@st.composite
def runs(draw: st.DrawFn) -> tuple[naive.Settings, Rows]:
    """A small run under pressure: few blocks, few slots, pipelines."""
    stages = draw(st.sampled_from([1, 1, 2, 3]))
    settings = naive.Settings(
        policy=draw(st.sampled_from(sorted(POLICIES))),
        num_blocks=draw(st.sampled_from([12, 20, 60])),
        block_tokens=4,
        watermark=draw(st.sampled_from([0.0, 0.1])),
        max_sequences=draw(st.sampled_from([2, 6, 64])),
        max_model_tokens=40,
        max_batch_tokens=draw(st.sampled_from([40, 80])),
        token_budget=draw(st.sampled_from([3, 8, 24])),
        stages=stages,
        hop=draw(st.sampled_from([0.0, 0.125])) if stages > 1 else 0.0,
        step=draw(st.sampled_from([0.5, 1.0, 0.1])),
        token=draw(st.sampled_from([0.0, 0.01])),
        sequence=draw(st.sampled_from([0.0, 0.03])),
        context=draw(st.sampled_from([0.0, 0.004])),
        prefill_attention=draw(st.sampled_from([0.0, 0.0007])),
    )
    arrivals = sorted(draw(st.lists(st.floats(0, 20), min_size=2, max_size=14)))
    return settings, [(at, draw(st.integers(1, 24)), draw(st.integers(1, 16))) for at in arrivals]


def scenario_of(settings: naive.Settings) -> Scenario:
    names = ("step", "token", "sequence", "context", "prefill_attention", "hop")
    engine = ("num_blocks", "block_tokens", "watermark", "max_sequences", "max_model_tokens", "max_batch_tokens")
    return affine(
        scheduler__policy=settings.policy,
        scheduler__token_budget=settings.token_budget,
        deployment__pipeline_parallel=settings.stages,
        **{f"latency__{name}": float(getattr(settings, name)) for name in names},
        **{f"engine__{name}": getattr(settings, name) for name in engine},
    )


@given(runs(), st.sampled_from([0.0, 0.0, 1.3]))
@profile(max_examples=120, deadline=None)
def test_every_late_token_of_any_run(run: tuple[naive.Settings, Rows], limit: float) -> None:
    """The late tokens are those of the naive simulator to the bit, and their parts those that its batches tell."""
    settings, rows = run
    outcomes, steps = naive.simulate(settings, rows)
    why = explained(scenario_of(settings), rows, above=limit, ttft_above=limit)
    check_sums(why)
    late = {
        (one.id, number + 2, since, until)
        for one in outcomes
        for number, (since, until) in enumerate(pairwise(one.token_times))
        if until - since > limit
    }
    assert set(why.gaps.select("request", "token", "since_s", "until_s").iter_rows()) == late
    first = {(one.id, one.arrival, one.token_times[0]) for one in outcomes if one.token_times}
    told = set(why.ttfts.select("request", "since_s", "until_s").iter_rows())
    assert told == {one for one in first if one[2] - one[1] > limit}
    for row in why.gaps.iter_rows(named=True):
        check_gap(settings, steps, row)
    for row in why.ttfts.iter_rows(named=True):
        check_ttft(settings, steps, outcomes[row["request"]], row)


def check_gap(settings: naive.Settings, steps: list[naive.StepRow], row: dict[str, Any]) -> None:
    """By the batches themselves: the one that emitted, and those meanwhile."""
    id = row["request"]
    own = next(step for step in steps if step.end == row["until_s"])
    meanwhile = [step for step in steps if row["since_s"] <= step.start < own.start]
    again = [step for step in (*meanwhile, own) if any(chunk[0] == id for chunk in step.chunks)]
    if again:
        assert row["recomputation_s"] > 0
        assert not any(row[f"{cause}_s"] for cause in ("iteration", "decode_batch", "decode_context"))
        return
    assert id in own.decode_ids
    assert row["memory_s"] == 0
    attention = sum(m * (m0 + m / 2) for _, m0, m in own.chunks)
    beside = settings.stages * (
        settings.token * own.prefill_tokens
        + settings.sequence * len(own.chunks)
        + settings.prefill_attention * attention
    )
    expected = {
        "decode_context": settings.stages * settings.context * own.context_tokens,
        "iteration": settings.stages * (settings.step + settings.token + settings.sequence),
        "decode_batch": settings.stages * (settings.token + settings.sequence) * (own.decodes - 1),
        "communication": (settings.stages - 1) * settings.hop,
    }
    if not any(step.preempted for step in steps):
        expected |= {"prefill_beside": beside, "recomputation": 0}
    for cause, seconds in expected.items():
        assert row[f"{cause}_s"] == pytest.approx(seconds, rel=1e-6, abs=1e-9), cause
    if settings.stages == 1:
        prompts = row["prefill_beside_s"] + row["prefill_ahead_s"] + row["recomputation_s"]
        assert prompts == pytest.approx(own.start - row["since_s"] + beside, abs=1e-9)
        assert row["pipeline_s"] == pytest.approx(0, abs=1e-9)


def check_ttft(
    settings: naive.Settings, steps: list[naive.StepRow], outcome: naive.Outcome, row: dict[str, Any]
) -> None:
    """The queue until it was first scheduled; its chunks since."""
    assert outcome.scheduled is not None
    queued = row["queue_slots_s"] + row["queue_others_s"] + row["queue_memory_s"]
    mine = [
        (step, chunk)
        for step in steps
        for chunk in step.chunks
        if chunk[0] == outcome.id and step.end <= row["until_s"]
    ]
    if not outcome.preemptions:
        assert row["recomputation_s"] == 0
        assert queued == pytest.approx(outcome.scheduled - outcome.arrival, abs=1e-9)
        assert sum(chunk[2] for _, chunk in mine) == outcome.prompt
    alone = [step for step, _ in mine if not step.decodes and len(step.chunks) == 1]
    tokens = sum(settings.token * m + settings.prefill_attention * m * (m0 + m / 2) for _, (_, m0, m) in mine)
    adds = settings.stages * (tokens + settings.sequence * len(mine) + len(alone) * settings.step)
    adds += (settings.stages - 1) * settings.hop * len(alone)
    together = [step for step, _ in mine if not step.decodes and len(step.chunks) > 1]
    assert row["own_prefill_s"] + row["recomputation_s"] == pytest.approx(adds, rel=1e-6) or together


# Hand-made cases


LONG: Rows = [*((0.0, 10, 200) for _ in range(32)), (1.0, 8000, 2)]


@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        ("prefill-first", "prefill_ahead"),
        ("orca", "prefill_beside"),
        ("stall-free", "prefill_beside"),
        ("alternating", "prefill_ahead"),
    ],
)
def test_one_long_prompt_among_decodes(policy: str, cause: str) -> None:
    """32 decodes take 13.2 ms; 8,000 tokens more take 0.8 s at once, or 48 ms with a budget of 512."""
    why = explained(affine(scheduler__policy=policy), LONG, above=0.02)
    check_sums(why)
    assert main_cause(why) == cause
    assert why.summary["tbt"]["causes"][0]["share"] == pytest.approx(1, abs=1e-9)
    worst = why.gaps.sort("gap_s").row(-1, named=True)
    adds = {
        "prefill-first": 0.01 + 0.8,
        "orca": 0.8,
        "stall-free": 480 * 1e-4,
        "alternating": 0.01 + 512 * 1e-4,
    }[policy]
    assert worst[f"{cause}_s"] == pytest.approx(adds)
    base = 0.01 + (33 if policy == "prefill-first" else 32) * 1e-4  # the long prompt's own second token is one more
    assert worst["gap_s"] == pytest.approx(adds + base)
    assert worst["excess_s"] == pytest.approx(adds + base - 0.02)
    story = why.summary["tbt"]["worst"][0]["story"]
    assert "requests 0 and 31 more" in story.replace("request 0", "requests 0")
    assert "prompts of request 32 (" in story
    advice = "token_budget (now 512)" if policy in ("stall-free", "alternating") else "policy stall-free"
    assert advice in why.summary["verdict"]


def test_decode_first_lets_no_prompt_between_decodes() -> None:
    why = explained(affine(scheduler__policy="decode-first"), LONG, above=0.02)
    assert why.gaps.is_empty() and why.summary["tbt"]["causes"] == []
    assert why.summary["verdict"].startswith("None of ")
    assert main_cause(why, "ttft") == "queue_others"  # until the 32 are done
    assert "admits nobody before every decode is done" in why.summary["verdict"]


def test_too_little_memory() -> None:
    """40 blocks of 16 for eight requests that grow to 13 blocks each: they are preempted, and wait to start over."""
    rows = [(0.0, 32, 170)] * 8
    why = explained(affine(engine__num_blocks=40, latency__token=0.001), rows, above=0.1)
    check_sums(why)
    assert why.report.record.preempted > 0
    assert main_cause(why) == "memory"
    assert "engine.num_blocks (now 40)" in why.summary["verdict"]
    told = {one["cause"]: one for one in why.summary["tbt"]["causes"]}
    assert told["recomputation"]["excess_s"] > 0
    assert told["memory"]["share"] + told["recomputation"]["share"] > 0.9
    assert "in the queue, without memory since it was preempted" in why.summary["tbt"]["worst"][0]["story"]
    stories = [one["story"] for one in explain(why.report, above=0.1, worst=1000).summary["tbt"]["worst"]]
    assert any("for others' prompts, computed again after preemptions" in story for story in stories)


def test_starting_over_can_cost_more_than_waiting() -> None:
    """Request 1 loses its block at the last moment: 0 ends an iteration later, and then 1 computes 72 tokens again."""
    scenario = affine(engine__num_blocks=9, engine__watermark=0.0, scheduler__policy="prefill-first")
    why = explained(scenario.with_(latency__token=0.01), [(0.0, 60, 6), (0.0, 60, 14)], above=0.2)
    check_sums(why)
    assert main_cause(why) == "recomputation"
    assert seconds(why.gaps.filter(pl.col("request") == 1))["recomputation"] == pytest.approx(0.01 + 0.01 * 65)


def test_waiting_for_other_stages() -> None:
    """Two stages: a prompt of 1,000 tokens takes 10 s longer in each, and the decode waits for both of them."""
    scenario = affine(deployment__pipeline_parallel=2, scheduler__token_budget=2000)
    rows = [(0.0, 1, 6), (0.0, 7, 1), (1.5, 1000, 1)]
    why = explained(scenario.with_(latency__step=1.0, latency__token=0.01), rows, above=5.0)
    check_sums(why)
    assert main_cause(why) == "pipeline"
    assert seconds(why.gaps) == pytest.approx({"pipeline": 10.0 - 0.01 + 10 - 0.01, "iteration": 2.02}, abs=1.0)
    assert why.gaps["gap_s"].to_list() == [pytest.approx(seconds(why.gaps)["pipeline"] + 2.02)]
    assert "pipeline_parallel, now 2" in why.summary["verdict"]
    assert (
        "for stages busy with other batches (prompts of request 2 (1,000 tokens))"
        in (why.summary["tbt"]["worst"][0]["story"])
    )


def test_many_decodes() -> None:
    scenario = affine(latency__sequence=0.001)
    why = explained(scenario, [(0.0, 4, 30)] * 64, above=0.05)
    assert main_cause(why) == "decode_batch"
    assert why.gaps["main"].unique().to_list() == ["decode_batch"]
    assert seconds(why.gaps, -1)["decode_batch"] == pytest.approx(63 * (0.001 + 0.0001))
    assert "max_sequences, now 128" in why.summary["verdict"]


def test_long_contexts() -> None:
    """32 decodes over 8,000 tokens each, on an A100: 17 GB of KV beside 14 GB of weights."""
    scenario = Scenario.from_toml(ROOFLINE).with_(engine__max_model_tokens=9000, engine__num_blocks=20000)
    why = explained(scenario.with_(scheduler__policy="decode-first"), [(0.0, 8000, 40)] * 32, above=0.025)
    check_sums(why)
    assert main_cause(why) == "decode_context"
    assert why.gaps.height == 32 * 39
    bounds = why.iterations.filter(pl.col("decodes") > 0)["bound"].unique().to_list()
    assert bounds == ["kv_reads"]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"latency__step": 0.08}, "host"),
        ({"latency__link_efficiency": 0.0005, "deployment__tensor_parallel": 4}, "communication"),
        ({}, "iteration"),
    ],
)
def test_what_no_scheduler_can_help(changes: dict[str, Any], cause: str) -> None:
    """A single decode is late for the host, the links, or the weights that it must read."""
    why = explained(Scenario.from_toml(ROOFLINE).with_(**changes), [(0.0, 100, 20)], above=0.005)
    check_sums(why)
    assert main_cause(why) == cause
    assert why.gaps["main"].unique().to_list() == [cause]


def test_first_tokens_wait_for_memory_slots_and_others() -> None:
    """Three queues: 20 blocks for prompts of 16; two slots; a budget that one prompt takes for a second."""
    rows = [(0.0, 200, 50)] * 4
    cases = {
        "queue_memory": affine(engine__num_blocks=20),
        "queue_slots": affine(engine__max_sequences=1),
        "queue_others": affine(scheduler__token_budget=50),
        "own_prefill": affine(latency__token=0.01),
    }
    for cause, scenario in cases.items():
        one = rows if cause != "own_prefill" else [(0.0, 200, 2)]
        why = explained(scenario, one, ttft_above=0.05)
        check_sums(why)
        assert main_cause(why, "ttft") == cause, why.summary["ttft"]["causes"]
    queued = explained(cases["queue_slots"], rows, ttft_above=0.05).ttfts
    scheduled = simulate(cases["queue_slots"], requests=requests(rows)).requests["scheduled_s"]
    assert queued["queue_slots_s"].to_list() == pytest.approx([scheduled[id] for id in queued["request"]])


def test_a_prompt_that_lost_its_chunks() -> None:
    """At 6 s request 0 takes the blocks of 1, of whose 14 tokens 10 are computed, and ends at 9 s; 1 starts over.

    2 is behind 1, and so in want of memory too. Tokens take next to nothing. Where 1 had two tokens of three of an
    iteration without decodes, that was two thirds its own.
    """
    scenario = affine(
        scheduler__token_budget=3,
        engine__num_blocks=6,
        engine__block_tokens=4,
        engine__watermark=0.0,
        latency__step=1.0,
        latency__token=2.0**-20,
    )
    why = explained(scenario, [(0.0, 4, 8), (0.0, 14, 1), (6.0, 1, 1)], ttft_above=5.0)
    check_sums(why)
    told = {row["request"]: row for row in why.ttfts.iter_rows(named=True)}
    assert told[1]["recomputation_s"] == pytest.approx(2 / 3 + 10 * 2**-20)
    assert told[1]["own_prefill_s"] == pytest.approx(4 + 2 / 3 + 14 * 2**-20)
    assert told[1]["queue_memory_s"] == pytest.approx(3.0, abs=1e-4)  # from 6 s to 9 s
    assert told[2]["queue_memory_s"] == pytest.approx(3.0, abs=1e-4)
    assert told[2]["queue_others_s"] == pytest.approx(4.0, abs=1e-4)  # then it has the last token of an iteration
    assert told[2]["own_prefill_s"] == pytest.approx(1 / 3, abs=1e-4)


def test_interleaving() -> None:
    """A prompt of four chunks beside 32 decodes: it adds 2,000 × 0.1 ms itself, the rest is the others'."""
    scenario = affine(scheduler__token_budget=532, latency__sequence=0.01)
    why = explained(scenario, [*((0.0, 1, 200) for _ in range(32)), (5.0, 2000, 2)], ttft_above=1.0)
    late = why.ttfts.filter(pl.col("request") == 32)
    assert seconds(late)["own_prefill"] == pytest.approx(4 * 0.01 + 0.2)
    assert seconds(late)["interleaving"] == pytest.approx(4 * (0.01 + 32 * (0.01 + 1e-4)))
    assert late["main"].to_list() == ["interleaving"]


def test_warm_up_is_left_out() -> None:
    report = simulate(affine(metrics__warmup=2.0, scheduler__policy="prefill-first"))
    why = explain(report, above=0.012)
    gaps, counts = np.frombuffer(report.record.gaps), np.frombuffer(report.record.gap_counts, dtype=np.int32)
    assert why.gaps.height == counts[gaps > 0.012].sum() < explain(simulate(affine()), above=0.012).summary["tbt"]["n"]
    assert why.summary["ttft"]["n"] == report.summary["ttft_s"]["n"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_cause_has_a_name_and_a_dial_that_exists(policy: str) -> None:
    """Advice names keys of the scenario file, and never the policy that is in use."""
    planned = plan(affine(scheduler__policy=policy))
    for causes, first_token in ((GAP_CAUSES, False), (TTFT_CAUSES, True)):
        for cause in causes:
            advice = stories.dial(cause, planned, first_token=first_token)
            assert stories.NAMES[cause] and advice
            assert f"policy {policy}" not in advice
            for key in re.findall(r"[a-z]+\.[a-z_]+", advice):
                table, name = key.split(".")
                assert name in Scenario.model_json_schema()["$defs"][f"{table.capitalize()}Table"]["properties"], key


# Limits


def test_limits_of_the_scenario() -> None:
    report = simulate(affine(slo__tbt_p50=0.001, slo__tbt_p99=0.02, slo__ttft=0.1))
    why = explain(report)
    told = why.summary
    assert (told["tbt"]["limit_s"], told["tbt"]["limit_from"]) == (0.02, "slo.tbt_p99")
    assert (told["ttft"]["limit_s"], told["ttft"]["limit_from"]) == (0.1, "slo.ttft")
    assert explain(report, above=0.03).summary["tbt"]["limit_from"] == "given"


@pytest.mark.parametrize("n", [1, 60, 250])
def test_without_limits_the_longest_hundredth_is_late(n: int) -> None:
    why = explain(simulate(affine(workload__requests=n)))
    check_sums(why)
    gaps = np.sort(np.repeat(np.frombuffer(why.report.record.gaps), np.frombuffer(why.report.record.gap_counts, "i4")))
    late = -(-len(gaps) // 100)
    assert why.summary["tbt"]["limit_from"] == "the longest 1 %"
    if gaps[-late] > gaps[-late - 1]:
        assert why.summary["tbt"]["late"] == late
    assert why.summary["ttft"]["late"] == -(-n // 100)
    assert sorted(why.gaps["gap_s"].to_list()) == gaps[gaps > why.summary["tbt"]["limit_s"]].tolist()


def test_nothing_to_be_late() -> None:
    why = explained(affine(), [(0.0, 10, 1)])
    assert why.summary["tbt"]["limit_s"] is None and why.gaps.is_empty()
    assert why.summary["verdict"].startswith("There are no gaps between tokens.")
    nobody = explained(affine(engine__num_blocks=1), [(0.0, 100, 10)])
    assert nobody.ttfts.is_empty() and nobody.iterations.is_empty()
    json.dumps(nobody.summary, allow_nan=False)


# What bounds an iteration


def test_iterations_add_up_to_the_run() -> None:
    """MFU and MBU are the run's, over busy time; the parts are the time."""
    report = simulate(
        Scenario.from_toml(ROOFLINE).with_(deployment__tensor_parallel=2, deployment__pipeline_parallel=2)
    )
    why = explain(report)
    frame, summary = why.iterations, report.summary
    assert frame.select(report.steps.columns).equals(report.steps)
    busy = report.record.busy
    parts = frame.select("compute_s", "weight_reads_s", "kv_reads_s", "activations_s", "communication_s", "host_s")
    hops = parts.to_numpy().sum() - busy
    assert 0 < hops < 0.2 * busy
    assert why.summary["iterations"]["mfu"] * busy / (2 * summary["duration_s"]) == pytest.approx(summary["mfu"])
    assert why.summary["iterations"]["mbu"] * busy / (2 * summary["duration_s"]) == pytest.approx(summary["mbu"])
    assert sum(one["iterations"] for one in why.summary["iterations"]["bounds"].values()) == frame.height
    assert sum(one["time_share"] for one in why.summary["iterations"]["bounds"].values()) == pytest.approx(1)
    decodes = frame.filter((pl.col("prefill_tokens") == 0) & (pl.col("decodes") == 1))
    assert decodes["bound"].unique().to_list() == ["weight_reads"]
    assert frame.filter(pl.col("prefill_tokens") > 400)["bound"].unique().to_list() == ["compute"]
    assert frame["mfu"].is_between(0, 1).all() and frame["mbu"].is_between(0, 1).all()


def test_a_data_sheet_tells_what_bounds_other_models() -> None:
    told = {"kind": "affine", "step": 0.02, "token": 0.0001}
    scenario = Scenario.from_toml(ROOFLINE.replace('kind = "roofline"', 'kind = "affine"\nstep = 0.02'))
    why = explain(simulate(scenario))
    assert "data-sheet" in why.summary["iterations"]["from"]
    assert why.iterations["bound"].null_count() == 0 and told["step"] == 0.02
    nobody = explain(simulate(affine())).summary["iterations"]
    assert nobody["bounds"] == {} and nobody["mfu"] is None and nobody["from"] is None


# Measured runs


class Machine(Affine):
    """An engine that takes twice what the formula says, and some time off in its 30th iteration."""

    def __init__(self, hiccup: float = 3.0) -> None:
        super().__init__(AffineTable(kind="affine", step=0.02, token=0.0002))
        self.count = 0
        self.hiccup = hiccup

    def execute(self, batch: Batch) -> Step:
        self.count += 1
        seconds = super().execute(batch).seconds[0] * (1 + 0.01 * (self.count % 7))
        return Step((seconds + (self.hiccup if self.count == 30 else 0.0),))


def engine(hiccup: float = 3.0) -> Engine:
    return lambda _: lambda: Machine(hiccup)


def test_what_a_machine_took_beyond_the_model() -> None:
    """The hiccup is nobody's; the rest is divided as the model has it, at the machine's pace."""
    report = simulate(affine(), engine=engine())
    why = explain(report, above=0.15)
    check_sums(why)
    assert main_cause(why) == "unmodelled"
    assert why.gaps["gap_s"].max() == pytest.approx(why.gaps["unmodelled_s"].max(), rel=0.1)
    assert "longer than its latency model says" in why.summary["verdict"]
    assert any("unmodelled" in note for note in why.summary["notes"])
    calm = explain(simulate(affine(), engine=engine(0.0)), above=0.05)
    check_sums(calm)
    assert calm.seen.scale == pytest.approx(2.06, abs=0.01)
    assert main_cause(calm) == "prefill_beside"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_measured_files_are_replayed(tmp_path: Path, policy: str) -> None:
    report = simulate(
        affine(scheduler__policy=policy, engine__num_blocks=90, engine__max_model_tokens=500), engine=engine()
    )
    output.write(tmp_path, output.of_run(report))
    why = explain(tmp_path, above=0.1)
    assert why.seen.measured
    check_sums(why)
    assert why.summary["tbt"] == explain(report, above=0.1).summary["tbt"]


def test_a_measured_run_that_was_cut_off(tmp_path: Path) -> None:
    report = simulate(affine(engine__time_limit=4.0), engine=engine())
    assert report.summary["unfinished"]
    output.write(tmp_path, output.of_run(report))
    check_sums(explain(tmp_path, above=0.1))


def test_a_report_without_steps_cannot_be_replayed() -> None:
    with pytest.raises(BadInput, match="keep_steps"):
        explain(simulate(affine(), engine=engine(), keep_steps=False))


# Folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lengths.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n"
        + "".join(f"{i / 20},{300 + i},{i % 9 + 2}\n" for i in range(60))
    )
    trace = {"kind": "trace", "path": str(tmp_path / "lengths.csv")}
    scenario = Scenario.from_toml(AFFINE)
    changes = {"workload__arrivals": trace, "workload__lengths": trace, "slo__tbt_p99": 0.015, "workload__requests": 60}
    report = simulate(scenario.with_(**changes))
    output.write(tmp_path / "run", output.of_run(report))
    return tmp_path / "run"


Spoil = Callable[[Path], None]


def rewritten(name: str, change: Callable[[pl.DataFrame], pl.DataFrame]) -> Spoil:
    return lambda folder: change(pl.read_parquet(folder / name)).write_parquet(folder / name)


def replaced(name: str, old: str, new: str) -> Spoil:
    def spoil(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return spoil


SPOILT: dict[str, tuple[Spoil, str]] = {
    "no folder": (lambda folder: shutil.rmtree(folder), "no such folder"),
    "no steps": (lambda folder: (folder / "steps.parquet").unlink(), "lacks steps.parquet"),
    "nothing": (lambda folder: [path.unlink() for path in folder.iterdir()] and None, "lacks requests.parquet, steps"),
    "not parquet": (lambda folder: (folder / "steps.parquet").write_text("x") and None, "not a Parquet file"),
    "not JSON": (lambda folder: (folder / "summary.json").write_text("{") and None, "not JSON"),
    "no summary": (lambda folder: (folder / "summary.json").write_text("[]") and None, "not a run's summary"),
    "not TOML": (lambda folder: (folder / "scenario.toml").write_text("[") and None, "not TOML"),
    "another budget": (replaced("scenario.toml", "token_budget = 512", "token_budget = 100"), "does not follow"),
    "another policy": (replaced("scenario.toml", '"stall-free"', '"orca"'), "steps.parquet: does not follow from"),
    "a slower machine": (replaced("scenario.toml", "step = 0.01", "step = 0.011"), "iteration 0 (end_s is"),
    "another summary": (replaced("summary.json", '"completed": 60', '"completed": 59'), "completed is 59, and 60"),
    "another trace": (
        lambda folder: replaced("lengths.csv", "0.05,301,3", "0.05,302,3")(folder.parent),
        "steps.parquet: does not follow from scenario.toml from iteration",
    ),
    "no trace": (lambda folder: (folder.parent / "lengths.csv").unlink(), "lengths.csv"),
    "fewer steps": (rewritten("steps.parquet", lambda frame: frame.head(10)), "10 rows, and"),
    "a column less": (rewritten("steps.parquet", lambda frame: frame.drop("chunks")), "lacks the column chunks"),
    "other types": (
        rewritten("steps.parquet", lambda frame: frame.with_columns(pl.col("chunks").cast(pl.String))),
        "column chunks is of String",
    ),
    "other requests": (
        rewritten("requests.parquet", lambda frame: frame.with_columns(pl.col("prompt_tokens") + 1)),
        "requests.parquet: does not follow from scenario.toml from request 0 (prompt_tokens is 301, and 300",
    ),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_files_that_do_not_belong_together(fault: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, said = SPOILT[fault]
    spoil(folder)
    assert status(["explain", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("servecast: error: ") and err.count("\n") == 1
    assert said in err


def test_a_measured_folder_of_a_machine_that_is_not_this(tmp_path: Path) -> None:
    report = simulate(affine(), engine=engine())
    output.write(tmp_path, output.of_run(report))
    rewritten("steps.parquet", lambda frame: frame.with_columns(pl.col("end_s") + 0.5))(tmp_path)
    with pytest.raises(BadInput, match="does not follow"):
        explain(tmp_path)
    rewritten("steps.parquet", lambda frame: frame.drop("end_s"))(tmp_path)
    with pytest.raises(BadInput, match="end_s"):
        explain(tmp_path)


def test_a_comparison_names_its_runs(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(AFFINE)
    assert (
        status(["compare", str(tmp_path / "s.toml"), "--policies", "orca,stall-free", "--out", str(tmp_path / "c")])
        == 0
    )
    with pytest.raises(BadInput, match="runs are in orca, stall-free"):
        explain(tmp_path / "c")
    assert explain(tmp_path / "c/orca").summary["policy"] == "orca"


def test_a_profile_is_found_again(tmp_path: Path) -> None:
    """The scenario as run names its profile by its full path."""
    (tmp_path / "own.toml").write_text(
        'name = "own"\nmodel = "mistral-7b"\ndevice = "a100-80gb-pcie"\n'
        "[coefficients]\nstep = 0.01\ncontext = 1e-8\ntokens = { knots = [1, 512], seconds = [0.001, 0.05] }\n"
        "[validity]\ntokens = 512\nsequences = 64\ncontext_tokens = 4096\nprefill_context_tokens = 4096\n"
        "[errors]\nrows = 1\nheld_out_median = 0.0\nheld_out_p90 = 0.0\nheld_out_bias = 0.0\n"
    )
    (tmp_path / "s.toml").write_text(ROOFLINE.replace('kind = "roofline"', 'kind = "profile"\nname = "own.toml"'))
    assert status(["run", str(tmp_path / "s.toml"), "--out", str(tmp_path / "run"), "--json"]) == 0
    why = explain(tmp_path / "run", above=0.03)
    check_sums(why)
    assert main_cause(why) == "prefill_beside"
    assert set(why.iterations["bound"].unique()) <= {"compute", "weight_reads", "kv_reads"}


# The command


def test_the_command_prints_one_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["explain", str(folder), "--json", "--worst", "2"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert err == ""
    assert told.keys() == {"name", "policy", "verdict", "tbt", "ttft", "iterations", "notes"}
    assert told["tbt"]["limit_from"] == "slo.tbt_p99" and len(told["tbt"]["worst"]) == 2
    assert sum(one["share"] for one in told["tbt"]["causes"]) == pytest.approx(1, abs=1e-9)
    assert told["tbt"]["worst"][0]["seconds"] >= told["tbt"]["worst"][1]["seconds"]


def test_the_command_reads_well(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["explain", str(folder), "--above", "0.02", "--out", str(tmp_path / "why")]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "by hand"
    assert (
        "gaps between tokens are above 20.0 ms (given), and 100.0% of the time beyond it is prompts"
        in lines[1] + lines[2]
    )
    assert "first tokens above 20.0 ms" in out
    assert "of the excess" in out and "· request" in out
    assert "files are in" in err
    kept = json.loads((tmp_path / "why/explanation.json").read_text())
    gaps = pl.read_parquet(tmp_path / "why/gaps.parquet")
    assert gaps.height == kept["tbt"]["late"] > 0
    assert pl.read_parquet(tmp_path / "why/iterations.parquet").height == kept["iterations"]["n"]
    assert pl.read_parquet(tmp_path / "why/ttfts.parquet").height == kept["ttft"]["late"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--above", "-1"), "--above: -1 must be a number of seconds, at least 0"),
        (("--above", "nan"), "--above: nan must be"),
        (("--ttft-above", "inf"), "--ttft-above: inf must be"),
        (("--worst", "-1"), "--worst: -1 must be from 0 to 1000"),
        (("--worst", "2.5"), "not a whole number"),
    ],
)
def test_the_command_refuses(
    folder: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["explain", str(folder), *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_watching_changes_nothing() -> None:
    """The scheduler that watches decides as the one that does not, under pressure and with every policy."""
    for policy in POLICIES:
        scenario = affine(scheduler__policy=policy, engine__num_blocks=60, engine__max_model_tokens=440)
        plain = simulate(scenario.with_(deployment__replicas=2))
        seen = Seen(0.0, 0.0)

        def scheduler(limits: Limits, seen: Seen = seen, plain: Report = plain) -> Watched:
            return Watched(limits, seen, plain.plan.executor(), None)

        watched = simulate(plain.plan.scenario, scheduler=scheduler)
        assert watched.summary == plain.summary
        assert watched.steps.equals(plain.steps) and watched.requests.equals(plain.requests)
        assert len(seen.iterations) == 2 and sum(map(len, seen.iterations)) == plain.record.iterations


def test_a_chunk_is_not_a_batch_without_it() -> None:
    """By hand: 4 decodes over 40 tokens, chunks of 10 and 20 tokens."""
    costs = Costs(Affine(AffineTable(kind="affine", step=1.0, token=0.1, context=0.01), 2))
    batch = Batch()
    batch.decodes, batch.context = 4, 40
    chunks = [Chunk(Request(0, 0.0, 10, 2), 0, 10), Chunk(Request(1, 0.0, 90, 2), 0, 20)]
    batch.chunks, batch.prefill_tokens, batch.attention = chunks, 30, 10 * 5 + 20 * 10
    assert costs.of(batch) == pytest.approx(2 * (1 + 3.4 + 0.4))
    assert costs.without(batch, chunks[1]) == pytest.approx(2 * (1 + 1.4 + 0.4))
    assert costs.decodes(4, 40) == pytest.approx(2 * (1 + 0.4 + 0.4))
    assert costs.decodes(0, 0) == 0
