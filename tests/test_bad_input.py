"""Bad input: exit status 2, nothing on stdout, one line on stderr that names the place, the key and the limit."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from sim.__main__ import status

Case = tuple[Any, ...]
Tables = dict[str, Any]

WORKLOAD: Tables = {
    "requests": 20,
    "arrivals": {"kind": "poisson", "rate": 2.0},
    "lengths": {"kind": "fixed", "prompt": 100, "output": 10},
}
AFFINE: Tables = {
    "engine": {"num_blocks": 4000, "max_model_tokens": 4096},
    "latency": {"kind": "affine", "step": 0.01, "token": 1e-4},
    "workload": WORKLOAD,
}
ROOFLINE: Tables = {
    "model": {"name": "mistral-7b"},
    "device": {"name": "a100-80gb-pcie"},
    "latency": {"kind": "roofline"},
    "workload": WORKLOAD,
}
LLAMA: Tables = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
DROP = object()
HUGE = 10**400
NAN, INF = float("nan"), float("inf")


def changed(tables: Tables, *changes: tuple[str, Any]) -> Tables:
    """A copy with some keys set (paths with slashes) or dropped."""
    result = copy.deepcopy(tables)
    for path, value in changes:
        *names, key = path.split("/")
        table = result
        for name in names:
            table = table.setdefault(name, {})
        if value is DROP:
            del table[key]
        else:
            table[key] = value
    return result


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(tomli_w.dumps(AFFINE))
    return tmp_path


Refused = Callable[..., str]


@pytest.fixture
def refused(here: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must be refused; its line on stderr, which must hold all of `says`."""

    def run(*arguments: str, says: tuple[str, ...]) -> str:
        before = {path: path.lstat().st_mtime_ns for path in here.rglob("*")}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning would be a second line
            code = status(arguments)
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), err
        assert err.startswith("servecast: error: ") and err.endswith("\n") and len(err.splitlines()) == 1, err
        assert not [word for word in says if word not in err], (err, says)
        assert {path: path.lstat().st_mtime_ns for path in here.rglob("*")} == before, "something was written"
        return err

    return run


# Scenario keys: (path, value, where, what).
KEYS: list[Case] = [
    # names
    ("engin", {"num_blocks": 1}, "[engin]", "did you mean 'engine'?"),
    ("engine/max_sequence", 3, "[engine] max_sequence", "did you mean 'max_sequences'?"),
    ("engine/zzz", 3, "[engine] zzz", "known: block_tokens, max_batch_tokens"),
    ("engine/{key}", 3, "[engine] {key}", "unknown key '{key}'; known: block_tokens"),
    ("engine/" + "k" * 2000, 3, "[engine] k", "unknown key 'kkkk"),
    ("scheduler/token_bugdet", 3, "[scheduler] token_bugdet", "did you mean 'token_budget'?"),
    ("deployment/tensor_paralel", 2, "[deployment] tensor_paralel", "did you mean 'tensor_parallel'?"),
    ("workload/request", 3, "[workload] request", "did you mean 'requests'?"),
    ("workload/lengths/promt", 3, "[workload.lengths] promt", "did you mean 'prompt'?"),
    ("metrics/warm_up", 3, "[metrics] warm_up", "did you mean 'warmup'?"),
    ("cost/gpuhour", 3, "[cost] gpuhour", "did you mean 'gpu_hour'?"),
    ("model", {"nam": "x"}, "[model] nam", "did you mean 'name'?"),
    ("policy/orca", {"max_sequence": 1}, "[policy.orca] max_sequence", "did you mean 'max_sequences'?"),
    ("policy/orca", {"policy": "orca"}, "[policy.orca] policy", "unknown key"),
    ("policy/stall-fre", {"max_sequences": 1}, "[policy.stall-fre]", "did you mean 'stall-free'?"),
    ("slo/tbt_p98", 1.0, "[slo] tbt_p98", "did you mean 'tbt_p99'?"),
    ("slo/tbt_p990", 1.0, "[slo] tbt_p990", "did you mean 'tbt_p99"),
    ("slo/scheduling_delay", 1.0, "[slo] scheduling_delay", "did you mean 'scheduling_delay_p"),
    ("scheduler/policy", "stallfree", "[scheduler] policy", "did you mean 'stall-free'?"),
    ("deployment/router", "least_loaded", "[deployment] router", "did you mean 'least-loaded'?"),
    ("workload/too_long", "skip", "[workload] too_long", "'error', 'drop' or 'clip'"),
    ("model/name", "mistral7b", "[model] name", "did you mean 'mistral-7b'?"),
    ("workload/lengths", {"kind": "dataset", "name": "openchat"}, "[workload.lengths] name", "openchat-sharegpt4"),
    # kinds
    ("latency/kind", "afine", "[latency] kind", "did you mean 'affine'?"),
    ("latency/kind", 5, "[latency] kind", "known: affine, profile, roofline"),
    ("latency/kind", [[]], "[latency] kind", "known: affine, profile, roofline"),
    ("latency/kind", "profile", "[latency] step", "of kind 'profile'"),
    ("latency", {"kind": "profile"}, "[latency] name", "required"),
    ("workload/arrivals/kind", "poison", "[workload.arrivals] kind", "did you mean 'poisson'?"),
    ("workload/arrivals/kind", True, "[workload.arrivals] kind", "known: at-once, closed"),
    ("workload/lengths/kind", "normal", "[workload.lengths] kind", "did you mean 'lognormal'?"),
    ("workload/arrivals/cv", 1.0, "[workload.arrivals] cv", "of kind 'poisson'"),
    ("workload/lengths/name", "x", "[workload.lengths] name", "of kind 'fixed'"),
    ("latency/tile", 128, "[latency] tile", "of kind 'affine'"),
    ("workload/arrivals", {"kind": "at-once", "rate": 1.0}, "[workload.arrivals] rate", "of kind 'at-once'"),
    ("workload/arrivals", {"kind": "closed", "concurrency": 4, "rate": 1.0}, "[workload.arrivals] rate", "'closed'"),
    # what is missing
    ("latency", DROP, "[latency]", "required"),
    ("workload", DROP, "[workload]", "required"),
    ("workload/arrivals", DROP, "[workload] arrivals", "required"),
    ("workload/lengths", DROP, "[workload] lengths", "required"),
    ("latency/kind", DROP, "[latency] kind", "required"),
    ("workload/arrivals/kind", DROP, "[workload.arrivals] kind", "required"),
    ("workload/arrivals/rate", DROP, "[workload.arrivals] rate", "required"),
    ("workload/arrivals", {"kind": "gamma", "rate": 1.0}, "[workload.arrivals] cv", "required"),
    ("workload/arrivals", {"kind": "closed"}, "[workload.arrivals] concurrency", "required"),
    ("workload/lengths", {"kind": "dataset"}, "[workload.lengths] name", "required"),
    ("workload/lengths/output", DROP, "[workload.lengths] output", "required"),
    ("device", {}, "[device] name", "required"),
    ("engine/num_blocks", DROP, "[model]", "engine.num_blocks"),
    # types
    ("name", 5, "[name]", "5 must be a valid string"),
    ("scheduler/batch_wait_ratio", 0.5, "[scheduler]", "batch_wait_iterations and batch_wait_ratio go together"),
    ("scheduler/token_budget", "aut", "[scheduler] token_budget", "'aut' must be a valid integer or 'auto'"),
    ("engine/num_blocks", "4000", "[engine] num_blocks", "'4000' must be a valid integer"),
    ("engine/num_blocks", True, "[engine] num_blocks", "True must be a valid integer"),
    ("engine/num_blocks", 4.0, "[engine] num_blocks", "4.0 must be a valid integer"),
    ("engine/num_blocks", [1], "[engine] num_blocks", "an array must be a valid integer"),
    ("engine/num_blocks", {"a": 1}, "[engine] num_blocks", "a table must be a valid integer"),
    ("scheduler/token_budget", "many", "[scheduler] token_budget", "'many'"),
    ("scheduler/token_budget", 1.5, "[scheduler] token_budget", "1.5"),
    ("latency/step", False, "[latency] step", "False must be a valid number"),
    ("latency/step", "0.1", "[latency] step", "'0.1' must be a valid number"),
    ("engine", 5, "[engine]", "5 must be a table"),
    ("latency", "affine", "[latency]", "'affine' must be a table"),
    ("workload/arrivals", "poisson", "[workload] arrivals", "'poisson' must be a table"),
    ("slo", 5, "[slo]", "5 must be a table"),
    ("policy", 5, "[policy]", "5 must be a table"),
    ("policy/orca", 5, "[policy] orca", "5 must be a table"),
    ("workload/lengths/prompt", [1, 2], "[workload.lengths] prompt", "an array must be a valid integer"),
    ("workload/lengths", {"kind": "trace", "path": 5}, "[workload.lengths] path", "5 must be a valid string"),
    ("slo/tbt_p99", True, "[slo] tbt_p99", "True must be a number of seconds"),
    ("slo/tbt_p99", [1], "[slo] tbt_p99", "an array must be a number of seconds"),
    ("slo/first_token_gap", 1, "[slo] first_token_gap", "1 must be true or false"),
    # limits
    ("engine/num_blocks", 0, "[engine] num_blocks", "greater than or equal to 1"),
    ("engine/num_blocks", -1, "[engine] num_blocks", "-1 must be greater than or equal to 1"),
    ("engine/num_blocks", HUGE, "[engine] num_blocks", "less than or equal to 9007199254740992"),
    ("engine/block_tokens", 0, "[engine] block_tokens", "greater than or equal to 1"),
    ("engine/max_sequences", 0, "[engine] max_sequences", "greater than or equal to 1"),
    ("engine/max_model_tokens", 1, "[engine] max_model_tokens", "greater than or equal to 2"),
    ("engine/memory_fraction", 0, "[engine] memory_fraction", "greater than 0"),
    ("engine/memory_fraction", 1.5, "[engine] memory_fraction", "less than or equal to 1"),
    ("engine/watermark", NAN, "[engine] watermark", "nan must be a finite number"),
    ("engine/watermark", INF, "[engine] watermark", "inf must be a finite number"),
    ("engine/watermark", 1.0, "[engine] watermark", "less than 1"),
    ("engine/time_limit", 0, "[engine] time_limit", "greater than 0"),
    ("latency/step", -0.1, "[latency] step", "-0.1 must be greater than or equal to 0"),
    ("latency/step", HUGE, "[latency] step", "1e+30"),
    ("latency/step", 1e308, "[latency] step", "1e+30"),
    ("latency/step", 5e-324, "[latency] step", "1e-30"),
    ("latency/context", NAN, "[latency] context", "nan must be a finite number"),
    ("scheduler/token_budget", 0, "[scheduler] token_budget", "greater than or equal to 1"),
    ("scheduler/token_budget", HUGE, "[scheduler] token_budget", "9007199254740992"),
    ("deployment/tensor_parallel", 0, "[deployment] tensor_parallel", "greater than or equal to 1"),
    ("deployment/pipeline_parallel", 1025, "[deployment] pipeline_parallel", "less than or equal to 1024"),
    ("deployment/replicas", 1001, "[deployment] replicas", "less than or equal to 1000"),
    ("workload/requests", 0, "[workload] requests", "greater than or equal to 1"),
    ("workload/requests", 10**9, "[workload] requests", "less than or equal to 100000000"),
    ("workload/seed", -1, "[workload] seed", "greater than or equal to 0"),
    ("workload/seed", HUGE, "[workload] seed", "less than or equal to 9223372036854775807"),
    ("workload/arrivals/rate", 0, "[workload.arrivals] rate", "greater than 0"),
    ("workload/arrivals/rate", -2.0, "[workload.arrivals] rate", "-2.0 must be greater than 0"),
    ("workload/arrivals/rate", NAN, "[workload.arrivals] rate", "nan must be a finite number"),
    ("workload/arrivals/rate", HUGE, "[workload.arrivals] rate", "1e+30"),
    ("workload/arrivals/rate", 1e-300, "[workload.arrivals] rate", "1e-30"),
    ("workload/arrivals/clip", 0, "[workload.arrivals] clip", "greater than 0"),
    ("workload/arrivals", {"kind": "gamma", "rate": 1.0, "cv": 1e-200}, "[workload.arrivals] cv", "1e-30"),
    ("workload/arrivals", {"kind": "gamma", "rate": 1.0, "cv": 101}, "[workload.arrivals] cv", "equal to 100"),
    ("workload/arrivals", {"kind": "closed", "concurrency": 0}, "[workload.arrivals] concurrency", "equal to 1"),
    ("workload/arrivals", {"kind": "closed", "concurrency": 1, "think": -1}, "[workload.arrivals] think", "equal to 0"),
    ("workload/lengths/prompt", 0, "[workload.lengths] prompt", "greater than or equal to 1"),
    ("workload/lengths/prompt", 2**31 + 1, "[workload.lengths] prompt", "less than or equal to 2147483648"),
    ("workload/lengths/output", -3, "[workload.lengths] output", "-3 must be greater than or equal to 1"),
    (
        "workload/lengths/prompt",
        8000,
        "[workload] too_long",
        "8000 prompt + 10 output tokens, over max_model_tokens = 40",
    ),
    ("metrics/warmup", -1, "[metrics] warmup", "greater than or equal to 0"),
    ("metrics/drain", INF, "[metrics] drain", "finite"),
    ("cost/gpu_hour", 0, "[cost] gpu_hour", "greater than 0"),
    ("slo/ttft", 0, "[slo] ttft", "greater than 0"),
    ("slo/tbt_p99", NAN, "[slo] tbt_p99", "nan must be a number of seconds greater than 0"),
    ("slo/tbt_p99", HUGE, "[slo] tbt_p99", "at most 1e+30"),
    ("slo/tbt_p99", "x" * 2000, "[slo] tbt_p99", "'xxx"),
    ("policy/orca", {"max_sequences": 0}, "[policy.orca] max_sequences", "greater than or equal to 1"),
    # shapes of lengths
    (
        "workload/lengths",
        {"kind": "uniform", "prompt": [5, 2], "output": [1, 2]},
        "[workload.lengths] prompt",
        "[5, 2]",
    ),
    ("workload/lengths", {"kind": "uniform", "prompt": [5, "a"], "output": [1, 2]}, "[workload.lengths] prompt", "'a'"),
    ("workload/lengths", {"kind": "uniform", "prompt": [5], "output": [1, 2]}, "[workload.lengths] prompt", "2 needed"),
    (
        "workload/lengths",
        {"kind": "uniform", "prompt": [1, 2, 3], "output": [1, 2]},
        "[workload.lengths] prompt",
        "2 it",
    ),
    ("workload/lengths", {"kind": "zipf", "min_tokens": 9, "max_tokens": 5}, "[workload.lengths]", "min_tokens = 9 is"),
    ("workload/lengths", {"kind": "lognormal", "prompt": 7, "output": 7}, "[workload.lengths] prompt", "a table"),
    (
        "workload/lengths",
        {"kind": "lognormal", "prompt": {"median": 5, "p90": 2, "max": 9}, "output": {"median": 5, "p90": 6, "max": 9}},
        "[workload.lengths.prompt]",
        "median = 5 is above p90 = 2",
    ),
    (
        "workload/lengths",
        {"kind": "lognormal", "prompt": {"median": 5, "p9": 6, "max": 9}, "output": {"median": 5, "p90": 6, "max": 9}},
        "[workload.lengths.prompt] p9",
        "did you mean 'p90'?",
    ),
    ("workload/lengths", {"kind": "trace", "path": ""}, "[workload.lengths] path", "at least 1 character"),
    # what keys say together
    ("latency", {"kind": "affine"}, "[latency] step", "step + token must be greater than 0"),
    ("slo/attainment", 0.9, "[slo] attainment", "needs a limit per request: ttft, tpot, tbt_max, e2e"),
    ("slo", {"ttft": 1.0, "attainment": 1.5}, "[slo] attainment", "at most 1"),
    ("deployment/router", "sticky", "[deployment] router", "session_id"),
    ("scheduler", {"policy": "prefill-first"}, None, None),  # fine as it is; with the batch cap of the next line not
    ("engine/max_batch_tokens", 100, None, None),
    ("model", {"name": "mistral-7b", "hf_config": "c.json"}, "[model]", "exactly one of name and hf_config"),
    ("model", {}, "[model]", "exactly one of name and hf_config"),
]
REFUSED_KEYS = [case for case in KEYS if case[2] is not None]


def label(case: Case) -> str:
    value = case[1]
    return f"{case[0][:30]}={'nothing' if value is DROP else repr(value)[:24]}"


@pytest.mark.parametrize("case", REFUSED_KEYS, ids=label)
def test_a_key_that_is_wrong(case: Case, here: Path, refused: Refused) -> None:
    path, value, where, what = case
    (here / "s.toml").write_text(tomli_w.dumps(changed(AFFINE, (path, value))))
    refused("run", "s.toml", says=("s.toml: ", where, what))


@pytest.mark.parametrize("case", [case for case in KEYS if case[2] is None], ids=label)
def test_each_half_of_a_contradiction_is_fine(case: Case, here: Path) -> None:
    (here / "s.toml").write_text(tomli_w.dumps(changed(AFFINE, case[:2])))
    assert status(["check", "s.toml", "--json"]) == 0


CLOSED = ("workload/arrivals", {"kind": "closed", "concurrency": 4})
SLO = ("slo/tbt_p99", 0.1)
TOGETHER: list[Case] = [
    (
        "run",
        [("scheduler/policy", "prefill-first"), ("engine/max_batch_tokens", 100)],
        ("[engine] max_batch_tokens", "100 must be at least max_model_tokens = 4096"),
    ),
    (
        "compare",
        [("policy/prefill-first", {"max_batch_tokens": 100})],
        ("[engine] max_batch_tokens", "at least max_model_tokens = 4096"),
    ),
    ("run", [CLOSED, ("metrics/drain", 1.0)], ("[metrics] drain", "closed loop")),
    ("check", [CLOSED, ("metrics/drain", 1.0)], ("[metrics] drain", "closed loop")),
    ("check", [("deployment/router", "sticky")], ("[deployment] router", "session_id")),
    ("capacity", [], ("[slo]", "capacity needs a limit, such as tbt_p99 = 0.1")),
    ("capacity", [("slo/first_token_gap", True)], ("[slo]", "capacity needs a limit")),
    ("capacity", [("slo/ttft", 1.0)], ("[slo]", "capacity needs a limit")),
    (
        "capacity",
        [SLO, CLOSED],
        ("[workload.arrivals] kind", "'closed' has no rate", "poisson, gamma, constant, trace"),
    ),
    (
        "capacity",
        [SLO, ("workload/arrivals", {"kind": "at-once"})],
        ("[workload.arrivals] kind", "'at-once' has no rate"),
    ),
    ("cost", [CLOSED], ("[slo]", "cost needs a limit")),
    (
        "run",
        [("workload/arrivals", {"kind": "trace", "path": "t.csv", "scale": 2.0, "rate": 1.0})],
        ("[workload.arrivals]", "scale = 2 and rate = 1 exclude each other"),
    ),
]


@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: f"{case[0]} {case[2][0]} {case[2][1][:30]}")
def test_keys_that_contradict_each_other(case: Case, here: Path, refused: Refused) -> None:
    command, changes, says = case
    (here / "s.toml").write_text(tomli_w.dumps(changed(AFFINE, *changes)))
    refused(command, "s.toml", says=("s.toml: ", *says))


MACHINES: list[Case] = [
    ([("model/name", "llama-3.1-70b")], ("[deployment] tensor_parallel", "141.1 GB", "x pipeline_parallel = 2")),
    ([("device/memory_bytes", 1)], ("[deployment] tensor_parallel", "no split over up to 1024 devices fits")),
    ([("deployment/tensor_parallel", 3)], ("[deployment] tensor_parallel", "possible: 1, 2, 4, 8, 16, 32")),
    ([("deployment/pipeline_parallel", 33)], ("[deployment] pipeline_parallel", "possible: 1 to 32")),
    ([("device/name", "a100")], ("[device] name", "ambiguous", "a100-40gb-pcie")),
    ([("device/name", "a1000")], ("[device] name", "unknown device 'a1000'")),
    ([("device/memory_bandwidth", 0)], ("[device] memory_bandwidth", "greater than 0")),
    ([("device/memory_bandwidth", 1e-300)], ("[device] memory_bandwidth", "1e-30")),
    ([("model/dtype", "float32")], ("[model] dtype", "'float16', 'bfloat16', 'fp8' or 'int4'")),
    ([("model", DROP)], ("[model]", 'latency.kind = "affine"')),
    ([("device", DROP)], ("[device]", 'latency.kind = "affine"')),
    ([("latency/compute_efficiency", 1.5)], ("[latency] compute_efficiency", "less than or equal to 1")),
    ([("latency", {"kind": "profile", "name": "x"})], ("[latency] name", "x")),
    ([("latency/token", 1.0)], ("[latency] token", "of kind 'roofline'")),
    ([("engine/memory_fraction", 0.1)], ("[deployment] tensor_parallel", "memory_fraction 0.1")),
    ([("scheduler/token_budget", "auto"), ("slo", {"ttft_p99": 1.0})], ("[slo]", "a TBT limit")),
    ([("workload/lengths", {"kind": "fixed", "prompt": 9000, "output": 1})], ("[workload] too_long", "= 8192")),
]


@pytest.mark.parametrize("case", MACHINES, ids=lambda case: f"{case[0][0][0]} {case[1][1][:30]}")
def test_a_machine_that_cannot_be(case: Case, here: Path, refused: Refused) -> None:
    changes, says = case
    (here / "s.toml").write_text(tomli_w.dumps(changed(ROOFLINE, *changes)))
    refused("run", "s.toml", says=("s.toml: ", *says))


CONFIGS: list[tuple[str, bytes | Tables, tuple[str, ...]]] = [
    ("family", LLAMA | {"model_type": "bert"}, ("model_type", "unsupported model_type 'bert'", "llama")),
    ("no family", {}, ("model_type", "missing")),
    ("not an object", b"[]", ("must be an object",)),
    ("cut off", b'{"model_type": "lla', ("not JSON", "line 1")),
    ("latin-1", b'{"model_type": "\xff"}', ("not UTF-8", "0xff")),
    ("string", LLAMA | {"hidden_size": "4096"}, ("hidden_size", "must be an integer, not '4096'")),
    ("bool", LLAMA | {"vocab_size": True}, ("vocab_size", "must be an integer, not True")),
    ("negative", LLAMA | {"num_hidden_layers": -1}, ("num_hidden_layers", "-1 is not between 1 and")),
    ("huge", LLAMA | {"num_hidden_layers": HUGE}, ("num_hidden_layers", "is not between 1 and 100000000")),
    ("very many layers", LLAMA | {"num_hidden_layers": 10**7}, ("[deployment] tensor_parallel", "no split")),
    ("heads", LLAMA | {"num_key_value_heads": 5}, ("num_key_value_heads", "5 KV heads do not divide 32")),
    ("digits", b'{"model_type": ' + b"1" * 5000 + b"}", ("cannot be read", "4300 digits")),
    ("deep", b"[" * 100_000, ("nested too deeply",)),
    ("large", b" " * 2**21, ("larger than 1048576 bytes",)),
    ("empty", b"", ("not JSON",)),
]


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case[0])
def test_a_config_that_is_no_use(case: Case, here: Path, refused: Refused) -> None:
    _, content, says = case
    (here / "config.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    (here / "s.toml").write_text(tomli_w.dumps(changed(ROOFLINE, ("model", {"hf_config": "config.json"}))))
    place = "s.toml" if says[0].startswith("[deployment]") else "config.json"
    refused("run", "s.toml", says=(place, *says))


def test_a_config_that_is_no_file(here: Path, refused: Refused) -> None:
    os.mkfifo(here / "fifo")
    for path, says in (("no.json", "no such file"), (".", "is a directory"), ("fifo", "not a regular file")):
        (here / "s.toml").write_text(tomli_w.dumps(changed(ROOFLINE, ("model", {"hf_config": path}))))
        refused("run", "s.toml", says=(says,))
    refused("run", "s.toml", "--set", "model.hf_config=/dev/zero", says=("/dev/zero", "not a regular file"))


HEAD = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
LINE = '{"timestamp": 0, "input_length": 5, "output_length": 1}\n'
TRACES: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("empty", "", ("empty",)),
    ("header only", HEAD, ("has a header and no rows",)),
    ("missing column", "arrived_at,num_prefill_tokens\n0,1\n", ("row 1", "fit no known format", "num_decode_tokens")),
    ("negative", HEAD + "0,1,1\n1,-1,1\n", ("row 3, column num_prefill_tokens", "'-1'", "from 0 to 2147483648")),
    ("NaN", HEAD + "0,nan,1\n1,1,1\n", ("row 2, column num_prefill_tokens", "whole number of tokens")),
    ("fraction", HEAD + "0,1,1.5\n1,1,1\n", ("row 2, column num_decode_tokens", "'1.5'", "whole number of tokens")),
    ("empty cell", HEAD + "0,1,\n1,1,1\n", ("row 2, column num_decode_tokens", "an empty cell")),
    ("negative time", HEAD + "-1,1,1\n1,1,1\n", ("row 2, column arrived_at", "at least 0 s")),
    ("NaN time", HEAD + "0,1,1\nnan,1,1\n", ("row 3, column arrived_at", "finite")),
    ("endless time", HEAD + "0,1,1\n1e400,1,1\n", ("row 3, column arrived_at", "1e400", "finite")),
    ("far time", HEAD + "0,1,1\n1e308,1,1\n", ("row 3, column arrived_at", "1e308", "at most 1e+30")),
    ("huge tokens", HEAD + "0,1e30,1\n1,1,1\n", ("row 2, column num_prefill_tokens", "2147483648")),
    ("ragged", HEAD + "0,1\n1,1,1\n", ("row 2", "2 cells, but the header has 3")),
    ("latin-1", HEAD.encode() + b"0,1,\xff\n", ("row 2", "0xff is not UTF-8")),
    ("NUL", HEAD + "0,1,1\n\0", ("row 3", "NUL byte")),
    ("a picture", b"\x89PNG\r\n\x1a\n\0\0", ("NUL byte",)),
    ("too few rows", HEAD + "0,1,1\n", ("[workload] requests", "2 asked for, but t.csv has 1", "repeat = true")),
    ("only zeros", HEAD + "0,0,1\n1,1,0\n", ("[workload.arrivals] path", "none of the 2 rows")),
    ("too long", HEAD + "0,9,1\n1,5000,1\n", ("row 3", "5000 prompt + 1 output", "max_model_tokens = 4096", '"drop"')),
    ("JSON cut off", LINE + '{"timestamp": 1, "inp', ("row 2", "cut off")),
    ("JSON keys", '{"timestamp": 1}\n', ("fit no known format",)),
    ("JSON bool", LINE + LINE.replace("5", "true"), ("row 2, column input_length", "True is not a number")),
    ("JSON list", LINE + "[1]\n", ("row 2", "not a JSON object")),
    ("bench without details", '{"request_throughput": 1.0}', ("--save-detailed",)),
    (
        "lengths only",
        "num_prefill_tokens,num_decode_tokens\n1,1\n2,2\n",
        ("[workload.arrivals] path", "no arrival times"),
    ),
]


def of_trace(path: str = "t.csv") -> Tables:
    both = {"kind": "trace", "path": path}
    return changed(AFFINE, ("workload", {"requests": 2, "arrivals": both, "lengths": both}))


@pytest.mark.parametrize("case", TRACES, ids=lambda case: case[0])
def test_a_trace_that_is_broken(case: Case, here: Path, refused: Refused) -> None:
    _, content, says = case
    (here / "t.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    (here / "s.toml").write_text(tomli_w.dumps(of_trace()))
    refused("run", "s.toml", says=("t.csv", *says))


@pytest.mark.parametrize("command", ["run", "compare", "check", "cost"])
def test_a_trace_that_is_no_file(command: str, here: Path, refused: Refused) -> None:
    os.mkfifo(here / "fifo")
    (here / "loop").symlink_to("loop")
    paths = (
        ("no.csv", "no such file"),
        (".", "is a directory"),
        ("fifo", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        ("loop", "loop"),
        ("x" * 3000, "too long"),
        ("a\0b", "null byte"),
    )
    for path, says in paths:
        (here / "s.toml").write_text(tomli_w.dumps(of_trace(path)))
        refused(command, "s.toml", says=("[workload.arrivals] path", says))


def test_a_trace_of_one_endless_line_in_a_sparse_file(here: Path, refused: Refused) -> None:
    with (here / "t.csv").open("wb") as file:
        file.write(b"num_prefill_tokens")
        file.truncate(2**30)
    (here / "s.toml").write_text(tomli_w.dumps(of_trace()))
    refused("run", "s.toml", says=("t.csv", "row 1"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_what_may_not_be_read_or_written(here: Path, refused: Refused) -> None:
    (here / "t.csv").write_text(HEAD)
    (here / "t.csv").chmod(0)
    (here / "u.toml").write_text(tomli_w.dumps(of_trace()))
    refused("run", "u.toml", says=("t.csv", "permission denied"))
    (here / "u.toml").chmod(0)
    refused("run", "u.toml", says=("u.toml", "permission denied"))
    (here / "locked").mkdir(0o500)
    refused("run", "s.toml", "--out", "locked/x", says=("--out", "cannot be written to"))


FILES: list[tuple[str, bytes, tuple[str, ...]]] = [
    ("empty", b"", ("[latency]", "required")),
    ("syntax", b"a = \n", ("not TOML", "line 1, column 5")),
    ("twice", b"a = 1\na = 2\n", ("not TOML",)),
    ("latin-1", b"name = '\xff'", ("not UTF-8", "0xff", "position 8")),
    ("NUL", b"\0", ("not TOML",)),
    ("BOM", b"\xef\xbb\xbfname = 'x'", ("not TOML",)),
    ("a long line", b"a = " + b"[" * 100_000, ("line 1", "longer than 8192 characters")),
    ("deep", b"a = " + b"[" * 4000, ("not TOML",)),
    ("deep in lines", b"a = " + b"[\n" * 60_000, ("not TOML",)),
    ("deep tables", b"slo.tbt_p99." + b".".join([b"a"] * 2000) + b" = 1", ("[slo] tbt_p99", "a table must be")),
    ("digits", b"a = " + b"1" * 4090, ("[a]",)),
    ("hexadecimal", b"[slo]\ntbt_p99 = 0x" + b"f" * 4000, ("[slo] tbt_p99", "an integer of 16000 bits")),
    ("hexadecimal key", b"[engine]\nnum_blocks = 0x" + b"f" * 4000, ("[engine] num_blocks", "16000 bits")),
    ("a date", b"name = 1979-05-27", ("[name]", "must be a valid string")),
    ("large", b"#\n" * 2**17, ("larger than 131072 bytes",)),
    ("JSON", b'{"name": 1}', ("not TOML",)),
]


@pytest.mark.parametrize("case", FILES, ids=lambda case: case[0])
def test_a_file_that_is_no_scenario(case: Case, here: Path, refused: Refused) -> None:
    _, content, says = case
    (here / "s.toml").write_bytes(content)
    refused("run", "s.toml", says=("s.toml: ", *says))


def test_a_scenario_that_is_no_file(refused: Refused, here: Path) -> None:
    os.mkfifo(here / "fifo")
    refused("run", "missing.toml", says=("missing.toml: no such file",))
    refused("check", ".", says=(".: is a directory",))
    refused("run", "fifo", says=("fifo: is not a regular file",))
    refused("run", "/dev/zero", says=("/dev/zero: is not a regular file",))
    refused("run", "x" * 5000, says=("file name too long",))
    refused("run", "s.toml/x", says=("s.toml/x: not a directory",))


OPTIONS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--set", "x"), ("--set: ", "'x' must be key.path=value")),
    (("--set", "=1"), ("--set: ", "must be key.path=value")),
    (("--set", "a..b=1"), ("--set: ", "must be key.path=value")),
    (("--set", ".a=1"), ("--set: ", "must be key.path=value")),
    (("--set", "name.x=1"), ("--set: ", "not a table")),
    (("--set", "engine.num_blocks.x=1"), ("--set: ", "engine.num_blocks.x", "not a table")),
    (("--set", "engine.max_sequence=3"), ("--set: [engine] max_sequence", "did you mean 'max_sequences'?")),
    (("--set", "engine=3"), ("--set: [engine]", "3 must be a table")),
    (("--set", "scheduler.token_budget=x"), ("--set: [scheduler] token_budget", "'x'")),
    (("--set", "scheduler.policy=stallfree"), ("--set: [scheduler] policy", "did you mean 'stall-free'?")),
    (("--set", "latency.kind=afine"), ("--set: [latency] kind", "did you mean 'affine'?")),
    (("--set", "latency.step=-0.1"), ("--set: [latency] step", "greater than or equal to 0")),
    (("--set", "workload.arrivals.kind=gamma"), ("--set: [workload.arrivals]", "required")),
    (("--set", "workload.lengths.prompt=" + "1" * 4000), ("--set: [workload.lengths] prompt", "equal to 2147483648")),
    (("--set", "workload.lengths.prompt=" + "1" * 5000), ("--set: ", "at most 4096 characters")),
    (("--set", "workload.seed=0x" + "f" * 4000), ("--set: [workload] seed", "9223372036854775807")),
    (("--set", "name=\udcff"), ("--set: ", "UTF-8")),
    (("--set", "model.hf_config=" + "x" * 3000), ("x" * 100,)),
    (("--set", "policy.orca.max_sequences=0"), ("--set: [policy.orca] max_sequences", "equal to 1")),
    (("--set", "slo.tbt_p98=1"), ("--set: [slo] tbt_p98", "did you mean 'tbt_p99'?")),
    (("--set", "metrics.drain=1", "--set", "workload.arrivals={kind='closed', concurrency=2}"), ("--set: [metrics]",)),
    (("--set", "workload.lengths={kind='trace', path='no.csv'}"), ("no.csv: [workload.lengths] path", "no such file")),
    (("--set",), ("--set",)),
    (("--rate", "nan"), ("--rate: [workload.arrivals] rate", "nan must be a finite number")),
    (("--rate", "inf"), ("--rate: [workload.arrivals] rate", "inf must be a finite number")),
    (("--rate", "1e400"), ("--rate: [workload.arrivals] rate", "inf must be a finite number")),
    (("--rate", "-1"), ("--rate: [workload.arrivals] rate", "-1.0 must be greater than 0")),
    (("--rate", "0"), ("--rate: [workload.arrivals] rate", "0.0 must be greater than 0")),
    (("--rate", "abc"), ("--rate", "abc", "float")),
    (("--rate", "2", "--set", "workload.arrivals.kind=at-once"), ("--rate: [workload.arrivals] rate", "at-once")),
    (("--requests", "0"), ("--requests: [workload] requests", "greater than or equal to 1")),
    (("--requests", "-5"), ("--requests: [workload] requests", "-5 must be greater than or equal to 1")),
    (("--requests", "1.5"), ("--requests", "'1.5' is not a whole number")),
    (("--requests", str(10**12)), ("--requests: [workload] requests", "less than or equal to 100000000")),
    (("--requests", "9" * 5000), ("--requests", "not a whole number")),
    (("--seed", "-1"), ("--seed: [workload] seed", "greater than or equal to 0")),
    (("--seed", "x"), ("--seed", "'x' is not a whole number")),
    (("--policy", "stallfree"), ("--policy: [scheduler] policy", "did you mean 'stall-free'?")),
    (("--policy", ""), ("--policy: [scheduler] policy", "known: alternating")),
    (("--executor", "torch"), ("torch",)),
    (("--executor", "gpu"), ("--executor", "gpu", "torch")),
    (("--clock", "real"), ("--clock", "real", "virtual", "wall")),
    (("--policies", "orca"), ("--policies", "--policy")),
    (("--out", "s.toml"), ("--out: ", "is not a directory")),
    (("--out", "s.toml/x"), ("--out: ", "is not a directory")),
    (("--out", "/dev/null/x"), ("--out: ", "is not a directory")),
    (("--out", "/proc/no/such"), ("--out: ",)),
    (("--out", "x" * 5000), ("--out: ", "too long")),
    (("--ratee", "1"), ("--ratee", "--rate")),
    (("more.toml",), ("more.toml",)),
]


@pytest.mark.parametrize(("options", "says"), OPTIONS, ids=lambda part: " ".join(part)[:40])
def test_an_option_that_is_wrong(options: tuple[str, ...], says: tuple[str, ...], refused: Refused) -> None:
    refused("run", "s.toml", *options, says=says)


COMMANDS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("run",), ("scenario",)),
    (("rnu", "s.toml"), ("rnu", "run")),
    (("--verbos",), ("--verbos",)),
    (("list",), ("what",)),
    (("list", "model"), ("list: ", "did you mean 'models'?")),
    (("list", "models", "devices"), ("devices",)),
    (("compare", "s.toml", "--policies", "orca,stallfree"), ("--policies: ", "did you mean 'stall-free'?")),
    (("compare", "s.toml", "--policies", ""), ("--policies: ", "known: alternating")),
    (("compare", "s.toml", "--policies", "orca,"), ("--policies: ", "known: alternating")),
    (("capacity", "slo.toml", "--policies", "stallfree"), ("--policies: ", "did you mean 'stall-free'?")),
    (("capacity", "slo.toml", "--seeds", "0"), ("--seeds: ", "0 must be from 1 to 1000")),
    (("capacity", "slo.toml", "--seeds", "1001"), ("--seeds: ", "from 1 to 1000")),
    (("capacity", "slo.toml", "--seeds", "1.5"), ("--seeds", "'1.5' is not a whole number")),
    (("capacity", "slo.toml", "--tolerance", "0"), ("--tolerance: ", "at least 1e-6 and less than 1")),
    (("capacity", "slo.toml", "--tolerance", "2"), ("--tolerance: ", "at least 1e-6 and less than 1")),
    (("capacity", "slo.toml", "--tolerance", "nan"), ("--tolerance: ", "nan must be")),
    (("capacity", "slo.toml", "--clock", "wall"), ("--clock: ", "virtual clock")),
    (("cost", "slo.toml", "--clock", "wall"), ("--clock: ", "virtual clock")),
    (("cost", "slo.toml", "--seeds", "-1"), ("--seeds: ", "from 1 to 1000")),
    (("cost", "s.toml", "--executor", "torch"), ("--executor: ",)),
]


@pytest.mark.parametrize(("arguments", "says"), COMMANDS, ids=lambda part: " ".join(part)[:40])
def test_a_command_that_is_wrong(
    arguments: tuple[str, ...], says: tuple[str, ...], here: Path, refused: Refused
) -> None:
    (here / "slo.toml").write_text(tomli_w.dumps(changed(AFFINE, SLO)))
    refused(*arguments, says=says)


def test_a_note_about_dropped_keys_is_no_second_line(here: Path, refused: Refused) -> None:
    (here / "s.toml").write_text(tomli_w.dumps(ROOFLINE))
    new = ("--set", "workload.arrivals.kind=at-once", "--set", "deployment.tensor_parallel=3")
    refused("run", "s.toml", *new, says=("--set: [deployment] tensor_parallel",))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "missing.toml"), "missing.toml: no such file"),
        (("run", "s.toml", "--rate", "nan"), "--rate: [workload.arrivals] rate"),
        (("capacity", "s.toml", "--json"), "s.toml: [slo]"),
        (("run", "s.toml", "--set", "name=\udcff"), "--set: "),
    ],
)
def test_the_same_from_a_shell(arguments: tuple[str, ...], says: str, here: Path) -> None:
    command = [sys.executable, "-m", "sim", *(os.fsencode(argument) for argument in arguments)]
    done = subprocess.run(command, cwd=here, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().startswith(f"servecast: error: {says}") and done.stderr.count(b"\n") == 1
