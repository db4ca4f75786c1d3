"""Scenarios from the arguments of a vLLM server: each is mapped, or named as not mapped, or an error."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from sim import BadInput, Scenario, catalogue
from sim.__main__ import status
from sim.from_vllm import Converted, catalogued, convert
from sim.simulate import plan, simulate
from sim.vllm_arguments import known, parse

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def made(*words: str, device: str = "h100-sxm", model: str | None = LLAMA) -> dict[str, Any]:
    """The scenario as tables."""
    given = ("--model", model) if model else ()
    return tomllib.loads(convert((*given, *words), device).text)


def test_a_whole_command_line() -> None:
    """What a user has in a script, in all its spellings."""
    line = """--model meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 4 --max-num-batched-tokens=2048
        --max_num_seqs 64 --gpu-memory-utilization 0.9 --block-size=32 --max_model_len=8192 --dtype half
        --kv-cache-dtype fp8 --enable-chunked-prefill --pipeline-parallel-size 2 --data-parallel-size 3
        --watermark 0.02"""
    scenario = Scenario.from_toml(convert(line.split(), "h100-sxm").text)
    assert scenario.model and (scenario.model.name, scenario.model.dtype) == ("llama-3.1-70b", "float16")
    assert scenario.model.kv_dtype == "fp8"
    parallel, engine = scenario.deployment, scenario.engine
    assert (parallel.tensor_parallel, parallel.pipeline_parallel, parallel.replicas) == (4, 2, 3)
    assert parallel.router == "least-loaded"
    assert (engine.block_tokens, engine.memory_fraction, engine.max_sequences) == (32, 0.9, 64)
    assert (engine.max_model_tokens, engine.watermark) == (8192, 0.02)
    assert (scenario.scheduler.policy, scenario.scheduler.token_budget) == ("stall-free", 2048)


def test_it_loads_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `servecast check` reads it, and as `run` runs it."""
    file = tmp_path / "s.toml"
    command = ["scenario", "from-vllm", "--device", "h100-sxm", "--out", str(file), "--", "vllm", "serve", LLAMA]
    assert status([*command, "--max-model-len", "8k"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "--enable-prefix-caching, on by default" in err
    assert status(["check", str(file)]) == 0
    report = simulate(Scenario.load(file).with_(workload__requests=20))
    assert report.summary["completed"] == 20
    capsys.readouterr()
    assert status([*command[:4], *command[6:], "--max-model-len", "8k"]) == 0
    assert capsys.readouterr().out == file.read_text()


def test_the_spellings_are_one() -> None:
    """`--x y` and `--x=y`, underscores and dashes, short forms, the words before the arguments."""
    expected = {"model": "m", "tensor-parallel-size": "2", "enable-chunked-prefill": False, "max-num-seqs": "8"}
    for words in (
        "--model m --tensor-parallel-size 2 --no-enable-chunked-prefill --max-num-seqs 8",
        "--model=m --tensor_parallel_size=2 --no_enable_chunked_prefill --max_num_seqs 8",
        "m -tp 2 --disable-chunked-prefill --max-num-seqs=8",
        "vllm serve m -tp=2 --disable-chunked-prefill --max-num-seqs 8",
        "python -m vllm.entrypoints.openai.api_server --model m -tp 2 --disable-chunked-prefill --max-num-seqs 8",
    ):
        assert parse(words.split()) == expected, words


def test_values_of_their_own_kind() -> None:
    words = "m --served-model-name a b --compilation-config.mode 3 --hf-overrides.x+=1 -O3 --seed -1 --port 80 -dp 2"
    assert parse(words.split()) == {
        "model": "m",
        "served-model-name": "a",
        "compilation-config": "3",
        "hf-overrides": "1",
        "optimization-level": True,
        "seed": "-1",
        "port": "80",
        "data-parallel-size": "2",
    }


@pytest.mark.parametrize(
    ("device", "batch", "sequences"),
    [
        ("a100-80gb-sxm", 2048, 256),
        ("l4", 2048, 256),
        ("h100-sxm", 8192, 1024),
        ("h200", 8192, 1024),
        ("b200", 16384, 1024),
        ("mi300x", 16384, 1024),
    ],
)
def test_defaults_follow_the_device(device: str, batch: int, sequences: int) -> None:
    """EngineArgs.get_batch_defaults, for `vllm serve`."""
    data = made(device=device, model="meta-llama/Llama-3.1-8B")
    assert (data["scheduler"]["token_budget"], data["engine"]["max_sequences"]) == (batch, sequences)
    assert data["engine"]["memory_fraction"] == 0.92 and data["engine"]["block_tokens"] == 16
    assert data["engine"]["max_model_tokens"] == 131072 and data["engine"]["watermark"] == 0.0


def test_defaults_bound_one_another() -> None:
    """A default never exceeds what the other arguments allow; --performance-mode throughput doubles them."""
    assert made("--max-model-len", "100", "--max-num-seqs", "3")["scheduler"]["token_budget"] == 300
    assert made("--max-num-batched-tokens", "64")["engine"]["max_sequences"] == 64
    doubled = made("--performance-mode", "throughput")
    assert (doubled["scheduler"]["token_budget"], doubled["engine"]["max_sequences"]) == (16384, 2048)
    whole = made("--no-enable-chunked-prefill", "--max-model-len", "20000")
    assert whole["engine"]["max_batch_tokens"] == 20000 and whole["scheduler"]["policy"] == "prefill-first"


def test_limits_that_are_narrower() -> None:
    data = made("--max-num-seqs", "64", "--max-num-active-seqs", "16", "--max-num-scheduled-tokens", "1024")
    assert (data["engine"]["max_sequences"], data["scheduler"]["token_budget"]) == (16, 1024)


def test_kv_blocks_given() -> None:
    assert made("--num-gpu-blocks-override", "1234")["engine"]["num_blocks"] == 1234
    # Llama-3.1-8B: 2 · 8 heads · 128 · 2 bytes · 32 layers = 131,072 bytes a token, half of them on each of two devices
    data = made("--kv-cache-memory-bytes", "1G", "-tp", "2")
    assert data["engine"]["num_blocks"] == 2**30 // (65536 * 16)


@pytest.mark.parametrize(
    ("name", "found", "dtype"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b", "bfloat16"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b", "float16"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b", "bfloat16"),
        ("mistral-7b", "mistral-7b", "bfloat16"),
        ("Qwen/Qwen3-32B-AWQ", "qwen3-32b", "int4"),
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b", "fp8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b", "int4"),
        ("openai/gpt-oss-20b", "gpt-oss-20b", "int4"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b", "bfloat16"),
    ],
)
def test_names_on_hugging_face(name: str, found: str, dtype: str) -> None:
    data = made("--max-model-len", "4096", "-tp", "2", model=name)
    assert (data["model"]["name"], data["model"]["dtype"]) == (found, dtype)


@pytest.mark.parametrize(
    "name", ["mistralai/Mistral-7B-Instruct-v0.1", "Qwen/Qwen3-30B-A3B-Instruct-2507", "facebook/opt"]
)
def test_other_shapes_are_not_taken_for_known_ones(name: str) -> None:
    with pytest.raises(BadInput, match="--model: unknown model"):
        made(model=name)


def test_every_alias_of_the_catalogue_is_its_model() -> None:
    for found, facts in catalogue.entries("model").items():
        for name in (found, *facts.get("aliases", ())):
            assert catalogued(name) == (found, None)


@pytest.mark.parametrize(
    ("extra", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "float16"),
        ({"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "int4"),
    ],
)
def test_a_local_model(extra: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    """Its config.json is the shape, and says how the weights are stored."""
    shape = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 4096}
    folder = tmp_path / "a model"
    folder.mkdir()
    with pytest.raises(BadInput, match=r"config\.json: no such file"):
        made(model=str(folder))
    (folder / "config.json").write_text(json.dumps(shape | extra))
    for model in (str(folder), str(folder / "config.json")):
        data = made(model=model)
        assert data["model"]["hf_config"] == str(folder / "config.json") and data["model"]["dtype"] == dtype
    assert data["engine"]["max_model_tokens"] == 4096
    assert made("--hf-config-path", str(folder), model="me/mine")["engine"]["max_model_tokens"] == 4096


def test_quantization_given() -> None:
    assert made("--quantization", "fp8")["model"]["dtype"] == "fp8"
    assert made("-q", "awq_marlin")["model"]["dtype"] == "int4"
    odd = convert(["--model", LLAMA, "--quantization", "bitsandbytes", "--kv-cache-dtype", "nvfp4"], "h100-sxm")
    assert any("--quantization bitsandbytes" in note for note in odd.notes)
    assert any("--kv-cache-dtype nvfp4" in note for note in odd.notes)
    assert tomllib.loads(odd.text)["model"] == {"name": "llama-3.1-8b", "dtype": "bfloat16", "kv_dtype": "bfloat16"}


MAPPED = {
    *("model", "hf-config-path", "dtype", "quantization", "kv-cache-dtype", "tensor-parallel-size"),
    *("pipeline-parallel-size", "data-parallel-size", "enable-chunked-prefill", "max-model-len", "max-num-seqs"),
    *("max-num-batched-tokens", "max-num-active-seqs", "max-num-scheduled-tokens", "block-size", "watermark"),
    *("num-gpu-blocks-override", "kv-cache-memory-bytes", "gpu-memory-utilization", "device-memory-utilization"),
    "performance-mode",
}


def test_every_argument_is_mapped_or_named() -> None:
    """All that vLLM knows, those of its server and of earlier versions: in the scenario, or in its comments."""
    names = {name: kind for kind, names in known().items() if isinstance(names, list) for name in names}
    assert len(names) > 250 and names.keys() >= MAPPED
    words = [LLAMA]
    for name, kind in names.items():
        if name not in MAPPED:
            words += [f"--{name}"] if kind.endswith("flags") else [f"--{name}", "1"]
    said = convert(words, "h100-sxm")
    for name in names.keys() - MAPPED:
        assert sum(f"--{name}:" in note or f"--{name} 1:" in note for note in said.notes) == 1, name
        assert f"--{name}" in said.text
    assert Scenario.from_toml(said.text)


def test_each_mapped_argument_changes_the_scenario() -> None:
    plain = made()
    for words in (
        *(["--dtype", "half"], ["--quantization", "fp8"], ["--kv-cache-dtype", "fp8"], ["-tp", "2"], ["-pp", "2"]),
        *(["-dp", "2"], ["--no-enable-chunked-prefill"], ["--max-model-len", "4096"], ["--max-num-seqs", "7"]),
        *(["--max-num-batched-tokens", "77"], ["--max-num-active-seqs", "7"], ["--max-num-scheduled-tokens", "77"]),
        *(["--block-size", "32"], ["--watermark", "0.1"], ["--num-gpu-blocks-override", "99"]),
        *(["--kv-cache-memory-bytes", "2G"], ["--gpu-memory-utilization", "0.5"], ["--performance-mode", "throughput"]),
        ["--device-memory-utilization", "0.5"],
    ):
        assert made(*words) != plain, words


def test_secrets_are_not_repeated() -> None:
    """Arguments that are not mapped are named without their values."""
    said = convert([LLAMA, "--api-key", "sk-secret", "--hf-token", "hf_secret"], "h100-sxm")
    assert "secret" not in said.text + "".join(said.notes) and "--api-key" in said.text


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--model", LLAMA, "--max-num-seq", "8"], "did you mean '--max-num-seqs'?"),
        (["--model", LLAMA, "--tensor_paralel_size=2"], "did you mean '--tensor-parallel-size'?"),
        (["--model", LLAMA, "--zzzzzz", "8"], "unknown argument of vLLM '--zzzzzz'"),
        (["--model", LLAMA, "-zz", "8"], "unknown argument of vLLM '-zz'"),
        (["--tensor-parallel-size", "2"], "--model: required"),
        (["--model"], "--model: needs a value"),
        (["--model", LLAMA, "other"], "'other' is not an argument"),
        (["--model", "meta-llama/Lama-3.1-8B"], "did you mean 'meta-llama/Llama-3.1-8B'?"),
        (["--model", "no/such/thing"], "a folder"),
        (["--model", LLAMA, "-tp", "two"], "--tensor-parallel-size: 'two' must be a whole number of at least 1"),
        (["--model", LLAMA, "-tp", "0"], "--tensor-parallel-size: '0' must be a whole number of at least 1"),
        (["--model", LLAMA, "-tp", "3"], "[deployment] tensor_parallel: llama-3.1-8b cannot be split 3 ways"),
        (["--model", LLAMA, "--gpu-memory-utilization", "90"], "--gpu-memory-utilization: '90' must be a share of 1"),
        (["--model", LLAMA, "--max-model-len", "8x"], "--max-model-len: '8x' must be a number like 8192, 8k or 8K"),
        (["--model", LLAMA, "--max-model-len", "0"], "--max-model-len: 0 must be at least 1"),
        (["--model", LLAMA, "--dtype", "bf16"], "--dtype: unknown dtype 'bf16'"),
        (["--model", LLAMA, "--enforce-eager=1"], "--enforce-eager: takes no value"),
        (["--model", "meta-llama/Llama-3.1-405B"], "[deployment] tensor_parallel: llama-3.1-405b needs"),
        (
            ["--model", LLAMA, "--no-enable-chunked-prefill", "--max-num-batched-tokens", "512"],
            "[engine] max_batch_tokens: 512 must be at least max_model_tokens = 131072",
        ),
    ],
)
def test_slips_are_told_in_one_line(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["scenario", "from-vllm", "--device", "h100-sxm", "--", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("servecast: error: from-vllm: ") and what in err, err


def test_the_device_is_ours(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert status(["scenario", "from-vllm", "--device", "h100-sxn", "--", LLAMA]) == 2
    assert "--device: unknown device 'h100-sxn'; did you mean 'h100-sxm'?" in capsys.readouterr().err
    assert status(["scenario", "from-vllm", "--", LLAMA]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert status(["scenario", "from-vllm", "--device", "h100-sxm", "--out", str(tmp_path), "--", LLAMA]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_name_may_hold_anything() -> None:
    """A line end in it does not end the comment it stands in."""
    said = convert(["me\n[engine]\x00/Llama-3.1-8B"], "h100-sxm")
    assert tomllib.loads(said.text)["model"]["name"] == "llama-3.1-8b"


def test_lengths_in_vllm_s_units() -> None:
    for text, tokens in (("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1m", 10**6), ("-1", 131072)):
        assert made("--max-model-len", text)["engine"]["max_model_tokens"] == tokens
    assert made("--max-model-len", "auto")["engine"]["max_model_tokens"] == 131072


def test_kv_cache_of_fp8_doubles_the_blocks() -> None:
    def blocks(*words: str) -> int:
        made: Converted = convert([LLAMA, *words], "h100-sxm")
        return plan(Scenario.from_toml(made.text)).deployment.limits.num_blocks

    assert blocks("--kv-cache-dtype", "fp8") == pytest.approx(2 * blocks(), rel=1e-3)


WORDS = st.sampled_from([f"--{name}" for names in known().values() if isinstance(names, list) for name in names])
WORDS |= st.sampled_from(
    ["-tp", "-dp", "-q", "-O3", "-O", "--", "-", "--=", "serve", LLAMA, "1", "-1", "8k", "auto", "x"]
)
WORDS |= st.text(max_size=6)


@profile(max_examples=300, deadline=None)
@given(words=st.lists(WORDS, max_size=6), ours=st.booleans())
def test_any_words_are_a_scenario_or_an_error(words: list[str], ours: bool) -> None:
    try:
        said = convert([*([LLAMA] if ours else []), *words], "h100-sxm")
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert Scenario.from_toml(said.text)
