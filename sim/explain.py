"""Why tokens came late: the run is made again, watched, and every gap above its limit is cut into its causes.

>>> from sim import explain
>>> why = explain("out/chat")  # or a Report
>>> why.summary["verdict"], why.gaps, why.ttfts, why.iterations
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim import stories
from sim.blame import GAP_CAUSES, TTFT_CAUSES, Seconds, beyond, total
from sim.cluster import Watch
from sim.errors import BadInput
from sim.executor import LatencyModel, Spent
from sim.report import Report, times_from
from sim.rerun import replayed, rerun
from sim.roofline import Roofline, RooflineTable
from sim.scheduler import Limits, Scheduler
from sim.schema import PERCENTILES
from sim.simulate import Plan, simulate
from sim.watched import Late, Seen, Watched

if TYPE_CHECKING:
    import polars as pl

PARTS = Spent._fields[:-2]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Limit:
    """Above how many seconds a token is late, and who says so; None where there is nothing to be late."""

    seconds: float | None
    source: str


@dataclass(frozen=True, repr=False)
class Explanation:
    """What came late in a run, and why. `gaps`, `ttfts` and `iterations` are polars frames, `summary` is for JSON."""

    report: Report
    seen: Seen
    tbt_limit: Limit
    ttft_limit: Limit
    worst: int

    def __repr__(self) -> str:
        return f"Explanation({self.report.plan.scenario.name!r}: {self.summary['verdict']})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from sim import tables

        told = self.summary
        found = [tables.causes(told[key], what) for key, what in (("tbt", "gaps"), ("ttft", "first tokens"))]
        stories = [one["story"] for key in ("tbt", "ttft") for one in told[key]["worst"]]
        late = [one for one in found if one.rows]
        return tables.html(told["name"], late, tables.Verdict(told["verdict"]), [*stories, *told["notes"]])

    @cached_property
    def gaps(self) -> pl.DataFrame:
        """One row per late gap between two tokens of a request: `excess_s` is what is beyond the limit, `CAUSE_s` adds
        up to `gap_s`, `CAUSE_excess_s` to `excess_s`; `main` has the largest part of the excess."""
        return _frame(self.seen.gaps, self.tbt_limit, GAP_CAUSES, "gap_s")

    @cached_property
    def ttfts(self) -> pl.DataFrame:
        """One row per late first token, as `gaps`; the parts add up to `ttft_s`."""
        return _frame(self.seen.ttfts, self.ttft_limit, TTFT_CAUSES, "ttft_s")

    @cached_property
    def iterations(self) -> pl.DataFrame:
        """The run's steps, each with its roofline: seconds by what they are spent on (summed over stages), the largest
        of these (`bound`), and MFU and MBU of the devices while they work on it; null where nobody can tell."""
        import polars as pl

        work = [spent for _, spent in self.seen.work if spent is not None]
        if self._sheet() is None:
            floats = {f"{name}_s": pl.Float64 for name in PARTS} | {"mfu": pl.Float64, "mbu": pl.Float64}
            empty = [pl.lit(None, kind).alias(name) for name, kind in floats.items()]
            return self.report.steps.with_columns(pl.lit(None, pl.String).alias("bound"), *empty)
        values = np.array(work, dtype=np.float64).reshape(len(work), len(Spent._fields))
        busy = np.array([seconds for seconds, _ in self.seen.work])
        bounds = np.array(PARTS)[np.argmax(values[:, : len(PARTS)], axis=1)] if work else []
        told = [pl.Series(f"{name}_s", values[:, column]) for column, name in enumerate(PARTS)]
        flop_rate, byte_rate = _peaks(self.report.plan)
        return self.report.steps.with_columns(
            pl.Series("bound", bounds, dtype=pl.String),
            *told,
            pl.Series("mfu", values[:, -2] / (flop_rate * busy)),
            pl.Series("mbu", values[:, -1] / (byte_rate * busy)),
        )

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What it comes to, ready for JSON."""
        report, plan = self.report, self.report.plan
        tbt = self._told(self.seen.gaps, self.tbt_limit, GAP_CAUSES, int(np.sum(report.record.gap_counts)), stories.gap)
        ttft = self._told(self.seen.ttfts, self.ttft_limit, TTFT_CAUSES, len(_ttfts(report)), stories.ttft)
        return {
            "name": plan.scenario.name,
            "policy": plan.scenario.scheduler.policy,
            "verdict": stories.verdict(tbt, ttft, plan),
            "tbt": tbt,
            "ttft": ttft,
            "iterations": self._bounds(),
            "notes": self._notes(),
        }

    def _told(
        self, found: Sequence[Late], limit: Limit, causes: Sequence[str], n: int, story: Callable[..., str]
    ) -> dict[str, Any]:
        """The causes of one kind of lateness, largest first, and its worst cases."""
        seconds, excess = dict.fromkeys(causes, 0.0), dict.fromkeys(causes, 0.0)
        having, main = dict.fromkeys(causes, 0), dict.fromkeys(causes, 0)
        count = 0
        for late in found:
            many = len(late.requests)
            count += many
            over = beyond(late.levels, limit.seconds or 0.0)
            for cause, part in total(late.levels).items():
                seconds[cause] += many * part
            for cause, part in over.items():
                excess[cause] += many * part
                having[cause] += many * (part > 0)
            main[_main(over)] += many
        whole = sum(excess.values())
        ordered = sorted((cause for cause in causes if seconds[cause]), key=lambda cause: -excess[cause])
        worst = sorted(found, key=lambda late: (-late.seconds, late.until))[: self.worst]
        return {
            "limit_s": limit.seconds,
            "limit_from": limit.source,
            "n": n,
            "late": count,
            "excess_s": whole,
            "causes": [
                {
                    "cause": cause,
                    "share": excess[cause] / whole,
                    "excess_s": excess[cause],
                    "seconds": seconds[cause],
                    "late": having[cause],
                    "main_in": main[cause],
                }
                for cause in ordered
            ],
            "worst": [
                {
                    "request": late.requests[0],
                    "others": len(late.requests) - 1,
                    "replica": late.replica,
                    "since_s": late.since,
                    "until_s": late.until,
                    "seconds": late.seconds,
                    "story": story(late, self.seen.iterations[late.replica]),
                }
                for late in worst
            ],
        }

    def _bounds(self) -> dict[str, Any]:
        """How many iterations each resource bounds, and their share of the time; MFU and MBU while devices work."""
        import polars as pl

        seconds = pl.Series("busy", [seconds for seconds, _ in self.seen.work], dtype=pl.Float64)
        frame, busy = self.iterations.with_columns(seconds), float(seconds.sum())
        told = frame.drop_nulls("bound").group_by("bound").agg(pl.len().alias("n"), pl.col("busy").sum())
        bounds = {
            bound: {"iterations": n, "time_share": its / busy}
            for bound, n, its in told.sort("busy", descending=True).iter_rows()
        }
        means = {name: float((frame[name] * frame["busy"]).sum()) / busy if bounds else None for name in ("mfu", "mbu")}
        return {"n": len(frame), "bounds": bounds, "from": self._sheet(), **means}

    def _sheet(self) -> str | None:
        """Whose roofline it is."""
        plan = self.report.plan
        if plan.model is None or plan.device is None:
            return None
        if isinstance(plan.executor(), Roofline):
            return "the run's own latency model"
        return "data-sheet figures and assumed efficiencies, not the run's latency model"

    def _notes(self) -> list[str]:
        scenario, seen = self.report.plan.scenario, self.seen
        said = [times_from(scenario, measured=seen.measured)]
        if seen.measured:
            said.append(
                "measured iterations are divided in the proportions of the scenario's latency model "
                f"(× {seen.scale:.3g}, to come to the measured total); what an iteration took beyond that is unmodelled"
            )
        if untold := int(np.isnan(_first_tokens(self.report)).sum()) - len(self.report.record.reasons):
            said.append(f"{untold} requests were cut off before their first token: their wait is not in here")
        said.append("this is where the time went; what a change brings is for `servecast run --set …` to say")
        return said


def explain(
    source: Report | str | Path,
    *,
    above: float | None = None,
    ttft_above: float | None = None,
    worst: int = 5,
    watch: Watch | None = None,
) -> Explanation:
    """Why the tokens of a run came late: of a Report, or of the folder that `run --out` wrote.

    `above` and `ttft_above` are limits in seconds on gaps and first tokens. Without them those of [slo] hold (of
    several the one on each request, or on the highest percentile), and where there are none the longest 1 % are late.
    BadInput for a folder that lacks a file, or whose files do not follow from each other.
    """
    report = source if isinstance(source, Report) else rerun(Path(source), watch)
    tbt = _limit(report, "tbt", "tbt_max", above)
    ttft = _limit(report, "ttft", "ttft", ttft_above)
    scale = 1.0
    if report.measured:
        idle, _ = _watched(report, Seen(inf, inf), watch)
        scale = idle.lasted / idle.modelled if idle.modelled else 1.0
    looked_for = Seen(
        inf if tbt.seconds is None else tbt.seconds,
        inf if ttft.seconds is None else ttft.seconds,
        report.measured,
        scale,
    )
    seen, again = _watched(report, looked_for, watch)
    return Explanation(again, seen, tbt, ttft, worst)


def _watched(report: Report, seen: Seen, watch: Watch | None) -> tuple[Seen, Report]:
    """The run made again, watched."""
    plan = report.plan
    sheet = _roofline(plan)

    def scheduler(limits: Limits) -> Scheduler:
        return Watched(limits, seen, plan.executor(), sheet)

    engine = None
    if report.measured:
        if report.record.steps is None:
            raise BadInput("a measured run is explained from its steps: keep_steps=True")
        engine = replayed(report.columns("end_s") - report.columns("start_s"))
    again = simulate(plan.scenario, watch=watch, requests=report.workload, engine=engine, scheduler=scheduler)
    if again.record.iterations != report.record.iterations:
        raise BadInput("the run did not come to the same a second time: was it stopped?")
    return seen, again


def _roofline(plan: Plan) -> Roofline | None:
    """What tells compute from reading: the latency model, where it is one, else the data sheet."""
    executor: LatencyModel = plan.executor()
    if isinstance(executor, Roofline) or plan.model is None or plan.device is None:
        return executor if isinstance(executor, Roofline) else None
    parallel = plan.scenario.deployment
    table = RooflineTable(kind="roofline")
    return Roofline(table, plan.model, plan.device, parallel.tensor_parallel, parallel.pipeline_parallel)


def _peaks(plan: Plan) -> tuple[float, float]:
    """FLOP/s and bytes/s of the devices of one stage."""
    assert plan.model is not None
    assert plan.device is not None
    tp = plan.scenario.deployment.tensor_parallel
    return tp * plan.device.peak_flops(plan.model.dtype), tp * plan.device.memory_bandwidth


def _limit(report: Report, metric: str, per_request: str, above: float | None) -> Limit:
    """Above what this metric is late."""
    if above is not None:
        return Limit(above, "given")
    slo = report.plan.scenario.slo
    keys = (per_request, *(f"{metric}_{percentile}" for percentile in reversed(PERCENTILES)))
    limits = slo.per_request | slo.percentiles
    for key in keys:
        if key in limits:
            return Limit(limits[key], f"slo.{key}")
    values, counts = _ttfts(report), None
    if metric == "tbt":
        values, counts = np.frombuffer(report.record.gaps), np.frombuffer(report.record.gap_counts, dtype=np.int32)
    return Limit(_all_but_one_percent(values, counts), "the longest 1 %")


def _all_but_one_percent(values: Floats, counts: npt.NDArray[np.int32] | None) -> float | None:
    """The largest value that is not among the largest 1 % (rounded up)."""
    if not len(values):
        return None
    order = np.argsort(values)
    ranks = np.cumsum(np.ones(len(values), np.int64) if counts is None else counts[order].astype(np.int64))
    n = int(ranks[-1])
    rank = n - -(-n // 100)
    return float(values[order][np.searchsorted(ranks, rank)]) if rank else 0.0


def _first_tokens(report: Report) -> Floats:
    """When each offered request got its first token; NaN where it has none."""
    return np.frombuffer(report.record.first_token, dtype=np.float64)[: report.record.offered]


def _ttfts(report: Report) -> Floats:
    """TTFT of the measured requests that have a first token."""
    record = report.record
    arrivals = np.frombuffer(record.arrival, dtype=np.float64)[: record.offered]
    measured = (arrivals >= record.measured_from) & (arrivals <= record.measured_to)
    values = (_first_tokens(report) - arrivals)[measured]
    return values[~np.isnan(values)]


def _main(excess: Seconds) -> str:
    return max(excess, key=lambda cause: excess[cause])


def _frame(found: Sequence[Late], limit: Limit, causes: Sequence[str], name: str) -> pl.DataFrame:
    """One row per late token, in order of time."""
    import polars as pl

    over = [beyond(late.levels, limit.seconds or 0.0) for late in found]
    spent = [total(late.levels) for late in found]
    frame = pl.DataFrame(
        {
            "request": pl.Series([list(late.requests) for late in found], dtype=pl.List(pl.Int64)),
            "token": pl.Series([list(late.tokens) for late in found], dtype=pl.List(pl.Int64)),
            "replica": pl.Series([late.replica for late in found], dtype=pl.Int64),
            "since_s": pl.Series([late.since for late in found], dtype=pl.Float64),
            "until_s": pl.Series([late.until for late in found], dtype=pl.Float64),
            name: pl.Series([late.seconds for late in found], dtype=pl.Float64),
            "excess_s": pl.Series([late.seconds - (limit.seconds or 0.0) for late in found], dtype=pl.Float64),
            "main": pl.Series([_main(excess) for excess in over], dtype=pl.String),
            **{f"{c}_s": pl.Series([one.get(c, 0.0) for one in spent], dtype=pl.Float64) for c in causes},
            **{f"{c}_excess_s": pl.Series([one.get(c, 0.0) for one in over], dtype=pl.Float64) for c in causes},
        }
    )
    return frame.explode("request", "token").sort("until_s", "request")
