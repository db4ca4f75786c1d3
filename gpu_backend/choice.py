"""Which attention is fastest for a batch: found by running them, not by what is said of them.

Whether the decodes of a mixed batch are better off with kernels of their own is disputed among FlashInfer's
maintainers, and depends on the device and the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from gpu_backend.attention import Attention
from gpu_backend.layout import Layout

REPEATS = 5
Shape = tuple[int, int, int, int]
Seconds = Callable[[Attention, Layout], float]


def shape_of(layout: Layout) -> Shape:
    """What batches that cost alike have in common: powers of two of decodes, their KV, chunk tokens and their KV."""
    chunks = layout.chunks
    sizes = (
        layout.decodes,
        sum(layout.decode_lengths),
        sum(chunk.tokens for chunk in chunks),
        sum(chunk.start + chunk.tokens for chunk in chunks),
    )
    decodes, context, tokens, reached = (size.bit_length() for size in sizes)
    return decodes, context, tokens, reached


class Measured:
    """An attention that is, for each shape of batch, the fastest of `variants`; `seconds` measures one for a batch.

    The first batch of a shape waits for that: plan such batches before what is to be timed.
    """

    def __init__(self, variants: Mapping[str, Attention], seconds: Seconds) -> None:
        self.variants = variants
        self.seconds = seconds
        self.chosen: dict[Shape, str] = {}
        self.current = next(iter(variants.values()))

    def choose(self, layout: Layout) -> str:
        """The name of the variant for a batch."""
        shape = shape_of(layout)
        if shape not in self.chosen:
            cost = {name: self.seconds(variant, layout) for name, variant in self.variants.items()}
            self.chosen[shape] = min(cost, key=cost.__getitem__)
        return self.chosen[shape]

    def plan(self, layout: Layout) -> None:
        """Plan the batch with the variant for it."""
        self.current = self.variants[self.choose(layout)]
        self.current.plan(layout)

    def run(self, cache: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `gpu_backend.attention.Attention.run`."""
        return self.current.run(cache, query, key, value)


def timed(cache: torch.Tensor, heads: int, layers: int) -> Seconds:
    """Measures a plan and `layers` runs in one layer's `cache`: wall time, the median of a few.

    Random keys and values go where the batch's own will go right afterwards, so that nothing of value is lost.
    """

    def seconds(attention: Attention, layout: Layout) -> float:
        kv_heads, head_dim, rows = cache.shape[2], cache.shape[4], len(layout.write_pages)
        query = torch.randn(rows, heads, head_dim).to(cache)
        key, value = torch.randn(2, rows, kv_heads, head_dim).to(cache)
        took = []
        for _ in range(REPEATS + 1):  # the first one may have to load kernels
            start = time.perf_counter()
            attention.plan(layout)
            for _ in range(layers):
                attention.run(cache, query, key, value)
            if cache.device.type == "cuda":
                torch.cuda.synchronize(cache.device)
            took.append(time.perf_counter() - start)
        return median(took[1:])

    return seconds
