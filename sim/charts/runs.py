"""Charts of what happened in a run, or in several of the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from sim.charts import theme
from sim.charts.theme import Log, tip
from sim.charts.thin import MOST_ROWS, NothingToDraw, Run, Runs, in_time, labelled, longest_pause, tail
from sim.schema import PERCENTILES
from sim.show import PARTS, percent, seconds

WINDOW = 20.0  # seconds of the clock that `tokens` shows at least, where it is not told
INSTANTS = 500  # at which `tokens` counts, per run
BINS = 160  # of time, per run
RANKS = 600  # of a distribution, per run
MOST_ITERATIONS = 500  # of a timeline
CLOCK = "time since the run began (s)"
PART_COLOURS = dict(
    zip(PARTS.values(), (theme.ORANGE, theme.BLUE, theme.SKY, theme.GREEN, theme.PURPLE, theme.GREY), strict=True)
)
WORK = {"decode": theme.BLUE, "prefill": theme.ORANGE}
EDGE: dict[str, Any] = {"stroke": "white", "strokeWidth": 0.4, "strokeOpacity": 0.6}
NO_STEPS = "no iteration was run, or the run kept none"


def tbt(runs: Runs) -> Any:
    """Time between tokens: the share of gaps that are at least so long, on log axes, with the SLO's limits."""
    pools = {label: run.gaps.select(value="gap_s", count="count") for label, run in labelled(runs).items()}
    return _tails(runs, pools, "tbt", "Time between tokens (TBT)", "gaps", "gap between two tokens of a request")


def ttft(runs: Runs) -> Any:
    """Time to first token, as `tbt`."""
    taken = (pl.col("first_token_s") - pl.col("arrival_s")).alias("value")
    pools = {
        label: run.requests.select(taken).drop_nulls().group_by("value").agg(pl.len().alias("count")).sort("value")
        for label, run in labelled(runs).items()
    }
    title = "Time to first token (TTFT)"
    return _tails(runs, pools, "ttft", title, "requests", "arrival to first token, queueing included")


def tokens(runs: Runs, window: tuple[float, float] | None = None) -> Any:
    """Output tokens of one replica, counted from the start of a window: a stall is a flat piece of the line.

    The window (seconds of the clock) is where the longest pause of any run is, if it is not given.
    """
    several = labelled(runs)
    pauses = {label: pause for label, run in several.items() if (pause := longest_pause(run))}
    if not pauses:
        raise NothingToDraw("no request decoded for two iterations in a row")
    worst = max(pauses, key=lambda label: pauses[label].seconds)
    pause = pauses[worst]
    span = max(WINDOW, 4 * pause.seconds)
    begin = max(0.0, (pause.start + pause.end - span) / 2)
    low, high = window or (begin, begin + span)
    instants = np.linspace(low, high, min(INSTANTS, MOST_ROWS // len(several)))
    frame = pl.concat(_counted(label, run, pause.replica, instants) for label, run in several.items())
    across = theme.window(low, high)
    lines = (
        alt.Chart(frame)
        .mark_line(interpolate="step-after")
        .encode(
            alt.X("time_s:Q", title=CLOCK, scale=across),
            alt.Y("tokens:Q", title="output tokens since the window began"),
            theme.colours(list(several)),
            tooltip=[tip("label", "run"), tip("time_s", "time (s)", ".2f"), tip("tokens", "tokens so far", ",")],
        )
    )
    shaded = alt.Chart(pl.DataFrame({"from": [pause.start], "to": [pause.end]})).mark_rect(
        color=theme.GREY, opacity=0.25
    )
    chart = lines
    if window is None:
        chart = alt.layer(shaded.encode(alt.X("from:Q", scale=across), alt.X2("to:Q")), lines)
    said = f"longest pause: {seconds(pause.seconds)} under {worst}, shaded; a flat line is a stall"
    several_replicas = any(run.requests["replica"].drop_nulls().n_unique() > 1 for run in several.values())
    where = f"replica {pause.replica}, " if several_replicas else ""
    every = f"{where}counted every {seconds((high - low) / (len(instants) - 1))}"
    return theme.finish(chart, "Output tokens over time", said if window is None else "", every)


def _counted(label: str, run: Run, replica: int, instants: Any) -> pl.DataFrame:
    """Tokens of decodes and first tokens that were emitted since the first of the instants, at each of them."""
    steps = run.steps.filter(pl.col("replica") == replica).sort("end_s")
    firsts = run.requests.filter(pl.col("replica") == replica)["first_token_s"].drop_nulls().sort().to_numpy()
    emitted = np.concatenate([[0], np.cumsum(steps["decodes"].to_numpy())])
    total = emitted[np.searchsorted(steps["end_s"].to_numpy(), instants, side="right")]
    total = total + np.searchsorted(firsts, instants, side="right")
    return pl.DataFrame({"label": label, "time_s": np.round(instants, 4), "tokens": total - total[0]})


def kv(runs: Runs) -> Any:
    """KV blocks in use over time: mean, least and most of each bin of time."""
    several = labelled(runs)
    shares = {
        label: run.steps.with_columns(pl.col("kv_blocks_used") / run.summary["kv_blocks"])
        for label, run in several.items()
    }
    blocks = {int(run.summary["kv_blocks"]) for run in several.values()}
    each = f"{blocks.pop():,} blocks a replica" if len(blocks) == 1 else "each run has blocks of its own"
    return _bands(shares, "kv_blocks_used", "KV memory in use", "KV blocks in use (%)", each, share=True)


def queue(runs: Runs) -> Any:
    """Requests waiting over time, just after scheduling: mean, least and most of each bin of time."""
    frames = {label: run.steps for label, run in labelled(runs).items()}
    return _bands(frames, "waiting", "Requests waiting", "requests in the queue of a replica", "per replica")


def batches(run: Run) -> Any:
    """Tokens computed per second over a run, of prompts and of decodes."""
    steps = run.steps
    if not len(steps):
        raise NothingToDraw(NO_STEPS)
    width = _end(steps) / BINS
    binned = (
        steps.group_by((pl.col("end_s") / width).floor().clip(0, BINS - 1).cast(pl.Int64).alias("bin"))
        .agg(pl.sum("prefill_tokens").alias("prefill"), pl.sum("decodes").alias("decode"))
        .join(pl.DataFrame({"bin": range(BINS)}), on="bin", how="right")
        .fill_null(0)
        .sort("bin")
        .with_columns(pl.col("prefill", "decode") / width, time_s=(pl.col("bin") + 0.5) * width)
        .unpivot(["decode", "prefill"], index="time_s", variable_name="work", value_name="rate")
        .with_columns(layer=(pl.col("work") == "prefill").cast(pl.Int64))
    )
    chart = (
        alt.Chart(binned)
        .mark_area(interpolate="step", opacity=0.85)
        .encode(
            alt.X("time_s:Q", title=CLOCK),
            alt.Y("rate:Q", title="tokens computed per second", stack="zero"),
            theme.parts("work", WORK),
            order=alt.Order("layer:Q"),
            tooltip=[tip("work", "work"), tip("time_s", "time (s)", ".1f"), tip("rate", "tokens/s", ",.0f")],
        )
    )
    said = f"{len(steps):,} iterations in bins of {seconds(width)}, {run.summary['policy']}"
    return theme.finish(chart, "What the batches compute", said)


def timeline(run: Run, start: float | None = None, iterations: int = 80) -> Any:
    """Single iterations of one replica: what each batch holds, and which stage works when; what is blank is a bubble.

    Begins at `start` (seconds of the clock), or shortly before the longest pause.
    """
    if not len(run.steps):
        raise NothingToDraw(NO_STEPS)
    lanes, count = _lanes(run, start, min(iterations, MOST_ITERATIONS))
    names = lanes["lane"].unique().sort().to_list()
    both = pl.col("decodes") + pl.col("prefill_tokens")
    first = lanes.filter(pl.col("lane") == names[0]).drop("lane", "work")
    held = pl.concat(
        [
            first.with_columns(low=pl.lit(0, pl.Int64), high="decodes", work=pl.lit("decode")),
            first.with_columns(low="decodes", high=both, work=pl.lit("prefill")),
        ]
    ).filter(pl.col("high") > pl.col("low"))
    begin, end = float(lanes["start_s"].to_numpy().min()), _end(lanes)
    idle = max(0.0, 1 - float((lanes["end_s"] - lanes["start_s"]).sum()) / (len(names) * (end - begin)))
    across = theme.window(begin, end)
    tips = [tip("start_s", "start (s)", ".3f"), tip("end_s", "end (s)", ".3f")]
    tips += [tip("decodes", "decodes", ","), tip("prefill_tokens", "prompt tokens", ",")]
    top = alt.Chart(held, width=theme.WIDTH, height=170).mark_rect(**EDGE)
    top = top.encode(
        alt.X("start_s:Q", title=None, scale=across, axis=alt.Axis(labels=False)),
        alt.X2("end_s:Q"),
        alt.Y("low:Q", title="tokens in the batch"),
        alt.Y2("high:Q"),
        theme.parts("work", WORK),
        tooltip=tips,
    )
    bottom = alt.Chart(lanes, width=theme.WIDTH, height=26 * len(names)).mark_rect(**EDGE)
    bottom = bottom.encode(
        alt.X("start_s:Q", title=CLOCK, scale=across),
        alt.X2("end_s:Q"),
        alt.Y("lane:N", title=None, sort=names),
        theme.parts("work", WORK),
        tooltip=tips,
    )
    piped = len(names) > 1
    where = f"replica {lanes['replica'][0]}, " if run.steps["replica"].n_unique() > 1 else ""
    said = f"{count} of {len(run.steps):,} iterations, {where}{run.summary['policy']}"
    return theme.finish(
        alt.vconcat(top, bottom, spacing=8),
        "Iterations, one by one",
        said + ("; each at its time in stage 1" if piped else ""),
        f"{percent(idle)} of the time of the {'stages is idle here (bubbles)' if piped else 'replica is idle here'}",
        height=None,
    )


def _lanes(run: Run, start: float | None, iterations: int) -> tuple[pl.DataFrame, int]:
    """When each stage works on each of some iterations, and how many those are."""
    pause = longest_pause(run)
    replica = pause.replica if pause else int(run.steps["replica"][0])
    numbered = run.steps.with_row_index("step").with_columns(pl.col("step").cast(pl.Int64))
    steps = numbered.filter(pl.col("replica") == replica).sort("end_s")
    if start is not None:
        first = int(np.searchsorted(steps["start_s"].to_numpy(), start))
    else:
        paused = int(np.searchsorted(steps["end_s"].to_numpy(), pause.start)) if pause else 0
        first = max(0, min(paused - iterations // 3, len(steps) - iterations))
    shown = steps[first : first + max(1, iterations)]
    if not len(shown):
        raise NothingToDraw(f"no iteration starts at {start:g} s or later")
    work = pl.when(pl.col("prefill_tokens") > 0).then(pl.lit("prefill")).otherwise(pl.lit("decode")).alias("work")
    if len(run.stages):
        batches = shown.select("step", "decodes", "prefill_tokens")
        lanes = run.stages.join(batches, on="step").with_columns(lane=pl.format("stage {}", pl.col("stage") + 1))
    else:
        lanes = shown.with_columns(lane=pl.lit("replica"))
    return lanes.select("replica", "start_s", "end_s", "decodes", "prefill_tokens", "lane", work), len(shown)


def time_parts(runs: Runs) -> Any:
    """What a mean iteration's time is spent on, where the latency model says: milliseconds of each part."""
    rows, counts = [], {}
    for label, run in labelled(runs).items():
        summary = run.summary
        if not summary["time_share"]:
            continue
        counts[label] = int(summary["iterations"])
        each = summary["busy_s"] / summary["iterations"] * 1e3
        rows += [
            {"label": label, "part": PARTS[part], "rank": rank, "ms": share * each, "share": share}
            for rank, (part, share) in enumerate(summary["time_share"].items())
            if share > 0
        ]
    if not rows:
        raise NothingToDraw("the latency model does not say what its time is spent on; roofline does")
    known = {row["part"] for row in rows}
    chart = (
        alt.Chart(pl.DataFrame(rows))
        .mark_bar(height=alt.RelativeBandSize(0.7))
        .encode(
            alt.Y("label:N", title=None, sort=list(counts)),
            alt.X("ms:Q", title="milliseconds of a mean iteration, all stages together"),
            theme.parts("part", {part: colour for part, colour in PART_COLOURS.items() if part in known}),
            order=alt.Order("rank:Q"),
            tooltip=[
                tip("label", "run"),
                tip("part", "part"),
                tip("ms", "ms per iteration", ".3f"),
                tip("share", "share", ".1%"),
            ],
        )
    )
    said = "by the latency model's own account"
    title = "Where an iteration's time goes"
    return theme.finish(chart, title, _n(counts, "iterations"), said, height=60 + 34 * len(counts))


def _tails(runs: Runs, pools: Mapping[str, pl.DataFrame], metric: str, title: str, of: str, axis: str) -> Any:
    """The share of values that are at least so large, of each run, and the SLO's limits."""
    several = labelled(runs)
    pools = {label: pool for label, pool in pools.items() if len(pool)}
    if not pools:
        raise NothingToDraw(f"there are no {of} to measure")
    counts = {label: int(pool["count"].sum()) for label, pool in pools.items()}
    most = min(RANKS, MOST_ROWS // len(pools))
    points = pl.concat(tail(pool, most).with_columns(label=pl.lit(label)) for label, pool in pools.items())
    points = points.filter(pl.col("value") > 0)
    if not len(points):
        raise NothingToDraw(f"all {of} take 0 s")
    points = points.with_columns(shown=points["value"].map_elements(seconds, return_dtype=pl.String))
    limits = _limits(several.values(), metric)
    values = Log.of(*points["value"], *(limit["limit"] for limit in limits))
    shares = Log.of(*points["share"], 1.0)
    lines = (
        alt.Chart(points)
        .mark_line(interpolate="step-before", clip=True, point=alt.OverlayMarkDef(opacity=0, size=70))
        .encode(
            values.seconds(alt.X("value:Q", title=axis)),
            alt.Y("share:Q", title=f"share of {of} at least as long")
            .scale(shares.scale)
            .axis(values=shares.ticks([1]), labelExpr=theme.SHARE),
            theme.colours(list(pools)),
            tooltip=[tip("label", "run"), tip("shown", "at least"), tip("share", f"share of {of}", ".3~%")],
        )
    )
    chart = alt.layer(lines, *_limit_lines(limits, values)) if limits else lines
    met = "dashed: the SLO; a line that passes below the cross meets it" if limits else ""
    return theme.finish(chart, title, _n(counts, of), met)


def _n(counts: Mapping[str, int], of: str) -> str:
    """How many, of each run where they differ."""
    numbers = list(counts.values())
    if len(set(numbers)) == 1:
        return f"n = {numbers[0]:,} {of}" + (" in each run" if len(numbers) > 1 else "")
    return f"n = {', '.join(f'{label} {count:,}' for label, count in counts.items())} {of}"


def _limits(runs: Any, metric: str) -> list[dict[str, Any]]:
    """The SLO's limits on percentiles of a metric."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        for key, verdict in run.summary["slo"].items():
            name, _, percentile = key.rpartition("_")
            if name == metric and percentile in PERCENTILES:
                shown = f"SLO {percentile.upper()} ≤ {seconds(verdict['limit'])}"
                share = round(1 - PERCENTILES[percentile] / 1000, 6)
                found[key] = {"limit": verdict["limit"], "share": share, "shown": shown}
    return list(found.values())


def _limit_lines(limits: Sequence[Mapping[str, Any]], values: Log) -> list[Any]:
    """A dashed line at each limit, a cross where the line and its percentile meet, and its name at the foot."""
    layers: list[Any] = []
    for number, limit in enumerate(limits):
        base = alt.Chart(pl.DataFrame([limit])).encode(alt.X("limit:Q"))
        left = limit["limit"] < (values.low * values.high) ** 0.5
        layers += [
            base.mark_rule(strokeDash=[5, 4], strokeWidth=1.5),
            base.mark_point(shape="cross", filled=True, size=110, color=theme.LIMIT, opacity=1).encode(
                alt.Y("share:Q"), tooltip=[tip("shown", "limit")]
            ),
            base.mark_text(align="left" if left else "right", dx=6 if left else -6).encode(
                y=alt.value(theme.HEIGHT - 10 - 15 * number), text="shown:N"
            ),
        ]
    return layers


def _bands(
    frames: Mapping[str, pl.DataFrame], column: str, title: str, axis: str, of: str, *, share: bool = False
) -> Any:
    """A value over time: the mean of each bin as a line, from least to most as a band."""
    frames = {label: frame for label, frame in frames.items() if len(frame)}
    if not frames:
        raise NothingToDraw(NO_STEPS)
    end, bins = max(map(_end, frames.values())), min(BINS, MOST_ROWS // len(frames))
    binned = pl.concat(
        in_time(frame, [column], end=end, bins=bins)
        .select("time_s", value=column, low=f"{column}_min", high=f"{column}_max")
        .with_columns(pl.col("value", "low", "high").cast(pl.Float64), label=pl.lit(label))
        for label, frame in frames.items()
    )
    form = ".1%" if share else ",.1f"
    base = alt.Chart(binned).encode(alt.X("time_s:Q", title=CLOCK), theme.colours(list(frames)))
    line = base.mark_line(strokeWidth=1.5, point=alt.OverlayMarkDef(opacity=0, size=60)).encode(
        alt.Y("value:Q", title=axis, axis=alt.Axis(format="%") if share else alt.Axis()),
        tooltip=[
            *(tip("label", "run"), tip("time_s", "time (s)", ".1f")),
            *(tip("value", "mean", form), tip("low", "least", form), tip("high", "most", form)),
        ],
    )
    band = base.mark_area(opacity=0.18 if len(frames) == 1 else 0.1)
    n = sum(len(frame) for frame in frames.values())
    said = f"{n:,} iterations in bins of {seconds(end / bins)}: mean, and from least to most; {of}"
    return theme.finish(alt.layer(band.encode(alt.Y("low:Q", title=axis), alt.Y2("high:Q")), line), title, said)


def _end(steps: pl.DataFrame) -> float:
    """When the last iteration ended."""
    return float(steps["end_s"].to_numpy().max())
