"""The commands `calibrate measure`, `calibrate fit`, `calibrate show` and `validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from calibrate import fit as fitting
from calibrate import kept as files_of
from calibrate import measure as measuring
from calibrate import rows
from calibrate import validate as validation
from calibrate.grid import grid
from sim import output
from sim.errors import BadInput
from sim.options import Options, answer, needing_torch, progress, say
from sim.profile import load
from sim.scenario import Scenario
from sim.simulate import Plan, plan


def measure(
    scenario: str, *, to: Path, seconds: float = 90.0, fresh: bool = False, options: Options = Options()
) -> None:
    """Measure the engine on a grid of batches that the scenario's limits allow.

    An interrupted measurement goes on where it was when it is called again.

    Parameters
    ----------
    to
        The file to write: *.parquet, or *.jsonl where there is no polars.
    seconds
        How long to go on measuring rounds of the grid; three rounds at least.
    fresh
        Forget what an interrupted measurement left.
    """
    one = options.scenario(scenario)
    rows.check_writable(to)
    machine = needing_torch("gpu_backend.machine", "calibrate measure")
    planned, executor = _engine(one, "calibrate measure")
    limits = measuring.limits_of(planned)
    points = grid(limits)
    assert planned.model is not None  # or there would be no engine
    kept = to.with_name(f"{to.name}.{planned.model.name}.partial")  # another model's must not go on from it
    if fresh:
        kept.unlink(missing_ok=True)
    say(f"{len(points)} batches; up to {limits.batch_tokens} tokens, {limits.sequences} requests")
    with progress("batches") as advance:
        measured = measuring.measure(
            executor,
            points,
            planned.deployment.limits.block_tokens,
            seconds=seconds,
            kept=kept,
            clock_mhz=lambda: machine.clock_mhz(executor.device),
            progress=advance,
        )
    provenance = machine.describe(executor.device) | {
        "source": "measured by servecast",
        "model": planned.model.name,
        "catalogue_device": planned.device.name if planned.device else "cpu",
        "scenario": one.name,
    }
    rows.save(rows.Rows.of(measured, provenance), to)
    kept.unlink(missing_ok=True)
    result = {"file": str(to), "rows": len(measured), "batches": len(points), "provenance": provenance}
    answer(options, one, result, lambda _: f"{len(measured)} iterations of {len(points)} batches in {to}")


def fit(
    measurements: Path,
    *,
    to: Path,
    model: str | None = None,
    device: str | None = None,
    without: str = "",
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False,
) -> None:
    """Fit a latency profile to measured iterations.

    Parameters
    ----------
    measurements
        A table that `calibrate measure` wrote, or anyone's: parquet, CSV or JSON lines with the columns decodes,
        context, chunks, prefill_tokens, attention, prefill_context and seconds, and samples (requests that got a token)
        where some got none.
    to
        The profile to write, *.toml; `latency.name` is then its path.
    model
        The model that was measured; the table's own by default.
    device
        The device that was measured; the table's own by default.
    without
        Terms to hold at 0, separated by commas.
    """
    table = rows.load(measurements)
    told = {
        "model": model or table.provenance.get("model"),
        "device": device or table.provenance.get("catalogue_device"),
    }
    for name, value in told.items():
        if not value:
            raise BadInput(f"the table does not say which {name} was measured", source=f"--{name}")
    held = [term.strip() for term in without.split(",") if term.strip()]
    try:
        profile = fitting.fit(
            table,
            name=to.stem,
            model=str(told["model"]),
            device=str(told["device"]),
            tensor_parallel=int(table.provenance.get("tensor_parallel", 1)),
            without=held,
        )
    except BadInput as error:
        raise error.within(source=str(measurements)) from None
    fitting.save(profile, to)
    if json:
        print(output.as_json(profile.model_dump()), end="")
    else:
        from calibrate import render
        from sim.show import to_console

        to_console(render.profile(profile))


def show(name: str, *, json: Annotated[bool, Parameter(negative="", show_default=False)] = False) -> None:
    """Show a profile: where it comes from, what was fitted to what, how well, and how far it holds.

    Parameters
    ----------
    name
        A shipped profile, or a file.
    """
    profile = load(name, Path())
    if json:
        print(output.as_json(profile.model_dump()), end="")
    else:
        from calibrate import render
        from sim.show import to_console

        to_console(render.profile(profile))


def validate(scenario: str, *, anchor: bool = False, attempts: int = 1, options: Options = Options()) -> None:
    """Run the same scenario and the same scheduler objects simulated and measured, side by side.

    Parameters
    ----------
    anchor
        Execute calibration steps between those of the measured run, and simulate with a profile of those as well:
        a machine that drifts would otherwise pass for an error of the model.
    attempts
        How often to do all of it; the best is the one with the smallest errors, and all are shown.
    """
    one = options.scenario(scenario)
    if not 1 <= attempts <= 100:
        raise BadInput(f"{attempts} must be from 1 to 100", source="--attempts")
    if options.clock != "virtual":
        raise BadInput("the two are compared on the virtual clock", source="--clock")
    planned, executor = _engine(one, "validate")
    beside = None
    if anchor:
        twin = needing_torch("gpu_backend.engine", "validate").twin
        beside = twin(executor, planned.scenario.torch, planned.deployment.limits.num_blocks)
    done = []
    for number in range(attempts):
        with progress(f"attempt {number + 1} of {attempts}") as advance:
            done.append(validation.validate(planned.scenario, executor, beside, progress=advance))
    best = min(done, key=validation.worst)
    result: dict[str, Any] = best.to_dict() | {"attempts": [attempt.metrics() for attempt in done]}
    if options.out:
        output.write(options.out, files_of.files(best, result))
    answer(options, one, result, lambda _: _page(done, best))


def _engine(scenario: Scenario, command: str) -> tuple[Plan, Any]:
    """The plan of a scenario and the engine that executes it. BadInput names where its key came from."""
    planned = plan(scenario)
    try:
        return planned, needing_torch("gpu_backend.engine", command).executor(planned)()
    except BadInput as error:
        raise scenario.blame(error) from None


def _page(done: list[validation.Validation], best: validation.Validation) -> Any:
    from calibrate import render

    return render.validation(done, best)
