"""The kernels of a model as functions of a batch, found in the tables and interpolated between their rows.

How to interpolate was chosen by leaving measured rows out and predicting them from their neighbours; median errors on
A100 (vllm 0.14.0), H100 (vllm 0.24.0) and B200 (trtllm 1.3.0rc20), bfloat16:

    prefill attention by length   log-log 2.2, 3.5, 3.4 %;  linear 6.0, 5.2, 3.7 %
    decode attention by length    linear 1.9, 2.1, 2.0 %;   log-log 2.8, 3.1, 3.1 %
    decode attention by batch     linear 2.6, 2.7, 2.4 %;   log-log 3.6, 4.0, 3.9 %
    attention by heads            linear 0.8 to 3.1 %
    GEMM of an unknown (n, k)     the four nearest 4.0, 3.4, 3.4 %;  the corners around it 5.5, 4.8, 5.0 %
    GEMM of an n never measured   the four nearest 6.1, 5.0, 5.8 %;  the corners around it 5.4, 4.1, 4.9 %
"""

from __future__ import annotations

import numpy as np
import polars as pl

from calibrate.surface import Curve, Floats, Mixture, Surface, by_nearest, mixture
from calibrate.tables import Tables
from sim.errors import BadInput

HALF = ("bfloat16", "float16", "half")  # the same speed; tables name one of them
STATIC = "fp8_static"  # fp8 whose scales come with the checkpoint, as in NVIDIA's; "fp8" finds them on the way
GEMM_DTYPES = {
    "float16": HALF, "bfloat16": HALF, "fp8": ("fp8", "fp8_block"), STATIC: ("fp8",), "int4": ("int4_wo",),
}  # fmt: skip
MOE_DTYPES = GEMM_DTYPES | {"int4": ("int4_wo", "w4a16_mxfp4")}
SKEWS = ("power_law_1.2", "power_law_1.01", "balanced")  # how tokens fall on experts: the package's own default first
PUBLISHED_IN = "w4a16_mxfp4"  # gpt-oss, and in nothing else


def gemm(tables: Tables, dtype: str, n: int, k: int) -> Curve:
    """Seconds of (m × k) · (k × n) by m. Between known shapes utilisation is interpolated in log n and log k.

    "fp8" rows quantise their input with scales found on the way. With the static scales of a checkpoint (STATIC) that
    is part of the kernel before, so its own measured time is taken off; reading the weights is left at least.
    """
    key = ("gemm", dtype)
    if key not in tables.made:
        tables.made[key] = _gemm_sites(tables, dtype)
    sites: dict[tuple[int, int], Curve] = tables.made[key]
    found = sites[n, k] if (n, k) in sites else by_nearest(sites, n, k)
    if dtype != STATIC:
        return found
    weights = n * k / tables.figures["mem_bw"]
    return Curve(found.x, np.maximum(found.seconds - _quantising(tables, k, found.x), weights))


def _quantising(tables: Tables, k: int, m: Floats) -> Floats:
    """Seconds of finding the scales of an (m × k) input, and of applying them; linear in k."""
    total = np.zeros(len(m))
    for name in ("computescale_perf", "scale_matrix_perf"):
        frame = tables.frame(name).filter(pl.col("quant_dtype") == "fp8")
        measured = sorted(frame["k"].unique().to_list())
        if measured:
            each = np.array([_curve(frame.filter(pl.col("k") == one), "m").over(m) for one in measured])
            total += [np.interp(k, measured, column) for column in each.T]
    return total


def _gemm_sites(tables: Tables, dtype: str) -> dict[tuple[int, int], Curve]:
    frame = tables.of_dtype(tables.frame("gemm_perf"), "gemm_perf", "gemm_dtype", GEMM_DTYPES.get(dtype, (dtype,)))
    grouped = frame.sort("m").group_by("n", "k").agg("m", "seconds")
    return {(n, k): Curve(np.array(m, dtype=np.float64), np.array(s)) for n, k, m, s in grouped.iter_rows()}


def all_reduce(tables: Tables, gpus: int) -> Curve:
    """Seconds of an all-reduce of so many 16-bit elements among `gpus` devices of a node, launched by a CUDA graph
    where the table tells (an eager launch costs some 40 µs more, and engines use graphs)."""
    name = "custom_allreduce_perf" if tables.folder("custom_allreduce_perf") else "nccl_perf"
    frame = tables.frame(name)
    if name == "nccl_perf":
        frame = tables.of_dtype(frame.filter(pl.col("op_name") == "all_reduce"), name, "nccl_dtype", HALF)
    elif "backend" in frame.columns:
        graph = frame.filter(pl.col("backend").str.ends_with("graph"))
        frame = graph if graph.height else frame
    known = sorted(frame["num_gpus"].unique().to_list())
    if gpus not in known:
        degrees = ", ".join(map(str, [1, *known]))
        raise BadInput(f"{gpus} devices: all-reduces were measured among {degrees}", source="--tensor-parallel")
    return _curve(frame.filter(pl.col("num_gpus") == gpus), "message_size")


def _curve(frame: pl.DataFrame, size: str) -> Curve:
    """Seconds by one size, the fastest of what else the rows differ in."""
    frame = frame.group_by(size).agg(pl.col("seconds").min()).sort(size)
    return Curve(frame[size].cast(pl.Float64).to_numpy(), frame["seconds"].to_numpy())


def attention(tables: Tables, phase: str, heads: tuple[int, int], head_dim: int, kv_dtype: str, window: int) -> Mixture:
    """Seconds of one layer's attention on one device by batch and length, for its own heads and KV heads.

    `phase` "context" is causal prefill without prior tokens, "generation" one token after length − 1 others; window 0
    is none.
    """
    name = f"{phase}_attention_perf"
    frame = tables.of_dtype(tables.frame(name), name, "kv_cache_dtype", HALF if kv_dtype in HALF else (kv_dtype,))
    there = frame["attn_dtype"].unique().to_list()
    frame = frame.filter(pl.col("attn_dtype") == next((dtype for dtype in (*HALF, "fp8") if dtype in there), there[0]))
    nearest = min(sorted(frame["head_dim"].unique()), key=lambda dim: abs(float(np.log(dim / head_dim))))
    if nearest != head_dim:
        tables.note(f"{name} has no heads of {head_dim}: those of {nearest}, scaled")
    frame = _windowed(tables, name, frame.filter(pl.col("head_dim") == nearest), window)
    length = pl.col("isl") + pl.col("step") if phase == "generation" else pl.col("isl")
    frame = frame.with_columns(length=length)
    sites = {
        (int(keys[0]), int(keys[1])): Surface.of(part.select("batch_size", "length", "seconds").to_numpy(), phase)
        for keys, part in frame.group_by("num_key_value_heads", "num_heads")
    }
    found = mixture(sites, *heads, head_dim / nearest)
    if found is None:
        known = ", ".join(f"{n}/{kv}" for kv, n in sorted(sites))
        what = f"{name} has nothing near {heads[0]} heads and {heads[1]} KV heads a device; has {known}"
        raise BadInput(what, source="--tensor-parallel")
    return found


def _windowed(tables: Tables, name: str, frame: pl.DataFrame, window: int) -> pl.DataFrame:
    """The rows of a window; where there are none, those of full attention, which the caller asks for no longer ones."""
    if "window_size" not in frame.columns:
        of_window = frame.clear() if window else frame
    else:
        of_window = frame.filter(pl.col("window_size") == window)
        frame = frame.filter(pl.col("window_size") == 0)
    if not of_window.height:
        tables.note(f"{name} has no window of {window}: full attention over no more than the window")
    return of_window if of_window.height else frame


def moe(tables: Tables, dtype: str, shape: tuple[int, int, int, int], tp: int) -> Curve:
    """Seconds of one layer's routed experts by tokens, split `tp` ways; the shape is hidden, intermediate, experts, and
    experts per token. BadInput for a shape not measured."""
    frame = tables.frame("moe_perf")
    columns = ("hidden_size", "inter_size", "num_experts", "topk")
    of_shape = frame.filter(**dict(zip(columns, shape, strict=True)))
    if not of_shape.height:
        shapes = frame.select(columns).unique().sort(columns).rows()
        near = min(shapes, key=lambda row: float(np.abs(np.log(np.array(row) / np.array(shape))).sum()))
        what = f"moe_perf has no experts of (hidden, intermediate, experts, experts per token) {shape}"
        raise BadInput(f"{what}; the nearest are {near}", source="--model")
    frame = of_shape.filter(moe_tp_size=tp, moe_ep_size=1)
    if not frame.height:
        frame = of_shape.filter(moe_tp_size=1, moe_ep_size=tp)
        tables.note(f"experts are spread over {tp} devices, not split: as they were measured")
    if not frame.height:
        degrees = of_shape.select("moe_tp_size", "moe_ep_size").filter(moe_ep_size=1)["moe_tp_size"].unique().sort()
        known = ", ".join(map(str, degrees)) or "with whole experts spread alone"
        what = f"{tp}: experts of this shape were measured split {known}"
        raise BadInput(what, source="--tensor-parallel")
    there = frame["moe_dtype"].unique().sort().to_list()
    used = next((name for name in MOE_DTYPES.get(dtype, (dtype,)) if name in there), None)
    if used is None and PUBLISHED_IN in there and all(name.endswith(("mxfp4", "mxfp8")) for name in there):
        used = PUBLISHED_IN
        tables.note(f"experts of this shape were not measured in {dtype}")
    if used is None:
        raise BadInput(f"{dtype!r}: experts of this shape were measured in {', '.join(there)}", source="--dtype")
    frame = frame.filter(moe_dtype=used)
    skews = frame["distribution"].unique().sort().to_list()
    skew = next((name for name in SKEWS if name in skews), skews[0])
    tables.note(f"experts in {used}, tokens distributed as {skew}")
    return _curve(frame.filter(distribution=skew), "num_tokens")
