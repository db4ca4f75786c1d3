"""The notebooks: run from top to bottom in a fresh kernel, at small sizes, beside a copy of the scenarios alone."""

from __future__ import annotations

import shutil
from contextlib import suppress
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from calibrate.paper.figures import Task, on_cores
from calibrate.paper.rows import Figure, Row
from sim import BadInput, Scenario, Study, explain, simulate
from sim.charts import NothingToDraw

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


# What the notebooks lean on.


def test_a_study_from_text_is_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text((ROOT / "scenarios/chat-mistral-7b.toml").read_text())
    text = 'scenario = "s.toml"\n[grid]\n"workload.seed" = [1, 2]\n'
    (tmp_path / "study").write_text(text)
    kept, told = Study.load(tmp_path / "study"), Study.from_toml(text, tmp_path)
    assert told == kept
    assert told.points == [{"workload.seed": 1}, {"workload.seed": 2}]
    with pytest.raises(BadInput, match=r"study: \[grid\] workload.sede: unknown key"):
        Study.from_toml(text.replace("seed", "sede"), tmp_path)
    with pytest.raises(BadInput, match="study: not TOML"):
        Study.from_toml("[grid", tmp_path)


def test_an_explanation_shows_itself() -> None:
    chat = Scenario.load(ROOT / "scenarios/chat-mistral-7b.toml").with_(workload__requests=60)
    why = explain(simulate(chat.for_policy("prefill-first")), worst=1)
    page = why._repr_html_()
    assert why.summary["tbt"]["late"] > 0
    assert escape(why.summary["verdict"]) in page
    assert escape(why.summary["tbt"]["worst"][0]["story"]) in page
    assert f"{why.summary['tbt']['late']:,} of {why.summary['tbt']['n']:,} gaps above 100 ms: causes" in page
    quiet = explain(simulate(chat), above=10.0, ttft_above=100.0)
    assert "<table>" not in quiet._repr_html_()


FIGURE = Figure(
    "figure-0",
    "a figure",
    "plot",
    [
        Row("a, one", "s", 0.1, 0.2),
        Row("a, two", "s", 0.1, 0.11),
        Row("b", "s", None, 1.0),
        Row("c", "ratio", 2.0, 2.5),
    ],
    ["a note"],
)


def test_a_figure_of_the_paper_as_table_and_chart() -> None:
    assert FIGURE.frame.columns == ["what", "unit", "published", "simulated", "error"]
    assert FIGURE.frame["error"].to_list() == pytest.approx([1.0, 0.1, None, 0.25])
    page = FIGURE._repr_html_()
    assert "published: plot" in page
    assert "+100.0%" in page
    chart = FIGURE.chart(by=lambda what: what[0]).to_dict()
    assert chart["title"]["subtitle"] == ["n = 2 values: 1 within 15%, 1 within 35% (shaded); the line is equality"]
    points = chart["datasets"][chart["layer"][-1]["data"]["name"]]
    assert [(row["label"], row["simulated"]) for row in points] == [("a", 0.2), ("a", 0.11)]
    assert "simulated (ratio)" in str(FIGURE.chart(by=str, unit="ratio").to_dict())
    with pytest.raises(NothingToDraw, match="no row in m "):
        FIGURE.chart(by=str, unit="m")


def test_work_on_all_cores_keeps_the_order_and_cuts_runs_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibrate.paper.figures.cores", lambda: 1)
    chat = Scenario.load(ROOT / "scenarios/chat-mistral-7b.toml").with_(workload__requests=40)
    tasks = [Task(chat.with_(workload__seed=seed)) for seed in (1, 2)]
    seen: list[tuple[int, int]] = []
    found = on_cores(tasks, requests=10, progress=lambda done, of: seen.append((done, of)))
    assert [(one["seed"], one["offered"]) for one in found] == [(1, 10), (2, 10)]
    assert seen == [(1, 2), (2, 2)]
    assert on_cores(tasks[:1], requests=100)[0]["offered"] == 40
