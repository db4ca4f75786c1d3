"""What to measure: batches that together tell every term of a latency profile apart.

Decode batches vary size and context independently, prefills tokens and prior context, mixed batches say whether the
two add up, and batches of several chunks what a chunk costs beside its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.decodes import Decodes
from sim.request import Batch, Request

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 129, 160, 192, 256)
FARTHER = (257, 384, 512, 513, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
CONTEXTS = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 2 / 3)  # of the longest a request may be; spread to half as much again
ENDLESS = 1 << 40  # output tokens of a request that only stands for its context


@dataclass(frozen=True, slots=True)
class Limits:
    """How far to measure: tokens of a batch, its requests, tokens of a request, and tokens that the KV cache holds."""

    batch_tokens: int
    sequences: int
    model_tokens: int
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class Point:
    """A batch to be measured: decodes with so many KV tokens on average, and chunks (m0, m).

    Chunks complete their prompts, and so give a token, unless the point is `unfinished`.
    """

    decodes: int = 0
    context: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    unfinished: bool = False

    @property
    def cache_tokens(self) -> int:
        """KV tokens that it needs at most: contexts spread to one and a half times their mean."""
        return int(self.decodes * self.context * 1.5) + sum(sum(chunk) + self.unfinished for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        return self.decodes + sum(tokens for _, tokens in self.chunks)


def grid(limits: Limits) -> list[Point]:
    """The points within the limits, each once."""
    sizes = [size for size in (*SIZES, *FARTHER) if size <= limits.batch_tokens]
    contexts = sorted({max(2, int(share * limits.model_tokens)) for share in CONTEXTS})
    starts = [0, *(limits.model_tokens // part for part in (4, 2))]
    points = [Point(chunks=((start, size),)) for size in sizes for start in (starts if size <= 256 else starts[:2])]
    batches = sorted({*SIZES, limits.sequences} & set(range(1, limits.sequences + 1)))
    room = {size: max(2, limits.cache_tokens * 2 // (3 * size)) for size in batches}  # KV tokens each fill the cache
    points += [Point(size, min(context, most)) for size, most in room.items() for context in contexts]
    for size in sorted({1, 4, 16, limits.sequences // 2, limits.sequences - 1} & set(range(1, limits.sequences))):
        context = min(contexts[len(contexts) // 2], max(2, limits.cache_tokens // (3 * size)))
        for tokens in (1, 16, 64, 128, 256, limits.batch_tokens - size):
            points += [Point(size, context, ((start, tokens),)) for start in starts[:2]]
    for tokens in (16, 64, 128, 256, limits.batch_tokens):
        points += [Point(chunks=((start, tokens),), unfinished=True) for start in starts]
        points.append(Point(4, contexts[1], ((0, tokens - 4),), unfinished=True))
    for count in (2, 4, 8):
        points += [Point(chunks=((0, tokens),) * count) for tokens in (8, 32, 128)]
        points.append(Point(4, contexts[1], ((0, 16),) * count))
    return [point for point in dict.fromkeys(points) if _fits(point, limits)]


def batch(point: Point, block_tokens: int, rng: np.random.Generator) -> tuple[Batch, list[tuple[Request, int]]]:
    """The point as a batch, and its requests with the KV tokens that each must seem to have.

    Contexts are spread evenly from half to one and a half times their mean.
    """
    made, stand_ins = Batch(), []
    group = Decodes(block_tokens)
    spread = np.maximum(2, np.rint(point.context * rng.uniform(0.5, 1.5, point.decodes))).astype(int)
    for id, context in enumerate(spread.tolist()):
        request = Request(id, 0.0, context - 1, ENDLESS)
        request.emitted, request.last_token = 1, 0.0
        group.join(request)
        stand_ins.append((request, context))
    if point.decodes:
        made.group, made.decodes, made.context = group, group.count, group.context
    for id, (start, tokens) in enumerate(point.chunks, start=point.decodes):
        request = Request(id, 0.0, start + tokens + point.unfinished, ENDLESS)
        request.computed = start
        made.add(request, tokens)
        stand_ins.append((request, request.prompt))
    return made, stand_ins


def _fits(point: Point, limits: Limits) -> bool:
    longest = max((start + tokens + point.unfinished for start, tokens in point.chunks), default=0)
    return (
        0 < point.tokens <= limits.batch_tokens
        and all(tokens > 0 for _, tokens in point.chunks)
        and point.decodes + len(point.chunks) <= limits.sequences
        and max(longest, int(point.context * 1.5)) <= limits.model_tokens
        and point.cache_tokens <= limits.cache_tokens
    )
