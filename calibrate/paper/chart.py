"""A figure of the paper as a chart: simulated against published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt
import polars as pl

from calibrate.paper.rows import FAR, NEAR, Figure
from sim.charts import NothingToDraw, theme
from sim.charts.theme import Log, tip


def against(figure: Figure, by: Callable[[str], str], unit: str) -> Any:
    """Every row of a unit that has both values, on log axes, with the line of equality and what counts as near and far.

    `by` makes a row's colour of what it is. NothingToDraw where no row has both.
    """
    rows = figure.frame.filter((pl.col("unit") == unit) & (pl.col("published") > 0) & (pl.col("simulated") > 0))
    if not len(rows):
        raise NothingToDraw(f"no row in {unit} has a published and a simulated value")
    rows = rows.with_columns(pl.Series("label", [by(what) for what in rows["what"]]))
    axis = Log.of(*rows["published"], *rows["simulated"])
    ends = [axis.low, axis.high]
    bands = [
        alt.Chart(pl.DataFrame({"x": ends}).with_columns(low=pl.col("x") * (1 - off), high=pl.col("x") * (1 + off)))
        .mark_area(opacity=0.09, color=theme.LIMIT, clip=True)
        .encode(alt.X("x:Q"), alt.Y("low:Q"), alt.Y2("high:Q"))
        for off in (NEAR, FAR)
    ]
    line = alt.Chart(pl.DataFrame({"x": ends, "y": ends})).mark_line(color=theme.LIMIT, strokeDash=[4, 4])

    def scaled(channel: Any) -> Any:
        if unit == "s":
            return axis.seconds(channel)
        return channel.scale(axis.scale).axis(values=axis.ticks(), format="~r")

    shown = "" if unit == "s" else f" ({unit})"
    points = (
        alt.Chart(rows)
        .mark_point(filled=True, size=60, opacity=0.85)
        .encode(
            scaled(alt.X("published:Q", title=f"published{shown}")),
            scaled(alt.Y("simulated:Q", title=f"simulated{shown}")),
            theme.colours(rows["label"].unique(maintain_order=True).to_list()),
            tooltip=[
                tip("what", "what"),
                *(tip("published", "published", ".4~r"), tip("simulated", "simulated", ".4~r")),
                tip("error", "error", "+.1%"),
            ],
        )
    )
    errors = rows["error"].abs()
    near = f"{int((errors <= NEAR).sum())} within {NEAR:.0%}, {int((errors <= FAR).sum())} within {FAR:.0%}"
    said = f"n = {len(rows)} values: {near} (shaded); the line is equality"
    return theme.finish(
        alt.layer(*bands, line.encode(alt.X("x:Q"), alt.Y("y:Q")), points),
        figure.title[:1].upper() + figure.title[1:],
        said,
        height=360,
        width=400,
    )
