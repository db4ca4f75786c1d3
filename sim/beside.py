"""A real run beside the forecast: `servecast beside SCENARIO RESULT.json`.

The scenario serves the requests of a result of `vllm bench serve --save-result --save-detailed`: those that completed
there, with their lengths, as they were sent. Both sides are then measured alike, by the definitions of summary.json
(percentiles are ranks), and not by the result's own figures.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from sim import hardware
from sim.bench import traffic
from sim.distribution import summarise
from sim.errors import BadInput
from sim.from_vllm import catalogued
from sim.options import Options, answer, keep, progress, watch
from sim.report import Report
from sim.scenario import Scenario
from sim.simulate import simulate

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sim.bench_results import BenchResult

METRICS = {"ttft": "TTFT", "tbt": "TBT", "tpot": "TPOT", "e2e": "E2E"}
PERCENTILES = ("p50", "p90", "p99")


def beside(scenario: str, result: Path, *, options: Options = Options()) -> None:  # noqa: B008
    """Lay a measured run beside the forecast: the scenario serves the requests of a vLLM bench result.

    Parameters
    ----------
    result
        What `vllm bench serve --save-result --save-detailed` wrote.
    """
    from sim.bench_results import read_bench

    for name in ("rate", "requests"):
        if getattr(options, name) is not None:
            raise BadInput("the requests are those of the result", source=f"--{name}")
    own = options.scenario(scenario)
    measured = read_bench(result, str(result))
    one, how = replayed(own, result, measured)
    with progress("requests") as advance:
        look = watch(advance, one.workload.requests)
        report = simulate(
            one, keep_steps=False, wall_clock=options.clock == "wall", watch=look, engine=options.engine()
        )
    told = compared(report, measured) | {
        "result": str(result),
        "replayed": how,
        "differences": differences(own, measured),
        "times_from": report.summary["times_from"],
        "notes": report.notes,
    }
    keep(options, one, "beside.json", told)
    answer(options, one, told, lambda show: _page(show, report, told))


def replayed(scenario: Scenario, path: Path, measured: BenchResult) -> tuple[Scenario, str]:
    """The scenario with the result's requests, and how they arrive."""
    good = int(measured.good.sum())
    if not good:
        raise BadInput("no request completed", source=str(path))
    trace = {"kind": "trace", "path": str(path.resolve())}
    arrivals, how = _arrivals(measured, trace)
    try:
        made = scenario.with_(
            workload__requests=good,
            workload__arrivals=arrivals,
            workload__lengths=trace,
            metrics__warmup=0.0,
            metrics__drain=0.0,
        )
    except BadInput as error:  # of a rate, say, that no arrivals can have
        raise BadInput(error.what, source=str(path), key=error.key) from None
    return made, how


def _arrivals(measured: BenchResult, trace: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A closed loop where there was one, since its requests wait for the forecast's own; else when they were sent."""
    settings = measured.settings
    rate, clients = _number(settings.get("request_rate")), _number(settings.get("max_concurrency"))
    if rate is None and clients:
        return {
            "kind": "closed",
            "concurrency": int(clients),
        }, f"a closed loop of {int(clients)}, as max_concurrency says"
    if measured.starts is not None:
        return trace, "at the times that they were sent"
    if rate is None:
        return {"kind": "at-once"}, "all at once (the result has no start_times, and request_rate is inf)"
    burstiness = _number(settings.get("burstiness")) or 1.0
    drawn = (
        {"kind": "poisson", "rate": rate}
        if burstiness == 1.0
        else {"kind": "gamma", "rate": rate, "cv": burstiness**-0.5}
    )
    return drawn, f"drawn at request_rate {rate:g} (the result has no start_times)"


def compared(report: Report, measured: BenchResult) -> dict[str, Any]:
    """Forecast and measured figures, and the error of the forecast relative to the measured."""
    good = measured.good
    ttft, latency, outputs = measured.ttfts[good], measured.latencies[good], measured.outputs[good]
    many = outputs > 1
    pools = {
        "ttft": ttft,
        "tbt": np.concatenate([gaps for gaps, fine in zip(measured.itls, good.tolist(), strict=True) if fine]),
        "tpot": (latency - ttft)[many] / (outputs[many] - 1),
        "e2e": latency,
    }
    rows = []
    for name, values in pools.items():
        found, truth = report.summary[f"{name}_s"], summarise(values)
        for percentile in PERCENTILES:
            row = _row(found[percentile], truth[percentile], "_s")
            rows.append({"metric": f"{name}_{percentile}", **row, "n_forecast": found["n"], "n_measured": truth["n"]})
    duration = _number(measured.settings.get("duration"))
    if measured.starts is not None:
        starts = measured.starts[good]
        duration = float((starts + latency).max() - starts.min())
    throughput = []
    for name, count in (("request_throughput", int(good.sum())), ("output_throughput", int(outputs.sum()))):
        rate = count / duration if duration else None
        throughput.append({"metric": name, **_row(report.summary[name], rate, "")})
    summary = report.summary
    return {
        "name": summary["name"],
        "policy": summary["policy"],
        "requests": int(good.sum()),
        "failed": int((~good).sum()),
        "completed_forecast": summary["completed"],
        "metrics": rows,
        "throughput": throughput,
    }


def _row(forecast: float | None, measured: float | None, unit: str) -> dict[str, float | None]:
    error = forecast / measured - 1 if forecast is not None and measured else None
    return {f"forecast{unit}": forecast, f"measured{unit}": measured, "error": error}


def differences(scenario: Scenario, measured: BenchResult) -> list[str]:
    """Where the result says that it is of something else than the scenario."""
    found = []
    name = measured.settings.get("model_id")
    if scenario.model is not None and isinstance(name, str):
        own = hardware.model(scenario.model, scenario.directory).name
        try:
            known = catalogued(name)[0]
        except BadInput:
            known = name
        if own not in (known, name.rpartition("/")[2]):
            found.append(f"model: the result is of {name}, the scenario of {own}")
    asked = traffic(scenario.workload)
    for key in ("request_rate", "burstiness", "max_concurrency"):
        its, mine = measured.settings.get(key), asked[key]
        if key in measured.settings and _number(its) != _number(mine):
            found.append(f"{key}: {its} in the result, {mine} in the scenario; the result's requests are served")
    return found


def _number(value: object) -> float | None:
    """A setting as a finite number; the tool writes "inf" and null for none."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    return float(value) if fine else None  # type: ignore[arg-type]


def _page(show: ModuleType, report: Report, told: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in ("forecast", "measured", "error", "n"):
        table.add_column(heading, justify="right")
    for row in told["metrics"]:
        metric, _, percentile = row["metric"].rpartition("_")
        n, other = row["n_forecast"], row["n_measured"]
        count = f"{n:,}" if n == other else f"{n:,} / {other:,}"
        values = (show.seconds(row["forecast_s"]), show.seconds(row["measured_s"]), _signed(row["error"]), count)
        table.add_row(f"{METRICS[metric]} {percentile.upper()}", *values)
    for row, label in zip(told["throughput"], ("requests/s", "output tokens/s"), strict=True):
        table.add_row(label, show.number(row["forecast"]), show.number(row["measured"]), _signed(row["error"]), "")
    served = f"{told['requests']:,} requests of {told['result']}, {told['replayed']}"
    failed = [f"{told['failed']:,} requests failed there and are left out"] if told["failed"] else []
    notes = [*told["differences"], *failed, *told["notes"], told["times_from"]]
    return Group(
        Text(told["name"], style="bold"),
        Text(show.deployed(report.plan), style="dim"),
        Text(served, style="dim"),
        "",
        table,
        "",
        *(Text(f"· {note}", style="dim") for note in notes),
    )


def _signed(error: float | None) -> str:
    return "–" if error is None else f"{error:+.1%}"
