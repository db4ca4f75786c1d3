"""The commands `calibrate score` and `calibrate profiles`."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from calibrate import current, scoreboard
from calibrate import fit as fitting
from calibrate import score as scoring
from calibrate.silicon import Host
from calibrate.tables import Tables
from sim import output
from sim.errors import BadInput, unknown
from sim.options import progress, say, whole
from sim.parallel import cores

Flag = Annotated[bool, Parameter(negative="", show_default=False)]


def score(
    *,
    model: str | None = None,
    system: str | None = None,
    backend: str | None = None,
    sample: Annotated[int | None, Parameter(converter=whole)] = None,
    kernels_alone: Flag = False,
    out: Path | None = None,
    json: Flag = False,
) -> None:
    """Forecast public serving measurements and say how far off the forecasts are.

    The measurements are those of an installed aiconfigurator-core: closed loops on Llama-3.1-8B, Qwen3-32B and
    Llama-3.1-70B on H100, H200 and B200. All rows take about two minutes on one core.

    Parameters
    ----------
    model
        Only this catalogue model.
    system
        Only this system: h100_sxm, h200_sxm, b200_sxm.
    backend
        Only this engine: vllm, trtllm, sglang.
    sample
        Only so many rows, drawn at random (the same every time).
    kernels_alone
        Leave the host terms out, and say which ones the rows then ask for.
    out
        Keep rows.parquet and score.json in this directory.
    json
        Print one JSON object.
    """
    output.prepare(out)
    cases = [scoring.case(row) for row in scoring.read()]
    chosen = [case for case in cases if isinstance(case, scoring.Case)]
    chosen = _chosen(chosen, {"model": model, "system": system, "framework": backend}, sample)
    hosts = dict.fromkeys(current.HOST, Host()) if kernels_alone else current.HOST
    with progress("rows") as advance:
        rows = scoring.score(chosen, hosts=hosts, workers=cores(), progress=advance)
    refused = Counter(case for case in cases if isinstance(case, str))
    result = scoreboard.result(rows, len(cases), refused, hosts)
    if out is not None:
        output.write(out, {"rows.parquet": _parquet(rows), "score.json": output.as_json(result).encode()})
        say(f"files are in {out}")
    if json:
        print(output.as_json(result), end="")
    else:
        from sim.show import to_console

        to_console(scoreboard.page(result))


def _chosen(cases: list[scoring.Case], wanted: Mapping[str, str | None], sample: int | None) -> list[scoring.Case]:
    """Those that were asked for. BadInput for names that there are none of."""
    chosen = cases
    for option, name in wanted.items():
        known = sorted({getattr(case.deployed, option) for case in chosen})
        if name is not None and name not in known:
            flag = "--backend" if option == "framework" else f"--{option}"
            raise BadInput(unknown(flag[2:], name, known), source=flag)
    chosen = [case for case in chosen if all(getattr(case.deployed, key) == v for key, v in wanted.items() if v)]
    if sample is not None:
        if sample < 1:
            raise BadInput(f"{sample} must be at least 1", source="--sample")
        drawn = np.random.default_rng(0).permutation(len(chosen))[:sample]
        chosen = [chosen[position] for position in sorted(drawn.tolist())]
    return chosen


def profiles(*, to: Path, only: str = "*") -> None:
    """Make the profiles of current engines that servecast ships, from an installed aiconfigurator-core.

    Parameters
    ----------
    to
        The directory of the profiles.
    only
        Only those whose name matches this pattern.
    """
    output.prepare(to)
    wanted = current.catalogue()
    made = 0
    tables: dict[tuple[str, str], Tables] = {}
    with progress("profiles") as advance:
        for done, one in enumerate(wanted):
            key = one.system, one.framework
            if key not in tables:
                tables[key] = Tables(*key)
            found = tables[key]
            name = one.name(found.version)
            if fnmatch.fnmatch(name, only):
                path = to / f"{name}.toml"
                path.parent.mkdir(parents=True, exist_ok=True)
                fitting.save(current.shipped(one, found, "make profiles"), path)
                made += 1
            advance(done + 1, len(wanted))
    if not made:
        raise BadInput(f"{only!r} matches none of {len(wanted)} profiles", source="--only")
    print(f"{made} profiles in {to}")


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import polars as pl

    buffer = BytesIO()
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(buffer)
    return buffer.getvalue()
