"""The size of the house: a file is one concept, a function one step."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for package in ("sim", "calibrate", "gpu_backend") for path in sorted((ROOT / package).glob("**/*.py"))]
LINES, STEPS = 400, 60
DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_no_file_or_function_is_too_long() -> None:
    long = [str(path.relative_to(ROOT)) for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > LINES]
    for path in FILES:
        functions = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, DEFS))
        long.extend(f"{path.name} {one.name}" for one in functions if (one.end_lineno or 0) - one.lineno >= STEPS)
    assert len(FILES) > 100
    assert long == []
