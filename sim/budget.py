"""The token budget that a TBT limit allows: the latency model, inverted.

An iteration of the budget holds the decodes that the workload keeps running and one chunk. How many decodes there are
follows from Little's law (1961) if every gap takes as long as the limit allows, so it errs on the safe side; contexts
are those of the workload. All three (decodes, context, what a chunk has before it) are taken at a quantile, stated.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.errors import BadInput
from sim.executor import Executor
from sim.matching import resolved
from sim.profile import load
from sim.request import Batch, Request
from sim.roofline import RooflineTable
from sim.scenario import Scenario
from sim.workload import Workload, mean_rate

QUANTILE = 0.9
POSITIONS = 16  # at which a chunk may start in a prompt, evenly
CHUNKED = ("stall-free", "alternating")


@dataclass(frozen=True, slots=True)
class Assumed:
    """What an iteration is assumed to hold beside the chunk, and what the chunk has before it."""

    decodes: int
    context_tokens_per_decode: int
    prior_context_tokens: int


@dataclass(frozen=True, slots=True)
class Budget:
    """A token budget, the decodes included: the largest that meets the limit, and the same in whole tiles; None where
    there is none. `tbt` are the seconds of an iteration of the aligned one."""

    tokens: int | None
    unaligned: int | None
    tbt: float | None
    limit: float
    tile: int
    assumed: Assumed
    notes: tuple[str, ...] = ()


def limit_of(scenario: Scenario) -> tuple[str, float]:
    """The key of [slo] that limits TBT, and its seconds: the strictest. BadInput where there is none."""
    slo = scenario.slo
    limits = {key: value for key, value in slo.percentiles.items() if key.startswith("tbt_")}
    limits |= {key: value for key, value in slo.per_request.items() if key == "tbt_max"}
    if not limits:
        raise scenario.blame(BadInput("a token budget follows from a TBT limit, such as tbt_p99 = 0.1", key="[slo]"))
    key = min(limits, key=lambda one: limits[one])
    return key, limits[key]


def assume(scenario: Scenario, requests: Workload, limit: float, quantile: float = QUANTILE) -> Assumed:
    """What the workload has running at that quantile, if each gap takes `limit` seconds."""
    prompts, outputs = requests.prompts.astype(float), requests.outputs.astype(float)
    beyond = _normal(quantile)
    most = scenario.engine.max_sequences
    rate = _rate(scenario, requests)
    if requests.concurrency is not None:
        decodes = min(most, requests.concurrency)
    elif rate is None:  # all at one instant
        decodes = min(most, len(prompts))
    else:
        mean = rate * float((outputs - 1).mean()) * limit / scenario.deployment.replicas
        decodes = min(most, ceil(mean + beyond * sqrt(mean)))
    contexts = prompts + outputs / 2
    middle = float(np.average(contexts, weights=outputs))
    spread = sqrt(float(np.average((contexts - middle) ** 2, weights=outputs)) / max(1, decodes))
    starts = (prompts[:, None] * (np.arange(POSITIONS) / POSITIONS)[None, :]).ravel()
    return Assumed(
        decodes, round(middle + beyond * spread), round(_quantile(starts, prompts.repeat(POSITIONS), quantile))
    )


def invert(scenario: Scenario, executor: Executor, limit: float, assumed: Assumed) -> Budget:
    """The largest budget whose iteration takes at most `limit` seconds, on all stages together."""
    tile = _tile(scenario)

    def seconds(tokens: int) -> float:
        return iteration_seconds(executor, assumed, tokens - assumed.decodes)

    least, most = assumed.decodes + 1, assumed.decodes + scenario.engine.max_model_tokens
    if seconds(least) > limit:
        alone = iteration_seconds(executor, assumed, 0) if assumed.decodes else 0.0
        what = f"no budget meets {limit:g} s: {assumed.decodes} decodes alone take {alone:.3g} s"
        return Budget(None, None, None, limit, tile, assumed, (what,))
    notes = []
    low, high = least, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= limit else (low, middle)
    if low == most:
        notes.append("whole prompts meet the limit: it does not bound the budget")
    aligned = low // tile * tile
    if aligned < least:
        notes.append(f"less than a tile of {tile} tokens beside the decodes: not aligned")
        aligned = low
    return Budget(aligned, low, seconds(aligned), limit, tile, assumed, tuple(notes))


def smallest(scenario: Scenario, decodes: int) -> int:
    """The smallest budget in whole tiles that has room for a chunk beside so many decodes."""
    tile = _tile(scenario)
    return (decodes // tile + 1) * tile


def prefill_seconds(executor: Executor, prompt: int, chunk: int) -> float:
    """Seconds of a prompt's iterations, alone, in chunks of so many tokens."""
    starts = range(0, prompt, chunk)
    return sum(iteration_seconds(executor, Assumed(0, 0, start), min(chunk, prompt - start)) for start in starts)


def to_dict(found: Budget) -> dict[str, Any]:
    """Under the names of `budget --json`."""
    return {
        "token_budget": found.tokens,
        "token_budget_unaligned": found.unaligned,
        "tbt_s": found.tbt,
        "limit_s": found.limit,
        "tile_tokens": found.tile,
        "assumed": asdict(found.assumed),
    }


def iteration_seconds(executor: Executor, assumed: Assumed, chunk: int) -> float:
    """Seconds of an iteration with what is assumed and a chunk of so many tokens, on all stages together."""
    batch = Batch()
    batch.decodes, batch.context = assumed.decodes, assumed.decodes * assumed.context_tokens_per_decode
    if chunk:
        request = Request(0, 0.0, assumed.prior_context_tokens + chunk, 2)
        request.computed = assumed.prior_context_tokens
        batch.add(request, chunk)
    step = executor.execute(batch)
    return sum(step.seconds) + step.hop * (len(step.seconds) - 1)


def _tile(scenario: Scenario) -> int:
    """Tokens are computed in multiples of so many, as far as the latency model says."""
    latency = resolved(scenario).latency
    if isinstance(latency, RooflineTable):
        return latency.tile
    if latency.kind == "affine":
        return 1
    profile = load(latency.name, scenario.directory)
    return profile.roofline.tile if profile.roofline is not None else profile.tile


def _rate(scenario: Scenario, requests: Workload) -> float | None:
    """Requests per second."""
    rate = getattr(scenario.workload.arrivals, "rate", None)
    if rate is None and requests.arrivals is not None:
        rate = mean_rate(requests.arrivals)
    return None if rate is None else float(rate)


def _quantile(values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], quantile: float) -> float:
    order = np.argsort(values)
    reached = np.searchsorted(np.cumsum(weights[order]), quantile * weights.sum())
    return float(values[order][min(int(reached), len(values) - 1)])


def _normal(quantile: float) -> float:
    """Standard deviations above the mean; of a count or a mean of many, nearly normal."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(quantile)
