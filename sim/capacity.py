"""Capacity: the highest arrival rate at which a deployment still meets its SLO.

A search brackets the rate and bisects it, on the same requests for every policy and rate (gaps are drawn once and
scaled). A trial that can no longer pass is stopped. Searches on other seeds give an interval: how far another sample of
the same workload moves the answer.

Where rates fail all the way down, the requests are run one at a time. Company never makes a request faster, under any
policy and latency model here: it adds work to the iterations of a request, and waits before them. So what fails alone
by more than LENIENCE fails at every rate, and the search ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.affine import AffineTable
from sim.errors import BadInput
from sim.hopeless import Alone, Hopeless
from sim.parallel import each
from sim.policies import COMPARED
from sim.scenario import Scenario
from sim.simulate import plan, simulate, workload
from sim.workload import Workload, mean_rate

if TYPE_CHECKING:
    import polars as pl

FARTHEST = 1e6  # how far from the first rate a search goes before it gives up
FAILED = 3  # trials, and none passed: then it is asked whether any can
LENIENCE = 1.01  # chunks cut elsewhere read less KV: company may save a request that, a few thousandths of its TTFT
RATED = ("poisson", "gamma", "constant", "trace")  # arrivals that have a rate
UNSCALED = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run at one rate. `values` are of the keys of [slo]; empty where the run was stopped as hopeless.

    `attainment` is the share of requests that met their limits per request, `goodput` those per second; None where
    there are no such limits, or the run was stopped.
    """

    rate: float
    met: bool
    limited_by: str | None = None
    stopped: bool = False
    values: dict[str, float | None] = field(default_factory=dict)
    attainment: float | None = None
    goodput: float | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """One search on one seed: the highest passing rate (0: none passed) and its trials in order.

    `alone` is the key of [slo] that each request misses alone, so that no rate was left to try.
    """

    policy: str
    seed: int
    rate: float
    limited_by: str | None
    trials: tuple[Trial, ...]
    alone: str | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of one policy: `rate` in requests/s for all replicas together; `interval` over seeds, None for one."""

    policy: str
    rate: float
    interval: tuple[float, float] | None
    limited_by: str | None
    trials: tuple[Trial, ...]
    seeds: dict[int, float]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self) | {"seeds": {str(seed): rate for seed, rate in self.seeds.items()}}


class Capacities(list[Capacity]):
    """The capacity of each policy; a table in a notebook."""

    @property
    def frame(self) -> pl.DataFrame:
        """One row per policy."""
        import polars as pl

        columns = ("policy", "rate", "low", "high", "limited_by")
        rows = [(one.policy, one.rate, *(one.interval or (None, None)), one.limited_by) for one in self]
        return pl.DataFrame(rows, schema=columns, orient="row", infer_schema_length=None)

    def _repr_html_(self) -> str:
        from sim import tables

        found = [one.to_dict() for one in self]
        notes = [*dict.fromkeys(note for one in self for note in one.notes)]
        return tables.html("Capacity", [tables.capacities(found)], tables.of_capacity(found), notes)


def capacity(
    scenario: Scenario,
    policies: Sequence[str] = COMPARED,
    *,
    tolerance: float = 0.01,
    seeds: int = 5,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Capacities:
    """The capacity of each policy. `progress(done, of)` counts searches.

    BadInput where there is no [slo] or the arrivals have no rate.
    """
    check(scenario)
    for policy in policies:
        plan(scenario.for_policy(policy))
    total, done = len(policies) * seeds, 0
    firsts: dict[str, Search] = {}
    for search in _searches(scenario, [(policy, 0, None) for policy in policies], tolerance, workers):
        firsts[search.policy] = search
        done += 1
        if progress:
            progress(done, total)
    others: dict[str, list[Search]] = {policy: [] for policy in policies}
    near = {policy: first.rate if first.limited_by else None for policy, first in firsts.items()}
    tasks = [(policy, offset, near[policy]) for policy in policies for offset in range(1, seeds)]
    for search in _searches(scenario, tasks, tolerance, workers):
        others[search.policy].append(search)
        done += 1
        if progress:
            progress(done, total)
    return Capacities(_gathered(scenario, firsts[policy], others[policy]) for policy in policies)


def check(scenario: Scenario) -> None:
    """BadInput where there is nothing to search for."""
    slo = scenario.slo
    if not slo.percentiles and slo.attainment is None:
        raise scenario.blame(BadInput("capacity needs a limit, such as tbt_p99 = 0.1", key="[slo]"))
    kind = scenario.workload.arrivals.kind
    if kind not in RATED:
        what = f"{kind!r} has no rate to search; use one of {', '.join(RATED)}"
        raise scenario.blame(BadInput(what, key="[workload.arrivals] kind"))


def by_goodput(scenario: Scenario, share: float) -> Scenario:
    """The scenario with `share` of the requests to meet all limits per request, and no limits on percentiles.

    BadInput where it has no limits per request.
    """
    if not scenario.slo.per_request:
        what = "goodput needs a limit per request, such as ttft = 1.0 or tpot = 0.05"
        raise scenario.blame(BadInput(what, key="[slo]"))
    return scenario.with_(slo=scenario.slo.per_request | {"attainment": share})


def search(
    scenario: Scenario, *, tolerance: float = 0.01, near: float | None = None, lengths: tuple[float, float] = UNSCALED
) -> Search:
    """Bracket and bisect the rate of one scenario (policy and seed are its own), from `near` where that is known.

    Prompts and outputs are `lengths` times as long.
    """
    requests = scaled(workload(scenario), lengths, scenario.engine.max_model_tokens)
    start = near or first_rate(scenario, requests)
    trials: list[Trial] = []
    if plan(scenario).deployment.limits.refusals(requests.prompts, requests.outputs):
        trials.append(Trial(start, met=False, limited_by="refused", stopped=True))
        return Search(scenario.scheduler.policy, scenario.workload.seed, 0.0, "refused", tuple(trials))

    alone: str | None = None

    def passes(rate: float) -> bool:
        trials.append(trial(scenario, rate, requests, lengths=lengths))
        return trials[-1].met

    def possible() -> bool:
        nonlocal alone
        alone = fails_alone(scenario, requests)
        return alone is None

    low, high = _bracket(passes, possible, start, 1.04 if near else 2.0)
    while low is not None and high is not None and high - low > tolerance * low:
        middle = _rounded(sqrt(low * high))
        if not low < middle < high:
            break
        low, high = (middle, high) if passes(middle) else (low, middle)
    failed = [t for t in trials if not t.met]
    limit = alone or (min(failed, key=lambda t: t.rate).limited_by if failed else None)
    return Search(scenario.scheduler.policy, scenario.workload.seed, low or 0.0, limit, tuple(trials), alone)


def trial(scenario: Scenario, rate: float, requests: Workload, *, lengths: tuple[float, float] = UNSCALED) -> Trial:
    """Whether the scenario meets its SLO at `rate` requests/s; `requests` are its requests at any rate, of those
    `lengths`."""
    watch = Hopeless(scenario, requests.outputs)
    there = at_rate(scenario, rate)
    own = None if lengths == UNSCALED else scaled(workload(there), lengths, scenario.engine.max_model_tokens)
    report = simulate(there, keep_steps=False, watch=watch, requests=own)
    if watch.because is not None:
        return Trial(rate, met=False, limited_by=watch.because, stopped=True)
    slo = report.summary["slo"]
    values = {key: verdict["value"] for key, verdict in slo.items()}
    failed = [key for key, verdict in slo.items() if not verdict["met"]]
    worst = max(failed, key=lambda key: _excess(slo[key])) if failed else None
    good = {key: report.summary[key] for key in ("attainment", "goodput")}
    return Trial(rate, met=not failed, limited_by=worst, values=values, **good)


def fails_alone(scenario: Scenario, requests: Workload) -> str | None:
    """The key of [slo] that the requests miss though they are served one at a time; None where they do not, or where it
    would not follow that they miss it at every rate.

    It would not where what is measured depends on the rate, or where an affine decode may cost more than the prefill
    that a preemption puts in its place.
    """
    depends = scenario.metrics.warmup or scenario.metrics.drain or scenario.engine.time_limit is not None
    latency = scenario.latency
    if depends or (isinstance(latency, AffineTable) and latency.context > latency.token):
        return None
    kept = ("attainment", "first_token_gap")
    lenient = {key: limit if key in kept else limit * LENIENCE for key, limit in scenario.slo.root.items()}
    one = scenario.with_(slo=lenient)
    watch = Alone(one, requests.outputs)
    queue = replace(requests, arrivals=None, concurrency=1, think=0.0)
    report = simulate(one, keep_steps=False, watch=watch, requests=queue)
    if watch.because is not None or report.record.done < len(requests.outputs):
        return watch.because
    return next((key for key, verdict in report.summary["slo"].items() if not verdict["met"]), None)


def scaled(requests: Workload, lengths: tuple[float, float], longest: int) -> Workload:
    """The requests with prompts and outputs that many times as long, cut where they would exceed `longest` tokens."""
    if lengths == UNSCALED:
        return requests
    prompts, outputs = (
        np.clip(np.rint(tokens * factor), 1, longest - 1).astype(np.int64)
        for tokens, factor in zip((requests.prompts, requests.outputs), lengths, strict=True)
    )
    return replace(requests, prompts=prompts, outputs=np.minimum(outputs, longest - prompts))


def at_rate(scenario: Scenario, rate: float) -> Scenario:
    """The scenario with its arrivals at `rate`."""
    if scenario.workload.arrivals.kind == "trace":
        return scenario.with_(workload__arrivals__scale=1.0, workload__arrivals__rate=rate)
    return scenario.with_(workload__arrivals__rate=rate)


def _searches(
    scenario: Scenario, tasks: Sequence[tuple[str, int, float | None]], tolerance: float, workers: int
) -> Iterator[Search]:
    for _, found in each(partial(_search_task, scenario, tolerance), tasks, workers=workers):
        yield found


def _search_task(scenario: Scenario, tolerance: float, task: tuple[str, int, float | None]) -> Search:
    policy, offset, near = task
    own = scenario.for_policy(policy).with_(workload__seed=scenario.workload.seed + offset)
    return search(own, tolerance=tolerance, near=near or None)


def _gathered(scenario: Scenario, first: Search, others: Sequence[Search]) -> Capacity:
    rates = {found.seed: found.rate for found in (first, *others)}
    interval = (min(rates.values()), max(rates.values())) if others else None
    notes = []
    arrivals, lengths = scenario.workload.arrivals, scenario.workload.lengths
    fixed = arrivals.kind in ("trace", "constant") and lengths.kind in ("trace", "fixed")
    if others and fixed and not any(getattr(part, "shuffle", False) for part in (arrivals, lengths)):
        notes.append("the seeds change nothing in this workload: its interval says nothing; set shuffle = true")
    if first.rate and first.limited_by is None:
        notes.append(f"met at every rate that was tried, up to {first.rate:g} requests/s: the SLO does not limit it")
    if alone := [found.alone for found in (first, *others) if found.alone]:
        seeds = "" if len(alone) == len(rates) else f" on {len(alone)} of {len(rates)} seeds"
        notes.append(f"{first.policy}: requests served one at a time miss {alone[0]}{seeds}, so no rate can meet it")
    return Capacity(
        first.policy, first.rate, interval, first.limited_by, first.trials, dict(sorted(rates.items())), tuple(notes)
    )


def _bracket(
    passes: Callable[[float], bool], possible: Callable[[], bool], start: float, factor: float
) -> tuple[float | None, float | None]:
    """A passing and a failing rate around the limit; None where there is none within reach.

    `possible` is asked once, when FAILED rates have failed, and False ends it.

    Strides grow on the way up. On the way down they double at most: trials that fail are stopped early, and those that
    pass far below the limit are the longest of all.
    """
    up = passes(start)
    here, stride, failed = start, factor, 1
    while start / FARTHEST < here < start * FARTHEST:
        there = _rounded(here * stride if up else here / stride)
        if passes(there) != up:
            return (here, there) if up else (there, here)
        here, stride, failed = there, stride**2 if up else min(stride**2, 2.0), failed + 1
        if not up and failed == FAILED and not possible():
            break
    return (here, None) if up else (None, here)


def first_rate(scenario: Scenario, requests: Workload) -> float:
    """The scenario's own rate."""
    arrivals = scenario.workload.arrivals
    rate = getattr(arrivals, "rate", None)
    if rate is None and requests.arrivals is not None:
        rate = mean_rate(requests.arrivals)
    if rate is None:
        what = "all requests of the trace arrive at one instant: there is no rate to scale"
        raise scenario.blame(BadInput(what, key="[workload.arrivals] kind"))
    return float(rate)


def _excess(verdict: dict[str, Any]) -> float:
    """How far a value is from its limit."""
    value, limit = verdict["value"], verdict["limit"]
    return float("inf") if value is None else max(value / limit, limit / value if value else 0.0)


def _rounded(rate: float) -> float:
    """Six significant digits, so that rates can be typed in again."""
    return float(f"{rate:.6g}")
