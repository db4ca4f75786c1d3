"""The commands. Each reads a scenario, asks the library, and shows what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

from cyclopts import App, Parameter

from sim import output
from sim.capacity import capacity as search_capacity
from sim.cost import cost as find_cost
from sim.errors import BadInput, unknown
from sim.listing import LISTS, explain
from sim.options import Options, Seeds, answer, keep, progress, watch
from sim.parallel import cores, each
from sim.policies import COMPARED, POLICIES
from sim.report import Report
from sim.scenario import Scenario
from sim.simulate import Engine, simulate

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
    suppress_keyboard_interrupt=False,  # sim.__main__ says it in a line
)


@app.command
def run(scenario: str, *, options: Options = Options()) -> None:
    """Run one scenario and print what came of it."""
    one = options.scenario(scenario)
    with progress("requests") as advance:
        look = watch(advance, one.workload.requests)
        report = simulate(one, wall_clock=options.clock == "wall", watch=look, engine=options.engine())
    if options.out:
        output.write(options.out, output.of_run(report))
    answer(options, one, report.summary, lambda show: show.run(report.summary, report.plan))


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
    engine, wall = options.engine(), options.clock == "wall"
    tasks = [_Task(one.for_policy(policy), wall, options.out is not None, engine) for policy in chosen]
    apart = engine is None and one.workload.requests * len(chosen) >= WORTH_PROCESSES
    workers = cores() if apart else 1
    reports: dict[int, Report] = {}
    with progress("policies") as advance:
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
    answer(options, one, {"results": summaries}, lambda show: show.compare(summaries, ordered[0].plan))


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
    with progress("searches") as advance:
        found = search_capacity(
            one,
            _policies(policies, options.policy),
            tolerance=tolerance,
            seeds=seeds,
            workers=cores(),
            progress=advance,
        )
    result = {"results": [one_policy.to_dict() for one_policy in found]}
    keep(options, one, "capacity.json", result)
    answer(options, one, result, lambda show: show.capacities(found, one))


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
    with progress("searches") as advance:
        result = find_cost(one, tolerance=tolerance, seeds=seeds, workers=cores(), progress=advance)
    keep(options, one, "cost.json", result)
    answer(options, one, result, lambda show: show.cost(result, one))


@app.command
def check(scenario: str, *, options: Options = Options()) -> None:
    """Say what a scenario means: every default, the KV blocks that follow, its workload. Nothing is run."""
    one = options.scenario(scenario)
    meaning = explain(one)
    answer(options, one, meaning, lambda show: show.meaning(meaning, one))


@app.command(name="list")
def list_(what: str, *, json: Annotated[bool, Parameter(negative="", show_default=False)] = False) -> None:
    """List the models, devices, profiles, datasets or policies there are, with their sources."""
    if what not in LISTS:
        raise BadInput(unknown("list", what, LISTS), source="list")
    rows = LISTS[what]()
    if json:
        sys.stdout.write(output.as_json({what: rows}))
    else:
        from sim import show

        show.to_console(show.rows(rows) if rows else f"no {what} are shipped with this version")


@dataclass(frozen=True, slots=True)
class _Task:
    scenario: Scenario
    wall_clock: bool
    keep_steps: bool
    engine: Engine | None


def _run_task(task: _Task) -> Report:
    return simulate(task.scenario, keep_steps=task.keep_steps, wall_clock=task.wall_clock, engine=task.engine)


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


# Loaded by name when they are asked for: they need torch, or scipy.
_calibrate = App(name="calibrate", help="Measure an executor, fit a latency profile, look at one.")
_calibrate.command("calibrate.commands:measure", name="measure", help="Measure the engine on a grid of batches.")
_calibrate.command("calibrate.commands:fit", name="fit", help="Fit a latency profile to measured iterations.")
_calibrate.command("calibrate.commands:show", name="show", help="Show a profile: its source, errors and range.")
_calibrate.command("calibrate.score_commands:score", name="score", help="Forecast public serving measurements.")
_calibrate.command("calibrate.score_commands:profiles", name="profiles", help="Make the profiles that are shipped.")
_import = App(name="import", help="Import public measurements: kernel tables, Vidur's profiles, anyone's iterations.")
for _kind, _code, _help in (
    ("aiconfigurator", "aiconfigurator", "Compose iterations from the kernel tables of aiconfigurator-core."),
    ("vidur", "vidur_", "Compose iterations from Vidur's profiles of single operators."),
    ("table", "table", "Check anyone's table of measured iterations and convert it."),
):
    _import.command(f"calibrate.import_commands:{_code}", name=_kind, help=_help)
_import.command(
    "calibrate.bench_commands:bench", name="bench", help="Refit a profile to results of `vllm bench serve`."
)
_calibrate.command(_import)
app.command(_calibrate)
app.command("calibrate.commands:validate", name="validate", help="Simulate and measure a scenario, side by side.")
