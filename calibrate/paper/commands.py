"""`servecast reproduce`, and `servecast calibrate paper`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from calibrate import fit as fitting
from calibrate.paper.figures import FIGURES, on_cores
from calibrate.paper.rows import Figure
from calibrate.paper.settings import DEPLOYMENTS
from sim import output
from sim.errors import BadInput, unknown
from sim.options import progress, say
from sim.parallel import cores


def reproduce(
    *figures: str,
    out: Path | None = None,
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False,
) -> None:
    """Reproduce figures and tables of the Sarathi-Serve paper from simulation, beside the published values.

    Parameters
    ----------
    figures
        Which ones: 10, figure-10, table-3, …; all by default.
    out
        Keep the rows in this directory: reproduction.json, reproduction.parquet.
    json
        Print one JSON object on stdout and nothing else there.
    """
    chosen = list(dict.fromkeys(_name(figure) for figure in figures)) or list(FIGURES)
    output.prepare(out)
    made = []
    for name in chosen:
        with progress(name) as advance:
            made.append(FIGURES[name](partial(on_cores, progress=advance)))
        if not json:
            _show(made[-1])
    result = {"figures": [figure.to_dict() for figure in made]}
    if out is not None:
        output.write(out, {"reproduction.json": output.as_json(result).encode(), "reproduction.parquet": _table(made)})
        say(f"files are in {out}")
    if json:
        print(output.as_json(result), end="")


def paper(*deployments: str, to: Path, rounds: int = 4) -> None:
    """Fit the profiles of the paper's deployments to its published values: one set of figures for each.

    Parameters
    ----------
    deployments
        Which ones; all by default.
    to
        The directory for the profiles, NAME.toml each.
    rounds
        Steps of least squares at most; 0 keeps the figures where the fit starts, and says how well the data tell them.
    """
    from calibrate.paper.fit import fit

    for name in deployments:
        if name not in DEPLOYMENTS:
            raise BadInput(unknown("deployment", name, DEPLOYMENTS), source="calibrate paper")
    output.prepare(to)
    to.mkdir(parents=True, exist_ok=True)
    for name in deployments or DEPLOYMENTS:
        say(name)
        profile = fit(name, workers=cores(), rounds=rounds, said=say)
        file = to / f"{profile.name.rpartition('/')[2]}.toml"
        fitting.save(profile, file)
        say(f"{name}: {profile.trust}; in {file}")


def _name(given: str) -> str:
    """`10`, `fig10`, `Fig. 10`, `figure-10`, `table3`: the figure that is meant."""
    found = re.fullmatch(r"(f|fig|figure|t|tab|table)?[ ._-]*([0-9]+)", given.strip().casefold())
    name = f"{'table' if (found[1] or '').startswith('t') else 'figure'}-{found[2]}" if found else given
    if name not in FIGURES:
        raise BadInput(unknown("figure", given, FIGURES), source="reproduce")
    return name


def _table(figures: Sequence[Figure]) -> bytes:
    from io import BytesIO

    import polars as pl

    frame = pl.concat(figure.frame.select(pl.lit(figure.name).alias("figure"), pl.all()) for figure in figures)
    buffer = BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def _show(figure: Figure) -> None:
    from calibrate import render
    from sim.show import to_console

    to_console(render.figure(figure))
