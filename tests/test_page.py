"""The report page and pictures of kept results: opened in a real browser, escaped, whole or not there at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import tomli_w
from browser import Look, browser, look
from formula import PROFILE, Formula
from formula import SCENARIO as FORMULA

from calibrate import kept as validation_files
from calibrate.validate import validate
from sim import output, page, results
from sim.__main__ import status
from sim.capacity import capacity
from sim.compare import compare
from sim.scenario import Scenario
from sim.simulate import simulate

NASTY = '</script><script>window.pwned = 1</script><img src=x onerror="window.pwned = 1"> & {{ 7 * 7 }}'
SCENARIO: dict[str, Any] = {
    "name": NASTY,
    "model": {"name": "mistral-7b"},
    "device": {"name": "a100-80gb-pcie"},
    "latency": {"kind": "roofline"},
    "workload": {
        "requests": 60,
        "seed": 7,
        "arrivals": {"kind": "poisson", "rate": 3.0},
        "lengths": {"kind": "uniform", "prompt": [20, 3000], "output": [2, 200]},
    },
    "slo": {"tbt_p99": 0.1, "ttft_p50": 0.5},
}
KINDS = ("run", "pipeline", "comparison", "capacity", "cost", "sweep", "searches", "validation", "several")
RUN_CHARTS = ["tokens", "tbt", "ttft", "queue", "kv"]
CHARTS = {
    "run": [*RUN_CHARTS, "timeline", "batches", "time_parts"],
    "pipeline": [*RUN_CHARTS, "timeline", "batches", "time_parts"],
    "comparison": [*RUN_CHARTS, "time_parts"],
    "capacity": ["capacity", "tbt_p99_at_rate", "ttft_p50_at_rate"],
    "cost": ["cost"],
    "sweep": ["tbt_s_p99", "ttft_s_p50", "request_throughput", "throughput_front", "latency_front"],
    "searches": ["capacity_rate", "cost_per_million_output_tokens", "cost_front"],
    "validation": ["errors", "steps", "quantiles", "tbt_quantiles", "tbt", "ttft"],
    "several": ["capacity", "tbt_p99_at_rate", "ttft_p50_at_rate", "cost"],
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of each kind, as the commands keep them."""
    here = tmp_path_factory.mktemp("kept")
    (here / "s.toml").write_text(tomli_w.dumps(SCENARIO), encoding="utf-8")
    (here / "truth.toml").write_text(tomli_w.dumps(PROFILE), encoding="utf-8")
    (here / "f.toml").write_text(tomli_w.dumps(FORMULA | {"name": NASTY}), encoding="utf-8")
    scenario, quick = str(here / "s.toml"), ("--seeds", "2", "--tolerance", "0.2", "--json")

    def out(kind: str) -> tuple[str, str]:
        return "--out", str(here / kind)

    for arguments in (
        ("run", scenario, *out("run"), "--json"),
        ("run", scenario, *out("pipeline"), "--set", "deployment.pipeline_parallel=2", "--json"),
        ("compare", scenario, *out("comparison"), "--json"),
        ("cost", scenario, *out("cost"), *quick),
        ("cost", scenario, *out("several"), *quick),
    ):
        assert status(arguments) == 0
    searched = capacity(Scenario.load(scenario), ["prefill-first", "stall-free"], seeds=2, tolerance=0.2)
    for kind in ("capacity", "several"):
        files = {"capacity.json": output.as_json({"results": [one.to_dict() for one in searched]}).encode()}
        output.write(here / kind, files | {"scenario.toml": Scenario.load(scenario).to_toml().encode()})
    for kind, frame in (("sweep", _sweep(scenario)), ("searches", _searches())):
        (here / kind).mkdir()
        frame.write_parquet(here / kind / "sweep.parquet")
        study = {"name": NASTY, "scenario": "scenario.toml", "what": "run"}
        (here / kind / "study.toml").write_text(tomli_w.dumps(study), encoding="utf-8")
        (here / kind / "scenario.toml").write_bytes((here / "run" / "scenario.toml").read_bytes())
    done = validate(Scenario.load(here / "f.toml"), Formula(slower=1.1), Formula(slower=1.1))
    result = done.to_dict() | {"attempts": [done.metrics()]}
    output.write(here / "validation", validation_files.files(done, result))
    return here


def _sweep(scenario: str) -> pl.DataFrame:
    """As `servecast sweep` writes it, a failed point included."""
    rows: list[dict[str, Any]] = []
    for rate in (2.0, 4.0):
        for budget in (128, 512, 2048):
            changes = {"workload__arrivals__rate": rate, "scheduler__token_budget": budget}
            summary = simulate(Scenario.load(scenario).with_(**changes), keep_steps=False).summary
            axes = {"workload.arrivals.rate": rate, "scheduler.token_budget": budget}
            told = {"times_from": summary["times_from"], "slo_met": summary["slo_met"], "slo_tbt_p99_limit": 0.1}
            told |= {f"{name}_s_{p}": summary[f"{name}_s"][p] for name in ("tbt", "ttft") for p in ("p50", "p99")}
            told["request_throughput"] = summary["request_throughput"]
            rows.append({"point": len(rows), **axes, "status": "done", "reason": None, **told})
    failed = {"point": len(rows), "workload.arrivals.rate": 8.0, "scheduler.token_budget": 1}
    rows.append(dict.fromkeys(rows[0]) | failed | {"status": "failed", "reason": NASTY})
    return pl.DataFrame(rows, infer_schema_length=None)


def _searches() -> pl.DataFrame:
    """As a sweep of searches."""
    return pl.DataFrame(
        {
            "point": [0, 1, 2, 3],
            "scheduler.policy": ["prefill-first", "prefill-first", "stall-free", "stall-free"],
            "slo.tbt_p99": [0.05, 0.1, 0.05, 0.1],
            "status": ["done"] * 4,
            "reason": pl.Series([None] * 4, dtype=pl.String),
            "capacity_rate": [0.5, 1.0, 2.0, 2.5],
            "capacity_low": [0.4, 0.9, 1.9, 2.4],
            "capacity_high": [0.6, 1.1, 2.1, 2.6],
            "limited_by": ["tbt_p99"] * 3 + ["scheduling_delay_p50"],
            "cost_per_million_output_tokens": [4.0, 2.0, 1.0, 0.8],
            "times_from": [NASTY] * 4,
        }
    )


@pytest.fixture(scope="module")
def pages(kept: Path) -> dict[str, Path]:
    """A page of each kind."""
    for kind in KINDS:
        assert status(["report", str(kept / kind)]) == 0
    return {kind: kept / kind / "report.html" for kind in KINDS}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as one:
        yield one


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command: its status, and what it wrote on stdout and stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = status([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


class Elements(HTMLParser):
    """What a page is made of."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


# In a browser


def check(seen: Look, kind: str) -> None:
    """Every chart is drawn, at the width of its place; nothing is logged, fetched, or wider than the window."""
    assert [chart["id"].partition("-")[2].partition("-")[2] for chart in seen.charts] == CHARTS[kind]
    for chart in seen.charts:
        assert chart["marks"] > 0 and chart["seen"] > 0 and chart["empty"] == 0, chart
        assert "could not be drawn" not in chart["text"] and "NaN" not in chart["text"], chart
        assert 0.85 * chart["room"] <= chart["width"] <= chart["room"] + 1, chart
    assert seen.console == [] and seen.requests == [] and seen.overflow <= 0
    assert "pwned" not in seen.title or NASTY in seen.title


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_chart_is_drawn_in_a_browser(pages: dict[str, Path], kind: str, chromium: Any) -> None:
    """At the width of a desk and of a phone, on a light and a dark page."""
    for width, dark in ((1280, False), (390, False), (390, True)):
        check(look(chromium, pages[kind], width=width, dark=dark), kind)
        assert chromium.execute_script("return window.pwned") is None
        assert NASTY in chromium.execute_script("return document.body.innerText")


@pytest.mark.slow
def test_a_page_can_be_used(pages: dict[str, Path], chromium: Any) -> None:
    """Tooltips say what is there, in text; a chart can be saved; a narrower window draws it anew."""
    look(chromium, pages["comparison"])
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    bar = chromium.find_elements(By.CSS_SELECTOR, "#chart-0-time_parts g.mark-rect.role-mark path")[0]
    chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", bar)
    ActionChains(chromium).move_to_element(bar).perform()
    shown = WebDriverWait(chromium, 5).until(
        lambda driver: driver.execute_script("return document.querySelector('#vg-tooltip-element.visible')?.innerText")
    )
    assert "ms per iteration" in shown and "prefill-first" in shown
    saved = chromium.execute_script("return [...document.querySelectorAll('.vega-actions a')].map(a => a.textContent)")
    assert set(saved) == {"Save as SVG", "Save as PNG"} and len(saved) == 2 * len(CHARTS["comparison"])
    before = chromium.execute_script("return document.querySelector('#chart-0-tbt svg').getBoundingClientRect().width")
    metrics = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    WebDriverWait(chromium, 10).until(
        lambda driver: driver.execute_script(
            f"return document.querySelector('#chart-0-tbt svg').getBoundingClientRect().width != {before}"
        )
    )


@pytest.mark.slow
def test_a_chart_that_cannot_be_drawn_says_so(pages: dict[str, Path], chromium: Any, tmp_path: Path) -> None:
    """In its place, and on the console; the others are drawn. (And so the check above can fail.)"""
    broken = tmp_path / "broken.html"
    text = pages["cost"].read_text(encoding="utf-8")
    assert text.count('"type": "bar"') == 1
    broken.write_text(text.replace('"type": "bar"', '"type": "no such mark"'), encoding="utf-8")
    seen = look(chromium, broken)
    assert "could not be drawn" in seen.charts[0]["text"] and seen.console


# The file


def test_a_page_needs_nothing_else(pages: dict[str, Path]) -> None:
    """One file under 5 MB: no source or link leads elsewhere, and the page itself forbids it."""
    for path in pages.values():
        assert path.stat().st_size < 5e6
        tags = Elements(path).tags
        for tag, attributes in tags:
            for name in ("src", "href", "action", "srcset", "data", "poster"):
                assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
        policies = [a["content"] for t, a in tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
        assert len(policies) == 1 and str(policies[0]).startswith("default-src 'none'")
        assert not {tag for tag, _ in tags} & {"iframe", "object", "embed", "form", "base", "img"}


def test_names_are_text_wherever_they_appear(pages: dict[str, Path]) -> None:
    """No element or handler comes from a name; charts hold it as data."""
    for kind, path in pages.items():
        tags = Elements(path).tags
        scripts = [attributes for tag, attributes in tags if tag == "script"]
        data = [attributes for attributes in scripts if attributes.get("type") == "application/json"]
        assert len(scripts) == len(data) + 2 and len(data) == len(CHARTS[kind])
        assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
        text = path.read_text(encoding="utf-8")
        assert "window.pwned" in text  # as text
        assert "</script><script>window" not in text
        assert "{{ 7 * 7 }}" in text and "<img" not in text.partition("<script>")[0]


def test_the_verdict_comes_first(pages: dict[str, Path], kept: Path) -> None:
    """One sentence, before any chart, with the numbers of the result."""
    for path in pages.values():
        text = path.read_text(encoding="utf-8")
        verdict = re.search(r'<p class="verdict[^"]*">([^<]+)</p>', text)
        assert verdict is not None and verdict.start() < text.index("<figure")
        assert verdict[1].endswith(".") and any(letter.isdigit() for letter in verdict[1])
    made = {kind: page.parts(results.find(kept / kind))[0].verdict for kind in KINDS}
    summary = json.loads((kept / "run" / "summary.json").read_text(encoding="utf-8"))
    assert made["run"].tone == ("met" if summary["slo_met"] else "missed")
    assert made["comparison"].text.startswith("Only ") or "policy meets the SLO" in made["comparison"].text
    assert "times the" in made["capacity"].text and "requests/s" in made["capacity"].text
    assert made["cost"].text.startswith("A million output tokens cost ")
    assert "points meet the SLO" in made["sweep"].text and "1 of 7 failed" in made["sweep"].text
    assert made["searches"].text == (
        "Of 4 points, policy stall-free, limit on TBT P99 100 ms holds the highest rate, 2.5 requests/s."
    )
    assert "TBT P99 by +0.0% (noise +0.0%)" in made["validation"].text.replace("-0.0%", "+0.0%")


def test_tables_and_provenance(pages: dict[str, Path], kept: Path) -> None:
    """Numbers with n, where the times come from, the scenario as run, which files."""
    for kind, path in pages.items():
        text = path.read_text(encoding="utf-8")
        assert "<table>" in text and str(kept / kind) in text
        assert "scenario.toml, as run" in text and "[workload.lengths]" in text
    assert "published" in pages["run"].read_text(encoding="utf-8")
    assert "measured on this machine" in pages["validation"].read_text(encoding="utf-8")
    assert "study.toml, as run" in pages["sweep"].read_text(encoding="utf-8")
    assert NASTY.replace("&", "&amp;").split("<")[0] in pages["sweep"].read_text(encoding="utf-8")


def test_several_results_in_one_directory(pages: dict[str, Path]) -> None:
    """Each has its part."""
    text = pages["several"].read_text(encoding="utf-8")
    assert '<section id="capacity">' in text and '<section id="cost">' in text


def test_the_same_files_make_the_same_page(
    pages: dict[str, Path], kept: Path, tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    """Byte for byte; `--out` names the file, `--json` tells where it is and what it says."""
    code, out, err = call("report", kept / "comparison", "--out", tmp_path / "new" / "page.html", "--json")
    told = json.loads(out)
    assert (code, err) == (0, "") and told["file"] == str(tmp_path / "new" / "page.html")
    assert told["verdict"] == told["results"][0]["verdict"] and told["results"][0]["kind"] == "comparison"
    assert told["results"][0]["name"] == NASTY
    assert (tmp_path / "new" / "page.html").read_bytes() == pages["comparison"].read_bytes()
    code, out, err = call("report", kept / "comparison", "--out", tmp_path / "new" / "page.html")
    assert (code, out) == (0, told["verdict"] + "\n") and err.startswith("servecast: the page is ")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


def test_a_run_of_nothing_has_a_page(kept: Path, tmp_path: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    """All requests refused: no chart, and it says why; the tables are there."""
    given = ("--set", "engine.num_blocks=1", "--set", "slo.tbt_p50=1.0")
    assert call("run", kept / "s.toml", *given, "--out", tmp_path)[0] == 0
    code, out, _ = call("report", tmp_path)
    assert code == 0 and "60 refused" in out and "misses the SLO" in out
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<figure" not in text and "Not drawn: tokens: no request decoded" in text and "never_fits" in text


# Faults


def damaged(kept: Path, there: Path, kind: str, name: str, content: bytes | None) -> Path:
    """A copy with one file replaced, or taken away."""
    for path in (kept / kind).rglob("*"):
        if path.is_file() and path.suffix != ".html":
            copy = there / path.relative_to(kept / kind)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    if content is None:
        (there / name).unlink()
    else:
        (there / name).write_bytes(content)
    return there


def parquet(**columns: Any) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    pl.DataFrame(columns).write_parquet(buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "name", "content", "says"),
    [
        ("run", "summary.json", b"{", "summary.json: not JSON"),
        ("run", "summary.json", b"\xff", "summary.json: not UTF-8"),
        ("run", "summary.json", b"[" * 100_000, "summary.json: not JSON"),
        ("run", "summary.json", b'{"policy": NaN}', "NaN is not a number of JSON"),
        ("run", "summary.json", b"{}", "summary.json: name: not as servecast writes it: field required"),
        ("run", "steps.parquet", b"PAR1", "steps.parquet: not parquet"),
        ("run", "steps.parquet", None, "steps.parquet: no such file"),
        ("run", "gaps.parquet", parquet(gap_s=[0.1]), "gaps.parquet: lacks the column 'count'"),
        ("run", "gaps.parquet", parquet(gap_s=["a"], count=[1]), "column gap_s: holds String, not numbers"),
        ("comparison", "comparison.json", b'{"results": 3}', "comparison.json: results: not as servecast writes it"),
        ("comparison", "orca/summary.json", b"3", "orca/summary.json: not as servecast writes it"),
        ("capacity", "capacity.json", b'{"results": [{"policy": 3}]}', "capacity.json: results.0.policy: "),
        ("cost", "cost.json", b'{"name": "x"}', "cost.json: policy: "),
        ("sweep", "sweep.parquet", parquet(status=["done"]), "sweep.parquet: lacks the column 'point'"),
        ("validation", "validation.json", b"{}", "validation.json: name: "),
        ("validation", "measured/requests.parquet", None, "measured/requests.parquet: no such file"),
    ],
)
def test_results_that_cannot_be_read(
    kept: Path, tmp_path: Path, call: Callable[..., tuple[int, str, str]], kind: str, name: str, content: Any, says: str
) -> None:
    """One line that names the file and what is wrong with it; an older page stays as it was."""
    here = damaged(kept, tmp_path / "d", kind, name, content)
    (here / "report.html").write_text("old")
    before = sorted(here.rglob("*"))
    code, out, err = call("report", here)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("servecast: error: ") and says in err, err
    assert (here / "report.html").read_text() == "old" and sorted(here.rglob("*")) == before


def test_a_comparison_does_not_lead_out_of_its_directory(
    kept: Path, tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    """A policy that is none is not a path."""
    told = json.loads((kept / "comparison" / "comparison.json").read_text(encoding="utf-8"))
    told["results"][0]["policy"] = "../../run"
    here = damaged(kept, tmp_path / "d", "comparison", "comparison.json", json.dumps(told).encode())
    code, _, err = call("report", here)
    assert code == 2 and "policy '../../run' is not known" in err


@pytest.mark.parametrize("command", ["report", "chart"])
def test_directories_that_are_none(tmp_path: Path, call: Callable[..., tuple[int, str, str]], command: str) -> None:
    """Missing, a file, empty."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, says in (
        ("missing", "no such directory"),
        ("file", "is not a directory"),
        ("empty", "holds no results: none of summary.json, comparison.json"),
        ("x" * 300, "name too long"),
    ):
        code, out, err = call(command, tmp_path / name)
        assert (code, out) == (2, "") and says in err and err.count("\n") == 1, err
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "empty"}


def test_files_that_cannot_be_written(kept: Path, tmp_path: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    """Said before the work is done."""
    (tmp_path / "dir.html").mkdir()
    for out, says in (
        (tmp_path / "page.pdf", "must end with .html, .htm"),
        (tmp_path / "dir.html", "is a directory"),
        (kept / "s.toml" / "page.html", "is not a directory"),
    ):
        code, told, err = call("report", kept / "run", "--out", out)
        assert (code, told) == (2, "") and err.startswith("servecast: error: --out: ") and says in err, err
    assert {path.name for path in tmp_path.rglob("*")} == {"dir.html"}


# Pictures


def test_charts_can_be_saved(kept: Path, tmp_path: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    """By name, in the format of the file's name; without a name it lists them."""
    for kind in KINDS:
        code, out, err = call("chart", kept / kind)
        assert (code, out.split(), err) == (0, CHARTS[kind], "")
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<svg"), (".pdf", b"%PDF"), (".json", b"{\n")):
        path = tmp_path / f"tbt{suffix}"
        code, out, err = call("chart", kept / "comparison", "tbt", "--out", path)
        assert (code, out, err) == (0, "", f"servecast: the chart is {path}\n")
        assert path.read_bytes().startswith(start)
    assert call("chart", kept / "run", "tbt", "--out", tmp_path / "small.png", "--scale", "1")[0] == 0
    assert (tmp_path / "small.png").stat().st_size < (tmp_path / "tbt.png").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tbd", "--out", "a.png"], "unknown chart 'tbd'; did you mean 'tbt'?"),
        (["tbt"], "--out: name the file to write: *.png"),
        (["tbt", "--out", "a.gif"], "a.gif must end with .png"),
        (["tbt", "--out", "a.png", "--scale", "99"], "--scale: 99 must be from 0.1 to 10"),
        (["tbt", "--out", "a.png", "--scale", "nan"], "--scale: nan must be from 0.1 to 10"),
    ],
)
def test_charts_that_cannot_be_saved(
    kept: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[..., tuple[int, str, str]],
    arguments: list[str],
    says: str,
) -> None:
    """One line, and no file."""
    monkeypatch.chdir(tmp_path)
    code, out, err = call("chart", kept / "run", *arguments)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1, err
    assert not list(tmp_path.iterdir())


# Notebooks


def test_results_show_themselves_in_a_notebook(kept: Path) -> None:
    """Tables with numbers and units, names escaped, and frames."""
    scenario = Scenario.load(kept / "s.toml")
    report, both = simulate(scenario), compare(scenario, ["orca", "stall-free"])
    found = capacity(scenario, ["stall-free"], seeds=1, tolerance=0.5)
    for result, words in (
        (report, ("TTFT", "P99", " ms", "SLO", "published")),
        (both, ("orca", "stall-free", "TBT max", "met")),
        (found, ("requests/s", "limited by")),
    ):
        shown = result._repr_html_()
        assert all(word in shown for word in words), result
        assert "<script" not in shown and "<img" not in shown
    frame = both.frame
    assert frame["policy"].to_list() == ["orca", "stall-free"]
    assert frame["tbt_s_p99"].to_list() == [one.summary["tbt_s"]["p99"] for one in both]
    assert found.frame.row(0) == ("stall-free", found[0].rate, None, None, found[0].limited_by)
    assert compare(scenario, [])._repr_html_()


def test_what_is_read_back_is_what_was_kept(kept: Path) -> None:
    """A run from its files has the frames of the run."""
    report, run = simulate(Scenario.load(kept / "s.toml")), results.load(kept / "run")
    assert run.summary == report.summary
    for name in ("requests", "steps", "gaps"):
        assert getattr(run, name).equals(getattr(report, name)), name
    piped = results.load(kept / "pipeline")
    assert len(piped.stages) == 2 * len(piped.steps) and len(run.stages) == 0


def test_the_library_starts_without_charts() -> None:
    """Nothing that only pages and charts need is imported by `import sim`, by --version, or by a run."""
    code = (
        "import sys, sim; from sim.__main__ import status;"
        "status(['--version']); status(['list', 'policies', '--json']);"
        "heavy = {'altair', 'jinja2', 'vl_convert', 'polars'} & set(sys.modules);"
        "assert not heavy, heavy; from sim import charts; assert 'altair' in sys.modules; sim.charts.tbt"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 0, done.stderr
