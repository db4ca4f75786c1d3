"""The CUDA path without CUDA: what FlashInfer is told, by a stand-in that attends in plain torch."""

# ruff: noqa: E402
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fake_flashinfer
from fake_flashinfer import Event, Log
from test_attention import case
from test_engine import CPU, GQA, MOST, built, few, limits, served, tensors_of, workload

from gpu_backend import engine, flashinfer_attention, graphs, kernels, paging
from gpu_backend.choice import Measured, shape_of, timed
from gpu_backend.flashinfer_attention import FlashInferAttention, HeadShape
from gpu_backend.graphs import SIZES, DecodeGraphs, size_for
from gpu_backend.layout import Layout, lay_out
from gpu_backend.staging import DeviceTimer, Staging
from sim.errors import BadInput
from sim.schema import TorchTable

MIXES = {
    "decodes": ([1, 5, 16, 17, 33], []),
    "chunks": ([], [(0, 16), (7, 20), (32, 1)]),
    "mixed": ([4, 32, 31], [(0, 3), (14, 40)]),
}
F64 = torch.float64


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """FlashInfer and CUDA seem to be there; the calls come here."""
    calls = Log()
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module(calls))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(flashinfer_attention, "DTYPES", (F64, torch.float16, torch.bfloat16))
    monkeypatch.setattr(flashinfer_attention, "HEAD_DIMS", (16, 64, 128))
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(flashinfer_attention, "event", lambda: Event(calls))
    monkeypatch.setattr(graphs, "capture", lambda step, _: step)
    return calls


def made(page_tokens: int = 16, heads: int = 4, kv_heads: int = 2, **how: Any) -> FlashInferAttention:
    return FlashInferAttention(HeadShape(heads, kv_heads, 16, page_tokens, F64), CPU, **how)


# Index arrays


def brute(requests: list[tuple[int, int, list[int]]], page_tokens: int) -> list[list[int]]:
    """Token by token, for requests (rows, tokens, pages)."""
    rows_from, pages_from, indices, last = [0], [0], [], []
    for rows, tokens, pages in requests:
        used: list[int] = []
        fill = 0
        for position in range(tokens):
            if position % page_tokens == 0:
                used.append(pages[position // page_tokens])
                fill = 0
            fill += 1
        rows_from.append(rows_from[-1] + rows)
        pages_from.append(pages_from[-1] + len(used))
        indices += used
        last.append(fill)
    return [rows_from, pages_from, indices, last]


@pytest.mark.parametrize("seed", range(30))
def test_page_tables_are_those_built_token_by_token(seed: int) -> None:
    draw = np.random.default_rng(seed)
    page_tokens = int(draw.choice([1, 2, 16, 32]))

    def pages(tokens: int) -> list[int]:
        return draw.integers(0, 1000, -(-tokens // page_tokens)).tolist()

    decodes = [(n, pages(n)) for n in draw.integers(1, 100, draw.integers(1, 9)).tolist()]
    chunks = [(s, n, pages(s + n)) for s, n in draw.integers(1, 60, (int(draw.integers(1, 4)), 2)).tolist()]
    ours = [(1, n, held) for n, held in decodes]
    theirs = [(n, s + n, held) for s, n, held in chunks]
    layout = lay_out(decodes, chunks, page_tokens, CPU)
    found = [
        (paging.of_decodes(layout, page_tokens), brute(ours, page_tokens)),
        (paging.of_chunks(layout, page_tokens), brute(theirs, page_tokens)),
        (paging.of_all(layout, page_tokens), brute(ours + theirs, page_tokens)),
        (
            paging.padded(paging.of_decodes(layout, page_tokens), 12, 999),
            brute(ours + [(1, 1, [999])] * (12 - len(ours)), page_tokens),
        ),
    ]
    for paged, expected in found:
        arrays = [paged.qo_indptr, paged.indptr, paged.indices, paged.last_page_len]
        assert all(array.dtype == torch.int32 for array in arrays)
        assert [array.tolist() for array in arrays] == expected


def test_graph_sizes() -> None:
    """The smallest that holds the batch; none for an empty batch, and none beyond the largest."""
    assert SIZES[:6] == (1, 2, 4, 8, 16, 24)
    assert SIZES[-1] == 256
    for decodes in range(1, 257):
        size = size_for(decodes)
        assert size == min(one for one in SIZES if one >= decodes)
    assert [size_for(decodes) for decodes in (0, 257, 10_000)] == [None, None, None]


# What the wrappers are told


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("mixed", ["split", "prefill"])
@pytest.mark.parametrize("name", MIXES)
def test_attends_as_torch_does(name: str, mixed: Any) -> None:
    """Through either wrapper, in the right rows, of a cache in which nothing else is a number."""
    for page_tokens in (1, 16, 32):
        one = case((4, 2, 16), page_tokens, *MIXES[name])
        attention = made(page_tokens, mixed=mixed)
        attention.plan(one.layout)
        found = attention.run(one.cache, one.query, one.key, one.value)
        torch.testing.assert_close(found, one.expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "mixed", "wrappers"),
    [
        ("decodes", "split", ["decode"]),
        ("chunks", "split", ["prefill"]),
        ("mixed", "split", ["decode", "prefill"]),
        ("decodes", "prefill", ["prefill"]),
        ("mixed", "prefill", ["prefill"]),
    ],
)
def test_one_plan_a_batch_one_run_a_layer(log: Log, name: str, mixed: Any, wrappers: list[str]) -> None:
    """And between two plans somebody has waited for the copies of the first."""
    one = case((4, 2, 16), 16, *MIXES[name])
    attention = made(mixed=mixed)
    log.clear()
    for _ in range(2):
        attention.plan(one.layout)
        for _ in range(3):
            attention.run(one.cache, one.query, one.key, one.value)
    plans = [f"{wrapper} plan" for wrapper in wrappers]
    runs = [f"{wrapper} run" for wrapper in wrappers]
    assert log.names() == (["wait", *plans, "record"] + runs * 3) * 2


def test_options(log: Log) -> None:
    """Causal prefills, our layout and scale, and tensor cores from four query heads per KV head."""
    for heads, cores in ((2, False), (6, False), (8, True), (16, True)):
        log.clear()
        one = case((heads, 2, 16), 16, *MIXES["mixed"])
        attention = made(heads=heads, backend="fa2")
        attention.plan(one.layout)
        attention.run(one.cache, one.query, one.key, one.value)
        told = dict(log)
        assert told["decode made"]["cores"] is cores
        assert told["decode made"]["layout"] == told["prefill made"]["layout"] == "HND"
        assert told["decode made"]["workspace"] is told["prefill made"]["workspace"]
        assert told["prefill made"]["backend"] == "fa2"
        assert made().prefill.made["backend"] == "fa3"  # settled, not "auto"
        assert told["prefill plan"]["causal"] is True
        for part in ("decode plan", "prefill plan"):
            assert told[part]["heads"] == heads
            assert told[part]["sm_scale"] == 0.25
            assert told[part]["q_data_type"] == F64


# The engine


def on_fake(pages: int, page_tokens: int, *, graphed: bool) -> Any:
    """The engine of the tests with the stand-in's attention, a spare page, and graphs if wanted."""
    executor = built(GQA, tensors_of(GQA), pages + 1, page_tokens)
    executor.pages = type(executor.pages)(pages, page_tokens)
    attention = executor.attention = made(page_tokens)
    if graphed:
        executor.graphs = DecodeGraphs(executor.decoder, attention, spare=pages)
    return executor


@pytest.mark.parametrize("policy", ["stall-free", "prefill-first", "alternating"])
def test_the_engine_says_the_same_with_flashinfer_and_with_graphs(log: Log, policy: str) -> None:
    """Under memory pressure, so that pages change hands and decode batches have all sizes."""
    work = few(workload(24, gap=0.001, prompts=(1, 40), outputs=(20, 50)), 20)
    on = limits(policy, 48, 4, watermark=0.0)
    reference = built(GQA, tensors_of(GQA), 48, 4)
    answers = []
    for executor in (reference, on_fake(48, 4, graphed=False), on_fake(48, 4, graphed=True)):
        record = served(executor, on, work)
        executor.finish()
        assert record.done == len(work.prompts)
        answers.append(executor.answers)
    assert answers[0] == answers[1] == answers[2]
    assert {"graph plan", "graph run", "prefill run"} <= set(log.names())


@pytest.mark.usefixtures("log")
def test_rows_that_fill_up_a_graph_touch_the_spare_page_only() -> None:
    """Three decodes in a graph of four rows: the other requests' pages are as before."""
    executor = on_fake(40, 4, graphed=True)
    spare = executor.graphs.spare
    for cache in executor.decoder.cache:
        cache.normal_()
    executor.graphs.prepare(3)
    before = [cache.clone() for cache in executor.decoder.cache]
    layout = lay_out([(5, [7, 9]), (1, [11]), (4, [2])], [], 4, CPU)
    run = executor.graphs.ready([1, 2, 3], [4, 0, 3], layout)
    assert run is not None
    assert len(run()) == 3
    written = {(9, 0), (11, 0), (2, 3)}
    for cache, old in zip(executor.decoder.cache, before, strict=True):
        changed = (cache != old).any(dim=-1).any(dim=2).any(dim=1)  # [pages, page_tokens]
        places = {(page, place) for page, place in changed.nonzero().tolist() if page != spare}
        assert places == written


@pytest.mark.usefixtures("log")
def test_graphs_are_captured_once_per_size_and_only_for_decodes() -> None:
    executor = on_fake(400, 4, graphed=True)
    for decodes in (3, 4, 9, 16, 300):
        executor.graphs.prepare(decodes)
    assert sorted(executor.graphs.graphs) == [4, 16]
    chunk = lay_out([(1, [0])], [(0, 2, [1])], 4, CPU)
    assert executor.graphs.ready([1, 2, 3], [0, 0, 1], chunk) is None
    many = lay_out([(1, [index]) for index in range(300)], [], 4, CPU)
    assert executor.graphs.ready([0] * 300, [0] * 300, many) is None


@pytest.mark.usefixtures("log")
def test_capturing_is_not_part_of_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock starts after it."""
    ticks = iter(range(10_000))
    seen: list[int] = []
    monkeypatch.setattr(graphs, "capture", lambda step, _: (seen.append(next(ticks)), step)[1])
    executor = on_fake(1000, 16, graphed=True)
    executor.clock = lambda: float(next(ticks))
    inner, spans = executor.execute, []

    def execute(batch: Any) -> Any:
        before = len(seen)
        step = inner(batch)
        spans.append((len(seen) - before, step.seconds[0], step.host))
        return step

    executor.execute = execute
    served(executor, limits(), few(workload(), 6))
    assert any(captured for captured, *_ in spans)
    assert {(seconds, host) for _, seconds, host in spans} == {(2.0, 1.0)}


# Choice


@pytest.mark.usefixtures("log")
def test_the_fastest_variant_is_measured_once_per_shape() -> None:
    costs = {"split": 2.0, "prefill": 1.0}
    asked: list[str] = []
    variants: dict[str, Any] = {name: made(mixed=name) for name in costs}  # type: ignore[arg-type]

    def seconds(attention: Any, layout: Layout) -> float:
        asked.append(attention.mixed)
        return costs[attention.mixed] if layout.chunks else 1 / costs[attention.mixed]

    attention = Measured(variants, seconds)
    for name in ("mixed", "decodes", "mixed"):
        one = case((4, 2, 16), 16, *MIXES[name])
        attention.plan(one.layout)
        found = attention.run(one.cache, one.query, one.key, one.value)
        torch.testing.assert_close(found, one.expected, rtol=1e-12, atol=1e-12)
    assert asked == ["split", "prefill"] * 2
    assert sorted(attention.chosen.values()) == ["prefill", "split"]


def test_shapes_are_powers_of_two() -> None:
    def shape(decodes: int, context: int, tokens: int) -> Any:
        held = list(range(100))
        return shape_of(lay_out([(context, held)] * decodes, [(0, tokens, held)] if tokens else [], 16, CPU))

    assert shape(5, 110, 40) == shape(6, 101, 50) == (3, 10, 6, 6)
    assert shape(5, 110, 40) != shape(9, 110, 40)
    assert shape(5, 110, 0)[2:] == (0, 0)


@pytest.mark.usefixtures("log")
def test_timing_changes_nothing_but_the_batch_s_own_places() -> None:
    one = case((4, 2, 16), 16, *MIXES["mixed"])
    seconds = timed(one.cache, heads=4, layers=2)
    attention = made()
    assert 0 < seconds(attention, one.layout) < 10
    attention.plan(one.layout)
    found = attention.run(one.cache, one.query, one.key, one.value)
    torch.testing.assert_close(found, one.expected, rtol=1e-12, atol=1e-12)


# Buffers


def test_staging_keeps_its_buffer_and_grows_when_it_must() -> None:
    staging = Staging(CPU, 8)
    first = staging.load([1, 2, 3], torch.tensor([4, 5]))
    assert [column.tolist() for column in first] == [[1, 2, 3], [4, 5]]
    place = first[0].data_ptr()
    assert staging.load([7], [], [8, 9])[0].data_ptr() == place
    assert [column.tolist() for column in staging.load(list(range(20)), [1])] == [list(range(20)), [1]]
    with pytest.raises(AssertionError, match="do not grow"):
        Staging(CPU, 2, fixed=True).load([1, 2, 3])
    assert DeviceTimer(CPU).seconds() is None


# What is missing


def check(call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(BadInput) as caught:
        call()
    assert "\n" not in str(caught.value)
    for part in ("[torch] attention", *parts):
        assert part in str(caught.value)


def test_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check(made, "CUDA")
    check(lambda: engine.attention_on(CPU, TorchTable(attention="flashinfer"), GQA, 16), "CUDA")


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    cuda, table = torch.device("cuda"), TorchTable(attention="auto")
    check(made, "servecast[gpu]")
    wide = GQA.__class__(**{f: getattr(GQA, f) for f in GQA.__slots__} | {"head_dim": 64})
    check(lambda: engine.attention_on(cuda, table, wide, 16, torch.bfloat16), "servecast[gpu]", 'attention to "torch"')


def test_shapes_that_it_has_no_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name it is an error; "auto" takes plain torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module(Log()))
    check(lambda: FlashInferAttention(HeadShape(4, 2, 64, 16, torch.float32), CPU), "float32")
    check(lambda: FlashInferAttention(HeadShape(4, 2, 80, 16, torch.float16), CPU), "80", "64, 128, 256")
    cuda = torch.device("cuda")
    found = engine.attention_on(cuda, TorchTable(attention="auto"), GQA, 16, torch.bfloat16)
    assert type(found).__name__ == "TorchAttention"


def test_kernels_to_build() -> None:
    """Decodes with tensor cores share the fa2 prefill kernels; without them they have a module of their own."""
    package = fake_flashinfer.module(Log())

    def kinds(text: str, backend: str) -> list[str]:
        return [
            spec[1] if spec[0] == "prefill" else spec[0]
            for spec in kernels.modules(package, kernels.parse(text), backend)
        ]

    assert kinds("bfloat16:128:4", "fa3") == ["fa2", "fa3"]
    assert kinds("bfloat16:128:4", "fa2") == ["fa2"]
    assert kinds("float16:64:1", "fa3") == ["decode", "fa3"]
    for text in ("bfloat16:128", "int8:64:1", "float16:x:1"):
        with pytest.raises(BadInput, match="DTYPE:HEAD_DIM:GROUP"):
            kernels.parse(text)


def test_kernels_without_cuda_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main(["float16:64:1"]) == 2
    assert capsys.readouterr().err == "kernels: error: [torch] attention: FlashInfer needs a CUDA device\n"


@pytest.mark.usefixtures("log")
def test_positions_fit() -> None:
    """The spare rows read position 0, which every table of angles has."""
    executor = on_fake(40, 4, graphed=True)
    assert len(executor.decoder.cos) == MOST
    executor.graphs.prepare(1)
