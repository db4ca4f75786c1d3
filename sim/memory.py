"""Where the memory of a device goes: weights, activations, and what is left for KV blocks.

The engine measures this once at start, as vLLM does: it takes `memory_fraction` of what the driver reports, runs one
batch of the largest size, and gives the rest to the KV cache. Here the same sum is done on paper. Not counted: the CUDA
context and the buffers of communication libraries, 0.2 to 1.9 GB in logs of one device and 3.8 GB in a log of two
(vLLM, pull requests 12126 and 10511); lower `memory_fraction` to allow for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import BadInput
from sim.hardware import Device, Model

_ACTIVATION_BYTES = 2  # activations are 16-bit whatever the weights are
_LOGIT_COPIES = 3  # float32 logits, probabilities and their logarithms
_MOST_DEVICES = 1024  # how far the search for a split that fits goes


@dataclass(frozen=True, slots=True)
class Memory:
    """One device of the tightest pipeline stage, in bytes; `num_blocks` holds for the whole replica."""

    weights_bytes: float
    activation_bytes: float
    kv_bytes: float  # num_blocks blocks
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one device gives: bytes, cut into blocks after the largest batch (tokens, sampled rows) took its share."""

    bytes: float
    block_tokens: int
    tokens: int
    rows: int


def num_blocks(
    model: Model,
    device: Device,
    *,
    tp: int = 1,
    pp: int = 1,
    block_tokens: int,
    memory_fraction: float,
    max_batch_tokens: int,
    max_sequences: int,
) -> Memory:
    """KV blocks of one replica: as many as fit on the stage that has room for the fewest.

    BadInput where the model cannot be split so, its weights do not fit, or not one block fits beside them; the error
    says how many devices would do.
    """
    model.check_parallel(tp, pp)
    rows = min(max_sequences, max_batch_tokens)
    offer = _Offer(device.usable_bytes * memory_fraction, block_tokens, max_batch_tokens, rows)
    memory = _tightest(model, tp, pp, offer)
    if memory.num_blocks < 1:
        share = f"({_gb(device.usable_bytes)} x memory_fraction {memory_fraction:g})"
        raise BadInput(
            f"{_needs(model, memory, offer)}, {device.name} offers {_gb(offer.bytes)} {share}; {_remedy(model, offer)}",
            key="[deployment] tensor_parallel",
        )
    return memory


def activation_bytes(model: Model, tp: int, tokens: int, rows: int) -> float:
    """Peak activations on one of `tp` devices: a batch of `tokens` tokens, `rows` of them sampled (0: no lm_head).

    Per token four vectors of `hidden` (residual, normalised input, block output, one in flight) and the widest point
    of a layer: gate, up and their product of every expert a token meets, or query, key, value and attention output.
    Per row three float32 vectors over the vocabulary. An estimate of what vLLM's profile run reserves: 1.27 GiB for
    Llama-3-8B, 8192 tokens and 256 rows, where its log says 1.26 (pull request 10511).
    """
    experts = max(1, model.experts_per_token)
    mlp = experts * (3 if model.gated else 2) * model.intermediate / tp + (
        experts * model.hidden if model.experts else 0
    )
    attention = 2 * (model.heads // tp + model.kv_heads_per_device(tp)) * model.head_dim
    per_token = 4 * model.hidden + max(mlp, attention)
    return tokens * per_token * _ACTIVATION_BYTES + rows * model.vocab * 4 * _LOGIT_COPIES


def _tightest(model: Model, tp: int, pp: int, offer: _Offer) -> Memory:
    differing = sorted({0, min(1, pp - 1), pp - 1})  # the stages between have no more layers than the second
    stages = (_stage(model, tp, pp, stage, offer) for stage in differing)
    return min(stages, key=lambda memory: (memory.num_blocks, -memory.weights_bytes))


def _stage(model: Model, tp: int, pp: int, stage: int, offer: _Offer) -> Memory:
    """One device of a stage; num_blocks is negative where weights and activations alone exceed what is offered."""
    weights = model.stage_weight_bytes(tp, pp, stage)
    activations = activation_bytes(model, tp, offer.tokens, offer.rows if stage == pp - 1 else 0)
    block = offer.block_tokens * model.kv_bytes_per_token(tp, model.stage_layers(pp)[stage])
    blocks = int((offer.bytes - weights - activations) // block)
    return Memory(weights, activations, max(0, blocks) * block, blocks)


def _needs(model: Model, memory: Memory, offer: _Offer) -> str:
    weights = _gb(memory.weights_bytes)
    if memory.weights_bytes > offer.bytes:
        return f"{model.name} needs {weights} of weights per device"
    activations = _gb(memory.activation_bytes)
    return f"{model.name} leaves no room for one KV block beside {weights} of weights and {activations} of activations"


def _remedy(model: Model, offer: _Offer) -> str:
    for devices in range(1, _MOST_DEVICES + 1):
        splits = ((tp, devices // tp) for tp in range(1, devices + 1) if devices % tp == 0)
        if any(model.can_split(tp, pp) and _tightest(model, tp, pp, offer).num_blocks >= 1 for tp, pp in splits):
            return f"at least tensor_parallel x pipeline_parallel = {devices}"
    return f"no split over up to {_MOST_DEVICES} devices fits"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
