"""Measured iterations as a table: one row each, with what a latency model may know of the batch and what it took.

On a machine without polars the table is JSON lines, its first line the provenance; elsewhere it is parquet, with the
provenance in the file's metadata. Both read back the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.errors import BadInput
from sim.profile import samples
from sim.request import Batch

COLUMNS = {
    "decodes": int,
    "context": int,
    "chunks": int,
    "prefill_tokens": int,
    "attention": float,
    "prefill_context": int,
    "longest_context": int,
    "longest_chunk": int,
    "samples": int,
    "seconds": float,
    "host": float,
    "round": int,
    "clock_mhz": float,
}
REQUIRED = (*tuple(COLUMNS)[:6], "seconds")
SHORTEST, LONGEST, MOST = 1e-9, 1e9, 1e15  # seconds of an iteration, and anything else in a row
Row = dict[str, float]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns by name, all as long, and where they come from."""

    columns: dict[str, Floats]
    provenance: dict[str, Any]

    def __len__(self) -> int:
        return len(self.columns["seconds"])

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    @property
    def samples(self) -> Floats:
        """Requests that got a token; all of them where the table does not say."""
        told, most = self.columns.get("samples"), self["decodes"] + self["chunks"]
        return most if told is None else np.where(np.isnan(told), most, told)

    def where(self, kept: npt.NDArray[np.bool_]) -> Rows:
        """Some of the rows."""
        return Rows({name: values[kept] for name, values in self.columns.items()}, self.provenance)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, float]], provenance: Mapping[str, Any]) -> Rows:
        """From one mapping per row."""
        listed = list(rows)
        columns = {name: np.array([row.get(name, np.nan) for row in listed], dtype=np.float64) for name in COLUMNS}
        return cls(columns, dict(provenance))


def row(batch: Batch) -> Row:
    """What a latency model may know of a batch."""
    ends = [chunk.start + chunk.tokens for chunk in batch.chunks]
    return {
        "decodes": batch.decodes,
        "context": batch.context,
        "chunks": len(batch.chunks),
        "prefill_tokens": batch.prefill_tokens,
        "attention": batch.attention,
        "prefill_context": sum(ends),
        "longest_context": -(-batch.context // batch.decodes) if batch.decodes else 0,
        "longest_chunk": max(ends, default=0),
        "samples": samples(batch),
    }


def check_writable(path: Path) -> None:
    """BadInput where `save` could not write: before the work is done and not after."""
    if path.suffix not in (".parquet", ".jsonl"):
        raise BadInput("the file's name must end in .parquet or .jsonl", source=str(path))
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadInput("is a directory" if path.is_dir() else "no such directory", source=str(path))
    if path.suffix == ".parquet":
        try:
            import polars  # noqa: F401
        except ModuleNotFoundError:
            raise BadInput("parquet needs polars, which is not here: name the file *.jsonl", source=str(path)) from None


def save(rows: Rows, path: Path) -> None:
    """Write a table, whole or not at all: parquet, or JSON lines where the name ends in .jsonl."""
    check_writable(path)
    aside = path.with_name(path.name + ".writing")
    try:
        if path.suffix == ".jsonl":
            names = [name for name in COLUMNS if name in rows.columns]
            lines = [json.dumps({"provenance": rows.provenance})]
            values = zip(*(rows[name].tolist() for name in names), strict=True)
            lines += [json.dumps({n: v for n, v in zip(names, line, strict=True) if v == v}) for line in values]
            aside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        else:
            import polars as pl

            frame = pl.DataFrame(rows.columns)
            frame.write_parquet(aside, metadata={"provenance": json.dumps(rows.provenance)})
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise BadInput((error.strerror or str(error)).lower(), source=str(path)) from None


def load(path: Path) -> Rows:
    """Read a table that `save` wrote, or anyone's with the columns of REQUIRED. BadInput for what cannot be used."""
    if not path.is_file():
        raise BadInput("no such file", source=str(path))
    rows = _load_lines(path) if path.suffix == ".jsonl" else _load_frame(path)
    for name in REQUIRED:
        values = rows.columns.get(name)
        if values is None:
            raise BadInput(f"no such column; needed: {', '.join(REQUIRED)}", source=str(path), key=f"column {name}")
        low, high = (SHORTEST, LONGEST) if name == "seconds" else (0, MOST)
        bad = np.flatnonzero(~((values >= low) & (values <= high)))
        if len(bad):
            what = f"{values[bad[0]]:g} must be a number from {low:g} to {high:g}"
            raise BadInput(what, source=str(path), key=f"row {bad[0] + 1}, column {name}")
    if not len(rows):
        raise BadInput("no rows", source=str(path))
    return rows


def _load_lines(path: Path) -> Rows:
    provenance: dict[str, Any] = {}
    listed: list[Row] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            entry = json.loads(line)
            if "provenance" in entry:
                provenance = dict(entry["provenance"])
            else:
                listed.append({name: float(value) for name, value in entry.items() if name in COLUMNS})
        except (ValueError, TypeError, AttributeError) as error:
            raise BadInput(f"not a measured row: {error}", source=str(path), key=f"row {number}") from None
    return Rows.of(listed, provenance)


def _load_frame(path: Path) -> Rows:
    try:
        import polars as pl
    except ModuleNotFoundError:
        raise BadInput("it needs polars, which is not here; *.jsonl does not", source=str(path)) from None

    try:
        frame = pl.read_csv(path) if path.suffix == ".csv" else pl.read_parquet(path)
        told = {} if path.suffix == ".csv" else pl.read_parquet_metadata(path)
        columns = {name: frame[name].cast(pl.Float64).to_numpy() for name in frame.columns if name in COLUMNS}
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        raise BadInput(f"not a table of measurements: {str(error).splitlines()[0]}", source=str(path)) from None
    return Rows(columns, json.loads(told.get("provenance", "{}")))
