"""Weights: random ones from a seed, or a folder of safetensors. Never pickle, never code from a model's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_backend.model import Layer, Weights
from sim.errors import BadInput
from sim.hardware import Model

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # narrower ones come with scales
Load = Callable[[str, tuple[int, ...]], torch.Tensor]


def random(model: Model, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weights:
    """Normal weights of std 0.02 from `seed` (GPT-2's initialisation), norms of 1: the same on every device."""
    generator = torch.Generator().manual_seed(seed)

    def load(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=generator).mul_(0.02).to(device=device, dtype=dtype)

    return _assemble(model, load)


def from_folder(model: Model, folder: Path, dtype: torch.dtype, device: torch.device) -> Weights:
    """The weights of a local Hugging Face folder: `model.safetensors`, or an index and its parts.

    BadInput for a missing package, folder, file or tensor, and for a tensor of another shape or quantised.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise BadInput("weights need the package safetensors: pip install safetensors", key="[torch] weights") from None
    places = _places(folder)
    files: dict[Path, Any] = {}
    used: set[str] = set()

    def load(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name == "lm_head.weight" and name not in places:
            raise BadInput(f"no tensor {name!r}; tie_word_embeddings is false", source=str(folder))
        if name not in places:
            raise BadInput(f"no tensor {name!r}", source=str(folder))
        used.add(name)
        path = places[name]
        try:
            if path not in files:
                files[path] = safe_open(path, framework="pt")
            tensor: torch.Tensor = files[path].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise BadInput(f"cannot be read: {error}", source=str(path)) from None
        if tensor.dtype not in DTYPES:
            what = f"tensor {name!r} is {str(tensor.dtype).removeprefix('torch.')}: quantised weights are not supported"
            raise BadInput(what, source=str(path))
        if tuple(tensor.shape) != shape:
            what = f"tensor {name!r} is {list(tensor.shape)}, {model.name} has {list(shape)}"
            raise BadInput(what, source=str(path))
        return tensor.to(device=device, dtype=dtype)

    loaded = _assemble(model, load)
    others = (name for name in sorted(places) if name.startswith("model.layers.") and not name.endswith(".inv_freq"))
    if unused := next((name for name in others if name not in used), None):
        raise BadInput(f"tensor {unused!r} has no place in {model.name}", source=str(places[unused]))
    return loaded


def _assemble(model: Model, load: Load) -> Weights:
    """All tensors under their Hugging Face names, stacked where that saves a multiplication."""
    embedding = load("model.embed_tokens.weight", (model.vocab, model.hidden))
    layers = tuple(_layer(model, f"model.layers.{index}.", load) for index in range(model.layers))
    norm = load("model.norm.weight", (model.hidden,))
    head = embedding if model.tied_embeddings else load("lm_head.weight", (model.vocab, model.hidden))
    return Weights(embedding, layers, norm, head)


def _layer(model: Model, prefix: str, load: Load) -> Layer:
    queries, keys, wide = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.intermediate
    hidden, attention, mlp = model.hidden, f"{prefix}self_attn.", f"{prefix}mlp."

    def stacked(names: dict[str, int], columns: tuple[int, ...], kind: str) -> torch.Tensor:
        return torch.cat([load(f"{name}.{kind}", (rows, *columns)) for name, rows in names.items()])

    projections = {f"{attention}q_proj": queries, f"{attention}k_proj": keys, f"{attention}v_proj": keys}
    return Layer(
        input_norm=load(f"{prefix}input_layernorm.weight", (hidden,)),
        qkv=stacked(projections, (hidden,), "weight"),
        qkv_bias=stacked(projections, (), "bias") if model.qkv_bias else None,
        output=load(f"{attention}o_proj.weight", (hidden, queries)),
        query_norm=load(f"{attention}q_norm.weight", (model.head_dim,)) if model.qk_norm else None,
        key_norm=load(f"{attention}k_norm.weight", (model.head_dim,)) if model.qk_norm else None,
        mlp_norm=load(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        gate_up=stacked({f"{mlp}gate_proj": wide, f"{mlp}up_proj": wide}, (hidden,), "weight"),
        down=load(f"{mlp}down_proj.weight", (hidden, wide)),
    )


def _places(folder: Path) -> dict[str, Path]:
    """Which file of the folder holds each tensor."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    try:
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: _inside(folder, str(file)) for name, file in names.items()}
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise BadInput(
            f"not an index of safetensors: {error}", source=str(index if index.is_file() else single)
        ) from None
    what = "not a folder" if not folder.is_dir() else "has no model.safetensors and no model.safetensors.index.json"
    raise BadInput(what, source=str(folder), key="[torch] weights")


def _inside(folder: Path, name: str) -> Path:
    """A part of the folder; an index may not point elsewhere. (A link may: Hugging Face's cache is made of them.)"""
    if name != Path(name).name:
        raise ValueError(f"{name!r} is not in the folder")
    return folder / name
