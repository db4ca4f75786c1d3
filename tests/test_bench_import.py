"""Refitting a profile to results of `vllm bench serve`: results of simulated runs, whose host terms are known."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from calibrate import bench
from calibrate import fit as fitting
from calibrate.score import PAUSE
from sim.__main__ import main
from sim.errors import BadInput
from sim.profile import Coefficients, Errors, Profile, ProfileLatency, Tokens, Validity, load
from sim.scenario import Scenario
from sim.simulate import simulate
from sim.workload import Workload

STEP, SEQUENCE, SCALE = 3e-3, 6e-5, 1.2
BASE = Profile(
    name="base",
    model="llama-3.1-8b",
    device="h100-sxm",
    coefficients=Coefficients(
        step=7e-3, context=2e-8, prefill_attention=4e-10, tokens=Tokens(knots=[1, 256, 8192], seconds=[0, 3e-3, 0.3])
    ),
    validity=Validity(tokens=8192, sequences=256, context_tokens=8192, prefill_context_tokens=8192),
    errors=Errors(rows=1, held_out_median=0, held_out_p90=0, held_out_bias=0),
    provenance={"host_step_s": 1e-3, "host_sequence_s": 0.0},
)
SCENARIO = {
    "model": {"name": "llama-3.1-8b", "dtype": "bfloat16"},
    "device": {"name": "h100-sxm"},
    "engine": {"max_sequences": 256},
    "scheduler": {"token_budget": 2048},
    "latency": {"kind": "roofline"},
    "workload": {"arrivals": {"kind": "poisson", "rate": 1.0}, "lengths": {"kind": "fixed", "prompt": 9, "output": 9}},
}


def result(path: Path, *, clients: int | None = None, rate: float = 0.0, requests: int = 100) -> Path:
    """What the tool would have written of a run of BASE with other host terms."""
    rng = np.random.default_rng(clients or 7)
    prompts, outputs = rng.integers(100, 1500, requests), rng.integers(20, 200, requests)
    times = None if clients else np.cumsum(rng.exponential(1 / rate, requests))
    work = Workload(times, prompts, outputs, None, clients, PAUSE if clients else 0.0, {}, ())
    truth = bench.with_host(BASE, STEP, SEQUENCE, SCALE)
    scenario = Scenario.from_toml(tomli_w.dumps(SCENARIO | {"name": "s"}))
    report = simulate(scenario, requests=work, engine=lambda _: partial(ProfileLatency, truth))
    frame, ends = report.requests, report.steps["end_s"].to_numpy()
    times_of = frame.select("first_token_s", "finished_s").rows()
    gaps = [
        np.diff(ends[(ends >= first) & (ends <= last)]) for first, last in times_of
    ]  # it decodes in every iteration
    assert [len(of) + 1 for of in gaps] == outputs.tolist()
    told = {
        "request_rate": rate or "inf",
        "max_concurrency": clients,
        "input_lens": prompts.tolist(),
        "output_lens": outputs.tolist(),
        "start_times": (frame["arrival_s"] + 1e5).to_list(),
        "ttfts": (frame["first_token_s"] - frame["arrival_s"]).to_list(),
        "itls": [of.tolist() for of in gaps],
        "errors": [""] * requests,
    }
    path.write_text(json.dumps(told))
    return path


def files(folder: Path) -> tuple[Path, Path]:
    scenario, profile = folder / "s.toml", folder / "base.toml"
    scenario.write_text(tomli_w.dumps(SCENARIO))
    fitting.save(BASE, profile)
    return scenario, profile


def command(words: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        raise SystemExit(main(words))
    return int(end.value.code or 0)


def test_host_terms_and_scale_of_simulated_runs_are_found_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario, profile = files(tmp_path)
    measured = [
        result(tmp_path / "few.json", clients=2, requests=40),
        result(tmp_path / "many.json", clients=64, requests=160),
        result(tmp_path / "rate.json", rate=6.0, requests=80),
    ]
    to = tmp_path / "mine.toml"
    words = [*map(str, measured), "--profile", str(profile), "--scenario", str(scenario), "--to", str(to), "--json"]
    assert command(["calibrate", "import", "bench", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scale"] == pytest.approx(SCALE, rel=0.05)
    assert told["step_s"] == pytest.approx(STEP, abs=1e-3)  # a tenth of an iteration
    assert told["sequence_s"] == pytest.approx(SEQUENCE, rel=0.15)
    assert told["error_before"] > 0.2 and told["error_after"] < 0.04
    made = load(str(to), Path())
    assert made.name == "mine" and made.provenance["base_profile"] == "base"
    assert made.provenance["results"] == "few.json, many.json, rate.json"
    batch = (8, 1, 100, 9)
    expected = bench.with_host(BASE, STEP, SEQUENCE, SCALE)
    seconds = expected.coefficients.seconds(*batch) * expected.scale
    assert made.coefficients.seconds(*batch) * made.scale == pytest.approx(seconds, rel=0.03)


def test_terms_that_are_held_stay(tmp_path: Path) -> None:
    read = [bench.read(result(tmp_path / "one.json", clients=8, requests=40))]
    scenario = Scenario.from_toml(tomli_w.dumps(SCENARIO | {"name": "s"}))
    fitted, rows = bench.refit(BASE, read, scenario, hold=["scale", "sequence"])
    assert fitted.scale == 1.0 and fitted.coefficients.sequence == 0.0
    assert fitted.coefficients.step > BASE.coefficients.step
    assert {row["metric"] for row in rows} == set(bench.QUANTILES)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"ttfts": None}, "has no list ttfts: save the bench result with --save-detailed"),
        ({"itls": [[0.1]]}, "input_lens and itls are not lists of one length"),
        ({"ttfts": ["a"] * 40}, "row 1, column ttfts: 'a' is not a number"),
        ({"ttfts": [0.0] * 40}, "no request was answered"),
        ({"request_rate": 3.0, "start_times": None}, "start_times: is needed where the load is a rate"),
        ({"max_concurrency": 0}, "max_concurrency: 0 must be a whole number of at least 1"),
    ],
)
def test_results_that_cannot_be_used(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    path = result(tmp_path / "one.json", clients=8, requests=40)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadInput) as error:
        bench.read(path)
    assert str(error.value).startswith(str(path)) and what in str(error.value)


def test_faults_of_the_command_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario, profile = files(tmp_path)
    good, bad = result(tmp_path / "one.json", clients=8, requests=40), tmp_path / "bad.json"
    bad.write_text("[")
    given = ["--profile", str(profile), "--scenario", str(scenario), "--to", str(tmp_path / "mine.toml")]
    for words, what in (
        ([str(bad), *given], "not valid JSON"),
        ([str(tmp_path / "none.json"), *given], "no such file"),
        (given, "give at least one result file"),
        ([str(good), *given, "--hold", "stap"], "did you mean 'step'?"),
        ([str(good), *given[:-1], str(tmp_path / "mine.json")], "must end in .toml"),
        ([str(good), *given, "--set", "device.name=h200"], "was measured on 'h100-sxm', not 'h200'"),
        ([str(good), *given, "--set", "engine.max_model_tokens=500"], "requests cannot be served"),
    ):
        assert command(["calibrate", "import", "bench", *words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and what in err
    assert not (tmp_path / "mine.toml").exists()
