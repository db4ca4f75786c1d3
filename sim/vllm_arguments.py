"""The arguments of a vLLM server, as its own parser takes them: names, prefixes, values."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from sim.errors import BadInput, shown, unknown

SOURCE = "from-vllm"
Values = dict[str, Any]  # name without dashes: a string, a list of them, or a bool


@cache
def known() -> dict[str, Any]:
    """The arguments that vLLM takes (`catalogue/vllm.toml`)."""
    return tomllib.loads((resources.files("sim.catalogue") / "vllm.toml").read_text(encoding="utf-8"))


def parse(words: Sequence[str]) -> Values:
    """The arguments by their long names: `--x y`, `--x=y`, underscores for dashes, short forms, `--no-x` of flags."""
    rest = list(words)
    for prefix in (["vllm"], ["serve"], ["python", "-m"], ["python3", "-m"], ["vllm.entrypoints.openai.api_server"]):
        if rest[: len(prefix)] == prefix:
            del rest[: len(prefix)]
    values: Values = {}
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if "model" in values:
                raise BadInput(f"{shown(word)} is not an argument; the model is {values['model']!r}", source=SOURCE)
            values["model"] = word
            continue
        head, equals, value = word.partition("=")
        name, takes = _argument(head)
        if isinstance(takes, bool):
            if equals:
                raise BadInput("takes no value", source=SOURCE, key=head)
            values[name] = takes
        elif equals:
            values[name] = value
        else:
            taken = [rest.pop(0)] if rest and _is_value(rest[0]) else []
            while takes == "many" and rest and _is_value(rest[0]):
                taken.append(rest.pop(0))
            if not taken:
                raise BadInput("needs a value", source=SOURCE, key=head)
            values[name] = taken[0]
    return values


def _is_value(word: str) -> bool:
    return not word.startswith("-") or bool(re.fullmatch(r"-\d+(\.\d+)?", word))


def _argument(head: str) -> tuple[str, bool | str]:
    """The long name of an argument, and what it takes: "one" value, "many", or none and then what it says."""
    kinds = known()
    if head.startswith("--"):
        name = head[2:].partition(".")[0].rstrip("+").replace("_", "-")  # a key of a JSON argument goes after a dot
    else:
        short = head[1:].partition(".")[0].rstrip("+")
        name = kinds["short"].get(short, "optimization-level" if re.fullmatch(r"O\d", short) else "")
        if re.fullmatch(r"O\d", short):
            return name, True
    for many, takes in (("lists", "many"), ("values", "one")):
        if any(name in kinds[f"{who}{many}"] for who in ("", "server_", "former_") if f"{who}{many}" in kinds):
            return name, takes
    for flag in (*kinds["flags"], *kinds["server_flags"], *kinds["former_flags"]):
        if name == flag:
            return flag, True
        if name and name in (f"no-{flag}", _inverse(flag)):
            return flag, False
    every = [f"--{name}" for who, names in kinds.items() if isinstance(names, list) for name in names]
    told = unknown("argument of vLLM", head.replace("_", "-"), every).partition("; known:")[0]
    raise BadInput(told, source=SOURCE)


def _inverse(flag: str) -> str:
    """vLLM pairs --enable-x with --disable-x."""
    for one, other in (("enable-", "disable-"), ("disable-", "enable-")):
        if flag.startswith(one):
            return other + flag.removeprefix(one)
    return ""


def whole(name: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise BadInput(f"{shown(text)} must be a whole number of at least 1", source=SOURCE, key=f"--{name}")
    return int(text)


def tokens(name: str, text: str) -> int:
    """A whole number, with vLLM's units: 1k is 1,000 and 1K is 1,024; -1 or auto for the longest model length."""
    if name == "max-model-len" and text.lower() in ("-1", "auto"):
        return -1
    if not (found := re.fullmatch(r"(\d{1,15})(\.\d{1,9})?([kmgtKMGT])?", text)) or (
        found[2] and found[3] not in [*"kmgt"]
    ):
        raise BadInput(f"{shown(text)} must be a number like 8192, 8k or 8K", source=SOURCE, key=f"--{name}")
    unit = found[3] or ""
    power = "kmgt".find(unit.lower()) + 1 if unit else 0
    value = int(float(found[1] + (found[2] or "")) * (1000 if unit.islower() else 1024) ** power)
    if not value:
        raise BadInput("0 must be at least 1", source=SOURCE, key=f"--{name}")
    return value


def share(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1 or (value == 0 and name != "watermark") or (value == 1 and name == "watermark"):
        raise BadInput(f"{shown(text)} must be a share of 1", source=SOURCE, key=f"--{name}")
    return value
