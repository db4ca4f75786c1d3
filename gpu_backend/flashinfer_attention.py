"""Attention by FlashInfer (Ye et al. 2025, https://docs.flashinfer.ai): the engine's on a GPU.

FlashInfer is imported when an attention is made, so that this module loads where there is none. Its options go by
keyword: their order differs between 0.6 and 0.7, their names do not.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gpu_backend import paging
from gpu_backend.layout import Layout
from gpu_backend.paging import Paged
from gpu_backend.staging import event
from sim.errors import BadInput

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
KV_LAYOUT = "HND"  # [pages, 2, kv_heads, page_tokens, head_dim]: `gpu_backend.cache.storage`
WORKSPACE_BYTES = 384 << 20  # partial answers of split contexts; 128 MB, as documented, are too few for 64 heads
TENSOR_CORES_FROM = 4  # query heads per KV head (documentation of `use_tensor_cores`: large groups)
NO_ROTATION, NO_FP16_SUMS, NO_MASK = 0, False, False
Mixed = Literal["split", "prefill"]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a kernel is made for."""

    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype

    @property
    def tensor_cores(self) -> bool:
        """Whether decodes use the kernels with tensor cores."""
        return self.heads // self.kv_heads >= TENSOR_CORES_FROM

    @property
    def lacking(self) -> str | None:
        """Why FlashInfer cannot run it, if so."""
        if self.dtype not in DTYPES:
            return f"FlashInfer runs float16 and bfloat16, not {str(self.dtype).removeprefix('torch.')}"
        if self.head_dim not in HEAD_DIMS:
            return f"FlashInfer runs heads of {', '.join(map(str, HEAD_DIMS))}, not of {self.head_dim}"
        return None


class FlashInferAttention:
    """Plans a batch with FlashInfer's wrappers, once, and runs them for every layer.

    With `mixed` "split" the decodes of a batch go through the decode wrapper and its chunks through the prefill
    wrapper; with "prefill" all go through the latter, a decode as a chunk of one row: one launch instead of two.
    `backend` is the prefill wrapper's, "fa2" or "fa3"; "auto" is FlashInfer's choice for the device. BadInput without
    CUDA, FlashInfer or a fitting shape.
    """

    def __init__(
        self, shape: HeadShape, device: torch.device, *, mixed: Mixed = "split", backend: str = "auto"
    ) -> None:
        self.flashinfer = load()
        if shape.lacking:
            raise BadInput(shape.lacking, key="[torch] attention")
        self.shape = shape
        self.mixed = mixed
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if backend == "auto":
            backend = prefill_backend(self.flashinfer, shape, device)
        self.decode = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, kv_layout=KV_LAYOUT, use_tensor_cores=shape.tensor_cores
        )
        self.prefill = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, kv_layout=KV_LAYOUT, backend=backend
        )
        self.planned = event()
        self.layout: Layout
        self.parts: list[tuple[Any, slice]] = []  # wrappers, and the rows of the batch that each attends for

    def plan(self, layout: Layout) -> None:
        """Plan every part of a batch."""
        self.layout = layout
        page_tokens, first = self.shape.page_tokens, layout.decodes
        self.planned.synchronize()
        self.parts = []
        if self.mixed == "prefill":
            plan_prefill(self.prefill, self.shape, paging.of_all(layout, page_tokens))
            self.parts.append((self.prefill, slice(None)))
        else:
            if layout.decodes:
                plan_decode(self.decode, self.shape, paging.of_decodes(layout, page_tokens))
                self.parts.append((self.decode, slice(first)))
            if layout.chunks:
                plan_prefill(self.prefill, self.shape, paging.of_chunks(layout, page_tokens))
                self.parts.append((self.prefill, slice(first, None)))
        self.planned.record()

    def run(self, cache: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `gpu_backend.attention.Attention.run`."""
        write(cache, self.layout.write_pages, self.layout.write_offsets, key, value)
        answer = torch.empty_like(query, memory_format=torch.contiguous_format)
        for wrapper, rows in self.parts:
            wrapper.run(query[rows], cache, out=answer[rows])
        return answer


def load() -> Any:
    """The package flashinfer. BadInput where it, or CUDA, is missing."""
    if not torch.cuda.is_available():
        raise BadInput("FlashInfer needs a CUDA device", key="[torch] attention")
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = f'FlashInfer cannot be loaded ({why}): install servecast[gpu], or set attention to "torch"'
        raise BadInput(what, key="[torch] attention") from None


def prefill_backend(flashinfer: Any, shape: HeadShape, device: torch.device) -> str:
    """FlashAttention 3 on Hopper, 2 elsewhere: settled here, since "auto" of the wrapper may take others since 0.7."""
    choose = flashinfer.utils.determine_attention_backend
    chosen: str = choose(device, NO_ROTATION, NO_FP16_SUMS, NO_MASK, shape.dtype, shape.dtype)
    return chosen


def write(
    cache: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Put rows of keys and values, [rows, kv_heads, head_dim], into their places of `cache`.

    By index, as the reference does: `append_paged_kv_cache` would need a kernel of its own to be compiled, and one more
    set of index arrays. A row that stands for nothing writes to the spare page.
    """
    cache[pages, 0, :, offsets] = key
    cache[pages, 1, :, offsets] = value


def plan_decode(wrapper: Any, shape: HeadShape, paged: Paged) -> None:
    """Plan a decode wrapper (eager or for a graph).

    A plan is written into the wrapper's pinned host buffer and copied from there without waiting. Whoever plans again
    must know that the copy is over (`FlashInferAttention.planned`; the same race was met in mini-sglang, #103).
    """
    wrapper.plan(
        indptr=paged.indptr,
        indices=paged.indices,
        last_page_len=paged.last_page_len,
        num_qo_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.page_tokens,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        sm_scale=shape.head_dim**-0.5,
    )


def plan_prefill(wrapper: Any, shape: HeadShape, paged: Paged) -> None:
    """Plan a prefill wrapper: each row attends to the tokens up to itself (the default is not causal)."""
    wrapper.plan(
        qo_indptr=paged.qo_indptr,
        paged_kv_indptr=paged.indptr,
        paged_kv_indices=paged.indices,
        paged_kv_last_page_len=paged.last_page_len,
        num_qo_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim_qk=shape.head_dim,
        page_size=shape.page_tokens,
        causal=True,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        sm_scale=shape.head_dim**-0.5,
    )
