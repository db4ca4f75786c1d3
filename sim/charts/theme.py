"""How every chart looks: one theme, colours that all eyes tell apart, seconds that read as ms where they are short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

import altair as alt
import polars as pl

# Okabe and Ito (2008), "Color Universal Design": told apart with every kind of colour vision.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#8A8F98"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY, YELLOW)
COLOURS = {
    "prefill-first": VERMILLION,
    "orca": PURPLE,
    "decode-first": GREEN,
    "stall-free": BLUE,
    "alternating": ORANGE,
    "measured": VERMILLION,
    "measured again": ORANGE,
    "simulated": BLUE,
    "anchored": GREEN,
}
LIMIT = GREY  # of SLO lines
LIGHTER = {BLUE: "#3A8FD0", VERMILLION: "#EE7A33", GREEN: "#2BB98D", SKY: "#8CD0F5"}  # on a dark page
WIDTH, HEIGHT = 620, 280
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"


def config(*, dark: bool = False) -> dict[str, Any]:
    """The Vega-Lite configuration, for a light or a dark page."""
    ink, faint, line = ("#d7dade", "#9aa0a8", "#3a3f47") if dark else ("#24292f", "#5b636d", "#d9dde2")
    text = {"labelColor": faint, "titleColor": ink, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": 500}
    return {
        "background": None if dark else "white",
        "font": FONT,
        "view": {"stroke": None},
        "axis": {**text, "gridColor": line, "gridOpacity": 0.6, "domainColor": line, "tickColor": line}
        | {"titlePadding": 8, "labelOverlap": "greedy", "labelSeparation": 6},
        "legend": {**text, "orient": "top", "title": None, "labelFontSize": 12, "labelColor": ink, "symbolSize": 90}
        | {"labelLimit": 260, "offset": 6, "symbolStrokeWidth": 3, "symbolOpacity": 1},
        "title": {"color": ink, "subtitleColor": faint, "fontSize": 15, "fontWeight": 600, "anchor": "start"}
        | {"subtitleFontSize": 12, "frame": "group", "offset": 12, "subtitlePadding": 6, "subtitleLineHeight": 16},
        "text": {"color": ink, "fontSize": 11},
        "rule": {"color": LIMIT},
        "line": {"strokeWidth": 2},
        "style": {"whisker": {"color": ink, "stroke": ink, "fill": ink, "strokeWidth": 1.5, "opacity": 1}},
        "range": {"category": list(PALETTE)},
    }


@alt.theme.register("servecast", enable=True)
def _servecast() -> alt.theme.ThemeConfig:
    return alt.theme.ThemeConfig(config=config())  # type: ignore[typeddict-item]


def colours(labels: Sequence[str]) -> alt.Color:
    """Colour by the column `label`: a policy keeps its colour in every chart, other names take what is left."""
    taken = {COLOURS[label] for label in labels if label in COLOURS}
    free = iter([colour for colour in PALETTE if colour not in taken] * len(labels))
    shades = [COLOURS[label] if label in COLOURS else next(free) for label in labels]
    shown = alt.Legend(title=None) if len(labels) > 1 else None
    return alt.Color("label:N", scale=alt.Scale(domain=list(labels), range=shades), legend=shown)


def parts(column: str, shades: Mapping[str, str]) -> alt.Color:
    """Colour by a column with known values."""
    legend = alt.Legend(title=None, columns=3) if len(shades) > 4 else alt.Legend(title=None)
    return alt.Color(f"{column}:N", scale=alt.Scale(domain=list(shades), range=list(shades.values())), legend=legend)


# Vega expressions; `datum.value` is the tick.
SECONDS = (
    "datum.value == 0 ? '0' : abs(datum.value) < 0.001 ? format(datum.value * 1e6, '~r') + ' µs'"
    " : abs(datum.value) < 1 ? format(datum.value * 1e3, '~r') + ' ms' : format(datum.value, ',~r') + ' s'"
)
SHARE = "datum.value == 1 ? 'all' : format(datum.value, '~%')"


@dataclass(frozen=True)
class Log:
    """A log axis around [low, high] > 0; ticks at 1, 2, 5 of every decade, or at decades where there are many."""

    low: float
    high: float

    @classmethod
    def of(cls, *values: float) -> Log:
        """Around these."""
        return cls(min(values) / 1.1, max(values) * 1.1)

    @property
    def scale(self) -> alt.Scale:
        return alt.Scale(type="log", domain=[self.low, self.high], nice=False)

    def ticks(self, steps: Sequence[int] | None = None) -> list[float]:
        """The ticks, at multiples `steps` of powers of ten."""
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        chosen = steps or ((1, 2, 5) if log10(self.high / self.low) < 3.5 else (1,))
        ticks = [round(step * 10.0**decade, 12) for decade in decades for step in chosen]
        return [tick for tick in ticks if self.low <= tick <= self.high]

    def seconds(self, channel: Any) -> Any:
        """A channel on this axis, its ticks as durations."""
        return channel.scale(self.scale).axis(values=self.ticks(), labelExpr=SECONDS)


def tip(column: str, title: str, form: str | None = None) -> alt.Tooltip:
    """A line of a tooltip: text, or a number in a d3 format."""
    return (
        alt.Tooltip(f"{column}:N", title=title)
        if form is None
        else alt.Tooltip(f"{column}:Q", title=title, format=form)
    )


def window(low: float, high: float) -> alt.Scale:
    """A linear scale from one value to another."""
    return alt.Scale(domain=[low, high], nice=False)


def level(limit: float, shown: str) -> list[Any]:
    """A dashed line across at a limit, and its name."""
    base = alt.Chart(pl.DataFrame({"limit": [limit], "shown": [shown]}))
    return [
        base.mark_rule(strokeDash=[5, 4], strokeWidth=1.5).encode(alt.Y("limit:Q")),
        base.mark_text(align="left", dy=-8, dx=4).encode(x=alt.value(0), y=alt.Y("limit:Q"), text="shown:N"),
    ]


def finish(chart: Any, title: str, *said: str, height: int | None = HEIGHT, width: int = WIDTH) -> Any:
    """Title, what it shows and of how many (`said`, a line each), and its size, where it is not one of panels."""
    lines = [line for line in said if line]
    size = {} if height is None else {"height": height, "width": width}
    return chart.properties(
        title=alt.TitleParams(text=title, subtitle=lines),
        description=". ".join([title, *lines]),
        **size,
    )
