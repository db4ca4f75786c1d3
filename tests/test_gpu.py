"""The engine on a GPU: FlashInfer against plain torch, graphs against none, and how far from the hardware's limits.

Needs CUDA, and FlashInfer where it says so; elsewhere every test here is skipped. Kernels that are not built yet
(`python -m gpu_backend.kernels`) are skipped as well, unless SERVECAST_BUILD_KERNELS is set: building takes minutes.
"""

# ruff: noqa: E402
from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_attention import case
from test_engine import few, limits, served, workload
from test_engine_dense import GQA

from gpu_backend import engine, kernels, weights
from gpu_backend.attention import TorchAttention
from gpu_backend.cache import PageTable, storage
from gpu_backend.choice import Measured, timed
from gpu_backend.executor import TorchExecutor
from gpu_backend.flashinfer_attention import FlashInferAttention, HeadShape
from gpu_backend.graphs import DecodeGraphs
from gpu_backend.layout import Layout, lay_out
from gpu_backend.model import Decoder
from sim import hardware
from sim.hardware import Model, ModelTable
from sim.schema import TorchTable

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
flash = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
NEAR = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # some roundings of values around 1
SMALL = replace(GQA, name="small", head_dim=64, heads=8, kv_heads=2, hidden=256, intermediate=512, layers=3)
POSITIONS = 4096


def ready(shape: HeadShape) -> None:
    """Skip where kernels would have to be compiled first."""
    if not os.environ.get("SERVECAST_BUILD_KERNELS") and not kernels.available(shape, CUDA):
        pytest.skip(f"no kernels for {shape}: python -m gpu_backend.kernels")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """What a test leaves on the device does not narrow the next one's."""
    yield
    torch.cuda.empty_cache()


def on_gpu(layout: Layout) -> Layout:
    return replace(layout, write_pages=layout.write_pages.to(CUDA), write_offsets=layout.write_offsets.to(CUDA))


# Attention


@flash
@pytest.mark.parametrize("mixed", ["split", "prefill"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("page_tokens", [16, 32])
def test_flashinfer_is_torch(page_tokens: int, group: int, head_dim: int, dtype: Any, mixed: Any) -> None:
    """Random ragged batches; the reference attends in float32 to the same 16-bit keys and values."""
    shape = HeadShape(2 * group, 2, head_dim, page_tokens, dtype)
    ready(shape)
    attention = FlashInferAttention(shape, CUDA, mixed=mixed)
    reference = TorchAttention(2 * group, 2, head_dim, page_tokens)
    draw = np.random.default_rng((page_tokens, group, head_dim))
    for kind in ("decodes", "chunks", "mixed", "long"):
        longest = 3000 if kind == "long" else 400
        decodes = [] if kind == "chunks" else draw.integers(1, longest, int(draw.integers(1, 20))).tolist()
        chunks = [] if kind == "decodes" else draw.integers(1, 400, (3, 2)).tolist()
        whole = [(0, tokens) if index == 0 else (start, tokens) for index, (start, tokens) in enumerate(chunks)]
        one = case((2 * group, 2, head_dim), page_tokens, decodes, whole, dtype=torch.float32, poison=1000.0)
        given = [part.to(CUDA, dtype) for part in (one.cache, one.query, one.key, one.value)]
        exact = [part.float() for part in given]
        answers = []
        for each, tensors in ((attention, given), (reference, exact)):
            each.plan(on_gpu(one.layout))
            answers.append(each.run(*tensors).float())
        torch.testing.assert_close(*answers, rtol=NEAR[dtype], atol=NEAR[dtype])
        assert torch.equal(given[0].float(), exact[0])  # the same keys and values in the same places


@flash
def test_infinities_of_an_earlier_owner_do_not_leak() -> None:
    """In the places of a last page that no token of the request has filled."""
    shape = HeadShape(8, 2, 64, 16, torch.float16)
    ready(shape)
    attention = FlashInferAttention(shape, CUDA)
    one = case((8, 2, 64), 16, [1, 5, 17, 40], [(0, 3), (14, 5)], dtype=torch.float32, poison=float("inf"))
    attention.plan(on_gpu(one.layout))
    given = [part.to(CUDA, torch.float16) for part in (one.cache, one.query, one.key, one.value)]
    found = attention.run(*given).float().cpu()
    torch.testing.assert_close(found, one.expected, rtol=1e-2, atol=1e-2)


@flash
def test_plans_in_a_row_do_not_race() -> None:
    """plan() reuses a pinned host buffer: planned again while the device is still busy, the first must hold."""
    shape = HeadShape(8, 2, 64, 16, torch.float16)
    ready(shape)
    attention = FlashInferAttention(shape, CUDA)
    cases = [case((8, 2, 64), 16, [50 + 7 * seed] * 40, [], dtype=torch.float32, seed=seed) for seed in range(2)]
    tensors = [[part.to(CUDA, torch.float16) for part in (c.cache, c.query, c.key, c.value)] for c in cases]
    layouts = [on_gpu(one.layout) for one in cases]
    expected = []
    for layout, given in zip(layouts, tensors, strict=True):
        attention.plan(layout)
        expected.append(attention.run(*given))
        torch.cuda.synchronize()
    load = torch.randn(4096, 4096, device=CUDA)
    answers = []
    for turn in range(40):
        for _ in range(3):
            load = load @ load * 1e-4  # the device lags behind the host
        attention.plan(layouts[turn % 2])
        answers.append(attention.run(*tensors[turn % 2]))
    torch.cuda.synchronize()
    for turn, answer in enumerate(answers):
        assert torch.equal(answer, expected[turn % 2])


@flash
def test_a_choice_is_made_by_measurement(record_property: Any) -> None:
    """Whichever is chosen computes the same; the choices of this device are reported."""
    shape = HeadShape(32, 8, 128, 16, torch.bfloat16)
    ready(shape)
    variants: dict[str, Any] = {name: FlashInferAttention(shape, CUDA, mixed=name) for name in ("split", "prefill")}  # type: ignore[arg-type]
    (cache,) = storage(1, 20_000, 16, 8, 128, torch.bfloat16, CUDA)
    seconds = timed(cache, heads=32, layers=32)
    attention = Measured(variants, seconds)
    for decodes, context, tokens in ((1, 1000, 0), (64, 1000, 0), (0, 0, 512), (32, 1000, 480), (128, 2000, 384)):
        held = -(-(context + 1) // 16)
        pages = [list(range(index * held, (index + 1) * held)) for index in range(decodes)]
        rest = list(range(decodes * held, decodes * held + 200))
        chunks = [(1000, tokens, rest)] if tokens else []
        layout = lay_out([(context + 1, one) for one in pages], chunks, 16, CUDA)
        chosen = attention.choose(layout)
        took = {name: seconds(variant, layout) * 1000 for name, variant in variants.items()}
        told = ", ".join(f"{name} {value:.2f} ms" for name, value in took.items())
        print(f"\nattention of 32 layers, {decodes} decodes at {context}, chunk of {tokens}: {told}; {chosen}")
        record_property(f"attention_{decodes}_{tokens}", told)


# The engine


def small(dtype: Any, attention: str, pages: int = 400, **how: Any) -> TorchExecutor:
    table = TorchTable(device="cuda", attention=attention, **how)  # type: ignore[arg-type]
    if attention == "flashinfer":
        ready(HeadShape(SMALL.heads, SMALL.kv_heads, SMALL.head_dim, 16, dtype))
    return engine.build(
        SMALL, table, pages=pages, page_tokens=16, positions=512, device=CUDA, dtype=dtype, keep_answers=True
    )


def test_no_policy_changes_a_token_on_the_gpu() -> None:
    """In float32, where rounding does not decide between tokens, with plain torch attention."""
    torch.backends.cuda.matmul.allow_tf32 = False
    answers = []
    for policy in ("prefill-first", "stall-free", "alternating", "orca"):
        executor = small(torch.float32, "torch")
        served(executor, limits(policy, 400), few(workload(), 12))
        executor.finish()
        answers.append(executor.answers)
    assert all(one == answers[0] for one in answers)
    assert len(answers[0]) == 12


@flash
@pytest.mark.parametrize("decodes", [1, 3, 8, 29, 200])
def test_graphs_are_eager(decodes: int) -> None:
    """Within rounding: a graph's launch splits long contexts in another way. And padding leaks nowhere."""
    executor = small(torch.bfloat16, "flashinfer", pages=4000)
    graphs: Any = executor.graphs
    spare = graphs.spare
    draw = np.random.default_rng(decodes)
    lengths = draw.integers(1, 300, decodes).tolist()
    free = iter(draw.permutation(4000).tolist())
    layout = lay_out([(n, [next(free) for _ in range(-(-n // 16))]) for n in lengths], [], 16, torch.device("cpu"))
    for cache in executor.decoder.cache:
        cache.normal_()
    graphs.prepare(decodes)
    tokens, positions = draw.integers(0, SMALL.vocab, decodes).tolist(), [n - 1 for n in lengths]
    before = [cache.clone() for cache in executor.decoder.cache]
    placed = on_gpu(layout)
    executor.attention.plan(placed)
    every = torch.arange(decodes, device=CUDA)
    given = [torch.tensor(values, device=CUDA) for values in (tokens, positions)]
    logits = executor.decoder.forward(*given, every, executor.attention).float()
    eager = [cache.clone() for cache in executor.decoder.cache]
    for cache, old in zip(executor.decoder.cache, before, strict=True):
        cache.copy_(old)
    for _ in range(2):  # a second replay of the same batch changes nothing
        run = graphs.ready(tokens, positions, layout)
        assert run is not None
        chosen = run()
        assert len(chosen) == decodes
        best, given_up = logits.max(-1).values, logits.gather(1, chosen[:, None])[:, 0]
        assert (best - given_up).max() <= 0.05 * logits.std()  # the same token, or one as good within rounding
    for cache, ours, old in zip(executor.decoder.cache, eager, before, strict=True):
        untouched = (ours == old).flatten(1).all(1)
        untouched[spare] = False
        assert torch.equal(cache[untouched], old[untouched])
        torch.testing.assert_close(cache[:spare].float(), ours[:spare].float(), rtol=5e-2, atol=5e-2)


@flash
def test_times_make_sense() -> None:
    """Host before device, device within the whole, and the whole no longer than the wall says."""
    executor = small(torch.bfloat16, "flashinfer")
    seen: list[tuple[float, float, float, float]] = []
    inner = executor.execute

    def execute(batch: Any) -> Any:
        start = time.perf_counter()
        step = inner(batch)
        device: Any = executor.device_seconds
        seen.append((step.host, device, step.seconds[0], time.perf_counter() - start))
        return step

    executor.execute = execute  # type: ignore[method-assign]
    record = served(executor, limits("stall-free", 400), workload())
    assert record.done == 24
    for host, device, whole, wall in seen:
        assert 0 < host < whole <= wall
        assert 0 < device <= whole * 1.05 + 1e-5
    later = [whole for _, _, whole, _ in seen[len(seen) // 2 :]]
    assert np.median(later) < 0.02


# Llama-3.1-8B's shape, random weights: how near the engine comes to the hardware


def llama() -> Model:
    return hardware.model(ModelTable(name="llama-3.1-8b", dtype="bfloat16", kv_dtype="bfloat16"), Path())


@pytest.fixture(scope="module")
def large() -> Iterator[tuple[TorchExecutor, Model]]:
    """The whole engine, its weights drawn on the device."""
    model = llama()
    shape = HeadShape(model.heads, model.kv_heads, model.head_dim, 16, torch.bfloat16)
    ready(shape)
    generator = torch.Generator(CUDA).manual_seed(0)

    def load(name: str, shape: tuple[int, ...]) -> Any:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device=CUDA)
        return torch.empty(shape, dtype=torch.bfloat16, device=CUDA).normal_(0, 0.02, generator=generator)

    pages = 20_000
    cache = storage(model.layers, pages + 1, 16, model.kv_heads, model.head_dim, torch.bfloat16, CUDA)
    decoder = Decoder(model, weights._assemble(model, load), cache, POSITIONS)
    attention = FlashInferAttention(shape, CUDA)
    table = PageTable(pages, 16)
    yield TorchExecutor(decoder, attention, table, graphs=DecodeGraphs(decoder, attention, spare=pages)), model
    torch.cuda.empty_cache()


def bandwidth() -> float:
    """Bytes a second of a copy on this device, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    return 2 * source.numel() / best_of(lambda: target.copy_(source))


def flops() -> float:
    """FLOP/s of a large bf16 product on this device."""
    left, right = (torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / best_of(lambda: left @ right)


def best_of(call: Any, times: int = 5) -> float:
    took = []
    for _ in range(times + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return min(took)


@flash
@pytest.mark.parametrize(("decodes", "context"), [(1, 1000), (8, 1000), (32, 1000), (128, 2000)])
@pytest.mark.parametrize("graphed", [True, False], ids=["graph", "eager"])
def test_decodes_are_bound_by_memory(
    large: tuple[TorchExecutor, Model], decodes: int, context: int, graphed: bool, record_property: Any
) -> None:
    """Weights and KV over the measured bandwidth is the least a decode step can take."""
    executor, model = large
    held = -(-context // 16)
    pages = [list(range(index * held, (index + 1) * held)) for index in range(decodes)]
    layout = lay_out([(context, one) for one in pages], [], 16, torch.device("cpu"))
    tokens, positions = [1] * decodes, [context - 1] * decodes
    graphs: Any = executor.graphs
    graphs.prepare(decodes)

    def step() -> None:
        if graphed:
            graphs.ready(tokens, positions, layout)().tolist()
            return
        executor.attention.plan(on_gpu(layout))
        rows = torch.arange(decodes, device=CUDA)
        given = [torch.tensor(values, device=CUDA) for values in (tokens, positions)]
        executor.decoder.forward(*given, rows, executor.attention).argmax(-1).tolist()

    seconds = best_of(step, 10)
    kv = decodes * context * 2 * model.kv_heads * model.head_dim * 2 * model.layers
    least = ((model.parameters - model.embedding_parameters) * 2 + kv) / bandwidth()
    told = f"{seconds * 1000:.2f} ms, {seconds / least:.2f} times the least of {least * 1000:.2f} ms"
    print(f"\n{decodes} decodes at {context} {'in a graph' if graphed else 'eager'}: {told}")
    record_property("decode", told)
    assert 0.8 < seconds / least < (2.5 if graphed else 12)


@flash
@pytest.mark.parametrize("tokens", [256, 512, 2048, 4096])
def test_prefills_are_bound_by_compute(large: tuple[TorchExecutor, Model], tokens: int, record_property: Any) -> None:
    """FLOPs of the matrices and of causal attention, over the measured FLOP/s."""
    executor, model = large
    layout = lay_out([], [(0, tokens, list(range(-(-tokens // 16))))], 16, CUDA)
    given = torch.ones(tokens, dtype=torch.int64, device=CUDA), torch.arange(tokens, device=CUDA)
    last = torch.tensor([tokens - 1], device=CUDA)

    def step() -> None:
        executor.attention.plan(layout)
        executor.decoder.forward(*given, last, executor.attention).argmax(-1).tolist()

    seconds = best_of(step)
    attention = 4 * model.heads * model.head_dim * tokens**2 / 2 * model.layers
    work = 2 * model.linear_parameters * tokens + 2 * model.embedding_parameters + attention
    peak = flops()
    reached = work / seconds
    told = f"{seconds * 1000:.1f} ms, {reached / 1e12:.0f} TFLOP/s, {reached / peak:.0%} of {peak / 1e12:.0f}"
    print(f"\nprefill of {tokens}: {told}")
    record_property("prefill", told)
    assert 0.02 < reached / peak < 1.1
