"""A run as a timeline in Chrome's Trace Event format, for Perfetto, chrome://tracing and Speedscope.

A replica is a process, a pipeline stage a thread of it, a batch a slice on each. Counters have the KV blocks used, the
requests waiting and those running (admitted and not finished), as they are just after each scheduling; an instant marks
a preemption. Times are microseconds of the run's clock, whole nanoseconds, so that slices of a stage never overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from json import JSONDecodeError, dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from cyclopts import Parameter

from sim import output
from sim.errors import BadInput
from sim.options import say

if TYPE_CHECKING:
    import polars as pl

AT_ONCE = 65_536  # iterations made into text at a time
REQUESTS = ("replica", "arrival_s", "finished_s")
STEPS = (
    *("replica", "start_s", "end_s", "prefill_tokens", "decodes", "context_tokens", "chunks"),
    *("kv_blocks_used", "waiting", "preempted"),
)
ARGS = ("decodes", "prefill_tokens", "chunks", "context_tokens", "kv_blocks_used", "waiting", "preempted")


def trace(
    directory: Path,
    *,
    to: Path | None = None,
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False,
) -> None:
    """Make a timeline of a run that was kept with --out, simulated or measured: open it at ui.perfetto.dev.

    Parameters
    ----------
    directory
        Where the run's steps.parquet and requests.parquet are.
    to
        The file to write, gzipped if it is called *.gz; trace.json.gz in the directory by default.
    """
    to = directory / "trace.json.gz" if to is None else to
    requests, steps = (_table(directory / f"{name}.parquet", columns) for name, columns in _TABLES.items())
    output.prepare_file(to, "--to")
    events = write(to, requests, steps, _name(directory), source="--to")
    if json:
        print(output.as_json({"file": str(to), "events": events, "iterations": len(steps)}), end="")
    else:
        say(f"{events:,} events of {len(steps):,} iterations are in {to}")


_TABLES = {"requests": REQUESTS, "steps": STEPS}


def write(path: Path, requests: pl.DataFrame, steps: pl.DataFrame, name: str, *, source: str) -> int:
    """Write the timeline of a run's tables; the number of events. BadInput, of `source`, for what cannot be written."""
    count = 0
    with output.stream(path, source) as file:
        head = dumps({"displayTimeUnit": "ms", "otherData": {"name": name, "written_by": "servecast"}})
        file.write(f'{head[:-1]}, "traceEvents": [\n'.encode())
        for some in events(requests, steps):
            file.write(((",\n" if count else "") + ",\n".join(some)).encode())
            count += len(some)
        file.write(b"\n]}\n")
    return count


def events(requests: pl.DataFrame, steps: pl.DataFrame) -> Iterator[list[str]]:
    """The events as JSON, some at a time: those of a replica together, in the order of their starts."""
    import polars as pl

    for replica in sorted(steps["replica"].unique().to_list()):
        own = steps.filter(pl.col("replica") == replica)
        stages = 1 if "stage_starts_s" not in own.columns else len(own["stage_starts_s"][0])
        yield list(_names(replica, stages))
        mine = requests.filter(pl.col("replica") == replica)
        arrived, finished = (np.sort(mine[column].drop_nulls().to_numpy()) for column in ("arrival_s", "finished_s"))
        counters = _Counters(replica + 1)
        for part in own.iter_slices(AT_ONCE):
            start, end = part["start_s"].to_numpy(), part["end_s"].to_numpy()
            here, after = (
                np.searchsorted(arrived, at, side="right") - np.searchsorted(finished, at, side="right")
                for at in (start, end)
            )
            yield _some(part, replica + 1, stages, counters, here, after == 0)


def _some(
    part: pl.DataFrame,
    pid: int,
    stages: int,
    counters: _Counters,
    here: npt.NDArray[np.int64],
    empty: npt.NDArray[np.bool_],
) -> list[str]:
    """Events of some iterations of a replica; `here` requests are at it at their starts, none after those `empty`."""
    starts = _nanoseconds(part["stage_starts_s" if stages > 1 else "start_s"]).reshape(-1, stages)
    ends = _nanoseconds(part["stage_ends_s" if stages > 1 else "end_s"]).reshape(-1, stages)
    found: list[str] = []
    rows = zip(
        starts.tolist(), ends.tolist(), here.tolist(), empty.tolist(), part.select(ARGS).iter_rows(), strict=True
    )
    for begun, ended, at, done, facts in rows:
        decodes, prefill, chunks, context, blocks, waiting, preempted = facts
        what = "decodes" if not prefill else "decodes + prefill" if decodes else "prefill"
        args = (
            f'{{"decodes": {decodes}, "prefill_tokens": {prefill}, "chunks": {chunks}, "context_tokens": {context}, '
            f'"kv_blocks_used": {blocks}, "waiting": {waiting}, "preempted": {preempted}}}'
        )
        found += counters.at(begun[0], blocks, waiting, at - waiting)
        if preempted:
            found.append(
                f'{{"ph": "i", "s": "p", "name": "preempted", "cat": "scheduler", "pid": {pid}, "tid": 1, '
                f'"ts": {_us(begun[0])}, "args": {{"requests": {preempted}}}}}'
            )
        for stage, (left, right) in enumerate(zip(begun, ended, strict=True), start=1):
            found.append(
                f'{{"ph": "X", "name": "{what}", "cat": "batch", "pid": {pid}, "tid": {stage}, "ts": {_us(left)}, '
                f'"dur": {_us(right - left)}, "args": {args}}}'
            )
        if done:
            found += counters.at(ended[-1], 0, 0, 0)
    return found


class _Counters:
    """The counters of one replica, told where they change."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.blocks = self.waiting = self.running = -1

    def at(self, ns: int, blocks: int, waiting: int, running: int) -> Iterator[str]:
        if blocks != self.blocks:
            self.blocks = blocks
            yield self._event("KV blocks", ns, f'"used": {blocks}')
        if (waiting, running) != (self.waiting, self.running):
            self.waiting, self.running = waiting, running
            yield self._event("requests", ns, f'"running": {running}, "waiting": {waiting}')

    def _event(self, name: str, ns: int, values: str) -> str:
        return f'{{"ph": "C", "name": "{name}", "pid": {self.pid}, "tid": 0, "ts": {_us(ns)}, "args": {{{values}}}}}'


def _names(replica: int, stages: int) -> Iterator[str]:
    """What the tracks are called, and their order."""
    pid = replica + 1
    named = [("process_name", 0, {"name": f"replica {replica}"}), ("process_sort_index", 0, {"sort_index": replica})]
    for stage in range(1, stages + 1):
        name = "batches" if stages == 1 else f"stage {stage} of {stages}"
        named += [("thread_name", stage, {"name": name}), ("thread_sort_index", stage, {"sort_index": stage})]
    for name, tid, args in named:
        yield dumps({"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args})


def _nanoseconds(times: pl.Series) -> npt.NDArray[np.int64]:
    return np.rint(times.to_numpy() * 1e9).astype(np.int64)


def _us(ns: int) -> str:
    """Microseconds to the nanosecond, with nothing lost to a double."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _table(path: Path, columns: tuple[str, ...]) -> pl.DataFrame:
    """A table of a run. BadInput for a file that is not one."""
    import polars as pl

    try:
        if not path.is_file():
            raise BadInput("no such file; a run with --out keeps it", source=str(path))
        frame = pl.read_parquet(path)
    except OSError as error:
        raise BadInput((error.strerror or str(error)).lower(), source=str(path)) from None
    except pl.exceptions.PolarsError as error:
        raise BadInput(f"not a parquet file: {str(error).splitlines()[0]}", source=str(path)) from None
    if missing := [name for name in columns if name not in frame.columns]:
        raise BadInput(f"has no column {missing[0]}: not a table of a run", source=str(path))
    return frame


def _name(directory: Path) -> str:
    """What the run was called, as far as its summary says."""
    try:
        summary: dict[str, Any] = loads((directory / "summary.json").read_bytes())
        return f"{summary['name']}, {summary['policy']}"
    except (OSError, JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        return directory.resolve().name
