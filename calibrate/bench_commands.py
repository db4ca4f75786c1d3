"""The command `calibrate import bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from calibrate import bench as refitting
from calibrate import fit as fitting
from calibrate.bench import Result
from sim import output
from sim.errors import BadInput
from sim.options import Options, progress, say
from sim.profile import Profile, load
from sim.simulate import plan


def bench(
    *results: Path,
    profile: str,
    scenario: str,
    to: Path,
    hold: str = "",
    settings: Annotated[tuple[str, ...], Parameter(name="--set", negative="", show_default=False)] = (),
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False,
) -> None:
    """Refit a profile's host terms and scale to results of `vllm bench serve --save-result --save-detailed`.

    The requests of each result are simulated by the scenario's scheduler: a closed loop where the result has
    max_concurrency and no finite request_rate, else as they were sent.

    Parameters
    ----------
    results
        The result files.
    profile
        The profile to start from: a shipped one, or a file.
    scenario
        The deployment that was measured: model, device, engine limits, policy and token budget.
    to
        The profile to write, *.toml.
    hold
        Terms not to fit, separated by commas: step, sequence, scale.
    settings
        Override any scenario key: key.path=value. Repeatable.
    """
    if not results:
        raise BadInput("give at least one result file", source="import bench")
    if to.suffix != ".toml" or not to.absolute().parent.is_dir():
        raise BadInput("the file's name must end in .toml, and its directory exist", source="--to")
    base = _base(profile)
    one = Options(settings=settings).scenario(scenario)
    try:
        planned = plan(one.with_(latency={"kind": "profile", "name": profile}))  # whether it is of this deployment
    except BadInput as error:
        raise BadInput(error.what, source="--profile", key=error.key) from None
    read = [refitting.read(path) for path in results]
    held = [term.strip() for term in hold.split(",") if term.strip()]
    with progress("simulations") as advance:
        fitted, rows = refitting.refit(base, read, planned.scenario, hold=held, progress=advance)
    told = _provenance(fitted, base, read, rows, held, one.name)
    fitted = fitted.model_copy(update={"name": to.stem, "provenance": told})
    fitting.save(fitted, to)
    for each in read:
        if each.failed:
            say(f"{each.path}: {each.failed} requests without an answer are left out")
    result = _result(to, fitted, told, rows)
    if json:
        print(output.as_json(result), end="")
    else:
        from calibrate import render
        from sim.show import to_console

        to_console(render.refitted(result))


def _base(name: str) -> Profile:
    """The profile to start from. BadInput for one without host terms."""
    base = load(name, Path())
    if base.coefficients is None:
        what = f"{name!r} has fitted figures of the roofline model: there are no host terms to refit"
        raise BadInput(what, source="--profile")
    return base


def _provenance(
    fitted: Profile, base: Profile, read: list[Result], rows: list[dict[str, Any]], held: list[str], scenario: str
) -> dict[str, Any]:
    """What is known of where the refitted profile comes from."""
    return fitted.provenance | {
        "base_profile": base.name,
        "refitted": ", ".join(term for term in refitting.TERMS if term not in held),
        "refitted_to": "quantiles of TTFT, TPOT and TBT of vllm bench serve, simulated by the scenario's scheduler",
        "results": ", ".join(one.path.name for one in read),
        "requests": sum(len(each.workload.prompts) for each in read),
        "scenario": scenario,
        "error_before": _mean(rows, "before"),
        "error_after": _mean(rows, "after"),
    }


def _result(to: Path, fitted: Profile, told: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ready for JSON."""
    return {
        "file": str(to),
        "step_s": float(told["host_step_s"]) * fitted.scale,
        "sequence_s": float(told["host_sequence_s"]) * fitted.scale,
        "scale": fitted.scale,
        "error_before": told["error_before"],
        "error_after": told["error_after"],
        "metrics": rows,
    }


def _mean(rows: list[dict[str, float]], when: str) -> float:
    return float(np.mean([abs(row[f"{when}_error"]) for row in rows]))
