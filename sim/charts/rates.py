"""Charts of searches and of many runs: what rate holds, what it costs, and what one figure is traded for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import altair as alt
import polars as pl

from sim.charts import theme
from sim.charts.thin import MOST_ROWS, NothingToDraw, sampled
from sim.names import is_seconds, short, titled
from sim.show import number, seconds

Found = Sequence[Any]  # of sim.capacity.Capacity, or of the rows of capacity.json


def capacity(found: Found | Mapping[str, Found], baseline: str | None = None) -> Any:
    """The rate that each policy holds, with its interval over seeds and how many times the baseline's it is.

    `found` is what `sim.capacity` gives; or that for several SLOs, by their names. The baseline is the first policy.
    """
    groups = {slo: [_plain(one) for one in each] for slo, each in _by_slo(found).items()}
    rows: list[dict[str, Any]] = []
    for slo, each in groups.items():
        if not each:
            raise NothingToDraw("no capacity was searched")
        base = next((one for one in each if one["policy"] == baseline), each[0])
        for one in each:
            low, high = one["interval"] or (None, None)
            gain = one["rate"] / base["rate"] if base["rate"] and one is not base else None
            told = number(one["rate"]) if one["rate"] else "not feasible"
            rows.append(
                {"slo": slo, "label": one["policy"], "rate": one["rate"], "low": low, "high": high}
                | {"limited": one["limited_by"] or "nothing that was tried", "seeds": len(one["seeds"])}
                | {"right": max(one["rate"], high or 0.0), "gain": f"× {gain:.2f}" if gain else ""}
                | {"shown": told + (f"  (×{gain:.2f})" if gain else "")}
            )
    frame = pl.DataFrame(rows, infer_schema_length=None)
    labels = list(dict.fromkeys(frame["label"]))
    many = len(groups) > 1
    lane = alt.Y("label:N", title=None, sort=labels) if not many else alt.Y("slo:N", title=None, sort=list(groups))
    offset = {"yOffset": alt.YOffset("label:N", sort=labels)} if many else {}
    longest = max(float(frame["right"].max()), 1e-9)  # type: ignore[arg-type]
    scale = alt.Scale(domain=[0, longest * 1.25], nice=False)
    base = alt.Chart(frame).encode(lane, **offset)
    told = [
        alt.Tooltip("label:N", title="policy"),
        alt.Tooltip("rate:Q", title="requests/s", format=".4~r"),
        alt.Tooltip("low:Q", title="least of the seeds", format=".4~r"),
        alt.Tooltip("high:Q", title="most of the seeds", format=".4~r"),
        alt.Tooltip("limited:N", title="limited by"),
    ]
    x = alt.X("rate:Q", title="arrival rate that meets the SLO (requests/s, all replicas)", scale=scale)
    bars = base.mark_bar(opacity=0.9).encode(x, theme.colours(labels), tooltip=told)
    text = base.mark_text(align="left", dx=6).encode(alt.X("right:Q"), alt.Text("shown:N"))
    layers = [bars, text]
    if frame["low"].null_count() < len(frame):
        spread = base.mark_rule(strokeWidth=2, color="black").encode(alt.X("low:Q"), alt.X2("high:Q"))
        ends = [
            base.mark_tick(thickness=2, size=10, color="black").encode(alt.X(f"{side}:Q")) for side in ("low", "high")
        ]
        layers = [bars, spread.transform_filter("isValid(datum.low)"), *ends, text]
    first = baseline or rows[0]["label"]
    seeds = rows[0]["seeds"]
    whiskers = (
        f"whiskers: smallest and largest of {seeds} searches, one a seed" if seeds > 1 else "one seed: no interval"
    )
    gains = f"in brackets: times {first}" if len(labels) > 1 else ""
    height = 60 + 40 * (len(frame) if not many else len(groups) * (len(labels) * 0.6 + 0.4))
    return theme.finish(alt.layer(*layers), "Capacity", whiskers, gains, height=int(height))


def latency_at_rate(found: Found, key: str, limit: float | None = None) -> Any:
    """A figure of the SLO at every rate that a search tried, with its limit and the capacity interval of each policy.

    Trials that were stopped, because they could not pass any more, have no value: they are ticks at the upper edge.
    """
    each = [_plain(one) for one in found]
    rows = [
        {"label": one["policy"], "rate": trial["rate"], "value": trial["values"].get(key), "met": trial["met"]}
        | {"limited": trial["limited_by"] or "", "shown": told(trial["values"].get(key))}
        for one in each
        for trial in one["trials"]
        if trial["values"].get(key) is not None
    ]
    rows.sort(key=lambda row: (row["label"], row["rate"]))
    if not rows:
        raise NothingToDraw(f"no trial has a value of {key}")
    stopped = [
        {"label": one["policy"], "rate": trial["rate"], "limited": trial["limited_by"] or ""}
        for one in each
        for trial in one["trials"]
        if trial["stopped"] and trial["rate"] <= 4 * max(row["rate"] for row in rows)
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None)
    labels = [one["policy"] for one in each]
    colour = theme.colours(labels)
    rates = [row["rate"] for row in rows + stopped]
    xs, ticks = theme.logarithmic(min(rates), max(rates))
    x = alt.X("rate:Q", title="arrival rate (requests/s, all replicas)", scale=xs, axis=alt.Axis(values=ticks))
    values = [row["value"] for row in rows] + ([limit] if limit else [])
    y = alt.Y("value:Q", title=titled(key))
    positive = [value for value in values if value > 0]
    if key != "attainment" and positive:
        ys, marks = theme.logarithmic(max(min(positive), max(positive) / 1e5), max(positive))
        y = y.scale(ys).axis(values=marks, labelExpr=theme.SECONDS).title(short(key))
    layers: list[Any] = []
    bands = [
        {"label": one["policy"], "low": one["interval"][0], "high": one["interval"][1]}
        for one in each
        if one["interval"] and one["interval"][0]
    ]
    if bands:
        layers.append(
            alt.Chart(pl.DataFrame(bands)).mark_rect(opacity=0.18)
            .encode(alt.X("low:Q", scale=xs), alt.X2("high:Q"), colour)
        )  # fmt: skip
    if limit is not None:
        line = alt.Chart(pl.DataFrame({"limit": [limit], "shown": [f"SLO {told(limit)}"]}))
        layers.append(line.mark_rule(strokeDash=[5, 4], color=theme.LIMIT, strokeWidth=1.5).encode(alt.Y("limit:Q")))
        layers.append(
            line.mark_text(align="left", dy=-8, dx=4).encode(alt.XValue(0), alt.Y("limit:Q"), alt.Text("shown:N"))
        )
    tip = [alt.Tooltip("label:N", title="policy"), alt.Tooltip("rate:Q", title="requests/s", format=".4~r")]
    tip_value = [alt.Tooltip("shown:N", title=titled(key)), alt.Tooltip("met:N", title="all of the SLO met")]
    base = alt.Chart(frame).encode(x, y, colour)
    layers.append(base.mark_line(strokeWidth=1.5, clip=True))
    layers.append(
        base.mark_point(filled=True, size=50, opacity=1, clip=True).encode(
            shape=alt.Shape(
                "met:N", scale=alt.Scale(domain=[True, False], range=["circle", "triangle-up"]), legend=None
            ),
            tooltip=[*tip, *tip_value, alt.Tooltip("limited:N", title="limited by")],
        )
    )
    if stopped:
        layers.append(
            alt.Chart(pl.DataFrame(stopped)).mark_point(shape="triangle-down", size=45, filled=True, opacity=0.8)
            .encode(x, alt.YValue(6), colour, tooltip=[*tip, alt.Tooltip("limited:N", title="stopped: missed")])
        )  # fmt: skip
    said = f"{len(rows)} trials with a value; circles meet all of the SLO, triangles do not"
    if stopped:
        said += f"; {len(stopped)} stopped early, at the upper edge"
    shaded = "shaded: capacity, from the least to the most of the seeds" if bands else ""
    return theme.finish(alt.layer(*layers), f"{titled(key).removesuffix(' (s)')} against rate", said, shaded)


def cost(result: Mapping[str, Any]) -> Any:
    """Cost per million output tokens, and how load, price and SLO move it (what `sim.cost` gives)."""
    base = result["per_million_output_tokens"]
    if base is None:
        raise NothingToDraw("nothing is served within the SLO: there is no cost")
    sensitivity = result["sensitivity"]
    rows = [{"what": "as it is", "kind": "base", "cost": base}]
    rows += [
        {"what": f"at {float(load):.0%} of that rate", "kind": "load", "cost": price}
        for load, price in sensitivity["load"].items()
        if float(load) != 1
    ]
    rows += [
        {"what": f"at {float(factor):.0%} of the price", "kind": "price", "cost": price}
        for factor, price in sensitivity["gpu_hour"].items()
    ]
    rows += [
        {"what": f"latency limits × {scale}", "kind": "SLO", "cost": row.get("per_million_output_tokens")}
        for scale, row in sensitivity["slo"].items()
        if float(scale) != 1
    ]
    spread = result["interval_per_million_output_tokens"]
    edge = spread[1] if spread and None not in spread else base
    frame = pl.DataFrame(rows, infer_schema_length=None).with_columns(
        right=pl.when(pl.col("kind") == "base").then(max(base, edge)).otherwise("cost"),
        shown=pl.col("cost").map_elements(number, return_dtype=pl.String, skip_nulls=False),
        change=pl.col("cost") / base - 1,
    )
    order = frame["what"].to_list()
    shades = {"base": theme.GREY, "load": theme.BLUE, "price": theme.ORANGE, "SLO": theme.GREEN}
    top = float(frame["cost"].max()) * 1.15  # type: ignore[arg-type]
    lane = alt.Y("what:N", title=None, sort=order, axis=alt.Axis(labelLimit=220))
    chart = alt.Chart(frame).encode(lane)
    bars = chart.mark_bar(height=alt.RelativeBandSize(0.72)).encode(
        alt.X(
            "cost:Q", title="cost per million output tokens (currency of the price)", scale=alt.Scale(domain=[0, top])
        ),
        theme.parts("kind", shades).legend(None),
        tooltip=[alt.Tooltip("what:N"), alt.Tooltip("cost:Q", format=".4~r"), alt.Tooltip("change:Q", format="+.1%")],
    )
    text = chart.mark_text(align="left", dx=5).encode(alt.X("right:Q"), alt.Text("shown:N"))
    layers = [bars, text]
    if spread and None not in spread:
        whisker = alt.Chart(pl.DataFrame({"what": ["as it is"], "low": [spread[0]], "high": [spread[1]]})).encode(lane)
        layers.insert(1, whisker.mark_rule(strokeWidth=2, color="black").encode(alt.X("low:Q"), alt.X2("high:Q")))
    said = f"{result['devices']} × {result['gpu_hour']:g} an hour, {number(result['rate'])} requests/s"
    said += ", the capacity within the SLO" if result["rate_from"] == "capacity" else ", the scenario's own rate"
    return theme.finish(
        alt.layer(*layers), "Cost of output tokens", said, "the price is a parameter: [cost] gpu_hour",
        height=30 * len(rows) + 20,
    )  # fmt: skip


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
    told_by = pl.col(by).cast(pl.String) if by else pl.lit("runs")
    data = frame.drop_nulls([x, y]).select(
        x=pl.col(x).cast(pl.Float64),
        y=pl.col(y).cast(pl.Float64),
        label=told_by,
        point=pl.col(point).cast(pl.String) if point else pl.lit(""),
    )
    if not len(data):
        raise NothingToDraw(f"no run has both {x} and {y}")
    labels = data["label"].unique(maintain_order=True).to_list()
    best = pl.concat(_undominated(data.filter(pl.col("label") == label), better) for label in labels)
    drawn = sampled(data, MOST_ROWS // 2)
    colour = theme.colours(labels) if by else alt.value(theme.BLUE)
    across, up = _axis(alt.X("x:Q", title=titled(x)), data["x"], x), _axis(alt.Y("y:Q", title=titled(y)), data["y"], y)
    tip = [alt.Tooltip("label:N", title=titled(by))] if by else []
    tip += [alt.Tooltip("point:N", title=titled(point))] if point else []
    tip += [alt.Tooltip("x:Q", title=titled(x), format=".4~r"), alt.Tooltip("y:Q", title=titled(y), format=".4~r")]
    dots = alt.Chart(drawn).mark_point(filled=True, size=55, opacity=0.55).encode(across, up, colour, tooltip=tip)
    line = alt.Chart(best).mark_line(strokeWidth=2).encode(across, up, colour, order=alt.Order("x:Q"))
    on_it = alt.Chart(best).mark_point(filled=True, size=75, opacity=1).encode(across, up, colour, tooltip=tip)
    layers = [dots, line, on_it]
    if point:
        shown = sampled(best, 40)
        layers.append(alt.Chart(shown).mark_text(dy=-10, align="center").encode(across, up, alt.Text("point:N")))
    short_x, short_y = short(x), short(y)
    said = f"{len(data):,} runs, {len(best):,} of them on a front; better is {better[0]} across, {better[1]} up"
    said += f"; drawn: {len(drawn):,}" if len(drawn) < len(data) else ""
    named = f"labels: {titled(point)}" if point else ""
    return theme.finish(alt.layer(*layers), f"{short_y} against {short_x}", said, named)


def trend(frame: pl.DataFrame, x: str, y: str, *, by: str | None = None, limit: float | None = None) -> Any:
    """A figure of many runs against what was varied, a line for each value of `by`."""
    data = frame.drop_nulls([x, y]).select(
        x=pl.col(x), y=pl.col(y).cast(pl.Float64), label=pl.col(by).cast(pl.String) if by else pl.lit("runs")
    )
    if not len(data):
        raise NothingToDraw(f"no run has both {x} and {y}")
    labels = data["label"].unique(maintain_order=True).to_list()
    colour = theme.colours(labels) if by else alt.value(theme.BLUE)
    numeric = data["x"].dtype.is_numeric()
    if numeric:
        data = data.with_columns(pl.col("x").cast(pl.Float64))
        across = _axis(alt.X("x:Q", title=titled(x)), data["x"], x)
    else:
        data = data.with_columns(pl.col("x").cast(pl.String))
        across = alt.X("x:N", title=titled(x), sort=data["x"].unique(maintain_order=True).to_list())
    drawn = sampled(data, MOST_ROWS)
    both = data["y"] if limit is None else pl.concat([data["y"], pl.Series([limit])])
    up = _axis(alt.Y("y:Q", title=titled(y)), both, y)
    tip = [alt.Tooltip("label:N", title=titled(by))] if by else []
    tip += [alt.Tooltip(f"x:{'Q' if numeric else 'N'}", title=titled(x))]
    tip += [alt.Tooltip("y:Q", title=titled(y), format=".4~r")]
    base = alt.Chart(drawn).encode(across, up, colour)
    dots = base.mark_point(filled=True, size=55, opacity=1).encode(tooltip=tip)
    layers: list[Any] = [base.mark_line(), dots] if numeric else [dots]
    if limit is not None:
        line = alt.Chart(pl.DataFrame({"limit": [limit], "shown": [f"SLO {told(limit)}"]}))
        layers.insert(0, line.mark_rule(strokeDash=[5, 4], color=theme.LIMIT).encode(alt.Y("limit:Q")))
        layers.insert(
            1, line.mark_text(align="left", dy=-8, dx=4).encode(alt.XValue(0), alt.Y("limit:Q"), text="shown")
        )
    short_x, short_y = short(x), short(y)
    thinned = f", {len(drawn):,} drawn" if len(drawn) < len(data) else ""
    return theme.finish(alt.layer(*layers), f"{short_y} against {short_x}", f"{len(data):,} runs{thinned}")


def told(value: float | None) -> str:
    """A duration in short."""
    return seconds(value)


def _axis(channel: Any, values: pl.Series, name: str) -> Any:
    """Durations, and what goes over more than two decades, on a log axis."""
    low, high = float(values.min()), float(values.max())  # type: ignore[arg-type]
    duration = is_seconds(name)
    if low <= 0 or (not duration and high / low < 30):
        return channel.scale(zero=False) if low > 0 else channel
    scale, ticks = theme.logarithmic(low, high)
    return (
        channel.scale(scale)
        .axis(values=ticks, **({"labelExpr": theme.SECONDS} if duration else {}))
        .title(short(name) if duration else titled(name))
    )


def _undominated(data: pl.DataFrame, better: tuple[str, str]) -> pl.DataFrame:
    """The rows that no other beats in both columns."""
    up_x, up_y = (way == "higher" for way in better)
    ordered = data.sort("x", "y", descending=[up_x, up_y])
    best = (pl.col("y").cum_max() if up_y else pl.col("y").cum_min()).shift(1)
    beats = pl.col("y") > best if up_y else pl.col("y") < best
    return ordered.filter(best.is_null() | beats)


def _by_slo(found: Found | Mapping[str, Found]) -> Mapping[str, Found]:
    return found if isinstance(found, Mapping) else {"": found}


def _plain(one: Any) -> dict[str, Any]:
    return asdict(one) if is_dataclass(one) and not isinstance(one, type) else dict(one)
