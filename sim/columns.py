"""Columns of a trace or a bench result, read strictly: what a value may be, and where one is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import polars as pl

from sim.arrivals import FloatArray
from sim.errors import BadInput
from sim.lengths import MAX_TOKENS, IntArray
from sim.table import LARGEST

MAX_LINE = 2**20
"""Longest line of a CSV or JSON-lines file, in bytes; also the block in which files are first looked through."""


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


MOONCAKE = Format("timestamp", "ms", "input_length", "output_length")
BENCH = Format("start_times", "s", "input_lens", "output_lens")


def read_numbers(table: pl.DataFrame, column: str) -> pl.Series:
    values = table[column]
    return (values.str.strip_chars() if values.dtype == pl.String else values).cast(pl.Float64, strict=False)


def read_tokens(table: pl.DataFrame, column: str) -> IntArray:
    values = read_numbers(table, column)
    good = (values.is_finite() & (values >= 0) & (values <= MAX_TOKENS) & (values == values.floor())).fill_null(False)
    if not good.all():
        refuse(table, column, good, f"is not a whole number of tokens from 0 to {MAX_TOKENS}")
    return values.cast(pl.Int64).to_numpy()


def read_ticks(table: pl.DataFrame, column: str, unit: str) -> FloatArray | IntArray:
    """Times as they stand: float64 in `unit`, or whole nanoseconds of a date (UTC where it names a zone)."""
    if unit != "date":
        values = read_numbers(table, column)
        good = (values.is_finite() & (values >= 0) & (values <= LARGEST)).fill_null(False)
        if not good.all():
            refuse(table, column, good, f"is not a finite time of at least 0 {unit} and at most {LARGEST:g}")
        return values.to_numpy()
    text = table[column].str.strip_chars().str.replace(r"(Z|\+00:00)$", "").str.replace("T", " ", literal=True)
    dates = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False)
    if dates.null_count():
        refuse(table, column, dates.is_not_null(), "is not a time like 2023-11-16 18:17:03.9799600")
    return dates.cast(pl.Int64).to_numpy()


def in_seconds(ticks: FloatArray | IntArray, unit: str) -> FloatArray:
    """Seconds from the first tick; the difference is taken first, so that nothing is lost to a large date."""
    per_second = {"s": 1.0, "ms": 1e3, "date": 1e9}[unit]
    passed: FloatArray = (ticks - ticks[0]).astype(np.float64)
    return passed / per_second


def refuse(table: pl.DataFrame, column: str, good: pl.Series, what: str) -> NoReturn:
    bad = int((~good).arg_max() or 0)
    value = table[column][bad]
    shown = "an empty cell" if value in (None, "") else repr(value)[:60]
    raise BadInput(f"{shown} {what}", key=f"row {table['row'][bad]}, column {column}")


def read_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(MAX_LINE):
            yield block


def json_value(text: str | bytes, row: str | None = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not valid JSON, or cut off: {error}", key=row) from None


def read_number(value: object, row: int, column: str) -> float:
    if type(value) is not int and type(value) is not float:
        shown = "nothing" if value is None else repr(value)[:60]
        raise BadInput(f"{shown} is not a number", key=f"row {row}, column {column}")
    try:
        return float(value)
    except OverflowError:
        return float("inf")
