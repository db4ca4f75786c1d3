"""Decisions: which policy wins, what no rate can meet, what a run that is saturated is worth, what to buy."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from test_cli import Call, call, here, strict, tiny  # noqa: F401 - fixtures

from sim.__main__ import status
from sim.capacity import Capacity, at_rate, by_goodput, capacity, fails_alone, scaled, search, trial
from sim.cheapest import Candidates, Demand, pareto, plan, replicas_for, sized
from sim.cost import cost
from sim.errors import BadInput
from sim.policies import COMPARED
from sim.saturation import saturation
from sim.scenario import Scenario
from sim.simulate import simulate, workload
from sim.verdicts import line, student, verdicts

ROOT = Path(__file__).resolve().parents[1]
CANDIDATES = """
rate = 12.0
[grid]
"scheduler.policy" = ["stall-free", "orca"]
"deployment.tensor_parallel" = [1, 2]
[capacity]
seeds = 1
tolerance = 0.05
"""


# Which of two policies holds more.


def pair(first: Sequence[float], second: Sequence[float], tolerance: float = 0.01) -> dict[str, Any]:
    rates = zip("ab", (first, second), strict=True)
    found = [Capacity(name, seeds[0], None, None, (), dict(enumerate(seeds))) for name, seeds in rates]
    (verdict,) = verdicts(found, tolerance)
    return verdict


def test_students_t_is_that_of_the_tables() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 4, 5, 9, 30, 200):
        assert student(freedom) == pytest.approx(float(stats.t.ppf(0.975, freedom)), rel=2e-3)


def test_the_interval_of_a_ratio_is_that_of_the_paired_logarithms() -> None:
    stats = pytest.importorskip("scipy.stats")
    first, second = [2.0, 3.1, 2.4, 5.0], [1.5, 2.0, 1.9, 3.2]
    told = pair(first, second)
    logs = [log(a / b) for a, b in zip(first, second, strict=True)]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(logs), scale=stats.sem(logs))
    assert told["interval"] == pytest.approx([exp(low), exp(high)], rel=2e-3)
    assert told["ratio"] == pytest.approx(exp(float(np.mean(logs))))
    assert (told["winner"], told["verdict"], told["seeds"]) == ("a", "a beats b", 4)
    assert pair(second, first)["verdict"] == "b beats a"


def test_what_cannot_be_told_says_how_many_seeds_would() -> None:
    told = pair([2.0, 3.0, 2.0, 3.4], [1.9, 2.0, 2.4, 2.6])
    assert told["winner"] is None and "cannot tell" in told["verdict"]
    assert told["interval"][0] < 1 < told["interval"][1]
    assert 4 < told["seeds_needed"] < 100
    assert f"about {told['seeds_needed']} would tell" in line(told)
    one = pair([2.0], [1.0])
    assert (one["winner"], one["seeds_needed"]) == (None, 2)
    never = pair([1.0, 2.0], [2.0, 1.0])
    assert never["winner"] is None
    assert never["seeds_needed"] is None or never["seeds_needed"] > 100


def test_a_difference_within_the_tolerance_is_none() -> None:
    assert pair([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])["verdict"] == "a and b: no difference"
    small = pair([1.004, 2.008, 3.012], [1.0, 2.0, 3.0])
    assert small["winner"] is None and "no difference" in small["verdict"]
    assert pair([1.004, 2.008, 3.012], [1.0, 2.0, 3.0], tolerance=0.001)["winner"] == "a"


def test_rates_of_zero() -> None:
    assert pair([2.0, 3.0], [0.0, 0.0])["winner"] == "a"
    assert pair([0.0, 0.0], [2.0, 3.0])["winner"] == "b"
    neither = pair([0.0, 0.0], [0.0, 0.0])
    assert (neither["winner"], neither["ratio"], neither["seeds_needed"]) == (None, None, None)
    some = pair([2.0, 3.0, 2.0], [0.0, 1.0, 0.0])
    assert some["winner"] is None and some["seeds_needed"] == 6
    assert pair([2.0] * 6, [0.0, 1.0, 0.0, 1.0, 1.0, 1.0])["winner"] == "a"
    assert pair([2.0, 0.0, 2.0], [0.0, 1.0, 0.0])["seeds_needed"] is None
    for told in (neither, some):
        json.dumps(told, allow_nan=False)
        assert line(told)


def test_capacity_has_a_verdict_for_every_pair(call: Call) -> None:  # noqa: F811
    asked = ("capacity", "s.toml", "--policies", "stall-free,orca,prefill-first", "--seeds", "2")
    result = strict(call(*asked, "--json")[0])
    pairs = [one["policies"] for one in result["verdicts"]]
    assert pairs == [["stall-free", "orca"], ["stall-free", "prefill-first"], ["orca", "prefill-first"]]
    seeds = {row["policy"]: row["seeds"] for row in result["results"]}
    first = result["verdicts"][0]
    logs = [log(seeds["stall-free"][seed] / seeds["orca"][seed]) for seed in seeds["orca"]]
    assert first["ratio"] == pytest.approx(exp(sum(logs) / 2))
    page, _ = call(*asked)
    assert first["verdict"] in " ".join(page.split())


# Capacity by goodput.


def test_goodput_is_searched_beside_the_percentiles(call: Call) -> None:  # noqa: F811
    slo = ("--set", "slo.ttft=0.3", "--set", "slo.tpot=0.05", "--seeds", "1", "--policy", "stall-free")
    result = strict(call("capacity", "s.toml", "--json", "--goodput", "0.8", *slo)[0])
    (by_percentile,), (by_share,) = result["results"], result["goodput"]["results"]
    assert by_percentile["limited_by"] in ("tbt_p99", "scheduling_delay_p50")
    assert by_share["limited_by"] == "attainment" and result["goodput"]["share"] == 0.8
    best = max((one for one in by_share["trials"] if one["met"]), key=lambda one: one["rate"])
    assert best["attainment"] >= 0.8
    summary = strict(call("run", "s.toml", "--json", *slo[:4], "--rate", str(best["rate"]))[0])
    assert (best["attainment"], best["goodput"]) == (summary["attainment"], summary["goodput"])
    page, _ = call("capacity", "s.toml", "--goodput", "0.8", *slo)
    assert "tbt_p99 ≤ 0.07 s" in page and "attainment ≥ 0.8" in page


def test_without_percentiles_goodput_is_the_answer(call: Call) -> None:  # noqa: F811
    slo = ("--set", "slo={ttft=0.3}", "--seeds", "1", "--policy", "orca")
    result = strict(call("capacity", "s.toml", "--json", "--goodput", "0.9", *slo)[0])
    assert result["results"] == result["goodput"]["results"]
    with pytest.raises(BadInput, match="limit per request"):
        by_goodput(tiny(), 0.9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("capacity", "s.toml", "--goodput", "0"), "--goodput: 0 must be greater than 0 and at most 1"),
        (("capacity", "s.toml", "--goodput", "0.9"), "s.toml: [slo]: goodput needs a limit per request"),
        (("cost", "s.toml", "--headroom", "1.5"), "--headroom: 1.5 must be"),
        (("cost", "s.toml", "--spare", "-1"), "--spare: -1 must be from 0 to 1000"),
    ],
)
def test_options_that_cannot_be(arguments: tuple[str, ...], words: str, here: Path, capsys: Any) -> None:  # noqa: F811, ARG001
    assert status(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and words in err


# What no rate can meet.


def test_a_search_that_cannot_succeed_ends_early() -> None:
    for limits, key in (
        ({"tbt_p99": 0.001}, "tbt_p99"),
        ({"ttft_p50": 0.005}, "ttft_p50"),
        ({"tpot": 0.005, "attainment": 0.9}, "attainment"),
    ):
        found = search(tiny(("slo", limits)))
        assert (found.rate, found.limited_by, found.alone) == (0.0, key, key)
        assert len(found.trials) == 3
    (held,) = capacity(tiny(("slo", {"tbt_p99": 0.001})), ["stall-free"], seeds=2)
    assert any("one at a time" in note for note in held.notes)


@pytest.mark.parametrize("policy", COMPARED)
def test_a_request_alone_is_served_as_fast_as_it_can_be(policy: str) -> None:
    """What ends a search: no rate gives any request a shorter TTFT, E2E or longest gap, but for rounding."""
    for changes in ((), (("scheduler.token_budget", 64),), (("engine.num_blocks", 150),)):
        scenario = tiny(("latency.context", 1e-6), ("latency.prefill_attention", 1e-7), *changes)
        scenario = scenario.for_policy(policy)
        one = simulate(scenario.with_(workload__arrivals={"kind": "closed", "concurrency": 1, "think": 0.0})).requests
        for rate in (0.5, 4.0, 40.0):
            other = simulate(at_rate(scenario, rate)).requests
            for key in ("first_token_s", "finished_s"):
                alone, among = one[key] - one["arrival_s"], other[key] - other["arrival_s"]
                assert (among >= alone - 1e-9).all(), (policy, rate, key)
            assert (other["longest_gap_s"] >= one["longest_gap_s"] - 1e-9).all(), (policy, rate)


def test_nothing_is_concluded_where_it_would_not_follow() -> None:
    hard = tiny(("slo", {"tbt_p99": 0.001}))
    assert fails_alone(hard, workload(hard)) == "tbt_p99"
    for changes in (("metrics.warmup", 1.0), ("engine.time_limit", 5.0), ("latency.context", 0.01)):
        other = tiny(("slo", {"tbt_p99": 0.001}), changes)
        assert fails_alone(other, workload(other)) is None
    feasible = tiny()
    assert fails_alone(feasible, workload(feasible)) is None


def test_searches_end_where_they_would_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        tiny(("slo", slo), ("scheduler.policy", policy))
        for policy in ("stall-free", "orca")
        for slo in ({"tbt_p99": 0.012}, {"e2e_p50": 0.25}, {"ttft": 0.02, "attainment": 0.5}, {"tpot_p90": 0.0099})
    ]
    early = [search(one) for one in cases]
    monkeypatch.setattr(sys.modules["sim.capacity"], "fails_alone", lambda *_: None)  # `sim.capacity` is the function
    late = [search(one) for one in cases]
    assert [one.rate for one in early] == [one.rate for one in late]
    assert any(one.alone for one in early) and any(one.rate for one in early)


def test_attainment_stops_trials_that_would_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.cluster.EVENTS_BETWEEN_LOOKS", 50)
    stopped = met = 0
    for limits in ({"ttft": 0.2}, {"e2e": 1.0}, {"tpot": 0.03}, {"tbt_max": 0.05}):
        for changes in ((), (("engine.time_limit", 10.0),)):
            for share in (0.5, 0.9):
                scenario = tiny(("slo", limits | {"attainment": share}), *changes)
                requests = workload(scenario)
                for rate in (1.0, 8.0, 200.0):
                    watched = trial(scenario, rate, requests)
                    assert watched.met is simulate(at_rate(scenario, rate)).summary["slo_met"], (limits, share, rate)
                    stopped, met = stopped + watched.stopped, met + watched.met
    assert stopped > 5 and met > 5


# Saturation.


def one_at_a_time(load: float, seed: int, *, n: int = 1000, cv: float = 1.0) -> Any:
    """M/D/1 (G/D/1 where cv is not 1) by Lindley's recursion: a request takes a second."""
    arrival = np.cumsum(np.random.default_rng(seed).gamma(1 / cv**2, cv**2 / load, n))
    place = np.arange(n)
    scheduled = np.maximum.accumulate(arrival - place) + place
    return saturation(arrival, scheduled, np.ones(n))


def share(load: float, **more: Any) -> float:
    return float(np.mean([one_at_a_time(load, seed, **more).saturated for seed in range(200)]))


def test_a_stable_queue_is_not_called_saturated_and_a_growing_one_is() -> None:
    """Of 200 runs of 1,000 requests each; near a load of 1, chance decides, and it errs on the silent side."""
    assert share(0.5) == share(0.8) == share(0.9) == 0
    assert share(0.95) <= 0.01
    assert 0.3 <= share(1.05) <= 0.7
    assert share(1.2) >= 0.99
    assert share(2.0) == 1


def test_bursts_do_not_fool_it() -> None:
    for n in (200, 2000):
        assert share(0.8, cv=3.0, n=n) <= 0.01
        assert share(0.9, cv=3.0, n=n) <= 0.02
    assert share(2.0, cv=3.0, n=2000) >= 0.99


def test_what_it_holds_is_what_it_serves() -> None:
    told = one_at_a_time(2.0, 3)
    assert told.served_rate == pytest.approx(1.0, rel=0.01)
    assert told.asked_rate == pytest.approx(2.0, rel=0.1)
    assert told.delay_growth == pytest.approx(1.0, rel=0.15)  # 2 requests a second: each second brings 2 s of work


def md1(load: float, *, requests: int = 400, seed: int = 1, replicas: int = 1) -> Scenario:
    return tiny(
        ("engine.max_sequences", 1),
        ("latency.step", 0.1),
        ("latency.token", 0.0),
        ("deployment.replicas", replicas),
        ("workload.requests", requests),
        ("workload.seed", seed),
        ("workload.arrivals.rate", 10 * load * replicas),
        ("workload.lengths", {"kind": "fixed", "prompt": 8, "output": 1}),
    )


@pytest.mark.parametrize("policy", ["stall-free", "prefill-first", "orca", "decode-first"])
def test_a_run_says_that_it_is_saturated(policy: str) -> None:
    for seed in range(3):
        busy = simulate(md1(0.9, seed=seed).for_policy(policy)).summary
        over = simulate(md1(1.5, seed=seed).for_policy(policy)).summary
        assert busy["saturated"] is False and busy["served_rate"] is None
        assert over["saturated"] is True
        assert over["served_rate"] == pytest.approx(10.0, rel=0.02)
    assert simulate(md1(1.5, requests=2000, replicas=4).for_policy(policy)).summary["saturated"] is True


def test_where_it_cannot_be_told_it_is_null() -> None:
    closed = {"kind": "closed", "concurrency": 4, "think": 0.0}
    for changes in (
        (("workload.arrivals", closed),),
        (("workload.arrivals", {"kind": "at-once"}),),
        (("workload.requests", 99),),
        (("engine.num_blocks", 1), ("workload.lengths", {"kind": "fixed", "prompt": 80, "output": 1})),
    ):
        scenario = md1(2.0).with_(**{key.replace(".", "__"): value for key, value in changes})
        assert simulate(scenario).summary["saturated"] is None, changes


def test_a_run_that_was_cut_off_is_judged_by_what_arrived() -> None:
    summary = simulate(md1(2.0).with_(engine__time_limit=15.0)).summary
    assert summary["unfinished"] > 0 and summary["saturated"] is True
    assert summary["served_rate"] == pytest.approx(10.0, rel=0.02)


def test_the_page_says_it_first(call: Call, here: Path) -> None:  # noqa: F811
    (here / "md1.toml").write_text(md1(2.0).to_toml())
    page, _ = call("run", "md1.toml")
    assert page.startswith("saturated: asked ") and "served 10" in page
    assert "length of the run, not of the service" in " ".join(page.split())
    page, _ = call("compare", "md1.toml", "--policies", "stall-free,orca")
    assert page.startswith("stall-free: saturated") and "orca: saturated" in page
    page, _ = call("run", "md1.toml", "--rate", "5")
    assert "saturated" not in page


# What it costs.


def test_planned_cost_by_hand(call: Call) -> None:  # noqa: F811
    asked = ("--seeds", "1", "--headroom", "0.5", "--spare", "2", "--set", "deployment.replicas=2")
    result = strict(call("cost", "s.toml", "--json", *asked)[0])
    planned = result["planned"]
    assert (planned["headroom"], planned["spare"], planned["devices"], result["devices"]) == (0.5, 2, 4, 2)
    assert planned["rate"] == 0.5 * result["rate"]
    assert planned["per_million_output_tokens"] == pytest.approx(4 * result["per_million_output_tokens"])
    by_hand = 2.0 * 2 / 3600 / (result["rate"] * result["mean_prompt_tokens"]) * 1e6
    assert result["per_million_input_tokens"] == pytest.approx(by_hand)


def test_longer_requests_cost_more() -> None:
    result = cost(tiny(("workload.requests", 200)), seeds=1)
    for part in ("prompt", "output"):
        rates = [result["sensitivity"][part][scale]["rate"] for scale in ("0.8", "1.25")]
        assert rates[0] > result["rate"] * 0.99 and rates[1] < result["rate"] * 1.01, part
    assert result["planned"]["headroom"] == 0.8


def test_scaled_lengths_stay_within_what_a_request_may_hold() -> None:
    requests = workload(tiny())
    longer = scaled(requests, (5.0, 60.0), 2048)
    assert (longer.prompts + longer.outputs).max() <= 2048 and longer.outputs.min() >= 1
    assert (longer.prompts == np.minimum(5 * requests.prompts, 2047)).all()
    assert scaled(requests, (0.001, 0.001), 2048).prompts.max() == 1


# What to buy.


@pytest.fixture
def candidates(here: Path) -> Path:  # noqa: F811
    (here / "c.toml").write_text(CANDIDATES)
    return here


def load(text: str, folder: Path, **more: Any) -> Candidates:
    (folder / "c.toml").write_text(text)
    return Candidates.load(folder / "c.toml", folder / "s.toml", **more)


def test_the_cheapest_is_found_and_adds_up(candidates: Path) -> None:
    one = load(CANDIDATES, candidates)
    done = plan(one, workers=1)
    rows = done.ranked
    assert len(rows) == 4 and rows[0]["cost_per_hour"] == min(row["cost_per_hour"] for row in rows)
    for row in rows:
        scenario = one.study.base.vary(one.study.settings(one.study.points[row["point"]]))
        (held,) = capacity(scenario, [row["policy"]], seeds=1, tolerance=0.05)
        assert row["capacity_rate"] == held.rate
        assert row["replicas"] == -(-12.0 // (held.rate * 0.8))
        assert row["devices"] == (row["replicas"] + 1) * row["tensor_parallel"]
        assert row["cost_per_hour"] == 2.0 * row["devices"]
        tokens = workload(scenario).outputs.mean() * 12.0 * 3600
        assert row["cost_per_million_output_tokens"] == pytest.approx(row["cost_per_hour"] / tokens * 1e6)
        assert row["load"] <= 0.8 + 1e-9
        there = simulate(at_rate(scenario.with_(deployment__replicas=1), 12.0 / row["replicas"])).summary
        assert (row["ttft_s_p50"], row["ttft_s_p99"]) == (there["ttft_s"]["p50"], there["ttft_s"]["p99"])
        assert row["tbt_s_p99"] == there["tbt_s"]["p99"]
    assert done.verdict.startswith(f"cheapest: {rows[0]['replicas'] + 1} × device TP1 stall-free 512")


def test_the_front_holds_what_nothing_beats() -> None:
    assert pareto([[1, 5], [2, 4], [2, 5], [3, 3], [None, 1], [None, 2]]) == [True, True, False, True, True, False]
    assert pareto([[1, 1], [1, 1]]) == [True, True]


def test_replicas_are_rounded_up_and_an_exact_fit_is_one() -> None:
    demand = Demand(rate=24.0, headroom=0.8, spare=0)
    assert [replicas_for(demand, rate) for rate in (1e9, 30.0, 29.9, 10.0, 3.0)] == [1, 1, 2, 3, 10]


def test_what_is_infeasible_says_why(candidates: Path) -> None:
    text = CANDIDATES.replace("[grid]", '[set]\n"slo.tbt_p99" = 0.001\n[grid]')
    done = plan(load(text, candidates), workers=1)
    assert not done.ranked and len(done.infeasible) == 4
    assert all(one["reason"] == "no rate meets the SLO: limited by tbt_p99" for one in done.infeasible)
    assert done.verdict == "none of 4 candidates serves the demand within the SLO"
    assert done.to_dict()["cheapest"] is None and done.frame["pareto"].to_list() == [False] * 4


def test_a_model_that_does_not_fit_is_infeasible() -> None:
    scenario = Scenario.load(ROOT / "scenarios/llama-3.1-70b-4xh100.toml")
    with pytest.raises(BadInput, match=r"weights|memory|fit"):
        sized(Demand(10.0, 0.8, 1), scenario.with_(latency__kind="roofline", deployment__tensor_parallel=1))


def test_the_demand_is_that_of_the_option_then_the_file_then_the_scenario(candidates: Path) -> None:
    assert load(CANDIDATES, candidates).demand.rate == 12.0
    assert load(CANDIDATES, candidates, rate=3.0).demand.rate == 3.0
    assert load(CANDIDATES.replace("rate = 12.0", ""), candidates).demand.rate == 2.0


def test_the_command_answers_keeps_and_resumes(candidates: Path, capsys: Any) -> None:
    asked = ("plan", "s.toml", "c.toml", "--workers", "1", "--out", "kept")
    assert status((*asked, "--json")) == 0
    result = strict(capsys.readouterr().out)
    assert result["verdict"].startswith("cheapest: ") and result["cheapest"] == result["results"][0]
    folder = candidates / "kept"
    assert strict((folder / "plan.json").read_text()) == result
    frame = pl.read_parquet(folder / "plan.parquet")
    assert frame.height == 4 and frame.filter("pareto")["point"].sort().to_list() == sorted(result["pareto"])
    assert Candidates.load(folder / "candidates.toml", folder / "scenario.toml").demand.rate == 12.0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert status((*asked, "--resume")) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert page.startswith("cheapest: ") and "stall-free" in page
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert status((*asked, "--resume", "--rate", "99")) == 2
    assert "another study" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rate = 12.0", "rat = 12.0", "c.toml: [rat]: unknown key 'rat'; did you mean 'rate'?"),
        ("rate = 12.0", "headroom = 1.5", "c.toml: [headroom]"),
        ("rate = 12.0", "[price]\nh1000 = 1.0", "c.toml: [price] h1000"),
        ("[1, 2]", '[1, 2]\n"deployment.replicas" = [1, 2]', "[grid] deployment.replicas: the plan finds it"),
        ("[1, 2]", '[1, 2]\n"workload.arrivals.rate" = [1, 2]', "[grid] workload.arrivals.rate: the demand is `rate`"),
        ("[1, 2]", '[1, "x"]', "[grid] deployment.tensor_parallel"),
        ("rate = 12.0", "rate = ", "c.toml: not TOML"),
    ],
)
def test_a_file_of_candidates_that_cannot_be(old: str, new: str, words: str, candidates: Path, capsys: Any) -> None:
    (candidates / "c.toml").write_text(CANDIDATES.replace(old, new))
    assert status(("plan", "s.toml", "c.toml")) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and words in err, err


def test_every_device_needs_its_price(tmp_path: Path) -> None:
    scenario = ROOT / "scenarios/llama-3.1-8b-h100.toml"
    axes = '[grid]\n"device.name" = ["h100-sxm", "h200"]\n'
    (tmp_path / "c.toml").write_text("[price]\nh100-sxm = 3.0\n" + axes)
    with pytest.raises(BadInput, match="the price of one h200 for one hour") as error:
        Candidates.load(tmp_path / "c.toml", scenario)
    assert error.value.key == "[price] h200"
    (tmp_path / "c.toml").write_text("[price]\nh100-sxm = 3.0\nh200 = 4.0\n" + axes)
    one = Candidates.load(tmp_path / "c.toml", scenario)
    prices = [one.demand.price(one.study.base.vary(one.study.settings(point))) for point in one.study.points]
    assert prices == [3.0, 4.0]


def test_the_shipped_candidates_can_be_planned() -> None:
    one = Candidates.load(ROOT / "scenarios/studies/plan-llama-3.1-8b.toml", ROOT / "scenarios/llama-3.1-8b-h100.toml")
    assert len(one.study.points) >= 8 and one.demand.prices
