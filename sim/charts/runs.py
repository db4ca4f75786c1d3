"""Charts of what happened in a run, or in several of the same requests."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import polars as pl

from sim.charts import theme
from sim.charts.thin import MOST_ROWS, NothingToDraw, Run, Runs, in_time, labelled, longest_pause, tail
from sim.show import PARTS, percent, seconds

WINDOW = 20.0  # seconds of the clock that `tokens` shows where it is not told
BINS = 160  # of time, per run
PERCENTS = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
PART_COLOURS = dict(
    zip(PARTS.values(), (theme.ORANGE, theme.BLUE, theme.SKY, theme.GREEN, theme.PURPLE, theme.GREY), strict=True)
)
WORK = {"decode": theme.BLUE, "prefill": theme.ORANGE}


def tbt(runs: Runs) -> Any:
    """Time between tokens: the share of gaps that are at least so long, on log axes, with the SLO's limits."""
    pools = {label: run.gaps.select(value="gap_s", count="count") for label, run in labelled(runs).items()}
    return _tails(runs, pools, "tbt", "Time between tokens (TBT)", "gaps between tokens", "gap between two tokens")


def ttft(runs: Runs) -> Any:
    """Time to first token, as `tbt`."""
    taken = (pl.col("first_token_s") - pl.col("arrival_s")).alias("value")
    pools = {}
    for label, run in labelled(runs).items():
        values = run.requests.select(taken).drop_nulls()
        pools[label] = values.group_by("value").agg(pl.len().alias("count")).sort("value")
    title = "Time to first token (TTFT)"
    return _tails(runs, pools, "ttft", title, "requests", "arrival to first token, queueing included")


def tokens(runs: Runs, window: tuple[float, float] | None = None) -> Any:
    """Output tokens of one replica, counted from the start of a window: a stall is a flat piece of the line.

    The window (seconds of the clock) is where the longest pause of any run is, if it is not given.
    """
    several = labelled(runs)
    pauses = {label: pause for label, run in several.items() if (pause := longest_pause(run))}
    if not pauses:
        raise NothingToDraw("no request decoded for two iterations in a row: there are no output tokens to count")
    worst = max(pauses, key=lambda label: pauses[label].seconds)
    pause = pauses[worst]
    span = max(WINDOW, 4 * pause.seconds)
    begin = max(0.0, (pause.start + pause.end - span) / 2)
    low, high = window or (begin, begin + span)
    points = min(500, MOST_ROWS // len(several))
    grid = np.linspace(low, high, points)
    frames = [_counted(label, run, pause.replica, grid) for label, run in several.items()]
    frame = pl.concat(frames)
    across = alt.Scale(domain=[low, high], nice=False)
    base = (
        alt.Chart(frame)
        .mark_line(interpolate="step-after")
        .encode(
            alt.X("time_s:Q", title="time since the run began (s)", scale=across),
            alt.Y("tokens:Q", title="output tokens since the window began"),
            theme.colours(list(several)),
            tooltip=[alt.Tooltip("label:N", title="run"), alt.Tooltip("time_s:Q", title="time (s)", format=".2f")]
            + [alt.Tooltip("tokens:Q", title="tokens so far", format=",")],
        )
    )
    chart: Any = base
    if window is None:
        band = alt.Chart(pl.DataFrame({"from": [pause.start], "to": [pause.end]})).mark_rect(
            color=theme.GREY, opacity=0.25
        )
        chart = alt.layer(band.encode(alt.X("from:Q", scale=across), alt.X2("to:Q")), base)
    said = f"longest pause: {seconds(pause.seconds)} under {worst}, shaded; a flat line is a stall"
    every = f"drawn every {seconds((high - low) / (points - 1))}"
    where = f"replica {pause.replica}, " if any(_replicas(run) > 1 for run in several.values()) else ""
    return theme.finish(chart, "Output tokens over time", said if window is None else "", where + every, wide=True)


def _counted(label: str, run: Run, replica: int, grid: Any) -> pl.DataFrame:
    """Tokens of decodes and first tokens that were emitted since the first time of the grid, at each of its times."""
    steps = run.steps.filter(pl.col("replica") == replica)
    firsts = run.requests.filter(pl.col("replica") == replica)["first_token_s"].drop_nulls().sort().to_numpy()
    order = np.argsort(steps["end_s"].to_numpy(), kind="stable")
    ends, emitted = steps["end_s"].to_numpy()[order], np.cumsum(steps["decodes"].to_numpy()[order])
    at = np.searchsorted(ends, grid, side="right")
    total = np.concatenate([[0], emitted])[at] + np.searchsorted(firsts, grid, side="right")
    return pl.DataFrame({"label": label, "time_s": np.round(grid, 4), "tokens": total - total[0]})


def _replicas(run: Run) -> int:
    return int(run.requests["replica"].drop_nulls().n_unique())


def kv(runs: Runs) -> Any:
    """KV blocks in use over time: mean, least and most of each bin of time."""
    several = labelled(runs)
    shares = {
        label: run.steps.with_columns(pl.col("kv_blocks_used") / run.summary["kv_blocks"])
        for label, run in several.items()
    }
    blocks = {int(run.summary["kv_blocks"]) for run in several.values()}
    each = f"{blocks.pop():,} blocks a replica" if len(blocks) == 1 else "each run has blocks of its own"
    return _bands(several, shares, "kv_blocks_used", "KV memory in use", "KV blocks in use (%)", each, share=True)


def queue(runs: Runs) -> Any:
    """Requests waiting over time, just after scheduling: mean, least and most of each bin of time."""
    several = labelled(runs)
    frames = {label: run.steps for label, run in several.items()}
    return _bands(several, frames, "waiting", "Requests waiting", "requests in the queue of a replica", "per replica")


def batches(run: Run) -> Any:
    """Tokens computed per second over a run, of prompts and of decodes."""
    steps = run.steps
    if not len(steps):
        raise NothingToDraw("no iteration was run, or the run kept none")
    width = float(steps["end_s"].max()) / BINS  # type: ignore[arg-type]
    binned = (
        steps.group_by((pl.col("end_s") / width).floor().clip(0, BINS - 1).cast(pl.Int64).alias("bin"))
        .agg(pl.sum("prefill_tokens").alias("prefill"), pl.sum("decodes").alias("decode"))
        .join(pl.DataFrame({"bin": range(BINS)}), on="bin", how="right")
        .fill_null(0)
        .with_columns(pl.col("prefill", "decode") / width, time_s=(pl.col("bin") + 0.5) * width)
        .unpivot(["decode", "prefill"], index="time_s", variable_name="work", value_name="rate")
    )
    chart = (
        alt.Chart(binned)
        .mark_area(interpolate="step", opacity=0.85)
        .encode(
            alt.X("time_s:Q", title="time since the run began (s)"),
            alt.Y("rate:Q", title="tokens computed per second", stack="zero"),
            theme.parts("work", WORK),
            order=alt.Order("work:N"),
            tooltip=[alt.Tooltip("work:N"), alt.Tooltip("time_s:Q", title="time (s)", format=".1f")]
            + [alt.Tooltip("rate:Q", title="tokens/s", format=",.0f")],
        )
    )
    return theme.finish(
        chart, "What the batches compute", f"{len(steps):,} iterations in bins of {seconds(width)}, {_policy(run)}"
    )


def timeline(run: Run, start: float | None = None, iterations: int = 80) -> Any:
    """Single iterations of one replica: what each batch holds, and which stage works when; what is blank is a bubble.

    Begins at `start` (seconds of the clock), or shortly before the longest pause.
    """
    pause = longest_pause(run)
    if not len(run.steps):
        raise NothingToDraw("no iteration was run, or the run kept none")
    replica = pause.replica if pause else int(run.steps["replica"][0])
    steps = run.steps.with_row_index("step").filter(pl.col("replica") == replica).sort("end_s")
    if start is None:
        first = 0 if pause is None else int(np.searchsorted(steps["end_s"].to_numpy(), pause.start))
        first = max(0, min(first - iterations // 3, len(steps) - iterations))
    else:
        first = int(np.searchsorted(steps["start_s"].to_numpy(), start))
    shown = steps[first : first + max(2, min(iterations, 500))]
    if not len(shown):
        raise NothingToDraw(f"no iteration starts at {start:g} s or later")
    kinds = pl.when(pl.col("prefill_tokens") > 0).then(pl.lit("prefill")).otherwise(pl.lit("decode")).alias("work")
    piped = len(run.stages) > 0
    held, lane = shown.select(pl.col("step").cast(pl.Int64), "decodes", "prefill_tokens", kinds), pl.lit("device")
    if piped:
        lanes, lane = run.stages.join(held, on="step"), pl.format("stage {}", pl.col("stage") + 1)
    else:
        lanes = shown.select("start_s", "end_s", "decodes", "prefill_tokens", kinds)
    lanes = lanes.select("start_s", "end_s", "decodes", "prefill_tokens", "work", lane=lane)
    first_stage = lanes.filter(pl.col("lane") == lanes["lane"].min()).drop("lane", "work")
    both = pl.col("decodes") + pl.col("prefill_tokens")
    composition = pl.concat(
        [
            first_stage.with_columns(low=pl.lit(0, pl.Int64), high="decodes", work=pl.lit("decode")),
            first_stage.with_columns(low="decodes", high=both, work=pl.lit("prefill")),
        ]
    ).filter(pl.col("high") > pl.col("low"))
    low, high = float(lanes["start_s"].min()), float(lanes["end_s"].max())  # type: ignore[arg-type]
    across = alt.Scale(domain=[low, high], nice=False)
    told = [
        alt.Tooltip("start_s:Q", title="start (s)", format=".3f"),
        alt.Tooltip("end_s:Q", title="end (s)", format=".3f"),
        alt.Tooltip("decodes:Q", title="decodes", format=","),
        alt.Tooltip("prefill_tokens:Q", title="prompt tokens", format=","),
    ]
    names = lanes["lane"].unique().sort().to_list()
    busy = float((lanes["end_s"] - lanes["start_s"]).sum())
    idle = max(0.0, 1 - busy / (len(names) * (high - low)))
    edge = {"stroke": "white", "strokeWidth": 0.4, "strokeOpacity": 0.6}
    top = (
        alt.Chart(composition, width=theme.WIDTH, height=170)
        .mark_rect(**edge)
        .encode(
            alt.X("start_s:Q", title=None, scale=across, axis=alt.Axis(labels=False)),
            alt.X2("end_s:Q"),
            alt.Y("low:Q", title="tokens in the batch"),
            alt.Y2("high:Q"),
            theme.parts("work", WORK),
            tooltip=told,
        )
    )
    bottom = alt.Chart(lanes, width=theme.WIDTH, height=26 * len(names)).mark_rect(**edge)
    bottom = bottom.encode(
        alt.X("start_s:Q", title="time since the run began (s)", scale=across),
        alt.X2("end_s:Q"),
        alt.Y("lane:N", title=None, sort=names),
        theme.parts("work", WORK),
        tooltip=told,
    )
    where = f"replica {replica}, " if run.steps["replica"].n_unique() > 1 else ""
    return theme.finish(
        alt.vconcat(top, bottom, spacing=8),
        "Iterations, one by one",
        f"{len(shown)} of {len(run.steps):,} iterations, {where}{_policy(run)}"
        + ("; each at its time in stage 1" if piped else ""),
        f"{percent(idle)} of the time of {'the stages' if len(names) > 1 else 'the device'} is idle here"
        + (" (bubbles)" if len(names) > 1 else ""),
        height=None,
        wide=True,
    )


def time_parts(runs: Runs) -> Any:
    """What a mean iteration's time is spent on, where the latency model says: milliseconds of each part."""
    rows = []
    for label, run in labelled(runs).items():
        summary = run.summary
        if not summary["time_share"]:
            continue
        each = summary["busy_s"] / summary["iterations"] * 1e3
        rows += [
            {"label": label, "part": PARTS[part], "ms": share * each, "share": share, "n": summary["iterations"]}
            for part, share in summary["time_share"].items()
        ]
    if not rows:
        raise NothingToDraw("the latency model does not say what its time is spent on; roofline does")
    frame = pl.DataFrame(rows)
    labels = list(dict.fromkeys(frame["label"]))
    chart = (
        alt.Chart(frame.filter(pl.col("ms") > 0))
        .mark_bar(height=alt.RelativeBandSize(0.7))
        .encode(
            alt.Y("label:N", title=None, sort=labels),
            alt.X("ms:Q", title="milliseconds of a mean iteration, all stages together"),
            theme.parts("part", PART_COLOURS),
            order=alt.Order("rank:Q"),
            tooltip=[alt.Tooltip("label:N", title="run"), alt.Tooltip("part:N")]
            + [alt.Tooltip("ms:Q", title="ms per iteration", format=".3f"), alt.Tooltip("share:Q", format=".1%")]
            + [alt.Tooltip("n:Q", title="iterations", format=",")],
        )
    )
    chart = chart.transform_calculate(rank=f"indexof({list(PARTS.values())}, datum.part)")
    n = _n(dict(zip(frame["label"], frame["n"], strict=True)), "iterations")
    return theme.finish(
        chart, "Where an iteration's time goes", n, "shares are the latency model's own", height=60 + 34 * len(labels)
    )


def _tails(runs: Runs, pools: dict[str, pl.DataFrame], metric: str, title: str, of: str, axis: str) -> Any:
    several = labelled(runs)
    pools = {label: pool for label, pool in pools.items() if len(pool)}
    if not pools:
        raise NothingToDraw(f"there are no {of} to measure")
    most = min(600, MOST_ROWS // len(pools))
    frames, counts = [], {}
    for label, pool in pools.items():
        counts[label] = int(pool["count"].sum())
        points = tail(pool, most).with_columns(label=pl.lit(label), n=counts[label])
        frames.append(points.with_columns(shown=points["value"].map_elements(seconds, return_dtype=pl.String)))
    frame = pl.concat(frames)
    positive = frame.filter(pl.col("value") > 0)
    if not len(positive):
        raise NothingToDraw(f"all {of} take 0 s")
    limits = _limits(several, metric)
    least = min([float(positive["value"].min()), *(row["limit"] for row in limits)])  # type: ignore[arg-type]
    most_s = max([float(positive["value"].max()), *(row["limit"] for row in limits)])  # type: ignore[arg-type]
    xs, ticks = theme.logarithmic(max(least, most_s / 1e7), most_s)
    ys, shares = theme.logarithmic(float(frame["share"].min()), 1.0)  # type: ignore[arg-type]
    shares = [share for share in shares if str(share)[-1] == "1" or share == 1.0]
    chart: Any = (
        alt.Chart(positive)
        .mark_line(interpolate="step-before", clip=True, point=alt.OverlayMarkDef(opacity=0, size=70))
        .encode(
            alt.X("value:Q", scale=xs, title=axis, axis=alt.Axis(values=ticks, labelExpr=theme.SECONDS)),
            alt.Y("share:Q", scale=ys, title=f"share of {of} at least as long").axis(
                values=shares, labelExpr=theme.SHARE
            ),
            theme.colours(list(pools)),
            tooltip=[alt.Tooltip("label:N", title="run"), alt.Tooltip("shown:N", title="at least")]
            + [alt.Tooltip("share:Q", title=f"share of {of}", format=".3~%"), alt.Tooltip("n:Q", format=",")],
        )
    )
    if limits:
        chart = alt.layer(chart, *_limit_lines(limits, (xs.domain[0] * xs.domain[1]) ** 0.5))  # type: ignore[attr-defined]
    met = "dashed: the SLO; a line that passes below the cross meets it" if limits else ""
    return theme.finish(chart, title, _n(counts, of), met)


def _n(counts: dict[str, int], of: str) -> str:
    """How many, of each run where they differ."""
    numbers = list(counts.values())
    if len(set(numbers)) == 1:
        return f"n = {numbers[0]:,} {of}" + (" in each run" if len(numbers) > 1 else "")
    return f"n = {', '.join(f'{label} {count:,}' for label, count in counts.items())} {of}"


def _limits(several: dict[str, Run], metric: str) -> list[dict[str, Any]]:
    """The SLO's limits on percentiles of a metric."""
    found: dict[str, dict[str, Any]] = {}
    for run in several.values():
        for key, verdict in run.summary["slo"].items():
            name, _, percentile = key.rpartition("_")
            if name == metric and percentile in PERCENTS:
                share = round(1 - PERCENTS[percentile], 6)
                shown = f"{percentile.upper()} ≤ {seconds(verdict['limit'])}"
                found[key] = {"limit": verdict["limit"], "share": share, "percentile": percentile.upper()}
                found[key] |= {"shown": f"SLO {shown}"}
    return list(found.values())


def _limit_lines(limits: list[dict[str, Any]], middle: float) -> list[Any]:
    """A dashed line at each limit, a cross where the line and its percentile meet, and its name at the foot."""
    layers = []
    for number, limit in enumerate(limits):
        base = alt.Chart(pl.DataFrame([limit]))
        tip = [alt.Tooltip("shown:N", title="limit")]
        left = limit["limit"] < middle
        layers += [
            base.mark_rule(strokeDash=[5, 4], color=theme.LIMIT, strokeWidth=1.5).encode(alt.X("limit:Q")),
            base.mark_point(shape="cross", filled=True, size=110, color=theme.LIMIT, opacity=1).encode(
                alt.X("limit:Q"), alt.Y("share:Q"), tooltip=tip
            ),
            base.mark_text(align="left" if left else "right", dx=6 if left else -6).encode(
                alt.X("limit:Q"), alt.YValue(theme.HEIGHT - 10 - 15 * number), alt.Text("shown:N")
            ),
        ]
    return layers


def _bands(
    several: dict[str, Run],
    frames: dict[str, pl.DataFrame],
    column: str,
    title: str,
    axis: str,
    of: str,
    *,
    share: bool = False,
) -> Any:
    """A value over time: the mean of each bin as a line, from least to most as a band."""
    ends = [float(frame["end_s"].max()) for frame in frames.values() if len(frame)]  # type: ignore[arg-type]
    if not ends:
        raise NothingToDraw("no iteration was run, or the run kept none")
    end, bins = max(ends), min(BINS, MOST_ROWS // len(frames))
    binned = pl.concat(
        in_time(frame, [column], end=end, bins=bins)
        .select("time_s", value=column, low=f"{column}_min", high=f"{column}_max")
        .with_columns(pl.col("value", "low", "high").cast(pl.Float64), label=pl.lit(label))
        for label, frame in frames.items()
        if len(frame)
    )
    form = ".1%" if share else ",.1f"
    base = alt.Chart(binned).encode(
        alt.X("time_s:Q", title="time since the run began (s)"), theme.colours(list(frames))
    )
    y = alt.Axis(format="%") if share else alt.Axis()
    line = base.mark_line(strokeWidth=1.5, point=alt.OverlayMarkDef(opacity=0, size=60)).encode(
        alt.Y("value:Q", title=axis, axis=y),
        tooltip=[alt.Tooltip("label:N", title="run"), alt.Tooltip("time_s:Q", title="time (s)", format=".1f")]
        + [alt.Tooltip(f"{name}:Q", title=told, format=form) for name, told in (("value", "mean"), ("low", "least"))]
        + [alt.Tooltip("high:Q", title="most", format=form)],
    )
    band = base.mark_area(opacity=0.18).encode(alt.Y("low:Q", title=axis), alt.Y2("high:Q"))
    n = sum(len(frame) for frame in frames.values())
    said = f"{n:,} iterations in bins of {seconds(end / bins)}: mean, and from least to most; {of}"
    return theme.finish(alt.layer(band, line), title, said)


def _policy(run: Run) -> str:
    return str(run.summary["policy"])
