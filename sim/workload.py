"""The requests of a run: ``[workload]`` as strict tables, and the arrays they stand for.

One seed spawns four streams, so that two policies meet the same requests and another arrival process leaves the lengths
as they were. Lengths and arrivals that name the same trace file are one table: one row is one request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from sim.arrivals import Arrivals, Closed, FloatArray, TraceArrivals, mean_rate
from sim.errors import BadInput
from sim.lengths import Drawn, IntArray, Lengths, TraceLengths
from sim.table import Table

if TYPE_CHECKING:
    from sim.traces import Trace

__all__ = ["Streams", "Workload", "WorkloadTable", "build", "mean_rate", "streams"]

MOST_CANDIDATES = 2**20
"""Candidate rows looked at for n requests before giving up: this many plus 64 n."""


class WorkloadTable(Table):
    """The ``[workload]`` table."""

    requests: Annotated[int, Field(ge=1, le=10**8)] = 2048
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 42
    too_long: Literal["error", "drop", "clip"] = "error"
    arrivals: Arrivals
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Workload:
    """`n` requests; index i is request i, in order of arrival.

    `arrivals` are float64 seconds, non-decreasing (None for a closed loop of `concurrency` clients that think for
    `think` seconds). `prompts` and `outputs` are int64 tokens, at least 1. `sessions` are int64 keys, equal where the
    trace says that requests belong together. `counts` has `dropped_zero_tokens`, `dropped_too_long`,
    `clipped_too_long` and `sorted` (trace rows that arrived before the row above them), zeros included.
    """

    arrivals: FloatArray | None
    prompts: IntArray
    outputs: IntArray
    sessions: IntArray | None
    concurrency: int | None
    think: float
    counts: dict[str, int]
    notes: tuple[str, ...]


class Streams(NamedTuple):
    """One independent source of randomness for each thing that is drawn."""

    arrivals: np.random.SeedSequence
    lengths: np.random.SeedSequence
    routing: np.random.SeedSequence
    faults: np.random.SeedSequence


def streams(seed: int) -> Streams:
    """The four streams of `seed`: the children 0 to 3 of ``SeedSequence(seed)``."""
    return Streams(*np.random.SeedSequence(seed).spawn(4))


def build(table: WorkloadTable, max_model_tokens: int, base_dir: Path) -> Workload:
    """The requests that `table` describes; trace paths are relative to `base_dir`.

    `too_long` is about prompt + output > `max_model_tokens`: "error" refuses the first such request, "drop" takes the
    next row or draw instead, "clip" cuts the output (to no less than 1) and then the prompt. Where lengths and arrivals
    name one file, `repeat` and `shuffle` of either count for both. Raises BadInput with the scenario's key, or with the
    trace file as its source.
    """
    if max_model_tokens < 2:
        what = f"{max_model_tokens} leaves no room for one prompt token and one output token"
        raise BadInput(what, key="[engine] max_model_tokens")
    arrivals, lengths, seeds = table.arrivals, table.lengths, streams(table.seed)
    times_of, rows_of = _traces(table, base_dir)
    rng = np.random.default_rng(seeds.lengths)
    if isinstance(lengths, TraceLengths) and rows_of is not None:
        both: tuple[TraceLengths | TraceArrivals, ...] = (lengths,)
        if isinstance(arrivals, TraceArrivals) and times_of is rows_of:
            both = (lengths, arrivals)
        shuffle = rng if any(part.shuffle for part in both) else None
        rows = _take(rows_of, table, max_model_tokens, any(part.repeat for part in both), shuffle)
    else:
        assert not isinstance(lengths, TraceLengths)
        rows = _draw(lengths, table, max_model_tokens, rng)
    rows = _cut(rows, table, max_model_tokens)
    closed = arrivals if isinstance(arrivals, Closed) else None
    return Workload(
        arrivals=_times(table, times_of, rows, np.random.default_rng(seeds.arrivals)),
        prompts=np.ascontiguousarray(rows.tokens[:, 0]),
        outputs=np.ascontiguousarray(rows.tokens[:, 1]),
        sessions=_sessions(times_of, rows),
        concurrency=closed.concurrency if closed else None,
        think=closed.think if closed else 0.0,
        counts=_counts(times_of, rows),
        notes=_notes(times_of, rows, max_model_tokens),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Requests in the order taken: int64 ``[prompt, output]`` rows.

    Of a trace, `slots` are their positions in the (repeated) file and `origin` the rows that gave the lengths, which
    differ where it was shuffled.
    """

    tokens: IntArray
    dropped: int
    clipped: int = 0
    trace: Trace | None = None
    slots: IntArray | None = None
    origin: IntArray | None = None


def _traces(table: WorkloadTable, base_dir: Path) -> tuple[Trace | None, Trace | None]:
    """The traces of the arrivals and of the lengths: one object where both name the same file."""
    found: dict[Path, Trace] = {}

    def trace(part: Arrivals | Lengths, key: str) -> Trace | None:
        if not isinstance(part, TraceArrivals | TraceLengths):
            return None
        try:
            path = (base_dir / part.path).resolve()
            if path not in found:
                from sim.traces import read  # loads polars, which a machine with a GPU may not have

                found[path] = read(path, part.path)
        except BadInput as error:
            raise error.within(key=key) from None
        except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a NUL in the name
            raise BadInput(f"cannot be opened: {error}", source=part.path, key=key) from None
        return found[path]

    return trace(table.arrivals, "[workload.arrivals] path"), trace(table.lengths, "[workload.lengths] path")


def _take(trace: Trace, table: WorkloadTable, limit: int, repeat: bool, rng: np.random.Generator | None) -> _Rows:
    """The first rows of `trace`, in file order or (with `rng`) permuted, again and again if `repeat`."""
    n, rows = table.requests, len(trace.prompts)
    usable = (trace.prompts + trace.outputs <= limit) | (table.too_long != "drop")
    each = int(usable.sum())
    if not each:
        raise _nothing_fits(f"none of the {rows} rows of {trace.source}", limit)
    if n > each and not repeat:
        raise _too_few(trace.source, n, each, rows - each)
    passes = -(-n // each)
    if (passes - 1) * rows > MOST_CANDIDATES + 64 * n:
        raise _nothing_fits(f"only {each} of the {rows} rows of {trace.source}", limit)
    order = np.tile(np.arange(rows), (passes, 1))
    order = (order if rng is None else rng.permuted(order, axis=1)).ravel()
    slots = np.flatnonzero(usable[order])[:n]
    origin = order[slots]
    tokens = np.stack([trace.prompts[origin], trace.outputs[origin]], axis=1)
    return _Rows(tokens, dropped=int(slots[-1]) + 1 - n, trace=trace, slots=slots, origin=origin)


def _draw(lengths: Drawn, table: WorkloadTable, limit: int, rng: np.random.Generator) -> _Rows:
    """Draws in order, the ones over `limit` passed over and counted if they are to be dropped."""
    n, kept, dropped, drawn, taken = table.requests, 0, 0, 0, []
    while kept < n:
        if drawn > MOST_CANDIDATES + 64 * n:
            raise _nothing_fits(f"only {kept} of {drawn} draws", limit)
        size = (n - kept) * 5 // 4 + min(64 + drawn, MOST_CANDIDATES)
        rows = lengths.draw(rng, size)
        drawn += size
        if table.too_long == "drop":
            fits = np.flatnonzero(rows.sum(axis=1) <= limit)[: n - kept]
            seen = int(fits[-1]) + 1 if len(fits) == n - kept else len(rows)
            dropped += seen - len(fits)
            rows = rows[fits]
        taken.append(rows[: n - kept])
        kept += len(taken[-1])
    return _Rows(np.concatenate(taken), dropped)


def _cut(rows: _Rows, table: WorkloadTable, limit: int) -> _Rows:
    """What `too_long` makes of the requests over `limit`: an error, or shorter ones."""
    prompts, outputs = rows.tokens.T
    over = np.flatnonzero(prompts + outputs > limit)
    if not len(over):
        return rows
    if table.too_long == "clip":
        outputs = np.maximum(1, np.minimum(outputs, limit - prompts))
        prompts = np.minimum(prompts, limit - outputs)
        return replace(rows, tokens=np.stack([prompts, outputs], axis=1), clipped=len(over))
    first = int(over[0])
    what = (
        f"request {first + 1} has {prompts[first]} prompt + {outputs[first]} output tokens, over max_model_tokens = "
        f'{limit}, as have {len(over)} of the {len(prompts)} requests; [workload] too_long can "drop" or "clip" them'
    )
    if rows.trace is None or rows.origin is None:
        raise BadInput(what, key="[workload] too_long")
    where = f"row {rows.trace.rows[rows.origin[first]]}, columns {' and '.join(rows.trace.columns)}"
    raise BadInput(what, source=rows.trace.source, key=where)


def _times(table: WorkloadTable, trace: Trace | None, rows: _Rows, rng: np.random.Generator) -> FloatArray | None:
    """Arrival times in seconds; None for a closed loop. A trace's are those of the rows taken, where it gave both."""
    arrivals, n = table.arrivals, table.requests
    if isinstance(arrivals, Closed):
        return None
    if not isinstance(arrivals, TraceArrivals):
        return arrivals.times(rng, n)
    assert trace is not None
    if trace.arrivals is None:
        raise BadInput("has no arrival times", source=trace.source, key="[workload.arrivals] path")
    base, slots = trace.arrivals, rows.slots
    if slots is None or rows.trace is not trace:
        slots = np.arange(n)
        if n > len(base) and not arrivals.repeat:
            raise _too_few(trace.source, n, len(base), 0)
        if arrivals.shuffle:
            base = np.concatenate([[0.0], np.cumsum(rng.permutation(np.diff(base)))])
    laps, within = np.divmod(slots, len(base))
    if laps[-1] and len(base) == 1:
        raise BadInput("repeat needs at least two rows, for a mean gap", source=trace.source)
    period = base[-1] + base[-1] / max(1, len(base) - 1)
    times = base[within] + laps * period
    return arrivals.rescaled(times - times[0])


def _sessions(times_of: Trace | None, rows: _Rows) -> IntArray | None:
    """Session keys go with the lengths; with the arrivals where only their trace has any."""
    if rows.trace is not None and rows.trace.sessions is not None and rows.origin is not None:
        return rows.trace.sessions[rows.origin]
    if times_of is not None and times_of.sessions is not None:
        return times_of.sessions[np.arange(len(rows.tokens)) % len(times_of.sessions)]
    return None


def _counts(times_of: Trace | None, rows: _Rows) -> dict[str, int]:
    traces = {id(trace): trace for trace in (times_of, rows.trace) if trace is not None}.values()
    return {
        "dropped_zero_tokens": sum(trace.dropped for trace in traces),
        "dropped_too_long": rows.dropped,
        "clipped_too_long": rows.clipped,
        "sorted": sum(trace.out_of_order for trace in traces),
    }


def _notes(times_of: Trace | None, rows: _Rows, limit: int) -> tuple[str, ...]:
    traces = {id(trace): trace for trace in (times_of, rows.trace) if trace is not None}.values()
    notes = [f"{trace.source}: {note}" for trace in traces for note in trace.notes]
    for count, done in ((rows.dropped, "passed over"), (rows.clipped, "cut")):
        if count:
            notes.append(f"{count} requests over max_model_tokens = {limit} were {done}")
    return tuple(notes)


def _nothing_fits(what: str, limit: int) -> BadInput:
    return BadInput(f"{what} have prompt + output tokens within max_model_tokens = {limit}", key="[workload] too_long")


def _too_few(source: str, asked: int, rows: int, dropped: int) -> BadInput:
    without = f" (without {dropped} that are too long)" if dropped else ""
    what = (
        f"{asked} asked for, but {source} has {rows} usable rows{without}; ask for at most {rows} or set repeat = true"
    )
    return BadInput(what, key="[workload] requests")
