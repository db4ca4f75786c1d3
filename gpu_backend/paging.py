"""Page tables as FlashInfer takes them: int32, on the host, the pages of all requests one after the other.

Request i has the pages `indices[indptr[i]:indptr[i + 1]]`, of which the last holds `last_page_len[i]` tokens, 1 to
page_tokens of them (https://docs.flashinfer.ai/tutorials/kv_layout.html). `plan()` copies index arrays that are on a
device back to the host, so these never leave it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_backend.layout import Layout

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Paged:
    """Pages of some requests, and the rows of the query that belong to each.

    `qo_indptr` and `indptr` are [requests + 1], `indices` [pages] and `last_page_len` [requests].
    """

    qo_indptr: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def of_decodes(layout: Layout, page_tokens: int) -> Paged:
    """The decodes of a batch: one row each."""
    lengths = np.array(layout.decode_lengths, dtype=np.int32)
    return _paged(np.ones_like(lengths), lengths, layout.decode_pages, page_tokens)


def of_chunks(layout: Layout, page_tokens: int) -> Paged:
    """The chunks of a batch: their rows begin at 0."""
    rows = np.array([chunk.tokens for chunk in layout.chunks], dtype=np.int32)
    lengths = np.array([chunk.start + chunk.tokens for chunk in layout.chunks], dtype=np.int32)
    return _paged(rows, lengths, torch.cat([chunk.pages for chunk in layout.chunks]), page_tokens)


def of_all(layout: Layout, page_tokens: int) -> Paged:
    """The decodes, then the chunks: a decode is a chunk of one row."""
    rows = [1] * layout.decodes + [chunk.tokens for chunk in layout.chunks]
    lengths = layout.decode_lengths + [chunk.start + chunk.tokens for chunk in layout.chunks]
    pages = torch.cat([layout.decode_pages, *(chunk.pages for chunk in layout.chunks)])
    return _paged(np.array(rows, dtype=np.int32), np.array(lengths, dtype=np.int32), pages, page_tokens)


def padded(paged: Paged, requests: int, spare: int) -> Paged:
    """Decodes filled up to so many `requests` with ones that have a single token, on the page `spare`."""
    more = requests - len(paged.last_page_len)
    assert more >= 0, "more decodes than the graph has rows for"
    steps = torch.arange(1, more + 1, dtype=torch.int32)
    return Paged(
        qo_indptr=torch.arange(requests + 1, dtype=torch.int32),
        indptr=torch.cat([paged.indptr, paged.indptr[-1] + steps]),
        indices=torch.cat([paged.indices, torch.full((more,), spare, dtype=torch.int32)]),
        last_page_len=torch.cat([paged.last_page_len, torch.ones(more, dtype=torch.int32)]),
    )


def _paged(rows: Int32, lengths: Int32, pages: torch.Tensor, page_tokens: int) -> Paged:
    counts = -(-lengths // page_tokens)
    return Paged(
        qo_indptr=_from_zero(rows),
        indptr=_from_zero(counts),
        indices=pages.to(torch.int32),
        last_page_len=torch.from_numpy(lengths - (counts - 1) * page_tokens),
    )


def _from_zero(counts: Int32) -> torch.Tensor:
    """0 and the running sums, [counts + 1]."""
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return torch.from_numpy(sums)
