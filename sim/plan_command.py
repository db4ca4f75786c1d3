"""The command `plan`."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from sim import output
from sim.cheapest import Candidates, Planned, label_of
from sim.cheapest import plan as find_plan
from sim.errors import BadInput
from sim.options import Options, answer, progress, say, virtual, whole

MOST_ROWS = 12  # of the page
MOST_REASONS = 8


def plan(
    scenario: str,
    candidates: str,
    *,
    workers: Annotated[int | None, Parameter(converter=whole)] = None,
    resume: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    options: Options = Options(),
) -> None:
    """Find the cheapest of many deployments that serves a demand within the SLO.

    Every candidate is searched for the capacity of one replica; replicas, devices, cost and the latencies under the
    demand follow.

    Parameters
    ----------
    candidates
        A file of candidates: the demand, prices per device-hour, and the axes to try.
    workers
        How many processes of this machine; as many as it has cores by default.
    resume
        Go on with the plan that --out holds a part of; begin it where there is none.
    """
    virtual(options, "a plan")
    if workers is not None and not 1 <= workers <= 1000:
        raise BadInput(f"{workers} must be from 1 to 1000", source="--workers")
    if resume and options.out is None:
        raise BadInput("needs --out, the directory of the plan to go on with", source="--resume")
    one = Candidates.load(candidates, scenario, options.overrides(), rate=options.rate)
    output.prepare(options.out)
    with progress("candidates") as advance:
        done = find_plan(one, out=options.out, resume=resume, workers=workers, progress=advance)
    for note in done.notes:
        say(note)
    answer(options, one.study.base, done.to_dict(), lambda show: _page(done, show))


def _page(done: Planned, show: Any) -> Any:
    """The verdict, the candidates from the cheapest on, and why others are none."""
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    demand, study, ranked = done.candidates.demand, done.candidates.study, done.ranked
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = ("an hour", "per M output", "devices", "load", "TTFT P50", "TTFT P99", "TBT P99")
    table.add_column("candidate", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in ranked[:MOST_ROWS]:
        table.add_row(
            ("* " if row["pareto"] else "  ") + label_of(row, study.axes),
            f"{row['cost_per_hour']:,.2f}",
            show.number(row["cost_per_million_output_tokens"]),
            str(row["devices"]),
            show.percent(row["load"]),
            *(show.seconds(row[key]) for key in ("ttft_s_p50", "ttft_s_p99", "tbt_s_p99")),
        )
    prices = "prices are parameters" if demand.prices else "price: [cost] gpu_hour, a parameter"
    asked = f"{demand.rate:g} requests/s · {demand.headroom:.0%} of capacity at most, {demand.spare} spare · {prices}"
    page: list[RenderableType] = [Text(done.verdict, style="bold"), Text(f"{study.base.name} · {asked}", style="dim")]
    notes = []
    if ranked:
        page += ["", table]
        notes = [
            "* no other is as good in cost, TTFT P50, TTFT P99 and TBT P99 at once",
            "latencies: simulated, of a replica with its share of the demand while the spare ones carry nothing",
            *([f"{len(ranked) - MOST_ROWS} more are not shown"] if len(ranked) > MOST_ROWS else []),
            *dict.fromkeys(row["times_from"] for row in ranked),
        ]
    reasons: dict[str, list[str]] = {}
    for one in done.infeasible:
        reasons.setdefault(str(one["reason"]), []).append(_short(one))
    for reason, those in list(reasons.items())[:MOST_REASONS]:
        more = f" and {len(those) - 1} more" if len(those) > 1 else ""
        notes.append(f"infeasible: {those[0]}{more}: {reason}")
    if len(reasons) > MOST_REASONS:
        notes.append(f"and {len(reasons) - MOST_REASONS} reasons more")
    return Group(*page, "", *(Text(f"· {note}", style="dim") for note in notes))


def _short(one: dict[str, Any]) -> str:
    """What sets a candidate apart: keys by their last part, names by their table."""
    told = {key.removesuffix(".name").rpartition(".")[2]: value for key, value in one["settings"].items()}
    return ", ".join(f"{key} {value}" for key, value in told.items())
