"""The size of the house: a file is one concept, a function one step."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for package in ("sim", "calibrate", "gpu_backend") for path in sorted((ROOT / package).glob("**/*.py"))]
LINES, STEPS = 400, 60


def test_no_file_or_function_is_too_long() -> None:
    long = [str(path.relative_to(ROOT)) for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > LINES]
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= STEPS:
                long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert len(FILES) > 100
    assert long == []
