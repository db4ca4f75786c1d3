"""The roofline latency model: iteration times of any model on any device, from first principles.

Every kernel takes the longer of its arithmetic at the achievable FLOP/s and its memory traffic at the achievable
bandwidth (Williams et al. 2009); kernels of one device follow each other, nothing overlaps. No part is fitted to a
serving engine: the efficiencies are medians of public kernel measurements, and host time is zero unless given. Expect
tens of per cent of error, and use a calibrated profile where there is one.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

from pydantic import Field

from sim.executor import Spent, Step
from sim.hardware import MATRIX_BYTES, Device, Model
from sim.request import Batch
from sim.table import Count, NonNegative, Table

Share = Annotated[float, Field(gt=0, le=1)]
MOST_SHAPES = 1 << 16  # kept at a time
ACTIVATION_BYTES = 2  # of one element; activations are 16-bit whatever the weights are
SMALLEST_TILE = 16  # rows of a tensor core's smallest product


class Figures(Table):
    """What the model does not know from the catalogue."""

    compute_efficiency: Share = 0.74
    """Of the peak FLOP/s, in large GEMMs. Median over Vidur's public profiles of Llama-2 7B/70B and CodeLlama-34B at
    2,048 and 4,096 tokens: A100 0.75, A40 0.75, H100 0.73."""
    memory_efficiency: Share = 0.75
    """Of the peak bandwidth. Median over the same profiles at 1 and 32 tokens: A100 0.73, A40 0.76, H100 0.76."""
    kv_efficiency: Share | None = None
    """Of the peak bandwidth, where attention reads the KV cache; `memory_efficiency` where it is not given."""
    attention_efficiency: Share = 0.6
    """Of the peak FLOP/s, in prefill attention. Assumed; FlashAttention-2 (Dao 2023) reports 0.5 to 0.73 on an A100."""
    link_efficiency: Share = 0.8
    """Of the link bandwidth, in collectives. Assumed."""
    reduce_latency: NonNegative | None = None
    """Seconds of an all-reduce beside its traffic; the device's figure where it is not given."""
    overlap: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The share of the shorter of arithmetic and memory traffic that linear layers hide behind the longer: 1 is the
    roofline, with 0 they follow each other."""
    tile: Count = 128
    """Tokens are computed in multiples of so many: the steps of Sarathi-Serve's Fig. 6 and of Vidur's profiles. Fewer
    are computed in tiles of a power of two, from 16: what matrix kernels come in."""
    kernel: NonNegative = 3e-6
    """Seconds that each of three small kernels per layer (norms, activation) takes beside its traffic; the figure that
    aiconfigurator's system descriptions use."""
    step: NonNegative = 0.0
    """Host seconds per iteration and stage (scheduling, launching)."""
    sequence: NonNegative = 0.0
    """Host seconds per request in the batch and stage (sampling, detokenising)."""


class RooflineTable(Figures):
    """[latency] kind = "roofline"."""

    kind: Literal["roofline"]


@dataclass(slots=True)
class _Shape:
    """Seconds of an iteration apart from attention: per layer, for logits, of the host on each stage, between stages;
    what they are spent on; and how many iterations were like that."""

    layer: float
    logits: float
    host: float
    hop: float
    spent: Spent
    uses: int = 0


class Roofline:
    """Executes by arithmetic: `tp` devices per stage, `pp` stages. All rates below are seconds per unit, per layer."""

    def __init__(self, table: Figures, model: Model, device: Device, tp: int = 1, pp: int = 1) -> None:
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
        reads = device.memory_bandwidth * (table.kv_efficiency or table.memory_efficiency)
        self.kv_read = model.kv_bytes_per_token(tp, layers=1) / reads
        self.window = model.window
        self.windowed = model.windowed_layers / model.layers if model.window is not None else 0.0
        # all-reduces: a ring moves 2 (tp - 1) / tp of the data over each link
        vector = model.hidden * ACTIVATION_BYTES
        link = device.bandwidth_among(tp) * table.link_efficiency
        reduces = model.all_reduces_per_layer if tp > 1 else 0
        self.reduce_token = reduces * 2 * (tp - 1) / tp * vector / link
        latency = device.latency_among(tp) if table.reduce_latency is None else table.reduce_latency
        self.reduce_step = reduces * latency
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
        self._begin()

    def _begin(self) -> None:
        """Nothing was executed yet: what a run comes to."""
        self.shapes: dict[tuple[int, int], _Shape] = {}
        self.kv_tokens = self.pairs = self.attended = self.attention_read = 0.0
        self.folded = Spent()

    def execute(self, batch: Batch) -> Step:
        """The batch's time on each stage."""
        tokens = batch.decodes + batch.prefill_tokens
        rows = batch.decodes + len(batch.chunks)
        shape = self.shapes.get((tokens, rows)) or self._shape(tokens, rows)
        shape.uses += 1
        layer = shape.layer + self._attention(batch)
        if len(self.stages) == 1:
            return Step((self.layers * layer + shape.host + shape.logits,), shape.hop)
        seconds = [layers * layer + shape.host for layers in self.stages]
        seconds[-1] += shape.logits
        return Step(tuple(seconds), shape.hop)

    def linear(self, tokens: int) -> float:
        """Seconds of all layers' linear layers for so many tokens."""
        return self.layers * sum(self._linear(tokens))

    def parts(self, batch: Batch) -> dict[str, float]:
        """Seconds of one batch by what they are spent on."""
        return dict(zip(Spent._fields[:-2], self.work(batch), strict=False))

    def work(self, batch: Batch) -> Spent:
        """What one batch is spent on, and the work that it is; it does not count as executed."""
        alone = copy(self)
        alone._begin()
        alone.execute(batch)
        return alone.spent()

    def spent(self) -> Spent:
        """What all iterations so far were spent on."""
        total = self.folded.plus(
            Spent(
                compute=self.layers * self.attended,
                kv_reads=self.layers * self.attention_read,
                flops=self.flops_pair * self.pairs,
                bytes=self.layers * self.kv_read * self.kv_tokens * self.bytes_per_second,
            )
        )
        for shape in self.shapes.values():
            total = total.plus(shape.spent, shape.uses)
        return total

    def notes(self) -> list[str]:
        """Nothing beyond what the scenario says."""
        return []

    def _shape(self, tokens: int, rows: int) -> _Shape:
        """All of an iteration but its attention, which depends on these two counts alone."""
        if len(self.shapes) >= MOST_SHAPES:
            for shape in self.shapes.values():
                self.folded = self.folded.plus(shape.spent, shape.uses)
            self.shapes.clear()
        computed, read = self._linear(tokens)
        activations = self.activation_token * tokens + self.activation_step
        reduces = self.reduce_token * tokens + self.reduce_step
        logits = max(self.logits_row * rows, self.logits_read)
        by_arithmetic = self.logits_row * rows > self.logits_read
        host = self.table.step + self.table.sequence * rows
        hop = self.hop_token * tokens + self.hop_step
        layers, stages = self.layers, len(self.stages)
        spent = Spent(
            compute=layers * computed + (logits if by_arithmetic else 0.0),
            weight_reads=layers * read + (0.0 if by_arithmetic else logits),
            activations=layers * activations,
            communication=layers * reduces + hop * (stages - 1),
            host=stages * host,
            flops=self.flops_token * tokens + self.flops_row * rows,
            bytes=(layers * self._weights_read(tokens) + self.logits_read) * self.bytes_per_second,
        )
        shape = _Shape(computed + read + activations + reduces, logits, host, hop, spent)
        self.shapes[tokens, rows] = shape
        return shape

    def _experts_touched(self, tokens: int) -> float:
        """Expected distinct experts of a layer that a batch needs (Model.experts_touched)."""
        return self.experts * (1 - self.missed_by_one_token**tokens)

    def _weights_read(self, tokens: int) -> float:
        """Seconds that reading the weights of one layer would take, were there nothing else to do."""
        return self.projection_read + self._experts_touched(tokens) * self.expert_read

    def _linear(self, tokens: int) -> tuple[float, float]:
        """Seconds of one layer's linear layers, (bound by arithmetic, bound by reading weights)."""
        touched = self._experts_touched(tokens)
        each = tokens * self.active_experts / touched  # tokens of each expert
        projections = self._tiled(tokens) * self.projection_token, self.projection_read
        experts = touched * self._tiled(each) * self.expert_token, touched * self.expert_read
        exposed = 1 - self.table.overlap
        computed = read = 0.0
        for arithmetic, reading in (projections, experts):
            computed += arithmetic if arithmetic > reading else exposed * arithmetic
            read += reading if arithmetic <= reading else exposed * reading
        return computed, read

    def _tiled(self, tokens: float) -> int:
        """Rows that are computed for so many tokens."""
        tile = self.tile
        if tokens > tile // 2:
            return ceil(tokens / tile) * tile
        return min(tile, max(SMALLEST_TILE, 1 << (ceil(tokens) - 1).bit_length()))

    def _attention(self, batch: Batch) -> float:
        """Seconds of one layer's attention: each kernel's arithmetic or its reading of KV, whichever takes longer.

        Windowed layers count with their share of all layers; decodes with their mean context, an upper bound where
        some contexts are inside the window and others not.
        """
        window, decodes = self.window, batch.decodes
        kv: float = batch.context
        if window is not None and kv > decodes * window:
            kv -= self.windowed * (kv - decodes * window)
        seconds = self._longer(kv, kv)
        for chunk in batch.chunks:
            start, tokens = chunk.start, chunk.tokens
            pairs: float = tokens * (start + tokens / 2)
            length: float = start + tokens
            if window is not None and length > window:
                inside = min(max(window - start, 0), tokens)
                clipped = inside * (start + inside / 2) + (tokens - inside) * window
                pairs -= self.windowed * (pairs - clipped)
                length -= self.windowed * max(0, length - window - tokens)
            seconds += self._longer(pairs, length)
        return seconds

    def _longer(self, pairs: float, kv_tokens: float) -> float:
        """Seconds of a kernel over so many pairs of tokens that reads the KV of so many."""
        self.pairs += pairs
        self.kv_tokens += kv_tokens
        computed, read = pairs * self.pair, kv_tokens * self.kv_read
        if computed > read:
            self.attended += computed
            return computed
        self.attention_read += read
        return read
