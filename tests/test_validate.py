"""Validation: simulated beside measured, with executors of known cost; and the three commands around a tiny engine.

Where an executor takes exactly what the profile says there is no error; where it is slower, the error is that, is the
latency model's, and is gone where calibration steps beside the run are simulated with.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import tomli_w
from formula import PROFILE, SCENARIO, Formula, truth

from calibrate import commands
from calibrate.rows import load as load_rows
from calibrate.validate import COMPARED, EVERY, Validation, reach, validate, worst
from sim.__main__ import status
from sim.errors import BadInput
from sim.profile import load
from sim.scenario import Scenario
from sim.simulate import plan, simulate

METRICS = [f"{name.removesuffix('_s')}_{percentile}" for name, percentile in COMPARED]
REPORT_FILES = {"requests.parquet", "steps.parquet", "gaps.parquet", "summary.json", "scenario.toml", "vllm_bench.json"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A scenario with the formula's own profile."""
    (tmp_path / "truth.toml").write_text(tomli_w.dumps(PROFILE), encoding="utf-8")
    (tmp_path / "scenario.toml").write_text(tomli_w.dumps(SCENARIO), encoding="utf-8")
    return tmp_path / "scenario.toml"


def attempt(path: Path, executor: Formula, anchor: Formula | None = None) -> Validation:
    """One validation of the scenario."""
    return validate(Scenario.load(str(path)), executor, anchor)


def metric(one: Validation, name: str) -> dict[str, Any]:
    """One row of the comparison."""
    return next(row for row in one.metrics() if row["metric"] == name)


def test_a_perfect_model_has_no_error(path: Path) -> None:
    """Measured, measured again and simulated are the same run to the last batch."""
    one = attempt(path, Formula())
    assert [row["metric"] for row in one.metrics()] == METRICS
    for row in one.metrics():
        assert row["noise"] == 0
        assert row["error"] == pytest.approx(0, abs=1e-9)
        assert row["error_anchored"] is None
        assert row["measured_s"] == row["again_s"] > 0
    told = one.alignment()
    assert told["iterations_measured"] == simulate(Scenario.load(str(path))).summary["iterations"]
    assert told["again_equal_batches"] == told["simulated_equal_batches"] == 1
    assert told["again_first_difference"] is told["simulated_first_difference"] is None
    assert told["predicted_p90_error"] < 1e-9
    assert abs(told["predicted_total"]) < 1e-9
    assert one.attribution() == {
        "latency_model": pytest.approx(0, abs=1e-9),
        "schedule": pytest.approx(0, abs=1e-9),
        "host_share": 0,
    }
    assert worst(one) < 1e-9


def test_the_values_are_those_of_the_runs(path: Path) -> None:
    """Percentiles of the reports, each error relative to the measured one."""
    one = attempt(path, Formula(slower=1.25))
    for row, (name, percentile) in zip(one.metrics(), COMPARED, strict=True):
        assert row["measured_s"] == one.measured.summary[name][percentile]
        assert row["simulated_s"] == one.simulated.summary[name][percentile]
        assert row["error"] == row["simulated_s"] / row["measured_s"] - 1
    assert one.measured.summary["times_from"].startswith("times: measured")
    assert one.simulated.summary["times_from"].startswith("times: profile")


def test_a_slower_machine_is_the_models_error(path: Path) -> None:
    """At 1.1 times the profile's cost, the model is 1 - 1 / 1.1 = 9.1 % low on every batch."""
    one = attempt(path, Formula(slower=1.1))
    told, parts = one.alignment(), one.attribution()
    assert parts["latency_model"] == pytest.approx(1 / 1.1 - 1, rel=1e-6)
    assert told["predicted_median_error"] == pytest.approx(1 - 1 / 1.1, rel=1e-6)
    assert told["predicted_total"] == pytest.approx(1 / 1.1 - 1, rel=1e-6)
    assert abs(parts["schedule"]) < 0.1
    simulated = one.simulated.record.busy / one.measured.record.busy - 1
    assert parts["latency_model"] + parts["schedule"] == pytest.approx(simulated, abs=1e-9)
    assert metric(one, "tbt_p50")["error"] < -0.03
    assert one.profile is None and one.anchored is None


def test_anchors_take_a_slower_machine_into_account(path: Path) -> None:
    """The calibration steps are as slow as the run, and the simulation from those has no error."""
    anchor = Formula(slower=1.1)
    one = attempt(path, Formula(slower=1.1), anchor)
    told, parts = one.alignment(), one.attribution()
    for row in one.metrics():
        assert row["error_anchored"] == pytest.approx(0, abs=0.01), row
    assert metric(one, "tbt_p50")["error"] < -0.03
    assert told["anchored_p90_error"] < 0.01
    assert told["predicted_median_error"] == pytest.approx(1 - 1 / 1.1, rel=1e-6)
    assert parts["latency_model"] == pytest.approx(0, abs=1e-3)
    assert parts["schedule"] == pytest.approx(0, abs=0.01)
    assert worst(one) < 0.01
    assert one.profile is not None
    assert one.profile.model == "llama-40m"
    assert len(one.steps["anchored"]) == len(one.steps["seconds"])


def test_anchors_are_outside_of_the_run(path: Path) -> None:
    """One every few iterations, on the executor beside; the measured run neither sees nor pays for them."""
    alone, executor, at = attempt(path, Formula()), Formula(), []

    def noting(one: dict[str, float]) -> float:
        at.append(len(executor.executed) - 20)
        return truth(one)

    anchor = Formula(noting)
    both = attempt(path, executor, anchor)
    assert both.measured.summary == alone.measured.summary
    ran = sum(len(report.columns("decodes")) for report in (both.measured, both.again))
    assert len(executor.executed) == ran + 20  # warmed up
    first = len(both.measured.columns("decodes"))
    assert [number for number in at if number <= first] == list(range(EVERY, first + 1, EVERY))
    assert len(anchor.executed) >= ran // EVERY
    assert anchor.forgotten == len(anchor.executed)
    assert executor.forgotten >= 2  # before each run


def test_a_machine_that_drifts(path: Path) -> None:
    """Slower in the second run than in the first: that is noise, and is shown as such."""
    iterations = simulate(Scenario.load(str(path))).summary["iterations"]
    calls = iter(range(1_000_000))
    drifting = Formula(lambda one: truth(one) * (1.0 if next(calls) < 20 + iterations else 1.3))
    one = attempt(path, drifting)
    assert metric(one, "tbt_p50")["noise"] > 0.1
    assert metric(one, "tbt_p50")["error"] == pytest.approx(0, abs=1e-9)
    told = one.alignment()
    assert told["simulated_first_difference"] is None
    assert 0 <= told["again_first_difference"] < iterations
    assert told["again_equal_batches"] < 1


def test_schedules_that_part_ways(path: Path) -> None:
    """The first difference is where the columns first differ, and the share of equal batches counts them in order."""
    tables = copy.deepcopy(SCENARIO)
    tables["workload"]["arrivals"]["rate"] = 8.0
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    one = attempt(path, Formula(slower=1.5))
    told, names = one.alignment(), ("prefill_tokens", "decodes", "context_tokens", "chunks", "waiting")
    measured = list(zip(*(one.measured.columns(name).tolist() for name in names), strict=True))
    simulated = list(zip(*(one.simulated.columns(name).tolist() for name in names), strict=True))
    same = [a == b for a, b in zip(measured, simulated, strict=False)]
    assert told["simulated_first_difference"] == same.index(False)
    assert told["simulated_equal_batches"] == sum(same) / max(len(measured), len(simulated))
    assert one.attribution()["schedule"] != 0


def test_host_time_is_shown(path: Path) -> None:
    """The share of the measured seconds before the device could start."""
    one = attempt(path, Formula(host=0.2))
    assert one.attribution()["host_share"] == pytest.approx(0.2)
    assert sum(one.steps["host"]) == pytest.approx(0.2 * sum(one.steps["seconds"]))


def test_steps_are_of_the_measured_run(path: Path) -> None:
    """Each with its batch, its seconds and the prediction for the very same batch."""
    one = attempt(path, Formula(slower=2.0))
    names = {"decodes": "decodes", "context": "context_tokens", "chunks": "chunks", "prefill_tokens": "prefill_tokens"}
    for mine, its in names.items():
        assert one.steps[mine] == one.measured.columns(its).tolist()
    spent = one.measured.columns("end_s") - one.measured.columns("start_s")
    assert one.steps["seconds"] == pytest.approx(spent.tolist(), abs=1e-9)
    assert [2 * seconds for seconds in one.steps["predicted"]] == pytest.approx(one.steps["seconds"])


@pytest.mark.parametrize("policy", ["prefill-first", "orca", "decode-first", "stall-free", "alternating"])
def test_every_policy(path: Path, policy: str) -> None:
    """Whatever schedules, a perfect model is right, and anchors reach as far as its batches."""
    tables = copy.deepcopy(SCENARIO)
    tables["scheduler"]["policy"] = policy
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    one = attempt(path, Formula(), Formula())
    assert one.alignment()["simulated_first_difference"] is None
    assert worst(one) < 0.01
    most = max(d + p for d, p in zip(one.steps["decodes"], one.steps["prefill_tokens"], strict=True))
    assert policy != "stall-free" or most <= reach(plan(Scenario.load(str(path)))).batch_tokens


def test_worst_looks_at_three_figures(path: Path) -> None:
    """The largest error of the median and P99 TBT and the median TTFT, whatever its sign; anchored where there is."""
    slow = attempt(path, Formula(slower=1.3))
    errors = {row["metric"]: row["error"] for row in slow.metrics()}
    assert worst(slow) == max(abs(errors[name]) for name in ("tbt_p50", "tbt_p99", "ttft_p50"))
    assert worst(attempt(path, Formula(slower=1.3), Formula(slower=1.3))) < 0.01


def test_requests_of_one_token(path: Path) -> None:
    """There are no gaps to compare; what there is, is compared."""
    tables = copy.deepcopy(SCENARIO)
    tables["workload"]["lengths"] = {"kind": "fixed", "prompt": 100, "output": 1}
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    one = attempt(path, Formula(slower=1.1))
    told = metric(one, "tbt_p50")
    assert set(told.values()) == {"tbt_p50", None}
    assert worst(one) > 0.05


def test_nothing_that_runs(path: Path) -> None:
    """All requests refused: nothing can be compared, in one line."""
    tables = copy.deepcopy(SCENARIO)
    tables["engine"]["num_blocks"] = 2
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    with pytest.raises(BadInput, match="no iteration was run"):
        attempt(path, Formula())


# The command


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The engine's module, replaced: `make` makes the executor, `twin` the one beside it."""
    held: dict[str, Any] = {"make": Formula, "twin": Formula, "twins": 0}

    def twin(*_: object) -> Formula:
        held["twins"] += 1
        return held["twin"]()  # type: ignore[no-any-return]

    module = SimpleNamespace(executor=lambda _: lambda: held["make"](), twin=twin)
    monkeypatch.setattr(commands, "needing_torch", lambda *_: module)
    return held


def strict(text: str) -> Any:
    """One JSON value, without NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


def test_one_json_object(path: Path, engine: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout, and nothing else there; all attempts are in it, and the best is the one in front."""
    made = iter([1.2, 1.0, 1.4])
    engine["make"] = lambda: Steps([next(made), next(made), next(made)], path)
    assert status(["validate", str(path), "--attempts", "3", "--json"]) == 0
    told = strict(capsys.readouterr().out)
    assert set(told) == {"name", "policy", "metrics", "alignment", "attribution", "attempts"}
    assert [row["metric"] for row in told["metrics"]] == METRICS
    assert len(told["attempts"]) == 3
    assert told["attempts"][1] == told["metrics"]
    assert [abs(attempt[3]["error"]) > 0.05 for attempt in told["attempts"]] == [True, False, True]
    assert engine["twins"] == 0


class Steps(Formula):
    """Slower by another factor in each attempt."""

    def __init__(self, factors: list[float], path: Path) -> None:
        super().__init__()
        self.factors = factors
        self.runs = 0
        self.iterations = simulate(Scenario.load(str(path))).summary["iterations"]

    def forget(self) -> None:
        """Two runs an attempt, each of which begins by forgetting; warming up forgets after every batch."""
        super().forget()
        if not self.pretended:
            self.runs += 1
            self.slower = self.factors[(self.runs - 1) // 2]
        self.pretended.clear()


def test_the_table_and_the_files(
    path: Path, engine: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What people see, and everything that is kept."""
    engine["make"] = engine["twin"] = lambda: Formula(slower=1.1, host=0.25)
    out = tmp_path / "out"
    assert status(["validate", str(path), "--anchor", "--attempts", "2", "--out", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in METRICS)
    for told in (
        "measured again noise simulated error anchored error",
        "the run again never parts ways; 100% of batches are equal in order",
        "the anchored one never parts ways",
        "the host took 25.0% of the measured time",
        "0.0% in total",
        "attempt 1",
        "attempt 2",
        ", the best: ",
        "(noise +0.0%)",
    ):
        assert told in shown, told
    files = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert files == {
        "validation.json",
        "validation_steps.parquet",
        "validation.vl.json",
        "scenario.toml",
        *(f"{which}/{name}" for which in ("measured", "simulated") for name in REPORT_FILES),
    }
    kept = strict((out / "validation.json").read_text(encoding="utf-8"))
    assert len(kept["attempts"]) == 2
    steps = pl.read_parquet(out / "validation_steps.parquet")
    assert len(steps) == kept["alignment"]["iterations_measured"]
    assert {"seconds", "host", "predicted", "anchored", "decodes", "chunks"} <= set(steps.columns)
    assert steps["host"].sum() == pytest.approx(0.25 * steps["seconds"].sum())
    assert "vega-lite" in strict((out / "validation.vl.json").read_text(encoding="utf-8"))["$schema"]
    assert Scenario.load(str(out / "scenario.toml")).name == "formula"
    for which, source in (("measured", "times: measured"), ("simulated", "times: profile")):
        summary = strict((out / which / "summary.json").read_text(encoding="utf-8"))
        assert summary["completed"] == 40
        assert summary["times_from"].startswith(source)
    assert engine["twins"] == 1


def test_without_anchors_there_are_no_such_columns(
    path: Path, engine: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Neither on the screen nor in the table."""
    engine["make"] = Formula
    assert status(["validate", str(path), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "anchored" not in shown
    assert "attempt" not in shown
    assert "anchored" not in pl.read_parquet(tmp_path / "out" / "validation_steps.parquet").columns


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--attempts", "0"], "--attempts: 0 must be from 1 to 100"),
        (["--attempts", "101"], "--attempts: 101 must be from 1 to 100"),
        (["--clock", "wall"], "--clock: "),
        (["--set", "engine.num_blocks=2"], "no iteration was run"),
        (["--set", "engine.num_blocks=1", "--set", "engine.block_tokens=1"], "[engine] num_blocks: no batch fits"),
        (["--set", "latency.name=nothing.toml"], "--set: [latency] name: "),
        (["--set", "model.name=mistral-7b"], "was measured with 'llama-40m', not 'mistral-7b'"),
    ],
)
def test_bad_input(path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    """Status 2 and one line; no files."""
    out = path.parent / "out"
    assert status(["validate", str(path), "--out", str(out), *options]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1, told.err
    assert told.err.startswith("servecast: error: ")
    assert says in told.err
    assert not out.exists()


# With the engine

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}
ENGINE: dict[str, Any] = {
    "name": "tiny",
    "model": {"hf_config": "config.json"},
    "device": {"name": "cpu"},
    "engine": {"num_blocks": 60, "max_sequences": 4, "max_model_tokens": 128},
    "scheduler": {"token_budget": 32},
    "latency": {"kind": "roofline"},
    "workload": {
        "requests": 8,
        "arrivals": {"kind": "poisson", "rate": 100.0},
        "lengths": {"kind": "uniform", "prompt": [5, 100], "output": [2, 12]},
    },
    "torch": {"device": "cpu", "threads": 1},
}


def test_measure_fit_and_validate_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The three commands one after the other, on real forward passes; how well they agree is not asserted."""
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    path, table, profile, out = (tmp_path / name for name in ("tiny.toml", "tiny.parquet", "profile.toml", "out"))
    path.write_text(tomli_w.dumps(ENGINE), encoding="utf-8")
    assert status(["calibrate", "measure", str(path), "--to", str(table), "--seconds", "0", "--json"]) == 0
    told = strict(capsys.readouterr().out)
    found = load_rows(table)
    assert len(found) == told["rows"] == 3 * told["batches"]
    assert {"torch", "python", "device", "date", "system", "threads"} <= set(found.provenance)
    assert (found["seconds"] > found["host"]).all()
    assert (found["host"] > 0).all()
    assert status(["calibrate", "fit", str(table), "--to", str(profile)]) == 0
    one = load(str(profile), Path())
    assert one.device == "cpu"
    assert one.provenance["source"] == "measured by servecast"
    capsys.readouterr()
    with_profile = ["--set", "latency.kind=profile", "--set", f"latency.name={profile}"]
    assert status(["validate", str(path), *with_profile, "--anchor", "--json", "--out", str(out)]) == 0
    told = strict(capsys.readouterr().out)
    assert [row["metric"] for row in told["metrics"]] == METRICS
    assert 0 < told["attribution"]["host_share"] < 1
    assert (out / "validation.json").is_file()
    assert status(["run", str(path), *with_profile, "--json"]) == 0
    assert strict(capsys.readouterr().out)["completed"] == 8
    small = ["--set", "engine.max_sequences=64", "--set", "engine.num_blocks=20"]
    assert status(["calibrate", "measure", str(path), "--to", str(table), "--seconds", "0", *small]) == 0
