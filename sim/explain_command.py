"""`servecast explain DIR`: why tokens of a run came late."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from sim import output, stories
from sim.errors import BadInput
from sim.explain import Explanation
from sim.explain import explain as find
from sim.options import Seeds, progress, say, watch
from sim.text import number, percent, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MOST_WORST = 1000
BOUNDS = {
    "compute": "arithmetic",
    "weight_reads": "reading weights",
    "kv_reads": "reading KV",
    "activations": "activations",
    "communication": "communication",
    "host": "the host",
}


def explain(
    directory: Path,
    *,
    above: float | None = None,
    ttft_above: float | None = None,
    worst: Seeds = 5,
    out: Path | None = None,
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False,
) -> None:
    """Say why tokens of a run came late: what lies in the gaps between tokens, and in the waits for the first one.

    The run is made again from its files, so that they must not have changed, nor the traces they name.

    Parameters
    ----------
    directory
        What `run SCENARIO --out DIR` wrote.
    above
        Gaps (TBT) and first tokens (TTFT) of more seconds are late; without it the limits of [slo] hold, and where
        there are none the longest 1 % are late.
    ttft_above
        Another such limit for first tokens.
    worst
        How many of the worst waits are told.
    out
        Keep explanation.json, gaps.parquet, ttfts.parquet and iterations.parquet in this directory.
    json
        Print one JSON object on stdout and nothing else there.
    """
    for option, limit in (("--above", above), ("--ttft-above", ttft_above)):
        if limit is not None and not (isfinite(limit) and limit >= 0):
            raise BadInput(f"{limit:g} must be a number of seconds, at least 0", source=option)
    if not 0 <= worst <= MOST_WORST:
        raise BadInput(f"{worst} must be from 0 to {MOST_WORST}", source="--worst")
    output.prepare(out)
    with progress("requests") as advance:
        look = watch(advance, _requests(directory))
        first = above if ttft_above is None else ttft_above
        why = find(directory, above=above, ttft_above=first, worst=worst, watch=look)
    if out is not None:
        output.write(out, output.of_explanation(why))
    if json:
        sys.stdout.write(output.as_json(why.summary))
        return
    from sim import show

    show.to_console(page(why))
    if out is not None:
        say(f"files are in {out}")


def page(why: Explanation) -> RenderableType:
    """The verdict, the causes, the worst waits, and what bounds the iterations."""
    from rich.console import Group
    from rich.text import Text

    told = why.summary
    parts: list[RenderableType] = [Text(told["name"], style="bold"), Text(told["verdict"])]
    for key, what in (("tbt", "gaps"), ("ttft", "first tokens")):
        if told[key]["late"]:
            limit = f"{told[key]['late']:,} {what} above {seconds(told[key]['limit_s'])}"
            parts += ["", Text(f"{limit}, {seconds(told[key]['excess_s'])} beyond it in all", style="bold")]
            parts += [_causes(told[key], what), *(Text(f"· {one['story']}") for one in told[key]["worst"])]
    parts += ["", Text(_bounds(told["iterations"]))]
    parts += ["", *(Text(f"· {note}", style="dim") for note in told["notes"])]
    return Group(*parts)


def _causes(told: Mapping[str, Any], what: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in ("of the excess", "excess", "in all", what, "main in"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in told["causes"]:
        figures = (seconds(one["excess_s"]), seconds(one["seconds"]), number(one["late"]), number(one["main_in"]))
        table.add_row(stories.NAMES[one["cause"]], percent(one["share"]), *figures)
    return table


def _bounds(told: Mapping[str, Any]) -> str:
    """What bounds the iterations, in a line or two."""
    if not told["bounds"]:
        return f"{told['n']:,} iterations; what bounds them takes a [model] and a [device] to tell"
    shares = ", ".join(
        f"{BOUNDS[bound]} {percent(one['time_share'])} ({one['iterations']:,})" for bound, one in told["bounds"].items()
    )
    return (
        f"{told['n']:,} iterations, by what takes most of each, as shares of busy time: {shares}\n"
        f"MFU {percent(told['mfu'])}, MBU {percent(told['mbu'])} of busy time; by {told['from']}"
    )


def _requests(directory: Path) -> int:
    """How many requests a progress bar is of; 0 where the files do not say (which is an error soon enough)."""
    import polars as pl

    try:
        return int(pl.scan_parquet(directory / "requests.parquet").select(pl.len()).collect().item())
    except (OSError, pl.exceptions.PolarsError):
        return 0
