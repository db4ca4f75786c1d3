"""Settings given beside a scenario file (`--set`, `--rate`, …), and errors of either in the user's own terms."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sim.errors import BadInput, shown, unknown
from sim.table import LARGEST

LONGEST_SETTING = 4096  # characters, as of a path
KINDS = {"kind"}  # a key of this name chooses which keys its table has


@dataclass(frozen=True, slots=True)
class Setting:
    """`path` (dotted) is to be `value`, because `option` says so."""

    path: str
    value: Any
    option: str = "--set"


def parse(text: str) -> Setting:
    """One `key.path=value`: the value is TOML, and a bare word is a string."""
    if len(text) > LONGEST_SETTING or any("\ud800" <= character <= "\udfff" for character in text):
        raise BadInput(f"{shown(text)} must be UTF-8 of at most {LONGEST_SETTING} characters", source="--set")
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path or not all(path.split(".")):
        raise BadInput(f"{shown(text)} must be key.path=value", source="--set")
    return Setting(path, _value(value.strip()))


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or an integer of more digits than Python reads
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


def describe(error: ValidationError, data: Any) -> tuple[str, str]:
    """The first thing wrong with `data`, as (`[table] key`, what and which limit)."""
    wrong = error.errors(include_url=False)
    first = min(wrong, key=lambda e: e["type"] == "missing")
    what = _what(first)
    for other in wrong:  # of a union, a word that would do as well
        if other is not first and other["type"] == "literal_error" and other["loc"][:-1] == first["loc"][:-1]:
            what += f" or {other['ctx']['expected']}"
    where, value = [], data
    for part in first["loc"]:  # which also names kinds, members of unions and places in arrays
        if isinstance(value, dict) and part in value:
            where.append(str(part))
            value = value[part]
    key = first.get("ctx", {}).get("key")
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        key = first["loc"][-1]
    elif first["type"].startswith("union_tag"):
        key = "kind"
    elif key is None and where and not (isinstance(value, dict) and first["type"] == "value_error"):
        key = where.pop()
    if not where:
        return f"[{key or 'scenario'}]", what
    return f"[{'.'.join(where)}]" + (f" {key}" if key else ""), what


def _what(error: ErrorDetails) -> str:
    kind, value, message, told = error["type"], error["input"], error["msg"], error.get("ctx", {})
    if kind == "missing":
        place = error["loc"][-1]
        return "required" if isinstance(place, str) else f"{shown(value)} of too few items: at least {place + 1} needed"
    if kind == "union_tag_invalid":
        kinds = [name.strip("' ") for name in str(told.get("expected_tags")).split(",")]
        return unknown("kind", str(told.get("tag")), kinds)
    if kind == "union_tag_not_found":
        return "required"
    if kind == "literal_error":
        return f"unknown {shown(value)}; known: {told.get('expected')}"
    if kind in ("unknown_key", "slo"):
        return message
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind == "float_type" and isinstance(value, int) and not isinstance(value, bool):
        return f"{shown(value)} must be from {-LARGEST:g} to {LARGEST:g}"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return f"{shown(value)} must be a table"
    if message.startswith("Input should be"):
        return f"{shown(value)} must be{message.removeprefix('Input should be')}"
    return f"{shown(value)}: {message[0].lower()}{message[1:]}"
