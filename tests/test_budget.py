"""The token budget: the latency model inverted, aligned, checked by simulation; "auto"; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.__main__ import status
from sim.affine import Affine, AffineTable
from sim.budget import Assumed, assume, invert, iteration_seconds
from sim.planner import budget
from sim.scenario import Scenario
from sim.simulate import plan, simulate, workload

AFFINE = """
[engine]
num_blocks = 4000
max_sequences = 64
max_model_tokens = 4096
[scheduler]
policy = "stall-free"
token_budget = 512
[latency]
kind = "affine"
step = 0.01
token = 1e-4
context = 1e-7
prefill_attention = 1e-8
[workload]
requests = 200
[workload.arrivals]
kind = "poisson"
rate = 2.0
[workload.lengths]
kind = "uniform"
prompt = [100, 3000]
output = [10, 200]
[slo]
tbt_p99 = 0.1
"""
ROOFLINE = AFFINE[: AFFINE.index("[latency]")].replace("num_blocks = 4000\n", "") + AFFINE[AFFINE.index("[workload]") :]
YI = '[model]\nname = "yi-34b"\n[device]\nname = "a100-80gb-sxm"\n[deployment]\ntensor_parallel = 2\n'


def one(text: str = AFFINE, **changes: Any) -> Scenario:
    """A scenario with changes."""
    return Scenario.from_toml(text).with_(**changes)


def roofline(**changes: Any) -> Scenario:
    """Yi-34B on two A100 by the roofline model."""
    return one(YI + '[latency]\nkind = "roofline"\n' + ROOFLINE, **changes)


def by_hand(decodes: int, context: int, prior: int, limit: float) -> int:
    """The largest budget of the affine formula, one token after the other."""
    tokens = 0
    for chunk in range(1, 4097):
        attention = chunk * (prior + chunk / 2)
        if 0.01 + 1e-4 * (decodes + chunk) + 1e-7 * decodes * context + 1e-8 * attention > limit:
            break
        tokens = decodes + chunk
    return tokens


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 64), st.integers(0, 4000), st.integers(0, 4000), st.floats(0.012, 0.4))
def test_it_is_the_largest_that_meets_the_limit(decodes: int, context: int, prior: int, limit: float) -> None:
    """By the formula written down, token by token."""
    scenario = one()
    found = invert(scenario, plan(scenario).executor(), limit, Assumed(decodes, context, prior))
    assert (found.unaligned or 0) == by_hand(decodes, context, prior, limit)
    assert found.tile == 1
    assert found.tokens == found.unaligned


@pytest.mark.parametrize("limit", [0.05, 0.07, 0.1, 0.2])
def test_whole_tiles(limit: float) -> None:
    """At the roofline's tile, and the next tile is too slow."""
    scenario = roofline()
    assumed = Assumed(32, 1024, 0)
    found = invert(scenario, plan(scenario).executor(), limit, assumed)
    assert found.tokens is not None
    assert found.tokens % 128 == 0
    assert found.tbt is not None
    assert found.tbt <= limit
    after = iteration_seconds(plan(scenario).executor(), assumed, found.tokens + 128 - 32)
    assert after > limit


def test_prior_context_leaves_less() -> None:
    """A chunk late in a prompt attends to more."""
    scenario, limit = roofline(), 0.1
    budgets = [
        invert(scenario, plan(scenario).executor(), limit, Assumed(32, 1024, prior)).unaligned
        for prior in (0, 1000, 4000, 16000)
    ]
    assert budgets == sorted(budgets, reverse=True)  # type: ignore[type-var]
    assert budgets[0] > budgets[-1]  # type: ignore[operator]


def test_no_budget_meets_it() -> None:
    """Decodes alone take longer: an answer, with its reason, and exit 0."""
    scenario = one(slo={"tbt_p99": 0.012})
    found = budget(scenario, decodes=64, context=3000)
    assert found["token_budget"] is None
    assert found["token_budget_unaligned"] is None
    assert "64 decodes alone take" in found["notes"][0]
    assert found["checked"]["met"] is False


def test_an_iteration_of_it_takes_what_is_said() -> None:
    """`tbt_s` is the executor's own time of that iteration."""
    scenario = one()
    found = budget(scenario, decodes=20, context=1000, prior=500, check=False)
    executor = Affine(AffineTable(kind="affine", step=0.01, token=1e-4, context=1e-7, prefill_attention=1e-8), 1)
    chunk = found["token_budget"] - 20
    assert found["tbt_s"] == iteration_seconds(executor, Assumed(20, 1000, 500), chunk) <= 0.1
    assert found["assumed"] == {"decodes": 20, "context_tokens_per_decode": 1000, "prior_context_tokens": 500}


def test_the_check_is_the_simulation() -> None:
    """What it says of the simulated TBT is what a run with that budget says."""
    scenario = one()
    found = budget(scenario)
    summary = simulate(scenario.with_(scheduler__token_budget=found["token_budget"])).summary
    assert found["checked"]["tbt_s"] == summary["tbt_s"]["p99"] <= 0.1
    assert found["checked"]["met"]


def test_a_budget_that_does_not_hold_is_made_smaller() -> None:
    """Assumed to have nothing beside the chunk, the model allows too much; simulation finds what holds."""
    scenario = one(slo={"tbt_p99": 0.06}, workload__arrivals__rate=6.0)
    found = budget(scenario, decodes=0, prior=0)
    assert found["token_budget"] < found["token_budget_unaligned"]
    assert found["checked"]["met"]
    assert found["checked"]["tbt_s"] <= 0.06


def test_overhead_by_hand() -> None:
    """Chunks of a prompt alone against one piece: each more chunk costs a step here, and no attention."""
    scenario = one(latency={"kind": "affine", "step": 0.01, "token": 1e-4})
    found = budget(scenario, decodes=0, context=0, prior=0, check=False)
    prompt = int(np.median(workload(scenario).prompts))
    pieces = -(-prompt // found["token_budget"])
    assert found["prefill_overhead"] == pytest.approx(0.01 * (pieces - 1) / (0.01 + 1e-4 * prompt))


def test_what_is_assumed_of_the_workload() -> None:
    """Little's law at the limit, at the quantile; never more than there may be."""
    scenario = one()
    requests = workload(scenario)
    mean = 2.0 * (requests.outputs - 1).mean() * 0.1
    assert assume(scenario, requests, 0.1, 0.5).decodes == int(np.ceil(mean))
    assert assume(scenario, requests, 0.1, 0.9).decodes > mean
    assert assume(scenario, requests, 100.0).decodes == 64
    closed = one(workload__arrivals={"kind": "closed", "concurrency": 7})
    assert assume(closed, workload(closed), 0.1).decodes == 7
    burst = one(workload__arrivals={"kind": "at-once"})
    assert assume(burst, workload(burst), 0.1).decodes == 64


def test_auto_is_the_derived_budget() -> None:
    """In a scenario, and said beside the result; in every trial of a search too."""
    from sim.capacity import capacity

    scenario = one(scheduler__token_budget="auto")
    derived = budget(scenario, check=False)["token_budget"]
    report = simulate(scenario)
    assert report.plan.deployment.limits.token_budget == derived
    assert f"token_budget = auto: {derived} tokens" in report.summary["notes"]
    assert report.plan.scenario.scheduler.token_budget == derived
    (found,) = capacity(scenario, ["stall-free"], seeds=1)
    assert found.rate > 0


def test_auto_where_none_is_feasible_serves_all_the_same() -> None:
    """With the smallest budget, and a note; the verdict is the SLO's."""
    report = simulate(one(scheduler__token_budget="auto", slo={"tbt_p99": 1e-6}))
    assert report.summary["slo_met"] is False
    assert any("no budget meets" in note for note in report.summary["notes"])


def test_auto_is_nothing_to_other_policies() -> None:
    """They have no budget to derive."""
    assert simulate(one(scheduler__token_budget="auto", scheduler__policy="prefill-first")).summary["completed"] == 200


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--policy", "orca"), "[scheduler] policy: 'orca' has no token budget"),
        (("--set", "slo={}"), "[slo]: a token budget follows from a TBT limit"),
        (("--set", 'scheduler.token_budget="auto"', "--set", "slo={}"), "[slo]"),
        (("--quantile", "1"), "--quantile: 1 must be"),
        (("--decodes", "-1"), "--decodes: -1 must be"),
        (("--decodes", "1.5"), "is not a whole number"),
        (("--decodes", "65"), "--decodes: 65 must be at most engine.max_sequences = 64"),
        (("--clock", "wall"), "--clock"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], says: str
) -> None:
    """One line, exit 2."""
    (tmp_path / "s.toml").write_text(AFFINE)
    assert status(["budget", str(tmp_path / "s.toml"), *options]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert says in told.err
    assert told.err.count("\n") == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a page, and as one JSON object with the names that scripts rely on."""
    (tmp_path / "s.toml").write_text(AFFINE)
    assert status(["budget", str(tmp_path / "s.toml")]) == 0
    assert "token budget" in capsys.readouterr().out
    assert status(["budget", str(tmp_path / "s.toml"), "--json", "--out", str(tmp_path / "out")]) == 0
    told = json.loads(capsys.readouterr().out)
    names = {"token_budget", "token_budget_unaligned", "tbt_s", "limit_s", "prefill_overhead", "assumed"}
    assert names <= told.keys()
    assert json.loads((tmp_path / "out" / "budget.json").read_text()) == told
