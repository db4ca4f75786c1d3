"""Frames of any length made short enough to draw, and nothing hidden: by rank or by bins of time, extremes kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import polars as pl

from sim.errors import BadInput

MOST_ROWS = 5000  # of one chart
PER_DECADE = 40  # points of a tail


class NothingToDraw(BadInput):
    """A result that a chart has nothing to show of; says why."""


class Run(Protocol):
    """What the charts need of a run: `sim.report.Report`, or `sim.results.Run` from its files."""

    @property
    def summary(self) -> Mapping[str, Any]: ...
    @property
    def requests(self) -> pl.DataFrame: ...
    @property
    def steps(self) -> pl.DataFrame: ...
    @property
    def gaps(self) -> pl.DataFrame: ...
    @property
    def stages(self) -> pl.DataFrame: ...


Runs = Run | Sequence[Run] | Mapping[str, Run]


def labelled(runs: Runs) -> dict[str, Run]:
    """Runs by label: their policies, where they have no labels yet; numbered where several have one policy."""
    if isinstance(runs, Mapping):
        return dict(runs)
    several = list(runs) if isinstance(runs, Sequence) else [runs]
    if not several:
        raise NothingToDraw("no run is given")
    policies = [str(run.summary["policy"]) for run in several]
    alone = len(set(policies)) == len(policies)
    return {
        policy if alone else f"{policy} {number}": run
        for number, (policy, run) in enumerate(zip(policies, several, strict=True), start=1)
    }


def tail(values: pl.DataFrame, most: int) -> pl.DataFrame:
    """How large a share of the values is at least so large, at no more than `most` ranks.

    `values` has columns `value` (ascending, distinct) and `count`. The ranks are even in the logarithm of the share, so
    that the tail has as many points as the bulk; the least and the largest value are among them. Every point is exact.
    """
    value, counts = values["value"].to_numpy(), values["count"].to_numpy()
    below = np.cumsum(counts) - counts  # values that are smaller
    n = int(counts.sum())
    points = min(most, int(PER_DECADE * np.log10(max(n, 10))) + 2)
    ranks = n - np.geomspace(1, n, points)  # of the values, from 0, ascending in rank when reversed
    at = np.unique(np.searchsorted(below, np.floor(np.append(ranks, [0, n - 1])), side="right") - 1)
    return pl.DataFrame({"value": value[at], "share": (n - below[at]) / n})


def in_time(frame: pl.DataFrame, columns: Sequence[str], *, end: float, bins: int) -> pl.DataFrame:
    """Iterations by time: mean (weighted by their duration), least and largest of `columns` in each bin of `end` / bins
    seconds; `time_s` is the middle of the bin."""
    width = end / bins
    weight = pl.col("end_s") - pl.col("start_s")
    told = []
    for name in columns:
        column = pl.col(name)
        told += [
            ((column * weight).sum() / weight.sum()).alias(name),
            column.min().alias(f"{name}_min"),
            column.max().alias(f"{name}_max"),
        ]
    place = (pl.col("start_s") / width).floor().clip(0, bins - 1).alias("bin")
    return frame.group_by(place).agg(told).sort("bin").with_columns(time_s=(pl.col("bin") + 0.5) * width).drop("bin")


@dataclass(frozen=True, slots=True)
class Pause:
    """The longest time for which a replica had requests in mid-answer and emitted no token for them."""

    replica: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def longest_pause(run: Run) -> Pause | None:
    """From one iteration with decodes to the next of the same replica, if any of their requests was not done then."""
    steps, order = run.steps, ("replica", "end_s")
    if not len(steps):
        return None
    done, first = (_at_once(run.requests, column) for column in ("finished_s", "first_token_s"))
    decoding = steps.filter(pl.col("decodes") > 0).sort(*order).select(*order, "decodes")
    left = (
        decoding.join(done, left_on=order, right_on=["replica", "finished_s"], how="left", maintain_order="left")
        .join(first, left_on=order, right_on=["replica", "first_token_s"], how="left", maintain_order="left")
        .fill_null(0)
        .select(*order, left=pl.col("decodes") + pl.col("first_token_s_n") - pl.col("finished_s_n"))
    )
    pauses = left.select(
        *order,
        before=pl.col("end_s").shift(1).over("replica"),
        waiting=pl.col("left").shift(1).over("replica"),
    ).filter(pl.col("waiting") > 0)
    if not len(pauses):
        return None
    row = pauses.row(int((pauses["end_s"] - pauses["before"]).arg_max() or 0), named=True)
    return Pause(int(row["replica"]), float(row["before"]), float(row["end_s"]))


def _at_once(requests: pl.DataFrame, column: str) -> pl.DataFrame:
    """How many requests have one time, by replica."""
    some = requests.drop_nulls([column, "replica"])
    return some.group_by("replica", column).agg(pl.len().cast(pl.Int64).alias(f"{column}_n"))


def sampled(frame: pl.DataFrame, most: int) -> pl.DataFrame:
    """At most so many rows, evenly spaced, the first and the last among them."""
    if len(frame) <= most:
        return frame
    rows = np.unique(np.linspace(0, len(frame) - 1, most).astype(np.int64))
    return frame.select(pl.all().gather(rows))
