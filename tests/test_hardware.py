"""Facts of the catalogues against published figures, and the arithmetic on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sim import catalogue
from sim.errors import BadInput
from sim.hardware import Device, DeviceTable, Model, ModelTable, device, model

# Totals in the safetensors metadata of the published checkpoints (Llama 2: less the 64 rotary frequencies per layer
# that those files also store); written out here so that neither the formula nor the catalogue can drift alone.
PUBLISHED = {
    "mistral-7b": 7_241_732_096,
    "yi-34b": 34_388_917_248,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "falcon-180b": 179_522_565_120,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
DEVICES = [
    "a100-40gb-pcie",
    "a100-40gb-sxm",
    "a100-80gb-pcie",
    "a100-80gb-sxm",
    "a40",
    "h100-pcie",
    "h100-sxm",
    "h200",
    "b200",
    "l40s",
    "l4",
    "rtx-4090",
    "mi300x",
]


def named(name: str, **keys: Any) -> Model:
    return model(ModelTable(name=name, **keys), Path())


def on(name: str, **keys: Any) -> Device:
    return device(DeviceTable(name=name, **keys))


def test_the_catalogues_hold_what_is_promised() -> None:
    small = {"llama-12m", "llama-40m", "llama-200m"}  # for engines on a CPU: no published weights
    assert set(catalogue.entries("model")) == set(PUBLISHED) | small
    assert list(catalogue.entries("device")) == [*DEVICES, "cpu"]


@pytest.mark.parametrize(("name", "millions"), [("llama-12m", 11.0), ("llama-40m", 50.0), ("llama-200m", 200.0)])
def test_small_models_are_about_as_large_as_their_names(name: str, millions: float) -> None:
    assert named(name).parameters / 1e6 == pytest.approx(millions, rel=0.15)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_count(name: str) -> None:
    found = named(name)
    assert found.parameters == found.published_parameters == PUBLISHED[name]
    assert found.source


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.35), ("yi-34b", 34.39)])
def test_active_parameters(name: str, billions: float) -> None:
    assert named(name).active_parameters / 1e9 == pytest.approx(billions, abs=0.03)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_active_parameters_of_gpt_oss_leave_out_the_embedding_table(name: str, billions: float) -> None:
    found = named(name)
    assert (found.active_parameters - found.embedding_parameters) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("llama-2-70b", 327_680),
        ("llama-3.1-8b", 131_072),
        ("mistral-7b", 131_072),
        ("llama-2-7b", 524_288),
        ("gpt-oss-20b", 49_152),
        ("falcon-180b", 163_840),
    ],
)
def test_kv_bytes_per_token(name: str, kept: int) -> None:
    assert named(name).kv_bytes_per_token() == kept
    assert named(name, kv_dtype="fp8").kv_bytes_per_token() == kept // 2


def test_grouped_queries_keep_an_eighth_of_what_every_head_would() -> None:
    grouped = named("llama-2-70b")
    shape = {key: getattr(grouped, key) for key in Model.__dataclass_fields__}
    assert Model(**shape | {"kv_heads": 64}).kv_bytes_per_token() == 8 * grouped.kv_bytes_per_token()


def test_the_kv_cache_stays_in_16_bits_unless_asked() -> None:
    assert [named("mistral-7b", dtype=dtype).kv_dtype for dtype in ("float16", "bfloat16", "fp8", "int4")] == [
        "float16",
        "bfloat16",
        "float16",
        "float16",
    ]


def test_weight_bytes() -> None:
    assert named("mistral-7b").weight_bytes == 2 * PUBLISHED["mistral-7b"]
    # AWQ checkpoints in groups of 128, as published: 3.89 and 36.61 GB.
    assert named("llama-2-7b", dtype="int4").weight_bytes / 1e9 == pytest.approx(3.89, abs=0.005)
    assert named("llama-2-70b", dtype="int4").weight_bytes / 1e9 == pytest.approx(36.61, abs=0.005)
    # fp8 halves the matrices alone: both tables and the norms stay in 16 bits.
    eight = named("llama-3.1-8b", dtype="fp8")
    plain = 2 * eight.embedding_parameters + 65 * 4096
    assert eight.weight_bytes == eight.parameters + plain


@pytest.mark.parametrize("name", ["yi-34b", "falcon-180b", "llama-3.1-8b"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 2), (8, 7)])
def test_stages_add_up_to_the_whole(name: str, tp: int, pp: int) -> None:
    found = named(name)
    held = tp * sum(found.stage_weight_bytes(tp, pp, stage) for stage in range(pp))
    norms = found.layers * found.norms_per_layer + 1
    copies = (tp - 1) * norms * found.hidden * 2 * (2 if found.norm_bias else 1)
    assert held == pytest.approx(found.weight_bytes + copies, rel=1e-12)


def test_a_tied_table_is_stored_twice_only_across_stages() -> None:
    shape = {key: getattr(named("llama-2-7b"), key) for key in Model.__dataclass_fields__}
    tied = Model(**shape | {"tied_embeddings": True})
    table = tied.lm_head_bytes()
    assert tied.stage_weight_bytes(1, 1, 0) == tied.weight_bytes
    assert tied.stage_weight_bytes(1, 2, 0) + tied.stage_weight_bytes(1, 2, 1) == tied.weight_bytes + table


def test_the_first_stages_take_the_layers_left_over() -> None:
    assert named("llama-3.1-405b").stage_layers(4) == (32, 32, 31, 31)
    assert named("yi-34b").stage_layers(2) == (30, 30)


def test_kv_heads_below_the_degree_are_replicated() -> None:
    found = named("qwen3-30b-a3b")  # 4 KV heads
    whole = found.kv_bytes_per_token()
    assert [found.kv_bytes_per_token(tp) for tp in (1, 2, 4, 8)] == [whole, whole // 2, whole // 4, whole // 4]
    attention = found.layer_weight_bytes(8, tokens=0) - (2 * 2048 + 2 * 128 + 128 * 2048) * 2
    assert attention == 2 * 2048 * 128 * (4 + 1 + 1 + 4)


@pytest.mark.parametrize(
    ("tp", "pp", "key", "said"),
    [
        (3, 1, "tensor_parallel", "possible: 1, 2, 4, 8"),
        (7, 1, "tensor_parallel", "56 heads"),
        (0, 1, "tensor_parallel", "0 ways"),
        (16, 1, "tensor_parallel", "8 KV heads"),
        (1, 61, "pipeline_parallel", "1 to 60"),
        (1, 0, "pipeline_parallel", "1 to 60"),
    ],
)
def test_a_split_that_does_not_divide_is_refused(tp: int, pp: int, key: str, said: str) -> None:
    with pytest.raises(BadInput, match=rf"\[deployment\] {key}: .*{said}"):
        named("yi-34b").check_parallel(tp, pp)
    assert not named("yi-34b").can_split(tp, pp)


def test_linear_flops_are_two_per_weight_met() -> None:
    found = named("mistral-7b")
    layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert found.linear_flops_per_token == 2 * 32 * layer
    assert found.lm_head_flops_per_row == 2 * 32000 * 4096
    mixture = named("mixtral-8x7b")
    assert mixture.linear_flops_per_token == 2 * 32 * (layer + 3 * 4096 * 14336 + 8 * 4096)


def test_attention_flops() -> None:
    found = named("mistral-7b")
    assert found.attention_flops_prefill(0, 512) == 4 * 32 * 128 * 32 * 512 * 256
    whole = found.attention_flops_prefill(0, 3000)
    assert found.attention_flops_prefill(0, 1000) + found.attention_flops_prefill(1000, 2000) == whole
    assert found.attention_flops_decode(1000) == 4 * 32 * 128 * 32 * 1000


def test_a_window_caps_what_a_windowed_layer_attends_to() -> None:
    found = named("gpt-oss-20b")  # 12 layers of 24 look back 128 tokens
    unit = 4 * 64 * 64 * 12
    assert found.attention_flops_decode(100) == unit * 200
    assert found.attention_flops_decode(1000) == unit * (1000 + 128)
    assert found.attention_flops_prefill(0, 100) == unit * 2 * 100 * 50
    assert found.attention_flops_prefill(100, 100) == unit * (100 * 150 + (28 * 114 + 72 * 128))
    assert found.attention_flops_prefill(500, 100) == unit * (100 * 550 + 100 * 128)
    assert found.kv_read_bytes(1000) == 2 * 8 * 64 * 2 * 12 * (1000 + 128)


def test_experts_touched() -> None:
    found = named("mixtral-8x7b")
    assert found.experts_touched(0) == 0
    assert found.experts_touched(1) == pytest.approx(2)
    assert found.experts_touched(2) == pytest.approx(3.5)
    assert found.experts_touched(1000) == pytest.approx(8)
    assert named("mistral-7b").experts_touched(5) == 0
    dense = named("mistral-7b")
    assert dense.layer_weight_bytes(1, tokens=1) == dense.layer_weight_bytes(1)
    read, held = found.layer_weight_bytes(1, tokens=1), found.layer_weight_bytes(1)
    assert held - read == 6 * 3 * 4096 * 14336 * 2


def test_one_all_reduce_in_a_parallel_block() -> None:
    assert named("falcon-180b").all_reduces_per_layer == 1
    assert named("yi-34b").all_reduces_per_layer == 2


@pytest.mark.parametrize("name", DEVICES)
def test_devices_are_sane(name: str) -> None:
    found = on(name)
    assert found.source
    assert found.usable_bytes == pytest.approx(found.memory_bytes, rel=0.08)
    assert 2 <= found.link_group <= found.devices_per_node
    # A sparse figure taken for a dense one would break the ratio to the next wider type.
    if found.fp8_flops is not None:
        assert found.fp8_flops / found.float16_flops == pytest.approx(2, rel=0.02)
    assert found.memory_bandwidth < found.float16_flops / 50


def test_figures_of_the_data_sheets() -> None:
    assert (on("a100-80gb-sxm").memory_bandwidth, on("a100-80gb-sxm").float16_flops) == (2039e9, 312e12)
    assert (on("h100-sxm").float16_flops, on("h100-sxm").fp8_flops) == (989e12, 1979e12)
    assert (on("h200").memory_bytes, on("h200").memory_bandwidth) == (141e9, 4.8e12)


def test_narrow_weights_on_a_device_that_cannot_multiply_them() -> None:
    assert on("a100-80gb-sxm").peak_flops("fp8") == 312e12
    assert on("h100").peak_flops("fp8") == 1979e12
    assert on("h100").peak_flops("int4") == on("h100").peak_flops("bfloat16") == 989e12


def test_the_widest_link_of_a_group_counts() -> None:
    bridged = on("a100-80gb-pcie")
    assert [bridged.bandwidth_among(devices) for devices in (1, 2, 4, 8)] == [300e9, 300e9, 32e9, 12.5e9]
    assert [bridged.latency_among(devices) for devices in (2, 8)] == [5e-6, 30e-6]
    assert on("h100-sxm").bandwidth_among(8) == 450e9
    assert on("h100-sxm").bandwidth_among(16) == 50e9


def test_any_figure_may_be_overridden() -> None:
    found = on("h100-sxm", memory_bandwidth=3e12, link_bandwidth=10, multiprocessors=100)
    assert (found.memory_bandwidth, found.link_bandwidth, found.multiprocessors) == (3e12, 10, 100)
    assert found.float16_flops == 989e12
    assert on("h100-sxm", memory_bytes=64e9).usable_bytes == 64_000_000_000
    both = on("h100-sxm", memory_bytes=64e9, usable_bytes=60e9)
    assert (both.memory_bytes, both.usable_bytes) == (64_000_000_000, 60_000_000_000)
    overridable = set(DeviceTable.model_fields) | {"source"}
    assert overridable == set(Device.__dataclass_fields__)


@pytest.mark.parametrize(
    "keys", [{"name": "l4", "bandwidth": 1.0}, {"name": "l4", "link_group": 0}, {"name": "l4", "fp8_flops": "1e12"}]
)
def test_a_device_table_is_strict(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DeviceTable(**keys)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("h100", "h100-sxm"), ("h100-80gb-sxm", "h100-sxm"), ("h200-sxm", "h200"), ("4090", "rtx-4090")],
)
def test_device_aliases(alias: str, name: str) -> None:
    assert on(alias) == on(name)
    assert on(alias).name == name


def test_no_alias_hides_another_entry() -> None:
    for kind in ("model", "device"):
        known = catalogue.entries(kind)
        names = [*known, *(alias for entry in known.values() for alias in entry.get("aliases", ()))]
        assert len(names) == len(set(names))


def test_a_model_may_be_named_as_on_hugging_face() -> None:
    assert named("mistralai/Mistral-7B-Instruct-v0.2") == named("mistral-7b")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a100", "ambiguous device 'a100'; one of a100-40gb-pcie, a100-40gb-sxm, a100-80gb-pcie, a100-80gb-sxm"),
        ("h100-smx", "unknown device 'h100-smx'; did you mean 'h100-sxm'?"),
        ("wafer", "known: a100-40gb-pcie"),
        ("", "unknown device ''"),
    ],
)
def test_unknown_devices(name: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        on(name)
    assert caught.value.key == "[device] name"
    assert said in caught.value.what


def test_unknown_models() -> None:
    with pytest.raises(BadInput, match=r"\[model\] name: unknown model 'mistral-7c'; did you mean 'mistral-7b'\?"):
        named("mistral-7c")


@pytest.mark.parametrize("keys", [{}, {"name": "yi-34b", "hf_config": "config.json"}])
def test_exactly_one_of_name_and_hf_config(keys: dict[str, str]) -> None:
    with pytest.raises(BadInput, match=r"\[model\]: give exactly one of name and hf_config"):
        model(ModelTable(**keys), Path())
