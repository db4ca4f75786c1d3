"""Scoring forecasts on public measurements, and the profiles that are shipped."""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from calibrate import current, scoreboard, tables
from calibrate import score as scoring
from calibrate.current import Deployed
from calibrate.score import AICONFIGURATOR, INFERENCEMAX, Case
from sim.__main__ import main
from sim.hardware import DeviceTable, device
from sim.profile import load, shipped

installed = pytest.mark.skipif(
    importlib.util.find_spec(tables.PACKAGE) is None, reason="aiconfigurator-core is not installed (extra 'silicon')"
)


def row(**changes: Any) -> dict[str, Any]:
    """A row of the file, in its own columns."""
    return {
        "id": "one",
        "silicon_data_source": "source_file=/somewhere/Qwen_Qwen3-32B.csv; silicon_concurrency=16",
        "backend": "vllm",
        "backend_version": "0.12.0",
        "model_path": "Qwen/Qwen3-32B",
        "system": "h100_sxm",
        "mode": "agg",
        "isl": 1024,
        "osl": 128,
        "gemm_quant_mode": None,
        "batch_size": 16,
        "tp_size": 2,
        "pp_size": 1,
        "attention_dp_size": None,
        "silicon_ttft_ms": 190.0,
        "silicon_tpot_ms": 20.0,
    } | changes


def command(words: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        raise SystemExit(main(words))
    return int(end.value.code or 0)


def test_a_row_becomes_the_closed_loop_that_was_measured() -> None:
    case = scoring.case(row())
    assert isinstance(case, Case)
    assert (case.campaign, case.deployed.precision, case.overlap) == (AICONFIGURATOR, "bf16", False)
    one = case.scenario()
    assert one.scheduler.token_budget == 16 + 1024 + 1500
    assert one.workload.requests == 160
    assert one.workload.lengths.prompt == (1024, 1024) or list(one.workload.lengths.prompt) == [1024, 1024]


def test_rows_of_the_other_campaign_vary_in_length_and_have_static_scales() -> None:
    told = {"silicon_data_source": "source_file=2026-04-06.csv; model=Llama-3.1-70B", "backend": "trtllm"}
    told |= {"model_path": "meta-llama/Llama-3.1-70B", "gemm_quant_mode": "fp8", "backend_version": None}
    case = scoring.case(row(**told))
    assert isinstance(case, Case)
    assert (case.campaign, case.overlap, case.budget) == (INFERENCEMAX, True, 1024 + 128 + 200)
    assert (case.deployed.precision, case.deployed.kv_dtype) == ("fp8-static", "fp8")
    one = case.scenario()
    assert list(one.workload.lengths.prompt) == [819, 1024]
    other = scoring.case(row(**told | {"backend": "vllm", "system": "b200_sxm"}))
    assert isinstance(other, Case) and other.budget == 8192


@pytest.mark.parametrize(("output", "devices", "waits"), [(1024, 4, 20), (1024, 8, 0), (8192, 4, 0)])
def test_trtllm_of_the_other_campaign_waits_for_fuller_batches_where_its_script_says_so(
    output: int, devices: int, waits: int
) -> None:
    told = {"silicon_data_source": "source_file=2026-04-06.csv; model=Llama-3.1-70B", "backend": "trtllm"}
    told |= {"model_path": "meta-llama/Llama-3.1-70B", "gemm_quant_mode": "fp8", "backend_version": None}
    case = scoring.case(row(**told, osl=output, tp_size=devices))
    assert isinstance(case, Case)
    assert case.scenario().scheduler.batch_wait_iterations == waits


@pytest.mark.parametrize("source", ["/somewhere/Qwen_Qwen3-32B.csv", "2026-04-06.csv"])
def test_a_case_means_the_same_in_another_process(source: str) -> None:
    case = scoring.case(row(silicon_data_source=f"source_file={source}; silicon_concurrency=16"))
    assert isinstance(case, Case)
    there = pickle.loads(pickle.dumps(case))
    assert there.scenario().to_toml() == case.scenario().to_toml()


@pytest.mark.parametrize(("version", "policy"), [("0.5.1.post1", "prefill-first"), ("0.5.6.post2", "stall-free")])
def test_sglang_mixes_chunks_with_decodes_since_its_generator_says_so(version: str, policy: str) -> None:
    case = scoring.case(row(backend="sglang", backend_version=version))
    assert isinstance(case, Case)
    assert case.scenario().scheduler.policy == policy


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mode": "disagg"}, "prefill and decode on different devices"),
        ({"model_path": "deepseek-ai/DeepSeek-R1"}, "mixtures of experts"),
        ({"system": "gb200"}, "no catalogue device for gb200"),
        ({"gemm_quant_mode": "nvfp4"}, "weights in FP4"),
        ({"attention_dp_size": 8}, "attention-data parallel"),
    ],
)
def test_rows_that_cannot_be_forecast_say_why(change: dict[str, Any], why: str) -> None:
    told = scoring.case(row(**change))
    assert isinstance(told, str) and why in told


def scored(**changes: Any) -> dict[str, Any]:
    known = {"model": "qwen3-32b", "system": "h100_sxm", "framework": "vllm", "precision": "bf16", "version": "0.12.0"}
    known |= {"tables_version": "0.24.0", "concurrency": 16, "ttft_error": 0.1, "tpot_error": -0.2, "why_not": None}
    return known | {"tpot_measured_s": 0.02, "tpot_s": 0.016} | changes


def test_errors_are_medians_by_model_and_by_group_and_reasons_are_counted() -> None:
    rows = [
        scored(),
        scored(concurrency=64, ttft_error=-0.3),
        scored(concurrency=200, ttft_error=0.0),
        scored(why_not="x"),
    ]
    rows.append(scored(framework="trtllm", tpot_error=0.4))
    told = scoreboard.result(rows, 100, Counter({"weights in FP4": 95}), current.HOST)
    assert told["scored"] == 4 and told["not_scored"] == {"weights in FP4": 95, "x": 1}
    (model,) = told["models"]
    assert (model["rows"], model["ttft_median"], model["tpot_median"]) == (4, pytest.approx(0.1), pytest.approx(0.2))
    more = scoreboard.result([*rows, scored(model="llama-3.1-8b", ttft_error=0.9)], 100, Counter(), current.HOST)
    assert {one["model"]: one["rows"] for one in more["models"]} == {"llama-3.1-8b": 1, "qwen3-32b": 4, "all": 5}
    assert [one["framework"] for one in told["groups"]] == ["trtllm", "vllm"]
    vllm = told["groups"][1]
    assert [size["concurrency"] for size in vllm["by_concurrency"]] == [16, 64, 200]
    assert vllm["ttft_bias"] == pytest.approx(0.0) and vllm["peer_tpot_median"] == 0.111
    left = told["host_left"]["vllm"]  # 4 ms are missing at every size
    assert left["step_s"] + left["sequence_s"] * 90 == pytest.approx(4e-3, rel=0.1)


def test_a_filter_that_nothing_matches_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scoring, "read", lambda: [row(), row(mode="disagg")])
    for words, what in (
        (["--model", "qwen3-33b"], "--model: unknown model 'qwen3-33b'; did you mean 'qwen3-32b'?"),
        (["--backend", "vlm"], "--backend: unknown backend 'vlm'; did you mean 'vllm'?"),
        (["--sample", "0"], "--sample: 0 must be at least 1"),
    ):
        assert command(["calibrate", "score", *words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and what in err


@installed
def test_a_few_measured_rows_are_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import polars as pl

    rows = scoring.read()
    few = [one for one in rows if one["model_path"] == "Qwen/Qwen3-32B" and one["backend"] == "vllm"]
    few = [one for one in few if one["osl"] == 128 and one["isl"] == 1024 and one["tp_size"] == 4]
    monkeypatch.setattr(scoring, "read", lambda: few)
    assert command(["calibrate", "score", "--out", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scored"] == len(few) == 5
    (group,) = told["groups"]
    assert group["tpot_median"] < 0.15 and group["ttft_median"] < 0.2
    assert told == json.loads((tmp_path / "score.json").read_text())
    kept = pl.read_parquet(tmp_path / "rows.parquet")
    assert kept["tables_version"].unique().to_list() == ["0.24.0"]
    assert (kept["ttft_warm_s"] < kept["ttft_s"]).all()


# What is shipped


def test_shipped_profiles_are_named_by_what_they_are_of() -> None:
    names = [name for name in shipped() if not name.startswith("sarathi-2024/")]  # of published results
    assert "vllm-0.24.0/llama-3.1-8b-h100-sxm-bf16-tp1" in names
    for name in names:
        found = load(name, Path())
        assert found.name == name
        assert device(DeviceTable(name=found.device)).name == found.device
        assert name.endswith(f"{found.model}-{found.device}-{found.provenance['precision']}-tp{found.tensor_parallel}")
        assert found.provenance["made_by"] == "make profiles"
        assert found.provenance["framework_version"] in name
        assert found.errors.held_out_median < 0.05


def test_every_profile_that_is_made_is_shipped() -> None:
    kept = {name.partition("/")[2] for name in shipped() if not name.startswith("sarathi-2024/")}
    assert kept == {one.name("").partition("/")[2] for one in current.catalogue()}


def test_a_shipped_profile_runs_and_refuses_another_device_and_other_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text(
        '[model]\nname = "llama-3.1-8b"\ndtype = "bfloat16"\n[device]\nname = "h100-sxm"\n[latency]\nkind = "profile"\n'
        'name = "vllm-0.24.0/llama-3.1-8b-h100-sxm-bf16-tp1"\n[workload]\nrequests = 50\n'
        '[workload.arrivals]\nkind = "poisson"\nrate = 5.0\n'
        '[workload.lengths]\nkind = "fixed"\nprompt = 500\noutput = 50\n'
    )
    assert command(["run", str(scenario), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 5e-3 < told["tpot_s"]["p50"] < 2e-2
    for setting, what in (
        ("device.name=h200", "was measured on 'h100-sxm', not 'h200'"),
        ("model.dtype=fp8", "is of weights in bfloat16, not fp8"),
        ("model.kv_dtype=fp8", "[model] kv_dtype: profile"),
        ("latency.name=vllm-0.24.0/llama-3.1-8b-h100-sxm-bf16-tp3", "did you mean"),
    ):
        assert command(["run", str(scenario), "--set", setting]) == 2
        assert what in capsys.readouterr().err


@installed
def test_a_profile_can_be_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "trtllm-1.3.0rc20/llama-3.1-8b-h100-sxm-fp8-static-tp1"
    assert command(["calibrate", "profiles", "--to", str(tmp_path), "--only", name]) == 0
    made, known = (load(str(path), Path()) for path in (tmp_path / f"{name}.toml", shipped()[name]))
    assert made.coefficients.tokens.seconds == pytest.approx(known.coefficients.tokens.seconds, rel=1e-3, abs=1e-7)
    assert command(["calibrate", "profiles", "--to", str(tmp_path), "--only", "none*"]) == 2
    assert "'none*' matches none of" in capsys.readouterr().err


def test_names_do_not_depend_on_anything_else() -> None:
    one = Deployed("vllm", "a100_sxm", "yi-34b", "bf16", 2)
    assert one.name("0.14.0") == "vllm-0.14.0/yi-34b-a100-80gb-sxm-bf16-tp2"
