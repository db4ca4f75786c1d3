"""An iteration's time, composed from the kernel tables: the sum of its kernels, with no overlap and no host time.

For L layers of hidden size h and MLP width I on one of tp devices, T tokens, G(m, n, k) a GEMM, M(bytes) a small
operation, C and D prefill and decode attention, AR an all-reduce:

    linear    L · [G(T, (nq + 2 nkv) d, h) + G(T, h, nq d) + G(T, 2 I / tp, h) + G(T, h, I / tp)]
    logits    G(requests, V / tp, h)
    small     L · norms · M(8 h T) + L · M(6 T I / tp) + M(2 h T)
    attention L · Σ over chunks of C(1, m0 + m) · (1 − m0² / (m0 + m)²) + L · D(batch, mean context)
    network   (all-reduces of a layer · L + 1) · AR(T h)

Beyond these: n chunks together cost what n sequences of their length cost in one launch; a chunk costs no less than one
token at its end does, nor than the chunk alone; experts come from their own table, and their router is a GEMM; a layer
with a window attends to no more than the window. GEMMs of the lm_head and the router run in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from calibrate import kernels
from calibrate.kernels import HALF
from calibrate.surface import Curve, Mixture
from calibrate.tables import Tables
from sim.hardware import Model

Chunks = Sequence[tuple[int, int]]  # (m0, m): tokens computed before, tokens now
_FOUND: WeakKeyDictionary[Tables, dict[tuple[str, int, str | None], Composition]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Attention:
    """Prefill and decode attention of so many layers, which attend to `window` tokens (0: to all)."""

    layers: int
    window: int
    context: Mixture
    generation: Mixture

    def decode(self, decodes: int, mean: float) -> float:
        """Seconds of the decodes at their mean context."""
        return self.layers * self.generation.at(decodes, min(mean, self.window) if self.window else mean)

    def prefill(self, chunks: Chunks) -> float:
        """Seconds of the chunks."""
        return self.layers * sum(self._chunk(start, tokens, len(chunks)) for start, tokens in chunks)

    def _chunk(self, start: int, tokens: int, beside: int) -> float:
        start = min(start, self.window) if self.window else start
        end = start + tokens
        whole = self.context.at(beside, end) / beside
        if not start:
            return whole
        share = 1 - self._pairs(start) / self._pairs(end)
        last = self.generation.at(beside, min(end, self.window) if self.window else end) / beside
        return max(whole * share, min(last, whole), self.context.at(beside, tokens) / beside)

    def _pairs(self, tokens: float) -> float:
        """Pairs of a token and one before it that it attends to."""
        inside = min(tokens, self.window) if self.window else tokens
        return inside * inside / 2 + (tokens - inside) * self.window


@dataclass(frozen=True, slots=True)
class Composition:
    """One model's kernels on one system, found once; `parts` adds them up for a batch."""

    tables: Tables
    model: Model
    tp: int
    linears: tuple[tuple[int, Curve], ...]  # how often per iteration, by tokens
    lm_head: Curve  # by requests
    attentions: tuple[Attention, ...]
    reduce: Curve | None

    def parts(self, decodes: int, context: float, chunks: Chunks) -> dict[str, float]:
        """Seconds of each kind of kernel in one iteration; `context` is the sum of the decodes' KV tokens."""
        model, memory = self.model, self.tables.memory_seconds
        tokens = decodes + sum(tokens for _, tokens in chunks)
        small = model.layers * model.norms_per_layer * memory(8 * model.hidden * tokens)
        if not model.experts:
            small += model.layers * memory(6 * tokens * model.intermediate / self.tp)
        attention = sum(one.prefill(chunks) for one in self.attentions) if chunks else 0.0
        if decodes:
            attention += sum(one.decode(decodes, context / decodes) for one in self.attentions)
        reduces = model.all_reduces_per_layer * model.layers + 1
        return {
            "linear": sum(times * curve.at(tokens) for times, curve in self.linears),
            "logits": self.lm_head.at(decodes + len(chunks)),
            "small": small + memory(2 * model.hidden * tokens),
            "attention": attention,
            "network": reduces * self.reduce.at(tokens * model.hidden) if self.reduce else 0.0,
        }


def composition(tables: Tables, model: Model, tp: int = 1, dtype: str | None = None) -> Composition:
    """The kernels that `model` needs on one of `tp` devices, found once; `dtype` (of the weights) is the model's by
    default, or any that the tables name. BadInput where the tables cannot say."""
    found, key = _FOUND.setdefault(tables, {}), (repr(model), tp, dtype)
    if key not in found:
        found[key] = _compose(tables, model, tp, dtype or model.dtype)
    return found[key]


def _compose(tables: Tables, model: Model, tp: int, dtype: str) -> Composition:
    model.check_parallel(tp, 1)
    hidden, layers = model.hidden, model.layers
    heads, kv_heads = model.heads // tp, model.kv_heads_per_device(tp)
    inner = heads * model.head_dim
    shapes = [(dtype, inner + 2 * kv_heads * model.head_dim, hidden), (dtype, hidden, inner)]
    if model.experts:
        shapes.append((HALF[0], model.experts, hidden))
    else:
        width = model.intermediate // tp
        shapes += [(dtype, 2 * width if model.gated else width, hidden), (dtype, hidden, width)]
    linears = [(layers, kernels.gemm(tables, *shape)) for shape in shapes]
    if model.experts:
        routed = hidden, model.intermediate, model.experts, model.experts_per_token
        linears.append((layers, kernels.moe(tables, dtype, routed, tp)))
    windows = {0: layers - model.windowed_layers, model.window or 0: model.windowed_layers}
    windows = windows if model.window else {0: layers}
    attentions = []
    for window, count in windows.items():
        attended = (heads, kv_heads), model.head_dim, model.kv_dtype, window
        if count:
            both = (kernels.attention(tables, phase, *attended) for phase in ("context", "generation"))
            attentions.append(Attention(count, window, *both))
    reduce = kernels.all_reduce(tables, tp) if tp > 1 else None
    lm_head = kernels.gemm(tables, HALF[0], -(-model.vocab // tp), hidden)
    return Composition(tables, model, tp, tuple(linears), lm_head, tuple(attentions), reduce)


def iteration_seconds(
    tables: Tables, model: Model, tp: int, decodes: int, context: float, chunks: Chunks, dtype: str | None = None
) -> float:
    """Seconds of one iteration of `decodes` requests with `context` KV tokens among them, and chunks (m0, m)."""
    return sum(composition(tables, model, tp, dtype).parts(decodes, context, chunks).values())
