"""Settings given beside a scenario file (`--set`, `--rate`, …), and errors of either in the user's own terms."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sim.errors import BadInput

KINDS = {"kind"}  # a key of this name chooses which keys its table has


@dataclass(frozen=True, slots=True)
class Setting:
    """`path` (dotted) is to be `value`, because `option` says so."""

    path: str
    value: Any
    option: str = "--set"


def parse(text: str) -> Setting:
    """One `key.path=value`: the value is TOML, and a bare word is a string."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path or not all(path.split(".")):
        raise BadInput(f"{text!r} must be key.path=value", source="--set")
    return Setting(path, _value(value.strip()))


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def apply(data: dict[str, Any], settings: Iterable[Setting]) -> list[str]:
    """Put the settings into a scenario's tables; return what else that changed.

    Kinds go first, whatever the order: a new kind drops the keys that only the old one had.
    """
    ordered = sorted(settings, key=lambda setting: setting.path.rpartition(".")[2] not in KINDS)
    return [note for setting in ordered if (note := _put(data, setting))]


def _put(data: dict[str, Any], setting: Setting) -> str | None:
    *tables, key = setting.path.split(".")
    table = data
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise BadInput(f"{setting.path} goes through {name!r}, which is not a table", source=setting.option)
    old = table.get(key)
    table[key] = setting.value
    if key not in KINDS or old is None or old == setting.value:
        return None
    dropped = [other for other in table if other != key]
    for other in dropped:
        del table[other]
    return f"{setting.option} {setting.path}={setting.value} drops {', '.join(dropped)}" if dropped else None


def describe(error: ValidationError) -> tuple[str, str]:
    """The first thing wrong, as (`[table] key`, what and which limit)."""
    first = min(error.errors(include_url=False), key=lambda e: e["type"] == "missing")
    where = [str(part) for part in first["loc"] if part != "[key]"]  # pydantic's mark for a key of a table of tables
    for kind in {str(first.get("ctx", {}).get("tag", "")), *_tags(where)}:
        if kind in where:
            where.remove(kind)
    if "key" in first.get("ctx", {}):
        where.append(str(first["ctx"]["key"]))
    *tables, key = where or ["scenario"]
    return (f"[{'.'.join(tables)}] {key}" if tables else f"[{key}]"), _what(first)


def _tags(where: list[str]) -> set[str]:
    """The kinds that pydantic puts into the place of an error, between a table and its key."""
    return {part for before, part in pairwise(where) if before in ("arrivals", "lengths", "latency")}


def _what(error: ErrorDetails) -> str:
    kind, value, message = error["type"], error["input"], error["msg"]
    shown = repr(value) if not isinstance(value, dict | list) else "a table" if isinstance(value, dict) else "an array"
    if len(shown) > 60:
        shown = shown[:57] + "..."
    if kind == "missing":
        return "required"
    if kind in ("union_tag_invalid", "literal_error"):
        expected = str(error.get("ctx", {}).get("expected_tags") or error.get("ctx", {}).get("expected"))
        return f"unknown {shown}; known: {expected}"
    if kind == "union_tag_not_found":
        return "kind is required"
    if kind in ("unknown_key", "slo"):
        return message
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"{shown}: {message[0].lower()}{message[1:]}".replace("input should be", "must be")
