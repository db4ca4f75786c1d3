"""The command `sweep`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from sim import output
from sim.errors import BadInput
from sim.options import Options, answer, progress, say, virtual, whole
from sim.parallel import dask
from sim.study import Study
from sim.sweep import Sweep, run

if TYPE_CHECKING:
    import polars as pl

BEST = 10  # points of the page
MOST_REASONS = 5
RANKED = {  # what says which points are best, the largest first, or (-) the smallest
    "run": ("slo_met", "goodput", "request_throughput", "-tbt_s_p99"),
    "capacity": ("-cost_per_million_output_tokens", "capacity_rate"),
}
SHOWN = {  # columns of the page, and their headings
    "run": {
        "slo_met": "SLO met",
        "goodput": "goodput",
        "request_throughput": "requests/s",
        "ttft_s_p50": "TTFT P50",
        "ttft_s_p99": "TTFT P99",
        "tbt_s_p99": "TBT P99",
    },
    "capacity": {
        "capacity_rate": "requests/s",
        "capacity_low": "from",
        "capacity_high": "to",
        "limited_by": "limited by",
        "cost_per_million_output_tokens": "cost per M output tokens",
    },
}


def sweep(
    study: str,
    *,
    engine: Literal["processes", "dask"] = "processes",
    cluster: str | None = None,
    workers: Annotated[int | None, Parameter(converter=whole)] = None,
    resume: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    options: Options = Options(),
) -> None:
    """Run many variations of a scenario, on all cores or on a Dask cluster; every one becomes a row.

    Parameters
    ----------
    engine
        What runs the points: processes of this machine, or a Dask cluster.
    cluster
        The address of the cluster's scheduler, such as tcp://10.0.0.1:8786.
    workers
        How many processes of this machine; as many as it has cores by default.
    resume
        Go on with the sweep that --out holds a part of; begin it where there is none.
    """
    virtual(options, "a sweep")
    _check(engine, cluster, workers, resume, options.out)
    one = Study.load(study, options.overrides())
    output.prepare(options.out)
    kept = 0
    with progress("points") as advance:

        def watch(done: int, total: int) -> None:
            nonlocal kept
            kept = done
            advance(done, total)

        try:
            with dask(cluster, say) if cluster is not None else nullcontext() as executor:
                done = run(one, out=options.out, resume=resume, workers=workers, executor=executor, progress=watch)
        except BaseException:
            if options.out and kept:
                say(f"{kept:,} of {len(one.points):,} points are kept in {options.out}: --resume goes on from there")
            raise
    answer(options, one.base, _result(done), lambda show: _page(done, show))


def _check(engine: str, cluster: str | None, workers: int | None, resume: bool, out: Path | None) -> None:
    if engine == "dask" and cluster is None:
        raise BadInput("needs --cluster, the address of a Dask scheduler", source="--engine")
    if engine != "dask" and cluster is not None:
        raise BadInput("only with --engine dask", source="--cluster")
    if workers is not None and engine == "dask":
        raise BadInput("only with --engine processes: a cluster has the workers it has", source="--workers")
    if workers is not None and not 1 <= workers <= 1000:
        raise BadInput(f"{workers} must be from 1 to 1000", source="--workers")
    if resume and out is None:
        raise BadInput("needs --out, the directory of the sweep to go on with", source="--resume")


def _result(done: Sweep) -> dict[str, Any]:
    """Ready for JSON."""
    points = len(done.outcomes)
    return {
        "study": done.study.name,
        "what": done.study.what,
        "points": points,
        "done": points - len(done.failed),
        "failed": len(done.failed),
        "results": done.frame.to_dicts(),
    }


def _page(done: Sweep, show: Any) -> Any:
    """The best points, what failed and why, and how long it took."""
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    study, frame = done.study, done.frame
    known = [name for name in SHOWN[study.what] if name in frame.columns and frame[name].count()]
    best = _best(frame, [key for key in RANKED[study.what] if key.removeprefix("-") in known])
    columns = ["point", *study.axes, *known]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        text = frame[name].dtype in (frame["status"].dtype, bool)
        heading = SHOWN[study.what].get(name) or _heading(name, study.axes)
        table.add_column(heading, justify="left" if text else "right", no_wrap=name == "limited_by")
    for row in best.select(columns).to_dicts():
        table.add_row(*(_cell(name, value, show) for name, value in row.items()))
    failed, points = done.failed, len(done.outcomes)
    counts = f"{points:,} points, {f'{len(failed):,} of them' if failed else 'none'} failed"
    slowest = max(done.outcomes, key=lambda one: one.seconds)
    notes = [f"the slowest was point {slowest.point}: {show.seconds(slowest.seconds)}"]
    notes += _reasons([one.reason or "" for one in failed])
    page: list[RenderableType] = [
        Text(study.name, style="bold"),
        Text(f"{study.base.name} · {counts}", style="dim"),
        "",
    ]
    if len(best):
        keys = [key.removeprefix("-") for key in RANKED[study.what]]
        order = ", then ".join(SHOWN[study.what][key] for key in keys if key in known)
        notes = [f"best by {order}", *notes, *frame["times_from"].drop_nulls().unique(maintain_order=True)]
        page += [table, ""]
    return Group(*page, *(Text(f"· {note}", style="dim") for note in notes))


def _best(frame: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """The best points first; of equals the first."""
    done, names = frame.filter(frame["status"] == "done"), [key.removeprefix("-") for key in keys]
    falling = [not key.startswith("-") for key in keys]
    ordered = done.sort(names, descending=falling, nulls_last=True, maintain_order=True) if keys else done
    return ordered.head(BEST)


def _heading(axis: str, axes: dict[str, str]) -> str:
    """An axis by the end of its key, where that tells it from the others."""
    return _short(axis) if [_short(other) for other in axes].count(_short(axis)) <= 1 else axis


def _short(axis: str) -> str:
    parts = axis.split(".")
    return " ".join(parts[-2:] if parts[-1] in ("name", "kind", "path") else parts[-1:]).replace("_", " ")


def _cell(name: str, value: Any, show: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return str(show.seconds(value) if "_s_" in name else show.number(value))


def _reasons(reasons: list[str]) -> list[str]:
    """Why points failed, the most frequent reasons first."""
    counts = {why: reasons.count(why) for why in dict.fromkeys(reasons)}
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    told = [f"{count:,} failed: {why}" for why, count in ordered[:MOST_REASONS]]
    return told + ([f"and {len(ordered) - MOST_REASONS:,} reasons more"] if len(ordered) > MOST_REASONS else [])
