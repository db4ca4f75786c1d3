"""Result files: they appear whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sim import bench
from sim.errors import BadInput
from sim.report import Report

if TYPE_CHECKING:
    import polars as pl

    from sim.explain import Explanation

Files = Mapping[str, bytes]


def as_json(value: Any) -> str:
    """Strict JSON: no NaN, keys in the order they were made."""
    return json.dumps(value, allow_nan=False, indent=2, ensure_ascii=False) + "\n"


def of_run(report: Report) -> dict[str, bytes]:
    """The files of one run; `vllm_bench.json` where it kept its tokens."""
    files = {
        "requests.parquet": _parquet(report.requests),
        "steps.parquet": _parquet(report.steps),
        "gaps.parquet": _parquet(report.gaps),
        "summary.json": as_json(report.summary).encode(),
        "scenario.toml": report.plan.scenario.to_toml().encode(),
    }
    return files | {"vllm_bench.json": bench.of_run(report)} if report.record.tokens is not None else files


def of_explanation(why: Explanation) -> dict[str, bytes]:
    """The files of an explanation."""
    return {
        "gaps.parquet": _parquet(why.gaps),
        "ttfts.parquet": _parquet(why.ttfts),
        "iterations.parquet": _parquet(why.iterations),
        "explanation.json": as_json(why.summary).encode(),
    }


def prepare(directory: Path | None, source: str = "--out") -> None:
    """Refuse a directory that could not be written to, before the work is done and not after."""
    if directory is None:
        return
    try:
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    except OSError as error:
        raise BadInput((error.strerror or str(error)).lower(), source=source) from None
    if not there.is_dir():
        raise BadInput(f"{there} is not a directory", source=source)
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"{there} cannot be written to", source=source)


def prepare_file(path: Path | None, source: str) -> None:
    """Refuse a file that could not be written, likewise."""
    if path is None:
        return
    prepare(path.absolute().parent, source)
    if path.is_dir():
        raise BadInput(f"{path} is a directory; name a file", source=source)


def write(directory: Path, files: Files) -> None:
    """Write files (their names may hold folders): all of them are written aside before the first is put in place."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as aside:
            staged = {name: Path(aside) / str(number) for number, name in enumerate(files)}
            for name, path in staged.items():
                path.write_bytes(files[name])
            for name, path in staged.items():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                path.replace(directory / name)
    except OSError as error:
        raise BadInput(f"{directory}: {(error.strerror or str(error)).lower()}", source="--out") from None


@contextmanager
def stream(path: Path, source: str) -> Iterator[BinaryIO]:
    """A file to write a piece at a time, gzipped if it is called *.gz; in place once all of it is written, or never."""
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".writing-") as aside:
            staged = Path(aside) / "file"
            with staged.open("wb") as raw:
                if path.suffix == ".gz":  # no name and no time in it: same content, same bytes
                    with gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as file:
                        yield file  # type: ignore[misc]
                else:
                    yield raw
            staged.replace(path)
    except OSError as error:
        raise BadInput(f"{path}: {(error.strerror or str(error)).lower()}", source=source) from None


def _parquet(frame: pl.DataFrame) -> bytes:
    buffer = BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()
