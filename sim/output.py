"""Result files: they appear whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import BadInput
from sim.report import Report

if TYPE_CHECKING:
    import polars as pl

Files = Mapping[str, bytes]


def as_json(value: Any) -> str:
    """Strict JSON: no NaN, keys in the order they were made."""
    return json.dumps(value, allow_nan=False, indent=2, ensure_ascii=False) + "\n"


def of_run(report: Report) -> dict[str, bytes]:
    """The files of one run; `stages.parquet` only where a pipeline has several."""
    stages = {"stages.parquet": _parquet(report.stages)} if len(report.stages) else {}
    return {
        "requests.parquet": _parquet(report.requests),
        "steps.parquet": _parquet(report.steps),
        "gaps.parquet": _parquet(report.gaps),
        **stages,
        "summary.json": as_json(report.summary).encode(),
        "scenario.toml": report.plan.scenario.to_toml().encode(),
    }


def prepare(directory: Path | None) -> None:
    """Refuse a directory that could not be written to, before the work is done and not after."""
    if directory is None:
        return
    try:
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    except OSError as error:
        raise BadInput((error.strerror or str(error)).lower(), source="--out") from None
    if not there.is_dir():
        raise BadInput(f"{there} is not a directory", source="--out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"{there} cannot be written to", source="--out")


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


def _parquet(frame: pl.DataFrame) -> bytes:
    buffer = BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()
