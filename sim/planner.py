"""Decisions that follow from simulation: the token budget that holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sim.budget import (
    CHUNKED,
    QUANTILE,
    Assumed,
    Budget,
    assume,
    invert,
    iteration_seconds,
    limit_of,
    prefill_seconds,
    smallest,
    to_dict,
)
from sim.errors import BadInput
from sim.scenario import Scenario
from sim.simulate import plan, simulate, workload

Progress = Callable[[int, int], None]
CHECKS = 12  # simulations at most, to find a budget that holds


def budget(
    scenario: Scenario,
    *,
    decodes: int | None = None,
    context: int | None = None,
    prior: int | None = None,
    quantile: float = QUANTILE,
    check: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The token budget that the scenario's TBT limit allows and what it costs in prefill time, ready for JSON.

    What an iteration holds is assumed from the workload at `quantile`, unless `decodes`, `context` (KV tokens of each)
    or `prior` (tokens before the chunk) say otherwise. With `check` the budget is simulated, and made smaller, in whole
    tiles, until the limit holds; `token_budget` is None where none does. BadInput without a limit on TBT, or under a
    policy without chunks.
    """
    if scenario.scheduler.policy not in CHUNKED:
        what = f"{scenario.scheduler.policy!r} has no token budget; use {' or '.join(CHUNKED)}"
        raise scenario.blame(BadInput(what, key="[scheduler] policy"))
    if decodes is not None and decodes > scenario.engine.max_sequences:
        what = f"{decodes} must be at most engine.max_sequences = {scenario.engine.max_sequences}"
        raise BadInput(what, source="--decodes")
    key, limit = limit_of(scenario)
    requests = workload(scenario)
    told = assume(scenario, requests, limit, quantile)
    told = Assumed(
        told.decodes if decodes is None else decodes,
        told.context_tokens_per_decode if context is None else context,
        told.prior_context_tokens if prior is None else prior,
    )
    executor = plan(scenario.with_(scheduler__token_budget=scenario.engine.max_model_tokens)).executor()
    found = invert(scenario, executor, limit, told)
    notes, checked = list(found.notes), None
    if check:
        found, checked = _checked(scenario, key, found, progress)
        if checked and not checked["met"]:
            notes.append(
                f"no budget holds {key} = {limit:g} s in simulation: the nearest reaches {checked['tbt_s']:.3g} s"
            )
    prompt = int(np.median(requests.prompts))
    result = to_dict(found) | {"prefill_overhead": None}
    if found.tokens is not None:
        chunk = max(1, found.tokens - told.decodes)
        result["tbt_s"] = iteration_seconds(executor, told, chunk)
        whole = prefill_seconds(executor, prompt, prompt)
        result["prefill_overhead"] = prefill_seconds(executor, prompt, chunk) / whole - 1
    return result | {
        "slo_key": key,
        "quantile": quantile,
        "prefill_overhead_of_prompt_tokens": prompt,
        "checked": checked,
        "notes": notes,
    }


def _checked(scenario: Scenario, key: str, found: Budget, progress: Progress | None) -> tuple[Budget, dict[str, Any]]:
    """The largest budget up to the one found that holds in simulation, and what it came to there."""
    tile, least = found.tile, smallest(scenario, found.assumed.decodes)
    done = 0

    def run(tokens: int) -> dict[str, Any]:
        nonlocal done
        done += 1
        if progress:
            progress(done, CHECKS)
        summary = simulate(scenario.with_(scheduler__token_budget=tokens), keep_steps=False).summary
        seconds = summary["tbt_s"]["max" if key == "tbt_max" else key.removeprefix("tbt_")]
        met = seconds is not None and seconds <= found.limit
        return {"token_budget": tokens, "tbt_s": seconds, "met": met, "ttft_p50_s": summary["ttft_s"]["p50"]}

    if found.tokens is None:
        return found, run(least)
    best = run(found.tokens)
    if best["met"]:
        return found, best
    low, high = least, found.tokens  # in whole tiles between them
    best = run(low) if low < high else best
    if not best["met"]:
        return replace(found, tokens=None), best
    while high - low > tile and done < CHECKS:
        middle = (low + high) // 2 // tile * tile
        if middle <= low:
            break
        tried = run(middle)
        low, high = (middle, high) if tried["met"] else (low, middle)
        best = tried if tried["met"] else best
    return replace(found, tokens=low), best
