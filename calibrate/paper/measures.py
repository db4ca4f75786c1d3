"""What the paper measures, on the simulation's side: single iterations, prefills in chunks, medians of runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sim.capacity import trial
from sim.request import Batch, Request
from sim.roofline import Roofline
from sim.scenario import Scenario
from sim.simulate import plan, simulate, workload


def batch_of(decodes: int = 0, context: int = 0, chunks: Iterable[tuple[int, int]] = ()) -> Batch:
    """A batch of `decodes` at `context` KV tokens each and of chunks (tokens computed before, tokens)."""
    made = Batch()
    made.decodes, made.context = decodes, decodes * context
    for number, (start, tokens) in enumerate(chunks):
        request = Request(number, 0.0, start + tokens, 2)
        request.computed = start
        made.add(request, tokens)
    return made


def iteration(one: Scenario, decodes: int = 0, context: int = 0, chunks: Iterable[tuple[int, int]] = ()) -> float:
    """Seconds from the start of a batch on the first stage to its end on the last."""
    step = plan(one).executor().execute(batch_of(decodes, context, chunks))
    return sum(step.seconds) + step.hop * (len(step.seconds) - 1)


def stage(one: Scenario, decodes: int = 0, context: int = 0, chunks: Iterable[tuple[int, int]] = ()) -> float:
    """Seconds of a batch on the longest stage."""
    return max(plan(one).executor().execute(batch_of(decodes, context, chunks)).seconds)


def prefill(one: Scenario, prompt: int, chunk: int) -> float:
    """Seconds of a prompt's iterations, one after the other, in chunks of so many tokens."""
    return sum(iteration(one, chunks=[(start, min(chunk, prompt - start))]) for start in range(0, prompt, chunk))


def decode(one: Scenario, batch: int) -> float:
    """TBT of decode-only iterations with `batch` requests, which the stages share, at the workload's mean context."""
    requests = workload(one)
    context = float(np.average(requests.prompts + requests.outputs / 2, weights=requests.outputs))
    return iteration(one, decodes=max(1, batch // one.deployment.pipeline_parallel), context=round(context))


def linear(one: Scenario, tokens: int) -> float:
    """Seconds of all linear layers of an iteration."""
    executor = plan(one).executor()
    assert isinstance(executor, Roofline)
    return executor.linear(tokens)


def run(one: Scenario) -> dict[str, Any]:
    """The summary of a run, with when it first decodes and the longest time without a decode after that, in seconds."""
    report = simulate(one)
    ends = report.columns("end_s")[report.columns("decodes") > 0]
    stalls = {"first_decode": float(ends[0]), "longest_stall": float(np.diff(ends).max())} if len(ends) > 1 else {}
    return report.summary | stalls


def step(rate: float) -> float:
    """The artefact's search ends when the bracket is so narrow: 2.5 % of the rate, but rates have two decimals."""
    return max(0.01, 0.025 * rate)


def capacity(one: Scenario, first: float) -> dict[str, Any]:
    """The highest rate that passed in the artefact's binary search, which starts between 0 and twice `first`."""
    requests = workload(one)
    low, high, trials = 0.0, 2 * first, 0
    while high - low > step(low) + 1e-9:
        middle = round((low + high) / 2, 2)
        trials += 1
        if trial(one, middle, requests).met:
            low = middle
        else:
            high = middle
    return {"rate": low, "trials": trials}
