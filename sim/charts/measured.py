"""Charts of a validation: what was simulated beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import altair as alt
import polars as pl

from sim.charts import theme
from sim.charts.theme import Log, tip
from sim.charts.thin import NothingToDraw, Run, sampled
from sim.names import short
from sim.show import percent

DRAWN = 2000  # points of a scatter
LEVELS = [share / 500 for share in range(1, 500)]  # of quantiles
SQUARE: dict[str, Any] = {"height": 360, "width": 400}
KINDS = {"decodes only": theme.BLUE, "with prefill": theme.ORANGE}
RUNS = {"error": "simulated", "error_anchored": "anchored", "noise": "measured again"}


def steps(frame: pl.DataFrame) -> Any:
    """Predicted against measured seconds of every iteration (`validation_steps.parquet`), on the same batches."""
    which = _predicted(frame)
    relative = (frame[which] / frame["seconds"] - 1).abs()
    work = pl.when(pl.col("chunks") > 0).then(pl.lit("with prefill")).otherwise(pl.lit("decodes only"))
    drawn = sampled(frame.select("seconds", pl.col(which).alias("predicted"), "decodes", "chunks", work=work), DRAWN)
    axis = Log.of(*drawn["seconds"], *drawn["predicted"])
    points = (
        alt.Chart(drawn)
        .mark_point(filled=True, size=14, opacity=0.45)
        .encode(
            axis.seconds(alt.X("seconds:Q", title="measured")),
            axis.seconds(alt.Y("predicted:Q", title="predicted of the same batch")),
            theme.parts("work", KINDS),
            tooltip=[
                *(tip("seconds", "measured (s)", ".4f"), tip("predicted", "predicted (s)", ".4f")),
                *(tip("decodes", "decodes", ","), tip("chunks", "chunks of prompts", ",")),
            ],
        )
    )
    source = "a profile of calibration steps in between" if which == "anchored" else "the scenario's latency model"
    few = f", {len(drawn):,} of them drawn" if len(drawn) < len(frame) else ""
    half, most = (percent(float(relative.quantile(q) or 0.0)) for q in (0.5, 0.9))
    return theme.finish(
        alt.layer(_equal(axis), points),
        "Every iteration",
        f"n = {len(frame):,} iterations{few}; predicted by {source}",
        f"error of an iteration: {half} at P50, {most} at P90; the line is equality",
        **SQUARE,
    )


def quantiles(frame: pl.DataFrame) -> Any:
    """Quantiles of the iterations' predicted seconds against those of the measured, on the same batches."""
    which = _predicted(frame)
    sides = [[frame[column].quantile(level) for level in LEVELS] for column in ("seconds", which)]
    title = "Iterations, quantile against quantile"
    return _pairs(sides, title, "iteration", "predicted", f"n = {len(frame):,} iterations")


def tbt_quantiles(measured: Run, simulated: Run) -> Any:
    """Quantiles of the time between tokens: the simulated run's against the measured run's."""
    pools = measured.gaps, simulated.gaps
    if not all(len(gaps) for gaps in pools):
        raise NothingToDraw("one of the runs has no gap between two tokens")
    n = " and ".join(f"{int(gaps['count'].sum()):,}" for gaps in pools)
    title = "TBT, quantile against quantile"
    return _pairs([_ranked(gaps) for gaps in pools], title, "gap", "simulated", f"n = {n} gaps")


def errors(metrics: Sequence[Mapping[str, Any]]) -> Any:
    """The error of each compared figure beside the noise floor: how far the measured run is from itself, run again."""
    rows = [
        {"metric": short(row["metric"]), "label": label, "error": row[key], "measured": row["measured_s"]}
        for row in metrics
        for key, label in RUNS.items()
        if row.get(key) is not None
    ]
    if not rows:
        raise NothingToDraw("no figure was measured")
    frame = pl.DataFrame(rows, infer_schema_length=None)
    known = set(frame["label"])
    labels = [label for label in RUNS.values() if label in known]
    most = max(0.02, *(abs(row["error"]) for row in rows)) * 1.1
    base = alt.Chart(frame).encode(alt.Y("metric:N", title=None, sort=[short(row["metric"]) for row in metrics]))
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule().encode(alt.X("zero:Q"))
    noise = base.transform_filter("datum.label == 'measured again'")
    noise = noise.transform_calculate(low="-abs(datum.error)", high="abs(datum.error)")
    floor = noise.mark_rule(strokeWidth=6, opacity=0.3, color=theme.ORANGE).encode(alt.X("low:Q"), alt.X2("high:Q"))
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        alt.X("error:Q", title="difference from the measured run").scale(theme.window(-most, most)).axis(format="+~%"),
        theme.colours(labels),
        shape=alt.Shape("label:N", legend=alt.Legend(title=None)).scale(
            domain=labels, range=["circle", "diamond", "cross"]
        ),
        tooltip=[
            *(tip("metric", "figure"), tip("label", "run")),
            *(tip("error", "difference", "+.2%"), tip("measured", "measured (s)", ".4f")),
        ],
    )
    said = f"n = {len(metrics)} figures; orange bars: the noise floor, the measured run against itself, run again"
    return theme.finish(
        alt.layer(zero, floor, points), "Errors beside the noise floor", said, height=30 * len(metrics) + 20
    )


def _predicted(frame: pl.DataFrame) -> str:
    if not len(frame):
        raise NothingToDraw("no iteration was measured")
    return "anchored" if "anchored" in frame.columns else "predicted"


def _pairs(sides: Sequence[Sequence[Any]], title: str, of: str, how: str, said: str) -> Any:
    """Quantiles of what was measured, and of the other, against each other."""
    if min(map(min, sides)) <= 0:
        raise NothingToDraw(f"a {of} of 0 s has no place on a log axis")
    axis = Log.of(*sides[0], *sides[1])
    points = (
        alt.Chart(pl.DataFrame({"share": LEVELS, "x": sides[0], "y": sides[1]}))
        .mark_point(filled=True, size=22, opacity=0.8, color=theme.BLUE)
        .encode(
            axis.seconds(alt.X("x:Q", title=f"{of}, measured")),
            axis.seconds(alt.Y("y:Q", title=f"{of}, {how}")),
            tooltip=[
                tip("share", "quantile", ".1%"),
                tip("x", "measured (s)", ".4f"),
                tip("y", f"{how} (s)", ".4f"),
            ],
        )
    )
    levels = f"{len(LEVELS)} quantiles, {LEVELS[0]:.1%} to {LEVELS[-1]:.1%}; the line is equality"
    return theme.finish(alt.layer(_equal(axis), points), title, said, levels, **SQUARE)


def _ranked(gaps: pl.DataFrame) -> list[float]:
    """The gaps of rank ceil(n·q)."""
    ends = gaps["count"].cum_sum()
    ranks = pl.Series([max(1, ceil(int(ends[-1]) * level)) for level in LEVELS])
    return gaps["gap_s"].gather(ends.search_sorted(ranks, side="left")).to_list()


def _equal(axis: Log) -> Any:
    """Where both are the same."""
    line = alt.Chart(pl.DataFrame({"a": [axis.low, axis.high], "b": [axis.low, axis.high]}))
    return line.mark_line(color=theme.LIMIT, strokeDash=[4, 4], strokeWidth=1.5).encode(alt.X("a:Q"), alt.Y("b:Q"))
