"""The commands `report` and `chart`: results, read back from files and shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from sim import output
from sim.errors import BadInput, unknown
from sim.options import say

if TYPE_CHECKING:
    from sim.page import Part

Json = Annotated[bool, Parameter(negative="", show_default=False)]
FORMATS = (".png", ".svg", ".pdf", ".html", ".json")


def report(directory: str, *, out: Path | None = None, json: Json = False) -> None:
    """Make a self-contained HTML page of the results in a directory.

    Parameters
    ----------
    directory
        Where a run, comparison, capacity search, cost, sweep or validation kept its files.
    out
        The file to write; DIRECTORY/report.html by default.
    json
        Print one JSON object on stdout and nothing else there.
    """
    from sim import page, results

    kept = results.find(directory)
    path = out or Path(directory) / "report.html"
    _check(path, (".html", ".htm"))
    made = page.parts(kept)
    _write(path, page.html(kept, made).encode())
    verdicts = [{"kind": part.kind, "name": part.name, "verdict": part.verdict.text} for part in made]
    if json:
        told = {"file": str(path), "verdict": verdicts[0]["verdict"], "results": verdicts}
        print(output.as_json(told), end="")
    else:
        for part in made:
            print(part.verdict.text)
        say(f"the page is {path}")


def chart(directory: str, name: str | None = None, *, out: Path | None = None, scale: float = 2.0) -> None:
    """Save one chart of the results in a directory as a picture. Without a name: say which charts there are.

    Parameters
    ----------
    directory
        Where a run, comparison, capacity search, cost, sweep or validation kept its files.
    name
        The chart.
    out
        The file to write: *.png, *.svg, *.pdf, *.html, or *.json for Vega-Lite.
    scale
        How many pixels of a PNG make one of the chart.
    """
    from sim import page, results

    known = _by_name(page.parts(results.find(directory)))
    if name is None:
        print("\n".join(known))
        return
    if name not in known:
        raise BadInput(unknown("chart", name, known), source=directory)
    if out is None:
        raise BadInput(f"name the file to write: {', '.join(f'*{suffix}' for suffix in FORMATS)}", source="--out")
    _check(out, FORMATS)
    if not 0.1 <= scale <= 10:
        raise BadInput(f"{scale:g} must be from 0.1 to 10", source="--scale")
    try:
        made = known[name]()
    except BadInput as error:
        raise error.within(source=f"{directory}: {name}") from None
    _write(out, picture(made, out.suffix.lower(), scale))
    say(f"the chart is {out}")


def picture(made: Any, suffix: str, scale: float = 2.0) -> bytes:
    """A chart as a file's bytes, made offline."""
    import vl_convert

    spec = made.to_dict()
    if suffix == ".json":
        return output.as_json(spec).encode()
    if suffix == ".html":
        return str(vl_convert.vegalite_to_html(spec, bundle=True)).encode()
    if suffix == ".svg":
        return str(vl_convert.vegalite_to_svg(spec)).encode()
    if suffix == ".pdf":
        return bytes(vl_convert.vegalite_to_pdf(spec))
    return bytes(vl_convert.vegalite_to_png(spec, scale=scale))


def _by_name(parts: list[Part]) -> dict[str, Any]:
    """Charts of all parts; where two have one name, the later is named after its kind."""
    known: dict[str, Any] = {}
    for part in parts:
        for name, make in part.charts.items():
            known[f"{part.kind}_{name}" if name in known else name] = make
    return known


def _check(path: Path, suffixes: tuple[str, ...]) -> None:
    if path.suffix.lower() not in suffixes:
        raise BadInput(f"{path} must end with {', '.join(suffixes)}", source="--out")
    try:
        if path.is_dir():
            raise BadInput(f"{path} is a directory", source="--out")
    except OSError as error:
        raise BadInput((error.strerror or str(error)).lower(), source="--out") from None


def _write(path: Path, content: bytes) -> None:
    output.prepare(path.parent)
    output.write(path.parent, {path.name: content})
