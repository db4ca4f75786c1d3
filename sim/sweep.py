"""Sweeps: every point of a study is run, wherever there is room, and becomes a row.

Results do not depend on the engine, the order or how often it was interrupted: rows are in the order of the study, and
what a row holds follows from its point alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim import output
from sim.capacity import capacity
from sim.compare import flat
from sim.cost import per_million
from sim.errors import BadInput
from sim.journal import Outcome, Outcomes, journal, nowhere
from sim.parallel import cores, each, futures, installed, processes
from sim.report import times_from
from sim.scenario import Scenario
from sim.settings import Setting
from sim.simulate import plan, simulate, workload
from sim.study import SearchTable, Study, digest, files_of, reason

if TYPE_CHECKING:
    import polars as pl

REASONS = ("too_long", "never_fits")  # why a request is refused: a column each, whether or not one was
ATTEMPTS = 3  # at a point that an executor lost: one that has lost a worker may hand on nonsense
INT64 = 2**63


def sweep(
    study: Study | str | Path,
    *,
    out: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> pl.DataFrame:
    """Every point of a study as a row: its settings, `status` (done or failed), `reason`, and its results.

    `out` keeps them, and what is done so far; `resume` goes on there. Points run in `workers` processes (as many as
    there are cores), or on any `executor` of concurrent.futures. BadInput for a study that cannot be used.
    """
    one = study if isinstance(study, Study) else Study.load(study)
    return run(one, out=out, resume=resume, workers=workers, executor=executor, progress=progress).frame


@dataclass(frozen=True)
class Sweep:
    """A study and what became of each of its points, in order."""

    study: Study
    outcomes: Sequence[Outcome]

    @cached_property
    def frame(self) -> pl.DataFrame:
        """One row per point."""
        import polars as pl

        points, axes = self.study.points, self.study.axes
        columns: dict[str, list[Any]] = {"point": list(range(len(points)))}
        columns |= {axis: [point.get(axis) for point in points] for axis in axes}
        columns["status"] = ["failed" if one.results is None else "done" for one in self.outcomes]
        columns["reason"] = [one.reason for one in self.outcomes]
        names = dict.fromkeys(name for one in self.outcomes for name in one.results or () if name not in columns)
        columns |= {name: [(one.results or {}).get(name) for one in self.outcomes] for name in names}
        return pl.DataFrame([_series(name, values) for name, values in columns.items()])

    @property
    def failed(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.results is None]

    @property
    def files(self) -> dict[str, bytes]:
        """The result files, by name."""
        parquet = BytesIO()
        self.frame.write_parquet(parquet)
        return {
            "sweep.parquet": parquet.getvalue(),
            "study.toml": self.study.to_toml("scenario.toml").encode(),
            "scenario.toml": self.study.base.to_toml(derived=False).encode(),
        }


def run(
    study: Study,
    *,
    out: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
    find: Find | None = None,
    asked: Any = None,
    files: Callable[[Sweep], Mapping[str, bytes]] | None = None,
) -> Sweep:
    """As `sweep`, with what became of each point.

    `find` makes a row of a scenario instead of what the study asks for; what it does depends on `asked` (ready for
    JSON), and `files` are what is kept of it.
    """
    total = len(study.points)
    identity = {"version": installed(), **study.identity}
    if asked is not None:
        identity["study"] = [identity["study"], asked]
    with journal(out, identity, resume=resume) if out else nowhere() as (outcomes, keep):
        done: Outcomes = {point: one for point, one in outcomes.items() if point < total and not one.again}
        tasks = [(point, study.settings(values)) for point, values in enumerate(study.points) if point not in done]
        task = Task(study.base, study.search, {path: digest(path) for path in study.files}, find)
        if progress:
            progress(len(done), total)
        for one in _outcomes(task, tasks, workers or cores(), executor):
            keep(one)
            done[one.point] = one
            if progress:
                progress(len(done), total)
        result = Sweep(study, [done[point] for point in range(total)])
        if out:
            output.write(out, files(result) if files else result.files)
    return result


Point = tuple[int, list[Setting]]
Find = Callable[[Scenario], dict[str, Any]]  # picklable


@dataclass(frozen=True, slots=True)
class Task:
    """What a point needs to be run, in whichever process: the scenario, what to find, and the files that it names."""

    base: Scenario
    search: SearchTable | None
    digests: Mapping[Path, str]
    find: Find | None = None


def outcome(task: Task, point: Point) -> Outcome:
    """What becomes of a point. Nothing is raised: a bug of the product costs one point, and its row reports it."""
    number, settings = point
    started = time.perf_counter()

    def failed(why: str, *, again: bool = False) -> Outcome:
        return Outcome(number, time.perf_counter() - started, reason=why, again=again)

    try:
        scenario = task.base.vary(settings)
        for path in files_of(scenario):
            if digest(path) != task.digests.get(path, ""):
                return failed(f"{path} is not what it was where the sweep was begun", again=True)
        if task.find is not None:
            results = task.find(scenario)
        else:
            results = _run(scenario) if task.search is None else _capacity(scenario, task.search)
        json.dumps(results, allow_nan=False)  # what no journal could keep is a bug as well
        return Outcome(number, time.perf_counter() - started, results)
    except BadInput as error:
        return failed(reason(error, task.base))
    except Exception as error:
        return failed(_told(error), again=isinstance(error, MemoryError | OSError))


def _run(scenario: Scenario) -> dict[str, Any]:
    """The summary of a run, by column."""
    summary = dict(simulate(scenario, keep_steps=False).summary)
    summary["refused"] = dict.fromkeys(REASONS, 0) | summary["refused"]
    summary["time_share"] = summary["time_share"] or {}
    return flat(summary)


def _capacity(scenario: Scenario, search: SearchTable) -> dict[str, Any]:
    """The capacity of a scenario's own policy, by column."""
    (found,) = capacity(scenario, [scenario.scheduler.policy], tolerance=search.tolerance, seeds=search.seeds)
    low, high = found.interval or (None, None)
    devices, tokens = plan(scenario).devices, float(workload(scenario).outputs.mean())
    passed = max((trial for trial in found.trials if trial.met), key=lambda trial: trial.rate, default=None)
    return {
        "name": scenario.name,
        "policy": found.policy,
        "seed": scenario.workload.seed,
        "capacity_rate": found.rate,
        "capacity_low": low,
        "capacity_high": high,
        "limited_by": found.limited_by,
        "trials": len(found.trials),
        **{f"slo_{key}_value": passed.values.get(key) if passed else None for key in scenario.slo.root},
        "devices": devices,
        "cost_per_million_output_tokens": per_million(scenario.cost.gpu_hour, devices, found.rate, tokens),
        "times_from": times_from(scenario),
        "notes": "; ".join([*scenario.notes, *found.notes]),
    }


def _outcomes(task: Task, points: Sequence[Point], workers: int, executor: Executor | None) -> Iterator[Outcome]:
    """What becomes of the points, as they get done."""
    function = partial(outcome, task)
    if executor is not None:
        here = list(points)
        for attempt in range(ATTEMPTS):
            lost: list[Point] = []
            for place, future in futures(executor, function, here):
                if attempt + 1 < ATTEMPTS and _lost(future):
                    lost.append(here[place])
                else:
                    yield _come_back(future, here[place][0])
            here = lost
        return
    left = {point[0]: point for point in points}
    while left:
        try:
            for _, one in each(function, list(left.values()), workers=workers):
                del left[one.point]
                yield one
        except BrokenProcessPool:  # by one of those that were running: each of them alone tells by which
            for point in list(left.values())[:workers]:
                del left[point[0]]
                with processes(1) as pool:
                    yield _come_back(pool.submit(function, point), point[0])


def _lost(future: Future[Outcome]) -> bool:
    """Whether the executor itself failed: a point never raises. Not where the point ended the workers it was on."""
    error = None if future.cancelled() else future.exception()
    return error is not None and type(error).__name__ != "KilledWorker"


def _come_back(future: Future[Outcome], point: int) -> Outcome:
    """What an executor gave back; what it failed at itself is no fault of the point."""
    try:
        return future.result()
    except BrokenProcessPool:
        return Outcome(point, 0.0, reason="its process was ended from outside, for want of memory perhaps", again=True)
    except CancelledError:
        raise ConnectionError("the executor gave up what it was given: is its cluster still there?") from None
    except Exception as error:
        return Outcome(point, 0.0, reason=_told(error), again=True)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _series(name: str, values: list[Any]) -> pl.Series:
    """A column of the type that its values have; of several types it is text, and so are tables."""
    import polars as pl

    kinds = {type(value) for value in values if value is not None}
    if kinds == {int} and all(-INT64 <= value < INT64 for value in values if value is not None):
        return pl.Series(name, values, dtype=pl.Int64)
    if kinds <= {int, float} and kinds:
        return pl.Series(name, [None if value is None else float(value) for value in values], dtype=pl.Float64)
    if kinds == {bool} or (not kinds and name.endswith("_met")):
        return pl.Series(name, values, dtype=pl.Boolean)
    if not kinds and name not in ("reason", "limited_by"):
        return pl.Series(name, values, dtype=pl.Float64)
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pl.Series(name, texts, dtype=pl.String)
