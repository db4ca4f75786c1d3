"""What tokens cost at the rate that a deployment holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.capacity import Capacity, capacity, check
from sim.errors import BadInput
from sim.scenario import Scenario
from sim.simulate import plan, workload
from sim.workload import mean_rate

SECONDS_PER_HOUR = 3600
MILLION = 1e6
LOADS = (0.5, 0.7, 0.85, 1.0)  # shares of capacity that a deployment may be run at
SLO_SCALES = (0.5, 2.0)  # a stricter and a more relaxed SLO


def per_million(gpu_hour: float, devices: int, rate: float, tokens: float) -> float | None:
    """gpu_hour × devices / 3600 / (rate × tokens per request) × 10⁶; None where nothing is served."""
    return gpu_hour * devices / SECONDS_PER_HOUR / (rate * tokens) * MILLION if rate > 0 else None


def cost(
    scenario: Scenario,
    *,
    tolerance: float = 0.01,
    seeds: int = 5,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Cost of tokens at SLO capacity, ready for JSON; at the scenario's own rate where it has no [slo].

    `sensitivity` has the cost at part of the capacity, at a price 10 % lower and higher, and at half and twice the
    latency limits of the SLO (its own searches, one seed each).
    """
    devices = plan(scenario).devices
    price = scenario.cost.gpu_hour
    requests = workload(scenario)
    output = float(requests.outputs.mean())
    total = float(requests.prompts.mean()) + output
    limited = bool(scenario.slo.percentiles) or scenario.slo.attainment is not None
    held = _capacity(scenario, tolerance, seeds, workers, progress) if limited else None
    rate = held.rate if held else _own_rate(scenario)
    interval = held.interval if held else None
    return {
        "name": scenario.name,
        "policy": scenario.scheduler.policy,
        "per_million_output_tokens": per_million(price, devices, rate, output),
        "per_million_tokens": per_million(price, devices, rate, total),
        "interval_per_million_output_tokens": interval
        and [per_million(price, devices, each, output) for each in reversed(interval)],
        "rate": rate,
        "rate_from": "capacity" if held else "scenario",
        "rate_interval": interval,
        "limited_by": held.limited_by if held else None,
        "devices": devices,
        "gpu_hour": price,
        "mean_output_tokens": output,
        "mean_prompt_tokens": total - output,
        "sensitivity": {
            "load": {str(load): per_million(price, devices, rate * load, output) for load in LOADS},
            "gpu_hour": {str(f): per_million(price * f, devices, rate, output) for f in (0.9, 1.1)},
            "slo": _by_slo(scenario, tolerance, workers, held, (price, devices, output)) if held else {},
        },
        "notes": list(held.notes) if held else [],
    }


def _capacity(
    scenario: Scenario, tolerance: float, seeds: int, workers: int, progress: Callable[[int, int], None] | None = None
) -> Capacity:
    check(scenario)
    (held,) = capacity(
        scenario, [scenario.scheduler.policy], tolerance=tolerance, seeds=seeds, workers=workers, progress=progress
    )
    return held


def _by_slo(
    scenario: Scenario, tolerance: float, workers: int, held: Capacity, terms: tuple[float, int, float]
) -> dict[str, Any]:
    """Rate and cost with the latency limits scaled."""
    price, devices, output = terms
    rows = {}
    for scale in SLO_SCALES:
        limits = {k: v if k in ("attainment", "first_token_gap") else v * scale for k, v in scenario.slo.root.items()}
        other = _capacity(scenario.with_(slo=limits), tolerance, 1, workers)
        rows[str(scale)] = {
            "rate": other.rate,
            "per_million_output_tokens": per_million(price, devices, other.rate, output),
            "limited_by": other.limited_by,
        }
    return {"1.0": {"rate": held.rate, "limited_by": held.limited_by}, **rows}


def _own_rate(scenario: Scenario) -> float:
    """The rate that the scenario's requests arrive at."""
    arrivals = scenario.workload.arrivals
    rate = getattr(arrivals, "rate", None)
    times = workload(scenario).arrivals
    if rate is None and times is not None:
        rate = mean_rate(times)
    if rate is None:
        raise scenario.blame(BadInput("cost needs a limit to find the capacity, or arrivals with a rate", key="[slo]"))
    return float(rate)
