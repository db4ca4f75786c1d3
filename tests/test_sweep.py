"""Sweeps: what a study means, what its rows are, and that they are the same however often, wherever and by whom run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from test_cli import SCENARIO, processes, servecast, strict

from sim import parallel
from sim import sweep as sweep_study
from sim.__main__ import status
from sim.capacity import capacity
from sim.errors import BadInput
from sim.journal import FILE
from sim.scenario import Scenario
from sim.settings import Setting
from sim.simulate import plan, simulate
from sim.study import Study
from sim.sweep import Task, _outcomes, _series, flat, run

ROOT = Path(__file__).resolve().parents[1]
MODULE = sys.modules["sim.sweep"]  # `sim.sweep` itself is the function
STUDIES = sorted(path for path in (ROOT / "scenarios/studies").glob("*.toml") if not path.name.startswith("plan-"))
SMALL = """
scenario = "s.toml"
[grid]
"scheduler.token_budget" = [64, 256]
"scheduler.policy" = ["stall-free", "orca"]
"""
BIG = """
scenario = "s.toml"
[set]
workload.requests = 40
[grid]
scheduler.policy = ["stall-free", "prefill-first", "orca", "alternating"]
scheduler.token_budget = [64, 128, 256, 512, 1024, 2048]
workload.arrivals.rate = [1.0, 2, 4, 6, 8, 10]
workload.seed = [1, 2, 3, 4]
"""
POINTS = 576
two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or not Path(f"/proc/self/task/{os.getpid()}/children").exists(),
    reason="needs two cores for two processes, and /proc",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MODULE, "cores", lambda: 1)  # a process would take longer to start than these take
    (tmp_path / "s.toml").write_text(SCENARIO)
    (tmp_path / "study.toml").write_text(SMALL)
    return tmp_path


def study(text: str, here: Path, *settings: Setting) -> Study:
    (here / "study.toml").write_text(text)
    return Study.load(here / "study.toml", settings)


# What a study means.


def test_the_list_is_outermost_and_the_last_axis_innermost(here: Path) -> None:
    text = """
    scenario = "s.toml"
    [grid]
    scheduler.token_budget = [64, 256]
    "workload.arrivals.rate" = [1.0, 2]
    [[list]]
    scheduler = { policy = "orca" }
    [[list]]
    "scheduler.policy" = "stall-free"
    "engine.max_sequences" = 3
    [[list]]
    """
    one = study(text, here)
    assert list(one.axes.items()) == [
        ("scheduler.policy", "[list]"),
        ("engine.max_sequences", "[list]"),
        ("scheduler.token_budget", "[grid]"),
        ("workload.arrivals.rate", "[grid]"),
    ]
    assert len(one.points) == 12
    assert one.points[1] == {
        "scheduler.policy": "orca",
        "scheduler.token_budget": 64,
        "workload.arrivals.rate": 2,
    }
    frame = sweep_study(one)
    assert frame["point"].to_list() == list(range(12))
    assert frame["scheduler.policy"].to_list() == ["orca"] * 4 + ["stall-free"] * 4 + [None] * 4
    assert frame["engine.max_sequences"].to_list() == [None] * 4 + [3] * 4 + [None] * 4
    assert frame["workload.arrivals.rate"].to_list() == [1.0, 2.0] * 6
    kinds = [frame[axis].dtype for axis in one.axes]
    assert kinds == [pl.String, pl.Int64, pl.Int64, pl.Float64]
    assert frame["policy"].to_list() == ["orca"] * 4 + ["stall-free"] * 8


def test_columns_have_the_type_of_their_values() -> None:
    def dtype(values: list[Any], name: str = "x") -> Any:
        return _series(name, values).dtype

    assert dtype([1, None]) == pl.Int64
    assert dtype([1, 2.5]) == dtype([10**20]) == dtype([None]) == pl.Float64
    assert dtype([True, None]) == dtype([None], "slo_met") == pl.Boolean
    assert dtype(["a", None]) == dtype([None], "reason") == pl.String
    assert _series("x", ["auto", 512, None]).to_list() == ["auto", "512", None]
    assert _series("x", [{"kind": "fixed"}]).to_list() == ['{"kind": "fixed"}']
    assert flat({"a": {"b": {"c": 1}, "d": ["x", "y"]}, "e": None}) == {"a_b_c": 1, "a_d": "x; y", "e": None}


def test_a_row_is_the_summary_of_its_run(here: Path) -> None:
    frame = sweep_study(here / "study.toml")
    row = frame.row(1, named=True)
    scenario = Scenario.load("s.toml").with_(policy={}, scheduler__policy="orca", scheduler__token_budget=64)
    summary = simulate(scenario.with_(engine__max_sequences=1)).summary
    assert row["status"] == "done" and row["reason"] is None
    for name, value in summary.items():
        if not isinstance(value, dict | list) and name != "time_share":
            assert row[name] == value, name
    for name in ("ttft_s", "tbt_s", "tpot_s", "e2e_s", "scheduling_delay_s"):
        assert {key: row[f"{name}_{key}"] for key in summary[name]} == summary[name]
    assert row["slo_tbt_p99_value"] == summary["slo"]["tbt_p99"]["value"]
    assert row["refused_too_long"] == row["refused_never_fits"] == 0


def test_a_row_of_a_search_is_its_capacity(here: Path) -> None:
    text = SMALL.replace("[grid]", 'what = "capacity"\n[capacity]\ntolerance = 0.05\nseeds = 2\n[grid]')
    row = sweep_study(study(text, here)).row(0, named=True)
    scenario = Scenario.load("s.toml").with_(scheduler__token_budget=64)
    (found,) = capacity(scenario, ["stall-free"], tolerance=0.05, seeds=2)
    assert found.interval is not None
    assert row["capacity_rate"] == found.rate > 0
    assert (row["capacity_low"], row["capacity_high"]) == found.interval
    assert (row["limited_by"], row["trials"]) == (found.limited_by, len(found.trials))
    assert 0 < row["slo_tbt_p99_value"] <= 0.07
    assert row["cost_per_million_output_tokens"] > 0


def test_an_axis_goes_over_the_policy_tables(here: Path) -> None:
    text = 'scenario = "s.toml"\n[set]\n"scheduler.policy" = "orca"\n[grid]\n"engine.max_sequences" = [1, 16]'
    few, many = sweep_study(study(text, here))["ttft_s_p99"]
    assert many < few / 2  # [policy.orca] max_sequences = 1 would make them the same


def test_tables_are_values_of_a_grid(here: Path) -> None:
    text = """
    scenario = "s.toml"
    [grid]
    "workload.lengths" = [
        { kind = "fixed", prompt = 100, output = 5 },
        { kind = "uniform", prompt = [2, 9], output = [1, 3] },
    ]
    """
    frame = sweep_study(study(text, here))
    assert frame["prompt_tokens"][0] == 6000 > frame["prompt_tokens"][1]
    assert json.loads(frame["workload.lengths"][0])["kind"] == "fixed"


def test_files_are_looked_for_beside_the_study(here: Path) -> None:
    (here / "studies").mkdir()
    (here / "studies/t.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "50,5\n" * 60)
    (here / "beside.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "70,5\n" * 60)
    (here / "studies/one.toml").write_text(
        'scenario = "../s.toml"\n[set]\nworkload.lengths.kind = "trace"\n'
        '[grid]\nworkload.lengths.path = ["t.csv", "beside.csv", "nowhere.csv"]'
    )
    one = Study.load("studies/one.toml")
    frame = sweep_study(one)
    assert frame["prompt_tokens"].to_list() == [3000, 4200, None]
    assert frame["workload.lengths.path"].to_list() == ["t.csv", "beside.csv", "nowhere.csv"]
    assert frame["reason"].to_list()[2] == "nowhere.csv: [workload.lengths] path: no such file"
    assert len(one.files) == 3


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_ready_studies_can_be_run(path: Path) -> None:
    one = Study.load(path)
    assert len(one.points) >= 30
    usable = 0
    for point in one.points:
        with contextlib.suppress(BadInput):  # a row with its reason
            plan(one.base.vary(one.settings(point)))
            usable += 1
    assert usable >= 0.9 * len(one.points)


# What cannot be run.

WRONG: list[tuple[str, str]] = [
    ("", "study.toml: [scenario]: required"),
    ("scenario = 5", "study.toml: [scenario]: 5 must be a valid string"),
    ('scenario = "none.toml"\n[grid]\na.b = [1]', "none.toml: no such file"),
    ('scenario = "s.toml"', "study.toml: [grid]: required, unless there is a [[list]]"),
    ('scenario = "s.toml"\nsceanrio = 1', "study.toml: [sceanrio]: unknown key 'sceanrio'; did you mean 'scenario'?"),
    ('scenario = "s.toml"\n[gird]', "unknown key 'gird'; did you mean 'grid'?"),
    ('scenario = "s.toml"\nwhat = "cost"', "[what]: unknown 'cost'; known: 'run' or 'capacity'"),
    ('scenario = "s.toml"\nlist = 3', "[list]: 3 must be a valid list"),
    (SMALL + "[capacity]\nseeds = 2", '[capacity]: only with what = "capacity"'),
    (
        'scenario = "s.toml"\nwhat = "capacity"\n[capacity]\nseed = 2',
        "[capacity] seed: unknown key 'seed'; did you mean",
    ),
    ('scenario = "s.toml"\nwhat = "capacity"\n[capacity]\nseeds = 0', "[capacity] seeds: 0 must be greater than"),
    ('scenario = "s.toml"\nwhat = "capacity"\n[grid]\nslo = [{}]', "[grid] slo: capacity needs a limit"),
    (SMALL + '[set]\nscheduler.polcy = "orca"', "study.toml: [set] scheduler.polcy: unknown key 'polcy'; did you mean"),
    (
        SMALL + '[set]\nscheduler.policy = "orca"',
        "[set] scheduler.policy: scheduler.policy is an axis of [grid] already",
    ),
    (SMALL + '[[list]]\nscheduler.policy = "orca"', "[grid] scheduler.policy: scheduler.policy is an axis of [list]"),
    (SMALL + "[[list]]\nscheduler = {}", "scheduler.token_budget: scheduler is an axis of [list] already"),
    (SMALL + "[[list]]\nengine.max_sequences = 0", "[list] engine.max_sequences: 0 must be greater than or equal to 1"),
    (SMALL + "[[list]]\n[[list]]", "[list]: {} is there twice"),
    (SMALL + "engine.watermark = 0.1", "[grid] engine.watermark: 0.1 must be an array of one value or more"),
    (SMALL + "engine.watermark = []", "[grid] engine.watermark: an array must be an array of one value or more"),
    (SMALL + "engine.watermark = [0.1, 2.0]", "study.toml: [grid] engine.watermark: 2.0 must be less than 1"),
    (SMALL + "engine.watermark = [0.1, 0.1]", "[grid] engine.watermark: 0.1 is there twice"),
    (SMALL + "engin.watermark = [0.1]", "[grid] engin: unknown key 'engin'; did you mean 'engine'?"),
    (SMALL + '"engine..watermark" = [0.1]', "[grid]: 'engine..watermark' must be a key of the scenario"),
    (SMALL + '"engine.watermark" = [0.1]\nengine.watermark = [0.2]', "[grid] engine.watermark: given twice"),
    (SMALL + 'workload.arrivals.kind = ["poisson", "closed"]', "[grid] workload.arrivals.concurrency: required"),
    (SMALL + 'latency.step = ["0.1"]', "[grid] latency.step: '0.1' must be a valid number"),
    (SMALL + "latency.step = [1979-05-27]", "[grid] latency.step: datetime.date(1979, 5, 27) must be a valid number"),
    (SMALL + "latency.step = [nan]", "[grid] latency.step: nan must be a finite number"),
    (
        SMALL + f"workload.seed = {list(range(400))}\nmetrics.warmup = {list(range(100))}",
        "160,000 points must be at most",
    ),
    (SMALL + "name.x = [1]", "[grid]: name.x goes through 'name', which is not a table"),
    ("scenario = ", "study.toml: not TOML"),
]


@pytest.mark.parametrize(("text", "says"), WRONG, ids=[says[:50] for _, says in WRONG])
def test_a_wrong_study_is_refused_before_anything_is_run(
    text: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "study.toml").write_text(text)
    assert status(["sweep", "study.toml", "--out", "kept"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("servecast: error: ") and len(err.splitlines()) == 1
    assert says in err
    assert not (here / "kept").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--engine", "dask"), "--engine: needs --cluster"),
        (("--cluster", "tcp://127.0.0.1:1"), "--cluster: only with --engine dask"),
        (
            ("--engine", "dask", "--cluster", "nowhere"),
            "--cluster: no Dask scheduler answers at 'nowhere': missing port",
        ),
        (("--engine", "dask", "--cluster", "x://y:1"), "unknown address scheme 'x'"),
        (("--engine", "dask", "--cluster", "tcp://127.0.0.1:1", "--workers", "2"), "--workers: only with"),
        (("--workers", "0"), "--workers: 0 must be from 1 to 1000"),
        (("--workers", "1.5"), "'1.5' is not a whole number"),
        (("--resume",), "--resume: needs --out"),
        (("--rate", "3", "--set", "scheduler.policy=orca"), "--set: scheduler.policy: scheduler.policy is an axis of"),
        (("--set", "engine.max_sequences=0"), "--set: [engine] max_sequences: 0 must be greater"),
        (("--set", "slo={tbt_p99=1.0}"), "--set: slo: a table; set its keys one by one"),
        (("--clock", "wall"), "--clock: a sweep runs on the virtual clock"),
        (("--executor", "torch"), "--executor: a sweep runs on the latency model"),
        (("--out", "s.toml"), "--out: "),
        (("--out", "."), "--out: . is not empty; --resume goes on with a sweep"),
        (("--out", ".", "--resume"), "--resume: . holds no sweep to go on with, but other files"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_options_are_refused(
    options: tuple[str, ...], says: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "CONNECT_SECONDS", 0.5)
    assert status(["sweep", "study.toml", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and says in err, err
    assert sorted(path.name for path in here.iterdir()) == ["s.toml", "study.toml"]


def test_dask_need_not_be_installed(here: Path) -> None:
    hide = "import sys; sys.modules['distributed'] = None\n"
    code = hide + "from sim.__main__ import main; main(['sweep', 'study.toml'{more}])"
    for more, expected in (("", 0), (", '--engine', 'dask', '--cluster', 'tcp://127.0.0.1:1'", 2)):
        line = [sys.executable, "-c", code.format(more=more + ", '--workers', '1'" * (not more))]
        done = subprocess.run(line, cwd=here, capture_output=True, text=True, timeout=60)
        assert done.returncode == expected, done.stderr
        assert ("pip install 'servecast[dask]'" in done.stderr) == bool(expected)


def test_commands_load_neither_dask_nor_polars(here: Path) -> None:
    code = "import sys, sim.cli; print([name for name in ('distributed', 'dask', 'polars') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


# Points that fail.


def test_what_cannot_be_run_is_a_row_with_its_reason(here: Path) -> None:
    text = """
    scenario = "s.toml"
    [grid]
    scheduler.policy = ["stall-free", "prefill-first"]
    engine.max_batch_tokens = [1024, 4096]
    workload.requests = [10]
    workload.arrivals = [{ kind = "poisson", rate = 1.0 }, { kind = "trace", path = "none.csv" }]
    """
    frame = sweep_study(study(text, here))
    assert frame["status"].to_list() == ["done", "failed", "done", "failed", "failed", "failed", "done", "failed"]
    assert frame["reason"][1] == "none.csv: [workload.arrivals] path: no such file"
    assert frame["reason"][4].startswith(
        "[grid] engine.max_batch_tokens: 1024 must be at least max_model_tokens = 2048"
    )
    assert frame["offered"].to_list() == [10, None, 10, None, None, None, 10, None]


def test_a_bug_is_a_row_and_memory_is_tried_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = simulate, []

    def broken(scenario: Scenario, **options: Any) -> Any:
        calls.append(scenario)
        if scenario.scheduler.token_budget == 256:
            raise MemoryError
        if scenario.scheduler.policy == "orca":
            raise ZeroDivisionError("division\nby zero")
        return real(scenario, **options)

    monkeypatch.setattr(MODULE, "simulate", broken)
    out = here / "out"
    frame = sweep_study(here / "study.toml", out=out)
    assert frame["reason"].to_list() == [None, "ZeroDivisionError: division by zero", "MemoryError", "MemoryError"]
    assert frame["status"].to_list() == ["done", "failed", "failed", "failed"]
    assert pl.read_parquet(out / "sweep.parquet").equals(frame)
    monkeypatch.setattr(MODULE, "simulate", real)
    again = sweep_study(here / "study.toml", out=out, resume=True)  # only what failed for want of memory
    assert again["status"].to_list() == ["done", "failed", "done", "done"]
    assert pl.read_parquet(out / "sweep.parquet").equals(again)


def test_a_result_that_is_no_number_is_a_bug(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MODULE.flat
    monkeypatch.setattr(MODULE, "flat", lambda tables: real(tables) | {"mfu": float("nan")})
    frame = sweep_study(here / "study.toml", out=here / "out")
    assert set(frame["reason"]) == {"ValueError: Out of range float values are not JSON compliant"}


def test_nothing_but_failures_is_a_result(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "study.toml").write_text(SMALL + '[set]\nworkload.lengths = { kind = "trace", path = "none.csv" }')
    assert status(["sweep", "study.toml", "--out", "out"]) == 0
    out, _ = capsys.readouterr()
    assert "4 points, 4 of them failed" in out and "4 failed: none.csv: [workload.lengths] path: no such file" in out
    assert pl.read_parquet("out/sweep.parquet")["status"].to_list() == ["failed"] * 4
    assert status(["sweep", "study.toml", "--json"]) == 0
    assert strict(capsys.readouterr().out)["failed"] == 4


class Deadly:
    """In place of a scenario: one of its variations ends its process."""

    def vary(self, settings: list[Setting]) -> Scenario:
        if settings[0].value == "deadly":
            os._exit(9)
        time.sleep(0.05)
        raise ValueError(settings[0].value)


@pytest.mark.slow
def test_a_point_that_ends_its_process_is_found_out(here: Path) -> None:  # noqa: ARG001
    values = ["a", "b", "c", "deadly", "d", "e", "f", "g"]
    points = [(number, [Setting("x", value)]) for number, value in enumerate(values)]
    task = Task(Deadly(), None, {})  # type: ignore[arg-type]
    found = {one.point: one for one in _outcomes(task, points, 2, None)}
    reasons = [found[number].reason for number in range(len(values))]
    assert reasons == [
        *("ValueError: a", "ValueError: b", "ValueError: c"),
        "its process was ended from outside, for want of memory perhaps",
        *("ValueError: d", "ValueError: e", "ValueError: f", "ValueError: g"),
    ]
    assert [found[number].again for number in range(len(values))] == [value == "deadly" for value in values]


# What is kept, and going on.


def test_the_directory_says_what_was_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["sweep", "study.toml", "--out", "out", "--requests", "20"]) == 0
    page, err = capsys.readouterr()
    assert {path.name for path in (here / "out").iterdir()} == {"sweep.parquet", "study.toml", "scenario.toml", FILE}
    assert "4 points, none failed" in page and "best by SLO met" in page and "slowest was point" in page
    assert err == "servecast: files are in out\n"
    assert pl.read_parquet("out/sweep.parquet")["offered"].to_list() == [20] * 4
    assert status(["sweep", "out/study.toml", "--out", "again"]) == 0
    assert (here / "again/sweep.parquet").read_bytes() == (here / "out/sweep.parquet").read_bytes()
    assert (here / "again/study.toml").read_bytes() == (here / "out/study.toml").read_bytes()


def test_json_is_one_object(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["sweep", "study.toml", "--json", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    result = strict(out)
    assert err == "" and (result["points"], result["done"], result["failed"]) == (4, 4, 0)
    assert [row["scheduler.token_budget"] for row in result["results"]] == [64, 64, 256, 256]
    assert {row["seed"] for row in result["results"]} == {3}
    assert not (here / "out").exists()


def test_it_goes_on_wherever_it_was_cut(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = here / "whole"
    sweep_study(here / "study.toml", out=whole)
    content, wanted = (whole / FILE).read_bytes(), (whole / "sweep.parquet").read_bytes()
    lines = content.splitlines(keepends=True)
    real, calls = simulate, []
    monkeypatch.setattr(MODULE, "simulate", lambda *a, **k: calls.append(1) or real(*a, **k))
    cuts = [(0, 4), (10, 4), (len(lines[0]), 4), (len(content), 0), (len(content) - 1, 1)]
    cuts += [(len(content) - len(lines[-1]), 1), (sum(map(len, lines[:3])) + 50, 2)]
    for number, (length, missing) in enumerate(cuts):
        out = here / f"cut-{number}"
        out.mkdir()
        (out / FILE).write_bytes(content[:length])
        calls.clear()
        sweep_study(here / "study.toml", out=out, resume=True)
        assert len(calls) == missing
        assert (out / "sweep.parquet").read_bytes() == wanted
        assert len((out / FILE).read_bytes().splitlines()) == 5
    shuffled = here / "shuffled"
    shuffled.mkdir()
    (shuffled / FILE).write_bytes(b"".join([lines[0], *reversed(lines[1:]), b"damaged\n"]))
    sweep_study(here / "study.toml", out=shuffled, resume=True)
    assert (shuffled / "sweep.parquet").read_bytes() == wanted


def test_resume_begins_where_there_is_nothing(here: Path) -> None:
    (here / "empty").mkdir()
    for out in (here / "new/folder", here / "empty"):
        assert len(sweep_study(here / "study.toml", out=out, resume=True)) == 4


def test_another_sweep_is_not_gone_on_with(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = here / "t.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "50,5\n" * 60)
    text = SMALL + '[set]\nworkload.lengths = { kind = "trace", path = "t.csv" }\n'
    (here / "study.toml").write_text(text)
    out = here / "out"
    sweep_study(here / "study.toml", out=out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def refused() -> str:
        with pytest.raises(BadInput) as caught:
            sweep_study(here / "study.toml", out=out, resume=True)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        return str(caught.value)

    (here / "study.toml").write_text(text.replace("[64, 256]", "[64, 257]"))
    assert refused() == f"--resume: {out} holds a sweep of another study"
    (here / "study.toml").write_text(text + "workload.seed = 8\n")
    assert refused() == f"--resume: {out} holds a sweep of another study"
    (here / "study.toml").write_text(text + "# a comment changes nothing\n")
    (here / "s.toml").write_text(SCENARIO.replace("step = 0.01", "step = 0.02"))
    assert "of another scenario, or of the scenario before it changed" in refused()
    (here / "s.toml").write_text(SCENARIO)
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "51,5\n" * 60)
    assert f"that was begun before {trace} changed" in refused()
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "50,5\n" * 60)
    monkeypatch.setattr(MODULE, "installed", lambda: "9.9")
    assert "and this is 9.9" in refused()
    monkeypatch.undo()
    assert len(sweep_study(here / "study.toml", out=out, resume=True)) == 4


def test_two_sweeps_do_not_share_a_directory(here: Path) -> None:
    out = here / "out"

    def second(done: int, _: int) -> None:
        if done == 2:
            with pytest.raises(BadInput, match="another sweep is writing to"):
                sweep_study(here / "study.toml", out=out, resume=True)

    assert len(sweep_study(here / "study.toml", out=out, progress=second)) == 4


def test_a_trace_that_is_another_one_where_the_point_runs_is_not_used(here: Path) -> None:
    trace = here / "t.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "50,5\n" * 60)
    one = study(SMALL + '[set]\nworkload.lengths = { kind = "trace", path = "t.csv" }\n', here)

    def meddle(done: int, _: int) -> None:
        if done == 2:
            trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "9000,5\n" * 60)

    result = run(one, progress=meddle)
    assert [outcome.again for outcome in result.outcomes] == [False, False, True, True]
    assert result.frame["reason"][3] == f"{trace} is not what it was where the sweep was begun"


# The same, whoever runs it.


class Backwards(Executor):
    """Does what it is given in reverse."""

    def __init__(self) -> None:
        self.given: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.append((future, function, arguments))
        if len(self.given) == 4:
            for future, function, arguments in reversed(self.given):
                future.set_result(function(*arguments))
        return self.given[-1][0]


def test_the_order_does_not_matter(here: Path) -> None:
    sweep_study(here / "study.toml", out=here / "forwards")
    sweep_study(here / "study.toml", out=here / "backwards", executor=Backwards())
    with ThreadPoolExecutor(3) as threads:
        sweep_study(here / "study.toml", out=here / "threads", executor=threads)
    files = [(here / name / "sweep.parquet").read_bytes() for name in ("forwards", "backwards", "threads")]
    assert files[0] == files[1] == files[2]
    journal = (here / "backwards" / FILE).read_text().splitlines()[1:]
    assert [json.loads(line)["point"] for line in journal] == [2, 1, 0, 3]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A folder with a study of 576 points, and its result in one process without interruption."""
    folder = tmp_path_factory.mktemp("big")
    (folder / "s.toml").write_text(SCENARIO)
    (folder / "study.toml").write_text(BIG)
    frame = sweep_study(folder / "study.toml", out=folder / "whole", workers=1)
    assert len(frame) == POINTS
    assert set(frame["status"]) == {"done"}
    return folder, (folder / "whole/sweep.parquet").read_bytes()


def lines(journal: Path) -> int:
    """Points that are done."""
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def reach(journal: Path, points: int, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 120
    while lines(journal) < points and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    assert process.poll() is None, process.communicate()


def mark() -> tuple[str, dict[str, str]]:
    """What tells processes that were started by a test, and the environment to start them in."""
    name, value = "SERVECAST_TEST_MARK", f"{os.getpid()}-{time.monotonic_ns()}"
    return f"{name}={value}", os.environ | {name: value}


def gone(marked: str, seconds: float = 10) -> bool:
    limit = time.monotonic() + seconds
    while processes(marked) and time.monotonic() < limit:
        time.sleep(0.02)
    return not processes(marked)


@pytest.mark.slow
@two_cores
def test_killed_in_the_middle_and_resumed_it_is_the_same(big: tuple[Path, bytes]) -> None:
    folder, wanted = big
    out, (marked, environment) = folder / "killed", mark()
    line = ("sweep", "study.toml", "--workers", "2", "--out", "killed")
    process = servecast(*line, cwd=folder, env=environment)
    reach(out / FILE, 100, process)
    process.kill()
    process.communicate(timeout=20)
    done = lines(out / FILE)
    assert 100 <= done < POINTS
    assert [path.name for path in out.iterdir()] == [FILE]
    assert gone(marked), "processes outlive the one that started them"
    process = servecast(*line, "--resume", cwd=folder, env=environment)
    reach(out / FILE, done + 100, process)
    os.kill(next(pid for pid in children(process.pid) if pid in processes(marked)), signal.SIGKILL)  # one of the two
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "servecast: files are in killed\n")
    assert (out / "sweep.parquet").read_bytes() == wanted
    assert lines(out / FILE) == POINTS, "no point that was kept is run again"


def children(pid: int) -> list[int]:
    """Processes that run points, not the one that looks after them."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


@pytest.mark.slow
@two_cores
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupt_says_how_to_go_on(number: int, big: tuple[Path, bytes]) -> None:
    folder, _ = big
    out, (marked, environment) = folder / f"interrupted-{number}", mark()
    line = ("sweep", "study.toml", "--workers", "2", "--out", out.name)
    process = servecast(*line, cwd=folder, env=environment)
    reach(out / FILE, 50, process)
    os.killpg(process.pid, number)  # as a terminal does: to all of them
    started = time.monotonic()
    stdout, err = process.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert (process.returncode, stdout) == (1, "")
    said = f"servecast: {lines(out / FILE)} of {POINTS} points are kept in {out.name}: --resume goes on from there\n"
    assert err == said + "servecast: error: interrupted\n"
    assert gone(marked)


class Cluster:
    """A Dask scheduler and workers of one thread each, every one a process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes, self.address = folder, [], ""
        file = folder / "scheduler.json"
        self._start("dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
        limit = time.monotonic() + 60
        while not self.address and time.monotonic() < limit:
            time.sleep(0.05)
            with contextlib.suppress(OSError, ValueError):
                self.address = json.loads(file.read_text())["address"]
        assert self.address

    def worker(self) -> subprocess.Popen[bytes]:
        return self._start("dask_worker", self.address, "--nthreads", "1", "--no-nanny")

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", f"distributed.cli.{module}", *arguments, "--no-dashboard"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(line, cwd=self.folder, env=environment, **quiet)
        self.processes.append(process)
        return process


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("distributed")
    one = Cluster(tmp_path)
    yield one
    for process in one.processes:
        process.kill()
        process.wait()


@pytest.mark.slow
@two_cores
def test_a_cluster_that_loses_a_worker_gives_the_same(big: tuple[Path, bytes], cluster: Cluster) -> None:
    folder, wanted = big
    workers = [cluster.worker(), cluster.worker()]
    out = folder / "cluster"
    line = ("sweep", "study.toml", "--engine", "dask", "--cluster", cluster.address, "--out", "cluster")
    process = servecast(*line, cwd=folder)
    reach(out / FILE, 100, process)
    workers[0].kill()
    done = lines(out / FILE)
    _, err = process.communicate(timeout=120)
    assert 100 <= done < POINTS
    assert workers[1].poll() is None
    err = err.replace("servecast: the cluster has no workers yet; waiting for them\n", "")
    assert (process.returncode, err) == (0, "servecast: files are in cluster\n")
    found, expected = pl.read_parquet(out / "sweep.parquet"), pl.read_parquet(BytesIO(wanted))
    assert found.filter(pl.col("status") != "done")["reason"].unique().to_list() == []
    differing = {name: found[name].ne_missing(expected[name]).arg_true().to_list()[:3] for name in expected.columns}
    assert {name: [found[name][row] for row in rows] for name, rows in differing.items() if rows} == {}
    assert (out / "sweep.parquet").read_bytes() == wanted


@pytest.mark.slow
@two_cores
def test_a_cluster_that_is_lost_leaves_what_was_done(big: tuple[Path, bytes], cluster: Cluster) -> None:
    folder, _ = big
    cluster.worker()
    line = ("sweep", "study.toml", "--engine", "dask", "--cluster", cluster.address, "--requests", "400")
    process = servecast(*line, "--out", "lost", cwd=folder)
    reach(folder / "lost" / FILE, 20, process)
    cluster.processes[0].kill()  # the scheduler
    stdout, err = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (1, "")
    said = (
        f"servecast: {lines(folder / 'lost' / FILE)} of {POINTS} points are kept in lost: --resume goes on from there\n"
    )
    assert err.endswith(
        f"{said}servecast: error: the executor gave up what it was given: is its cluster still there?\n"
    )


@pytest.mark.slow
def test_a_cluster_of_another_version_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.worker()
    monkeypatch.setattr(parallel, "version", lambda _: "9.9")
    distributed = pytest.importorskip("distributed")
    with distributed.Client(cluster.address, set_as_default=False) as client:
        client.wait_for_workers(1, timeout=30)
    says = r"--cluster: the worker at .* has servecast .*, and this is 9\.9"
    with pytest.raises(BadInput, match=says), parallel.dask(cluster.address):
        pass
