"""Capacity: the highest arrival rate at which a deployment still meets its SLO.

A search brackets the rate and bisects it, on the same requests for every policy and rate (gaps are drawn once and
scaled). A trial that can no longer pass is stopped. Searches on other seeds give an interval: how far another sample of
the same workload moves the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

from sim.errors import BadInput
from sim.hopeless import Hopeless
from sim.parallel import each
from sim.policies import COMPARED
from sim.scenario import Scenario
from sim.simulate import plan, simulate, workload
from sim.workload import Workload, mean_rate

if TYPE_CHECKING:
    import polars as pl

FARTHEST = 1e6  # how far from the first rate a search goes before it gives up
RATED = ("poisson", "gamma", "constant", "trace")  # arrivals that have a rate


@dataclass(frozen=True, slots=True)
class Trial:
    """One run at one rate. `values` are of the keys of [slo]; empty where the run was stopped as hopeless."""

    rate: float
    met: bool
    limited_by: str | None = None
    stopped: bool = False
    values: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Search:
    """One search on one seed: the highest passing rate (0: none passed) and its trials in order."""

    policy: str
    seed: int
    rate: float
    limited_by: str | None
    trials: tuple[Trial, ...]


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


def search(scenario: Scenario, *, tolerance: float = 0.01, near: float | None = None) -> Search:
    """Bracket and bisect the rate of one scenario (policy and seed are its own), from `near` where that is known."""
    requests = workload(scenario)
    start = near or _first_rate(scenario, requests)
    trials: list[Trial] = []
    if plan(scenario).deployment.limits.refusals(requests.prompts, requests.outputs):
        trials.append(Trial(start, met=False, limited_by="refused", stopped=True))
        return Search(scenario.scheduler.policy, scenario.workload.seed, 0.0, "refused", tuple(trials))

    def passes(rate: float) -> bool:
        trials.append(trial(scenario, rate, requests))
        return trials[-1].met

    low, high = _bracket(passes, start, 1.04 if near else 2.0)
    while low is not None and high is not None and high - low > tolerance * low:
        middle = _rounded(sqrt(low * high))
        if not low < middle < high:
            break
        low, high = (middle, high) if passes(middle) else (low, middle)
    failed = [t for t in trials if not t.met]
    limit = min(failed, key=lambda t: t.rate).limited_by if failed else None
    return Search(scenario.scheduler.policy, scenario.workload.seed, low or 0.0, limit, tuple(trials))


def trial(scenario: Scenario, rate: float, requests: Workload) -> Trial:
    """Whether the scenario meets its SLO at `rate` requests/s; `requests` are its requests at any rate."""
    watch = Hopeless(scenario, requests.outputs)
    report = simulate(at_rate(scenario, rate), keep_steps=False, watch=watch)
    if watch.because is not None:
        return Trial(rate, met=False, limited_by=watch.because, stopped=True)
    slo = report.summary["slo"]
    values = {key: verdict["value"] for key, verdict in slo.items()}
    failed = [key for key, verdict in slo.items() if not verdict["met"]]
    worst = max(failed, key=lambda key: _excess(slo[key])) if failed else None
    return Trial(rate, met=not failed, limited_by=worst, values=values)


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
    return Capacity(
        first.policy, first.rate, interval, first.limited_by, first.trials, dict(sorted(rates.items())), tuple(notes)
    )


def _bracket(passes: Callable[[float], bool], start: float, factor: float) -> tuple[float | None, float | None]:
    """A passing and a failing rate around the limit; None where there is none within reach.

    Strides grow on the way up. On the way down they double at most: trials that fail are stopped early, and those that
    pass far below the limit are the longest of all.
    """
    up = passes(start)
    here, stride = start, factor
    while start / FARTHEST < here < start * FARTHEST:
        there = _rounded(here * stride if up else here / stride)
        if passes(there) != up:
            return (here, there) if up else (there, here)
        here, stride = there, stride**2 if up else min(stride**2, 2.0)
    return (here, None) if up else (None, here)


def _first_rate(scenario: Scenario, requests: Workload) -> float:
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
