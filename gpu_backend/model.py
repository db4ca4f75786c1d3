"""The decoder: a Llama-family transformer in one file. Mistral, Yi, Llama 2 and 3 and Qwen3 differ by configuration.

RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021) in Hugging Face's half-split layout, grouped-query
attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020). Rows of a batch are tokens of any requests; only attention knows
which belong together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch.nn.functional import linear, rms_norm, silu

from gpu_backend.attention import Attention
from sim.errors import BadInput
from sim.hardware import Model


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block, [out, in]: `qkv` and `gate_up` are stacked so that each is one multiplication."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights; `head` is `embedding` where the model ties them."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor


class Decoder:
    """Computes logits of rows of tokens. `cache` has a tensor per layer (`gpu_backend.cache.storage`)."""

    def __init__(self, model: Model, weights: Weights, cache: list[torch.Tensor], positions: int) -> None:
        check_supported(model)
        self.model = model
        self.weights = weights
        self.cache = cache
        self.cos, self.sin = rotary_table(model, positions, weights.embedding)

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Logits, [len(sampled), vocab], of the rows that `sampled` names; `tokens` and `positions` are [rows] int64.

        `attention` has planned the batch; the KV of every row is in the cache afterwards.
        """
        hidden = self.weights.embedding.index_select(0, tokens)
        cos, sin = self.cos.index_select(0, positions)[:, None], self.sin.index_select(0, positions)[:, None]
        for layer, cache in zip(self.weights.layers, self.cache, strict=True):
            hidden = hidden + self._attend(layer, cache, self._norm(hidden, layer.input_norm), cos, sin, attention)
            gate, up = linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, layer.down)
        return linear(self._norm(hidden.index_select(0, sampled), self.weights.norm), self.weights.head)

    def _attend(
        self,
        layer: Layer,
        cache: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        model, rows = self.model, len(hidden)
        projected = linear(hidden, layer.qkv, layer.qkv_bias).view(rows, -1, model.head_dim)
        query, key, value = torch.split(projected, [model.heads, model.kv_heads, model.kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        answer = attention.run(cache, rotated(query, cos, sin), rotated(key, cos, sin), value)
        return linear(answer.reshape(rows, -1), layer.output)

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, (rows.shape[-1],), weight, self.model.norm_eps)


def rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [rows, heads, head_dim] by their positions: dimension i pairs with i + head_dim / 2."""
    left, right = rows.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def rotary_table(model: Model, positions: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [positions, head_dim / 2], in the dtype and on the device of `like`.

    With `rope_scaling` the frequencies are those of Llama 3.1: long wavelengths are stretched by its factor, short ones
    stay, those between are blended (Meta's reference implementation; `rope_type` "llama3" of Hugging Face).
    """
    half = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
    frequencies = model.rope_theta**-half
    if model.rope_scaling is not None:
        factor, low, high, original = model.rope_scaling
        turns = original * frequencies / (2 * pi)
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (blend + (1 - blend) / factor)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return angles.cos().to(like), angles.sin().to(like)


def check_supported(model: Model) -> None:
    """BadInput for a model that this decoder does not compute."""
    lacking = {
        "a mixture of experts": bool(model.experts),
        "an MLP without a gate": not model.gated,
        "parallel attention": model.parallel_attention,
        "LayerNorm": model.norm_bias,
        "biases in the MLP or after attention": model.mlp_bias or model.output_bias,
        "windowed layers": bool(model.windowed_layers),
        f"{model.rope_kind} rotary scaling": model.rope_kind not in ("default", "llama3"),
    }
    if found := [what for what, has in lacking.items() if has]:
        raise BadInput(f"the engine does not run {model.name}: it has {' and '.join(found)}", key="[model] name")
