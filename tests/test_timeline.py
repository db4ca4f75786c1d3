"""Timelines: valid Chrome traces, whose slices and counters are the run's own facts."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import naive
import numpy as np
import polars as pl
import pytest
from jsonschema import Draft202012Validator
from reference import run as serve
from test_exactness import random_case

from sim import BadInput, Scenario, simulate, timeline
from sim.__main__ import status
from sim.report import Report

SCENARIO = """
name = "tiny"
[engine]
num_blocks = 60
max_model_tokens = 512
max_sequences = 8
[latency]
kind = "affine"
step = 0.0117
token = 0.000131
hop = 0.0003
[workload]
requests = 60
seed = 7
[workload.arrivals]
kind = "poisson"
rate = 4.0
[workload.lengths]
kind = "uniform"
prompt = [1, 300]
output = [1, 90]
"""
# The parts of "Trace Event Format" (Google, the JSON Object Format) that are used: what every event must have, and what
# its phase asks for besides. Times are microseconds.
COMMON = {
    "name": {"type": "string", "minLength": 1},
    "pid": {"type": "integer", "minimum": 0},
    "tid": {"type": "integer", "minimum": 0},
    "ts": {"type": "number", "minimum": 0},
    "cat": {"type": "string"},
    "args": {"type": "object"},
}


def phase(ph: str, required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": COMMON | {"ph": {"const": ph}} | properties,
        "required": ["ph", "name", "pid", "tid", "ts", *required],
        "additionalProperties": False,
    }


NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
INDEX = {"type": "object", "properties": {"sort_index": {"type": "integer"}}, "required": ["sort_index"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object", "additionalProperties": {"type": "string"}},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    phase("X", ["dur", "args"], dur={"type": "number", "minimum": 0}),
                    phase(
                        "C", ["args"], args={"type": "object", "additionalProperties": {"type": "number", "minimum": 0}}
                    ),
                    phase("i", ["s"], s={"enum": ["g", "p", "t"]}),
                    phase("M", ["args"], name={"enum": ["process_name", "thread_name"]}, args=NAME),
                    phase("M", ["args"], name={"enum": ["process_sort_index", "thread_sort_index"]}, args=INDEX),
                ]
            },
        },
    },
    "required": ["traceEvents"],
}
PLACES = [(1, 1), (2, 1), (1, 3), (3, 2)]  # stages, replicas


def reported(stages: int = 1, replicas: int = 1, **changes: Any) -> Report:
    changes = {"deployment__pipeline_parallel": stages, "deployment__replicas": replicas} | changes
    return simulate(Scenario.from_toml(SCENARIO).with_(**changes))


def written(report: Report, path: Path) -> dict[str, Any]:
    """The file, its numbers as they stand in it."""
    count = timeline.write(path, report.requests, report.steps, "tiny", source="test")
    data = path.read_bytes()
    value = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, parse_float=Decimal)
    assert len(value["traceEvents"]) == count
    return value


def track(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    slices = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["pid"], e["tid"], e["ts"]))
    return {key: list(group) for key, group in groupby(slices, key=lambda e: (e["pid"], e["tid"]))}


@pytest.mark.parametrize(("stages", "replicas"), PLACES)
def test_the_file_fits_the_schema(stages: int, replicas: int, tmp_path: Path) -> None:
    written(reported(stages, replicas), tmp_path / "t.json")
    validator = Draft202012Validator(SCHEMA)
    validator.validate(json.loads((tmp_path / "t.json").read_text()))
    for wrong in ({"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0}, {"ph": "Q"}):  # the schema can fail
        assert not validator.is_valid({"traceEvents": [wrong]})


@pytest.mark.parametrize(("stages", "replicas"), PLACES)
def test_a_process_a_replica_a_thread_a_stage(stages: int, replicas: int, tmp_path: Path) -> None:
    """Named, in order, and every iteration is one slice on each stage of its replica, in its own time."""
    report = reported(stages, replicas)
    events = written(report, tmp_path / "t.json.gz")["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    expected = [f"stage {s + 1} of {stages}" if stages > 1 else "batches" for s in range(stages)]
    assert named == {(r + 1, s + 1): expected[s] for r in range(replicas) for s in range(stages)}
    tracks = track(events)
    assert tracks.keys() == named.keys()
    for (pid, stage), slices in tracks.items():
        own = report.steps.filter(pl.col("replica") == pid - 1)
        starts, ends = (own[name].to_numpy() for name in ("start_s", "end_s"))
        if stages > 1:
            starts, ends = (own[f"stage_{name}_s"].to_numpy()[:, stage - 1] for name in ("starts", "ends"))
        assert np.array([float(e["ts"]) for e in slices]) == pytest.approx(starts * 1e6, abs=1e-3)
        assert np.array([float(e["ts"] + e["dur"]) for e in slices]) == pytest.approx(ends * 1e6, abs=2e-3)
        for name in timeline.ARGS:
            assert [e["args"][name] for e in slices] == own[name].to_list()
        kinds = {(bool(e["args"]["decodes"]), bool(e["args"]["prefill_tokens"])): e["name"] for e in slices}
        assert (
            kinds.items()
            <= {(True, False): "decodes", (False, True): "prefill", (True, True): "decodes + prefill"}.items()
        )


@pytest.mark.parametrize(("stages", "replicas"), PLACES)
def test_slices_of_a_track_do_not_overlap(stages: int, replicas: int, tmp_path: Path) -> None:
    """In exact arithmetic: not even by the last digit."""
    for slices in track(written(reported(stages, replicas), tmp_path / "t.json")["traceEvents"]).values():
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(slices))


@pytest.mark.parametrize("policy", naive.POLICIES)
@pytest.mark.parametrize("stages", [2, 4])
def test_the_stages_times_are_those_of_the_rule(policy: str, stages: int) -> None:
    """A stage starts a batch at max(its arrival there, the stage's previous end), to the last bit."""
    settings, requests = random_case(policy, stages, "scarce", "open", 3)
    record = serve(settings, requests).record
    starts, ends = (np.frombuffer(of).reshape(-1, stages) for of in (record.stage_starts, record.stage_ends))
    assert len(starts) == record.iterations > 10
    free = [-np.inf] * stages
    for begun, ended in zip(starts.tolist(), ends.tolist(), strict=True):
        for stage in range(stages):
            ready = begun[0] if stage == 0 else ended[stage - 1] + settings.hop
            assert begun[stage] == max(ready, free[stage])
            free[stage] = ended[stage]


@pytest.mark.parametrize(("stages", "replicas"), PLACES)
def test_counters_are_the_table_s(stages: int, replicas: int, tmp_path: Path) -> None:
    """They go forward in time, and a look at them at the start of an iteration gives its row."""
    report = reported(stages, replicas)
    events = written(report, tmp_path / "t.json")["traceEvents"]
    counters = [e for e in events if e["ph"] == "C"]
    for pid in range(1, replicas + 1):
        own = report.steps.filter(pl.col("replica") == pid - 1)
        for name, values in (("KV blocks", ["used"]), ("requests", ["running", "waiting"])):
            found = [e for e in counters if (e["pid"], e["name"]) == (pid, name)]
            times = [float(e["ts"]) for e in found]
            assert times == sorted(set(times)), "one value at a time"
            at = np.searchsorted(times, own["start_s"].to_numpy() * 1e6 + 1e-3, side="right") - 1
            seen = {value: np.array([e["args"][value] for e in found])[at].tolist() for value in values}
            if name == "KV blocks":
                assert seen["used"] == own["kv_blocks_used"].to_list()
            else:
                assert seen["waiting"] == own["waiting"].to_list()
                assert min(seen["running"]) >= 1 and max(seen["running"]) <= 8
                assert (np.array(seen["running"]) >= (own["decodes"] + own["chunks"]).to_numpy()).all()
            assert set(found[-1]["args"].values()) == {0}, "all are done at the end"


@pytest.mark.parametrize("memory", ["ample", "scarce"])
def test_running_is_what_the_scheduler_holds(memory: str, tmp_path: Path) -> None:
    """Requests at the replica less those that wait: those admitted, as the naive reference counts them."""
    report = reported(engine__num_blocks=60 if memory == "scarce" else 600)
    assert (report.summary["preemptions"] > 0) == (memory == "scarce")
    work, limits = report.workload, report.plan.deployment.limits
    assert work.arrivals is not None
    settings = naive.Settings(
        limits.policy, limits.num_blocks, max_sequences=8, max_model_tokens=512, step=0.0117, token=0.000131
    )
    rows = zip(work.arrivals.tolist(), work.prompts.tolist(), work.outputs.tolist(), strict=True)
    reference = naive.Simulation(settings, list(rows))
    held = []
    reference.in_flight = _Watched(lambda: held.append(len(reference.scheduler.admitted)))
    reference.run()
    events = written(report, tmp_path / "t.json")["traceEvents"]
    counter = [(float(e["ts"]), e["args"]["running"]) for e in events if e["name"] == "requests"]
    at = np.searchsorted([ts for ts, _ in counter], report.steps["start_s"].to_numpy() * 1e6 + 1e-3, side="right") - 1
    assert [counter[i][1] for i in at] == held


class _Watched(naive.deque):  # type: ignore[name-defined]
    """A queue of batches that says when one is added."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.seen = seen

    def append(self, item: Any) -> None:
        super().append(item)
        self.seen()


def test_preemptions_are_marked(tmp_path: Path) -> None:
    report = reported()
    marks = [e for e in written(report, tmp_path / "t.json")["traceEvents"] if e["ph"] == "i"]
    assert sum(e["args"]["requests"] for e in marks) == report.summary["preemptions"] > 0


def test_a_run_cut_off_and_a_run_of_nothing(tmp_path: Path) -> None:
    events = written(reported(2, 1, engine__time_limit=3.0), tmp_path / "t.json")["traceEvents"]
    assert any(e["ph"] == "X" for e in events)
    nothing = reported(engine__num_blocks=1, workload__lengths={"kind": "fixed", "prompt": 100, "output": 2})
    assert written(nothing, tmp_path / "t.json")["traceEvents"] == []


def test_commands_write_the_same_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From `run` and from the tables that it kept; the same bytes each time."""
    (tmp_path / "s.toml").write_text(SCENARIO)
    kept, direct = tmp_path / "kept", tmp_path / "new" / "direct.json.gz"
    assert status(["run", str(tmp_path / "s.toml"), "--out", str(kept), "--trace-out", str(direct)]) == 0
    capsys.readouterr()
    assert status(["trace", str(kept), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["events"] > told["iterations"] > 0
    assert (kept / "trace.json.gz").read_bytes() == direct.read_bytes()
    assert not [path for path in kept.iterdir() if path.name.startswith(".")]


def test_what_cannot_be_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, naming the file, and nothing written."""

    def refused(*arguments: str) -> str:
        assert status(arguments) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1
        return err

    (tmp_path / "s.toml").write_text(SCENARIO)
    assert "requests.parquet: no such file; a run with --out keeps it" in refused("trace", str(tmp_path))
    report = reported()
    report.steps.write_parquet(tmp_path / "requests.parquet")
    report.steps.write_parquet(tmp_path / "steps.parquet")
    assert "requests.parquet: has no column arrival_s" in refused("trace", str(tmp_path))
    (tmp_path / "requests.parquet").write_text("not parquet")
    assert "not a parquet file" in refused("trace", str(tmp_path))
    report.requests.write_parquet(tmp_path / "requests.parquet")
    assert "is a directory; name a file" in refused("trace", str(tmp_path), "--to", str(tmp_path))
    wrong = str(tmp_path / "s.toml" / "t.json")
    assert "--trace-out" in refused("run", str(tmp_path / "s.toml"), "--trace-out", wrong)
    assert not list(tmp_path.glob("*.json*"))


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """Not even the part that was written."""
    report = reported()
    broken = report.steps.drop("waiting")
    with pytest.raises(pl.exceptions.ColumnNotFoundError):
        timeline.write(tmp_path / "t.json", report.requests, broken, "x", source="test")
    assert not list(tmp_path.iterdir())
    with pytest.raises(BadInput, match=r"t\.json"):
        timeline.write(Path("/proc/t.json"), report.requests, report.steps, "x", source="test")
