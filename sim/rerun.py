"""A run made again from the files that it kept, and compared with them: runs are deterministic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.cluster import Watch
from sim.errors import BadInput
from sim.executor import Step
from sim.report import Report, times_from
from sim.request import Batch
from sim.scenario import Scenario
from sim.simulate import Engine, simulate, workload

if TYPE_CHECKING:
    import polars as pl

FILES = ("requests.parquet", "steps.parquet", "summary.json", "scenario.toml")
COUNTED = ("policy", "seed", "offered", "completed", "unfinished", "iterations", "preemptions", "output_tokens")
CLOSE = 1e-6  # seconds that times of a replayed run may be off: of sums in another order
FOREVER = 1e12  # seconds of an iteration that was cut off: beyond the end of any run


def rerun(directory: Path, watch: Watch | None = None) -> Report:
    """The run whose files are in a folder, made again. BadInput unless it comes to the same."""
    import polars as pl

    _check_there(directory)
    kept = {}
    for name in FILES[:2]:
        try:
            kept[name] = pl.read_parquet(directory / name)
        except (OSError, pl.exceptions.PolarsError) as error:
            what = f"not a Parquet file that can be read: {str(error).splitlines()[0]}"
            raise BadInput(what, source=str(directory / name)) from None
    summary = _summary(directory / "summary.json")
    scenario = Scenario.load(directory / "scenario.toml")
    measured = summary.get("times_from") == times_from(scenario, measured=True)
    steps = kept["steps.parquet"]
    if measured and not {"start_s", "end_s"} <= set(steps.columns):
        raise BadInput("lacks the columns start_s and end_s", source=str(directory / "steps.parquet"))
    engine = replayed(steps["end_s"] - steps["start_s"]) if measured else None
    report = simulate(scenario, watch=watch, engine=engine, requests=workload(scenario))
    _check_same(directory / "steps.parquet", steps, report.steps, "iteration", exact=not measured)
    _check_same(
        directory / "requests.parquet", kept["requests.parquet"], report.requests, "request", exact=not measured
    )
    for key in COUNTED:
        if summary.get(key) != report.summary[key]:
            what = f"{key} is {summary.get(key)!r}, and {report.summary[key]!r} where scenario.toml is run again"
            raise BadInput(what, source=str(directory / "summary.json"))
    return report


class _Replay:
    """Executes by the clock of a run that was measured."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self.seconds = seconds

    def execute(self, batch: Batch) -> Step:  # noqa: ARG002
        """What its counterpart took; what was cut off took longer than the run."""
        return Step((next(self.seconds, FOREVER),))

    def spent(self) -> None:
        """Not told."""

    def notes(self) -> list[str]:
        """None."""
        return []


def replayed(seconds: Any) -> Engine:
    """An engine that takes so many seconds for its iterations, in turn."""
    return lambda _: lambda: _Replay(iter(seconds.tolist() if isinstance(seconds, np.ndarray) else seconds.to_list()))


def _check_there(directory: Path) -> None:
    try:
        if not directory.is_dir():
            what = "is not a folder" if directory.exists() else "no such folder"
            raise BadInput(f"{what}; give one that `servecast run SCENARIO --out DIR` wrote", source=str(directory))
        missing = [name for name in FILES if not (directory / name).is_file()]
        inside = [path.name for path in sorted(directory.iterdir()) if (path / "steps.parquet").is_file()]
    except OSError as error:
        raise BadInput((error.strerror or str(error)).lower(), source=str(directory)) from None
    if missing:
        hint = f"; runs are in {', '.join(inside[:6])}" if inside else "; give one that `servecast run --out` wrote"
        raise BadInput(f"lacks {', '.join(missing)}{hint}", source=str(directory))


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {str(error).splitlines()[0]}", source=str(path)) from None
    if not isinstance(summary, dict):
        raise BadInput("not a run's summary", source=str(path))
    return summary


def _check_same(path: Path, kept: pl.DataFrame, again: pl.DataFrame, row: str, *, exact: bool) -> None:
    """BadInput that names the first difference, and what can bring one about."""
    why = "a trace, profile or scenario changed since, or another version wrote it"
    prefix = "does not follow from scenario.toml"
    if missing := [name for name in again.columns if name not in kept.columns]:
        raise BadInput(f"lacks the column {missing[0]}: another version wrote it", source=str(path))
    n = min(kept.height, again.height)
    first, where = n, ""
    for name in again.columns:
        mine, its = again[name].head(n), kept[name].head(n)
        if mine.dtype != its.dtype:
            raise BadInput(
                f"column {name} is of {its.dtype}, not {mine.dtype}: another version wrote it", source=str(path)
            )
        if mine.dtype.is_float() and not exact:
            same = ((mine - its).abs() <= CLOSE).fill_null(value=False) | (mine.is_null() & its.is_null())
        else:
            same = mine.eq_missing(its)
        different = (~same).arg_true()
        if len(different) and different[0] < first:
            first = int(different[0])
            where = f" ({name} is {its[first]}, and {mine[first]} where it is run again)"
    if first < n or kept.height != again.height:
        what = where or f" ({kept.height} rows, and {again.height} where it is run again)"
        raise BadInput(f"{prefix} from {row} {first}{what}: {why}", source=str(path))
