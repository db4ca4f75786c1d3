"""Results of `vllm bench serve --save-result --save-detailed`, read strictly."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from sim.arrivals import FloatArray
from sim.columns import BENCH, MAX_LINE, MOONCAKE, Format, json_value, read_blocks, read_number, read_ticks, read_tokens
from sim.errors import BadInput
from sim.lengths import IntArray
from sim.table import LARGEST

MAX_BENCH = 512 * 2**20
"""Largest bench result, in bytes: it is one JSON value, and may be one line."""


def is_bench(path: Path, head: bytes) -> bool:
    """Whether a JSON file is one bench result (maybe on one line of any length) rather than JSON lines."""
    line, end, _ = head.removeprefix(codecs.BOM_UTF8).partition(b"\n")
    try:
        first = json.loads(line) if end or len(head) < MAX_LINE else None
    except (ValueError, RecursionError):
        first = None
    if isinstance(first, dict):
        return not set(MOONCAKE.columns) <= set(first) and bool({BENCH.prompt, "request_throughput"} & set(first))
    key, tail = f'"{BENCH.prompt}"'.encode(), b""
    for block in read_blocks(path):
        if key in tail + block:
            return True
        tail = block[-len(key) :]
    return line.strip() == b"{"


def bench(path: Path) -> tuple[Format, pl.DataFrame, list[str]]:
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
        ttfts = read_ticks(table, "ttfts", "s").astype(np.float64)
        whole = ttfts + np.array([gaps.sum() for gaps in itls])
        prompts, outputs = read_tokens(table, BENCH.prompt), read_tokens(table, BENCH.output)
        return BenchResult(
            starts=read_ticks(table, "start_times", "s").astype(np.float64) if "start_times" in names else None,
            prompts=prompts,
            outputs=outputs,
            ttfts=ttfts,
            latencies=read_ticks(table, "latencies", "s").astype(np.float64) if "latencies" in names else whole,
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
    result = json_value(path.read_bytes())
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
    return [read_number(value, i, name) for i, value in enumerate(values, 1)]


def _bench_gaps(values: list[Any], requests: int) -> list[FloatArray]:
    """`itls`: a list of seconds for each request."""
    if len(values) != requests:
        raise BadInput(f"{BENCH.prompt} and itls are not lists of one length")
    gaps = []
    for row, own in enumerate(values, 1):
        if not isinstance(own, list):
            raise BadInput("is not a list of seconds", key=f"row {row}, column itls")
        array = np.array(
            [value if type(value) is float else read_number(value, row, "itls") for value in own], dtype=np.float64
        )
        if not ((array >= 0) & (array <= LARGEST)).all():
            raise BadInput(f"has a gap that is not from 0 to {LARGEST:g} s", key=f"row {row}, column itls")
        gaps.append(array)
    return gaps
