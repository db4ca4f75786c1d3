"""The commands. Each reads a scenario, asks the library, and shows what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from sim import bench, output
from sim.capacity import Capacity, by_goodput
from sim.capacity import capacity as search_capacity
from sim.compare import compare as compare_policies
from sim.cost import HEADROOM, SPARE
from sim.cost import cost as find_cost
from sim.errors import BadInput, unknown
from sim.listing import LISTS, explain
from sim.options import Count, Options, Seeds, answer, keep, progress, say, virtual, watch
from sim.parallel import cores, installed
from sim.planner import budget as find_budget
from sim.policies import COMPARED, POLICIES
from sim.scenario import Scenario
from sim.simulate import simulate
from sim.verdicts import verdicts

MOST_TOKENS = 2**31
WORTH_PROCESSES = 5_000  # requests in all; below, starting processes takes longer than it saves


app = App(
    name="servecast",
    help="Forecasts LLM serving: capacity, scheduling policy, token budget and cost, without a GPU.",
    version=installed,
    suppress_keyboard_interrupt=False,  # sim.__main__ says it in a line
)


@app.command
def run(scenario: str, *, trace_out: Path | None = None, options: Options = Options()) -> None:
    """Run one scenario and print what came of it.

    Parameters
    ----------
    trace_out
        Write a timeline of the run to this file (Chrome's trace format, gzipped if *.gz), for ui.perfetto.dev.
    """
    one = options.scenario(scenario)
    output.prepare_file(trace_out, "--trace-out")
    with progress("requests") as advance:
        look = watch(advance, one.workload.requests)
        wall, kept = options.clock == "wall", options.out is not None
        report = simulate(one, keep_tokens=kept, wall_clock=wall, watch=look, engine=options.engine())
    if options.out:
        output.write(options.out, output.of_run(report))
        if bench.too_many(report.record):
            say(f"vllm_bench.json is without itls: more than {bench.MOST_GAPS:,} output tokens")
    if trace_out:
        from sim import timeline

        name = f"{one.name}, {report.summary['policy']}"
        timeline.write(trace_out, report.requests, report.steps, name, source="--trace-out")
        say(f"the timeline is in {trace_out}")
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
    apart = engine is None and one.workload.requests * len(chosen) >= WORTH_PROCESSES
    with progress("policies") as advance:
        ordered = compare_policies(
            one,
            chosen,
            keep_steps=options.out is not None,
            keep_tokens=options.out is not None,
            wall_clock=wall,
            engine=engine,
            workers=cores() if apart else 1,
            progress=advance,
        )
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
    goodput: float | None = None,
    options: Options = Options(),
) -> None:
    """Find the highest arrival rate that meets the scenario's SLO, per policy, with an interval.

    Which of two policies holds more is said where the seeds can tell.

    Parameters
    ----------
    policies
        Which ones, separated by commas; the four by default.
    tolerance
        When bisection stops: how far, relatively, the lowest failing rate may be from the highest passing one.
    seeds
        How many independent searches make the interval; 1 for none.
    goodput
        Find the rate at which this share of the requests meets all limits per request (0.9, say), whatever the
        percentiles are; an SLO with limits on percentiles is searched as well.
    """
    virtual(options, "a search")
    one = options.scenario(scenario)
    _check_search(tolerance, seeds)
    if goodput is not None and not 0 < goodput <= 1:
        raise BadInput(f"{goodput:g} must be greater than 0 and at most 1", source="--goodput")
    chosen = _policies(policies, options.policy)
    shared = by_goodput(one, goodput) if goodput is not None else None
    asked = one if shared is None or one.slo.percentiles else shared

    def find(what: Scenario) -> Sequence[Capacity]:
        with progress("searches") as advance:
            return search_capacity(what, chosen, tolerance=tolerance, seeds=seeds, workers=cores(), progress=advance)

    found = find(asked)
    pairs = verdicts(found, tolerance)
    result: dict[str, Any] = {"results": [one_policy.to_dict() for one_policy in found], "verdicts": pairs}
    pages = [(found, asked, pairs)]
    if shared is not None:
        if shared is not asked:
            found_too = find(shared)
            pages.append((found_too, shared, verdicts(found_too, tolerance)))
        by_share, _, pairs_too = pages[-1]
        rows = [one_policy.to_dict() for one_policy in by_share]
        result["goodput"] = {"share": goodput, "results": rows, "verdicts": pairs_too}
    if options.rate is not None:  # which the search tries first
        for row, one_policy in zip(result["results"], found, strict=True):
            row["asked"] = {"rate": options.rate, "feasible": one_policy.trials[0].met}
    keep(options, one, "capacity.json", result)
    answer(options, one, result, lambda show: show.capacity_pages(pages, asked=options.rate))


@app.command
def budget(
    scenario: str,
    *,
    decodes: Count | None = None,
    context: Count | None = None,
    prior_context: Count | None = None,
    quantile: float = 0.9,
    check: bool = True,
    options: Options = Options(),
) -> None:
    """Find the token budget that the TBT SLO allows, and what it costs in prefill time.

    Parameters
    ----------
    decodes
        Decodes in an iteration; what the workload keeps running by default.
    context
        KV tokens of each decode; the workload's by default.
    prior_context
        Tokens that a chunk has before it; the workload's by default.
    quantile
        Of the workload's decodes, contexts and prior contexts.
    check
        Simulate it, and make the budget smaller until the limit holds.
    """
    virtual(options, "a budget")
    if not 0 < quantile < 1:
        raise BadInput(f"{quantile:g} must be greater than 0 and less than 1", source="--quantile")
    for name, value in (("--decodes", decodes), ("--context", context), ("--prior-context", prior_context)):
        if value is not None and not 0 <= value <= MOST_TOKENS:
            raise BadInput(f"{value} must be from 0 to {MOST_TOKENS}", source=name)
    one = options.scenario(scenario)
    with progress("simulations") as advance:
        result = find_budget(
            one,
            decodes=decodes,
            context=context,
            prior=prior_context,
            quantile=quantile,
            check=check,
            progress=advance,
        )
    keep(options, one, "budget.json", result)
    answer(options, one, result, lambda show: show.budget(result, one))


@app.command
def cost(
    scenario: str,
    *,
    tolerance: float = 0.01,
    seeds: Seeds = 5,
    headroom: float = HEADROOM,
    spare: Count = SPARE,
    options: Options = Options(),
) -> None:
    """Find the cost per million output tokens at SLO capacity, with sensitivities.

    Without an [slo] it is the cost at the scenario's own rate.

    Parameters
    ----------
    tolerance
        As for capacity.
    seeds
        As for capacity.
    headroom
        Share of the capacity that one plans to use.
    spare
        Replicas beside those that carry the load.
    """
    virtual(options, "a search")
    one = options.scenario(scenario)
    _check_search(tolerance, seeds)
    if not 0 < headroom <= 1:
        raise BadInput(f"{headroom:g} must be greater than 0 and at most 1", source="--headroom")
    if not 0 <= spare <= 1000:
        raise BadInput(f"{spare} must be from 0 to 1000", source="--spare")
    with progress("searches") as advance:
        result = find_cost(
            one, tolerance=tolerance, seeds=seeds, headroom=headroom, spare=spare, workers=cores(), progress=advance
        )
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

        page = show.profiles if what == "profiles" else show.rows
        show.to_console(page(rows) if rows else f"no {what} are shipped with this version")


def _policies(given: str | None, policy: str | None) -> Sequence[str]:
    """`--policies A,B`, or the one of `--policy`, or the four."""
    chosen = [name.strip() for name in given.split(",")] if given is not None else [policy] if policy else COMPARED
    for name in chosen:
        if name not in POLICIES:
            raise BadInput(unknown("policy", name, POLICIES), source="--policies" if given is not None else "--policy")
    return list(dict.fromkeys(chosen))


def _check_search(tolerance: float, seeds: int) -> None:
    if not 1e-6 <= tolerance < 1:
        raise BadInput(f"{tolerance:g} must be at least 1e-6 and less than 1", source="--tolerance")
    if not 1 <= seeds <= 1000:
        raise BadInput(f"{seeds} must be from 1 to 1000", source="--seeds")


# Loaded by name when they are asked for: they need torch, or scipy, or are seldom wanted.
app.command("sim.explain_command:explain", name="explain", help="Say why tokens of a run came late: explain DIR.")
_calibrate = App(name="calibrate", help="Measure an executor, fit a latency profile, look at one.")
_calibrate.command("calibrate.commands:measure", name="measure", help="Measure the engine on a grid of batches.")
_calibrate.command("calibrate.commands:fit", name="fit", help="Fit a latency profile to measured iterations.")
_calibrate.command("calibrate.commands:show", name="show", help="Show a profile: its source, errors and range.")
_calibrate.command("calibrate.paper.commands:paper", name="paper", help="Fit the profiles of the paper's deployments.")
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
_scenario = App(name="scenario", help="Make a scenario from what another tool was told.")
_scenario.command("sim.from_vllm:from_vllm", name="from-vllm", help="From the arguments of a vLLM server.")
app.command(_scenario)
app.command("sim.beside:beside", name="beside", help="Lay a measured run beside the forecast.")
app.command("sim.timeline:trace", name="trace", help="Make a timeline of a kept run, for Perfetto.")
app.command("calibrate.commands:validate", name="validate", help="Simulate and measure a scenario, side by side.")
app.command("calibrate.paper.commands:reproduce", name="reproduce", help="The paper's figures beside the simulation.")
app.command("sim.sweep_command:sweep", name="sweep", help="Run many variations of a scenario: a row for each.")
app.command("sim.report_commands:report", name="report", help="Make a self-contained HTML page of kept results.")
app.command("sim.report_commands:chart", name="chart", help="Save one chart of kept results as a picture.")
app.command("sim.plan_command:plan", name="plan", help="The cheapest of many deployments that serves a demand.")
