"""Results for people: readable tables on a terminal. Scripts take `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sim.capacity import Capacity
from sim.report import times_from
from sim.saturation import sentence
from sim.scenario import Scenario
from sim.simulate import Plan
from sim.text import number as number
from sim.text import percent as percent
from sim.text import seconds as seconds
from sim.verdicts import line

METRICS = {
    "ttft_s": "TTFT",
    "tbt_s": "TBT",
    "tpot_s": "TPOT",
    "e2e_s": "E2E",
    "scheduling_delay_s": "sched. delay",
}
COLUMNS = ("mean", "p50", "p90", "p99", "max")
PARTS = {
    "compute": "arithmetic",
    "weight_reads": "reading weights",
    "kv_reads": "reading KV",
    "activations": "activations",
    "communication": "communication",
    "host": "host",
}
MEMORY = {"weights": "weights_bytes", "activations": "activation_bytes", "KV": "kv_bytes"}
PAGE = 120  # columns where there is no terminal
Summary = Mapping[str, Any]


def run(summary: Summary, plan: Plan) -> RenderableType:
    """One run: what served what, the distributions, the verdict, the machine."""
    return Group(
        *_saturated([summary]),
        _title(summary["name"], deployed(plan)),
        _counts(summary),
        "",
        _distributions(summary),
        *_verdicts(summary),
        "",
        _machine(summary),
        *_notes([*summary["notes"], summary["times_from"]]),
    )


def compare(summaries: Sequence[Summary], plan: Plan) -> RenderableType:
    """The same requests under several policies, side by side."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for summary in summaries:
        table.add_column(summary["policy"], justify="right", no_wrap=True)

    def row(label: str, cells: Iterable[str]) -> None:
        table.add_row(label, *cells)

    for key, label in METRICS.items():
        for percentile in ("p50", "p99"):
            row(f"{label} {percentile.upper()}", (seconds(s[key][percentile]) for s in summaries))
    row("TBT max", (seconds(s["tbt_s"]["max"]) for s in summaries))
    row("requests/s", (number(s["request_throughput"]) for s in summaries))
    row("output tokens/s", (number(s["output_throughput"]) for s in summaries))
    row("KV blocks", (number(s["kv_blocks"]) for s in summaries))
    row("  of them used, peak", (number(s["kv_peak"]) for s in summaries))
    row("preemptions", (number(s["preemptions"]) for s in summaries))
    row("MFU", (percent(s["mfu"]) for s in summaries))
    row("MBU", (percent(s["mbu"]) for s in summaries))
    row("bubbles", (percent(s["bubble_fraction"]) for s in summaries))
    if any(s["unfinished"] for s in summaries):
        row("unfinished", (number(s["unfinished"]) for s in summaries))
    if any(s["refused"] for s in summaries):
        row("refused", (number(sum(s["refused"].values())) for s in summaries))
    for key, verdict in summaries[0]["slo"].items():
        row(_asked(key, verdict["limit"]), (_met(s["slo"][key]["met"]) for s in summaries))
    notes = list(dict.fromkeys(note for summary in summaries for note in summary["notes"]))
    offered = f"the same {summaries[0]['offered']:,} requests under each policy"
    head = _title(summaries[0]["name"], f"{_where(plan)} · {offered}")
    return Group(*_saturated(summaries), head, "", table, *_notes([*notes, summaries[0]["times_from"]]))


Verdicts = Sequence[Mapping[str, Any]]


def capacity_pages(
    pages: Sequence[tuple[Sequence[Capacity], Scenario, Verdicts]], *, asked: float | None = None
) -> RenderableType:
    """One page of capacities for each SLO."""
    parts: list[RenderableType] = [part for page in pages for part in ("", capacities(*page, asked=asked))]
    return Group(*parts[1:])


def capacities(
    found: Sequence[Capacity], scenario: Scenario, verdicts: Verdicts, *, asked: float | None = None
) -> RenderableType:
    """Capacity per policy, with what limits it, whether the rate that was `asked` for is within it, and which holds
    more."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in (
        ("policy", "left"),
        ("requests/s", "right"),
        ("interval", "right"),
        ("limited by", "left"),
    ):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    table.add_column("trials", justify="right")
    for one in found:
        interval = "–" if one.interval is None else f"{one.interval[0]:.3g} to {one.interval[1]:.3g}"
        rate = number(one.rate) if one.rate else "not feasible"
        table.add_row(one.policy, rate, interval, one.limited_by or "nothing", str(len(one.trials)))
    slo = scenario.slo  # limits per request count where a share of the requests must meet them
    searched = slo.root if slo.attainment is not None else slo.percentiles
    limits = [_asked(key, limit) for key, limit in searched.items() if not isinstance(limit, bool)]
    notes = dict.fromkeys(note for one in found for note in one.notes)
    searches = len(found[0].seeds)
    meaning = f"interval: smallest and largest of {searches} searches on other seeds" if searches > 1 else ""
    told: list[RenderableType] = ["", *(Text(line(verdict)) for verdict in verdicts)] if verdicts else []
    return Group(
        _title(scenario.name, "SLO: " + ", ".join(limits)),
        "",
        table,
        *(["", *_answers(found, asked)] if asked is not None else []),
        *told,
        *_notes([*filter(None, [meaning]), *notes, times_from(scenario)]),
    )


def budget(result: Mapping[str, Any], scenario: Scenario) -> RenderableType:
    """The token budget, with what it was derived from and what it came to in simulation."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column("", justify=justify)
    assumed, checked, tokens = result["assumed"], result["checked"], result["token_budget"]
    limit = f"{result['slo_key']} ≤ {seconds(result['limit_s'])}"
    table.add_row("token budget", f"{tokens:,}" if tokens else "not feasible", f"in tiles of {result['tile_tokens']}")
    unaligned = result["token_budget_unaligned"]
    table.add_row("  by the latency model", f"{unaligned:,}" if unaligned else "–", "the largest within the limit")
    table.add_row("iteration", seconds(result["tbt_s"]), "decodes and a chunk together")
    if checked:
        verdict = "holds" if checked["met"] else "does not hold"
        table.add_row(
            f"simulated {result['slo_key']}",
            seconds(checked["tbt_s"]),
            f"{verdict}, budget {checked['token_budget']:,}",
        )
        table.add_row("  TTFT P50", seconds(checked["ttft_p50_s"]), "")
    prompt = f"more than in one piece, of a prompt of {result['prefill_overhead_of_prompt_tokens']:,}"
    table.add_row("prefill time", percent(result["prefill_overhead"]), prompt)
    what = (
        f"assumed: {assumed['decodes']} decodes of {assumed['context_tokens_per_decode']:,} KV tokens, a chunk after "
        f"{assumed['prior_context_tokens']:,} (quantile {result['quantile']:g} of the workload where not given)"
    )
    return Group(_title(scenario.name, limit), "", table, *_notes([what, *result["notes"], times_from(scenario)]))


def _answers(found: Sequence[Capacity], asked: float) -> Iterable[str]:
    """Whether the rate that was asked for is feasible, and what is at most if not."""
    for one in found:
        if one.trials[0].met:
            yield f"{asked:g} requests/s are feasible with {one.policy}"
        else:
            interval = "" if one.interval is None else f" ({one.interval[0]:.3g} to {one.interval[1]:.3g})"
            yield f"{asked:g} requests/s are not feasible with {one.policy}: at most {number(one.rate)}{interval}"


def cost(result: Mapping[str, Any], scenario: Scenario) -> RenderableType:
    """Cost per million tokens, and how it moves."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column("", justify=justify, no_wrap=True)
    limited = f"capacity, limited by {result['limited_by'] or 'nothing'}"
    source = limited if result["rate_from"] == "capacity" else "the scenario's own"
    table.add_row("requests/s", number(result["rate"]) if result["rate"] else "not feasible", source)
    interval = result["interval_per_million_output_tokens"]
    between = f"{number(interval[0])} to {number(interval[1])} over seeds" if interval and None not in interval else ""
    table.add_row("per million output tokens", number(result["per_million_output_tokens"]), between)
    table.add_row("per million input tokens", number(result["per_million_input_tokens"]), "all of it on the prompts")
    table.add_row("per million tokens", number(result["per_million_tokens"]), "prompt and output")
    planned = result["planned"]
    at = f"at {planned['headroom']:.0%} of that rate" if planned["headroom"] is not None else "at that rate"
    spare = f", {planned['spare']} spare: {_devices(planned['devices'])}"
    for label, key in (("output", "output_tokens"), ("input", "input_tokens"), ("all", "tokens")):
        table.add_row(f"planned, {label} tokens", number(planned[f"per_million_{key}"]), at + spare)
    sensitivity = result["sensitivity"]
    for load, price in sensitivity["load"].items():
        if load != "1.0":
            table.add_row("  output", number(price), f"at {float(load):.0%} of that rate")
    for factor, price in sensitivity["gpu_hour"].items():
        table.add_row("  output", number(price), f"at {float(factor):.0%} of the price")
    for scale, row in sensitivity["slo"].items():
        if scale != "1.0":
            told = number(row["per_million_output_tokens"]) if row["rate"] else "not feasible"
            table.add_row("  output", told, f"with latency limits × {scale}: {number(row['rate'])} requests/s")
    for part in ("prompt", "output"):
        for scale, row in sensitivity[part].items():
            told = number(row["per_million_output_tokens"]) if row["rate"] else "not feasible"
            table.add_row("  output", told, f"with {part}s × {scale}: {number(row['rate'])} requests/s")
    where = f"{_devices(result['devices'])} at {result['gpu_hour']:g} an hour each (a parameter: [cost] gpu_hour)"
    head = _title(result["name"], f"{result['policy']} · {where}")
    return Group(head, "", table, *_notes([*result["notes"], times_from(scenario)]))


def meaning(explained: Mapping[str, Any], scenario: Scenario) -> RenderableType:
    """What a scenario means."""
    memory = explained["memory_per_device"]
    gib = 2**30
    lines = [
        f"{explained['kv_blocks']:,} KV blocks a replica ({explained['kv_blocks_from']}), "
        f"{_devices(explained['devices'])} in all"
    ]
    if memory is not None:
        parts = (f"{name} {memory[key] / gib:.1f} GiB" for name, key in MEMORY.items())
        lines.append("memory of the tightest device: " + ", ".join(parts))
    rate = explained["mean_rate"]
    at = f" at {number(rate)} a second on average" if rate else ""
    lines.append(f"{explained['requests']:,} requests{at}")
    for key in ("prompt_tokens", "output_tokens"):
        told = ", ".join(f"{name} {number(value)}" for name, value in explained[key].items())
        lines.append(f"{key.replace('_', ' ')}: {told}")
    if explained["refused"]:
        lines.append(f"{explained['refused']:,} of them can never be served and will be refused")
    title = _title(scenario.name, scenario.source)
    return Group(
        title, "", *lines, *_notes([*explained["notes"], times_from(scenario)]), "", Text(explained["scenario"])
    )


def rows(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A list, one row a line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in rows[0]:
        text = isinstance(rows[0][column], str)
        table.add_column(column.replace("_", " "), justify="left" if text else "right", no_wrap=column == "name")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else _figure(value) for value in row.values()))
    return table


def profiles(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The profiles that are shipped, a line each: the name says what a profile is of."""
    table = Table("name", box=None, pad_edge=False, header_style="bold")
    for heading in ("half within", "most within"):
        table.add_column(heading, justify="right")
    for row in rows:
        shares = row["half_within"], row["most_within"]
        table.add_row(row["name"], *("–" if share is None else f"{share:.1%}" for share in shares))
    said = (
        "of iterations composed from kernel tables and held out, half and nine tenths are so near; of sarathi-2024's, "
        "half and all of the published figures that it was fitted to",
        "`servecast calibrate show NAME` tells the source, what was fitted to what, and where it holds",
    )
    return Group(table, "", *_notes(said))


def _figure(value: float | None) -> str:
    """Large figures with their SI prefix."""
    if value is None:
        return "–"
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}"
    return f"{value:,}"


def deployed(plan: Plan) -> str:
    """What serves, in a line."""
    limits = plan.deployment.limits
    budget = f", {limits.token_budget} tokens" if limits.policy in ("stall-free", "alternating") else ""
    return f"{_where(plan)} · {limits.policy}{budget}"


def to_console(content: RenderableType) -> None:
    """Print to the terminal's width, or a page's where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PAGE)
    console.print(content)


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _where(plan: Plan) -> str:
    parallel = plan.scenario.deployment
    tp, pp, replicas = parallel.tensor_parallel, parallel.pipeline_parallel, parallel.replicas
    model = plan.model.name if plan.model else "no model"
    device = plan.device.name if plan.device else "no device"
    split = "".join(f" {name}{n}" for name, n in (("TP", tp), ("PP", pp)) if n > 1)
    many = f" × {replicas} replicas" if replicas > 1 else ""
    return f"{model} on {plan.devices // replicas} × {device}{split}{many}"


def _title(name: str, what: str) -> RenderableType:
    return Group(Text(name, style="bold"), Text(what, style="dim"))


def _counts(summary: Summary) -> str:
    refused = sum(summary["refused"].values())
    parts = [f"{summary['completed']:,} of {summary['offered']:,} requests completed"]
    parts += [f"{summary['unfinished']:,} unfinished"] if summary["unfinished"] else []
    parts += [f"{refused:,} refused ({', '.join(summary['refused'])})"] if refused else []
    return f"{', '.join(parts)} in {seconds(summary['duration_s'])} of the clock, {summary['iterations']:,} iterations"


def _saturated(summaries: Sequence[Summary]) -> list[RenderableType]:
    """First of all, that a run is no forecast: of one, or of which of several."""
    told = [(summary["policy"], sentence(summary)) for summary in summaries]
    many = len(summaries) > 1
    return [Text(f"{policy}: {said}" if many else said, style="yellow") for policy, said in told if said]


def _distributions(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in (*COLUMNS, "n"):
        table.add_column(column if column in ("mean", "max", "n") else column.upper(), justify="right")
    for key, label in METRICS.items():
        values = summary[key]
        n = number(values["n"]) + (" gaps" if key == "tbt_s" else " requests" if key == "tpot_s" else "")
        table.add_row(label, *(seconds(values[column]) for column in COLUMNS), n)
    return table


def _verdicts(summary: Summary) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for key, verdict in summary["slo"].items():
        value = _limit(key, verdict["value"])
        lines.append(
            Text.from_markup(f"{_met(verdict['met'])} {key} {value} {_sign(key)} {_limit(key, verdict['limit'])}")
        )
    if summary["attainment"] is not None:
        lines.append(f"attainment {percent(summary['attainment'])}, goodput {number(summary['goodput'])} requests/s")
    return ["", *lines] if lines else []


def _machine(summary: Summary) -> str:
    parts = [
        f"{number(summary['request_throughput'])} requests/s, {number(summary['output_throughput'])} output tokens/s",
        f"KV peak {summary['kv_peak']:,} of {summary['kv_blocks']:,} blocks, {summary['preemptions']:,} preemptions",
        f"MFU {percent(summary['mfu'])}, MBU {percent(summary['mbu'])}, bubbles {percent(summary['bubble_fraction'])}",
    ]
    if summary["time_share"]:
        shares = sorted(summary["time_share"].items(), key=lambda item: -item[1])
        parts.append(
            "busy with " + ", ".join(f"{PARTS[name]} {percent(share)}" for name, share in shares if share >= 0.0005)
        )
    return "\n".join(parts)


def _notes(notes: Sequence[str]) -> list[RenderableType]:
    return ["", *(Text(f"· {note}", style="dim") for note in notes)] if notes else []


def _met(met: bool) -> str:
    return "[green]met[/]" if met else "[red]missed[/]"


def _sign(key: str) -> str:
    return "≥" if key == "attainment" else "≤"


def _asked(key: str, limit: float) -> str:
    """A limit of [slo], as it was asked for."""
    return f"{key} {_sign(key)} {limit:g}" + ("" if key == "attainment" else " s")


def _limit(key: str, value: float | None) -> str:
    return percent(value) if key == "attainment" else seconds(value)
