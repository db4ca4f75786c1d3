"""Trace files: what was asked of a real service, read strictly.

Formats are told apart by their columns (`FORMATS`, and the JSON of ``vllm bench serve --save-result --save-detailed``).
A row number in an error is 1-based and counts the header as row 1; in JSON lines it is the line, in a bench result the
place in its lists, from 1. Rows with zero prompt or output tokens are dropped and counted; the rest are sorted by
arrival where they are out of order (stably) and then shifted so that the first arrives at 0 s.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from sim.arrivals import FloatArray
from sim.bench_results import bench, is_bench
from sim.columns import (
    BENCH,
    MAX_LINE,
    MOONCAKE,
    Format,
    in_seconds,
    json_value,
    read_blocks,
    read_number,
    read_ticks,
    read_tokens,
)
from sim.errors import BadInput
from sim.lengths import IntArray

SESSIONS = ("session_id", "Session ID", "session", "conversation_id")


FORMATS = (
    Format("arrived_at", "s", "num_prefill_tokens", "num_decode_tokens"),  # Vidur, Splitwise
    Format(None, "s", "num_prefill_tokens", "num_decode_tokens"),  # Sarathi-Serve, Vidur: lengths only
    Format("TIMESTAMP", "date", "ContextTokens", "GeneratedTokens"),  # Azure LLM inference 2023 and 2024
    Format("Timestamp", "s", "Request tokens", "Response tokens"),  # BurstGPT
)


@dataclass(frozen=True, slots=True)
class Trace:
    """The usable rows of a trace, in order of arrival (of the file, where it has no arrival times).

    `arrivals` are seconds from the first; `prompts` and `outputs` tokens; `sessions` integer keys; `rows` the row
    numbers in the file. `dropped` rows had zero tokens; `out_of_order` rows arrived before the row above them.
    """

    source: str
    arrivals: FloatArray | None
    prompts: IntArray
    outputs: IntArray
    sessions: IntArray | None
    rows: IntArray
    columns: tuple[str, str]
    dropped: int
    out_of_order: int
    notes: tuple[str, ...]


def read(path: Path, source: str) -> Trace:
    """The trace at `path`, called `source` in errors. Raises BadInput with that source and, where known, the row."""
    try:
        if not path.exists():
            raise BadInput("no such file")
        if not path.is_file():
            raise BadInput("is a directory, not a file" if path.is_dir() else "is not a regular file")
        with path.open("rb") as file:
            head = file.read(MAX_LINE)
        if not head.strip():
            raise BadInput("the file is empty")
        if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"["):
            return _trace(source, *(bench(path) if is_bench(path, head) else _json_lines(path)))
        return _trace(source, *_csv(path))
    except BadInput as error:
        raise error.within(source=source) from None
    except OSError as error:
        raise BadInput(f"cannot be read: {error.strerror or error}", source=source) from None


def _trace(source: str, form: Format, table: pl.DataFrame, notes: list[str]) -> Trace:
    """`table` has the columns of `form`, maybe a session column, and `row`: numbers, or strings yet to be read."""
    prompts, outputs = read_tokens(table, form.prompt), read_tokens(table, form.output)
    ticks = None if form.time is None else read_ticks(table, form.time, form.unit)
    keep = np.flatnonzero((prompts > 0) & (outputs > 0))
    dropped = len(prompts) - len(keep)
    if not len(keep):
        raise BadInput(f"none of the {dropped} rows has both {form.prompt} and {form.output} above 0")
    if dropped:
        notes.append(f"{dropped} of {len(prompts)} rows dropped: zero {form.prompt} or {form.output}")
    backwards = 0
    if ticks is not None:
        backwards = int((np.diff(ticks[keep]) < 0).sum())
        if backwards:
            keep = keep[np.argsort(ticks[keep], kind="stable")]
            notes.append(f"sorted by arrival: {backwards} rows arrived before the row above them")
    arrivals = None if ticks is None else in_seconds(ticks[keep], form.unit)
    sessions = _sessions(table)
    return Trace(
        source=source,
        arrivals=arrivals,
        prompts=prompts[keep],
        outputs=outputs[keep],
        sessions=None if sessions is None else sessions[keep],
        rows=table["row"].cast(pl.Int64).to_numpy()[keep],
        columns=(form.prompt, form.output),
        dropped=dropped,
        out_of_order=backwards,
        notes=tuple(notes),
    )


def _sessions(table: pl.DataFrame) -> IntArray | None:
    """Equal keys for equal session names; a row without one is a session of its own."""
    column = next((name for name in SESSIONS if name in table.columns), None)
    if column is None:
        return None
    names = table[column].cast(pl.String)
    keys = (names.rank("dense").cast(pl.Int64) - 1).to_numpy().copy()
    nameless = (names.is_null() | (names == "")).fill_null(True).to_numpy()
    keys = np.where(nameless, np.int64(len(names)) + np.arange(len(names)), np.nan_to_num(keys)).astype(np.int64)
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)


class _Scan(NamedTuple):
    lines: int
    commas: int
    quotes: int


def _scan(path: Path) -> _Scan:
    """Looks through the file in blocks: no NUL, UTF-8 throughout, no line over `MAX_LINE` bytes."""
    decoder, lines, commas, quotes, open_line = codecs.getincrementaldecoder("utf-8")(), 0, 0, 0, 0
    for block in read_blocks(path):
        first, last = block.find(b"\n"), block.rfind(b"\n")
        if open_line + (first if first >= 0 else len(block)) > MAX_LINE:
            raise BadInput(f"the line is longer than {MAX_LINE} bytes", key=f"row {lines + 1}")
        if (nul := block.find(b"\0")) >= 0:
            row = lines + 1 + block.count(b"\n", 0, nul)
            raise BadInput("a NUL byte: this is not a text file", key=f"row {row}")
        try:
            decoder.decode(block)
        except UnicodeDecodeError as error:
            raise _not_utf8(error, lines) from None
        open_line = len(block) - last - 1 if last >= 0 else open_line + len(block)
        lines, commas, quotes = lines + block.count(b"\n"), commas + block.count(b","), quotes + block.count(b'"')
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _not_utf8(error, lines) from None
    return _Scan(lines + (open_line > 0), commas, quotes)


def _not_utf8(error: UnicodeDecodeError, lines: int) -> BadInput:
    row = lines + 1 + error.object[: error.start].count(b"\n")
    return BadInput(f"byte 0x{error.object[error.start]:02x} is not UTF-8", key=f"row {row}")


def _csv(path: Path) -> tuple[Format, pl.DataFrame, list[str]]:
    scan = _scan(path)
    try:
        table = pl.read_csv(path, infer_schema=False, glob=False)
    except pl.exceptions.PolarsError as error:
        _blank_rows(path)
        raise BadInput(f"cannot be read as CSV: {str(error).splitlines()[0]}") from None
    names = [name.strip() for name in table.columns]
    form = next((form for form in FORMATS if set(form.columns) <= set(names)), None)
    if form is None or len(set(names)) != len(names):
        raise _unknown_columns(names)
    table.columns = names
    sessions = [name for name in SESSIONS if name in names][:1]
    table = table.select(*form.columns, *sessions).with_row_index("row", offset=2)
    if scan.quotes or scan.commas != (len(names) - 1) * (table.height + 1):
        table = table.filter(~pl.col("row").is_in(_blank_rows(path)))
    if not table.height:
        raise BadInput("has a header and no rows")
    return form, table, []


def _blank_rows(path: Path) -> list[int]:
    """The numbers of the blank rows. Raises BadInput at the first row that has more or fewer cells than the header."""
    blank, width, row = [], None, 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for row, cells in enumerate(csv.reader(file, strict=True), start=1):
                if not "".join(cells).strip() and len(cells) < 2:
                    blank.append(row)
                elif len(cells) != (width := width or len(cells)):
                    raise BadInput(f"{len(cells)} cells, but the header has {width}", key=f"row {row}")
        except csv.Error as error:
            raise BadInput(str(error), key=f"row {row + 1}") from None
    return blank


def _json_lines(path: Path) -> tuple[Format, pl.DataFrame, list[str]]:
    scan = _scan(path)
    first = next(_objects(path))[1]
    if not set(MOONCAKE.columns) <= set(first):
        raise _unknown_columns(list(first))
    session = next((name for name in SESSIONS if name in first), None)
    notes = ["hash_ids ignored: prefix reuse is not modelled"] if "hash_ids" in first else []
    table = _json_lines_fast(path, session, "hash_ids" in first)
    if table is None or table.height != scan.lines:
        table = _json_lines_by_hand(path, session)
    return MOONCAKE, table, notes


def _json_lines_fast(path: Path, session: str | None, hashes: bool) -> pl.DataFrame | None:
    """The table where every line has every value in its right type, else None: the slow way finds the line."""
    schema: dict[str, Any] = dict.fromkeys(MOONCAKE.columns, pl.Float64)
    schema |= {"hash_ids": pl.List(pl.Int64)} if hashes else {}
    schema |= {session: pl.String} if session else {}
    try:
        with path.open("rb") as file:
            table = pl.read_ndjson(file, schema=schema)
    except pl.exceptions.PolarsError:
        return None
    if hashes:
        ids = table["hash_ids"]
        if ids.null_count() or ids.list.len().sum() != ids.explode().drop_nulls().len():
            return None
    if any(table[column].null_count() for column in MOONCAKE.columns):
        return None
    return table.with_row_index("row", offset=1)


def _json_lines_by_hand(path: Path, session: str | None) -> pl.DataFrame:
    columns: dict[str, list[Any]] = {name: [] for name in ("row", *MOONCAKE.columns, *([session] if session else []))}
    for row, line in _objects(path):
        columns["row"].append(row)
        for name in MOONCAKE.columns:
            columns[name].append(read_number(line.get(name), row, name))
        if session:
            columns[session].append(None if line.get(session) is None else str(line[session]))
        hashes = line.get("hash_ids", [])
        if not isinstance(hashes, list) or any(type(key) is not int for key in hashes):
            raise BadInput("is not a list of integers", key=f"row {row}, column hash_ids")
    return pl.DataFrame(columns)


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line that is not blank, with its number. Raises BadInput where one is not a JSON object."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for row, line in enumerate(file, start=1):
            if line.strip():
                value = json_value(line, f"row {row}")
                if not isinstance(value, dict):
                    raise BadInput("is not a JSON object", key=f"row {row}")
                yield row, value


def _unknown_columns(found: list[str]) -> BadInput:
    known = "; ".join(",".join(form.columns) for form in (*FORMATS, MOONCAKE, BENCH._replace(time=None)))
    shown = ",".join(found)
    return BadInput(f"columns {shown[:200] + '…' * (len(shown) > 200)} fit no known format: {known}", key="row 1")
