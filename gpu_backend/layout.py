"""Where the tokens of a batch lie: the index arrays that attention needs, worked out once per batch for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """A chunk of `tokens` tokens after `start` computed ones; its rows of the batch begin at `row`."""

    row: int
    start: int
    tokens: int
    pages: torch.Tensor  # [ceil((start + tokens) / page_tokens)] int64, on the device


@dataclass(frozen=True, slots=True)
class Layout:
    """A batch of rows: first one per decode, then those of each chunk. Index tensors are int64 on the device.

    `write_pages`, `write_offsets`: [rows], where each row's key and value go. `decode_lengths` and `decode_tables`: KV
    tokens of each decode, its own included, and its pages; on the host. `decode_pages`: the pages of all decodes, one
    request after the other; `page_owner`: which decode each belongs to; `page_room`: how many tokens it has.
    """

    decodes: int
    chunks: Sequence[ChunkLayout]
    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    decode_lengths: list[int]
    decode_tables: list[list[int]]
    decode_pages: torch.Tensor
    page_owner: torch.Tensor
    page_room: torch.Tensor


def lay_out(
    decodes: Sequence[tuple[int, list[int]]],
    chunks: Sequence[tuple[int, int, list[int]]],
    page_tokens: int,
    device: torch.device,
) -> Layout:
    """The layout of decodes, each (KV tokens with its own, pages), and chunks, each (start, tokens, pages)."""
    pages_to, offsets_to = [], []
    flat: list[int] = []
    owner: list[int] = []
    room: list[int] = []
    for index, (length, pages) in enumerate(decodes):
        last = length - 1
        pages_to.append(pages[last // page_tokens])
        offsets_to.append(last % page_tokens)
        count = -(-length // page_tokens)
        flat.extend(pages[:count])
        owner.extend([index] * count)
        room.extend([page_tokens] * (count - 1))
        room.append(length - (count - 1) * page_tokens)
    placed = []
    row = len(decodes)
    for start, tokens, pages in chunks:
        for position in range(start, start + tokens):
            pages_to.append(pages[position // page_tokens])
            offsets_to.append(position % page_tokens)
        count = -(-(start + tokens) // page_tokens)
        placed.append(ChunkLayout(row, start, tokens, torch.tensor(pages[:count], device=device)))
        row += tokens
    return Layout(
        decodes=len(decodes),
        chunks=placed,
        write_pages=torch.tensor(pages_to, device=device),
        write_offsets=torch.tensor(offsets_to, device=device),
        decode_lengths=[length for length, _ in decodes],
        decode_tables=[pages for _, pages in decodes],
        decode_pages=torch.tensor(flat, dtype=torch.int64, device=device),
        page_owner=torch.tensor(owner, dtype=torch.int64, device=device),
        page_room=torch.tensor(room, dtype=torch.int64, device=device),
    )
