"""Queueing theory: waits of queues with known answers, Little's law, and where the stages' time goes.

With `max_sequences` = 1 a replica is a single server that serves one request at a time in order of arrival.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from math import sqrt
from typing import Any

import naive
import numpy as np
import numpy.typing as npt
import pytest
from reference import Rows, run, stage_seconds

from sim.request import Batch, Request
from sim.scheduler import Scheduler

Ints = npt.NDArray[np.int64]
REPLICATIONS = 16
STUDENT = 4.073  # the 99.95 % quantile of Student's t with 15 degrees of freedom: 99.9 % two-sided
FIRST = 300  # requests left out while the queue settles


def one_server(policy: str = "prefill-first", **latency: Any) -> naive.Settings:
    longest = 10**6
    return naive.Settings(
        policy,
        longest,
        max_sequences=1,
        max_model_tokens=longest,
        max_batch_tokens=longest,
        token_budget=longest,
        **latency,
    )


def waits(
    settings: naive.Settings, load: float, lengths: Callable[[np.random.Generator, int], tuple[Ints, Ints]], n: int
) -> list[float]:
    """Mean waits of independent replications: Poisson arrivals at `load` per second, and requests of these lengths."""
    means = []
    for seed in range(REPLICATIONS):
        rng = np.random.default_rng([seed, 7])
        arrivals = np.cumsum(rng.exponential(1 / load, n))
        prompts, outputs = lengths(rng, n)
        record = run(settings, list(zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True))).record
        delay = np.array(record.scheduled) - np.array(record.arrival)
        means.append(float(delay[FIRST:].mean()))
    return means


def interval(means: list[float]) -> tuple[float, float]:
    """The 99.9 % confidence interval of the mean, which has to be narrow to say anything."""
    middle, half = float(np.mean(means)), STUDENT * float(np.std(means, ddof=1)) / sqrt(len(means))
    assert half < 0.15 * middle
    return middle - half, middle + half


def test_the_mean_wait_of_an_m_d_1_queue() -> None:
    """Every request takes one iteration of 1 s: ρ / (2 (1 − ρ)) seconds of wait (Pollaczek-Khinchine)."""
    load = 0.6
    ones = np.ones(2500, dtype=np.int64)
    low, high = interval(waits(one_server(step=1.0), load, lambda _rng, _n: (ones, ones), 2500))
    assert low < load / (2 * (1 - load)) < high


def test_the_mean_wait_of_an_m_m_1_queue() -> None:
    """Prompts of geometric lengths around 1,000 tokens of 1 ms are all but exponential: ρ / (1 − ρ) seconds of wait."""
    load = 0.5

    def lengths(rng: np.random.Generator, n: int) -> tuple[Ints, Ints]:
        return rng.geometric(1 / 1000, n), np.ones(n, dtype=np.int64)

    low, high = interval(waits(one_server(token=0.001), load, lengths, 3500))
    assert low < load / (1 - load) < high


def test_the_mean_wait_of_an_m_g_1_queue_of_decodes() -> None:
    """Outputs of geometric lengths around 5, an iteration of 0.2 s each: λ E[S²] / (2 (1 − ρ)) seconds of wait."""
    load, q, step = 0.5, 1 / 5, 0.2

    def lengths(rng: np.random.Generator, n: int) -> tuple[Ints, Ints]:
        return np.ones(n, dtype=np.int64), rng.geometric(q, n)

    low, high = interval(waits(one_server("stall-free", step=step), load, lengths, 2500))
    second_moment = (2 - q) / q**2 * step**2
    assert low < load * second_moment / (2 * (1 - load * step / q)) < high


@pytest.mark.parametrize("policy", naive.POLICIES)
def test_lindleys_recursion(policy: str) -> None:
    """One at a time, every policy serves each request as soon as it is there and the one before it is done."""
    rng = random.Random(3)
    requests, now = [], 0.0
    for _ in range(200):
        now += rng.choice([0.0, 0.5, 2.0, 7.0])
        requests.append((now, rng.randint(1, 50), rng.randint(1, 6)))
    settings = one_server(policy, step=0.5, token=0.0625)
    settings.block_tokens, settings.max_model_tokens = 1, 64  # what a reservation is made for
    outcomes = run(settings, requests).outcomes
    free = 0.0
    for outcome in outcomes:
        begin = max(outcome.arrival, free)
        free = begin + 0.5 * outcome.output + 0.0625 * (outcome.prompt + outcome.output - 1)
        assert (outcome.scheduled, outcome.finished) == (begin, free)


class Census:
    """The number in the system over time, from what the schedulers hold: waiting, or admitted and not finished."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.here: dict[Scheduler, int] = {}
        self.area = self.now = 0.0
        add, commit = Scheduler.add, Scheduler.commit

        def counted_add(scheduler: Scheduler, request: Request) -> None:
            self.pass_to(request.arrival)
            add(scheduler, request)
            self.here[scheduler] = len(scheduler.waiting) + scheduler.held

        def counted_commit(scheduler: Scheduler, batch: Batch, now: float) -> list[Request]:
            self.pass_to(now)
            finished = commit(scheduler, batch, now)
            self.here[scheduler] = len(scheduler.waiting) + scheduler.held
            return finished

        patch.setattr(Scheduler, "add", counted_add)
        patch.setattr(Scheduler, "commit", counted_commit)

    def pass_to(self, now: float) -> None:
        assert now >= self.now  # nothing happens in the past, on any replica
        self.area += sum(self.here.values()) * (now - self.now)
        self.now = now


def crowd(seed: int, n: int = 120) -> Rows:
    rng = random.Random(seed)
    requests, now = [], 1.5
    for _ in range(n):
        now += rng.expovariate(1.0)
        requests.append((now, rng.randint(1, 60), rng.randint(1, 40)))
    return requests


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"num_blocks": 1000},
    "one at a time": {"num_blocks": 1000, "max_sequences": 1},
    "preempting": {"num_blocks": 60},
    "pipeline": {"num_blocks": 1000, "stages": 3, "hop": 0.01},
    "preempting pipeline": {"num_blocks": 60, "stages": 4, "hop": 0.01},
    "closed": {"num_blocks": 100, "concurrency": 7, "think": 0.25},
}


def kind_of(kind: str, policy: str) -> naive.Settings:
    return naive.Settings(
        policy,
        **{"block_tokens": 2, "max_model_tokens": 100, "max_batch_tokens": 100, "token_budget": 24, **KINDS[kind]},
        step=0.05,
        token=0.003,
        context=0.0001,
        sequence=0.001,
    )


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", naive.POLICIES)
def test_littles_law(policy: str, kind: str, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """L = λ W on every run: the time-average number in the system is throughput times the mean time in it."""
    census = Census(monkeypatch)
    result = run(kind_of(kind, policy), crowd(5), replicas=replicas, router="least-loaded")
    record = result.record
    assert record.done == record.offered == 120
    first = record.arrival[0]
    duration = record.last_commit - first
    times = np.array(record.finish) - np.array(record.arrival)
    assert times.min() > 0
    assert census.area / duration == pytest.approx(len(times) / duration * times.mean(), rel=1e-9)
    assert sum(census.here.values()) == 0
    if kind.startswith("preempting") and replicas == 1 and policy in ("prefill-first", "stall-free", "alternating"):
        assert record.preempted > 0


@pytest.mark.parametrize("limit", [None, 37.123])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", naive.POLICIES)
def test_the_stages_are_busy_for_as_long_as_their_batches_take(policy: str, kind: str, limit: float | None) -> None:
    """Busy time, recounted batch by batch and stage by stage; a run that is cut off counts until its last commit."""
    settings = kind_of(kind, policy)
    settings.time_limit = limit
    result = run(settings, crowd(6), replicas=2)
    expected = sum(stage_seconds(settings, spy, result.record.last_commit) for spy in result.spies)
    assert result.record.busy == pytest.approx(expected, rel=1e-9)
    assert 0 < expected <= 2 * settings.stages * result.record.last_commit


@pytest.mark.parametrize("policy", naive.POLICIES)
def test_stages_work_on_one_batch_at_a_time(policy: str) -> None:
    """Batches enter the first stage one after the other, leave the last one in that order, and overlap in between."""
    settings = kind_of("pipeline", policy)
    result = run(settings, crowd(7))
    rows = result.rows[0]
    seconds = result.spies[0].seconds
    assert all(row.start + spent <= after.start for (row, after), spent in zip(pairwise(rows), seconds, strict=False))
    assert all(row.end < after.end for row, after in pairwise(rows))
    assert any(after.start < row.end for row, after in pairwise(rows))
    flying = [sum(row.start <= other.start < row.end for row in rows) for other in rows]
    assert max(flying) == settings.stages
