"""The ready scenarios: each loads, fits, runs and reads back; the paper's settings are the paper's."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim import lengths
from sim.errors import BadInput
from sim.policies import POLICIES
from sim.scenario import Scenario
from sim.settings import Setting, parse
from sim.simulate import Plan, plan, simulate, workload

ROOT = Path(__file__).resolve().parents[1]
SCENARIOS = ROOT / "scenarios"
TRACES = ROOT.parent / "shared/data/traces"
FILES = sorted(file for file in SCENARIOS.glob("**/*.toml") if file.parent.name != "studies")
NAMES = [str(file.relative_to(SCENARIOS).with_suffix("")) for file in FILES]

# scenario: its trace (as stored here, requests in it)
FROM_TRACE = {
    "azure-conversation": ("AzureLLMInferenceTrace_conv.csv", 19_366),
    "mooncake-bursts": ("mooncake_conversation_trace.jsonl", 12_031),
}

# model: device, tp, pp, TBT SLO strict and relaxed (Table 3), token budgets, batch cap of the reserving policies
PAPER = {
    "mistral-7b": ("a100-80gb-pcie", 1, 1, (0.1, 0.5), (512, 2048), 16),
    "yi-34b": ("a100-80gb-pcie", 2, 1, (0.2, 1.0), (512, 2048), 16),
    "llama-2-70b": ("a40", 4, 2, (1.0, 5.0), (512, 1536), 8),
    "falcon-180b": ("a100-80gb-pcie", 4, 2, (1.0, 5.0), (512, 2048), 8),
}
DATASETS = {"chat": ("openchat-sharegpt4", 8192), "arxiv": ("arxiv-summarization", 16384)}
LEVELS = ("strict", "relaxed")
# (model, dataset): stall-free's capacity in Figs. 10 and 11, strict and relaxed
RATES = {
    ("mistral-7b", "chat"): (2.03, 2.28),
    ("yi-34b", "chat"): (1.08, 1.22),
    ("llama-2-70b", "chat"): (0.72, 0.82),
    ("falcon-180b", "chat"): (0.61, 0.73),
    ("mistral-7b", "arxiv"): (0.62, 0.77),
    ("yi-34b", "arxiv"): (0.27, 0.35),
    ("llama-2-70b", "arxiv"): (0.23, 0.27),
    ("falcon-180b", "arxiv"): (0.21, 0.22),
}
SETTINGS = [(model, data, level) for model in PAPER for data in DATASETS for level in LEVELS]

every = pytest.mark.parametrize("name", NAMES)
paper = pytest.mark.parametrize(("model", "data", "level"), SETTINGS)


def file_of(name: str) -> Path:
    return SCENARIOS / f"{name}.toml"


def paper_name(model: str, data: str, level: str) -> str:
    return f"paper/{model}-{data}-{level}"


@cache
def load(name: str, *settings: Setting) -> Scenario:
    return Scenario.load(file_of(name), settings)


def ready(name: str, requests: int) -> Scenario:
    """A short run of a scenario, with its trace put in its place; skips where the trace is not here."""
    settings = [Setting("workload.requests", requests)]
    if name in FROM_TRACE:
        path = real(FROM_TRACE[name][0])
        settings += [Setting(f"workload.{part}.path", str(path)) for part in ("arrivals", "lengths")]
    return load(name, *settings)


def real(name: str) -> Path:
    if not (TRACES / name).exists():
        pytest.skip("the public traces are not here (../shared/data/traces)")
    return TRACES / name


def flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        nested = isinstance(value, dict)
        found |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return found


def written(name: str) -> dict[str, Any]:
    return flat(tomllib.loads(file_of(name).read_text(encoding="utf-8")))


def differing(one: str, other: str) -> set[str]:
    """Keys that two scenarios, every default filled in, do not share."""
    a, b = (flat(tomllib.loads(load(name).to_toml())) for name in (one, other))
    return {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)}


def test_the_promised_scenarios_are_there() -> None:
    assert {name for name in NAMES if name.startswith("paper/")} == {paper_name(*setting) for setting in SETTINGS}
    assert {name for name in NAMES if "/" not in name} == {
        "azure-conversation",
        "chat-mistral-7b",
        "cpu-engine",
        "llama-3.1-70b-4xh100",
        "llama-3.1-8b-4-replicas",
        "llama-3.1-8b-h100",
        "mooncake-bursts",
        "qwen3-30b-a3b-h100",
    }


@every
def test_is_a_readable_page(name: str) -> None:
    text = file_of(name).read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 120
    assert text.startswith("# ")
    assert "name" in written(name)
    assert not re.search(r'"/|\.\./|=/|~/', text), "no machine paths"
    paths = [value for key, value in written(name).items() if key.endswith(".path")]
    assert all(Path(path).name == path for path in paths)
    assert bool(paths) == (name in FROM_TRACE)


@every
@pytest.mark.parametrize("policy", POLICIES)
def test_fits_under_each_policy(name: str, policy: str) -> None:
    scenario = load(name).for_policy(policy)
    scenario.check()
    planned = plan(scenario)
    limits = planned.deployment.limits
    assert limits.policy == policy
    assert limits.num_blocks * limits.block_tokens >= limits.max_model_tokens
    assert fits(planned)


def fits(planned: Plan) -> bool:
    memory, device, engine = planned.memory, planned.device, planned.scenario.engine
    if engine.num_blocks is not None:
        return memory is None  # given, not derived
    assert memory is not None
    assert device is not None
    used = memory.weights_bytes + memory.activation_bytes + memory.kv_bytes
    return min(memory.weights_bytes, memory.activation_bytes, memory.kv_bytes) >= 0 and (
        used <= device.usable_bytes * engine.memory_fraction
    )


@every
def test_reads_back_what_it_says(name: str) -> None:
    scenario = load(name)
    text = scenario.to_toml()
    assert Scenario.from_toml(text).to_toml() == text
    as_run = flat(tomllib.loads(text))
    for key, value in written(name).items():
        assert as_run[key] == (str(SCENARIOS / value) if key.endswith(".path") else value)


@every
def test_runs_the_same_read_back(name: str, tmp_path: Path) -> None:
    scenario = ready(name, 60)
    again = Scenario.from_toml(scenario.to_toml(), tmp_path)
    first, second = simulate(scenario), simulate(again)
    assert first.summary == second.summary
    assert first.requests.equals(second.requests)
    assert first.steps.equals(second.steps)


@every
def test_meets_its_own_slo(name: str) -> None:
    """The paper's at three quarters of the published capacity, which the forecast comes near."""
    scenario = ready(name, 300)
    if name.startswith("paper/"):
        scenario = scenario.with_(workload__arrivals__rate=0.75 * getattr(scenario.workload.arrivals, "rate", 0.0))
    summary = simulate(scenario, keep_steps=False).summary
    assert (summary["offered"], summary["completed"]) == (300, 300)
    assert summary["slo"]
    assert summary["slo_met"] is True


@every
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "stall-free"])
def test_runs_under_the_other_policies(name: str, policy: str) -> None:
    summary = simulate(ready(name, 60).for_policy(policy), keep_steps=False).summary
    assert (summary["policy"], summary["completed"], summary["refused"]) == (policy, 60, {})
    assert 0 < summary["kv_peak"] <= summary["kv_blocks"]


@pytest.mark.parametrize("name", FROM_TRACE)
def test_a_trace_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(BadInput) as caught:
        workload(load(name, *(Setting(f"workload.{part}.path", "elsewhere.csv") for part in ("arrivals", "lengths"))))
    assert "elsewhere.csv" in str(caught.value)


@pytest.mark.parametrize("name", FROM_TRACE)
def test_no_row_of_its_trace_is_too_long(name: str) -> None:
    work = workload(ready(name, FROM_TRACE[name][1]))
    assert not any(work.counts.values())


@paper
def test_paper_settings(model: str, data: str, level: str) -> None:
    scenario = load(paper_name(model, data, level))
    device, tp, pp, slos, budgets, cap = PAPER[model]
    dataset, longest = DATASETS[data]
    which = LEVELS.index(level)
    assert scenario.model is not None
    assert scenario.device is not None
    assert (scenario.model.name, scenario.model.dtype, scenario.device.name) == (model, "float16", device)
    parallel, engine = scenario.deployment, scenario.engine
    assert (parallel.tensor_parallel, parallel.pipeline_parallel, parallel.replicas) == (tp, pp, 1)
    assert (engine.block_tokens, engine.memory_fraction, engine.watermark) == (16, 0.85, 0.01)
    assert (engine.max_sequences, engine.max_model_tokens, engine.num_blocks) == (128, longest, None)
    assert scenario.scheduler.token_budget == budgets[which]
    assert scenario.slo.root == {"tbt_p99": slos[which], "scheduling_delay_p50": 2.0}
    assert (scenario.workload.requests, scenario.workload.seed) == (2048, 42)
    arrivals, drawn = scenario.workload.arrivals, scenario.workload.lengths
    assert (arrivals.kind, getattr(arrivals, "rate", None)) == ("poisson", RATES[model, data][which])
    assert (drawn.kind, getattr(drawn, "name", None)) == ("dataset", dataset)
    assert lengths.datasets()[dataset].max_total_tokens == longest
    own = {policy: table.model_dump(exclude_none=True) for policy, table in scenario.policy.items()}
    assert own == {policy: {"max_sequences": cap} for policy in ("orca", "decode-first")}
    for policy in POLICIES:
        limits = plan(scenario.for_policy(policy)).deployment.limits
        assert limits.max_sequences == (cap if policy in own else 128)
        assert limits.max_batch_tokens == longest


@paper
def test_paper_quirks_are_off_and_can_be_switched_on(model: str, data: str, level: str) -> None:
    name = paper_name(model, data, level)
    quirks = {"clip", "python_seed", "first_token_gap", "time_limit", "schedule_ahead"}
    assert not {key.rpartition(".")[2] for key in written(name)} & quirks
    said = re.findall(r"--set ((?:workload|slo|engine)\S+)", file_of(name).read_text(encoding="utf-8"))
    assert said == [
        *("workload.arrivals.clip=3", "workload.arrivals.python_seed=42", "slo.first_token_gap=true"),
        *("engine.time_limit=1800", "engine.schedule_ahead=true"),
    ]
    scenario = load(name, *map(parse, said))
    assert getattr(scenario.workload.arrivals, "clip", None) == 3
    assert scenario.slo.first_token_gap
    assert scenario.engine.time_limit == 1800
    assert scenario.engine.schedule_ahead
    assert getattr(scenario.workload.arrivals, "python_seed", None) == 42


@pytest.mark.parametrize("data", DATASETS)
@pytest.mark.parametrize("model", PAPER)
def test_strict_and_relaxed_differ_in_the_slo_alone(model: str, data: str) -> None:
    strict, relaxed = (paper_name(model, data, level) for level in LEVELS)
    assert differing(strict, relaxed) == {
        "name",
        "slo.tbt_p99",
        "scheduler.token_budget",
        "workload.arrivals.rate",
    }


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", PAPER)
def test_chat_and_arxiv_differ_in_the_requests_alone(model: str, level: str) -> None:
    chat, arxiv = (paper_name(model, data, level) for data in DATASETS)
    assert differing(chat, arxiv) == {
        "name",
        "engine.max_model_tokens",
        "engine.max_batch_tokens",  # the same, by default
        "workload.arrivals.rate",
        "workload.lengths.name",
    }


def tails(scenario: Scenario) -> tuple[float, float]:
    """P99 TBT of prefill-first and of stall-free, over the same requests."""
    first, free = (
        simulate(scenario.for_policy(policy), keep_steps=False).summary["tbt_s"]["p99"]
        for policy in ("prefill-first", "stall-free")
    )
    return first, free


def test_the_main_example_shows_the_stall() -> None:
    scenario = load("chat-mistral-7b")
    first, free = tails(scenario)
    assert first >= 3 * free
    assert free <= scenario.slo.root["tbt_p99"] < first


def test_the_main_example_on_the_real_lengths() -> None:
    path = real("sharegpt_8k_filtered_stats_llama2_tokenizer.csv")
    settings = [parse("workload.lengths.kind=trace"), parse(f"workload.lengths.path={path}")]
    scenario = load("chat-mistral-7b", *settings)
    work = workload(scenario)
    assert len(work.prompts) == 2048
    assert not any(work.counts.values())
    first, free = tails(scenario)
    assert first >= 3 * free


def test_the_router_decides_among_the_replicas() -> None:
    scenario = load("llama-3.1-8b-4-replicas")
    assert simulate(scenario, keep_steps=False).summary["slo_met"] is True
    turns = simulate(scenario.with_(deployment__router="round-robin"), keep_steps=False).summary
    assert turns["slo"]["attainment"]["met"] is False
