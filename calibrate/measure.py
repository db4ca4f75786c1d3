"""Measuring an executor on a grid of batches: in rounds, each in another order, so that drift is not taken for cost.

A round's rows are appended to a file of its own as they come; a measurement that was interrupted goes on from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np

from calibrate.grid import Limits, Point, batch
from calibrate.rows import Row, row
from sim.errors import BadInput
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
    if not points:
        raise BadInput("no batch fits into the KV blocks", key="[engine] num_blocks")
    rows = _resume(kept, points, seed)
    start, warm = time.monotonic(), False
    finished, total = len(rows) // len(points), len(points)
    while finished < FEWEST_ROUNDS or time.monotonic() - start < seconds:
        rng = np.random.default_rng((seed, finished))
        order = rng.permutation(total)  # drawn first: a measurement that goes on draws the same
        for point in [] if warm else points:  # caches, allocators and kernels warm up on every shape
            _once(executor, point, block_tokens, np.random.default_rng(seed))
        warm, clock = True, clock_mhz()
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
    sequences = max(1, min(limits.max_sequences, limits.num_blocks // 2))  # the last block of each may be almost empty
    return Limits(longest, sequences, limits.max_model_tokens, limits.num_blocks * limits.block_tokens // 2)


def _once(executor: Measurable, point: Point, block_tokens: int, rng: np.random.Generator) -> Row:
    """Measure one point: its requests seem to be there, the batch runs, and all is forgotten."""
    made, stand_ins = batch(point, block_tokens, rng)
    made.blocks_used = 1 << 62  # no scheduler counts here
    for request, tokens in stand_ins:
        executor.pretend(request, tokens)
    step = executor.execute(made)
    executor.forget()
    return row(made) | {"seconds": sum(step.seconds), "host": step.host}


def _resume(kept: Path | None, points: Sequence[Point], seed: int) -> list[Row]:
    """The rows that an interrupted measurement left. BadInput where they are of other points."""
    if kept is None or not kept.is_file():
        return []
    try:
        whole = kept.read_bytes().rpartition(b"\n")[0]  # the last line may have been cut off
        rows: list[Row] = [json.loads(line) for line in whole.splitlines()]
        same = all(_is_of(one, points[index]) for one, index in zip(rows, _orders(len(points), seed), strict=False))
    except (ValueError, TypeError, KeyError):
        same = False
    if not same:
        raise BadInput("left by another measurement; --fresh forgets it", source=str(kept))
    with kept.open("r+b") as file:
        file.truncate(len(whole) + 1 if rows else 0)
    return rows


def _orders(total: int, seed: int) -> Iterator[int]:
    """The points of all rounds, in the order they are measured."""
    for number in count():
        yield from np.random.default_rng((seed, number)).permutation(total).tolist()


def _is_of(one: Row, point: Point) -> bool:
    """Whether a row was measured at a point."""
    ends = sum(start + tokens for start, tokens in point.chunks)
    found = (one["decodes"], one["chunks"], one["decodes"] + one["prefill_tokens"], one["prefill_context"])
    return found == (point.decodes, len(point.chunks), point.tokens, ends)


def _append(kept: Path | None, one: Row) -> None:
    if kept is not None:
        try:
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(one) + "\n")
        except OSError as error:
            raise BadInput((error.strerror or str(error)).lower(), source=str(kept)) from None


def interleaved(executor: Measurable, points: Sequence[Point], block_tokens: int, seed: int = 0) -> Iterator[Row]:
    """Measured rows without end, point after point in random orders: for calibration beside another run."""
    rng = np.random.default_rng(seed)
    while True:
        for index in rng.permutation(len(points)).tolist():
            yield _once(executor, points[index], block_tokens, rng)
