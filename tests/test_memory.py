"""KV blocks derived on paper against the ones that engines reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.errors import BadInput
from sim.hardware import DeviceTable, ModelTable, device, model
from sim.memory import Memory, activation_bytes, num_blocks

PAPER = {"block_tokens": 16, "memory_fraction": 0.85, "max_batch_tokens": 8192, "max_sequences": 128}


def sized(name: str, card: str, **keys: Any) -> Memory:
    chosen = {key: keys.pop(key) for key in ("dtype", "kv_dtype") if key in keys}
    found = model(ModelTable(name=name, **chosen), Path())
    return num_blocks(found, device(DeviceTable(name=card)), **{**PAPER, **keys})


@pytest.mark.parametrize(
    ("name", "card", "tp", "tokens", "blocks", "within"),
    [
        ("llama-2-7b", "a100-80gb-sxm", 1, 4096, 7449, 0.002),  # vLLM, pull request 2031 (7351 with its change)
        ("llama-2-70b", "a100-80gb-sxm", 4, 4096, 31615, 0.002),  # the same; before NCCL's buffers were counted
        ("llama-3.1-8b", "h100-sxm", 1, 8192, 27284, 0.04),  # vLLM, pull request 10511: 53.29 GiB of KV cache
        ("llama-3.1-8b", "mi300x", 1, 8192, 78897, 0.02),  # AMD ROCm documentation, vLLM 0.5 start-up log
    ],
)
def test_blocks_agree_with_engine_logs(name: str, card: str, tp: int, tokens: int, blocks: int, within: float) -> None:
    """All with gpu_memory_utilization 0.9, 256 sequences and blocks of 16 tokens (vLLM's defaults)."""
    found = sized(name, card, tp=tp, memory_fraction=0.9, max_batch_tokens=tokens, max_sequences=256)
    assert found.num_blocks == pytest.approx(blocks, rel=within)


def test_activations_agree_with_an_engine_log() -> None:
    found = activation_bytes(model(ModelTable(name="llama-3.1-8b"), Path()), 1, 8192, 256)
    assert found / 2**30 == pytest.approx(1.26, abs=0.02)


def test_the_parts_add_up() -> None:
    found = sized("mistral-7b", "a100-80gb-pcie")
    offered = 84_987_000_000 * 0.85
    block = 16 * 131_072
    assert found.weights_bytes == 2 * 7_241_732_096
    assert found.kv_bytes == found.num_blocks * block
    assert 0 <= offered - found.weights_bytes - found.activation_bytes - found.kv_bytes < block


def test_the_tightest_stage_decides() -> None:
    """126 layers over 4 stages: the first two hold one more; the first also holds the embedding table."""
    found = sized("llama-3.1-405b", "h200", tp=8, pp=4)
    whole = model(ModelTable(name="llama-3.1-405b"), Path())
    assert found.weights_bytes == whole.stage_weight_bytes(8, 4, 0)
    assert found.kv_bytes == found.num_blocks * 16 * whole.kv_bytes_per_token(8, layers=32)
    assert found.activation_bytes == activation_bytes(whole, 8, 8192, 0)  # no lm_head on the first stage
    last = sized("falcon-180b", "a100-80gb-pcie", tp=4, pp=2)  # 40 layers each; logits burden the last
    assert last.weights_bytes == model(ModelTable(name="falcon-180b"), Path()).stage_weight_bytes(4, 2, 1)


def test_what_makes_room() -> None:
    base = sized("mistral-7b", "a100-80gb-pcie").num_blocks
    assert sized("mistral-7b", "a100-80gb-pcie", kv_dtype="fp8").num_blocks in (2 * base, 2 * base + 1)
    assert sized("mistral-7b", "a100-80gb-pcie", block_tokens=32).num_blocks == base // 2
    assert sized("mistral-7b", "a100-80gb-pcie", dtype="int4").num_blocks > base
    assert sized("mistral-7b", "a100-80gb-pcie", max_batch_tokens=512).num_blocks > base
    assert sized("mistral-7b", "a100-80gb-pcie", max_sequences=64).num_blocks > base
    assert sized("mistral-7b", "a100-80gb-pcie", tp=2).num_blocks > 2 * base


def test_no_more_rows_are_sampled_than_tokens_computed() -> None:
    few = sized("mistral-7b", "a100-80gb-pcie", max_batch_tokens=8, max_sequences=8)
    assert sized("mistral-7b", "a100-80gb-pcie", max_batch_tokens=8, max_sequences=100_000) == few


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(BadInput) as caught:
        sized("llama-2-70b", "a40")
    assert str(caught.value) == (
        "[deployment] tensor_parallel: llama-2-70b needs 138.0 GB of weights per device, a40 offers 40.5 GB "
        "(47.7 GB x memory_fraction 0.85); at least tensor_parallel x pipeline_parallel = 4"
    )
    assert sized("llama-2-70b", "a40", tp=4).num_blocks > 0
    with pytest.raises(BadInput):
        sized("llama-2-70b", "a40", tp=2)


def test_no_room_for_one_block() -> None:
    with pytest.raises(
        BadInput, match=r"leaves no room for one KV block beside 14\.5 GB of weights and 1\.0 GB of act"
    ):
        sized("mistral-7b", "l4", memory_fraction=0.63)


def test_no_split_fits() -> None:
    with pytest.raises(BadInput, match="no split over up to 1024 devices fits"):
        sized("llama-3.1-405b", "l4", memory_fraction=0.01)


def test_a_split_that_does_not_divide_is_refused_first() -> None:
    with pytest.raises(BadInput, match="yi-34b cannot be split 3 ways"):
        sized("yi-34b", "l4", tp=3)
