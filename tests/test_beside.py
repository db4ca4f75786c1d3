"""A measured run beside the forecast: read strictly, served again, and measured by the same definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from test_bench import SCENARIO, strict

from sim import BadInput, Scenario, bench, simulate
from sim.__main__ import status
from sim.bench_results import read_bench
from sim.beside import compared, differences, replayed
from sim.traces import read

# A result as an older and a newer version of the tool wrote it, by hand: three requests, the second of which failed.
RESULT: dict[str, Any] = {
    "date": "20260101-120000",
    "endpoint_type": "openai",
    "backend": "openai",
    "label": None,
    "model_id": "meta-llama/Llama-3.1-8B-Instruct",
    "tokenizer_id": "meta-llama/Llama-3.1-8B-Instruct",
    "num_prompts": 3,
    "request_rate": 2.0,
    "burstiness": 1.0,
    "max_concurrency": None,
    "duration": 4.5,
    "completed": 2,
    "failed": 1,
    "input_lens": [100, 7, 30],
    "output_lens": [4, 0, 1],
    "ttfts": [0.5, 0.0, 0.25],
    "itls": [[0.1, 0.2, 0.3], [], []],
    "start_times": [1000.5, 1000.75, 1002.0],
    "generated_texts": ["", "", ""],
    "errors": ["", "Internal Server Error", ""],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(SCENARIO)
    (tmp_path / "r.json").write_text(json.dumps(RESULT))
    return tmp_path


def changed(here: Path, **changes: Any) -> Path:
    """The result with other keys; those that are ... are left out."""
    result = {key: value for key, value in (RESULT | changes).items() if value is not ...}
    (here / "r.json").write_text(json.dumps(result))
    return here / "r.json"


def test_a_run_beside_itself_has_no_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The forecast of what this scenario served is what it served: every figure, to rounding."""
    assert status(["run", "s.toml", "--out", "run"]) == 0
    capsys.readouterr()
    assert status(["beside", "s.toml", "run/vllm_bench.json", "--json", "--out", "beside"]) == 0
    told = strict(capsys.readouterr().out)
    assert len(told["metrics"]) == 12 and len(told["throughput"]) == 2 and told["differences"] == []
    for row in told["metrics"] + told["throughput"]:
        assert row["error"] == pytest.approx(0, abs=1e-9)
    assert {row["metric"]: row["n_measured"] for row in told["metrics"]}["ttft_p99"] == 120
    assert strict((here / "beside/beside.json").read_text()) == told
    summary = strict((here / "run/summary.json").read_text())
    for row in told["metrics"]:
        metric, _, percentile = row["metric"].rpartition("_")
        assert row["measured_s"] == pytest.approx(summary[f"{metric}_s"][percentile], rel=1e-9), "the summary's own"


@pytest.mark.usefixtures("here")
def test_another_policy_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["run", "s.toml", "--policy", "prefill-first", "--out", "run"]) == 0
    capsys.readouterr()
    assert status(["beside", "s.toml", "run/vllm_bench.json", "--json"]) == 0
    told = strict(capsys.readouterr().out)
    assert max(abs(row["error"]) for row in told["metrics"]) > 0.05 and told["policy"] == "stall-free"


def test_measured_figures_by_hand(here: Path) -> None:
    """TTFT 0.5 and 0.25; gaps 0.1, 0.2, 0.3; one TPOT of 0.2; E2E 1.1 and 0.25; 2 requests and 5 tokens in 1.75 s."""
    measured = read_bench(here / "r.json", "r.json")
    scenario, how = replayed(Scenario.load("s.toml"), here / "r.json", measured)
    told = compared(simulate(scenario), measured)
    assert (told["requests"], told["failed"], how) == (2, 1, "at the times that they were sent")
    found = {row["metric"]: (row["measured_s"], row["n_measured"]) for row in told["metrics"]}
    assert found["ttft_p50"] == (0.25, 2) and found["ttft_p99"] == (0.5, 2)
    assert found["tbt_p50"] == (0.2, 3) and found["tbt_p90"] == (0.3, 3)
    assert found["tpot_p50"] == (pytest.approx(0.2), 1)
    assert found["e2e_p50"] == (0.25, 2) and found["e2e_p99"] == (pytest.approx(1.1), 2)
    rates = [row["measured"] for row in told["throughput"]]
    assert rates == [pytest.approx(2 / 1.75), pytest.approx(5 / 1.75)]
    newer = read_bench(changed(here, latencies=[1.2, 0.0, 0.25]), "r.json")
    assert newer.latencies.tolist() == [1.2, 0.0, 0.25], "the tool's own figure, where it writes one"


def test_the_forecast_serves_the_result_s_requests(here: Path) -> None:
    """Lengths and times of those that completed; warm-up counts, since it counts in the result."""
    measured = read_bench(here / "r.json", "r.json")
    own = Scenario.load("s.toml").with_(metrics__warmup=1.0)
    report = simulate(replayed(own, here / "r.json", measured)[0])
    assert report.requests["prompt_tokens"].to_list() == [100, 30]
    assert report.requests["output_tokens"].to_list() == [4, 1]
    assert report.requests["arrival_s"].to_list() == [0.0, 1.5]
    assert report.summary["left_out"] == 0


@pytest.mark.parametrize(
    ("changes", "kind", "how"),
    [
        ({}, "trace", "at the times"),
        ({"request_rate": "inf"}, "trace", "at the times"),
        ({"request_rate": "inf", "max_concurrency": 2}, "closed", "a closed loop of 2"),
        ({"max_concurrency": 2}, "trace", "at the times"),
        ({"start_times": ...}, "poisson", "drawn at request_rate 2 "),
        ({"start_times": ..., "burstiness": 0.25}, "gamma", "drawn at request_rate 2 "),
        ({"start_times": ..., "request_rate": "inf"}, "at-once", "all at once"),
        ({"start_times": [], "request_rate": "inf"}, "at-once", "all at once"),
    ],
)
def test_how_requests_arrive(changes: dict[str, Any], kind: str, how: str, here: Path) -> None:
    path = changed(here, **changes)
    scenario, told = replayed(Scenario.load("s.toml"), path, read_bench(path, "r.json"))
    assert scenario.workload.arrivals.kind == kind and told.startswith(how)
    assert simulate(scenario).summary["completed"] == 2


@pytest.mark.usefixtures("here")
def test_a_closed_loop_beside_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Its requests wait for the forecast's own answers, not for the measured ones."""
    arrivals = ["--set", "workload.arrivals={kind='closed', concurrency=5}"]
    assert status(["run", "s.toml", *arrivals, "--out", "run"]) == 0
    capsys.readouterr()
    assert status(["beside", "s.toml", "run/vllm_bench.json", *arrivals, "--json"]) == 0
    told = strict(capsys.readouterr().out)
    assert told["replayed"].startswith("a closed loop of 5") and told["differences"] == []
    assert all(row["error"] == pytest.approx(0, abs=1e-9) for row in told["metrics"] + told["throughput"])


def test_what_differs_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = read_bench(here / "r.json", "r.json")
    scenario = Scenario.load("s.toml").with_(model={"name": "mistral-7b"}, device={"name": "h100-sxm"})
    found = differences(scenario, measured)
    assert found[0] == "model: the result is of meta-llama/Llama-3.1-8B-Instruct, the scenario of mistral-7b"
    assert found[1].startswith("request_rate: 2.0 in the result, 4.0 in the scenario")
    same = scenario.with_(model__name="llama-3.1-8b", workload__arrivals__rate=2.0)
    assert differences(same, measured) == []
    other = read_bench(changed(here, model_id="me/my-model", max_concurrency=7), "r.json")
    assert [line.partition(":")[0] for line in differences(same, other)] == ["model", "max_concurrency"]
    assert status(["beside", "s.toml", "r.json"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "request_rate: 2.0 in the result, 4.0 in the scenario" in shown or "max_concurrency" in shown
    assert "TTFT P50" in shown and "1 requests failed there and are left out" in shown


def test_one_reader_for_traces_and_results(here: Path) -> None:
    """The rows of the trace are the good requests of the result."""
    measured, trace = read_bench(here / "r.json", "r"), read(here / "r.json", "r")
    assert trace.prompts.tolist() == measured.prompts[measured.good].tolist()
    assert trace.outputs.tolist() == measured.outputs[measured.good].tolist()
    assert measured.starts is not None and trace.arrivals is not None
    assert trace.arrivals.tolist() == (measured.starts[measured.good] - 1000.5).tolist()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"itls": ...}, "r.json: has no list itls: save the bench result with --save-detailed"),
        ({"ttfts": ...}, "r.json: has no list ttfts: save the bench result with --save-detailed"),
        ({"input_lens": ..., "output_lens": ...}, "save the bench result with --save-detailed"),
        ({"itls": [[], []]}, "input_lens and itls are not lists of one length"),
        ({"ttfts": [0.5, 0.0]}, "input_lens and ttfts are not lists of one length"),
        ({"latencies": [0.5, 0.0]}, "input_lens and latencies are not lists of one length"),
        ({"start_times": [1.0]}, "input_lens and start_times are not lists of one length"),
        ({"itls": [[0.1, "x"], [], []]}, "r.json: row 1, column itls: 'x' is not a number"),
        ({"itls": [[0.1], 3, []]}, "r.json: row 2, column itls: is not a list of seconds"),
        ({"itls": [[0.1], [], [-1.0]]}, "r.json: row 3, column itls: has a gap that is not from 0"),
        ({"ttfts": [0.5, None, 0.2]}, "r.json: row 2, column ttfts: nothing is not a number"),
        ({"ttfts": [0.5, 0.1, -0.2]}, "r.json: row 3, column ttfts: -0.2 is not a finite time"),
        ({"output_lens": [4, 0, 1.5]}, "r.json: row 3, column output_lens"),
        ({"output_lens": [0, 0, 0]}, "r.json: no request completed"),
        ({"input_lens": [], "output_lens": []}, "r.json: holds no requests"),
        ({"input_lens": [100, 7, 600]}, "row 3, columns input_lens and output_lens"),
        ({"start_times": ..., "burstiness": 1e-9}, "r.json: [workload.arrivals] cv"),
        ({"request_rate": "inf", "max_concurrency": 1e300}, "r.json: [workload.arrivals] concurrency"),
    ],
)
def test_results_that_cannot_be_used(
    changes: dict[str, Any], what: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, with the file, the request and the key."""
    changed(here, **changes)
    assert status(["beside", "s.toml", "r.json"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and what in err, err


def test_files_and_options_that_cannot_be_used(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert status(["beside", "s.toml", *words]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1
        return err

    assert "nothing.json: no such file" in refused("nothing.json")
    assert "is a directory" in refused(str(here))
    assert "--rate: the requests are those of the result" in refused("r.json", "--rate", "3")
    assert "--requests: the requests are those of the result" in refused("r.json", "--requests", "3")
    (here / "r.json").write_text('{"input_lens": [1,')
    assert "r.json: not valid JSON, or cut off" in refused("r.json")
    (here / "r.json").write_text("[1, 2]")
    assert "r.json: is not a JSON object" in refused("r.json")


def test_every_run_can_be_laid_beside(here: Path) -> None:
    """What bench writes, read_bench reads, failures and single tokens included."""
    report = simulate(
        Scenario.from_toml(SCENARIO).with_(engine__time_limit=12.0, engine__num_blocks=21), keep_tokens=True
    )
    (here / "b.json").write_bytes(bench.of_run(report))
    measured = read_bench(here / "b.json", "b.json")
    done = (report.requests["status"] == "completed").to_numpy()
    assert (measured.good == done).all() and 0 < done.sum() < 120
    assert measured.latencies[done] == pytest.approx(
        (report.requests["finished_s"] - report.requests["arrival_s"]).to_numpy()[done]
    )
    whole = measured.ttfts + np.array([gaps.sum() for gaps in measured.itls])
    assert whole[done] == pytest.approx(measured.latencies[done])
    with pytest.raises(BadInput, match="no such file"):
        read_bench(here / "none.json", "none.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@profile(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(RESULT)), value=JSON)
def test_any_value_of_any_key_is_read_or_refused(key: str, value: Any, here: Path) -> None:
    """Never a traceback, and what is read can be served."""
    path = changed(here, **{key: value})
    try:
        measured = read_bench(path, "r.json")
        scenario, _ = replayed(Scenario.load(here / "s.toml"), path, measured)
        told = compared(simulate(scenario), measured)
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert json.dumps([told, differences(scenario, measured)], allow_nan=False)
