"""The profile that `name = "auto"` comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.errors import BadInput
from sim.matching import resolved
from sim.profile import shipped
from sim.report import times_from
from sim.scenario import Scenario
from sim.simulate import plan, simulate

SCENARIO = """
name = "auto"
model = {name = "llama-3.1-8b"}
device = {name = "h100-sxm"}
latency = {kind = "profile", name = "auto"}
[workload]
requests = 20
arrivals = {kind = "poisson", rate = 4.0}
lengths = {kind = "fixed", prompt = 100, output = 10}
"""


def named(**changes: Any) -> str:
    """What "auto" comes to."""
    return resolved(Scenario.from_toml(SCENARIO).with_(**changes)).latency.name  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "llama-3.1-8b-h100-sxm-bf16-tp1"),
        ({"device__name": "a100-80gb-sxm"}, "llama-3.1-8b-a100-80gb-sxm-bf16-tp1"),
        ({"model__dtype": "fp8"}, "llama-3.1-8b-h100-sxm-fp8-tp1"),
        ({"deployment__tensor_parallel": 4}, "llama-3.1-8b-h100-sxm-bf16-tp4"),
        ({"model__name": "qwen3-32b", "deployment__tensor_parallel": 2}, "qwen3-32b-h100-sxm-bf16-tp2"),
    ],
)
def test_auto_is_the_shipped_profile_of_what_the_scenario_describes(changes: dict[str, Any], name: str) -> None:
    found = named(**changes)
    assert found in shipped()
    engine, _, what = found.partition("/")
    assert (engine.split("-")[0], what) == ("vllm", name)


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang"])
def test_the_engine_is_the_users_choice(engine: str) -> None:
    assert named(latency__engine=engine).startswith(f"{engine}-")


def test_a_name_that_is_given_stays() -> None:
    name = "vllm-0.24.0/llama-3.1-8b-h200-bf16-tp1"
    assert named(latency__name=name) == name


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device__name": "l40s"}, "servecast list profiles"),
        ({"model__kv_dtype": "fp8"}, "there: bf16-tp1"),
        ({"model__dtype": "int4"}, "llama-3.1-8b in int4"),
        ({"deployment__pipeline_parallel": 2}, "pipeline_parallel 2"),
    ],
)
def test_where_there_is_none_it_says_what_there_is(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput) as error:
        plan(Scenario.from_toml(SCENARIO).with_(**changes))
    assert error.value.key == "[latency] name"
    assert told in error.value.what


def test_a_run_keeps_what_it_came_to() -> None:
    """The result can be run again, also by a version that ships other profiles."""
    scenario = Scenario.from_toml(SCENARIO)
    report = simulate(scenario)
    kept = Scenario.from_toml(report.plan.scenario.to_toml())
    assert kept.latency.name == named()  # type: ignore[union-attr]
    assert simulate(kept).summary["tbt_s"] == report.summary["tbt_s"]
    assert times_from(scenario) == times_from(kept) == report.summary["times_from"]


def test_a_variation_is_matched_again() -> None:
    """What a study varies is the scenario as written."""
    scenario = Scenario.from_toml(Scenario.from_toml(SCENARIO).to_toml())
    assert plan(scenario.with_(device__name="h200")).scenario.latency.name != named()  # type: ignore[union-attr]


def test_a_profile_of_other_weights_is_refused_and_auto_named() -> None:
    with pytest.raises(BadInput, match=r"is of weights in bfloat16, not int4; name = \"auto\" finds"):
        plan(Scenario.from_toml(SCENARIO).with_(latency__name=named(), model__dtype="int4"))


def test_an_engine_goes_with_auto_alone() -> None:
    with pytest.raises(BadInput, match='engine = "sglang" goes with name = "auto"'):
        Scenario.from_toml(SCENARIO).with_(latency={"kind": "profile", "name": named(), "engine": "sglang"})


CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False},
}


@pytest.mark.parametrize("folder", ["Meta-Llama-3.1-8B", "llama-3.1-8b"])
def test_a_config_is_what_its_figures_say(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    one = Scenario.from_toml(SCENARIO.replace('name = "llama-3.1-8b"', f'hf_config = "{path}", dtype = "bfloat16"'))
    assert resolved(one).latency.name == named()  # type: ignore[union-attr]
    simulate(one)
    path.write_text(json.dumps(CONFIG | {"num_hidden_layers": 4}))
    with pytest.raises(BadInput, match="vllm has none of"):
        plan(one)
    with pytest.raises(BadInput, match=f"was measured with {'llama-3.1-8b'!r}"):
        plan(one.with_(latency__name=named()))


def test_figures_of_a_device_that_a_profile_does_not_follow_are_named() -> None:
    slow = Scenario.from_toml(SCENARIO).with_(device__memory_bandwidth=1e12)
    assert any("memory_bandwidth: no effect on the times" in note for note in simulate(slow).notes)
    small = Scenario.from_toml(SCENARIO).with_(device__memory_bytes=60e9)
    assert not any("no effect" in note for note in simulate(small).notes)
