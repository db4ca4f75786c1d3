"""The engine, made ready for a scenario: weights, cache and attention on the device that [torch] names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_backend import weights
from gpu_backend.attention import Attention, TorchAttention
from gpu_backend.cache import PageTable, storage
from gpu_backend.executor import TorchExecutor
from gpu_backend.flashinfer_attention import FlashInferAttention, HeadShape
from gpu_backend.graphs import DecodeGraphs
from gpu_backend.layout import lay_out
from gpu_backend.model import Decoder, check_supported
from sim.errors import BadInput
from sim.hardware import Dtype, Model
from sim.schema import TorchTable
from sim.simulate import Plan

WARM_UP_TOKENS = 256
ON_GPU: dict[Dtype, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def executor(plan: Plan) -> Callable[[], TorchExecutor]:
    """What makes the engine of a plan. BadInput for what this machine or this engine cannot do."""
    scenario = plan.scenario
    parallel = scenario.deployment
    if plan.model is None:
        raise BadInput("the torch executor needs a model to run", key="[model]")
    if plan.devices != 1:
        what = "the engine runs on one device: tensor_parallel, pipeline_parallel and replicas must be 1"
        key = (
            "replicas"
            if parallel.replicas > 1
            else "tensor_parallel"
            if parallel.tensor_parallel > 1
            else "pipeline_parallel"
        )
        raise BadInput(what, key=f"[deployment] {key}")
    check_supported(plan.model)
    model, table = plan.model, scenario.torch
    device = find_device(table)
    dtype = dtype_on(device, model.dtype)
    if device.type != "cpu" and model.kv_dtype != model.dtype:
        what = f"the engine keeps KV in the weights' {model.dtype}, not in {model.kv_dtype}"
        raise BadInput(what, key="[model] kv_dtype")
    blocks, block_tokens = plan.deployment.limits.num_blocks, plan.deployment.limits.block_tokens
    return lambda: build(
        model,
        table,
        pages=blocks,
        page_tokens=block_tokens,
        positions=plan.deployment.limits.max_model_tokens,
        device=device,
        dtype=dtype,
        folder=scenario.directory,
    )


def find_device(table: TorchTable) -> torch.device:
    """The device to run on; "auto" is CUDA where there is one."""
    if table.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("no CUDA device is available to torch", key="[torch] device")
    return torch.device("cuda" if table.device != "cpu" and torch.cuda.is_available() else "cpu")


def dtype_on(device: torch.device, dtype: Dtype) -> torch.dtype:
    """The weights' dtype on a GPU; float32 on a CPU, whatever the scenario says."""
    if device.type == "cpu":
        return torch.float32
    if dtype not in ON_GPU:
        raise BadInput(f"the engine runs {', '.join(ON_GPU)}, not {dtype}", key="[model] dtype")
    return ON_GPU[dtype]


def build(
    model: Model,
    table: TorchTable,
    *,
    pages: int,
    page_tokens: int,
    positions: int,
    device: torch.device,
    dtype: torch.dtype,
    folder: object = None,
    keep_answers: bool = False,
) -> TorchExecutor:
    """An executor with its weights and its cache in place, and warm.

    On CUDA there is a page more than the scheduler counts, the last: rows that fill up a graph write to it.
    """
    from pathlib import Path

    torch.set_num_threads(table.threads)
    try:
        if table.weights is None:
            loaded = weights.random(model, dtype, device, table.seed)
        else:
            loaded = weights.from_folder(model, Path(str(folder)) / table.weights, dtype, device)
        cache = _cache(model, pages, page_tokens, dtype, device)
        decoder = Decoder(model, loaded, cache, min(positions, pages * page_tokens))
        return _assembled(decoder, table, PageTable(pages, page_tokens), table.seed, keep_answers)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        needed = (
            model.parameters + pages * page_tokens * 2 * model.kv_heads * model.head_dim * model.layers
        ) * dtype.itemsize
        what = (
            f"weights and {pages} KV blocks need {needed / 1e9:.1f} GB on {device.type}: {str(error).splitlines()[0]}"
        )
        raise BadInput(what, key="[engine] num_blocks") from None


def twin(one: TorchExecutor, table: TorchTable, pages: int) -> TorchExecutor:
    """An executor of the same weights with a cache and requests of its own: for calibration beside a run."""
    decoder, page_tokens = one.decoder, one.pages.page_tokens
    model, like = decoder.model, decoder.weights.embedding
    cache = _cache(model, pages, page_tokens, like.dtype, like.device)
    beside = Decoder(model, decoder.weights, cache, len(decoder.cos))
    return _assembled(beside, table, PageTable(pages, page_tokens), one.seed)


def attention_on(
    device: torch.device, table: TorchTable, model: Model, page_tokens: int, dtype: torch.dtype = torch.float32
) -> Attention:
    """FlashInfer on a GPU, plain torch elsewhere, unless [torch] attention says otherwise.

    "auto" takes plain torch for what FlashInfer has no kernel for, but not where FlashInfer is merely missing: that
    would measure another engine than the one asked about. BadInput then.
    """
    shape = HeadShape(model.heads, model.kv_heads, model.head_dim, page_tokens, dtype)
    unsuited = device.type == "cpu" or shape.lacking is not None
    if table.attention == "torch" or (table.attention == "auto" and unsuited):
        return TorchAttention(model.heads, model.kv_heads, model.head_dim, page_tokens)
    if device.type == "cpu":
        raise BadInput("FlashInfer needs a CUDA device", key="[torch] attention")
    return FlashInferAttention(shape, device)


def _cache(model: Model, pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """The KV cache; on CUDA with a spare page, the last."""
    stored = pages + 1 if device.type == "cuda" else pages
    return storage(model.layers, stored, page_tokens, model.kv_heads, model.head_dim, dtype, device)


def _assembled(
    decoder: Decoder, table: TorchTable, pages: PageTable, seed: int, keep_answers: bool = False
) -> TorchExecutor:
    """The executor around a decoder; on CUDA warm, and with graphs where FlashInfer attends."""
    like, graphs = decoder.weights.embedding, None
    attention = attention_on(like.device, table, decoder.model, pages.page_tokens, like.dtype)
    if like.device.type == "cuda":
        _warm_up(decoder, attention, pages.page_tokens)
    if isinstance(attention, FlashInferAttention):
        graphs = DecodeGraphs(decoder, attention, spare=pages.total)
    return TorchExecutor(decoder, attention, pages, graphs=graphs, seed=seed, keep_answers=keep_answers)


def _warm_up(decoder: Decoder, attention: Attention, page_tokens: int) -> None:
    """Run a chunk and some decodes in pages that are still free: kernels are loaded here, not in the first batch."""
    device = decoder.weights.embedding.device
    tokens = min(WARM_UP_TOKENS, len(decoder.cos))
    held = list(range(-(-tokens // page_tokens)))
    chunk = lay_out([], [(0, tokens, held)], page_tokens, device)
    decodes = lay_out([(1, [0])] * tokens, [], page_tokens, device)
    rows = torch.arange(tokens, device=device)
    try:
        for layout in (chunk, decodes):
            attention.plan(layout)
            decoder.forward(torch.zeros_like(rows), torch.zeros_like(rows), rows[-1:], attention)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        what = f"its kernels cannot be built or run (see python -m gpu_backend.kernels): {str(error).splitlines()[0]}"
        raise BadInput(what, key="[torch] attention") from error
