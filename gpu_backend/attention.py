"""Attention over a paged KV cache, in plain torch: the reference on any device, and the engine's on the CPU."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_backend.layout import ChunkLayout, Layout


class Attention(Protocol):
    """Plans a batch once, then runs it for every layer."""

    def plan(self, layout: Layout) -> None: ...

    def run(self, cache: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Put `key` and `value`, [rows, kv_heads, head_dim], into one layer's `cache`, and attend.

        `query` is [rows, heads, head_dim], and so is the answer. A row attends to its request's tokens up to itself.
        """
        ...


class TorchAttention:
    """Decodes together, page by page; chunks one by one.

    A decode batch is ragged, and padding it to its longest context would make its cost jump with that one. So each page
    attends for itself (its own softmax, scaled by its own maximum) and the pages of a request are then merged by
    log-sum-exp, as in flash-decoding (Dao et al. 2023). The cost follows the number of pages.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, page_tokens: int) -> None:
        self.heads = heads
        self.kv_heads = kv_heads
        self.group = heads // kv_heads
        self.head_dim = head_dim
        self.page_tokens = page_tokens
        self.scale = head_dim**-0.5
        self.layout: Layout
        self.masks: list[torch.Tensor | None] = []
        self.hidden: torch.Tensor  # [decode pages, 1, 1, page_tokens], true where a page has no token
        self.empty: tuple[torch.Tensor, ...]  # the same places, as (index of the decode page, place)

    def plan(self, layout: Layout) -> None:
        """Remember a batch, and which places of its last pages are empty."""
        self.layout = layout = layout.on(layout.write_pages.device)
        places = torch.arange(self.page_tokens, device=layout.page_room.device)
        empty = places >= layout.page_room[:, None]
        self.hidden = empty[:, None, None, :]
        self.empty = empty.nonzero(as_tuple=True)
        self.masks = [_causal(chunk.tokens, chunk.start, places.device) for chunk in layout.chunks]

    def run(self, cache: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `Attention.run`."""
        layout = self.layout
        cache[layout.write_pages, 0, :, layout.write_offsets] = key
        cache[layout.write_pages, 1, :, layout.write_offsets] = value
        parts = [self._decode(cache, query[: layout.decodes])] if layout.decodes else []
        for chunk, mask in zip(layout.chunks, self.masks, strict=True):
            parts.append(self._chunk(cache, query[chunk.row : chunk.row + chunk.tokens], chunk, mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, cache: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        owner = self.layout.page_owner
        pages = cache.index_select(0, self.layout.decode_pages)  # [pages, 2, kv_heads, page_tokens, head_dim]
        grouped = query.view(-1, self.kv_heads, self.group, self.head_dim)
        page, place = self.empty
        pages[page, 1, :, place] = 0.0  # an earlier owner may have left an infinity, and 0 times that is not 0
        scores = torch.matmul(grouped.index_select(0, owner), pages[:, 0].transpose(-1, -2)).mul_(self.scale)
        scores.masked_fill_(self.hidden, -torch.inf)
        peak = scores.amax(-1)  # [pages, kv_heads, group]; every page has a token, so it is finite
        weights = scores.sub_(peak[..., None]).exp_()
        answers = torch.matmul(weights, pages[:, 1])
        totals = weights.sum(-1)
        where = owner[:, None, None].expand_as(peak)
        highest = torch.full(grouped.shape[:-1], -torch.inf, dtype=peak.dtype, device=peak.device)
        highest.scatter_reduce_(0, where, peak, "amax")
        share = (peak - highest.index_select(0, owner)).exp_()
        merged = torch.zeros_like(grouped).index_add_(0, owner, answers.mul_(share[..., None]))
        whole = torch.zeros_like(highest).index_add_(0, owner, totals.mul_(share))
        return merged.div_(whole[..., None]).view(-1, self.heads, self.head_dim)

    def _chunk(
        self, cache: torch.Tensor, query: torch.Tensor, chunk: ChunkLayout, mask: torch.Tensor | None
    ) -> torch.Tensor:
        kept = cache.index_select(0, chunk.pages).permute(1, 2, 0, 3, 4)  # [2, kv_heads, pages, page_tokens, head_dim]
        key, value = kept.reshape(2, 1, self.kv_heads, -1, self.head_dim)[:, :, :, : chunk.start + chunk.tokens]
        rows = query.transpose(0, 1)[None]
        answer = scaled_dot_product_attention(
            rows, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return answer[0].transpose(0, 1)


def _causal(tokens: int, start: int, device: torch.device) -> torch.Tensor | None:
    """Which of start + tokens keys each row sees; None where that is the plain triangle."""
    if start == 0:
        return None
    return torch.ones(tokens, start + tokens, dtype=torch.bool, device=device).tril(start)
