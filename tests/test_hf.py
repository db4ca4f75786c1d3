"""config.json files of every family: the same shape as the catalogue's, and one clear line for what is no use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.errors import BadInput
from sim.hardware import Model, ModelTable, model

# As published, cut down to the keys that matter.
LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL = LLAMA_2_7B | {
    "model_type": "mistral",
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
}
MIXTRAL = MISTRAL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_8B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
}
QWEN3_MOE = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0},
    "rope_theta": 150_000,
}
FALCON_180B = {
    "model_type": "falcon",
    "alibi": False,
    "bias": False,
    "hidden_size": 14848,
    "multi_query": True,
    "new_decoder_architecture": True,
    "num_attention_heads": 232,
    "num_hidden_layers": 80,
    "num_kv_heads": 8,
    "parallel_attn": True,
    "vocab_size": 65024,
}
FALCON_7B_OLD = {
    "model_type": "RefinedWebModel",
    "bias": False,
    "hidden_size": 4544,
    "multi_query": True,
    "n_head": 71,
    "n_layer": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
FALCON_40B_OLD = {
    "model_type": "RefinedWeb",
    "bias": False,
    "hidden_size": 8192,
    "n_head": 128,
    "n_head_kv": 8,
    "n_layer": 60,
    "parallel_attn": True,
    "vocab_size": 65024,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def read(tmp_path: Path, config: dict[str, Any]) -> Model:
    folder = tmp_path / "some-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return model(ModelTable(hf_config="some-model/config.json"), tmp_path)


def refused(tmp_path: Path, config: dict[str, Any]) -> BadInput:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, config)
    assert "\n" not in str(caught.value)
    assert caught.value.source == str(tmp_path / "some-model" / "config.json")
    return caught.value


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA_2_7B, "llama-2-7b"),
        (MISTRAL, "mistral-7b"),
        (MIXTRAL, "mixtral-8x7b"),
        (QWEN3_8B, "qwen3-8b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (GPT_OSS_20B, "gpt-oss-20b"),
        (FALCON_180B, "falcon-180b"),
    ],
)
def test_a_config_gives_the_catalogue_entry(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    found, listed = read(tmp_path, config), model(ModelTable(name=name), tmp_path)
    assert found.name == "some-model"
    for key in set(Model.__dataclass_fields__) - {"name", "source", "published_parameters"}:
        assert getattr(found, key) == getattr(listed, key), key


@pytest.mark.parametrize(
    ("config", "parameters", "kv_heads"), [(FALCON_7B_OLD, 7_217_189_760, 1), (QWEN2_7B, 7_615_616_512, 4)]
)
def test_published_counts_of_other_shapes(
    tmp_path: Path, config: dict[str, Any], parameters: int, kv_heads: int
) -> None:
    found = read(tmp_path, config)
    assert (found.parameters, found.kv_heads) == (parameters, kv_heads)


def test_both_spellings_of_falcon_40b_mean_the_same(tmp_path: Path) -> None:
    new = FALCON_180B | {"hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60}
    old, new_found = read(tmp_path, FALCON_40B_OLD), read(tmp_path, new)
    assert (old.kv_heads, old.head_dim, old.norms_per_layer, old.gated) == (8, 64, 2, False)
    assert old.parameters == new_found.parameters
    assert old.parallel_attention and new_found.parallel_attention


def test_falcon_without_parallel_attention_or_shared_keys(tmp_path: Path) -> None:
    found = read(
        tmp_path, FALCON_7B_OLD | {"hidden_size": 2048, "n_head": 32, "parallel_attn": False, "multi_query": False}
    )
    assert (found.kv_heads, found.norms_per_layer, found.all_reduces_per_layer) == (32, 2, 2)


def test_defaults_where_keys_are_left_out(tmp_path: Path) -> None:
    old = {key: value for key, value in LLAMA_2_7B.items() if key not in ("num_key_value_heads", "tie_word_embeddings")}
    assert read(tmp_path, old | {"head_dim": None}).parameters == 6_738_415_616
    windowed = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert (read(tmp_path, windowed).window, read(tmp_path, windowed).windowed_layers) == (4096, 32)
    layers = {key: value for key, value in GPT_OSS_20B.items() if key != "layer_types"}
    assert read(tmp_path, layers).windowed_layers == 12


def test_windows_of_qwen_start_at_a_layer(tmp_path: Path) -> None:
    found = read(tmp_path, QWEN2_7B | {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 4096})
    assert (found.window, found.windowed_layers) == (4096, 8)


def test_biases_are_counted(tmp_path: Path) -> None:
    plain = read(tmp_path, LLAMA_2_7B).parameters
    biased = read(tmp_path, LLAMA_2_7B | {"attention_bias": True, "mlp_bias": True}).parameters
    assert biased - plain == 32 * (4 * 4096 + 2 * 11008 + 4096)


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ({"model_type": "gpt2"}, "model_type", "unsupported model_type 'gpt2'; supported: llama, yi, mistral"),
        ({"model_type": None}, "model_type", "missing"),
        ({"model_type": 7}, "model_type", "must be a string, not 7"),
        ({"hidden_size": None}, "hidden_size", "missing"),
        ({"hidden_size": "4096"}, "hidden_size", "must be an integer, not '4096'"),
        ({"hidden_size": 4096.0}, "hidden_size", "must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "must be an integer, not True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "0 is not between 1 and"),
        ({"vocab_size": -5}, "vocab_size", "-5 is not between 1 and"),
        ({"vocab_size": 10**30}, "vocab_size", "is not between 1 and"),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "5 KV heads do not divide 32 attention heads"),
        ({"num_attention_heads": 33}, "num_attention_heads", "33 heads do not divide hidden_size 4096"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "must be true or false, not 'no'"),
    ],
)
def test_bad_keys(tmp_path: Path, change: dict[str, Any], key: str, said: str) -> None:
    error = refused(tmp_path, LLAMA_2_7B | change)
    assert error.key == key
    assert said in error.what


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (GPT_OSS_20B | {"layer_types": ["full_attention"]}, "layer_types"),
        (GPT_OSS_20B | {"layer_types": 24}, "layer_types"),
        (QWEN2_7B | {"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers"),
        (FALCON_180B | {"num_attention_heads": 231}, "num_attention_heads"),
    ],
)
def test_bad_keys_of_families(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    assert refused(tmp_path, config).key == key


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON: Expecting value at line 1, column 1"),
        (b"{\n'a': 1}", "not JSON: .* at line 2, column 1"),
        (b'{"model_type": "ll\xff"}', "not UTF-8: byte 18 is 0xff"),
        (b"[1, 2]", "the top level must be an object"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadInput, match=said) as caught:
        model(ModelTable(hf_config="config.json"), tmp_path)
    assert caught.value.source == str(tmp_path / "config.json")
    assert "\n" not in str(caught.value)


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"\[model\] hf_config: no such file: .*nowhere\.json"):
        model(ModelTable(hf_config="nowhere.json"), tmp_path)
    with pytest.raises(BadInput, match=r"\[model\] hf_config: .* is a directory; name its config\.json"):
        model(ModelTable(hf_config="."), tmp_path)


def test_rotary_positions_of_llama_3(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    found = read(tmp_path, LLAMA_2_7B | {"rope_theta": 500_000.0, "rope_scaling": scaling})
    listed = model(ModelTable(name="llama-3.1-8b"), tmp_path)
    assert found.rope_theta == listed.rope_theta == 500_000
    assert tuple(found.rope_scaling or ()) == tuple(listed.rope_scaling or ()) == (8, 1, 4, 8192)
    newer = read(tmp_path, LLAMA_2_7B | {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}})
    assert (newer.rope_theta, newer.rope_kind, newer.rope_scaling) == (500_000, "default", None)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rope_theta": -1}, "rope_theta"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_scaling": 8}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 0}}, "factor"),
    ],
)
def test_bad_rotary_positions(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    assert refused(tmp_path, LLAMA_2_7B | change).key == key
