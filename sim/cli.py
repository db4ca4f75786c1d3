"""The commands. Each reads a scenario, asks the library, and shows what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter, Token
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sim import output, show
from sim.capacity import capacity as search_capacity
from sim.cost import cost as find_cost
from sim.errors import BadInput, shown, unknown
from sim.listing import LISTS, explain
from sim.parallel import cores, each
from sim.policies import COMPARED, POLICIES
from sim.record import Record
from sim.report import Report
from sim.scenario import Scenario
from sim.settings import Setting, parse
from sim.simulate import Engine, simulate

SHORTHANDS = {
    "policy": "scheduler.policy",
    "rate": "workload.arrivals.rate",
    "requests": "workload.requests",
    "seed": "workload.seed",
}
WORTH_PROCESSES = 5_000  # requests in all; below, starting processes takes longer than it saves


def _version() -> str:
    try:
        return version("servecast")
    except PackageNotFoundError:
        return "not installed"


app = App(
    name="servecast",
    help="Forecasts LLM serving: capacity, scheduling policy, token budget and cost, without a GPU.",
    version=_version,
)


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    """Strictly an integer; the default converter rounds."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{shown(tokens[0].value)} is not a whole number") from None


Seeds = Annotated[int, Parameter(converter=_whole)]


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """What every command that takes a scenario takes."""

    settings: Annotated[tuple[str, ...], Parameter(name="--set", negative="", show_default=False)] = ()
    """Override any scenario key: key.path=value. Values are TOML, bare words are strings. Repeatable."""
    policy: str | None = None
    """The scheduling policy (scheduler.policy)."""
    rate: float | None = None
    """Requests per second (workload.arrivals.rate); on a trace, its mean rate."""
    requests: Annotated[int | None, Parameter(converter=_whole)] = None
    """How many requests (workload.requests)."""
    seed: Annotated[int | None, Parameter(converter=_whole)] = None
    """The seed of every random draw (workload.seed)."""
    executor: Literal["model", "torch"] = "model"
    """What executes a batch: the latency model, or the engine."""
    clock: Literal["virtual", "wall"] = "virtual"
    """Simulated time, or requests that arrive in real time."""
    out: Path | None = None
    """Keep the result files in this directory."""
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False
    """Print one JSON object on stdout and nothing else there."""

    def scenario(self, path: str) -> Scenario:
        """The scenario with these options in place."""
        given = [parse(text) for text in self.settings]
        for option, key in SHORTHANDS.items():
            if (value := getattr(self, option)) is not None:
                given.append(Setting(key, value, f"--{option}"))
        output.prepare(self.out)
        return Scenario.load(path, given)


@app.command
def run(scenario: str, *, options: Options = Options()) -> None:
    """Run one scenario and print what came of it."""
    one = options.scenario(scenario)
    with _progress("requests") as advance:
        watch = _watch(advance, one.workload.requests)
        report = simulate(one, wall_clock=options.clock == "wall", watch=watch, engine=_engine(options))
    if options.out:
        output.write(options.out, output.of_run(report))
    _answer(options, one, report.summary, lambda: show.run(report.summary, report.plan))


@app.command
def compare(scenario: str, *, policies: str | None = None, options: Options = Options()) -> None:
    """Run the same requests under the four policies, side by side.

    Parameters
    ----------
    policies
        Which ones, separated by commas.
    """
    one = options.scenario(scenario)
    chosen = _policies(policies, options.policy)
    engine, wall = _engine(options), options.clock == "wall"
    tasks = [_Task(one.for_policy(policy), wall, options.out is not None, engine) for policy in chosen]
    apart = engine is None and one.workload.requests * len(chosen) >= WORTH_PROCESSES
    workers = cores() if apart else 1
    reports: dict[int, Report] = {}
    with _progress("policies") as advance:
        for position, report in each(_run_task, tasks, workers=workers):
            reports[position] = report
            advance(len(reports), len(tasks))
    ordered = [reports[position] for position in range(len(tasks))]
    summaries = [report.summary for report in ordered]
    if options.out:
        files = {
            f"{report.plan.scenario.scheduler.policy}/{name}": content
            for report in ordered
            for name, content in output.of_run(report).items()
        }
        output.write(options.out, files | {"comparison.json": output.as_json({"results": summaries}).encode()})
    _answer(options, one, {"results": summaries}, lambda: show.compare(summaries, ordered[0].plan))


@app.command
def capacity(
    scenario: str,
    *,
    policies: str | None = None,
    tolerance: float = 0.01,
    seeds: Seeds = 5,
    options: Options = Options(),
) -> None:
    """Find the highest arrival rate that meets the scenario's SLO, per policy, with an interval.

    Parameters
    ----------
    policies
        Which ones, separated by commas; the four by default.
    tolerance
        When bisection stops: how far, relatively, the lowest failing rate may be from the highest passing one.
    seeds
        How many independent searches make the interval; 1 for none.
    """
    _virtual(options)
    one = options.scenario(scenario)
    _check_search(tolerance, seeds)
    with _progress("searches") as advance:
        found = search_capacity(
            one,
            _policies(policies, options.policy),
            tolerance=tolerance,
            seeds=seeds,
            workers=cores(),
            progress=advance,
        )
    result = {"results": [one_policy.to_dict() for one_policy in found]}
    _keep(options, one, "capacity.json", result)
    _answer(options, one, result, lambda: show.capacities(found, one))


@app.command
def cost(scenario: str, *, tolerance: float = 0.01, seeds: Seeds = 5, options: Options = Options()) -> None:
    """Find the cost per million output tokens at SLO capacity, with sensitivities.

    Without an [slo] it is the cost at the scenario's own rate.

    Parameters
    ----------
    tolerance
        As for capacity.
    seeds
        As for capacity.
    """
    _virtual(options)
    one = options.scenario(scenario)
    _check_search(tolerance, seeds)
    with _progress("searches") as advance:
        result = find_cost(one, tolerance=tolerance, seeds=seeds, workers=cores(), progress=advance)
    _keep(options, one, "cost.json", result)
    _answer(options, one, result, lambda: show.cost(result, one))


@app.command
def check(scenario: str, *, options: Options = Options()) -> None:
    """Say what a scenario means: every default, the KV blocks that follow, its workload. Nothing is run."""
    one = options.scenario(scenario)
    meaning = explain(one)
    _answer(options, one, meaning, lambda: show.meaning(meaning, one))


@app.command(name="list")
def list_(what: str, *, json: Annotated[bool, Parameter(negative="", show_default=False)] = False) -> None:
    """List the models, devices, profiles, datasets or policies there are, with their sources."""
    if what not in LISTS:
        raise BadInput(unknown("list", what, LISTS), source="list")
    rows = LISTS[what]()
    if json:
        sys.stdout.write(output.as_json({what: rows}))
    else:
        show.to_console(show.rows(rows) if rows else f"no {what} are shipped with this version")


@dataclass(frozen=True, slots=True)
class _Task:
    scenario: Scenario
    wall_clock: bool
    keep_steps: bool
    engine: Engine | None


def _run_task(task: _Task) -> Report:
    return simulate(task.scenario, keep_steps=task.keep_steps, wall_clock=task.wall_clock, engine=task.engine)


def _engine(options: Options) -> Engine | None:
    """What executes batches where it is not the latency model."""
    if options.executor == "model":
        return None
    try:
        engine: Engine = import_module("gpu_backend.engine").executor
    except ModuleNotFoundError as error:
        what = f"'torch' needs the package {error.name}: pip install 'servecast[engine]'"
        raise BadInput(what, source="--executor") from None
    return engine


def _policies(given: str | None, policy: str | None) -> Sequence[str]:
    """`--policies A,B`, or the one of `--policy`, or the four."""
    chosen = [name.strip() for name in given.split(",")] if given is not None else [policy] if policy else COMPARED
    for name in chosen:
        if name not in POLICIES:
            raise BadInput(unknown("policy", name, POLICIES), source="--policies" if given is not None else "--policy")
    return list(dict.fromkeys(chosen))


def _virtual(options: Options) -> None:
    if options.clock != "virtual":
        raise BadInput("a search runs on the virtual clock", source="--clock")
    if options.executor != "model":
        raise BadInput("a search runs on the latency model", source="--executor")


def _check_search(tolerance: float, seeds: int) -> None:
    if not 1e-6 <= tolerance < 1:
        raise BadInput(f"{tolerance:g} must be at least 1e-6 and less than 1", source="--tolerance")
    if not 1 <= seeds <= 1000:
        raise BadInput(f"{seeds} must be from 1 to 1000", source="--seeds")


def _keep(options: Options, scenario: Scenario, name: str, result: Any) -> None:
    if options.out:
        files = {name: output.as_json(result).encode(), "scenario.toml": scenario.to_toml().encode()}
        output.write(options.out, files)


def _answer(options: Options, scenario: Scenario, result: Any, readable: Callable[[], Any]) -> None:
    """Print the result; what else was done to the scenario is said beside it, and only where there is a result."""
    for note in scenario.notes:
        _say(note)
    if options.json:
        sys.stdout.write(output.as_json(result))
    else:
        show.to_console(readable())
        if options.out:
            _say(f"files are in {options.out}")


def _say(what: str) -> None:
    print(f"servecast: {what}", file=sys.stderr)


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal's stderr, nothing elsewhere: call with (done, of)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(unit, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _watch(advance: Callable[[int, int], None], requests: int) -> Callable[[Record, float], bool]:
    shown = time.monotonic()

    def look(record: Record, _: float) -> bool:
        nonlocal shown
        if time.monotonic() - shown > 0.1:
            shown = time.monotonic()
            advance(record.done, requests)
        return False

    return look
