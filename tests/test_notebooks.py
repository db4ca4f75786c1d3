"""The notebooks: run from top to bottom in a fresh kernel, at small sizes, beside a copy of the scenarios alone."""

from __future__ import annotations

import shutil
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHARTS = {
    "01_first_forecast": 5,
    "02_policies_and_the_token_budget": 6,
    "03_from_slo_to_cost": 5,
    "04_simulation_against_hardware": 5,
    "05_the_paper_reproduced": 6,
}
REQUESTS = {"04_simulation_against_hardware": 8, "05_the_paper_reproduced": 60}  # 150 of the others
SECONDS = 600  # for one cell, on a machine that does other things as well


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str = "") -> Any:
    """The notebook, run in a folder of its own, to its end or the first error; `before` is a cell that comes first."""
    notebook, here = read(path), tmp_path / "notebooks"
    here.mkdir()
    shutil.copytree(ROOT / "scenarios", tmp_path / "scenarios")
    monkeypatch.setenv("SERVECAST_REQUESTS", str(REQUESTS.get(path.stem, 150)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if before:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(before))
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(here)}}
    )
    with suppress(nbclient.exceptions.CellExecutionError):
        client.execute()
    return notebook


def errors(notebook: Any) -> list[Any]:
    return [output for output in outputs(notebook) if output.output_type == "error"]


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def pictures(notebook: Any) -> list[str]:
    """The charts that were drawn, as base64."""
    return [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]


def told(notebook: Any) -> str:
    return "".join(output.text for output in outputs(notebook) if output.output_type == "stream")


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(CHARTS)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_draws_what_it_promises(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem.startswith("04") and find_spec("torch") is None:
        pytest.skip("there is no torch")
    notebook = run(path, tmp_path, monkeypatch)
    assert [output.traceback for output in errors(notebook)] == []
    drawn = pictures(notebook)
    assert len(drawn) == CHARTS[path.stem]
    assert min(len(picture) for picture in drawn) > 10_000  # an empty chart has less
    assert "This notebook took" in told(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_without_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert all(cell.metadata == {} for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert "pip install" in notebook.cells[0].source  # what it needs comes first


def test_without_torch_the_engine_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = (path for path in NOTEBOOKS if path.stem.startswith("04"))
    notebook = run(path, tmp_path, monkeypatch, before="import sys\n\nsys.modules['torch'] = None")
    (error,) = errors(notebook)
    (line,) = error.traceback  # no more than that
    assert line.startswith("servecast: error: this notebook runs a real engine, which needs torch: pip install")
    assert pictures(notebook) == []
