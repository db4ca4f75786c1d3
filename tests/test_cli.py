"""What the commands promise: shapes, files, exit statuses, and what a search means."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import polars as pl
import pytest

from sim.__main__ import status
from sim.capacity import Trial, at_rate, capacity, search, trial
from sim.cost import cost, per_million
from sim.policies import COMPARED, POLICIES
from sim.scenario import Scenario
from sim.simulate import simulate, workload

SCENARIO = """
name = "tiny"

[engine]
num_blocks = 400
max_model_tokens = 2048
max_sequences = 16

[policy.orca]
max_sequences = 1

[latency]
kind = "affine"
step = 0.01
token = 0.0001

[workload]
requests = 60
seed = 7

[workload.arrivals]
kind = "poisson"
rate = 2.0

[workload.lengths]
kind = "uniform"
prompt = [20, 400]
output = [2, 40]

[slo]
tbt_p99 = 0.07
scheduling_delay_p50 = 0.5

[cost]
gpu_hour = 2.0
"""
DISTRIBUTION = {"n", "mean", "std", "min", "p50", "p75", "p90", "p95", "p99", "p999", "max"}
DISTRIBUTIONS = ["ttft_s", "tbt_s", "tpot_s", "e2e_s", "scheduling_delay_s"]
SUMMARY = {
    *("name", "policy", "seed", "offered", "completed", "unfinished", "refused", "duration_s", "iterations"),
    *("preemptions", "prompt_tokens", "output_tokens", "request_throughput", "output_throughput", "kv_blocks"),
    *("kv_peak", "bubble_fraction", "mfu", "mbu", "slo", "slo_met", "attainment", "goodput", *DISTRIBUTIONS),
}
REQUESTS = [
    *("id", "arrival_s", "prompt_tokens", "output_tokens", "status", "reason", "replica"),
    *("scheduled_s", "first_token_s", "finished_s", "preemptions"),
]
STEPS = [
    *("replica", "start_s", "end_s", "prefill_tokens", "decodes", "context_tokens", "chunks"),
    *("kv_blocks_used", "waiting", "preempted"),
]
FILES = {"requests.parquet", "steps.parquet", "gaps.parquet", "summary.json", "scenario.toml", "vllm_bench.json"}

Call = Callable[..., tuple[str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sim.cli.cores", lambda: 1)  # a process would take longer to start than these searches take
    (tmp_path / "s.toml").write_text(SCENARIO)
    return tmp_path


@pytest.fixture
def call(here: Path, capsys: pytest.CaptureFixture[str]) -> Call:  # noqa: ARG001
    """Runs a command that must succeed: what it wrote on stdout and stderr."""

    def run(*arguments: str) -> tuple[str, str]:
        assert status(arguments) == 0, capsys.readouterr().err
        out, err = capsys.readouterr()
        return out, err

    return run


def strict(text: str) -> Any:
    """One JSON object and nothing else."""

    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def tiny(*settings: tuple[str, Any]) -> Scenario:
    return Scenario.from_toml(SCENARIO).with_(**{path.replace(".", "__"): value for path, value in settings})


# What is printed.


def test_run_prints_one_object(call: Call) -> None:
    out, err = call("run", "s.toml", "--json")
    summary = strict(out)
    assert err == ""
    assert summary.keys() >= SUMMARY
    assert all(summary[name].keys() == DISTRIBUTION for name in DISTRIBUTIONS)
    assert (summary["name"], summary["policy"], summary["seed"], summary["offered"]) == ("tiny", "stall-free", 7, 60)
    assert summary["slo"].keys() == {"tbt_p99", "scheduling_delay_p50"}
    assert all(verdict.keys() == {"limit", "value", "met"} for verdict in summary["slo"].values())
    assert summary["slo_met"] == all(verdict["met"] for verdict in summary["slo"].values())
    assert summary["mfu"] is None and summary["attainment"] is None and summary["goodput"] is None


def test_nothing_measured_is_null_and_misses_its_limit(call: Call) -> None:
    summary = strict(call("run", "s.toml", "--json", "--set", "metrics.warmup=1e9")[0])
    assert summary["ttft_s"] == dict.fromkeys(DISTRIBUTION) | {"n": 0}
    assert summary["slo"]["tbt_p99"] == {"limit": 0.07, "value": None, "met": False}
    assert summary["slo_met"] is False


def test_no_limits_are_neither_met_nor_missed(call: Call) -> None:
    summary = strict(call("run", "s.toml", "--json", "--set", "slo={}")[0])
    assert (summary["slo"], summary["slo_met"]) == ({}, None)


def test_compare_prints_one_object(call: Call) -> None:
    out, err = call("compare", "s.toml", "--json")
    results = strict(out)["results"]
    assert err == ""
    assert [result["policy"] for result in results] == list(COMPARED)
    assert all(result.keys() >= SUMMARY for result in results)
    assert len({(result["offered"], result["prompt_tokens"], result["output_tokens"]) for result in results}) == 1


def test_capacity_prints_one_object(call: Call) -> None:
    out, err = call("capacity", "s.toml", "--json", "--policy", "stall-free", "--seeds", "2")
    document = strict(out)
    (result,) = document["results"]
    assert err == "" and document.keys() == {"results", "verdicts"}
    assert result.keys() >= {"policy", "rate", "interval", "limited_by", "trials"}
    assert (result["policy"], result["limited_by"]) == ("stall-free", "scheduling_delay_p50")
    assert all(one.keys() >= {"rate", "met"} for one in result["trials"])


def test_cost_prints_one_object(call: Call) -> None:
    out, err = call("cost", "s.toml", "--json", "--seeds", "2")
    result = strict(out)
    assert err == ""
    assert result.keys() >= {"per_million_output_tokens", "per_million_tokens", "rate", "devices"}
    mean = result["mean_output_tokens"]
    assert result["per_million_output_tokens"] == pytest.approx(2.0 / 3600 / (result["rate"] * mean) * 1e6)
    low, high = result["interval_per_million_output_tokens"]
    assert low <= result["per_million_output_tokens"] <= high


def test_check_prints_one_object_and_runs_nothing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.cluster.serve", None)
    out, err = call("check", "s.toml", "--json")
    meaning = strict(out)
    assert err == ""
    assert (meaning["kv_blocks"], meaning["kv_blocks_from"], meaning["requests"]) == (400, "given", 60)
    written = tomllib.loads(meaning["scenario"])
    assert written["scheduler"] == {
        "policy": "stall-free",
        "token_budget": 512,
        "overlap": False,
        "batch_wait_iterations": 0,
        "batch_wait_ratio": 0.0,
    }  # every default filled in


@pytest.mark.parametrize("what", ["models", "devices", "profiles", "datasets", "policies"])
def test_list_prints_one_object_or_a_page(what: str, call: Call) -> None:
    rows = strict(call("list", what, "--json")[0])[what]
    page, err = call("list", what)
    assert err == "" and page.strip()
    assert all(row["name"] in page for row in rows)
    if what == "policies":
        assert {row["name"] for row in rows} == set(POLICIES)


def test_people_get_the_numbers_of_samples_the_verdicts_and_where_the_times_are_from(call: Call) -> None:
    page, err = call("run", "s.toml")
    assert err == ""
    header = next(line for line in page.splitlines() if "P99" in line)
    assert header.split()[-1] == "n"
    assert next(line for line in page.splitlines() if "TTFT" in line).split()[-1] == "60"
    assert "missed" in page or "met" in page
    assert "tbt_p99" in page and "70.0 ms" in page
    assert "times: affine coefficients of the scenario" in page
    assert "P99 of a distribution over 60 requests is its maximum" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "s.toml"), [*COMPARED, "the same 60 requests", "TBT P99", "times: affine"]),
        (("capacity", "s.toml", "--seeds", "2"), [*COMPARED, "interval", "limited by", "2 searches", "times: affine"]),
        (("cost", "s.toml", "--seeds", "1"), ["per million output tokens", "gpu_hour", "times: affine"]),
        (("check", "s.toml"), ["400 KV blocks", "given", "60 requests", "token_budget = 512", "times: affine"]),
    ],
)
def test_people_get_a_page(arguments: tuple[str, ...], words: list[str], call: Call) -> None:
    page, err = call(*arguments)
    assert err == ""
    assert [word for word in words if word not in page] == []


def test_a_new_kind_drops_the_keys_of_the_old_one_and_says_so(call: Call) -> None:
    new = ("--set", "workload.arrivals.rate=3.0", "--set", "workload.arrivals.kind=constant", "--set", "latency.hop=0")
    out, err = call("run", "s.toml", "--json", *new)
    assert err.startswith("servecast: --set workload.arrivals.kind=constant drops rate") and len(err.splitlines()) == 1
    assert any("drops rate" in note for note in strict(out)["notes"])
    out, err = call("run", "s.toml", "--json", "--set", "workload.arrivals.kind=poisson")  # not a new one
    assert err == "" and strict(out)["offered"] == 60
    for command in ("compare", "capacity", "cost", "check"):
        out, err = call(
            command, "s.toml", "--json", *new, *(["--seeds", "1"] if command in ("capacity", "cost") else [])
        )
        assert strict(out) and "drops rate" in err


def test_the_last_setting_wins_and_options_come_after_them(call: Call) -> None:
    out, _ = call("run", "s.toml", "--json", "--set", "workload.requests=5", "--set", "workload.requests=9")
    assert strict(out)["offered"] == 9
    out, _ = call("run", "s.toml", "--json", "--set", "workload.requests=5", "--requests", "8", "--seed", "3")
    assert (strict(out)["offered"], strict(out)["seed"]) == (8, 3)


# Policies.


def test_a_policy_has_its_own_keys(call: Call, here: Path) -> None:
    (here / "p.toml").write_text(SCENARIO.replace("max_sequences = 16", "max_sequences = 1"))
    own = strict(call("run", "s.toml", "--json", "--policy", "orca", "--rate", "20")[0])
    everywhere = strict(call("run", "p.toml", "--json", "--policy", "orca", "--rate", "20")[0])
    without = strict(call("run", "s.toml", "--json", "--policy", "orca", "--rate", "20", "--set", "policy={}")[0])
    assert own == everywhere
    assert own["ttft_s"]["p50"] > without["ttft_s"]["p50"]
    compared = strict(call("compare", "s.toml", "--json", "--policies", "orca", "--rate", "20")[0])["results"]
    assert compared == [own]


def test_policies_are_chosen_by_name_once_each_and_in_order(call: Call) -> None:
    def chosen(*arguments: str) -> list[str]:
        return [result["policy"] for result in strict(call("compare", "s.toml", "--json", *arguments)[0])["results"]]

    assert chosen("--policies", "orca, alternating,orca") == ["orca", "alternating"]
    assert chosen("--policy", "alternating") == ["alternating"]
    assert chosen() == list(COMPARED)


def test_what_the_policies_are_compared_on_is_what_run_says(call: Call) -> None:
    compared = strict(call("compare", "s.toml", "--json")[0])["results"]
    for result in compared:
        assert result == strict(call("run", "s.toml", "--json", "--policy", result["policy"])[0])


# Files.


def test_out_holds_four_files_and_nothing_else(call: Call, here: Path) -> None:
    out, err = call("run", "s.toml", "--json", "--out", "a/b")
    assert err == ""
    folder = here / "a" / "b"
    assert {path.name for path in folder.rglob("*")} == FILES
    assert strict((folder / "summary.json").read_text(encoding="utf-8")) == strict(out)
    requests, steps = (pl.read_parquet(folder / f"{name}.parquet") for name in ("requests", "steps"))
    assert set(requests.columns) >= set(REQUESTS) and set(steps.columns) >= set(STEPS)
    assert len(requests) == 60 and len(steps) == strict(out)["iterations"]
    assert steps["prefill_tokens"].sum() >= requests["prompt_tokens"].sum()
    assert call("run", "s.toml", "--out", "a/b")[1].strip() == "servecast: files are in a/b"
    assert {path.name for path in folder.rglob("*")} == FILES


def test_times_not_reached_are_null(call: Call, here: Path) -> None:
    call("run", "s.toml", "--out", "o", "--set", "engine.time_limit=0.5", "--rate", "50")
    requests = pl.read_parquet(here / "o" / "requests.parquet")
    cut = requests.filter(pl.col("status") == "unfinished")
    assert len(cut) and cut["finished_s"].is_null().all()
    summary = strict((here / "o" / "summary.json").read_text())
    assert summary["offered"] == summary["completed"] + summary["unfinished"] + sum(summary["refused"].values())


def test_refused_requests_are_rows_with_a_reason(call: Call, here: Path) -> None:
    call("run", "s.toml", "--out", "o", "--set", "engine.num_blocks=20")
    requests = pl.read_parquet(here / "o" / "requests.parquet")
    refused = requests.filter(pl.col("status") == "refused")
    summary = strict((here / "o" / "summary.json").read_text())
    assert summary["refused"] == {"never_fits": len(refused)} and len(refused)
    assert refused["first_token_s"].is_null().all() and refused["scheduled_s"].is_null().all()


def test_the_same_seed_gives_the_same_bytes(call: Call, here: Path) -> None:
    for folder in ("one", "two"):
        call("run", "s.toml", "--out", folder, "--set", "engine.num_blocks=60")
    one, two = ({path.name: path.read_bytes() for path in (here / name).iterdir()} for name in ("one", "two"))
    assert one == two and one.keys() == FILES
    call("run", "s.toml", "--out", "three", "--seed", "8")
    assert (here / "three" / "requests.parquet").read_bytes() != one["requests.parquet"]


@pytest.mark.parametrize("options", [(), ("--policy", "orca"), ("--policy", "prefill-first"), ("--rate", "9")])
def test_the_kept_scenario_gives_the_same_again(options: tuple[str, ...], call: Call, here: Path) -> None:
    first = strict(call("run", "s.toml", "--json", "--out", "kept", *options)[0])
    again = strict(call("run", "kept/scenario.toml", "--json", "--out", "again")[0])
    assert again == first
    assert (here / "again/scenario.toml").read_bytes() == (here / "kept/scenario.toml").read_bytes()


def test_the_kept_scenario_finds_its_trace_from_anywhere(call: Call, here: Path) -> None:
    (here / "traces").mkdir()
    (here / "traces/t.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,100,3\n1,50,2\n")
    trace = "{kind='trace', path='traces/t.csv'}"
    new = ("--set", f"workload.arrivals={trace}", "--set", f"workload.lengths={trace}", "--requests", "2")
    first = strict(call("run", "s.toml", "--json", "--out", "kept", *new)[0])
    assert strict(call("run", "kept/scenario.toml", "--json")[0]) == first


def test_every_command_keeps_its_result(call: Call, here: Path) -> None:
    compared = strict(call("compare", "s.toml", "--json", "--policies", "orca,stall-free", "--out", "c")[0])
    assert strict((here / "c/comparison.json").read_text()) == compared
    names = {str(path.relative_to(here / "c")) for path in (here / "c").rglob("*") if path.is_file()}
    assert names == {"comparison.json", *(f"{policy}/{name}" for policy in ("orca", "stall-free") for name in FILES)}
    for command, name in (("capacity", "capacity.json"), ("cost", "cost.json")):
        out, _ = call(command, "s.toml", "--json", "--seeds", "1", "--policy", "stall-free", "--out", command)
        assert strict((here / command / name).read_text()) == strict(out)
        assert {path.name for path in (here / command).iterdir()} == {name, "scenario.toml"}


# Capacity.


def test_the_rate_passes_and_the_next_one_fails(call: Call) -> None:
    for tolerance in (0.1, 0.01, 0.002):
        out, _ = call(
            "capacity", "s.toml", "--json", "--policy", "stall-free", "--tolerance", str(tolerance), "--seeds", "1"
        )
        (result,) = strict(out)["results"]
        passed = [one["rate"] for one in result["trials"] if one["met"]]
        failed = [one["rate"] for one in result["trials"] if not one["met"]]
        assert result["rate"] == max(passed)
        assert max(passed) < min(failed) <= max(passed) * (1 + tolerance) + 1e-9
        just_above = next(one for one in result["trials"] if one["rate"] == min(failed))
        assert result["limited_by"] == just_above["limited_by"]
        assert result["interval"] is None
        for rate, met in ((max(passed), True), (min(failed), False)):
            assert strict(call("run", "s.toml", "--json", "--rate", str(rate))[0])["slo_met"] is met


def test_the_interval_is_the_smallest_and_largest_of_independent_searches() -> None:
    scenario = tiny()
    (found,) = capacity(scenario, ["stall-free"], seeds=4)
    alone = {seed: search(scenario.with_(workload__seed=seed)).rate for seed in range(7, 11)}
    assert found.seeds.keys() == alone.keys()
    assert found.interval == (min(found.seeds.values()), max(found.seeds.values()))
    assert found.rate == alone[7] == found.seeds[7]
    for seed, rate in alone.items():  # they start from the first one's answer and end within the tolerance of the same
        assert found.seeds[seed] == pytest.approx(rate, rel=0.011)


@pytest.mark.parametrize("policy", COMPARED)
def test_trials_that_are_stopped_early_would_have_failed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.cluster.EVENTS_BETWEEN_LOOKS", 50)
    scenario = tiny(("scheduler.policy", policy), ("slo", {"tbt_p99": 0.05, "ttft_p90": 0.4, "e2e_p50": 1.5}))
    requests = workload(scenario)
    first = search(scenario)
    rates = {one.rate for one in first.trials} | {1.0, 4.0, 16.0, 64.0, 256.0}
    stopped = 0
    for rate in sorted(rates):
        watched: Trial = trial(scenario, rate, requests)
        whole = simulate(at_rate(scenario, rate)).summary["slo_met"]
        assert watched.met is whole
        stopped += watched.stopped
    assert stopped > 0


def test_long_trials_are_stopped_early_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.cluster.EVENTS_BETWEEN_LOOKS", 50)
    stopped = 0
    for limits in ({"tbt_p99": 0.05}, {"ttft_p90": 0.2}, {"scheduling_delay_p50": 0.1}, {"e2e_p75": 0.8}):
        for changes in ((), (("engine.time_limit", 10.0),), (("metrics.warmup", 2.0),)):
            scenario = tiny(("slo", limits), *changes)
            requests = workload(scenario)
            for rate in (1.0, 3.0, 8.0, 12.0, 20.0, 100.0):
                watched = trial(scenario, rate, requests)
                assert watched.met is simulate(at_rate(scenario, rate)).summary["slo_met"], (limits, changes, rate)
                assert not (watched.stopped and watched.met)
                stopped += watched.stopped
    assert stopped > 5


@pytest.mark.parametrize("command", ["capacity", "cost"])
def test_not_feasible_is_an_answer(command: str, call: Call) -> None:
    limit = ("--set", "slo.tbt_p99=0.001", "--seeds", "2", "--policy", "stall-free")
    result = strict(call(command, "s.toml", "--json", *limit)[0])
    found = result["results"][0] if command == "capacity" else result
    assert (found["rate"], found["limited_by"]) == (0, "tbt_p99")
    page, _ = call(command, "s.toml", *limit)
    assert "not feasible" in page and "tbt_p99" in page
    if command == "cost":
        assert result["per_million_output_tokens"] is None


def test_a_request_that_can_never_be_served_limits_every_rate(call: Call) -> None:
    out, _ = call("capacity", "s.toml", "--json", "--set", "engine.num_blocks=20", "--seeds", "2")
    for result in strict(out)["results"]:
        assert (result["rate"], result["limited_by"], result["interval"]) == (0, "refused", [0, 0])


def test_what_no_rate_violates_has_no_limit(call: Call) -> None:
    out, _ = call("capacity", "s.toml", "--json", "--set", "slo={e2e_p99=1e9}", "--seeds", "1", "--policy", "orca")
    (result,) = strict(out)["results"]
    assert result["limited_by"] is None and result["rate"] > 1000
    assert any("the SLO does not limit it" in note for note in result["notes"])


def test_attainment_is_a_limit_too(call: Call) -> None:
    slo = ("--set", "slo={ttft=0.3, tbt_max=0.08, attainment=0.9}", "--seeds", "1", "--policy", "stall-free")
    (result,) = strict(call("capacity", "s.toml", "--json", *slo)[0])["results"]
    assert result["limited_by"] == "attainment" and result["rate"] > 0


def rate_of(*settings: tuple[str, Any]) -> float:
    (found,) = capacity(tiny(("workload.requests", 200), *settings), ["stall-free"], seeds=1)
    return found.rate


def test_capacity_grows_with_what_serves_and_with_patience() -> None:
    base = rate_of()
    assert rate_of(("deployment.replicas", 2)) > 1.5 * base
    assert rate_of(("latency.step", 0.02)) < base
    assert rate_of(("slo.scheduling_delay_p50", 2.0)) >= base
    assert rate_of(("slo.tbt_p99", 0.04)) <= base


def test_a_trace_is_searched_by_scaling_its_gaps(call: Call, here: Path) -> None:
    rows = "".join(f"{i * 0.25},{20 + i % 5 * 60},{2 + i % 7}\n" for i in range(60))
    (here / "t.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    trace = "{kind='trace', path='t.csv'}"
    new = ("--set", f"workload.arrivals={trace}", "--set", f"workload.lengths={trace}", "--policy", "stall-free")
    for slo, limit in (("{ttft_p99=0.3}", "ttft_p99"), ("{ttft_p99=1e9}", None)):
        asked = ("capacity", "s.toml", "--json", "--seeds", "2", "--set", f"slo={slo}")
        (result,) = strict(call(*asked, *new)[0])["results"]
        assert result["trials"][0]["rate"] == pytest.approx(4.0)  # its own rate first
        assert result["limited_by"] == limit
        assert result["interval"] == pytest.approx([result["rate"]] * 2, rel=0.011)
    assert any("its interval says nothing" in note for note in result["notes"])


# Cost.


def test_cost_by_hand() -> None:
    assert per_million(2.0, 2, 1.0, 415.0) == pytest.approx(2.0 * 2 / 3600 / (1.0 * 415) * 1e6)
    assert round(per_million(2.0, 2, 1.0, 415.0) or 0, 2) == 2.68


def test_cost_at_a_given_rate_by_hand(call: Call) -> None:
    new = ("--set", "slo={}", "--set", "deployment.replicas=2", "--rate", "1", "--requests", "10")
    lengths = ("--set", "workload.lengths={kind='fixed', prompt=85, output=415}")
    result = strict(call("cost", "s.toml", "--json", *new, *lengths)[0])
    assert (result["devices"], result["rate"], result["rate_from"]) == (2, 1.0, "scenario")
    assert round(result["per_million_output_tokens"], 2) == 2.68
    assert result["per_million_tokens"] == pytest.approx(result["per_million_output_tokens"] * 415 / 500)
    assert result["sensitivity"]["load"]["0.5"] == pytest.approx(2 * result["per_million_output_tokens"])
    assert result["sensitivity"]["gpu_hour"]["1.1"] == pytest.approx(1.1 * result["per_million_output_tokens"])


def test_a_stricter_slo_costs_more() -> None:
    result = cost(tiny(("workload.requests", 200)), seeds=1)
    strict_slo, given, relaxed = (result["sensitivity"]["slo"][scale]["rate"] for scale in ("0.5", "1.0", "2.0"))
    assert strict_slo <= given <= relaxed
    assert given == result["rate"]


# The process.


def servecast(*arguments: str, cwd: Path, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sim", *arguments]
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **more
    )


def test_python_m_sim_and_the_console_command_are_one(here: Path) -> None:
    script = Path(sys.executable).with_name("servecast")
    commands = [[sys.executable, "-m", "sim"], *([[str(script)]] if script.exists() else [])]
    for command in commands:
        done = subprocess.run(
            [*command, "run", "s.toml", "--json"], cwd=here, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert strict(done.stdout)["name"] == "tiny"
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
        assert version.returncode == 0 and version.stdout.strip()


@pytest.mark.parametrize("arguments", [("list", "models"), ("check", "s.toml"), ("list", "models", "--json")])
def test_a_closed_pipe_is_no_error_to_tell_of(arguments: tuple[str, ...], here: Path) -> None:
    process = servecast(*arguments, cwd=here)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # before anything is written
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(30) in (0, 1)


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["page", "json"])
def test_output_is_utf_8_in_any_locale_and_under_any_name(more: tuple[str, ...], here: Path) -> None:
    (here / "accent.toml").write_text(SCENARIO.replace("tiny", "tiny é"), encoding="utf-8")
    (here / "odd\udcff.toml").write_text(SCENARIO.replace('name = "tiny"', ""))
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    for file, name in (("accent.toml", "tiny é"), ("odd\udcff.toml", "odd?")):
        line = [sys.executable, "-m", "sim", "check", os.fsencode(file), *more]
        done = subprocess.run(line, cwd=here, capture_output=True, env=os.environ | ascii_only, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
        assert name in done.stdout.decode("utf-8")


LOADED = """
import sys
before = set(sys.modules)
{first}
print([name for name in ("torch", "flashinfer", "calibrate", "gpu_backend") if name in sys.modules])
"""


@pytest.mark.parametrize(
    "first",
    [
        "import sim",
        "import sim.cli",
        "from sim.__main__ import status; assert status(['run', 's.toml', '--out', 'o']) == 0",
    ],
)
def test_torch_is_never_loaded(first: str, here: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED.format(first=first)], cwd=here, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_torch_need_not_be_installed(here: Path) -> None:
    hide = "import sys; sys.modules['torch'] = sys.modules['flashinfer'] = None\n"
    code = hide + "from sim.__main__ import main; main(['run', 's.toml', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert strict(done.stdout)["offered"] == 60
    code = hide + "from sim.__main__ import main; main(['run', 's.toml', '--executor', 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("servecast: error: --executor: ") and done.stderr.count("\n") == 1


def processes(mark: str) -> list[int]:
    """Those that were started with this mark in their environment, and have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it ended meanwhile, or is another's
            continue
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: SIGTERM's is set when a command begins, after its imports."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("command", ["run", "capacity", "compare"])
def test_an_interrupt_ends_it_at_once_and_leaves_nothing(command: str, number: int, here: Path) -> None:
    mark = f"SERVECAST_TEST_MARK={os.getpid()}-{command}-{number}"
    name, _, value = mark.partition("=")
    arguments = (command, "s.toml", "--requests", "2000000", "--out", "kept")
    process = servecast(*arguments, cwd=here, env=os.environ | {name: value})
    workers = 1 if command == "run" or len(os.sched_getaffinity(0)) == 1 else 3  # and what looks after them
    limit = time.monotonic() + 60
    while not (catches(process.pid, signal.SIGTERM) and len(processes(mark)) >= workers) and time.monotonic() < limit:
        time.sleep(0.02)
    time.sleep(1.0)  # in the middle of it
    assert process.poll() is None
    os.killpg(process.pid, number)  # as a terminal does: to all of them
    started = time.monotonic()
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert (process.returncode, out, err) == (1, "", "servecast: error: interrupted\n")
    assert {path.name for path in here.rglob("*")} == {"s.toml"}
    while processes(mark) and time.monotonic() - started < 5:
        time.sleep(0.02)
    assert processes(mark) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores for two processes")
def test_processes_find_what_one_process_finds() -> None:
    scenario = tiny()
    one, more = (capacity(scenario, ["stall-free", "orca"], seeds=2, tolerance=0.05, workers=n) for n in (1, 2))
    assert one == more
