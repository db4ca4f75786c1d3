"""What is done of a sweep, a line each, so that a sweep that was killed goes on where it was.

The first line says of what. A line is written at once; one that was cut off by the end of the process is as good as not
there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sim.errors import BadInput

FILE = "points.jsonl"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a point: its results by column, or the reason why there are none.

    `seconds` is what it took; `again`: the reason is of the machine and not of the point.
    """

    point: int
    seconds: float
    results: dict[str, Any] | None = None
    reason: str | None = None
    again: bool = False


Outcomes = dict[int, Outcome]  # by point


@contextmanager
def journal(
    directory: Path, identity: dict[str, Any], *, resume: bool
) -> Iterator[tuple[Outcomes, Callable[[Outcome], None]]]:
    """What the journal in `directory` has of the sweep of that identity, and what adds to it.

    BadInput where the directory holds anything else, or another process has it.
    """
    try:
        if not resume and directory.exists() and any(directory.iterdir()):
            raise BadInput(f"{directory} is not empty; --resume goes on with a sweep", source="--out")
        if resume and directory.exists() and any(directory.iterdir()) and not (directory / FILE).exists():
            raise BadInput(f"{directory} holds no sweep to go on with, but other files", source="--resume")
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise BadInput(f"{directory}: {(error.strerror or str(error)).lower()}", source="--out") from None
    with open(handle, "r+b", buffering=0) as file:  # noqa: PTH123 - it is open
        if not _lock(handle):
            raise BadInput(f"another sweep is writing to {directory}", source="--out")
        first, outcomes, end = _read(file.readall())
        if first is not None and (other := _difference(first, identity)):
            raise BadInput(f"{directory} holds a sweep {other}", source="--resume")
        file.truncate(end)
        if first is None:
            file.write(_line(identity))
        yield outcomes, lambda outcome: _add(file.write, outcome)


@contextmanager
def nowhere() -> Iterator[tuple[Outcomes, Callable[[Outcome], None]]]:
    """A journal of what nobody keeps."""
    yield {}, lambda _: None


def _lock(handle: int) -> bool:
    """Lock an open file for as long as it is open; False if another process has it."""
    try:
        fcntl = import_module("fcntl")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, ModuleNotFoundError):  # a file system, or a system, without locks
        return True
    return True


def _add(write: Callable[[bytes], int | None], outcome: Outcome) -> None:
    write(_line(asdict(outcome)))


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _read(content: bytes) -> tuple[dict[str, Any] | None, Outcomes, int]:
    """The identity (None: not even that), the outcomes (of a point the last), and where what is whole ends."""
    end = content.rfind(b"\n") + 1
    identity, outcomes = None, {}
    for line in content[:end].splitlines():
        try:
            value = json.loads(line)
            if identity is None:
                identity = value
            else:
                outcomes[value["point"]] = Outcome(**value)
        except (ValueError, TypeError, KeyError):  # a disk that was full, say: it is run again
            if identity is None:
                identity = {}
    return identity, outcomes, end


def _difference(kept: dict[str, Any], identity: dict[str, Any]) -> str:
    """What the sweep that is kept has of its own, as far as it changes results; nothing: it is the same."""
    if not isinstance(kept, dict) or kept.keys() != identity.keys():
        return "of another version of servecast"
    if kept["version"] != identity["version"]:
        return f"of servecast {kept['version']}, and this is {identity['version']}"
    if kept["study"] != identity["study"]:
        return "of another study"
    if kept["scenario"] != identity["scenario"]:
        return "of another scenario, or of the scenario before it changed"
    for path, digest in identity["files"].items():
        if kept["files"].get(path) != digest:
            return f"that was begun before {path} changed"
    return "" if kept == identity else "of other files"
