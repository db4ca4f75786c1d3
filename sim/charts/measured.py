"""Charts of a validation: what was simulated beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from sim.charts import theme
from sim.charts.thin import NothingToDraw, Run, sampled
from sim.show import percent

DRAWN = 2000  # points of a scatter
LEVELS = [share / 500 for share in range(1, 500)]
KINDS = {"decodes only": theme.BLUE, "with prefill": theme.ORANGE}


def steps(frame: pl.DataFrame) -> Any:
    """Predicted against measured seconds of every iteration (`validation_steps.parquet`), on the same batches."""
    which = _predicted(frame)
    relative = (frame[which] / frame["seconds"] - 1).abs()
    kind = pl.when(pl.col("chunks") > 0).then(pl.lit("with prefill")).otherwise(pl.lit("decodes only"))
    drawn = sampled(frame.select("seconds", pl.col(which).alias("predicted"), "decodes", "chunks", work=kind), DRAWN)
    scale, ticks = _scale([*drawn["seconds"], *drawn["predicted"]])
    points = (
        alt.Chart(drawn)
        .mark_point(filled=True, size=14, opacity=0.45)
        .encode(
            _axis(alt.X("seconds:Q", title="measured"), scale, ticks),
            _axis(alt.Y("predicted:Q", title="predicted of the same batch"), scale, ticks),
            theme.parts("work", KINDS),
            tooltip=[alt.Tooltip("seconds:Q", title="measured (s)", format=".4f")]
            + [alt.Tooltip("predicted:Q", title="predicted (s)", format=".4f"), "decodes:Q", "chunks:Q"],
        )
    )
    profile = "a profile of calibration steps in between" if which == "anchored" else "the latency model as fitted"
    said = f"n = {len(frame):,} iterations, {len(drawn):,} drawn; predicted by {profile}"
    error = f"error of a step: {percent(relative.median())} median, {percent(relative.quantile(0.9))} at P90"  # type: ignore[arg-type]
    return theme.finish(alt.layer(_equal(scale), points), "Every iteration", said, error, height=360, width=400)


def quantiles(frame: pl.DataFrame) -> Any:
    """Quantiles of the iterations' predicted seconds against those of the measured, on the same batches."""
    which = _predicted(frame)
    pairs = pl.DataFrame(
        {"share": LEVELS}
        | {name: [frame[column].quantile(q) for q in LEVELS] for name, column in (("x", "seconds"), ("y", which))}
    )
    return _pairs(pairs, "Iterations, quantile against quantile", "iteration", f"n = {len(frame):,} iterations")


def tbt_quantiles(measured: Run, simulated: Run) -> Any:
    """Quantiles of the time between tokens: the simulated run's against the measured run's."""
    sides = {"x": measured.gaps, "y": simulated.gaps}
    if not all(len(gaps) for gaps in sides.values()):
        raise NothingToDraw("one of the runs has no gap between two tokens")
    pairs = pl.DataFrame({"share": LEVELS} | {side: _ranked(gaps, LEVELS) for side, gaps in sides.items()})
    n = " and ".join(f"{int(gaps['count'].sum()):,}" for gaps in sides.values())
    return _pairs(pairs, "TBT, quantile against quantile", "gap", f"n = {n} gaps, measured and simulated")


def errors(metrics: Sequence[Mapping[str, Any]]) -> Any:
    """The error of each compared figure beside the noise floor: how far the measured run is from itself, run again."""
    names = {"error": "simulated", "error_anchored": "anchored", "noise": "measured again"}
    rows = [
        {"metric": _shown(row["metric"]), "label": label, "error": row[key], "measured": row["measured_s"]}
        for row in metrics
        for key, label in names.items()
        if row.get(key) is not None
    ]
    if not rows:
        raise NothingToDraw("no figure was measured")
    frame = pl.DataFrame(rows, infer_schema_length=None)
    order = [_shown(row["metric"]) for row in metrics]
    labels = [label for label in names.values() if label in set(frame["label"])]
    most = max(0.02, float(frame["error"].abs().max())) * 1.1  # type: ignore[arg-type]
    base = alt.Chart(frame).encode(alt.Y("metric:N", title=None, sort=order))
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(color=theme.LIMIT).encode(alt.X("zero:Q"))
    spans = base.mark_rule(strokeWidth=5, opacity=0.35, color=theme.ORANGE).transform_filter(
        "datum.label == 'measured again'"
    )
    spans = spans.transform_calculate(low="-abs(datum.error)", high="abs(datum.error)").encode(
        alt.X("low:Q"), alt.X2("high:Q")
    )
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        alt.X(
            "error:Q", title="difference from the measured run", scale=alt.Scale(domain=[-most, most], nice=False)
        ).axis(format="+.1%"),
        theme.colours(labels),
        shape=alt.Shape("label:N", scale=alt.Scale(domain=labels, range=["circle", "diamond", "cross"]), legend=None),
        tooltip=[alt.Tooltip("metric:N"), alt.Tooltip("label:N", title="run")]
        + [alt.Tooltip("error:Q", format="+.2%"), alt.Tooltip("measured:Q", title="measured (s)", format=".4f")],
    )
    said = "orange bars: the noise floor, how far the measured run is from itself when it is run again"
    return theme.finish(
        alt.layer(zero, spans, points), "Errors beside the noise floor", said, height=30 * len(order) + 20
    )


def _predicted(frame: pl.DataFrame) -> str:
    if not len(frame):
        raise NothingToDraw("no iteration was measured")
    return "anchored" if "anchored" in frame.columns else "predicted"


def _pairs(pairs: pl.DataFrame, title: str, of: str, said: str) -> Any:
    if float(pairs.select(pl.min_horizontal(pl.min("x"), pl.min("y"))).item()) <= 0:
        raise NothingToDraw(f"a {of} of 0 s has no place on a log axis")
    scale, ticks = _scale([*pairs["x"], *pairs["y"]])
    points = (
        alt.Chart(pairs)
        .mark_point(filled=True, size=22, opacity=0.8, color=theme.BLUE)
        .encode(
            _axis(alt.X("x:Q", title=f"{of}, measured"), scale, ticks),
            _axis(alt.Y("y:Q", title=f"{of}, simulated"), scale, ticks),
            tooltip=[alt.Tooltip("share:Q", title="quantile", format=".1%")]
            + [
                alt.Tooltip("x:Q", title="measured (s)", format=".4f"),
                alt.Tooltip("y:Q", title="simulated (s)", format=".4f"),
            ],
        )
    )
    levels = f"{len(pairs)} quantiles, {LEVELS[0]:.1%} to {LEVELS[-1]:.1%}; the line is equality"
    return theme.finish(alt.layer(_equal(scale), points), title, said, levels, height=360, width=400)


def _ranked(gaps: pl.DataFrame, levels: Sequence[float]) -> list[float]:
    """The values of rank ceil(n·q)."""
    from math import ceil

    ends = gaps["count"].cum_sum()
    n = int(ends[-1])
    at = ends.search_sorted([max(1, ceil(n * q)) for q in levels])
    return [float(gaps["gap_s"][int(row)]) for row in at]  # type: ignore[union-attr]


def _scale(values: Sequence[float]) -> tuple[alt.Scale, list[float]]:
    return theme.logarithmic(min(values), max(values))


def _axis(channel: Any, scale: alt.Scale, ticks: list[float]) -> Any:
    return channel.scale(scale).axis(values=ticks, labelExpr=theme.SECONDS)


def _equal(scale: alt.Scale) -> Any:
    low, high = scale.domain  # type: ignore[attr-defined]
    line = alt.Chart(pl.DataFrame({"a": [low, high], "b": [low, high]}))
    return line.mark_line(color=theme.LIMIT, strokeDash=[4, 4], strokeWidth=1.5).encode(alt.X("a:Q"), alt.Y("b:Q"))


def _shown(metric: str) -> str:
    name, _, percentile = metric.rpartition("_")
    return f"{name.upper()} {percentile.upper()}"
