"""Charts of searches and of many runs: what rate holds, what it costs, and what one figure is traded for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import altair as alt
import polars as pl

from sim.charts import theme
from sim.charts.theme import Log, tip
from sim.charts.thin import MOST_ROWS, NothingToDraw, sampled
from sim.names import is_seconds, short, titled, upper
from sim.show import number, percent, seconds

Found = Sequence[Any]  # of sim.capacity.Capacity, or of the rows of capacity.json
DECADES = 30  # a figure that grows by more than so much has a log axis
FIGURE = ".4~r"  # four digits, in d3's format


def capacity(found: Found | Mapping[str, Found], baseline: str | None = None) -> Any:
    """The rate that each policy holds, with its interval over seeds and how many times the baseline's it is.

    `found` is what `sim.capacity` gives; or that for several SLOs, by their names. The baseline is the first policy.
    """
    groups = {slo: [_plain(one) for one in each] for slo, each in _by_slo(found).items()}
    if not groups or not all(groups.values()):
        raise NothingToDraw("no capacity was searched")
    rows = [row for slo, each in groups.items() for row in _gains(slo, each, baseline)]
    frame = pl.DataFrame(rows, infer_schema_length=None)
    policies = frame["label"].unique(maintain_order=True).to_list()
    longest = max(float(frame["right"].to_numpy().max()), 1e-9)
    base = alt.Chart(frame)
    if len(groups) > 1:
        lanes = len(frame) + len(groups)
        base = base.encode(alt.Y("slo:N", title=None, sort=list(groups)), yOffset=alt.YOffset("label:N", sort=policies))
    else:
        lanes = len(frame)
        base = base.encode(alt.Y("label:N", title=None, sort=policies))
    bars = base.mark_bar(opacity=0.9).encode(
        alt.X("rate:Q", title="arrival rate that meets the SLO (requests/s, all replicas)")
        .scale(theme.window(0, longest * 1.4))
        .axis(tickCount=8),
        theme.colours(policies),
        tooltip=[
            *(tip("label", "policy"), tip("rate", "requests/s", FIGURE), tip("limited", "limited by")),
            *(tip("low", "least of the seeds", FIGURE), tip("high", "most of the seeds", FIGURE)),
        ],
    )
    text = base.mark_text(align="left", dx=6).encode(alt.X("right:Q"), alt.Text("shown:N"))
    spread = [*_whiskers(base.transform_filter("isValid(datum.low)")), text] if rows[0]["low"] is not None else [text]
    seeds = rows[0]["seeds"]
    interval = f"n = {seeds} searches of each, one a seed: whiskers from the least to the most"
    return theme.finish(
        alt.layer(bars, *spread),
        "Capacity",
        interval if seeds > 1 else "n = 1 search of each: no interval",
        f"in brackets: times {baseline or policies[0]}" if len(policies) > 1 else "",
        height=50 + 38 * lanes,
    )


def _gains(slo: str, found: Sequence[Mapping[str, Any]], baseline: str | None) -> list[dict[str, Any]]:
    """Rows of a chart of capacities."""
    base = next((one for one in found if one["policy"] == baseline), found[0])
    rows = []
    for one in found:
        low, high = one["interval"] or (None, None)
        gain = f"  (×{one['rate'] / base['rate']:.2f})" if base["rate"] and one is not base else ""
        rows.append(
            {
                "slo": slo,
                "label": one["policy"],
                "rate": one["rate"],
                "low": low,
                "high": high,
                "right": max(one["rate"], high or 0.0),
                "shown": (number(one["rate"]) if one["rate"] else "not feasible") + gain,
                "limited": short(one["limited_by"] or "nothing that was tried"),
                "seeds": len(one["seeds"]),
            }
        )
    return rows


def latency_at_rate(found: Found, key: str, limit: float | None = None) -> Any:
    """A figure of the SLO at every rate that a search tried, with its limit and the capacity interval of each policy.

    Trials that were stopped, because they could not pass any more, have no value: they are marks at the upper edge.
    """
    each = [_plain(one) for one in found]
    trials = [
        {"label": one["policy"], **trial, "value": trial["values"].get(key)} for one in each for trial in one["trials"]
    ]
    tried = sorted((t for t in trials if t["value"] is not None), key=lambda t: float(t["rate"]))
    if not tried:
        raise NothingToDraw(f"no trial has a value of {short(key)}")
    farthest = 4 * tried[-1]["rate"]
    stopped = [trial for trial in trials if trial["stopped"] and trial["rate"] <= farthest]
    rates = Log.of(*(trial["rate"] for trial in tried + stopped))
    colour = theme.colours([one["policy"] for one in each])
    x = alt.X("rate:Q", title="arrival rate (requests/s, all replicas)").scale(rates.scale).axis(values=rates.ticks())
    values = pl.Series([trial["value"] for trial in tried] + ([] if limit is None else [limit]), dtype=pl.Float64)
    layers: list[Any] = []
    bands = [
        {"label": one["policy"], "low": one["interval"][0], "high": one["interval"][1]}
        for one in each
        if one["interval"] and one["interval"][0]
    ]
    if bands:
        area = alt.Chart(pl.DataFrame(bands)).mark_rect(opacity=0.18, clip=True)
        layers.append(area.encode(alt.X("low:Q", scale=rates.scale), alt.X2("high:Q"), colour))
    if limit is not None:
        layers += theme.level(limit, f"SLO {_shown(key, limit)}")
    base = alt.Chart(_marks(tried, key)).encode(x, _axis(alt.Y("value:Q"), values, key), colour)
    tips = [tip("label", "policy"), tip("rate", "requests/s", FIGURE)]
    layers.append(base.mark_line(strokeWidth=1.5, clip=True))
    layers.append(
        base.mark_point(filled=True, size=50, opacity=1, clip=True).encode(
            shape=alt.Shape("met:N", legend=None).scale(domain=[True, False], range=["circle", "triangle-up"]),
            tooltip=[*tips, tip("shown", short(key)), tip("met", "all of the SLO met"), tip("limited", "limited by")],
        )
    )
    said = f"n = {len(tried)} trials with a value: circles meet all of the SLO, triangles do not"
    if stopped:
        marks = alt.Chart(_marks(stopped, key)).mark_point(shape="triangle-down", size=45, filled=True, opacity=0.8)
        layers.append(marks.encode(x, colour, y=alt.value(6), tooltip=[*tips, tip("limited", "stopped: missed")]))
        said += f"; {len(stopped)} were stopped early (upper edge)"
    shaded = "shaded: capacity, from the least to the most of the seeds" if bands else ""
    return theme.finish(alt.layer(*layers), f"{upper(short(key))} against rate", said, shaded)


def _marks(trials: Sequence[Mapping[str, Any]], key: str) -> pl.DataFrame:
    """Trials as rows of a chart."""
    return pl.DataFrame(
        [
            {name: trial[name] for name in ("label", "rate", "value", "met")}
            | {"limited": short(trial["limited_by"] or ""), "shown": _shown(key, trial["value"])}
            for trial in trials
        ],
        infer_schema_length=None,
    )


def cost(result: Mapping[str, Any]) -> Any:
    """Cost per million output tokens, and how load, price and SLO move it (what `sim.cost` gives)."""
    base = result["per_million_output_tokens"]
    if base is None:
        raise NothingToDraw("nothing is served within the SLO: there is no cost")
    sensitivity = result["sensitivity"]
    loads, prices, slos = sensitivity["load"].items(), sensitivity["gpu_hour"].items(), sensitivity["slo"].items()
    rows = [
        ("as it is", "base", base),
        *((f"at {float(load):.0%} of that rate", "load", price) for load, price in loads if float(load) != 1),
        *((f"at {float(factor):.0%} of the price", "price", price) for factor, price in prices),
        *((f"latency limits × {by}", "SLO", one["per_million_output_tokens"]) for by, one in slos if float(by) != 1),
    ]
    spread = result["interval_per_million_output_tokens"]
    low, high = spread if spread and None not in spread else (base, base)
    frame = pl.DataFrame(rows, schema=["what", "kind", "cost"], orient="row", infer_schema_length=None).with_columns(
        right=pl.when(pl.col("kind") == "base").then(max(base, high)).otherwise(pl.col("cost").fill_null(0)),
        shown=pl.Series([number(price) if price is not None else "not feasible" for *_, price in rows]),
        change=pl.col("cost") / base - 1,
    )
    lane = alt.Y("what:N", title=None, sort=[what for what, *_ in rows], axis=alt.Axis(labelLimit=220))
    chart = alt.Chart(frame).encode(lane)
    shades = {"base": theme.GREY, "load": theme.BLUE, "price": theme.ORANGE, "SLO": theme.GREEN}
    bars = chart.mark_bar(height=alt.RelativeBandSize(0.72)).encode(
        alt.X("cost:Q", title="cost per million output tokens, in the currency of the price").scale(
            theme.window(0, float(frame["right"].to_numpy().max()) * 1.15)
        ),
        theme.parts("kind", shades).legend(None),
        tooltip=[tip("what", "what"), tip("cost", "cost", FIGURE), tip("change", "change", "+.1%")],
    )
    text = chart.mark_text(align="left", dx=5).encode(alt.X("right:Q"), alt.Text("shown:N"))
    between = alt.Chart(pl.DataFrame({"what": ["as it is"], "low": [low], "high": [high]})).encode(lane)
    said = f"{result['devices']} × {result['gpu_hour']:g} an hour (a parameter, [cost] gpu_hour), "
    said += f"{number(result['rate'])} requests/s, "
    said += "the capacity within the SLO" if result["rate_from"] == "capacity" else "the scenario's own rate"
    whisker = "whiskers: the rates of other seeds" if low < high else ""
    layers = [bars, *(_whiskers(between) if low < high else []), text]
    return theme.finish(alt.layer(*layers), "Cost of output tokens", said, whisker, height=30 * len(rows) + 20)


def front(
    frame: pl.DataFrame,
    x: str,
    y: str,
    *,
    by: str | None = None,
    point: str | None = None,
    better: tuple[str, str] = ("higher", "lower"),
) -> Any:
    """Two figures of many runs against each other, and the front: the runs that no other beats in both.

    `by` colours the runs and gives each colour its own front; `point` is the column that names a run (its token budget,
    say). `better` tells which way x and y get better, "higher" or "lower".
    """
    data = _points(frame, x, y, by, point)
    labels = data["label"].unique(maintain_order=True).to_list()
    best = pl.concat(_undominated(data.filter(pl.col("label") == label), better) for label in labels)
    drawn = sampled(data, MOST_ROWS // 2)
    colour = theme.colours(labels)
    channels = _axis(alt.X("x:Q"), data["x"], x), _axis(alt.Y("y:Q"), data["y"], y), colour
    tips = [tip("label", short(by))] if by else []
    tips += [tip("point", short(point))] if point else []
    tips += [tip("x", titled(x), FIGURE), tip("y", titled(y), FIGURE)]
    layers = [
        alt.Chart(drawn).mark_point(filled=True, size=55, opacity=0.5).encode(*channels, tooltip=tips),
        alt.Chart(best).mark_line(strokeWidth=2).encode(*channels, order=alt.Order("x:Q")),
        alt.Chart(best).mark_point(filled=True, size=75, opacity=1).encode(*channels, tooltip=tips),
    ]
    if point:
        layers.append(alt.Chart(sampled(best, 40)).mark_text(dy=-11).encode(*channels[:2], alt.Text("point:N")))
    few = f", {len(drawn):,} of them drawn" if len(drawn) < len(data) else ""
    said = f"n = {len(data):,} runs{few}; {len(best):,} are beaten by none: the line"
    named = f"labels: {titled(point)}" if point else ""
    ways = f"better is {better[0]} across and {better[1]} up"
    return theme.finish(
        alt.layer(*layers),
        f"{upper(short(y))} against {short(x)}",
        said,
        "; ".join(filter(None, [ways, named])),
    )


def trend(frame: pl.DataFrame, x: str, y: str, *, by: str | None = None, limit: float | None = None) -> Any:
    """A figure of many runs against what was varied, a line for each value of `by`, and the SLO's limit."""
    data = _points(frame, x, y, by, None, numeric=frame[x].dtype.is_numeric())
    labels = data["label"].unique(maintain_order=True).to_list()
    drawn = sampled(data, MOST_ROWS)
    colour = theme.colours(labels)
    ordered = data["x"].dtype.is_numeric()
    names = data["x"].unique(maintain_order=True).to_list()
    across = _axis(alt.X("x:Q"), data["x"], x) if ordered else alt.X("x:N", title=titled(x), sort=names)
    values = data["y"] if limit is None else pl.concat([data["y"], pl.Series([limit], dtype=pl.Float64)])
    tips = [tip("label", short(by))] if by else []
    tips += [tip("x", short(x), FIGURE if ordered else None), tip("y", titled(y), FIGURE)]
    base = alt.Chart(drawn).encode(across, _axis(alt.Y("y:Q"), values, y), colour)
    layers: list[Any] = [] if limit is None else theme.level(limit, f"SLO {_shown(y, limit)}")
    layers += [base.mark_line()] if ordered else []
    layers.append(base.mark_point(filled=True, size=55, opacity=1).encode(tooltip=tips))
    few = f", {len(drawn):,} of them drawn" if len(drawn) < len(data) else ""
    coloured = f"; colours: {short(by)}" if by else ""
    return theme.finish(
        alt.layer(*layers), f"{upper(short(y))} against {short(x)}", f"n = {len(data):,} runs{few}{coloured}"
    )


def _points(
    frame: pl.DataFrame, x: str, y: str, by: str | None, point: str | None, *, numeric: bool = True
) -> pl.DataFrame:
    """Runs as rows x, y, label, point; columns of a frame may have any names, those of a chart may not."""
    kind = pl.Float64 if numeric else pl.String
    data = frame.drop_nulls([x, y]).select(
        x=pl.col(x).cast(kind),
        y=pl.col(y).cast(pl.Float64),
        label=pl.col(by).cast(pl.String).fill_null("–") if by else pl.lit("runs"),
        point=pl.col(point).cast(pl.String).fill_null("–") if point else pl.lit(""),
    )
    if not len(data):
        raise NothingToDraw(f"no run has both {short(x)} and {short(y)}")
    return data


def _axis(channel: Any, values: pl.Series, name: str) -> Any:
    """Durations, and what grows by more than a decade and a half, on a log axis."""
    low, high = float(values.to_numpy().min()), float(values.to_numpy().max())
    if low > 0 and is_seconds(name):
        return Log.of(low, high).seconds(channel.title(short(name)))
    if low > 0 and high / low > DECADES:
        axis = Log.of(low, high)
        return channel.title(titled(name)).scale(axis.scale).axis(values=axis.ticks())
    return channel.title(titled(name)).scale(zero=False)


def _whiskers(base: Any) -> list[Any]:
    """From `low` to `high`."""
    ends = [
        base.mark_tick(style="whisker", thickness=1.5, size=10).encode(alt.X(f"{end}:Q")) for end in ("low", "high")
    ]
    return [base.mark_rule(style="whisker").encode(alt.X("low:Q"), alt.X2("high:Q")), *ends]


def _undominated(data: pl.DataFrame, better: tuple[str, str]) -> pl.DataFrame:
    """The rows that no other beats in both columns."""
    up_x, up_y = (way == "higher" for way in better)
    best = (pl.col("y").cum_max() if up_y else pl.col("y").cum_min()).shift(1)
    beats = pl.col("y") > best if up_y else pl.col("y") < best
    return data.sort("x", "y", descending=[up_x, up_y]).filter(best.is_null() | beats)


def _by_slo(found: Found | Mapping[str, Found]) -> Mapping[str, Found]:
    return found if isinstance(found, Mapping) else {"": found}


def _plain(one: Any) -> dict[str, Any]:
    return asdict(one) if is_dataclass(one) and not isinstance(one, type) else dict(one)


def _shown(key: str, value: float | None) -> str:
    return percent(value) if key == "attainment" else seconds(value) if is_seconds(key) else number(value)
