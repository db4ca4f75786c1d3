"""What runs beside a GPU runs with little: no polars, no pictures, no terminal, no command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = ("polars", "altair", "vl_convert", "scipy", "rich", "cyclopts")

BLOCK = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""

AFFINE = """
name = "box"
[engine]
num_blocks = 400
max_model_tokens = 512
max_sequences = 8
[scheduler]
token_budget = 64
[latency]
kind = "affine"
step = 1e-3
token = 1e-5
[workload]
requests = 8
seed = 1
[workload.arrivals]
kind = "poisson"
rate = 20.0
[workload.lengths]
kind = "fixed"
prompt = 40
output = 6
"""

SIMULATED = f"""
from sim import Scenario, simulate

report = simulate(Scenario.from_toml('''{AFFINE}'''))
assert report.summary["completed"] == 8, report.summary
assert report.summary["tbt_s"]["p99"] > 0
"""

MEASURED = f"""
import json

from gpu_backend import engine
from sim import Scenario, simulate

config = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=96, vocab_size=200, max_position_embeddings=512, hidden_act="silu",
    rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False,
)
open("config.json", "w").write(json.dumps(config))
scenario = Scenario.from_toml('''{AFFINE}
[model]
hf_config = "config.json"
[torch]
device = "cpu"
''')
report = simulate(scenario, engine=engine.executor)
assert report.summary["completed"] == 8, report.summary
assert report.summary["output_tokens"] == 48
assert report.summary["tbt_s"]["p99"] > 0
"""


def run(code: str, folder: Path) -> None:
    """In an interpreter that cannot import what is absent there."""
    root = str(Path(__file__).parents[1])
    start = f"import sys; sys.path.insert(0, {root!r})\n"
    done = subprocess.run([sys.executable, "-c", start + BLOCK + code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_absent_is_absent(tmp_path: Path) -> None:
    for name in ABSENT:
        run(f"try:\n    import {name}\nexcept ModuleNotFoundError:\n    pass\nelse:\n    raise SystemExit(1)", tmp_path)


def test_a_simulation(tmp_path: Path) -> None:
    run(SIMULATED, tmp_path)


def test_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run(MEASURED, tmp_path)


def test_measuring_and_kernels_load(tmp_path: Path) -> None:
    """And FlashInfer, which is not needed to import what uses it."""
    pytest.importorskip("torch")
    run("import gpu_backend.kernels, gpu_backend.graphs, gpu_backend.choice, gpu_backend.machine", tmp_path)
    run("import calibrate.grid, calibrate.measure, calibrate.rows", tmp_path)


CPU = """
name = "box"
[model]
name = "llama-12m"
[device]
name = "cpu"
[engine]
num_blocks = 64
max_model_tokens = 128
max_sequences = 4
[scheduler]
token_budget = 32
[latency]
kind = "roofline"
[workload]
requests = 4
[workload.arrivals]
kind = "at-once"
[workload.lengths]
kind = "fixed"
prompt = 20
output = 4
"""


def test_measure_and_validate_from_the_command_line(tmp_path: Path) -> None:
    """What leaves the box is JSON; profiles are fitted elsewhere, and scaled where there is nothing to fit with."""
    pytest.importorskip("torch")
    (tmp_path / "box.toml").write_text(CPU)
    block = BLOCK.replace('"rich", "cyclopts"', '"rich"').replace("'rich', 'cyclopts'", "'rich'")
    assert "cyclopts" not in block
    measured, kept = tmp_path / "measured.jsonl", tmp_path / "out"
    calls = [
        ["calibrate", "measure", "box.toml", "--to", str(measured), "--seconds", "0", "--json"],
        ["validate", "box.toml", "--json", "--out", str(kept)],
    ]
    for call in calls:
        run = [sys.executable, "-c", block + f"from sim.__main__ import status\nsys.exit(status({call!r}))"]
        done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    assert measured.is_file()
    assert {path.name for path in kept.iterdir()} == {"validation.json", "validation_steps.json", "scenario.toml"}
