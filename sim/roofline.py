"""The roofline latency model: iteration times of any model on any device, from first principles.

Every kernel takes the longer of its arithmetic at the achievable FLOP/s and its memory traffic at the achievable
bandwidth (Williams et al. 2009); kernels of one device follow each other, nothing overlaps. No part is fitted to a
serving engine: the efficiencies are medians of public kernel measurements, and host time is zero unless given. Expect
tens of per cent of error, and use a calibrated profile where there is one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sim.executor import Spent, Step
from sim.hardware import MATRIX_BYTES, Device, Model
from sim.request import Batch
from sim.table import Count, NonNegative, Table

Share = Annotated[float, Field(gt=0, le=1)]
ACTIVATION_BYTES = 2  # of one element; activations are 16-bit whatever the weights are


class RooflineTable(Table):
    """[latency] kind = "roofline"."""

    kind: Literal["roofline"]
    compute_efficiency: Share = 0.74
    """Of the peak FLOP/s, in large GEMMs. Median over Vidur's public profiles of Llama-2 7B/70B and CodeLlama-34B at
    2,048 and 4,096 tokens: A100 0.75, A40 0.75, H100 0.73."""
    memory_efficiency: Share = 0.75
    """Of the peak bandwidth. Median over the same profiles at 1 and 32 tokens: A100 0.73, A40 0.76, H100 0.76."""
    attention_efficiency: Share = 0.6
    """Of the peak FLOP/s, in prefill attention. Assumed; FlashAttention-2 (Dao 2023) reports 0.5 to 0.73 on an A100."""
    link_efficiency: Share = 0.8
    """Of the link bandwidth, in collectives. Assumed."""
    tile: Count = 128
    """Tokens are computed in multiples of so many: the steps of Sarathi-Serve's Fig. 6 and of Vidur's profiles."""
    kernel: NonNegative = 3e-6
    """Seconds that each of three small kernels per layer (norms, activation) takes beside its traffic; the figure that
    aiconfigurator's system descriptions use."""
    step: NonNegative = 0.0
    """Host seconds per iteration and stage (scheduling, launching)."""
    sequence: NonNegative = 0.0
    """Host seconds per request in the batch and stage (sampling, detokenising)."""


class Roofline:
    """Executes by arithmetic: `tp` devices per stage, `pp` stages. All rates below are seconds per unit, per layer."""

    def __init__(self, table: RooflineTable, model: Model, device: Device, tp: int = 1, pp: int = 1) -> None:
        model.check_parallel(tp, pp)
        self.table = table
        self.model = model
        self.tp = tp
        self.stages = model.stage_layers(pp)
        self.layers = model.layers
        self.tile = table.tile
        bandwidth = device.memory_bandwidth * table.memory_efficiency
        gemm = device.peak_flops(model.dtype) * table.compute_efficiency
        # linear layers: seconds per (tiled) token, and to read the weights once
        experts = max(1, model.experts)
        self.active_experts = model.experts_per_token if model.experts else 1
        mlp = (3 if model.gated else 2) * model.hidden * model.intermediate / tp  # weights of one expert on one device
        attention = (
            model.layer_weight_bytes(tp, 0.0)
            if model.experts
            else model.layer_weight_bytes(tp) - (mlp * MATRIX_BYTES[model.dtype])
        )
        heads, kv_heads = model.heads / tp, model.kv_heads_per_device(tp)
        projections = model.hidden * model.head_dim * (2 * heads + 2 * kv_heads) + model.experts * model.hidden
        self.projection_token = 2 * projections / gemm
        self.projection_read = attention / bandwidth
        self.expert_token = 2 * mlp / gemm
        self.expert_read = mlp * MATRIX_BYTES[model.dtype] / bandwidth
        self.experts = experts
        self.missed_by_one_token = 1 - model.experts_per_token / experts if model.experts else 0.0
        # norms, rotary embedding, activation function: traffic per token, and their launches
        vectors = 16 * model.hidden + 6 * self.active_experts * model.intermediate / tp
        self.activation_token = vectors / bandwidth
        self.activation_step = 3 * table.kernel
        # attention: per pair of tokens, per KV token read
        self.pair = 4 * heads * model.head_dim / (device.float16_flops * table.attention_efficiency)
        self.kv_read = model.kv_bytes_per_token(tp, layers=1) / bandwidth
        self.window = model.window
        self.windowed = model.windowed_layers / model.layers if model.window is not None else 0.0
        # all-reduces: a ring moves 2 (tp - 1) / tp of the data over each link
        vector = model.hidden * ACTIVATION_BYTES
        link = device.bandwidth_among(tp) * table.link_efficiency
        reduces = model.all_reduces_per_layer if tp > 1 else 0
        self.reduce_token = reduces * 2 * (tp - 1) / tp * vector / link
        self.reduce_step = reduces * device.latency_among(tp)
        # once per iteration: logits on the last stage, hand-over between stages, the host
        self.logits_row = model.lm_head_flops_per_row / tp / (device.float16_flops * table.compute_efficiency)
        self.logits_read = model.lm_head_bytes(tp) / bandwidth
        self.hop_token = vector / (device.bandwidth_among(tp * pp) * table.link_efficiency) if pp > 1 else 0.0
        self.hop_step = device.latency_among(tp * pp) if pp > 1 else 0.0
        # the work itself, over all devices, for MFU and MBU
        self.flops_token = model.linear_flops_per_token
        self.flops_row = model.lm_head_flops_per_row
        self.flops_pair = 4 * model.heads * model.head_dim * model.layers
        self.bytes_per_second = bandwidth * tp

    def execute(self, batch: Batch) -> Step:
        """The batch's time on each stage, and what it was spent on."""
        tokens = batch.decodes + batch.prefill_tokens
        rows = batch.decodes + len(batch.chunks)
        computed, read = self._linear(tokens)
        pairs, kv_tokens, attended, attention_read = self._attention(batch)
        activations = self.activation_token * tokens + self.activation_step
        reduces = self.reduce_token * tokens + self.reduce_step
        logits_computed, logits_read = self.logits_row * rows, self.logits_read
        logits = max(logits_computed, logits_read)
        layer = computed + read + attended + attention_read + activations + reduces
        host = self.table.step + self.table.sequence * rows
        seconds = [layers * layer + host for layers in self.stages]
        seconds[-1] += logits
        hop = self.hop_token * tokens + self.hop_step
        layers, stages = self.layers, len(seconds)
        by_arithmetic = logits_computed > logits_read
        return Step(
            tuple(seconds),
            hop,
            Spent(
                compute=layers * (computed + attended) + (logits if by_arithmetic else 0.0),
                weight_reads=layers * read + (0.0 if by_arithmetic else logits),
                kv_reads=layers * attention_read,
                activations=layers * activations,
                communication=layers * reduces + hop * (stages - 1),
                host=stages * host,
                flops=self.flops_token * tokens + self.flops_row * rows + self.flops_pair * pairs,
                bytes=(layers * (self._weights_read(tokens) + self.kv_read * kv_tokens) + logits_read)
                * self.bytes_per_second,
            ),
        )

    def _experts_touched(self, tokens: int) -> float:
        """Expected distinct experts of a layer that a batch needs (Model.experts_touched)."""
        return self.experts * (1 - self.missed_by_one_token**tokens)

    def _weights_read(self, tokens: int) -> float:
        """Seconds that reading the weights of one layer would take, were there nothing else to do."""
        return self.projection_read + self._experts_touched(tokens) * self.expert_read

    def _linear(self, tokens: int) -> tuple[float, float]:
        """Seconds of one layer's linear layers, (bound by arithmetic, bound by reading weights)."""
        tile = self.tile
        touched = self._experts_touched(tokens)
        each = tokens * self.active_experts / touched  # tokens of each expert
        projected = -(-tokens // tile) * tile * self.projection_token
        expert = touched * -(-each // tile) * tile * self.expert_token
        expert_read = touched * self.expert_read
        computed = (projected if projected > self.projection_read else 0.0) + (expert if expert > expert_read else 0.0)
        read = (self.projection_read if projected <= self.projection_read else 0.0) + (
            expert_read if expert <= expert_read else 0.0
        )
        return computed, read

    def _attention(self, batch: Batch) -> tuple[float, float, float, float]:
        """Per layer: pairs of tokens, KV tokens read, seconds bound by arithmetic, seconds bound by reading KV.

        Windowed layers count with their share of all layers; decodes with their mean context, an upper bound where
        some contexts are inside the window and others not.
        """
        window, windowed, decodes = self.window, self.windowed, batch.decodes
        kv: float = batch.context
        if window is not None and kv > decodes * window:
            kv -= windowed * (kv - decodes * window)
        pairs = kv
        attended, read = 0.0, kv * self.kv_read
        if kv * self.pair > read:
            attended, read = kv * self.pair, 0.0
        for chunk in batch.chunks:
            start, tokens = chunk.start, chunk.tokens
            here: float = tokens * (start + tokens / 2)
            length: float = start + tokens
            if window is not None and length > window:
                inside = min(max(window - start, 0), tokens)
                clipped = inside * (start + inside / 2) + (tokens - inside) * window
                here -= windowed * (here - clipped)
                length -= windowed * max(0, length - window - tokens)
            pairs += here
            kv += length
            if here * self.pair > length * self.kv_read:
                attended += here * self.pair
            else:
                read += length * self.kv_read
        return pairs, kv, attended, read
