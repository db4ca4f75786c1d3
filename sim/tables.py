"""Results as tables and sentences, for pages and notebooks: every number with its unit and its n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.names import METRICS, is_seconds, short
from sim.show import number, percent, seconds
from sim.stories import NAMES

if TYPE_CHECKING:
    import jinja2

STATISTICS = ("mean", "p50", "p90", "p99", "max")
Summary = Mapping[str, Any]


class Cell(NamedTuple):
    """Text of a table; `tone` is "met" or "missed" where it is a verdict."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a head. The first column holds names, the others figures."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    note: str = ""
    folded: bool = False  # shown when it is asked for


class Verdict(NamedTuple):
    """What a result comes to, in a sentence; `tone` as a cell's."""

    text: str
    tone: str = ""


def figure(key: str, value: Any) -> str:
    """A figure by its name: durations in ms or s, shares in per cent."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return short(str(value)) if key == "limited_by" else str(value)
    if key in ("attainment", "mfu", "mbu", "bubble_fraction"):
        return percent(value)
    return seconds(value) if is_seconds(key) else number(value)


def sign(key: str, met: bool) -> str:
    """How a value stands to its limit."""
    if key == "attainment":
        return "≥" if met else "<"
    return "≤" if met else ">"


def of_run(summary: Summary) -> Verdict:
    """Whether a run meets its SLO, and by how much."""
    left = _left(summary)
    slo = summary["slo"]
    if not slo:
        told = f"TTFT P50 {seconds(summary['ttft_s']['p50'])}, TBT P99 {seconds(summary['tbt_s']['p99'])}"
        rate = f"{number(summary['request_throughput'])} requests/s"
        return Verdict(f"{told} at {rate}; the scenario sets no SLO to meet{left}.")
    met = all(verdict["met"] for verdict in slo.values())
    counted = {key: one for key, one in slo.items() if met or not one["met"]}
    told = ", ".join(
        f"{short(key)} {figure(key, one['value'])} {sign(key, one['met'])} {figure(key, one['limit'])}"
        for key, one in counted.items()
    )
    start = f"{summary['policy']} {'meets' if met else 'misses'} the SLO"
    return Verdict(f"{start}: {told}{left}.", "met" if met else "missed")


def of_comparison(summaries: Sequence[Summary]) -> Verdict:
    """Which policies meet the SLO on the same requests."""
    if not summaries:
        return Verdict("No policy was run.")
    same = f"on the same {summaries[0]['offered']:,} requests"
    if not summaries[0]["slo"]:
        best = min(summaries, key=lambda one: _or_infinite(one["tbt_s"]["p99"]))
        told = f"{best['policy']} has the lowest TBT P99 {same}, {seconds(best['tbt_s']['p99'])}"
        return Verdict(f"{told}; the scenario sets no SLO to meet.")
    failures = {one["policy"]: [key for key, verdict in one["slo"].items() if not verdict["met"]] for one in summaries}
    met = [policy for policy, failed in failures.items() if not failed]
    missed = [f"{one['policy']} misses {_missed(one, keys)}" for one in summaries if (keys := failures[one["policy"]])]
    if not met:
        return Verdict(f"No policy meets the SLO {same}: {'; '.join(missed)}.", "missed")
    if not missed:
        return Verdict(f"Every policy meets the SLO {same}.", "met")
    who = f"Only {_joined(met)} {'meets' if len(met) == 1 else 'meet'}"
    return Verdict(f"{who} the SLO {same}: {'; '.join(missed)}.", "met")


def of_capacity(found: Sequence[Mapping[str, Any]]) -> Verdict:
    """Who holds the highest rate, and how many times the first policy's it is."""
    if not found or not any(one["rate"] for one in found):
        limits = sorted({short(one["limited_by"] or "nothing") for one in found})
        return Verdict(f"Not feasible: no rate meets the SLO (limited by {', '.join(limits)}).", "missed")
    best = max(found, key=lambda one: float(one["rate"]))
    if best["limited_by"] is None:
        held = f"{best['policy']} meets the SLO at every rate that was tried, up to {number(best['rate'])} requests/s"
        return Verdict(f"{held}.", "met")
    low, high = best["interval"] or (None, None)
    over = f" ({low:.3g} to {high:.3g} over {len(best['seeds'])} seeds)" if low is not None else ""
    limit = short(best["limited_by"])
    held = f"Within the SLO {best['policy']} holds {number(best['rate'])} requests/s{over}, limited by {limit}"
    others = [one for one in found if one is not best and one["rate"]]
    if others:
        second = max(others, key=lambda one: float(one["rate"]))
        ratio = best["rate"] / second["rate"]
        held += f": {ratio:.2f} times the {number(second['rate'])} of {second['policy']}, the next best"
    return Verdict(f"{held}.", "met")


def of_cost(result: Mapping[str, Any]) -> Verdict:
    """What a million output tokens cost."""
    if result["per_million_output_tokens"] is None:
        limit = short(result["limited_by"] or "nothing")
        return Verdict(f"Not feasible: nothing is served within the SLO (limited by {limit}).", "missed")
    interval = result["interval_per_million_output_tokens"]
    over = f" ({number(interval[0])} to {number(interval[1])} over seeds)" if interval and None not in interval else ""
    rate = f"{number(result['rate'])} requests/s"
    source = "the capacity within the SLO" if result["rate_from"] == "capacity" else "the scenario's own rate"
    devices = f"{result['devices']} device{'' if result['devices'] == 1 else 's'} at {result['gpu_hour']:g} an hour"
    price = number(result["per_million_output_tokens"])
    return Verdict(f"A million output tokens cost {price}{over} with {devices} and {rate}, {source}.")


def of_validation(result: Mapping[str, Any]) -> Verdict:
    """How far the simulation is off, beside how far the measurement is from itself."""
    rows = {row["metric"]: row for row in result["metrics"]}
    anchored = any(row["error_anchored"] is not None for row in rows.values())
    which = "error_anchored" if anchored else "error"
    told = [
        f"{short(metric)} by {rows[metric][which]:+.1%} (noise {_signed(rows[metric]['noise'])})"
        for metric in ("ttft_p50", "tbt_p50", "tbt_p99")
        if metric in rows and rows[metric][which] is not None
    ]
    if not told:
        return Verdict("Nothing that is compared was measured.")
    how = ", with the profile of calibration steps beside the run" if anchored else ""
    return Verdict(f"The simulation is off the measured run in {', '.join(told)}{how}.")


def distributions(summary: Summary) -> Table:
    """TTFT, TBT, TPOT, E2E and scheduling delay."""
    rows = [
        [name, *(seconds(summary[f"{metric}_s"][one]) for one in STATISTICS), number(summary[f"{metric}_s"]["n"])]
        for metric, name in METRICS.items()
    ]
    head = ["", *(one.upper() if one[0] == "p" else one for one in STATISTICS), "n"]
    return Table("Distributions", head, rows, "TBT: n gaps between tokens. The others: n requests.")


def limits(summary: Summary) -> Table:
    """The SLO: value, limit and verdict."""
    rows: list[list[str | Cell]] = [
        [short(key), figure(key, one["value"]), figure(key, one["limit"]), _met(one["met"])]
        for key, one in summary["slo"].items()
    ]
    return Table("SLO", ["", "value", "limit", "verdict"], rows)


def machine(summary: Summary) -> Table:
    """What was served, and how the machine was used."""
    refused = sum(summary["refused"].values())
    why = f" ({', '.join(summary['refused'])})" if refused else ""
    rows = [
        ["requests offered", number(summary["offered"])],
        ["completed", number(summary["completed"])],
        ["unfinished", number(summary["unfinished"])],
        ["refused", number(refused) + why],
        ["duration", seconds(summary["duration_s"])],
        ["requests/s", number(summary["request_throughput"])],
        ["output tokens/s", number(summary["output_throughput"])],
        ["iterations", number(summary["iterations"])],
        ["preemptions", number(summary["preemptions"])],
        ["KV blocks of a replica: peak of all", f"{number(summary['kv_peak'])} of {number(summary['kv_blocks'])}"],
        ["MFU", percent(summary["mfu"])],
        ["MBU", percent(summary["mbu"])],
        ["idle stage time (bubbles)", percent(summary["bubble_fraction"])],
    ]
    if summary["attainment"] is not None:
        rows.append(["attainment", percent(summary["attainment"])])
        rows.append(["goodput", f"{number(summary['goodput'])} requests/s"])
    return Table("The run in numbers", ["", ""], rows)


def side_by_side(summaries: Sequence[Summary]) -> Table:
    """Policies in columns."""
    rows: list[list[str | Cell]] = []
    for metric, name in METRICS.items():
        rows += [
            [f"{name} {one.upper()}", *(seconds(s[f"{metric}_s"][one]) for s in summaries)] for one in ("p50", "p99")
        ]
    rows.append(["TBT max", *(seconds(s["tbt_s"]["max"]) for s in summaries)])
    rows.append(["TBT n (gaps)", *(number(s["tbt_s"]["n"]) for s in summaries)])
    rows.append(["completed, of requests offered", *(f"{s['completed']:,} of {s['offered']:,}" for s in summaries)])
    for key, name in (
        *(("request_throughput", "requests/s"), ("output_throughput", "output tokens/s")),
        *(("kv_blocks", "KV blocks of a replica"), ("kv_peak", "of them used, peak"), ("preemptions", "preemptions")),
        *(("mfu", "MFU"), ("mbu", "MBU"), ("bubble_fraction", "idle stage time (bubbles)")),
    ):
        rows.append([name, *(figure(key, s[key]) for s in summaries)])
    for key in summaries[0]["slo"] if summaries else ():
        limit = f"{short(key)} {sign(key, True)} {figure(key, summaries[0]['slo'][key]['limit'])}"
        rows.append([limit, *(_met(s["slo"][key]["met"]) for s in summaries)])
    return Table("Side by side", ["", *(s["policy"] for s in summaries)], rows)


def capacities(found: Sequence[Mapping[str, Any]]) -> Table:
    """Rate, interval and what limits it, per policy."""
    rows = [
        [
            one["policy"],
            number(one["rate"]) if one["rate"] else Cell("not feasible", "missed"),
            "–" if one["interval"] is None else f"{one['interval'][0]:.3g} to {one['interval'][1]:.3g}",
            number(len(one["seeds"])),
            short(one["limited_by"] or "nothing that was tried"),
            number(len(one["trials"])),
        ]
        for one in found
    ]
    note = "Requests/s for all replicas together; interval: smallest and largest of one search for each seed."
    return Table("Capacity", ["", "requests/s", "interval", "seeds", "limited by", "trials"], rows, note)


def trials(found: Sequence[Mapping[str, Any]]) -> Table:
    """Every trial of the first search of each policy."""
    keys = list(dict.fromkeys(key for one in found for trial in one["trials"] for key in trial["values"]))
    rows = [
        [
            one["policy"],
            number(trial["rate"], 4),
            _met(trial["met"]),
            *(figure(key, trial["values"].get(key)) for key in keys),
            short(trial["limited_by"] or "") + (", stopped early" if trial["stopped"] else ""),
        ]
        for one in found
        for trial in sorted(one["trials"], key=lambda trial: float(trial["rate"]))
    ]
    head = ["", "requests/s", "SLO", *(short(key) for key in keys), "limited by"]
    return Table("Trials", head, rows, "A trial that can no longer pass is stopped, and has no values.", folded=True)


def costs(result: Mapping[str, Any]) -> Table:
    """The cost, and how it moves."""
    sensitivity = result["sensitivity"]
    million = "a million output tokens"
    rows = [
        [million, number(result["per_million_output_tokens"])],
        ["a million tokens, prompt and output", number(result["per_million_tokens"])],
        *(
            [f"{million}, at {float(f):.0%} of the rate", number(c)]
            for f, c in sensitivity["load"].items()
            if f != "1.0"
        ),
        *([f"{million}, at {float(f):.0%} of the price", number(c)] for f, c in sensitivity["gpu_hour"].items()),
        *(
            [f"{million}, latency limits × {scale}", number(row["per_million_output_tokens"])]
            for scale, row in sensitivity["slo"].items()
            if "per_million_output_tokens" in row
        ),
        ["requests/s", number(result["rate"])],
        ["limited by", short(result["limited_by"] or "nothing")],
        ["mean output tokens of a request", number(result["mean_output_tokens"], 4)],
        ["mean prompt tokens of a request", number(result["mean_prompt_tokens"], 4)],
    ]
    return Table("Cost", ["", ""], rows, "In the currency of the price, which is a parameter: [cost] gpu_hour.")


def causes(told: Mapping[str, Any], what: str) -> Table:
    """What made gaps or first tokens late (a part of the summary of an explanation), largest first."""
    if not told["late"]:
        return Table(f"No late {what}", (), ())
    rows = [
        (
            NAMES[one["cause"]],
            *(percent(one["share"]), seconds(one["excess_s"]), seconds(one["seconds"])),
            *(number(one["late"]), number(one["main_in"])),
        )
        for one in told["causes"]
    ]
    title = f"{told['late']:,} of {told['n']:,} {what} above {seconds(told['limit_s'])}: causes"
    return Table(title, ("", "of the excess", "excess", "in all", what, "main in"), rows)


def validation(result: Mapping[str, Any]) -> list[Table]:
    """Figures measured and simulated; how far the schedules agree."""
    anchored = any(row["error_anchored"] is not None for row in result["metrics"])
    head = ["", "measured", "simulated", "error", *(["error, anchored"] if anchored else []), "noise"]
    rows = [
        [
            short(row["metric"]),
            seconds(row["measured_s"]),
            seconds(row["simulated_s"]),
            _signed(row["error"]),
            *([_signed(row["error_anchored"])] if anchored else []),
            _signed(row["noise"]),
        ]
        for row in result["metrics"]
    ]
    note = "Errors are relative to the measured run; noise: the measured run, run again."
    told, parts = result["alignment"], result["attribution"]
    rest = [["iterations of the measured run", number(told["iterations_measured"])]]
    for which, name in (("again", "measured again"), ("simulated", "simulated"), ("anchored", "anchored")):
        if f"{which}_equal_batches" in told:
            first = told[f"{which}_first_difference"]
            rest.append([f"{name}: batches equal to the measured, in order", percent(told[f"{which}_equal_batches"])])
            rest.append([f"{name}: the first that differs", "none" if first is None else number(first)])
    for which, name in (("predicted", "latency model"), ("anchored", "anchored profile")):
        if f"{which}_median_error" in told:
            rest.append([f"{name}, each measured batch: error, P50", percent(told[f"{which}_median_error"])])
            rest.append([f"{name}, each measured batch: error, P90", percent(told[f"{which}_p90_error"])])
            rest.append([f"{name}, all measured batches together", _signed(told[f"{which}_total"])])
    rest += [
        ["difference in iteration time by the latency model", _signed(parts["latency_model"])],
        ["difference in iteration time by the schedule", _signed(parts["schedule"])],
        ["the host's share of the measured time", percent(parts["host_share"])],
    ]
    return [Table("Measured and simulated", head, rows, note), Table("Where they part", ["", ""], rest)]


def html(title: str, tables: Sequence[Table], verdict: Verdict | None = None, notes: Sequence[str] = ()) -> str:
    """A notebook's view of a result: a fragment of HTML, everything escaped."""
    template = environment().get_template("notebook.html")
    return template.render(title=title, tables=tables, verdict=verdict, notes=notes)


@cache
def environment() -> jinja2.Environment:
    """Templates, with everything that they are given escaped."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("sim"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _left(summary: Summary) -> str:
    """Requests that were not completed, where there are any."""
    parts = [f"{summary['unfinished']:,} unfinished"] if summary["unfinished"] else []
    refused = sum(summary["refused"].values())
    parts += [f"{refused:,} refused"] if refused else []
    return f"; of {summary['offered']:,} requests {' and '.join(parts)}" if parts else ""


def _met(met: bool) -> Cell:
    return Cell("met", "met") if met else Cell("missed", "missed")


def _missed(summary: Summary, keys: Sequence[str]) -> str:
    """Which limits, and by how much."""
    told = []
    for key in keys:
        value, limit = (figure(key, summary["slo"][key][one]) for one in ("value", "limit"))
        told.append(f"{short(key)} ({value} {sign(key, False)} {limit})")
    return _joined(told)


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def _or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value
