"""CUDA graphs of decode batches: one launch instead of a few hundred, where launching would take longer than the work.

A graph replays the same kernels on the same addresses. So there is one for each of a few batch sizes, which reads its
tokens, positions and places from buffers that stay, and a smaller batch is filled up with rows that stand for nothing:
they write to a spare page and attend to that. FlashInfer's plan is made before each replay, outside of the graph
(https://docs.flashinfer.ai: "plan could not be captured", and with its graph wrapper the launch depends on the batch
size alone).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu_backend import paging
from gpu_backend.flashinfer_attention import KV_LAYOUT, FlashInferAttention, plan_decode, write
from gpu_backend.layout import Layout, lay_out
from gpu_backend.model import Decoder
from gpu_backend.staging import Staging

SIZES = (1, 2, 4, *range(8, 257, 8))  # rows of the graphs
WARM_UP_RUNS = 2  # before capture: loads kernels, and lets cuBLAS take its workspace


def size_for(decodes: int) -> int | None:
    """The rows of the smallest graph that holds so many decodes; None where none does."""
    index = bisect_left(SIZES, decodes)
    return SIZES[index] if decodes > 0 and index < len(SIZES) else None


def capture(step: Callable[[], torch.Tensor], pool: Any) -> Callable[[], torch.Tensor]:
    """A graph of `step`; what is returned replays it and answers its answer, always in the same place."""
    for _ in range(WARM_UP_RUNS):
        step()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        chosen = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return chosen

    return replay


class DecodeGraphs:
    """Graphs of `decoder`, captured when they are first needed. `spare` is a page that no request ever gets."""

    def __init__(self, decoder: Decoder, attention: FlashInferAttention, spare: int) -> None:
        self.decoder = decoder
        self.attention = attention
        self.spare = spare
        device = attention.workspace.device
        self.inputs = Staging(device, 4 * SIZES[-1], fixed=True)  # tokens, positions, pages, offsets
        self.indices = torch.zeros(spare + SIZES[-1], dtype=torch.int32, device=device)
        self.rows = torch.arange(SIZES[-1], device=device)
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.graphs: dict[int, tuple[PaddedDecodes, Callable[[], torch.Tensor]]] = {}

    def prepare(self, decodes: int) -> None:
        """Capture the graph for so many decodes, if there is one to capture. Takes a fraction of a second."""
        size = size_for(decodes)
        if size is None or size in self.graphs:
            return
        blank = lay_out([(1, [self.spare])], [], self.attention.shape.page_tokens, torch.device("cpu"))
        tokens, positions, *places = self._load(size, [0], [0], blank)
        attention = PaddedDecodes(self.attention, size, self.spare, self.indices, *places)
        attention.plan(blank)

        def step() -> torch.Tensor:
            return self.decoder.forward(tokens, positions, self.rows[:size], attention).argmax(dim=-1)

        self.graphs[size] = attention, capture(step, self.pool)

    def ready(
        self, tokens: Sequence[int], positions: Sequence[int], layout: Layout
    ) -> Callable[[], torch.Tensor] | None:
        """What computes the next token of every decode of a planned batch; None where there is no graph for it.

        The answer of the call is valid until the next call.
        """
        size = None if layout.chunks else size_for(layout.decodes)
        if size is None or size not in self.graphs:
            return None
        attention, replay = self.graphs[size]
        self._load(size, tokens, positions, layout)
        attention.plan(layout)
        return lambda: replay()[: layout.decodes]

    def _load(self, size: int, tokens: Sequence[int], positions: Sequence[int], layout: Layout) -> list[torch.Tensor]:
        """Fill the buffers, each `size` long: tokens, positions, pages and offsets."""
        more = size - len(tokens)
        pages, offsets = layout.write_pages.tolist(), layout.write_offsets.tolist()
        blank = [0] * more
        return self.inputs.load(
            [*tokens, *blank], [*positions, *blank], pages + [self.spare] * more, [*offsets, *blank]
        )


class PaddedDecodes:
    """The attention of one graph: `size` rows, of which the batch's decodes are the first."""

    def __init__(
        self,
        eager: FlashInferAttention,
        size: int,
        spare: int,
        indices: torch.Tensor,
        pages: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        self.eager = eager
        self.size = size
        self.spare = spare
        self.pages = pages
        self.offsets = offsets
        device = eager.workspace.device
        self.wrapper = eager.flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            eager.workspace,
            indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=device),
            indices_buffer=indices,
            last_page_len_buffer=torch.ones(size, dtype=torch.int32, device=device),
            kv_layout=KV_LAYOUT,
            use_tensor_cores=eager.shape.tensor_cores,
        )

    def plan(self, layout: Layout) -> None:
        """Plan the decodes of a batch, and the rows that fill it up."""
        decodes = paging.of_decodes(layout, self.eager.shape.page_tokens)
        self.eager.planned.synchronize()
        plan_decode(self.wrapper, self.eager.shape, paging.padded(decodes, self.size, self.spare))
        self.eager.planned.record()

    def run(self, cache: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `gpu_backend.attention.Attention.run`."""
        write(cache, self.pages, self.offsets, key, value)
        answer: torch.Tensor = self.wrapper.run(query, cache)
        return answer
