"""Measuring an executor on a grid of batches: in rounds, each in another order, so that drift is not taken for cost.

A round's rows are appended to a file of its own as they come; a measurement that was interrupted goes on from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from calibrate.grid import Limits, Point, batch
from calibrate.rows import Row, row
from sim.executor import Executor
from sim.request import Request
from sim.simulate import Plan

FEWEST_ROUNDS = 3


class Measurable(Executor, Protocol):
    """An executor that can be told to take a request's KV for computed, and to forget all it knows."""

    def pretend(self, request: Request, tokens: int) -> None: ...

    def forget(self) -> None: ...


def measure(
    executor: Measurable,
    points: Sequence[Point],
    block_tokens: int,
    *,
    seconds: float,
    seed: int = 0,
    kept: Path | None = None,
    clock_mhz: Callable[[], float] = lambda: float("nan"),
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Rows of whole rounds over `points`, at least three, until `seconds` have passed.

    `kept` is a file that grows with every row and from which an interrupted measurement goes on; remove it when done.
    """
    rows = _resume(kept)
    start = time.monotonic()
    finished, total = len(rows) // len(points), len(points)
    while finished < FEWEST_ROUNDS or time.monotonic() - start < seconds:
        rng = np.random.default_rng((seed, finished))
        if finished == 0 and not rows:
            for point in points:  # caches, allocators and kernels warm up on every shape
                _once(executor, point, block_tokens, rng)
        order = rng.permutation(total)
        clock = clock_mhz()
        for index in order[len(rows) - finished * total :].tolist():
            one = _once(executor, points[index], block_tokens, rng) | {"round": finished, "clock_mhz": clock}
            rows.append(one)
            _append(kept, one)
            if progress:
                progress(len(rows), max(FEWEST_ROUNDS, finished + 1) * total)
        finished += 1
    return rows


def limits_of(plan: Plan) -> Limits:
    """How far the batches of a scenario can go, under any policy."""
    limits = plan.deployment.limits
    longest = max(limits.max_batch_tokens, limits.token_budget) if limits.max_batch_tokens else limits.max_model_tokens
    return Limits(longest, limits.max_sequences, limits.max_model_tokens, limits.num_blocks * limits.block_tokens // 2)


def _once(executor: Measurable, point: Point, block_tokens: int, rng: np.random.Generator) -> Row:
    """Measure one point: its requests seem to be there, the batch runs, and all is forgotten."""
    made, stand_ins = batch(point, block_tokens, rng)
    made.blocks_used = 1 << 62  # no scheduler counts here
    for request, tokens in stand_ins:
        executor.pretend(request, tokens)
    step = executor.execute(made)
    executor.forget()
    return row(made) | {"seconds": sum(step.seconds), "host": step.host}


def _resume(kept: Path | None) -> list[Row]:
    if kept is None or not kept.is_file():
        return []
    lines = kept.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may have been cut off


def _append(kept: Path | None, one: Row) -> None:
    if kept is not None:
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(one) + "\n")


def interleaved(executor: Measurable, points: Sequence[Point], block_tokens: int, seed: int = 0) -> Iterator[Row]:
    """Measured rows without end, point after point in random orders: for calibration beside another run."""
    rng = np.random.default_rng(seed)
    while True:
        for index in rng.permutation(len(points)).tolist():
            yield _once(executor, points[index], block_tokens, rng)
