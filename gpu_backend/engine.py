"""The engine, made ready for a scenario: weights, cache and attention on the device that [torch] names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_backend import weights
from gpu_backend.attention import Attention, TorchAttention
from gpu_backend.cache import PageTable, storage
from gpu_backend.executor import TorchExecutor
from gpu_backend.model import Decoder, check_supported
from sim.errors import BadInput
from sim.executor import Executor
from sim.hardware import Dtype, Model
from sim.schema import TorchTable
from sim.simulate import Plan

ON_GPU: dict[Dtype, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}
WARM_UP_TOKENS = (1, 8, 64, 256)


def executor(plan: Plan) -> Callable[[], Executor]:
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
    blocks, block_tokens = plan.deployment.limits.num_blocks, plan.deployment.limits.block_tokens
    return lambda: build(
        model,
        table,
        pages=blocks,
        page_tokens=block_tokens,
        positions=plan.deployment.limits.max_model_tokens,
        device=device,
        dtype=dtype_on(device, model.dtype),
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
    """An executor with its weights and its cache in place, and warm."""
    from pathlib import Path

    torch.set_num_threads(table.threads)
    try:
        if table.weights is None:
            loaded = weights.random(model, dtype, device, table.seed)
        else:
            loaded = weights.from_folder(model, Path(str(folder)) / table.weights, dtype, device)
        cache = storage(model.layers, pages, page_tokens, model.kv_heads, model.head_dim, dtype, device)
        decoder = Decoder(model, loaded, cache, min(positions, pages * page_tokens))
    except (torch.OutOfMemoryError, RuntimeError) as error:
        needed = (
            model.parameters + pages * page_tokens * 2 * model.kv_heads * model.head_dim * model.layers
        ) * dtype.itemsize
        what = (
            f"weights and {pages} KV blocks need {needed / 1e9:.1f} GB on {device.type}: {str(error).splitlines()[0]}"
        )
        raise BadInput(what, key="[engine] num_blocks") from None
    return TorchExecutor(
        decoder,
        attention_on(device, table, model, page_tokens),
        PageTable(pages, page_tokens),
        seed=table.seed,
        keep_answers=keep_answers,
    )


def attention_on(device: torch.device, table: TorchTable, model: Model, page_tokens: int) -> Attention:
    """FlashInfer on a GPU, plain torch elsewhere, unless [torch] attention says otherwise."""
    if table.attention == "torch" or (table.attention == "auto" and device.type == "cpu"):
        return TorchAttention(model.heads, model.kv_heads, model.head_dim, page_tokens)
    raise BadInput("FlashInfer needs a CUDA device", key="[torch] attention")
