"""Paged attention in plain torch against torch's own, request by request, on keys and values that were never paged.

The cache is full of NaN but for the tokens that requests have computed, and pages lie in no order.
"""

# ruff: noqa: E402
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_backend.attention import TorchAttention
from gpu_backend.layout import Layout, lay_out

torch.set_num_threads(1)

CPU = torch.device("cpu")
Shape = tuple[int, int, int]  # heads, KV heads, head_dim
NEAR = {torch.float64: 1e-12, torch.float32: 2e-6}


@dataclass(frozen=True)
class Case:
    """One layer's attention over a batch: what it is given, and what it should say.

    `sequences` are the keys and values of each request, [2, tokens, kv_heads, head_dim], those of this batch included.
    """

    layout: Layout
    cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    expected: torch.Tensor
    sequences: list[torch.Tensor]
    tables: list[list[int]]


def case(
    shape: Shape,
    page_tokens: int,
    decodes: list[int],
    chunks: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    poison: float = math.nan,
    spread: float = 1.0,
) -> Case:
    """Random decodes, each of so many KV tokens with its own, and chunks (start, tokens), on shuffled pages."""
    heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    new = [(length - 1, 1) for length in decodes] + chunks
    counts = [-(-(start + tokens) // page_tokens) for start, tokens in new]
    spare = 3
    order = torch.randperm(sum(counts) + spare, generator=generator).tolist()
    cache = torch.full((len(order), 2, kv_heads, page_tokens, head_dim), poison, dtype=dtype)
    tables, sequences, queries, answers, keys, values = [], [], [], [], [], []
    for (start, tokens), count in zip(new, counts, strict=True):
        pages, order = order[:count], order[count:]
        both = torch.randn((2, start + tokens, kv_heads, head_dim), generator=generator, dtype=dtype) * spread
        for position in range(start):
            cache[pages[position // page_tokens], :, :, position % page_tokens] = both[:, position]
        query = torch.randn((tokens, heads, head_dim), generator=generator, dtype=dtype) * spread
        tables.append(pages)
        sequences.append(both)
        queries.append(query)
        keys.append(both[0, start:])
        values.append(both[1, start:])
        answers.append(whole(query, both, start))
    layout = lay_out(
        list(zip(decodes, tables, strict=False)),
        [(start, tokens, pages) for (start, tokens), pages in zip(chunks, tables[len(decodes) :], strict=True)],
        page_tokens,
        CPU,
    )
    return Case(
        layout, cache, torch.cat(queries), torch.cat(keys), torch.cat(values), torch.cat(answers), sequences, tables
    )


def whole(query: torch.Tensor, both: torch.Tensor, start: int) -> torch.Tensor:
    """Torch's attention of rows start, start + 1, … over the tokens up to each; a KV head is copied for its group."""
    tokens, heads, _ = query.shape
    key, value = (part.repeat_interleave(heads // part.shape[1], dim=1).transpose(0, 1)[None] for part in both)
    positions = torch.arange(len(both[0]))
    seen = positions[None, :] <= torch.arange(start, start + tokens)[:, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query.transpose(0, 1)[None], key, value, attn_mask=seen)[0].transpose(0, 1)


def answer(one: Case, shape: Shape, page_tokens: int) -> torch.Tensor:
    """What the engine's attention says; the cache is written to."""
    attention = TorchAttention(*shape, page_tokens)
    attention.plan(one.layout)
    return attention.run(one.cache, one.query, one.key, one.value)


def check(shape: Shape, page_tokens: int, decodes: list[int], chunks: list[tuple[int, int]], **how: object) -> None:
    """The same answer, new tokens in their places, and not a bit changed elsewhere."""
    one = case(shape, page_tokens, decodes, chunks, **how)  # type: ignore[arg-type]
    before = one.cache.clone()
    found = answer(one, shape, page_tokens)
    near = NEAR[found.dtype]
    assert found.shape == one.expected.shape
    torch.testing.assert_close(found, one.expected, rtol=near, atol=near)
    for both, pages in zip(one.sequences, one.tables, strict=True):
        for position in range(both.shape[1]):
            place = (pages[position // page_tokens], slice(None), slice(None), position % page_tokens)
            assert torch.equal(one.cache[place], both[:, position])
            before[place] = both[:, position]
    assert torch.equal(one.cache.view(torch.uint8), before.view(torch.uint8))


SHAPES: list[Shape] = [(4, 4, 16), (4, 2, 16), (6, 1, 8), (8, 2, 32), (1, 1, 2), (3, 3, 10)]


@pytest.mark.parametrize("dtype", list(NEAR), ids=str)
@pytest.mark.parametrize("page_tokens", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_batches(shape: Shape, page_tokens: int, dtype: torch.dtype) -> None:
    """Decodes of 1 to 300 tokens and chunks with and without prior context, in one batch."""
    draw = np.random.default_rng((page_tokens, *shape))
    decodes = [int(n) for n in draw.integers(1, 301, draw.integers(1, 9))]
    chunks = [(int(draw.integers(0, 90)), int(draw.integers(1, 60))) for _ in range(3)]
    chunks[0] = (0, chunks[0][1])
    check(shape, page_tokens, decodes, chunks, dtype=dtype, seed=page_tokens)


@pytest.mark.parametrize("page_tokens", [1, 3, 4, 16])
def test_every_small_length(page_tokens: int) -> None:
    """All lengths about a page's edge: first token of a page, last of a page, one page, none before."""
    lengths = list(range(1, 3 * page_tokens + 3))
    check((4, 2, 8), page_tokens, lengths, [])
    for start in range(2 * page_tokens + 2):
        check((4, 2, 8), page_tokens, [], [(start, tokens) for tokens in (1, page_tokens, page_tokens + 1)], seed=start)


@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [([1], []), ([], [(0, 1)]), ([], [(5, 1)]), ([500], [(0, 1)]), ([1] * 40, []), ([33], [(31, 2), (0, 33)])],
    ids=str,
)
def test_the_smallest_batches_and_the_ragged(decodes: list[int], chunks: list[tuple[int, int]]) -> None:
    check((4, 2, 16), 16, decodes, chunks)


def test_many_decodes_of_very_different_lengths() -> None:
    """One long context beside many short ones: each is merged from its own pages only."""
    check((8, 2, 16), 16, [900, *range(1, 60), 450], [])


@pytest.mark.parametrize("dtype", list(NEAR), ids=str)
def test_scores_of_any_size(dtype: torch.dtype) -> None:
    """Scores of thousands do not overflow: each page is scaled by its own peak, and the pages by the highest."""
    for spread in (1e-3, 30.0):
        one = case((4, 2, 16), 8, [70, 3, 200], [(20, 9)], dtype=dtype, spread=spread)
        found = answer(one, (4, 2, 16), 8)
        assert found.isfinite().all()
        torch.testing.assert_close(
            found, one.expected, rtol=1e-3 if dtype == torch.float32 else 1e-9, atol=1e-3 * spread
        )


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e300, 7.0])
def test_nothing_is_read_that_was_not_written(poison: float) -> None:
    """Whatever lies in the empty places of a request's last page, and in the pages of others.

    Pages are used again without being cleared, and a 16-bit model can overflow: one request's infinities must not
    become the next one's NaN.
    """
    check((4, 2, 8), 16, [1, 5, 16, 17, 40], [(0, 3), (14, 5), (16, 16)], poison=poison)


def test_a_row_does_not_see_the_rows_after_it() -> None:
    """Nor other requests' rows: changing the last token of a chunk changes that row's answer alone."""
    shape, page_tokens = (4, 2, 8), 4
    first, second = (case(shape, page_tokens, [9], [(6, 5), (0, 4)]) for _ in range(2))
    last = 1 + 5 - 1
    for changed in (second.key, second.value, second.query):
        changed[last] += 1.0
    same = answer(first, shape, page_tokens) == answer(second, shape, page_tokens)
    assert same.all(dim=-1).all(dim=-1).tolist() == [row != last for row in range(10)]


def test_a_plan_serves_every_layer_and_is_replaced_by_the_next() -> None:
    """One plan, two caches; then another batch on the same attention."""
    shape, page_tokens = (4, 2, 8), 4
    attention = TorchAttention(*shape, page_tokens)
    for decodes, chunks in (([5, 9], [(3, 4)]), ([2], []), ([], [(0, 6)])):
        layers = [case(shape, page_tokens, decodes, chunks, seed=7) for _ in range(2)]
        layers[1].value.mul_(2.0)
        attention.plan(layers[0].layout)
        one, two = (attention.run(layer.cache, layer.query, layer.key, layer.value) for layer in layers)
        torch.testing.assert_close(one, layers[0].expected, rtol=1e-12, atol=1e-12)
        assert not torch.equal(one, two)


def test_the_layout_of_a_small_batch() -> None:
    """By hand: two decodes and two chunks on pages of four tokens."""
    layout = lay_out([(5, [9, 3]), (4, [7, 6])], [(0, 2, [1]), (3, 6, [2, 8, 0])], 4, CPU)
    assert layout.decodes == 2
    assert layout.write_pages.tolist() == [3, 7, 1, 1, 2, 8, 8, 8, 8, 0]
    assert layout.write_offsets.tolist() == [0, 3, 0, 1, 3, 0, 1, 2, 3, 0]
    assert layout.decode_lengths == [5, 4]
    assert layout.decode_tables[0] == [9, 3]
    assert layout.decode_pages.tolist() == [9, 3, 7]  # the page 6 is not begun
    assert layout.page_owner.tolist() == [0, 0, 1]
    assert layout.page_room.tolist() == [4, 1, 4]
    assert [(c.row, c.start, c.tokens, c.pages.tolist()) for c in layout.chunks] == [
        (2, 0, 2, [1]),
        (4, 3, 6, [2, 8, 0]),
    ]
