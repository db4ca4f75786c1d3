"""The KV cache of the engine: which page of memory holds which block of which request.

The scheduler counts blocks and the engine decides which pages they are. It takes a page when a token is first written
to it, so it never holds more than the scheduler counted.
"""

from __future__ import annotations

import torch


class PageTable:
    """Pages 0 … `pages` − 1 of `page_tokens` tokens, and those that each request holds, in order of position."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.total = pages
        self.free = list(range(pages - 1, -1, -1))
        self.held: dict[int, list[int]] = {}

    @property
    def used(self) -> int:
        return self.total - len(self.free)

    def cover(self, request: int, tokens: int) -> list[int]:
        """The request's pages, grown until they hold `tokens` tokens."""
        pages = self.held.setdefault(request, [])
        needed = -(-tokens // self.page_tokens)
        assert needed - len(pages) <= len(self.free), "the engine needs a page that the scheduler did not count"
        while len(pages) < needed:
            pages.append(self.free.pop())
        return pages

    def release(self, request: int) -> None:
        """Take back all pages of a request; one that holds none is fine."""
        self.free.extend(reversed(self.held.pop(request, [])))


def storage(
    layers: int, pages: int, page_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """A tensor per layer, [pages, 2, kv_heads, page_tokens, head_dim]: keys at 0, values at 1 (FlashInfer's "HND")."""
    shape = (pages, 2, kv_heads, page_tokens, head_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
