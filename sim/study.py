"""A study: a scenario and axes, as strict TOML. Every point of it is a variation of the scenario.

scenario = "chat-mistral-7b.toml"   # relative to the study
what = "run"                        # or "capacity"
[set]                               # for all points, as --set
"workload.requests" = 500
[grid]                              # every value of every axis with every other
"scheduler.token_budget" = [256, 512, 1024]
[[list]]                            # and with every point of a list
"model.name" = "llama-3.1-8b"
"device.name" = "h100-sxm"
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError

from sim.capacity import check as check_capacity
from sim.errors import BadInput, shown
from sim.profile import AUTO, ProfileTable, shipped
from sim.scenario import PATHS, Scenario, parse_toml, read_toml
from sim.schema import PolicyTable
from sim.settings import Setting, describe
from sim.table import Table

LARGEST_FILE = 1 << 22  # bytes
MOST_POINTS = 100_000  # each is a line of some kilobytes in the journal
SECTIONS = ("[set]", "[list]", "[grid]")
Values = dict[str, Any]  # by dotted key of the scenario


class SearchTable(Table):
    """[capacity]: how every point is searched, as the options of `servecast capacity`."""

    tolerance: Annotated[float, Field(ge=1e-6, lt=1)] = 0.01
    seeds: Annotated[int, Field(ge=1, le=1000)] = 5


class StudyTable(Table):
    """A study file. [set], [grid] and [[list]] have keys of the scenario, dotted or in tables."""

    name: str = ""
    scenario: Annotated[str, Field(min_length=1)]
    what: Literal["run", "capacity"] = "run"
    fixed: dict[str, Any] = Field(default_factory=dict, alias="set")
    grid: dict[str, Any] = Field(default_factory=dict)
    listed: list[dict[str, Any]] = Field(default_factory=list, alias="list")
    capacity: SearchTable | None = None


@dataclass(frozen=True)
class Study:
    """A study whose every point has been checked, key by key.

    `base` is its scenario, `fixed` what is set for all points. `axes` maps the keys that vary to the section that
    they are in; a point has a value for some or all of them. `files` are those that the points name.
    """

    name: str
    source: str
    what: str
    search: SearchTable | None
    base: Scenario
    fixed: Sequence[Setting]
    grid: Mapping[str, Sequence[Any]]
    listed: Sequence[Values]
    files: frozenset[Path] = frozenset()

    @classmethod
    def load(cls, path: str | Path, settings: Sequence[Setting] = ()) -> Study:
        """Read a study and check all of its points; `settings` go over its [set]. BadInput names file, key and limit.

        What only keys together can be wrong in (a model that does not fit its device) is not looked at here.
        """
        path = Path(path)
        return cls.of(_table(read_toml(path, "study", LARGEST_FILE), str(path)), path, settings)

    @classmethod
    def from_toml(cls, text: str, directory: str | Path = ".") -> Study:
        """Read a study from text, as `load`; its relative paths are relative to `directory`."""
        path = Path(directory) / "study"
        return cls.of(_table(parse_toml(text, str(path), "study"), str(path)), path)

    @classmethod
    def of(cls, table: StudyTable, path: Path, settings: Sequence[Setting] = (), base: Scenario | None = None) -> Study:
        """The study that a table at `path` says, of the scenario that it names where `base` is not given."""
        try:
            fixed, grid = _flat(table.fixed, "[set]"), _grid(table.grid)
            listed = [_flat(point, "[list]") for point in table.listed]
            _check_axes(fixed, grid, listed, settings)
        except BadInput as error:
            raise error.within(source=str(path)) from None
        base = base or Scenario.load(os.path.normpath(path.parent / table.scenario))
        folders = (path.resolve().parent, base.directory)
        own = [Setting(key, _located(key, value, *folders), "[set]") for key, value in fixed.items()]
        given = [replace(one, value=_located(one.path, one.value, base.directory, Path.cwd())) for one in settings]
        search = table.capacity or SearchTable() if table.what == "capacity" else None
        name = table.name or path.stem.encode(errors="replace").decode()
        study = cls(name, str(path), table.what, search, base, (*own, *given), grid, listed)
        return replace(study, files=study._checked())

    @cached_property
    def axes(self) -> dict[str, str]:
        """What varies, list before grid, in the order of the file."""
        return {key: "[list]" for point in self.listed for key in point} | dict.fromkeys(self.grid, "[grid]")

    @cached_property
    def points(self) -> list[Values]:
        """All points in order: the list outermost, the last axis of the grid innermost."""
        grid = [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]
        return [point | values for point in self.listed or [{}] for values in grid]

    def settings(self, point: Values) -> list[Setting]:
        """What makes the base scenario that of a point. An axis goes over [policy] tables, or it would not be one."""
        told = [Setting(key, _located(key, value, *self._folders), self.axes[key]) for key, value in point.items()]
        own = [key.rpartition(".")[2] for key in point if key.startswith(("engine.", "scheduler."))]
        given = [setting.path.split(".")[1] for setting in self.fixed if setting.path.startswith("policy.")]
        cleared = [
            Setting(f"policy.{policy}.{key}", None, "[policy]")
            for policy in dict.fromkeys((*self.base.policy, *given))
            for key in own
            if key in PolicyTable.model_fields
        ]
        return [*self.fixed, *cleared, *told]

    def to_toml(self, scenario: str) -> str:
        """The study as run, every default filled in; `scenario` is the name of the scenario's file beside it."""
        head = {"name": self.name, "scenario": scenario, "what": self.what}
        fixed = {setting.path: setting.value for setting in self.fixed}
        grid = {key: [_located(key, value, *self._folders) for value in values] for key, values in self.grid.items()}
        listed = [{key: _located(key, value, *self._folders) for key, value in point.items()} for point in self.listed]
        tables = {"set": fixed, "grid": grid, "list": listed}
        search = {"capacity": self.search.model_dump()} if self.search else {}
        return tomli_w.dumps(head | {key: value for key, value in tables.items() if value} | search)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a result depends on, part by part: the study, its scenario, and the files that either names."""
        search = self.search.model_dump() if self.search else None
        fixed = [(setting.path, setting.value) for setting in self.fixed]
        study = [self.what, search, fixed, list(self.grid.items()), self.listed]
        return {
            "study": _sha256(json.dumps(study, default=str).encode()),
            "scenario": _sha256(self.base.model_dump_json(exclude_none=True).encode()),
            "files": {str(path): digest(path) for path in sorted(self.files)},
        }

    @cached_property
    def _folders(self) -> tuple[Path, Path]:
        """Where relative paths are looked for: beside the study, then beside the scenario."""
        return Path(self.source).resolve().parent, self.base.directory

    def _checked(self) -> frozenset[Path]:
        """The files that the points name. BadInput for a key or a value that no scenario has."""
        files: set[Path] = set()
        for point in self.points:
            try:
                scenario = self.base.vary(self.settings(point), check=False)
                if self.what == "capacity":
                    check_capacity(scenario)
            except BadInput as error:
                raise _told(error, self.source) from None
            files.update(files_of(scenario))
        return frozenset(files)


def files_of(scenario: Scenario) -> Iterator[Path]:
    """The files that a scenario names and its result depends on: traces, a model's config, a profile."""
    arrivals, lengths, latency = scenario.workload.arrivals, scenario.workload.lengths, scenario.latency
    named = [getattr(part, "path", None) for part in (arrivals, lengths)]
    named.append(scenario.model.hf_config if scenario.model else None)
    if isinstance(latency, ProfileTable) and latency.name not in (AUTO, *shipped()):
        named.append(latency.name)
    yield from ((scenario.directory / name).resolve() for name in named if name and "\0" not in name)


def digest(path: Path) -> str:
    """SHA-256 of a file; empty for none."""
    try:
        stat = path.stat()
        return _digest(path, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return ""


@lru_cache(maxsize=1024)
def _digest(path: Path, _modified: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def reason(error: BadInput, scenario: Scenario) -> str:
    """Why a point cannot be run, in words that do not depend on where the study is."""
    told = _told(error, None)
    return str(BadInput(told.what, source=None if told.source == scenario.source else told.source, key=told.key))


def _told(error: BadInput, source: str | None) -> BadInput:
    """An error of a scenario in terms of the study whose section set the key."""
    if error.source not in SECTIONS:
        return error
    path = ".".join((error.key or "").replace("[", "").replace("]", "").split())
    return BadInput(error.what, source=source, key=f"{error.source} {path}".strip())


def _table(data: dict[str, Any], source: str) -> StudyTable:
    try:
        table = StudyTable.model_validate(data)
    except ValidationError as error:
        key, what = describe(error, data)
        raise BadInput(what, source=source, key=key) from None
    if table.capacity is not None and table.what != "capacity":
        raise BadInput('only with what = "capacity"', source=source, key="[capacity]")
    return table


def _flat(table: Mapping[str, Any], section: str) -> Values:
    """Values by dotted key: tables are gone into, and an empty one is a value."""
    values: Values = {}

    def go(part: Mapping[str, Any], above: str) -> None:
        for name, value in part.items():
            key = f"{above}{name}"
            if not all(key.split(".")):
                raise BadInput(f"{shown(key)} must be a key of the scenario, such as scheduler.policy", key=section)
            if isinstance(value, dict) and value:
                go(value, f"{key}.")
            elif key in values:
                raise BadInput("given twice", key=f"{section} {key}")
            else:
                values[key] = value

    go(table, "")
    return values


def _grid(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The axes of a grid: arrays of different values."""
    axes = _flat(table, "[grid]")
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise BadInput(f"{shown(values)} must be an array of one value or more", key=f"[grid] {key}")
        _check_different(values, f"[grid] {key}")
    return axes


def _check_different(values: Iterable[Any], key: str) -> None:
    seen = set()
    for value in values:
        text = json.dumps(value, sort_keys=True, default=str)
        if text in seen:
            raise BadInput(f"{text if len(text) <= 60 else text[:57] + '...'} is there twice", key=key)
        seen.add(text)


def _check_axes(
    fixed: Values, grid: Mapping[str, Sequence[Any]], listed: Sequence[Values], settings: Sequence[Setting]
) -> None:
    """BadInput for no points, too many, the same twice, or a key that is set in two places."""
    _check_different(listed, "[list]")
    points = math.prod(len(values) for values in grid.values()) * max(1, len(listed))
    if points > MOST_POINTS:
        raise BadInput(f"{points:,} points must be at most {MOST_POINTS:,}", key="[grid]")
    if not grid and not any(listed):
        raise BadInput("required, unless there is a [[list]]", key="[grid]")
    axes = {key: "[list]" for point in listed for key in point}
    for key in grid:
        _check_apart(key, axes, key=f"[grid] {key}")
        axes[key] = "[grid]"
    for key in fixed:
        _check_apart(key, axes, key=f"[set] {key}")
    for setting in settings:
        if isinstance(setting.value, dict) and setting.value:  # which [set] takes key by key
            raise BadInput("a table; set its keys one by one", source=setting.option, key=setting.path)
        _check_apart(setting.path, axes, source=setting.option, key=setting.path)


def _check_apart(path: str, axes: Mapping[str, str], **place: str) -> None:
    """`path` neither is an axis, nor holds one, nor is a part of one: a column would not say what was run."""
    for axis, section in axes.items():
        if f"{path}.".startswith(f"{axis}.") or f"{axis}.".startswith(f"{path}."):
            raise BadInput(f"{axis} is an axis of {section} already", **place)


def _located(key: str, value: Any, *folders: Path) -> Any:
    """A value with the relative paths in it made absolute, in the first of the folders that has such a file."""
    if isinstance(value, dict):
        return {name: _located(f"{key}.{name}", part, *folders) for name, part in value.items()}
    names_file = key.rpartition(".")[2] in PATHS or (key == "latency.name" and str(value).endswith(".toml"))
    if not names_file or not isinstance(value, str):
        return value
    try:
        return next((str(folder / value) for folder in folders if (folder / value).exists()), value)
    except (OSError, ValueError):  # no name of a file: whoever reads it says so
        return value
