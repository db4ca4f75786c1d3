"""The paper's settings, published values, figures and profiles; the grid of 48 capacities."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.paper import figures, fit, measures
from calibrate.paper.figures import FIGURES, Task
from calibrate.paper.rows import Figure, Row
from calibrate.paper.settings import DATASETS, DEPLOYMENTS, POLICIES, QUIRKS, SLOS, STUDIED, published, scenario
from sim.__main__ import status
from sim.capacity import Trial
from sim.profile import load
from sim.scenario import Scenario
from sim.simulate import plan

SHARED = Path(__file__).parents[2] / "shared" / "data" / "measured" / "paper-figures"
SCENARIOS = Path(__file__).parents[1] / "scenarios" / "paper"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the public measurements are not here")
SIMULATED = {"tbt_s": {"p99": 0.5}, "ttft_s": {"p50": 2.0}, "bubble_fraction": 0.2, "rate": 1.0, "duration_s": 300.0}
SIMULATED |= {"output_tokens": 28439, "first_decode": 70.0, "longest_stall": 6.0}


def work(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Stands for searches and runs."""
    return [SIMULATED | {"policy": task.scenario.scheduler.policy} for task in tasks]


@pytest.mark.parametrize("name", STUDIED)
@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("slo", SLOS)
def test_the_settings_are_those_of_the_scenario_files(name: str, dataset: str, slo: str) -> None:
    """All but the quirks, which are off there, and the rate, which a search sets."""
    for policy in POLICIES:
        file = Scenario.load(SCENARIOS / f"{name}-{dataset}-{slo}.toml").for_policy(policy)
        ours, theirs = (tomllib.loads(one.to_toml()) for one in (scenario(name, dataset, slo, policy), file))
        assert ours["workload"]["arrivals"].pop("clip") == QUIRKS["workload__arrivals__clip"]
        assert ours["slo"].pop("first_token_gap") is True
        assert ours["engine"].pop("time_limit") == 1800
        assert ours["engine"].pop("schedule_ahead") is True
        assert theirs["engine"].pop("schedule_ahead") is False
        assert ours["workload"]["arrivals"].pop("python_seed") == 42
        ours.pop("latency"), theirs.pop("latency")
        for one in (ours, theirs):
            one["workload"]["arrivals"].pop("rate")
            one.pop("cost")
            one.pop("policy", None)
        if policy != "orca":  # per stage, which the files do not assume
            assert ours["engine"].pop("max_sequences") == 128 * DEPLOYMENTS[name].pipeline_parallel
            assert theirs["engine"].pop("max_sequences") == 128
        assert ours == theirs


@needs_shared
def test_published_capacities_are_those_read_off_the_figures() -> None:
    """All 48."""
    names = {"llama2-70b": "llama-2-70b", "vllm": "prefill-first", "sarathi-serve": "stall-free"}
    with (SHARED / "capacity_fig10_fig11.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 48
    for row in rows:
        model, policy = (names.get(row[key], row[key]) for key in ("model", "scheduler"))
        dataset = "chat" if "sharegpt" in row["dataset"] else "arxiv"
        ours = published()["capacity"][model][dataset][policy][SLOS.index(row["slo"])]
        assert ours == float(row["capacity_qps"])
        assert float(row["p99_tbt_slo_s"]) == scenario(model, dataset, row["slo"]).slo.percentiles["tbt_p99"]


@needs_shared
def test_other_published_values_are_those_read_off_the_figures() -> None:
    """Figs. 6, 9, 13a and 14."""
    told = published()
    with (SHARED / "llama70b_fig6_linear_ms.csv").open() as file:
        for n, row in enumerate(csv.DictReader(file)):
            assert told["tiles"]["tokens"][n] == int(row["num_tokens"])
            for tp in ("tp2", "tp4"):
                assert told["tiles"][tp][n] * 1e3 == pytest.approx(float(row[f"{tp}_ms"]), abs=0.6)
    with (SHARED / "hybrid_batch_fig9.csv").open() as file:
        for n, row in enumerate(csv.DictReader(file)):
            one = told["hybrid"]["mistral-7b" if n < 9 else "llama-2-70b"]
            for ours, theirs in (
                ("decode_only", "decode_only_ms"),
                ("with_chunk", "chunked_ms_derived"),
                ("with_prompt", "full_prefill_ms"),
            ):
                assert one[ours][n % 9] * 1e3 == pytest.approx(float(row[theirs]), rel=0.01)
    with (SHARED / "falcon_fig13a_decode_tbt.csv").open() as file:
        for n, row in enumerate(csv.DictReader(file)):
            assert told["pipeline"]["tp8"][n] == float(row["tp8_p50_tbt_s"])
            assert told["pipeline"]["tp4-pp2"][n] == float(row["tp4pp2_p50_tbt_s"])


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_rows(name: str) -> None:
    """With what they are, a unit and a finite value; the values of published ones are positive."""
    found = FIGURES[name](work)
    assert found.name == name
    assert len({row.what for row in found.rows}) == len(found.rows)
    for row in found.rows:
        assert row.unit
        assert row.simulated is not None
        assert np.isfinite(row.simulated)
        assert row.published is None or row.published > 0
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_conditions_of_results_without_values() -> None:
    """Figs. 1b, 12, 13b and Table 4: limits, batches, budgets, requests."""
    seen: list[Task] = []

    def note(tasks: Sequence[Task]) -> list[dict[str, Any]]:
        seen.extend(tasks)
        return work(tasks)

    FIGURES["figure-12"](note)
    assert len(seen) == 50
    for task in seen:
        one = task.scenario
        assert one.workload.requests == 1024
        if one.scheduler.policy == "prefill-first":
            assert one.engine.max_sequences in (32, 64, 128)
        else:
            assert one.scheduler.token_budget in (512, 2048)
            assert one.engine.max_sequences == 128
    assert {task.scenario.slo.percentiles["tbt_p99"] for task in seen[:25]} == {0.1, 0.2, 0.3, 0.4, 0.5}
    seen.clear()
    FIGURES["table-4"](note)
    assert [(task.scenario.scheduler.policy, task.scenario.scheduler.token_budget) for task in seen] == [
        ("stall-free", 8192),
        ("alternating", 1024),
        ("stall-free", 1024),
        ("stall-free", 16384),
        ("alternating", 1024),
        ("stall-free", 1024),
    ]
    assert all(task.scenario.workload.requests == 128 for task in seen)
    seen.clear()
    FIGURES["figure-1"](note)
    assert [task.scenario.workload.arrivals.kind for task in seen] == ["at-once"] * 2 + ["poisson"] * 6
    assert all(task.scenario.engine.max_sequences == 256 for task in seen)


def test_the_search_is_the_artefacts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of two decimals, halving between 0 and twice the first, until 2.5 % or a hundredth is left."""
    for true in (0.0, 0.004, 0.05, 0.137, 0.731, 1.999):
        asked: list[float] = []

        def trial(
            _one: object, rate: float, _requests: object, true: float = true, asked: list[float] = asked
        ) -> Trial:
            asked.append(rate)
            return Trial(rate, met=rate <= true)

        monkeypatch.setattr(measures, "trial", trial)
        found = measures.capacity(scenario("mistral-7b", figures={}), 1.0)["rate"]
        assert asked[0] == 1.0
        assert all(round(rate, 2) == rate for rate in asked)
        assert found <= true
        assert true < found + max(0.0101, 0.03 * found)


@pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=list(DEPLOYMENTS))
def test_profiles_are_physical(deployment: Any) -> None:
    """Shipped under the names that are relied on; shares at most 1, intervals around them."""
    profile = load(deployment.profile, Path())
    assert profile.name == deployment.profile
    assert profile.roofline is not None
    for name in fit.SHARES:
        value = getattr(profile.roofline, name)
        assert value is None or 0 <= value <= 1
    for name, (low, high) in profile.intervals.items():
        assert low <= getattr(profile.roofline, name) <= high
    assert profile.scale == 1
    beside = {residual.what for residual in profile.residuals if not residual.fitted}
    assert all(what.startswith("decode-only TBT") for what in beside)
    assert bool(beside) == (deployment is DEPLOYMENTS["falcon-180b"])
    assert {"source", "command", "fitted_to", "does_not_know"} <= profile.provenance.keys()


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_residuals_of_a_profile_are_what_it_says_now(name: str) -> None:
    """Those that need no search, recomputed."""
    profile = load(DEPLOYMENTS[name].profile, Path())
    assert profile.roofline is not None
    told = {one.what: one.predicted for one in profile.residuals}
    for observation in fit.observations(name):
        if not observation.what.startswith("capacity"):
            now = observation.predict(profile.roofline.model_dump(exclude_none=True), 0.0)
            assert told[observation.what] == pytest.approx(now, rel=2e-3)
    assert len(told) == len(fit.observations(name))


def test_the_fit_finds_figures_that_made_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observations made by known figures: they come back where the data tell them."""
    truth = {"compute_efficiency": 0.55, "memory_efficiency": 0.7, "step": 4e-3, "overlap": 0.4}
    truth |= {"kv_efficiency": 0.75, "attention_efficiency": 0.5, "sequence": 1e-4}
    batches: list[tuple[int, int, list[tuple[int, int]]]] = [
        *((n, 1024, []) for n in (1, 8, 32, 64, 128)),
        *((n, 8192, []) for n in (8, 64)),
        *((0, 0, [(0, tokens)]) for tokens in (64, 256, 512, 1024, 2048, 4096, 16384)),
        (32, 1024, [(0, 480)]),
    ]

    def predict(n: int, figures: dict[str, Any], _near: float) -> float:
        decodes, context, chunks = batches[n]
        return measures.iteration(scenario("mistral-7b", figures=figures), decodes, context, chunks)

    from functools import partial

    made = [
        fit.Observation(f"batch {n}", "s", predict(n, truth, 0.0), 0.002, partial(predict, n))
        for n in range(len(batches))
    ]
    monkeypatch.setattr(fit, "observations", lambda _name: made)
    profile = fit.fit("mistral-7b", rounds=12, said=lambda _line: None)
    assert max(residual.error for residual in profile.residuals) < 0.01
    for name in ("compute_efficiency", "memory_efficiency", "step"):
        assert getattr(profile.roofline, name) == pytest.approx(truth[name], rel=0.15)


def test_names_of_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However they are written; what there is not is named."""
    assert status(["reproduce", "table3", "Fig. 14", "--json", "--out", str(tmp_path / "out")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [figure["figure"] for figure in told["figures"]] == ["table-3", "figure-14"]
    assert json.loads((tmp_path / "out" / "reproduction.json").read_text()) == told
    assert (tmp_path / "out" / "reproduction.parquet").exists()
    for wrong in ("figure-2", "10,11", "10 10", "figure", "table-99"):
        assert status(["reproduce", wrong]) == 2
        assert f"unknown figure '{wrong}'" in capsys.readouterr().err


def test_a_figure_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """Published beside simulated, and how the published values were read."""
    assert status(["reproduce", "14"]) == 0
    told = capsys.readouterr().out
    assert "1.33" in told
    assert "published:" in told


def test_gains_and_orderings_are_counted() -> None:
    """From a grid made by hand: all right, and one setting the wrong way round."""
    told = published()["capacity"]

    def right(tasks: Sequence[Task], factor: float = 1.0) -> list[dict[str, Any]]:
        rates = []
        for task in tasks:
            one = task.scenario
            model, dataset, slo = next(
                (m, d, s) for m in STUDIED for d in DATASETS for s in SLOS if one.name == f"{m}-{d}-{s}"
            )
            rate = told[model][dataset][one.scheduler.policy][SLOS.index(slo)]
            rates.append({"rate": rate * (factor if one.scheduler.policy == "orca" else 1.0)})
        return rates

    same = figures.figure_10(right)
    assert all(row.error == pytest.approx(0) for row in same.rows)
    assert same.notes[-1] == "all orderings as published"
    other = figures.figure_10(lambda tasks: right(tasks, 10.0))
    assert "ordered otherwise" in other.notes[-1]
    assert "8 of 12 capacities" not in same.notes[0]


def test_an_error_needs_a_published_value() -> None:
    """None where there is none."""
    assert Row("a", "s", None, 1.0).error is None
    assert Row("a", "s", 2.0, 1.0).error == -0.5
    assert Figure("f", "t", "r", [Row("a", "s", 2.0, 1.0)]).to_dict()["rows"][0]["error"] == -0.5


@pytest.mark.slow
def test_the_grid_of_48_capacities() -> None:
    """Figs. 10 and 11 from one set of figures per deployment: how many come near, orderings, gains."""
    rows = [row for figure in (figures.figure_10, figures.figure_11) for row in figure(figures.on_cores).rows]
    cells = [row for row in rows if row.unit == "req/s"]
    errors = np.array([abs(row.error or 0.0) for row in cells])
    assert len(errors) == 48
    assert (errors <= 0.35).all()
    assert (errors <= 0.15).sum() >= 40
    for setting in range(0, 48, 3):
        ours, theirs = (
            np.argsort([getattr(row, of) for row in cells[setting : setting + 3]], kind="stable").tolist()
            for of in ("simulated", "published")
        )
        assert ours == theirs
    for over, least in (("orca", 13), ("prefill-first", 13)):
        gains = np.array([abs(row.error or 0.0) for row in rows if row.what.endswith(f"stall-free over {over}")])
        assert len(gains) == 16
        assert (gains <= 0.35).all()
        assert (gains <= 0.15).sum() >= least


def test_base_iterations_and_steps() -> None:
    """Table 3 within 15 %, the step behind 256 tokens, what chunks cost."""
    base = {row.what: row for row in figures.table_3(work).rows}
    assert base.keys() == set(DEPLOYMENTS)
    assert all(abs(row.error or 0.0) <= 0.15 for row in base.values()), base
    steps = [row for row in figures.figure_6(work).rows if "257 over" in row.what]
    assert all(0.1 <= (row.simulated or 0.0) <= 0.5 for row in steps)
    for row in figures.figure_14(work).rows:
        assert row.simulated is not None
        low, high = {"512": (1.10, 1.35), "1024": (1.0, 1.25), "2048": (0.94, 1.06)}[row.what.rpartition(" ")[2]]
        assert low <= row.simulated <= high, row


def test_a_hop_is_counted_once_between_stages() -> None:
    """From the start on the first stage to the end on the last."""
    one = scenario("falcon-180b", figures={})
    step = plan(one).executor().execute(measures.batch_of(8, 1000))
    assert measures.iteration(one, 8, 1000) == sum(step.seconds) + step.hop
