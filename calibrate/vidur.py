"""Rows to fit from Vidur's profiles: operators of one layer, timed one by one, composed to iterations.

Reads two shapes of the linear layers' table: the profiler's own (`time_stats.OPERATOR.median`, `num_tokens`,
`num_tensor_parallel_workers`) and one condensed to `OPERATOR_ms`, `num_tokens`, `tp`, with `model` and `device`; and
the profiler's table of attention (`time_stats.attn_prefill.median`, `time_stats.attn_decode.median`, `batch_size`,
`prefill_chunk_size`, `kv_cache_size`, `is_prefill`). All times are milliseconds (Agrawal et al., Vidur, MLSys 2024).

What a table does not hold comes from the data sheet and is named in the provenance: the lm_head, all-reduces and, where
no table of attention is given, attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.grid import Limits, Point
from calibrate.rows import Rows
from calibrate.silicon import facts, points
from calibrate.surface import Curve, Floats
from sim.errors import BadInput, unknown
from sim.hardware import Device, Model

if TYPE_CHECKING:
    import polars as pl

NEEDED = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
BESIDE = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act", "add")
ATTENTION = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill")
PREFILL, DECODE = "time_stats.attn_prefill.median", "time_stats.attn_decode.median"
MOVING = ("attn_kv_cache_save", "attn_input_reshape", "attn_output_reshape")
BANDWIDTH, FLOPS = 0.8, 0.5  # assumed shares of a data sheet's rates that attention and the lm_head reach
SEQUENCES, LONGEST = 256, 16384
Attention = Callable[[Point], float]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows of a table that holds several models, devices and degrees."""

    tensor_parallel: int = 1
    model: str | None = None
    device: str | None = None


def import_rows(linear: Path, attention: Path | None, model: Model, device: Device, choice: Choice) -> Rows:
    """Composed iterations of the model. BadInput for a table that does not hold what is asked."""
    tp = choice.tensor_parallel
    model.check_parallel(tp, 1)
    layer, told = _linear(linear, choice)
    attended = _attention(attention, tp) if attention else _data_sheet(model, device, tp)
    longest = min(model.context_limit, LONGEST)
    limits = Limits(int(layer.x[-1]), SEQUENCES, longest, SEQUENCES * longest // 4)
    rows = []
    for point in points(limits):
        once = _once(model, device, tp, point)
        seconds = model.layers * (layer.at(point.tokens) + attended(point)) + once
        rows.append(facts(point) | {"seconds": seconds})
    assumed = ["lm_head"] + ["all-reduces"] * (tp > 1) + ["attention"] * (attention is None)
    return Rows.of(
        rows,
        {
            "source": f"Vidur profiles: {linear.name}" + (f", {attention.name}" if attention else ""),
            "model": model.name,
            "catalogue_device": device.name,
            "tensor_parallel": tp,
            "from_data_sheet": ", ".join(assumed),
            "method": "sum of operators measured one by one, no overlap; host time is not in the tables",
        }
        | told,
    )


def _linear(path: Path, choice: Choice) -> tuple[Curve, dict[str, str]]:
    """Seconds of one layer's linear operators by tokens, and whose they are."""
    import polars as pl

    frame = _read(path)
    names = {name: f"time_stats.{name}.median" for name in (*NEEDED, *BESIDE)}
    if names[NEEDED[0]] not in frame.columns:
        names = {name: f"{name}_ms" for name in names}
    degree = "tp" if "tp" in frame.columns else "num_tensor_parallel_workers"
    for column in (*(names[name] for name in NEEDED), "num_tokens", degree):
        if column not in frame.columns:
            raise BadInput("no such column", source=str(path), key=f"column {column}")
    told = {}
    for column, wanted in (("model", choice.model), ("device", choice.device)):
        if column in frame.columns:
            there = frame[column].unique().sort().to_list()
            if wanted is None and len(there) > 1:
                what = f"the table holds several: {', '.join(there)}; choose one with --table-{column}"
                raise BadInput(what, source=str(path), key=f"column {column}")
            if wanted is not None and wanted not in there:
                raise BadInput(unknown(column, wanted, there), source=f"--table-{column}")
            told[f"table_{column}"] = wanted or there[0]
            frame = frame.filter(pl.col(column) == told[f"table_{column}"])
    degrees = frame[degree].unique().sort().to_list()
    if choice.tensor_parallel not in degrees:
        what = f"{choice.tensor_parallel}: the table has {', '.join(map(str, degrees))}"
        raise BadInput(what, source="--tensor-parallel")
    frame = frame.filter(pl.col(degree) == choice.tensor_parallel)
    summed = pl.sum_horizontal(column for column in names.values() if column in frame.columns) / 1e3  # milliseconds
    frame = frame.group_by("num_tokens").agg(summed.median().alias("seconds")).sort("num_tokens")
    return Curve(frame["num_tokens"].cast(pl.Float64).to_numpy(), frame["seconds"].to_numpy()), told


def _attention(path: Path, tp: int) -> Attention:
    """One layer's attention by the profiler's table: linear between what was measured, the nearest beyond."""
    import polars as pl

    frame = _read(path)
    for column in (*ATTENTION, PREFILL, DECODE):
        if column not in frame.columns:
            raise BadInput("no such column", source=str(path), key=f"column {column}")
    if "num_tensor_parallel_workers" in frame.columns:
        frame = frame.filter(pl.col("num_tensor_parallel_workers") == tp)
    moving = [name for name in (f"time_stats.{name}.median" for name in MOVING) if name in frame.columns]
    prefills, decodes = frame.filter(pl.col("is_prefill")), frame.filter(~pl.col("is_prefill"))
    for kind, part in (("prefill", prefills), ("decode", decodes)):
        if part.height < 4:
            raise BadInput(f"too few {kind} rows for {tp} ways: {part.height}", source=str(path))
    prefill = _between(prefills, ("prefill_chunk_size", "kv_cache_size"), (PREFILL, *moving))
    decode = _between(decodes, ("batch_size", "kv_cache_size"), (DECODE, *moving))

    def seconds(point: Point) -> float:
        chunks = sum(prefill(tokens, start) for start, tokens in point.chunks)
        return chunks + (decode(point.decodes, point.context) if point.decodes else 0.0)

    return seconds


def _between(frame: pl.DataFrame, at: tuple[str, str], columns: tuple[str, ...]) -> Callable[[float, float], float]:
    """Seconds at two sizes: linear in triangles of what was measured, the nearest outside of them in proportion."""
    import polars as pl
    from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator

    seconds = pl.sum_horizontal(pl.col(columns).fill_nan(0.0)) / 1e3  # milliseconds; null counts as none
    table = frame.group_by(at).agg(seconds.median().alias("seconds")).sort(at)
    where: Floats = table.select(at).cast(pl.Float64).to_numpy()
    values = table["seconds"].to_numpy()
    inside, outside = (
        LinearNDInterpolator(where, values, rescale=True),
        NearestNDInterpolator(where, values, rescale=True),
    )
    most = where.max(axis=0)

    def at_sizes(first: float, second: float) -> float:
        found = float(inside(first, second))
        beyond = max(1.0, first / most[0]) * max(1.0, second / max(most[1], 1.0))
        return found if np.isfinite(found) else float(outside(first, second)) * beyond

    return at_sizes


def _data_sheet(model: Model, device: Device, tp: int) -> Attention:
    """One layer's attention by assumed shares of the device's rates."""
    bandwidth, flops = BANDWIDTH * device.memory_bandwidth, FLOPS * device.float16_flops * tp * model.layers

    def seconds(point: Point) -> float:
        per_token = model.kv_bytes_per_token(tp, layers=1) / bandwidth
        read = point.decodes * point.context * per_token
        for start, tokens in point.chunks:
            read += max((start + tokens) * per_token, model.attention_flops_prefill(start, tokens) / flops)
        return read

    return seconds


def _once(model: Model, device: Device, tp: int, point: Point) -> float:
    """What an iteration does beside its layers' operators: the lm_head, and ring all-reduces (Patarasuk, Yuan 2009)."""
    head = model.lm_head_bytes(tp) / (BANDWIDTH * device.memory_bandwidth)
    if tp == 1:
        return head
    moved = 2 * (tp - 1) / tp * 2 * point.tokens * model.hidden
    reduces = model.all_reduces_per_layer * model.layers + 1
    return head + reduces * (device.latency_among(tp) + moved / device.bandwidth_among(tp))


def _read(path: Path) -> Any:
    import polars as pl

    if not path.is_file():
        raise BadInput("no such file", source=str(path))
    try:
        return pl.read_csv(path, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        raise BadInput(f"not a table: {str(error).splitlines()[0]}", source=str(path)) from None
