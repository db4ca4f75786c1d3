"""Builds FlashInfer's kernels ahead of time: `python -m gpu_backend.kernels bfloat16:128:4 …`, dtype:head_dim:group.

FlashInfer compiles a module when it is first planned, for minutes, and needs nvcc for it. This builds exactly the
modules that the engine uses, one by one, and says which were there. A module is kept where FlashInfer keeps it
(FLASHINFER_WORKSPACE_BASE, and FLASHINFER_CUDA_ARCH_LIST, FLASHINFER_NVCC and MAX_JOBS say how it is built), so that an
interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from gpu_backend.cache import storage
from gpu_backend.flashinfer_attention import (
    NO_FP16_SUMS,
    NO_ROTATION,
    FlashInferAttention,
    HeadShape,
    load,
    prefill_backend,
)
from gpu_backend.layout import lay_out
from sim.errors import BadInput

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
NO_WINDOW, NO_CAP = False, False
UNFINISHED = 3  # exit status: the time was up


def parse(text: str) -> HeadShape:
    """`bfloat16:128:4` as a shape: dtype, head dimension, query heads per KV head (kernels do not depend on more)."""
    try:
        dtype, head_dim, group = text.split(":")
        return HeadShape(int(group), 1, int(head_dim), 16, DTYPES[dtype])
    except (ValueError, KeyError):
        known = " or ".join(DTYPES)
        raise BadInput(f"{text!r} must be DTYPE:HEAD_DIM:GROUP, DTYPE {known}", source="kernels") from None


def modules(flashinfer: Any, shape: HeadShape, backend: str) -> list[Any]:
    """FlashInfer's build specifications of what the wrappers load for a shape: decode, then prefill by `backend`.

    Decodes with tensor cores go through the "fa2" prefill kernels.
    """
    dtype, index = (shape.dtype,) * 3, torch.int32
    traits = (*dtype, index, shape.head_dim, shape.head_dim, NO_ROTATION, NO_WINDOW, NO_CAP)

    def prefill(kind: str) -> Any:
        return flashinfer.jit.gen_batch_prefill_module(kind, *traits, NO_FP16_SUMS)

    if not shape.tensor_cores:
        return [flashinfer.jit.gen_batch_decode_module(*traits), prefill(backend)]
    return [prefill(kind) for kind in dict.fromkeys(("fa2", backend))]


def available(shape: HeadShape, device: torch.device) -> bool:
    """Whether nothing would have to be compiled to run a shape."""
    flashinfer = load()
    found = modules(flashinfer, shape, prefill_backend(flashinfer, shape, device))
    return all(spec.is_compiled for spec in found)


def build(shapes: Sequence[HeadShape], backend: str, seconds: float) -> bool:
    """Build or load the modules of the shapes; False if the time was up before the last of them."""
    flashinfer, device = load(), torch.device("cuda")
    start = time.monotonic()
    seen: set[str] = set()
    for shape in shapes:
        if shape.lacking:
            raise BadInput(shape.lacking, source="kernels")
        kind = prefill_backend(flashinfer, shape, device) if backend == "auto" else backend
        for spec in modules(flashinfer, shape, kind):
            if spec.name in seen:
                continue
            seen.add(spec.name)
            there = "shipped" if spec.is_aot else "built before" if spec.is_compiled else None
            if there is None and time.monotonic() - start > seconds:
                print("time is up: run this again to go on", flush=True)
                return False
            begun = time.monotonic()
            spec.build_and_load()
            told = f"loaded ({there})" if there else f"built in {time.monotonic() - begun:.0f} s"
            print(f"{spec.name}: {told}", flush=True)
        prove(shape, backend, device)
    return True


def prove(shape: HeadShape, backend: str, device: torch.device) -> None:
    """Run a decode and a chunk: what this version of FlashInfer needs beside those modules is built here."""
    attention = FlashInferAttention(shape, device, backend=backend)
    (cache,) = storage(1, 2, shape.page_tokens, shape.kv_heads, shape.head_dim, shape.dtype, device)
    attention.plan(lay_out([(3, [0])], [(0, 5, [1])], shape.page_tokens, device))
    query = torch.ones(6, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
    key = value = query[:, : shape.kv_heads]
    answer = attention.run(cache, query, key, value)
    if not answer[1:].float().sub(1).abs().max().item() < 0.01:  # an average of ones; the decode has two empty tokens
        raise RuntimeError(f"kernels for {shape} do not compute attention")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all are there, 3 when it has to be run again, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m gpu_backend.kernels", description="Build FlashInfer's kernels.")
    parser.add_argument("shapes", nargs="+", metavar="DTYPE:HEAD_DIM:GROUP", help="for example bfloat16:128:4")
    parser.add_argument("--backend", choices=("auto", "fa2", "fa3"), default="auto", help="of prefills")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no module after so many seconds")
    options = parser.parse_args(arguments)
    try:
        shapes = [parse(text) for text in options.shapes]
        return 0 if build(shapes, options.backend, options.seconds) else UNFINISHED
    except BadInput as error:
        print(f"kernels: error: {error}", file=sys.stderr)
    except RuntimeError as error:  # the compiler's own words
        print(f"kernels: error: FlashInfer could not build a module: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
