"""The profile that `name = "auto"` comes to."""

from __future__ import annotations

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
    assert named(latency__name=name, latency__engine="sglang") == name


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device__name": "l40s"}, "servecast list profiles"),
        ({"model__kv_dtype": "fp8"}, "it has llama-3.1-8b-h100-sxm-bf16-tp1"),
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
