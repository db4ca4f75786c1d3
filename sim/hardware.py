"""What a model and a device are: facts, and the arithmetic that follows from them alone.

Bytes, tokens, seconds, FLOP/s throughout; one multiply-add is two FLOPs. Formulas for the decoder block follow
Vaswani et al. 2017 with grouped-query attention (Ainslie et al. 2023); tensor parallelism splits heads, the MLP's inner
dimension and the vocabulary (Megatron-LM, Shoeybi et al. 2019), pipeline parallelism splits layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sim import catalogue, hf
from sim.errors import BadInput
from sim.table import Count, NonNegative, Positive, Table

Dtype = Literal["float16", "bfloat16", "fp8", "int4"]
KvDtype = Literal["float16", "bfloat16", "fp8"]

# Bytes of one weight of an attention or MLP matrix. int4 is the AWQ / GPTQ layout: groups of 128 weights share a 16-bit
# scale and a 4-bit zero point. fp8 scales are too few to count.
MATRIX_BYTES: dict[Dtype, float] = {"float16": 2, "bfloat16": 2, "fp8": 1, "int4": 0.5 + 2.5 / 128}
# Embeddings, the lm_head, routers, norms and biases stay in 16 bits in published fp8 and int4 checkpoints.
PLAIN_BYTES = 2
KV_BYTES: dict[KvDtype, int] = {"float16": 2, "bfloat16": 2, "fp8": 1}
# The KV cache stays in 16 bits unless asked otherwise, as in vLLM (kv_cache_dtype "auto").
DEFAULT_KV: dict[Dtype, KvDtype] = {"float16": "float16", "bfloat16": "bfloat16", "fp8": "float16", "int4": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer. A mixture of experts has `experts` MLPs per layer, each `intermediate` wide."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_limit: int  # positions the model was trained for (max_position_embeddings)
    tied_embeddings: bool = False  # the lm_head is the embedding table
    gated: bool = True  # SwiGLU: gate, up and down; otherwise up and down
    parallel_attention: bool = False  # attention and MLP side by side, summed once (Falcon)
    norms_per_layer: int = 2
    norm_bias: bool = False  # LayerNorm rather than RMSNorm
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    router_bias: bool = False
    attention_sinks: bool = False  # one learned logit per head (gpt-oss)
    experts: int = 0  # 0: one dense MLP
    experts_per_token: int = 0
    window: int | None = None  # tokens that a windowed layer attends to
    windowed_layers: int = 0
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    rope_scaling: tuple[float, float, float, float] | None = None  # Llama 3.1: factor, low, high, original positions
    rope_kind: str = "default"  # how positions are stretched; the engine runs "default" and "llama3"
    norm_eps: float = 1e-5
    dtype: Dtype = "float16"
    kv_dtype: KvDtype = "float16"
    published_parameters: int | None = None
    source: str = ""

    # Parameters.

    @property
    def embedding_parameters(self) -> int:
        """Elements of one vocab × hidden table."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Every element of the checkpoint; equals the published safetensors count for every catalogue model."""
        return self._outside_layers + self.layers * (self._layer_matrices(1, self.experts) + self._layer_plain(1))

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: all but the experts it is not routed to.

        Both vocabulary tables count, as in the figures for Mixtral (12.9 B) and Qwen3; gpt-oss's card leaves the
        embedding table out (subtract `embedding_parameters`).
        """
        idle = (self.experts - self.experts_per_token) * self._expert_parameters(with_bias=True) if self.experts else 0
        return self.parameters - self.layers * idle

    @property
    def linear_parameters(self) -> int:
        """Weights of all layers' matrices (attention, router, MLP) that one token is multiplied by."""
        router = self.experts * self.hidden
        return self.layers * (self._layer_matrices(1, self.experts_per_token) + router)

    @property
    def _outside_layers(self) -> int:
        tables = 1 if self.tied_embeddings else 2
        return tables * self.embedding_parameters + self._norm_parameters

    @property
    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm_bias else 1)

    def _expert_parameters(self, with_bias: bool) -> int:
        """One MLP: gate, up and down (or up and down), with its biases or without."""
        rows = 2 if self.gated else 1
        bias = rows * self.intermediate + self.hidden if with_bias and self.mlp_bias else 0
        return (rows + 1) * self.hidden * self.intermediate + bias

    def _layer_matrices(self, tp: int, experts: float) -> int:
        """Matrix weights of one layer on one of `tp` devices, counting so many experts (of a dense model: its MLP)."""
        heads, kv_heads = self.heads // tp, self.kv_heads_per_device(tp)
        attention = self.hidden * self.head_dim * (2 * heads + 2 * kv_heads)
        return attention + round((experts if self.experts else 1) * self._expert_parameters(with_bias=False) / tp)

    def _layer_plain(self, tp: int) -> int:
        """Norms, biases, router and sinks of one layer; biases of split outputs are split, the rest is replicated."""
        norms = self.norms_per_layer * self._norm_parameters + (2 * self.head_dim if self.qk_norm else 0)
        qkv = (self.heads // tp + 2 * self.kv_heads_per_device(tp)) * self.head_dim if self.qkv_bias else 0
        output = self.hidden if self.output_bias else 0
        rows = (2 if self.gated else 1) * self.intermediate // tp
        mlp = (rows + self.hidden) * max(1, self.experts) if self.mlp_bias else 0
        router = self.experts * self.hidden + (self.experts if self.router_bias else 0)
        sinks = self.heads // tp if self.attention_sinks else 0
        return norms + qkv + output + mlp + router + sinks

    # Parallelism.

    def check_parallel(self, tp: int, pp: int) -> None:
        """BadInput unless heads, KV heads and the MLP split evenly over `tp` devices and `pp` stages all get layers."""
        if not self._splits(tp):
            able = ", ".join(str(degree) for degree in range(1, self.heads + 1) if self._splits(degree))
            raise BadInput(
                f"{self.name} cannot be split {tp} ways ({self.heads} heads, {self.kv_heads} KV heads, "
                f"MLP {self.intermediate}); possible: {able}",
                key="[deployment] tensor_parallel",
            )
        if not 1 <= pp <= self.layers:
            raise BadInput(
                f"{pp} stages for the {self.layers} layers of {self.name}; possible: 1 to {self.layers}",
                key="[deployment] pipeline_parallel",
            )

    def can_split(self, tp: int, pp: int) -> bool:
        """Whether `check_parallel` would pass."""
        return self._splits(tp) and 1 <= pp <= self.layers

    def _splits(self, tp: int) -> bool:
        """KV heads either split evenly or are replicated evenly (vLLM's rule)."""
        whole = tp >= 1 and self.heads % tp == 0 and self.intermediate % tp == 0
        return whole and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)

    def kv_heads_per_device(self, tp: int) -> int:
        """KV heads that one of `tp` devices holds; below one each they are replicated, as in vLLM."""
        return max(1, self.kv_heads // tp)

    def stage_layers(self, pp: int) -> tuple[int, ...]:
        """Layers of each pipeline stage, first to last: the first layers % pp stages get one more.

        The last stage, which also holds the lm_head, is then never the longer one.
        """
        share, more = divmod(self.layers, pp)
        return tuple(share + (stage < more) for stage in range(pp))

    @property
    def all_reduces_per_layer(self) -> int:
        """All-reduces of hidden × tokens elements in one layer under tensor parallelism (Megatron-LM: two)."""
        return 1 if self.parallel_attention else 2

    # Bytes.

    @property
    def weight_bytes(self) -> float:
        """The whole model's weights in `dtype`."""
        layer = self._layer_matrices(1, self.experts) * MATRIX_BYTES[self.dtype] + self._layer_plain(1) * PLAIN_BYTES
        return self.layers * layer + self._outside_layers * PLAIN_BYTES

    def layer_weight_bytes(self, tp: int = 1, tokens: float | None = None) -> float:
        """Weights of one layer on one of `tp` devices; given `tokens`, what a batch of so many should read.

        A batch reads all of a dense layer, but only the experts it touches of a mixture.
        """
        experts = self.experts if tokens is None else self.experts_touched(tokens)
        return self._layer_matrices(tp, experts) * MATRIX_BYTES[self.dtype] + self._layer_plain(tp) * PLAIN_BYTES

    def lm_head_bytes(self, tp: int = 1) -> float:
        """The lm_head (or the embedding table) on one of `tp` devices; the vocabulary is split."""
        return self.embedding_parameters * PLAIN_BYTES / tp

    def stage_weight_bytes(self, tp: int, pp: int, stage: int) -> float:
        """Weights on one device of pipeline stage `stage` (from 0): its layers, the embedding table on the first stage,
        the final norm and the lm_head on the last; a tied table is stored once only where both are one stage.
        """
        first, last = stage == 0, stage == pp - 1
        tables = first + last - (first and last and self.tied_embeddings)
        norm = self._norm_parameters * PLAIN_BYTES if last else 0
        return self.stage_layers(pp)[stage] * self.layer_weight_bytes(tp) + tables * self.lm_head_bytes(tp) + norm

    def kv_bytes_per_token(self, tp: int = 1, layers: int | None = None) -> int:
        """Key and value of one token on one of `tp` devices, over `layers` layers (default: all of them).

        2 · KV heads · head_dim · bytes per layer. Windowed layers count in full: one block pool for all layers keeps
        every token of a request.
        """
        per_layer = 2 * self.kv_heads_per_device(tp) * self.head_dim * KV_BYTES[self.kv_dtype]
        return per_layer * (self.layers if layers is None else layers)

    def kv_read_bytes(self, context: float) -> float:
        """KV bytes that one decode at `context` reads, all layers, whole model; a windowed layer reads its window."""
        return self.kv_bytes_per_token(layers=1) * self._over_layers(context, self._in_window(context))

    # FLOPs.

    @property
    def linear_flops_per_token(self) -> int:
        """FLOPs of all layers' matrices for one token: 2 per weight that it meets (Kaplan et al. 2020, section 2.1)."""
        return 2 * self.linear_parameters

    @property
    def lm_head_flops_per_row(self) -> int:
        """FLOPs of the lm_head for one row; only rows that sample a token need it."""
        return 2 * self.embedding_parameters

    def attention_flops_prefill(self, computed: float, chunk: float) -> float:
        """Scores and weighted values of a chunk of `chunk` tokens after `computed` ones, all layers, causal.

        4 · heads · head_dim · chunk · (computed + chunk / 2) per layer: FlashAttention's count (Dao 2023, section 4.1).
        In a windowed layer no token attends to more than `window`.
        """
        pairs = chunk * (computed + chunk / 2)
        clipped = pairs
        if self.window is not None:
            inside = min(max(self.window - computed, 0), chunk)  # tokens whose context is shorter than the window
            clipped = inside * (computed + inside / 2) + (chunk - inside) * self.window
        return 4 * self.heads * self.head_dim * self._over_layers(pairs, clipped)

    def attention_flops_decode(self, context: float) -> float:
        """Scores and weighted values of one decode at `context`, all layers: 4 · heads · head_dim · context each."""
        return 4 * self.heads * self.head_dim * self._over_layers(context, self._in_window(context))

    def _in_window(self, context: float) -> float:
        return context if self.window is None else min(context, self.window)

    def _over_layers(self, full: float, windowed: float) -> float:
        return (self.layers - self.windowed_layers) * full + self.windowed_layers * windowed

    def experts_touched(self, tokens: float) -> float:
        """Distinct experts of a layer that `tokens` tokens are expected to need: E · (1 − (1 − k / E)^T).

        Tokens choose k of E independently and evenly, an assumption that routers are trained towards; 0 if dense.
        """
        if not self.experts:
            return 0.0
        missed = float((1 - self.experts_per_token / self.experts) ** tokens)
        return self.experts * (1 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator: dense peaks in FLOP/s, bandwidths in bytes/s and one way per device (catalogue/devices.toml)."""

    name: str
    memory_bytes: int  # the data sheet's
    usable_bytes: int  # what the driver lets a process see; engines take their memory fraction of this
    memory_bandwidth: float
    float16_flops: float  # bfloat16 too
    fp8_flops: float | None = None
    int8_flops: float | None = None
    multiprocessors: int
    link_bandwidth: float  # among the link_group devices that NVLink, xGMI or a bridge joins
    link_group: int
    link_latency: float  # an assumption
    host_bandwidth: float  # PCIe
    devices_per_node: int
    inter_node_bandwidth: float  # an assumption
    inter_node_latency: float  # an assumption
    source: str = ""

    def peak_flops(self, dtype: Dtype) -> float:
        """The dense peak that matrices in `dtype` run at; weights stored narrower than the device can multiply (int4
        always, fp8 before Ada and Hopper) are widened and run at the float16 peak.
        """
        return self.fp8_flops if dtype == "fp8" and self.fp8_flops is not None else self.float16_flops

    def bandwidth_among(self, devices: int) -> float:
        """Bytes/s one way per device in a group of so many: the widest kind of link that the group must cross."""
        if devices <= self.link_group:
            return self.link_bandwidth
        return self.host_bandwidth if devices <= self.devices_per_node else self.inter_node_bandwidth

    def latency_among(self, devices: int) -> float:
        """Seconds before the first byte arrives in a group of so many devices."""
        return self.link_latency if devices <= self.devices_per_node else self.inter_node_latency


class ModelTable(Table):
    """[model]: exactly one of a catalogue name and a Hugging Face config.json; dtypes of weights and KV cache."""

    name: str | None = None
    hf_config: str | None = None
    dtype: Dtype = "float16"
    kv_dtype: KvDtype | None = None


class DeviceTable(Table):
    """[device]: a catalogue name; every other key overrides that figure of the entry."""

    name: str
    memory_bytes: Positive | None = None
    usable_bytes: Positive | None = None  # where only memory_bytes is given: the same
    memory_bandwidth: Positive | None = None
    float16_flops: Positive | None = None
    fp8_flops: Positive | None = None
    int8_flops: Positive | None = None
    multiprocessors: Count | None = None
    link_bandwidth: Positive | None = None
    link_group: Count | None = None
    link_latency: NonNegative | None = None
    host_bandwidth: Positive | None = None
    devices_per_node: Count | None = None
    inter_node_bandwidth: Positive | None = None
    inter_node_latency: NonNegative | None = None


def model(table: ModelTable, base_dir: Path) -> Model:
    """The model that [model] names; `hf_config` is relative to `base_dir`. BadInput for what cannot be used."""
    kv_dtype = table.kv_dtype or DEFAULT_KV[table.dtype]
    if (table.name is None) == (table.hf_config is None):
        raise BadInput("give exactly one of name and hf_config", key="[model]")
    if table.hf_config is not None:
        return Model(**hf.read(base_dir / table.hf_config), dtype=table.dtype, kv_dtype=kv_dtype)
    return Model(**catalogue.entry("model", table.name or ""), dtype=table.dtype, kv_dtype=kv_dtype)


def device(table: DeviceTable) -> Device:
    """The device that [device] names, with the overridden figures in place; BadInput for an unknown name."""
    given = table.model_dump(exclude={"name"}, exclude_none=True)
    if "memory_bytes" in given:
        given = {"usable_bytes": given["memory_bytes"]} | given
    given |= {key: int(given[key]) for key in ("memory_bytes", "usable_bytes") if key in given}
    return Device(**catalogue.entry("device", table.name) | given)
