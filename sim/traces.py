"""Trace files: what was asked of a real service, read strictly.

Formats are told apart by their columns (`FORMATS`, and the JSON of ``vllm bench serve --save-result --save-detailed``).
A row number in an error is 1-based and counts the header as row 1; in JSON lines it is the line, in a bench result the
place in its lists, from 1. Rows with zero prompt or output tokens are dropped and counted; the rest are sorted by
arrival where they are out of order (stably) and then shifted so that the first arrives at 0 s.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import polars as pl

from sim.arrivals import FloatArray
from sim.errors import BadInput
from sim.lengths import MAX_TOKENS, IntArray
from sim.table import LARGEST

MAX_LINE = 2**20
"""Longest line of a CSV or JSON-lines file, in bytes; also the block in which files are first looked through."""

MAX_BENCH = 512 * 2**20
"""Largest bench result, in bytes: it is one JSON value, and may be one line."""

SESSIONS = ("session_id", "Session ID", "session", "conversation_id")


class Format(NamedTuple):
    """The columns of a format: arrival time (None where it has none) and its unit, prompt and output tokens."""

    time: str | None
    unit: Literal["s", "ms", "date"]
    prompt: str
    output: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a file must have."""
        return tuple(name for name in (self.time, self.prompt, self.output) if name)


FORMATS = (
    Format("arrived_at", "s", "num_prefill_tokens", "num_decode_tokens"),  # Vidur, Splitwise
    Format(None, "s", "num_prefill_tokens", "num_decode_tokens"),  # Sarathi-Serve, Vidur: lengths only
    Format("TIMESTAMP", "date", "ContextTokens", "GeneratedTokens"),  # Azure LLM inference 2023 and 2024
    Format("Timestamp", "s", "Request tokens", "Response tokens"),  # BurstGPT
)
MOONCAKE = Format("timestamp", "ms", "input_length", "output_length")
BENCH = Format("start_times", "s", "input_lens", "output_lens")


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
            return _trace(source, *(_bench(path) if _is_bench(path, head) else _json_lines(path)))
        return _trace(source, *_csv(path))
    except BadInput as error:
        raise error.within(source=source) from None
    except OSError as error:
        raise BadInput(f"cannot be read: {error.strerror or error}", source=source) from None


def _trace(source: str, form: Format, table: pl.DataFrame, notes: list[str]) -> Trace:
    """`table` has the columns of `form`, maybe a session column, and `row`: numbers, or strings yet to be read."""
    prompts, outputs = _tokens(table, form.prompt), _tokens(table, form.output)
    ticks = None if form.time is None else _ticks(table, form.time, form.unit)
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
    arrivals = None if ticks is None else _seconds(ticks[keep], form.unit)
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


def _numbers(table: pl.DataFrame, column: str) -> pl.Series:
    values = table[column]
    return (values.str.strip_chars() if values.dtype == pl.String else values).cast(pl.Float64, strict=False)


def _tokens(table: pl.DataFrame, column: str) -> IntArray:
    values = _numbers(table, column)
    good = (values.is_finite() & (values >= 0) & (values <= MAX_TOKENS) & (values == values.floor())).fill_null(False)
    if not good.all():
        _refuse(table, column, good, f"is not a whole number of tokens from 0 to {MAX_TOKENS}")
    return values.cast(pl.Int64).to_numpy()


def _ticks(table: pl.DataFrame, column: str, unit: str) -> FloatArray | IntArray:
    """Times as they stand: float64 in `unit`, or whole nanoseconds of a date (UTC where it names a zone)."""
    if unit != "date":
        values = _numbers(table, column)
        good = (values.is_finite() & (values >= 0) & (values <= LARGEST)).fill_null(False)
        if not good.all():
            _refuse(table, column, good, f"is not a finite time of at least 0 {unit} and at most {LARGEST:g}")
        return values.to_numpy()
    text = table[column].str.strip_chars().str.replace(r"(Z|\+00:00)$", "").str.replace("T", " ", literal=True)
    dates = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False)
    if dates.null_count():
        _refuse(table, column, dates.is_not_null(), "is not a time like 2023-11-16 18:17:03.9799600")
    return dates.cast(pl.Int64).to_numpy()


def _seconds(ticks: FloatArray | IntArray, unit: str) -> FloatArray:
    """Seconds from the first tick; the difference is taken first, so that nothing is lost to a large date."""
    per_second = {"s": 1.0, "ms": 1e3, "date": 1e9}[unit]
    passed: FloatArray = (ticks - ticks[0]).astype(np.float64)
    return passed / per_second


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


def _refuse(table: pl.DataFrame, column: str, good: pl.Series, what: str) -> NoReturn:
    bad = int((~good).arg_max() or 0)
    value = table[column][bad]
    shown = "an empty cell" if value in (None, "") else repr(value)[:60]
    raise BadInput(f"{shown} {what}", key=f"row {table['row'][bad]}, column {column}")


class _Scan(NamedTuple):
    lines: int
    commas: int
    quotes: int


def _scan(path: Path) -> _Scan:
    """Looks through the file in blocks: no NUL, UTF-8 throughout, no line over `MAX_LINE` bytes."""
    decoder, lines, commas, quotes, open_line = codecs.getincrementaldecoder("utf-8")(), 0, 0, 0, 0
    for block in _blocks(path):
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


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(MAX_LINE):
            yield block


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
            columns[name].append(_number(line.get(name), row, name))
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
                value = _json(line, f"row {row}")
                if not isinstance(value, dict):
                    raise BadInput("is not a JSON object", key=f"row {row}")
                yield row, value


def _json(text: str | bytes, row: str | None = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not valid JSON, or cut off: {error}", key=row) from None


def _number(value: object, row: int, column: str) -> float:
    if type(value) is not int and type(value) is not float:
        shown = "nothing" if value is None else repr(value)[:60]
        raise BadInput(f"{shown} is not a number", key=f"row {row}, column {column}")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _is_bench(path: Path, head: bytes) -> bool:
    """Whether a JSON file is one bench result (maybe on one line of any length) rather than JSON lines."""
    line, end, _ = head.removeprefix(codecs.BOM_UTF8).partition(b"\n")
    try:
        first = json.loads(line) if end or len(head) < MAX_LINE else None
    except (ValueError, RecursionError):
        first = None
    if isinstance(first, dict):
        return not set(MOONCAKE.columns) <= set(first) and bool({BENCH.prompt, "request_throughput"} & set(first))
    key, tail = f'"{BENCH.prompt}"'.encode(), b""
    for block in _blocks(path):
        if key in tail + block:
            return True
        tail = block[-len(key) :]
    return line.strip() == b"{"


def _bench(path: Path) -> tuple[Format, pl.DataFrame, list[str]]:
    """Lengths, and arrivals where the result has `start_times`; a request that failed has an output length of 0."""
    result = _bench_object(path)
    form = BENCH if result.get("start_times") else BENCH._replace(time=None)
    numbers = {name: _bench_numbers(result, name) for name in form.columns}
    notes = [] if form.time else ["no start_times: lengths only"]
    return form, pl.DataFrame(numbers).with_row_index("row", offset=1), notes


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What `vllm bench serve --save-result --save-detailed` measured: index i is request i, in the order sent.

    Seconds: `starts` (of a clock of its own; None in results of older versions), `ttfts`, `latencies` (from the start
    to the last token) and `itls` (gaps between chunks of the stream, each of which may hold several tokens). `outputs`
    are tokens. `good` are the requests that completed, the rows of the trace that the same file is; figures of the
    others mean nothing. `settings` are the result's keys that are not lists.
    """

    starts: FloatArray | None
    prompts: IntArray
    outputs: IntArray
    ttfts: FloatArray
    latencies: FloatArray
    itls: list[FloatArray]
    good: npt.NDArray[np.bool_]
    settings: dict[str, Any]


def read_bench(path: Path, source: str) -> BenchResult:
    """The bench result at `path`, called `source` in errors. Raises BadInput with that source and the request."""
    try:
        if not path.is_file():
            raise BadInput("is a directory, not a file" if path.is_dir() else "no such file")
        result = _bench_object(path)
        for name in ("ttfts", "itls"):
            if not isinstance(result.get(name), list):
                raise BadInput(f"has no list {name}: save the bench result with --save-detailed")
        names = [
            BENCH.prompt,
            BENCH.output,
            "ttfts",
            *(name for name in ("start_times", "latencies") if result.get(name)),
        ]
        table = pl.DataFrame({name: _bench_numbers(result, name) for name in names}).with_row_index("row", offset=1)
        itls = _bench_gaps(result["itls"], table.height)
        ttfts = _ticks(table, "ttfts", "s").astype(np.float64)
        whole = ttfts + np.array([gaps.sum() for gaps in itls])
        prompts, outputs = _tokens(table, BENCH.prompt), _tokens(table, BENCH.output)
        return BenchResult(
            starts=_ticks(table, "start_times", "s").astype(np.float64) if "start_times" in names else None,
            prompts=prompts,
            outputs=outputs,
            ttfts=ttfts,
            latencies=_ticks(table, "latencies", "s").astype(np.float64) if "latencies" in names else whole,
            itls=itls,
            good=(prompts > 0) & (outputs > 0),
            settings={key: value for key, value in result.items() if not isinstance(value, list)},
        )
    except BadInput as error:
        raise error.within(source=source) from None
    except OSError as error:
        raise BadInput(f"cannot be read: {error.strerror or error}", source=source) from None


def _bench_object(path: Path) -> dict[str, Any]:
    """The result as it stands in the file, with lists of lengths."""
    if (size := path.stat().st_size) > MAX_BENCH:
        raise BadInput(f"{size} bytes are too many for a bench result, at most {MAX_BENCH}")
    result = _json(path.read_bytes())
    if not isinstance(result, dict):
        raise BadInput("is not a JSON object, as a bench result is")
    missing = [name for name in (BENCH.prompt, BENCH.output) if not isinstance(result.get(name), list)]
    if missing:
        raise BadInput(f"has no list {' and no list '.join(missing)}: save the bench result with --save-detailed")
    if not result[BENCH.prompt]:
        raise BadInput("holds no requests")
    return result


def _bench_numbers(result: dict[str, Any], name: str) -> list[float]:
    """One of its lists, which are all of one length."""
    values = result[name]
    if not isinstance(values, list) or len(values) != len(result[BENCH.prompt]):
        raise BadInput(f"{BENCH.prompt} and {name} are not lists of one length")
    return [_number(value, i, name) for i, value in enumerate(values, 1)]


def _bench_gaps(values: list[Any], requests: int) -> list[FloatArray]:
    """`itls`: a list of seconds for each request."""
    if len(values) != requests:
        raise BadInput(f"{BENCH.prompt} and itls are not lists of one length")
    gaps = []
    for row, own in enumerate(values, 1):
        if not isinstance(own, list):
            raise BadInput("is not a list of seconds", key=f"row {row}, column itls")
        array = np.array(
            [value if type(value) is float else _number(value, row, "itls") for value in own], dtype=np.float64
        )
        if not ((array >= 0) & (array <= LARGEST)).all():
            raise BadInput(f"has a gap that is not from 0 to {LARGEST:g} s", key=f"row {row}, column itls")
        gaps.append(array)
    return gaps


def _unknown_columns(found: list[str]) -> BadInput:
    known = "; ".join(",".join(form.columns) for form in (*FORMATS, MOONCAKE, BENCH._replace(time=None)))
    shown = ",".join(found)
    return BadInput(f"columns {shown[:200] + '…' * (len(shown) > 200)} fit no known format: {known}", key="row 1")
