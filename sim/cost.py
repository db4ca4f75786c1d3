"""What tokens cost at the rate that a deployment holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from sim.capacity import UNSCALED, Capacity, Search, capacity, check, scaled, search
from sim.errors import BadInput
from sim.parallel import each
from sim.scenario import Scenario
from sim.simulate import plan, workload
from sim.workload import Workload, mean_rate

SECONDS_PER_HOUR = 3600
MILLION = 1e6
LOADS = (0.5, 0.7, 0.85, 1.0)  # shares of capacity that a deployment may be run at
SLO_SCALES = (0.5, 2.0)  # a stricter and a more relaxed SLO
LENGTH_SCALES = (0.8, 1.25)  # shorter and longer prompts, or outputs
HEADROOM = 0.8  # share of capacity that one plans to use
SPARE = 1  # replicas beside those that carry the load


def per_million(gpu_hour: float, devices: int, rate: float, tokens: float) -> float | None:
    """gpu_hour × devices / 3600 / (rate × tokens per request) × 10⁶; None where nothing is served."""
    return gpu_hour * devices / SECONDS_PER_HOUR / (rate * tokens) * MILLION if rate > 0 else None


def cost(
    scenario: Scenario,
    *,
    tolerance: float = 0.01,
    seeds: int = 5,
    headroom: float = HEADROOM,
    spare: int = SPARE,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Cost of tokens at SLO capacity, ready for JSON; at the scenario's own rate where it has no [slo].

    `planned` is the same at `headroom` of that capacity, with `spare` replicas beside those that carry it.
    `sensitivity` has the cost at part of the capacity, at a price 10 % lower and higher, at half and twice the latency
    limits of the SLO, and with prompts and outputs shorter and longer (their own searches, one seed each).
    """
    devices = plan(scenario).devices
    price = scenario.cost.gpu_hour
    requests = workload(scenario)
    output, prompt = float(requests.outputs.mean()), float(requests.prompts.mean())
    limited = bool(scenario.slo.percentiles) or scenario.slo.attainment is not None
    others = [*_by_slo(scenario), *_by_lengths(scenario)] if limited else []
    total = seeds + len(others)

    def advance(done: int, _: int = 0) -> None:
        if progress:
            progress(done, total)

    held = _capacity(scenario, tolerance, seeds, workers, advance) if limited else None
    rate = held.rate if held else _own_rate(scenario)
    interval = held.interval if held else None
    near = held.rate or None if held and held.limited_by else None
    found: dict[int, Search] = {}
    for place, one in each(partial(_search, tolerance, near), others, workers=workers):
        found[place] = one
        advance(seeds + len(found))
    varied = _variations(scenario, requests, held, [(other, found[place]) for place, other in enumerate(others)])
    return {
        "name": scenario.name,
        "policy": scenario.scheduler.policy,
        "per_million_output_tokens": per_million(price, devices, rate, output),
        "per_million_input_tokens": per_million(price, devices, rate, prompt),
        "per_million_tokens": per_million(price, devices, rate, prompt + output),
        "interval_per_million_output_tokens": interval
        and [per_million(price, devices, bound, output) for bound in reversed(interval)],
        "rate": rate,
        "rate_from": "capacity" if held else "scenario",
        "rate_interval": interval,
        "limited_by": held.limited_by if held else None,
        "devices": devices,
        "gpu_hour": price,
        "mean_output_tokens": output,
        "mean_prompt_tokens": prompt,
        "planned": _planned(scenario, rate, (prompt, output), headroom if held else None, spare),
        "sensitivity": _sensitivity(price, devices, rate, output) | varied,
        "notes": list(held.notes) if held else [],
    }


def _sensitivity(price: float, devices: int, rate: float, output: float) -> dict[str, dict[str, Any]]:
    """Cost at part of the load, and at other prices."""
    return {
        "load": {str(load): per_million(price, devices, rate * load, output) for load in LOADS},
        "gpu_hour": {str(f): per_million(price * f, devices, rate, output) for f in (0.9, 1.1)},
    }


def _variations(
    scenario: Scenario, requests: Workload, held: Capacity | None, searched: list[tuple[_Other, Search]]
) -> dict[str, dict[str, Any]]:
    """What the searches of other SLOs and lengths came to, by what was scaled and how far."""
    varied: dict[str, dict[str, Any]] = {"slo": {}, "prompt": {}, "output": {}}
    if held:
        varied["slo"]["1.0"] = {"rate": held.rate, "limited_by": held.limited_by}
    for other, found in searched:
        varied[other.what][other.scale] = _varied(scenario, requests, other, found)
    return varied


def _varied(scenario: Scenario, requests: Workload, other: _Other, found: Search) -> dict[str, Any]:
    """Rate and cost with the SLO or the lengths scaled."""
    price, devices = scenario.cost.gpu_hour, plan(scenario).devices
    tokens = float(scaled(requests, other.lengths, scenario.engine.max_model_tokens).outputs.mean())
    return {
        "rate": found.rate,
        "per_million_output_tokens": per_million(price, devices, found.rate, tokens),
        "limited_by": found.limited_by,
    }


def _planned(
    scenario: Scenario, rate: float, lengths: tuple[float, float], headroom: float | None, spare: int
) -> dict[str, Any]:
    """Cost at the share of capacity that one plans to use, and with replicas to spare. A rate that is given is the load
    already, so it has no headroom."""
    parallel, price, (prompt, output) = scenario.deployment, scenario.cost.gpu_hour, lengths
    devices = parallel.tensor_parallel * parallel.pipeline_parallel * (parallel.replicas + spare)
    used = rate * headroom if headroom is not None else rate
    return {
        "headroom": headroom,
        "spare": spare,
        "rate": used,
        "devices": devices,
        "per_million_output_tokens": per_million(price, devices, used, output),
        "per_million_input_tokens": per_million(price, devices, used, prompt),
        "per_million_tokens": per_million(price, devices, used, prompt + output),
    }


def _capacity(
    scenario: Scenario, tolerance: float, seeds: int, workers: int, progress: Callable[[int, int], None]
) -> Capacity:
    check(scenario)
    (held,) = capacity(
        scenario, [scenario.scheduler.policy], tolerance=tolerance, seeds=seeds, workers=workers, progress=progress
    )
    return held


@dataclass(frozen=True, slots=True)
class _Other:
    """One search of the sensitivity."""

    what: str
    scale: str
    scenario: Scenario
    lengths: tuple[float, float] = UNSCALED


def _search(tolerance: float, near: float | None, other: _Other) -> Search:
    return search(other.scenario, tolerance=tolerance, near=near, lengths=other.lengths)


def _by_slo(scenario: Scenario) -> Iterator[_Other]:
    """The latency limits scaled."""
    own = scenario.for_policy(scenario.scheduler.policy)
    for scale in SLO_SCALES:
        limits = {k: v if k in ("attainment", "first_token_gap") else v * scale for k, v in scenario.slo.root.items()}
        yield _Other("slo", str(scale), own.with_(slo=limits))


def _by_lengths(scenario: Scenario) -> Iterator[_Other]:
    """Prompts, then outputs, shorter and longer; cut at what a request may hold."""
    own = scenario.for_policy(scenario.scheduler.policy)
    for scale in LENGTH_SCALES:
        yield _Other("prompt", str(scale), own, (scale, 1.0))
    for scale in LENGTH_SCALES:
        yield _Other("output", str(scale), own, (1.0, scale))


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
