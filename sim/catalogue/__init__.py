"""The shipped catalogues: facts of published models and devices, each entry with its source in words."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

from sim.errors import BadInput, unknown

Kind = Literal["model", "device"]
_FILES: dict[Kind, str] = {"model": "models.toml", "device": "devices.toml"}


@cache
def entries(kind: Kind) -> Mapping[str, Mapping[str, Any]]:
    """Every entry of one catalogue by its name, in the file's order; read once."""
    text = (resources.files(__package__) / _FILES[kind]).read_text(encoding="utf-8")
    return MappingProxyType({name: MappingProxyType(entry) for name, entry in tomllib.loads(text).items()})


def entry(kind: Kind, name: str) -> dict[str, Any]:
    """The facts of the entry called `name`, or of the one that lists it as an alias; BadInput for any other name.

    A name that only starts several entries (``a100``) is ambiguous and is refused with the entries it could mean.
    """
    known = entries(kind)
    found = next((key for key, facts in known.items() if name == key or name in facts.get("aliases", ())), None)
    if found is None:
        begun = sorted(key for key in known if name and key.startswith(f"{name}-"))
        what = f"ambiguous {kind} {name!r}; one of {', '.join(begun)}" if begun else unknown(kind, name, known)
        raise BadInput(what, key=f"[{kind}] name")
    return {"name": found} | {key: value for key, value in known[found].items() if key != "aliases"}
