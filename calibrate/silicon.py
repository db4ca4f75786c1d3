"""Rows to fit from public kernel tables: iterations composed over a grid of batches that the device could hold.

Nothing of the host is in them: what an engine spends on a step and on a sequence beside its kernels is 0 unless given.
"""

from __future__ import annotations

from dataclasses import dataclass

from calibrate.compose import Composition, composition
from calibrate.grid import SIZES, Limits, Point, grid
from calibrate.rows import Row, Rows
from calibrate.tables import Tables
from sim.errors import BadInput
from sim.hardware import Model

TOKENS, SEQUENCES, CONTEXT = 16384, 512, 32768  # as far as the grid goes, where model and memory allow
FEWEST_CACHE = 65536  # KV tokens of the grid where the weights alone would not fit
EXTRA_TOKENS = (384, 640, 769, 896, 1025, 1280, 1537, 2049, 2560, 3584, 5120, 7168, 10240)
EXTRA_BATCHES = (384, 512)
EXTRA_CONTEXTS = (128, 512, 2048, 3072)
DEVICES = {"a100_sxm": "a100-80gb-sxm", "h100_sxm": "h100-sxm", "h200_sxm": "h200", "b200_sxm": "b200", "l40s": "l40s"}


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds that an engine spends beside its kernels: on every step, and on every sequence of a step."""

    step: float = 0.0
    sequence: float = 0.0


def import_rows(
    tables: Tables,
    model: Model,
    tensor_parallel: int = 1,
    *,
    dtype: str | None = None,
    host: Host = Host(),
    limits: Limits | None = None,
) -> Rows:
    """Composed iterations of `model` on one of `tensor_parallel` devices, and where they come from.

    BadInput where the tables do not hold what the model needs.
    """
    for name, value in (("step", host.step), ("sequence", host.sequence)):
        if not 0 <= value < 1e3:
            raise BadInput(f"{value:g} must be a number of seconds from 0 to 1000", source=f"--{name}")
    composed = composition(tables, model, tensor_parallel, dtype)
    limits = limits or limits_of(tables, model, tensor_parallel)
    rows = [_row(composed, point, host) for point in points(limits)]
    catalogue_device = DEVICES.get(tables.system)
    provenance = tables.describe() | {
        "model": model.name,
        "tensor_parallel": tensor_parallel,
        "tables_dtype": dtype or model.dtype,
        "kv_dtype": model.kv_dtype,
        "host_step_s": host.step,
        "host_sequence_s": host.sequence,
        "method": "sum of measured kernels, no overlap; host time is not in the tables: "
        "step and sequence are 0 unless given",
    }
    return Rows.of(rows, provenance | ({"catalogue_device": catalogue_device} if catalogue_device else {}))


def limits_of(tables: Tables, model: Model, tp: int) -> Limits:
    """How far the grid goes: what the tables cover, the model's context, and nine tenths of the devices' memory."""
    memory = 0.9 * tables.figures.get("mem_capacity", 0.0)
    weights = model.stage_weight_bytes(tp, 1, 0)
    fitting = int((memory - weights) / model.kv_bytes_per_token(tp))
    if fitting < FEWEST_CACHE:
        tables.note(f"the memory of {tp} x {tables.system} leaves room for {max(0, fitting):,} KV tokens")
    return Limits(TOKENS, SEQUENCES, min(CONTEXT, model.context_limit), max(fitting, FEWEST_CACHE))


def points(limits: Limits) -> list[Point]:
    """The grid of a measurement, and what a table can add for nothing: larger batches, more lengths, mixed batches."""
    found = grid(limits)
    tokens = [size for size in EXTRA_TOKENS if size <= limits.batch_tokens]
    found += [Point(chunks=((0, size),)) for size in tokens if size <= limits.model_tokens]
    batches = [size for size in (*SIZES, *EXTRA_BATCHES) if size <= limits.sequences]
    for context in EXTRA_CONTEXTS:
        found += [Point(batch, context) for batch in batches]
    for batch in EXTRA_BATCHES:
        found += [Point(batch, context) for context in (1024, 4096)]
    for batch in (8, 32, 64, 128, 256):
        for total in (256, 512, 513, 1024, 2048, 4096, 8192):
            for start in (0, 2048, 8192):
                if batch < total:
                    found.append(Point(batch, 1024, ((start, total - batch),)))
    for count in (2, 4, 8, 16):
        found += [Point(chunks=((0, size),) * count) for size in (256, 512, 1024, 2048)]
    return [point for point in dict.fromkeys(found) if _holds(point, limits)]


def _holds(point: Point, limits: Limits) -> bool:
    ends = [start + tokens for start, tokens in point.chunks]
    return (
        point.tokens <= limits.batch_tokens
        and point.decodes + len(ends) <= limits.sequences
        and max([point.context, *ends]) <= limits.model_tokens
        and point.decodes * point.context + sum(ends) <= limits.cache_tokens
    )


def facts(point: Point) -> Row:
    """What a latency model may know of the point's batch, every decode at the mean context."""
    ends = [start + tokens for start, tokens in point.chunks]
    return {
        "decodes": point.decodes,
        "context": point.decodes * point.context,
        "chunks": len(ends),
        "prefill_tokens": sum(tokens for _, tokens in point.chunks),
        "attention": sum(tokens * (start + tokens / 2) for start, tokens in point.chunks),
        "prefill_context": sum(ends),
        "longest_context": point.context,
        "longest_chunk": max(ends, default=0),
    }


def _row(composed: Composition, point: Point, host: Host) -> Row:
    seconds = sum(composed.parts(point.decodes, point.decodes * point.context, point.chunks).values())
    spent = host.step + host.sequence * (point.decodes + len(point.chunks))
    return facts(point) | {"seconds": seconds + spent, "host": spent}
