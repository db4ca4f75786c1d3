"""The report page: one HTML file of what a directory holds, that needs nothing else to be looked at."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import polars as pl

from sim import charts, tables
from sim.charts import theme
from sim.errors import BadInput
from sim.names import is_seconds, short
from sim.report import times_from
from sim.results import Kept, Run
from sim.scenario import Scenario
from sim.show import number
from sim.tables import Table, Verdict

MOST_POINTS = 200  # rows of a sweep's table
MOST_LABELS = 8  # lines of one chart
WIDE = ("tokens", "timeline")  # charts that take all of a row
Chart = Callable[[], Any]


@dataclass
class Part:
    """One result: its verdict, its charts (by name, made when they are asked for) and its tables."""

    kind: str
    name: str
    verdict: Verdict
    charts: dict[str, Chart]
    tables: list[Table]
    notes: list[str] = field(default_factory=list)
    about: list[str] = field(default_factory=list)


def parts(kept: Kept) -> list[Part]:
    """What a directory holds: searches and comparisons before the runs that they are made of."""
    made = list(_parts(kept))
    first = next(iter((kept.runs or {}).values()), kept.run)
    for part in made:
        part.about = _about(_of(kept.scenario or (first.scenario if first else None)))
    return made


def html(kept: Kept, made: Sequence[Part]) -> str:
    """The page. Everything that comes from files is escaped."""
    drawn = [_drawn(part, number) for number, part in enumerate(made)]
    return tables.environment().get_template("report.html").render(
        title=made[0].name or kept.directory.name,
        parts=list(zip(made, drawn, strict=True)),
        scenarios=_scenarios(kept),
        provenance=_provenance(kept),
        light=_config(dark=False),
        dark=_config(dark=True),
        lighter=theme.LIGHTER,
        library=_library(),
    )  # fmt: skip


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed, from the installed package; `</script` in it would end the page's script."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")


@dataclass(frozen=True)
class Figure:
    """A chart as the page has it: its title and captions are text beside it, its theme is the page's."""

    id: str
    name: str
    title: str
    captions: list[str]
    spec: dict[str, Any]
    wide: bool


def _drawn(part: Part, number: int) -> tuple[list[Figure], list[str]]:
    """The charts of a part, and why some are left out."""
    figures, left_out = [], []
    for name, make in part.charts.items():
        try:
            spec = make().to_dict()
        except charts.NothingToDraw as error:
            left_out.append(f"{name}: {error.what}")
            continue
        title = spec.pop("title")
        spec.pop("config")
        figures.append(Figure(f"chart-{number}-{name}", name, title["text"], title["subtitle"], spec, name in WIDE))
    return _filled(figures), left_out


def _filled(figures: Sequence[Figure]) -> list[Figure]:
    """Two figures in a row; one that would stand alone in its row takes all of it."""
    filled: list[Figure] = []
    alone = False  # whether the last one waits for a neighbour
    for one in figures:
        if one.wide and alone:
            filled[-1] = replace(filled[-1], wide=True)
        alone = not one.wide and not alone
        filled.append(one)
    if alone:
        filled[-1] = replace(filled[-1], wide=True)
    return filled


def _config(*, dark: bool) -> dict[str, Any]:
    return theme.config(dark=dark) | {"background": None}


def _parts(kept: Kept) -> Iterator[Part]:
    if kept.validation is not None:
        yield _validation(kept.validation, kept.validation_steps, kept.runs or {})
    elif kept.runs is not None:
        yield _comparison(kept.runs)
    if kept.capacity is not None:
        yield _capacity(kept.capacity, _of(kept.scenario))
    if kept.cost is not None:
        yield Part(
            "cost",
            kept.cost["name"],
            tables.of_cost(kept.cost),
            {"cost": lambda: charts.cost(kept.cost or {})},
            [tables.costs(kept.cost)],
            [*kept.cost["notes"], *_times(kept.scenario)],
        )
    if kept.sweep is not None:
        yield _sweep(kept.sweep, kept.study)
    if kept.run is not None:
        yield _run(kept.run)


def _run(run: Run) -> Part:
    summary = run.summary
    slo = [tables.limits(summary)] if summary["slo"] else []
    return Part(
        "run",
        summary["name"],
        tables.of_run(summary),
        _of_runs(run)
        | {"timeline": lambda: charts.timeline(run), "batches": lambda: charts.batches(run)}
        | {"time_parts": lambda: charts.time_parts(run)},
        [tables.distributions(summary), *slo, tables.machine(summary)],
        [*summary["notes"], summary["times_from"]],
    )


def _comparison(runs: Mapping[str, Run]) -> Part:
    summaries = [run.summary for run in runs.values()]
    notes = dict.fromkeys(note for one in summaries for note in [*one["notes"], one["times_from"]])
    return Part(
        "comparison",
        summaries[0]["name"],
        tables.of_comparison(summaries),
        _of_runs(runs) | {"time_parts": lambda: charts.time_parts(runs)},
        [tables.side_by_side(summaries)],
        list(notes),
    )


def _of_runs(runs: charts.Runs) -> dict[str, Chart]:
    return {
        "tokens": lambda: charts.tokens(runs),
        "tbt": lambda: charts.tbt(runs),
        "ttft": lambda: charts.ttft(runs),
        "queue": lambda: charts.queue(runs),
        "kv": lambda: charts.kv(runs),
    }


def _capacity(found: Sequence[Mapping[str, Any]], scenario: dict[str, Any]) -> Part:
    limits = {key: limit for key, limit in scenario.get("slo", {}).items() if not isinstance(limit, bool)}
    keys = dict.fromkeys(key for one in found for trial in one["trials"] for key in trial["values"])

    def at_rate(key: str) -> Chart:
        return lambda: charts.latency_at_rate(found, key, limits.get(key))

    notes = dict.fromkeys(note for one in found for note in one["notes"])
    return Part(
        "capacity",
        str(scenario.get("name", "")),
        tables.of_capacity(found),
        {"capacity": lambda: charts.capacity(found)} | {f"{key}_at_rate": at_rate(key) for key in keys},
        [tables.capacities(found), tables.trials(found)],
        [*notes, *_times_of(scenario)],
    )


def _validation(result: Mapping[str, Any], steps: pl.DataFrame | None, runs: Mapping[str, Run]) -> Part:
    drawn: dict[str, Chart] = {"errors": lambda: charts.errors(result["metrics"])}
    if steps is not None:
        drawn |= {"steps": lambda: charts.steps(steps), "quantiles": lambda: charts.quantiles(steps)}
    if {"measured", "simulated"} <= runs.keys():
        drawn["tbt_quantiles"] = lambda: charts.tbt_quantiles(runs["measured"], runs["simulated"])
    if runs:
        drawn |= {"tbt": lambda: charts.tbt(runs), "ttft": lambda: charts.ttft(runs)}
    notes = [f"{side}: {run.summary['times_from']}" for side, run in runs.items()]
    return Part(
        "validation", result["name"], tables.of_validation(result), drawn, tables.validation(result), notes
    )  # fmt: skip


def _sweep(frame: pl.DataFrame, study: str | None) -> Part:
    """What was varied is between the columns `point` and `status`."""
    columns = frame.columns
    axes = columns[columns.index("point") + 1 : columns.index("status")]
    done = frame.filter(pl.col("status") == "done")
    varied = [axis for axis in axes if done[axis].n_unique() > 1]
    searched = "capacity_rate" in columns
    shown = [
        *("capacity_rate", "capacity_low", "capacity_high", "limited_by", "cost_per_million_output_tokens"),
        *("ttft_s_p50", "tbt_s_p99", "request_throughput", "output_throughput", "slo_met"),
    ]
    shown = [column for column in shown if column in columns]
    rows = [
        [str(row["point"]), *(_value(axis, row[axis]) for axis in axes), row["status"]]
        + [tables.figure(column, row[column]) for column in shown]
        + [row.get("reason") or ""]
        for row in frame.head(MOST_POINTS).iter_rows(named=True)
    ]
    note = f"The first {MOST_POINTS} of {len(frame):,} points." if len(frame) > MOST_POINTS else ""
    head = ["point", *map(short, axes), "status", *map(short, shown), "reason"]
    table = Table("Points", head, rows, note, folded=len(rows) > 30)
    name = str(_of(study).get("name", ""))
    notes = [str(told) for told in done["times_from"].unique(maintain_order=True)] if "times_from" in columns else []
    return Part("sweep", name, _of_sweep(frame, done, axes, searched), _trends(done, varied, searched), [table], notes)


def _value(axis: str, value: Any) -> str:
    """What a scenario's key was set to, as it was written, but for durations."""
    return tables.figure(axis, value) if value is None or is_seconds(axis) else str(value)


def _of_sweep(frame: pl.DataFrame, done: pl.DataFrame, axes: Sequence[str], searched: bool) -> Verdict:
    """The best point of a sweep."""
    failed = f"; {len(frame) - len(done):,} of {len(frame):,} failed" if len(done) < len(frame) else ""

    def at(row: Mapping[str, Any]) -> str:
        return ", ".join(f"{short(axis)} {_value(axis, row[axis])}" for axis in axes if row[axis] is not None)

    if searched and len(best := done.drop_nulls("capacity_rate").top_k(1, by="capacity_rate")):
        row = best.row(0, named=True)
        rate = number(row["capacity_rate"])
        return Verdict(f"Of {len(done):,} points, {at(row)} holds the highest rate, {rate} requests/s{failed}.")
    if "slo_met" in done.columns and done["slo_met"].drop_nulls().len():
        met = done.filter(pl.col("slo_met"))
        told = f"{len(met):,} of {len(done):,} points meet the SLO"
        if len(met) and "request_throughput" in met.columns:
            row = met.top_k(1, by="request_throughput").row(0, named=True)
            told += f"; the most requests, {number(row['request_throughput'])} a second, at {at(row)}"
        return Verdict(f"{told}{failed}.", "met" if len(met) else "missed")
    return Verdict(f"{len(done):,} points are done{failed}.")


def _trends(done: pl.DataFrame, varied: Sequence[str], searched: bool) -> dict[str, Chart]:
    """Figures against what was varied: the axis with most numbers across, all others by colour."""
    numeric = [axis for axis in varied if done[axis].dtype.is_numeric()]
    if not varied:
        return {}
    across = max(numeric or varied, key=lambda axis: done[axis].n_unique())
    others = [axis for axis in varied if axis != across]
    data, by = done, None
    if others:
        values = [pl.col(axis).cast(pl.String).fill_null("–") for axis in others]
        name = others[0] if len(others) == 1 else ", ".join(map(short, others))
        data = done.sort(across).with_columns(pl.concat_str(values, separator=", ").alias(name))
        by = name if data[name].n_unique() <= MOST_LABELS else None

    def trend(y: str) -> Chart:
        limit = f"slo_{y.replace('_s_', '_')}_limit"
        known = data[limit].drop_nulls().unique() if limit in data.columns else pl.Series([])
        return lambda: charts.trend(data, across, y, by=by, limit=float(known[0]) if len(known) == 1 else None)

    def front(x: str, y: str, better: tuple[str, str]) -> Chart:
        return lambda: charts.front(data, x, y, by=by, point=across, better=better)

    wanted = (
        ("capacity_rate", "cost_per_million_output_tokens")
        if searched
        else ("tbt_s_p99", "ttft_s_p50", "request_throughput")
    )
    drawn = {y: trend(y) for y in wanted if y in data.columns}
    fronts = {
        "cost_front": ("capacity_rate", "cost_per_million_output_tokens", ("higher", "lower")),
        "throughput_front": ("request_throughput", "tbt_s_p99", ("higher", "lower")),
        "latency_front": ("ttft_s_p50", "tbt_s_p99", ("lower", "lower")),
    }
    return drawn | {n: front(x, y, b) for n, (x, y, b) in fronts.items() if {x, y} <= set(data.columns)}


def _about(scenario: Mapping[str, Any]) -> list[str]:
    """What serves, in short."""
    model, device, split = (scenario.get(table, {}) for table in ("model", "device", "deployment"))
    told = []
    if model.get("name"):
        tp, pp = split.get("tensor_parallel", 1), split.get("pipeline_parallel", 1)
        many = f" × {split['replicas']} replicas" if split.get("replicas", 1) > 1 else ""
        parallel = "".join(f" {name}{n}" for name, n in (("TP", tp), ("PP", pp)) if n > 1)
        told.append(f"{model['name']} on {tp * pp} × {device.get('name', 'a device')}{parallel}{many}")
    latency = scenario.get("latency", {})
    if latency.get("kind"):
        told.append(f"latency: {latency['kind']} {latency.get('name', '')}".strip())
    return told


def _scenarios(kept: Kept) -> dict[str, str]:
    """The scenarios as run, by file; policies of a comparison differ in a line or two."""
    found = {"study.toml": kept.study, "scenario.toml": kept.scenario or (kept.run.scenario if kept.run else None)}
    if kept.scenario is None:
        found |= {f"{label}/scenario.toml": run.scenario for label, run in (kept.runs or {}).items()}
    return {name: text for name, text in found.items() if text is not None}


def _provenance(kept: Kept) -> dict[str, str]:
    """What the page was made from."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    return {
        "made by": f"servecast {installed('servecast')}",
        "from the files in": str(kept.directory),
        "charts": f"Vega-Lite, drawn by the library that this page holds (vl-convert {installed('vl-convert-python')})",
    }


def _of(text: str | None) -> dict[str, Any]:
    """The tables of a TOML text; none where it cannot be read."""
    try:
        return tomllib.loads(text or "")
    except ValueError:
        return {}


def _times(scenario: str | None) -> list[str]:
    return _times_of(_of(scenario))


def _times_of(scenario: dict[str, Any]) -> list[str]:
    """Where the iteration times of a scenario come from."""
    import tomli_w

    try:
        return [times_from(Scenario.from_toml(tomli_w.dumps(scenario)))]
    except BadInput as error:
        return [f"where the times come from cannot be told: {error}"]
