"""The decoder against a dense transformer: no cache, no pages, no batch, full attention over the whole sequence.

`dense_logits` is written from the papers' formulas over tensors under their Hugging Face names and shares no code with
the engine. The other tests of the engine import it, and the small models here.
"""

# ruff: noqa: E402
from __future__ import annotations

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from gpu_backend.attention import TorchAttention
from gpu_backend.cache import storage
from gpu_backend.layout import lay_out
from gpu_backend.model import Decoder, Weights, rotary_table
from gpu_backend.weights import _assemble
from sim.hardware import Model

torch.set_num_threads(1)

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]

GQA = Model(
    name="gqa",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=500,
    context_limit=2048,
)
MODELS = {
    "gqa": GQA,
    "mha": replace(GQA, name="mha", kv_heads=4, norm_eps=1e-6),
    "mqa": replace(GQA, name="mqa", kv_heads=1, rope_theta=500.0),
    "qwen": replace(GQA, name="qwen", head_dim=24, qk_norm=True, rope_theta=1e6, norm_eps=1e-2),
    "biased": replace(GQA, name="biased", qkv_bias=True, tied_embeddings=True),
    # Wavelengths of 6 to 4,000 positions over an original range of 64: some stay, some are blended, some stretched.
    "scaled": replace(GQA, name="scaled", rope_scaling=(8.0, 1.0, 4.0, 64.0), rope_kind="llama3"),
}


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama-like checkpoint, as Hugging Face names and shapes them."""
    queries, keys, hidden = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.hidden
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not model.tied_embeddings:
        found["lm_head.weight"] = (model.vocab, hidden)
    for index in range(model.layers):
        block = f"model.layers.{index}."
        found |= {
            f"{block}input_layernorm.weight": (hidden,),
            f"{block}post_attention_layernorm.weight": (hidden,),
            f"{block}self_attn.o_proj.weight": (hidden, queries),
            f"{block}mlp.gate_proj.weight": (model.intermediate, hidden),
            f"{block}mlp.up_proj.weight": (model.intermediate, hidden),
            f"{block}mlp.down_proj.weight": (hidden, model.intermediate),
        }
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{block}self_attn.{name}_proj.weight"] = (rows, hidden)
            if model.qkv_bias:
                found[f"{block}self_attn.{name}_proj.bias"] = (rows,)
        if model.qk_norm:
            found[f"{block}self_attn.q_norm.weight"] = (model.head_dim,)
            found[f"{block}self_attn.k_norm.weight"] = (model.head_dim,)
    return found


def tensors_of(model: Model, seed: int = 0) -> Tensors:
    """Weights large enough for attention to be far from even: what a token sees must matter to what follows it."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            return 1 + 0.3 * drawn
        return drawn * (0.5 if name.endswith("bias") else 1.0 if "embed" in name else 2 / math.sqrt(shape[-1]))

    return {name: draw(name, shape) for name, shape in shapes(model).items()}


def weights_of(model: Model, tensors: Tensors) -> Weights:
    """The same tensors as the engine holds them."""
    return _assemble(model, lambda name, _: tensors[name])


def dense_logits(model: Model, tensors: Tensors, tokens: list[int]) -> torch.Tensor:
    """Logits after every token, [tokens, vocab], of one sequence from its beginning."""
    count = len(tokens)
    inverse = rotary_frequencies(model)
    hidden = tensors["model.embed_tokens.weight"][tokens]
    angles = torch.tensor([[position * f for f in inverse] for position in range(count)], dtype=torch.float64)
    later = torch.ones(count, count, dtype=torch.bool).triu(1)

    def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * weight

    def turned(rows: torch.Tensor) -> torch.Tensor:
        """Each pair (i, i + half) is a complex number, turned by its position's angle."""
        half = model.head_dim // 2
        spun = torch.complex(rows[:, :half], rows[:, half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((spun.real, spun.imag), dim=-1)

    for index in range(model.layers):
        block = f"model.layers.{index}."
        normed = norm(hidden, tensors[f"{block}input_layernorm.weight"])
        rows = {}
        for name in "qkv":
            rows[name] = normed @ tensors[f"{block}self_attn.{name}_proj.weight"].T
            if model.qkv_bias:
                rows[name] = rows[name] + tensors[f"{block}self_attn.{name}_proj.bias"]
        heads = []
        for head in range(model.heads):
            shared = head // (model.heads // model.kv_heads)
            query, key, value = (
                rows[name][:, at * model.head_dim : (at + 1) * model.head_dim]
                for name, at in (("q", head), ("k", shared), ("v", shared))
            )
            if model.qk_norm:
                query = norm(query, tensors[f"{block}self_attn.q_norm.weight"])
                key = norm(key, tensors[f"{block}self_attn.k_norm.weight"])
            scores = turned(query) @ turned(key).T / math.sqrt(model.head_dim)
            heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ value)
        hidden = hidden + torch.cat(heads, dim=-1) @ tensors[f"{block}self_attn.o_proj.weight"].T
        normed = norm(hidden, tensors[f"{block}post_attention_layernorm.weight"])
        gate = normed @ tensors[f"{block}mlp.gate_proj.weight"].T
        up = normed @ tensors[f"{block}mlp.up_proj.weight"].T
        hidden = hidden + (gate / (1 + (-gate).exp()) * up) @ tensors[f"{block}mlp.down_proj.weight"].T
    head = tensors["model.embed_tokens.weight" if model.tied_embeddings else "lm_head.weight"]
    return norm(hidden, tensors["model.norm.weight"]) @ head.T


def rotary_frequencies(model: Model) -> list[float]:
    """Radians per position of each pair; Llama 3.1's rule for long wavelengths, as Meta's code and paper put it."""
    found = []
    for pair in range(model.head_dim // 2):
        frequency = 1 / model.rope_theta ** (2 * pair / model.head_dim)
        if model.rope_scaling is not None:
            factor, low, high, original = model.rope_scaling
            wavelength = 2 * math.pi / frequency
            if wavelength > original / low:
                frequency /= factor
            elif wavelength >= original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        found.append(frequency)
    return found


def one_pass(model: Model, weights: Weights, tokens: list[int], page_tokens: int = 16) -> torch.Tensor:
    """The engine's logits after every token of one sequence, all in one chunk."""
    pages = -(-len(tokens) // page_tokens)
    dtype = weights.embedding.dtype
    cache = storage(model.layers, pages, page_tokens, model.kv_heads, model.head_dim, dtype, CPU)
    decoder = Decoder(model, weights, cache, len(tokens))
    attention = TorchAttention(model.heads, model.kv_heads, model.head_dim, page_tokens)
    attention.plan(lay_out([], [(0, len(tokens), list(range(pages)))], page_tokens, CPU))
    every = torch.arange(len(tokens))
    return decoder.forward(torch.tensor(tokens), every, every, attention)


def sequence(model: Model, count: int, seed: int = 0) -> list[int]:
    return torch.randint(model.vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_one_chunk_is_the_dense_model(name: str) -> None:
    """Every family's logits, to the rounding of float64."""
    model = MODELS[name]
    tensors, tokens = tensors_of(model), sequence(model, 150)
    expected = dense_logits(model, tensors, tokens)
    torch.testing.assert_close(one_pass(model, weights_of(model, tensors), tokens), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_what_the_first_token_is_matters_to_the_last(name: str) -> None:
    """The models of these tests have attention that reaches: without it, equal tokens would prove little."""
    model = MODELS[name]
    tensors, tokens = tensors_of(model), sequence(model, 60)
    other = [(tokens[0] + 1) % model.vocab, *tokens[1:]]
    changed = dense_logits(model, tensors, tokens) - dense_logits(model, tensors, other)
    assert changed[-1].abs().max() > 1e-3
    longest = dense_logits(model, tensors, tokens)
    choices = longest.argmax(-1).tolist()
    assert len(set(choices)) > 30  # and they do not say the same word all the time
    torch.testing.assert_close(dense_logits(model, tensors, tokens[:20]), longest[:20], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_rotary_tables_hold_cosines_and_sines_of_every_position(name: str) -> None:
    """[positions, head_dim / 2], in the dtype of the weights; angles are not rounded before the cosine."""
    model = MODELS[name]
    like = torch.zeros(1, dtype=torch.float32)
    cos, sin = rotary_table(model, 3000, like)
    assert cos.shape == sin.shape == (3000, model.head_dim // 2)
    assert cos.dtype == sin.dtype == torch.float32
    for position in (0, 1, 2999):
        for pair, frequency in enumerate(rotary_frequencies(model)):
            assert float(cos[position, pair]) == pytest.approx(math.cos(position * frequency), abs=1e-6)
            assert float(sin[position, pair]) == pytest.approx(math.sin(position * frequency), abs=1e-6)


def test_llama_3_stretches_long_waves_and_leaves_short_ones() -> None:
    """All three branches of the rule are met by the model that tests it."""
    plain, scaled = rotary_frequencies(GQA), rotary_frequencies(MODELS["scaled"])
    ratios = [after / before for before, after in zip(plain, scaled, strict=True)]
    assert ratios[0] == 1
    assert ratios[-1] == pytest.approx(1 / 8)
    assert any(1 / 8 < ratio < 1 for ratio in ratios)


def test_logits_are_those_of_the_rows_asked_for() -> None:
    """Rows that nobody samples are not computed, and none may be sampled at all."""
    tensors, tokens = tensors_of(GQA), sequence(GQA, 20)
    weights = weights_of(GQA, tensors)
    decoder = Decoder(GQA, weights, storage(2, 2, 16, 2, 16, torch.float64, CPU), 20)
    attention = TorchAttention(4, 2, 16, 16)
    attention.plan(lay_out([], [(0, 20, [1, 0])], 16, CPU))
    for sampled in ([], [19], [4, 0, 19]):
        rows = torch.tensor(sampled, dtype=torch.int64)
        logits = decoder.forward(torch.tensor(tokens), torch.arange(20), rows, attention)
        assert logits.shape == (len(sampled), GQA.vocab)
        torch.testing.assert_close(logits, one_pass(GQA, weights, tokens)[rows], rtol=1e-9, atol=1e-9)
