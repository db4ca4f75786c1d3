"""The simulator against the naive reference: random workloads, every policy, the same doubles to the last bit."""

from __future__ import annotations

import random
from typing import Any

import naive
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from reference import Rows, compare, run

STAGES = (1, 2, 4)
MEMORY = ("ample", "scarce")
LOADS = ("open", "limited", "closed", "thinking")
SEEDS = range(5)
PAGED = ("prefill-first", "stall-free", "alternating")


def random_case(policy: str, stages: int, memory: str, load: str, seed: int) -> tuple[naive.Settings, Rows]:
    """A replica and its requests; half of the cases have dyadic times, so that many instants coincide."""
    rng = random.Random(f"{policy} {stages} {memory} {load} {seed}")
    block, longest = rng.choice([1, 2, 4, 16]), rng.choice([32, 64, 200])
    full = -(-longest // block)
    settings = naive.Settings(
        policy,
        50 * full if memory == "ample" else rng.randint(full, 2 * full + full // 2),
        block_tokens=block,
        watermark=rng.choice([0.0, 0.01, 0.1, 0.3]),
        max_sequences=rng.choice([1, 2, 4, 8, 128, 128]),
        max_model_tokens=longest,
        max_batch_tokens=longest * rng.choice([1, 2, 4]),
        token_budget=rng.choice([1, 3, 8, 16, 64]),
        stages=stages,
        hop=rng.choice([0.0, 0.25, 0.01]) if stages > 1 else 0.0,
        **random_latency(rng),
    )
    if load == "limited":
        settings.time_limit = rng.choice([3.0, 10.0, rng.random() * 30])
    elif load in ("closed", "thinking"):
        settings.concurrency = rng.randint(1, 8)
        settings.think = 0.0 if load == "closed" else rng.choice([1.0, rng.random()])
    requests = random_requests(rng, longest)
    settings.ahead = stages > 1 and rng.random() < 0.5
    if rng.random() < 0.4:
        settings.batch_wait_iterations, settings.batch_wait_ratio = rng.randint(1, 6), rng.choice([0.3, 0.9, 1.0])
    return settings, requests


def random_latency(rng: random.Random) -> dict[str, float]:
    if rng.random() < 0.5:
        coefficients = [1.0, rng.choice([0.0, 0.25, 0.125]), rng.choice([0.0, 0.125]), rng.choice([0.0, 0.03125])]
        coefficients.append(rng.choice([0.0, 0.0625]))
    else:
        coefficients = [rng.random() * 0.1 for _ in range(5)]
    return dict(zip(("step", "token", "sequence", "context", "prefill_attention"), coefficients, strict=True))


def random_requests(rng: random.Random, longest: int) -> Rows:
    requests, now = [], 0.0
    for _ in range(rng.randint(1, 30)):
        now += rng.choice([0, 0, 1.0, 0.5, rng.random() * 3, rng.expovariate(1)])
        prompt = rng.randint(1, longest - 1) if rng.random() < 0.5 else rng.randint(1, max(1, longest // 8))
        output = rng.randint(1, longest - prompt) if rng.random() < 0.97 else rng.randint(1, longest)
        requests.append((now, prompt, output))
    return requests


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("policy", naive.POLICIES)
def test_random_workloads(policy: str, stages: int, memory: str, load: str, seed: int) -> None:
    """Every fact of the run is the same."""
    compare(*random_case(policy, stages, memory, load, seed))


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("policy", PAGED)
def test_the_random_workloads_preempt(policy: str, stages: int) -> None:
    """Scarce memory is scarce enough to mean something: the comparison above sees many preemptions."""
    runs = [run(*random_case(policy, stages, "scarce", load, seed)) for load in LOADS for seed in SEEDS]
    assert sum(result.record.preempted for result in runs) >= 10


def test_the_random_workloads_refuse_and_cut_off() -> None:
    """They reach both reasons of refusal, and time limits that leave requests unfinished, waiting and in flight."""
    cases = [random_case(p, 2, "scarce", load, s) for p in naive.POLICIES for load in LOADS for s in SEEDS]
    outcomes = [outcome for case in cases for outcome in run(*case).outcomes]
    assert any(outcome.reason == "too_long" for outcome in outcomes)
    unfinished = [outcome for outcome in outcomes if outcome.status == "unfinished"]
    assert any(outcome.scheduled is None for outcome in unfinished)
    assert any(outcome.token_times for outcome in unfinished)


@pytest.mark.parametrize("policy", naive.POLICIES)
def test_a_long_crowded_run(policy: str) -> None:
    """Hundreds of requests at a batch size where groups of decodes live long and merge often."""
    rng = random.Random(policy)
    requests, now = [], 0.0
    for _ in range(250):
        now += rng.expovariate(6.0)
        requests.append((now, rng.randint(1, 700), rng.randint(1, 120)))
    settings = naive.Settings(
        policy, 2600, max_model_tokens=1024, stages=3, hop=0.001, step=0.02, token=1e-4, context=1e-7, sequence=1e-5
    )
    result = compare(settings, requests)
    assert max(row.decodes for row in result.rows[0]) > 15


@pytest.mark.parametrize("policy", naive.POLICIES)
def test_replicas_do_not_touch_each_other(policy: str) -> None:
    """Three replicas in turn are three runs of every third request."""
    settings, requests = random_case(policy, 2, "scarce", "open", 1)
    requests = [
        (arrival, prompt, min(output, settings.max_model_tokens - prompt)) for arrival, prompt, output in requests
    ]
    result = run(settings, requests, replicas=3)
    for replica in range(3):
        outcomes, rows = naive.simulate(settings, requests[replica::3])
        assert all(outcome.reason is None for outcome in outcomes)
        for outcome in outcomes:
            outcome.id = 3 * outcome.id + replica
        assert result.outcomes[replica::3] == outcomes
        for row in rows:
            row.chunks = [(3 * id + replica, start, tokens) for id, start, tokens in row.chunks]
            row.decode_ids = [3 * id + replica for id in row.decode_ids]
        assert result.rows[replica] == rows


@st.composite
def cases(draw: st.DrawFn) -> tuple[naive.Settings, Rows]:
    """Small replicas with little memory, and requests at few instants: what shrinks well."""
    block, longest = draw(st.integers(1, 5)), draw(st.integers(4, 24))
    full = -(-longest // block)
    settings: dict[str, Any] = {
        "policy": draw(st.sampled_from(naive.POLICIES)),
        "num_blocks": draw(st.integers(max(1, full - 2), 3 * full)),
        "block_tokens": block,
        "watermark": draw(st.sampled_from([0.0, 0.2, 0.5])),
        "max_sequences": draw(st.integers(1, 6)),
        "max_model_tokens": longest,
        "max_batch_tokens": longest + draw(st.integers(0, 16)),
        "token_budget": draw(st.integers(1, 12)),
        "batch_wait_iterations": draw(st.sampled_from([0, 0, 1, 3])),
        "batch_wait_ratio": draw(st.sampled_from([0.5, 1.0])),
        "stages": draw(st.integers(1, 5)),
        "ahead": draw(st.booleans()),
        "hop": draw(st.sampled_from([0.0, 0.5, 0.1])),
        "step": draw(st.sampled_from([1.0, 0.1])),
        "token": draw(st.sampled_from([0.0, 0.5, 0.01])),
        "context": draw(st.sampled_from([0.0, 0.25, 0.003])),
        "time_limit": draw(st.none() | st.sampled_from([0.5, 1.0, 4.0, 9.7])),
        "concurrency": draw(st.none() | st.integers(1, 4)),
        "think": draw(st.sampled_from([0.0, 1.0, 0.3])),
    }
    request = st.tuples(st.sampled_from([0.0, 1.0, 2.0, 2.5, 4.1]), st.integers(1, longest), st.integers(1, longest))
    rows = draw(st.lists(request, min_size=1, max_size=12))
    return naive.Settings(**settings), sorted(rows, key=lambda row: row[0])


@profile(max_examples=400, deadline=None, derandomize=True)
@given(cases())
def test_any_small_workload(case: tuple[naive.Settings, Rows]) -> None:
    """Whatever the replica and the requests, every fact of the run is the same."""
    compare(*case)
