"""A scenario: strict TOML in, the same TOML out, every default filled in."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, PrivateAttr, ValidationError

from sim import schema
from sim.affine import AffineTable
from sim.errors import BadInput, shown
from sim.hardware import DeviceTable, ModelTable
from sim.policies import POLICIES
from sim.profile import AUTO, ProfileTable, shipped
from sim.settings import Setting, apply, describe
from sim.table import Table, one_of
from sim.workload import WorkloadTable

PATHS = ("path", "hf_config", "weights")  # keys that name files
LARGEST_FILE = 1 << 17  # bytes; a scenario is a page of text
LONGEST_LINE = 8192  # characters; the time that tomllib takes grows with the square of a dotted key
PolicyName = Annotated[str, one_of("policy", POLICIES)]


class Scenario(Table):
    """What to run. `Scenario.load` reads one from a file; `with_` makes a variation; `to_toml` writes it back."""

    name: str = ""
    model: ModelTable | None = None
    device: DeviceTable | None = None
    deployment: schema.DeploymentTable = Field(default_factory=schema.DeploymentTable)
    engine: schema.EngineTable = Field(default_factory=schema.EngineTable)
    scheduler: schema.SchedulerTable = Field(default_factory=schema.SchedulerTable)
    policy: dict[PolicyName, schema.PolicyTable] = Field(default_factory=dict)
    latency: schema.Latency
    workload: WorkloadTable
    slo: schema.SloTable = Field(default_factory=lambda: schema.SloTable({}))
    metrics: schema.MetricsTable = Field(default_factory=schema.MetricsTable)
    cost: schema.CostTable = Field(default_factory=schema.CostTable)
    torch: schema.TorchTable = Field(default_factory=schema.TorchTable)
    _directory: Path = PrivateAttr(default_factory=Path.cwd)
    _source: str = PrivateAttr(default="scenario")
    _settings: tuple[Setting, ...] = PrivateAttr(default=())
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def load(cls, path: str | Path, settings: Sequence[Setting] = ()) -> Scenario:
        """Read a file and apply `settings` to it, in order. BadInput names the file, or the option that set the key."""
        path = Path(path)
        data = read_toml(path, "scenario", LARGEST_FILE)
        data.setdefault("name", path.stem.encode(errors="replace").decode())
        return cls._build(data, path.resolve().parent, str(path), settings)

    @classmethod
    def from_toml(cls, text: str, directory: str | Path = ".") -> Scenario:
        """Read a scenario from text; its relative paths are relative to `directory`."""
        return cls._build(parse_toml(text, "scenario"), Path(directory).resolve(), "scenario", ())

    @classmethod
    def _build(
        cls,
        data: dict[str, Any],
        directory: Path,
        source: str,
        new: Sequence[Setting],
        old: Sequence[Setting] = (),
        notes: Sequence[str] = (),
        *,
        check: bool = True,
    ) -> Scenario:
        new = [_found(setting, directory) for setting in new]
        settings = (*old, *new)
        notes = (*notes, *apply(data, new))
        try:
            scenario = cls.model_validate(data)
        except ValidationError as error:
            key, what = describe(error, data)
            raise BadInput(what, source=_source_of(key, source, settings, what == "required"), key=key) from None
        scenario._directory = directory
        scenario._source = source
        scenario._settings = settings
        scenario._notes = notes
        if check:
            scenario.check()
        return scenario

    def with_(self, **changes: Any) -> Scenario:
        """A variation: keys are dotted paths with `__` for the dots, `with_(workload__arrivals__rate=3.0)`."""
        return self.vary([Setting(key.replace("__", "."), value, "with_") for key, value in changes.items()])

    def vary(self, settings: Sequence[Setting], *, check: bool = True) -> Scenario:
        """A variation by settings; without `check` one whose keys are valid, each by itself."""
        old = self._settings
        return self._build(self._data(), self._directory, self._source, settings, old, self._notes, check=check)

    def for_policy(self, policy: str) -> Scenario:
        """This scenario under `policy`, with the keys of its [policy] table in place."""
        data = self._data()
        own = data.pop("policy", {}).get(policy, {})
        data["scheduler"]["policy"] = policy
        for key, value in own.items():
            data["scheduler" if key in schema.SchedulerTable.model_fields else "engine"][key] = value
        return self._build(data, self._directory, self._source, (), self._settings, self._notes)

    @property
    def directory(self) -> Path:
        """What relative paths are relative to."""
        return self._directory

    @property
    def source(self) -> str:
        """The file it came from, as the user named it."""
        return self._source

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to it that the user should know."""
        return self._notes

    def noting(self, what: str) -> Scenario:
        """The same, with one more thing that the user should know."""
        return self._build(self._data(), self._directory, self._source, (), self._settings, (*self._notes, what))

    def to_toml(self, *, derived: bool = True) -> str:
        """The scenario as run: every default filled in, paths absolute.

        `derived` defaults follow from other keys; without them the text is one to make variations of.
        """
        data = self._data()
        for engine in (data["engine"], *data.get("policy", {}).values()):
            if derived and self.engine.max_batch_tokens is None and "max_model_tokens" in engine:
                engine.setdefault("max_batch_tokens", engine["max_model_tokens"])
        data["engine"] = {key: data["engine"][key] for key in schema.EngineTable.model_fields if key in data["engine"]}
        for table in (data["workload"]["arrivals"], data["workload"]["lengths"], data.get("model", {}), data["torch"]):
            for key in PATHS:
                if key in table:
                    table[key] = str((self._directory / table[key]).resolve())
        latency = self.latency
        if isinstance(latency, ProfileTable) and latency.name not in (AUTO, *shipped()):
            files = (folder / latency.name for folder in (self._directory, Path()))
            data["latency"]["name"] = next((str(file.resolve()) for file in files if _exists(file)), latency.name)
        return tomli_w.dumps(data)

    def blame(self, error: BadInput) -> BadInput:
        """The error with the place its key came from, where it does not say."""
        return error.within(source=_source_of(error.key, self._source, self._settings))

    def _data(self) -> dict[str, Any]:
        data = self.model_dump(exclude_none=True)
        return {key: value for key, value in data.items() if value != {}}

    def check(self) -> None:
        """What no single key can tell. BadInput for what cannot be run."""
        for table, given in (("model", self.model), ("device", self.device)):
            needless = isinstance(self.latency, AffineTable) and self.engine.num_blocks is not None
            if given is None and not needless:
                why = 'required; only with latency.kind = "affine" and engine.num_blocks may it be left out'
                raise self.blame(BadInput(why, key=f"[{table}]"))
        if isinstance(self.latency, AffineTable) and self.latency.step + self.latency.token <= 0:
            raise self.blame(
                BadInput("step + token must be greater than 0: an iteration takes time", key="[latency] step")
            )
        batch, longest = self.engine.max_batch_tokens, self.engine.max_model_tokens
        if self.scheduler.policy == "prefill-first" and batch is not None and batch < longest:
            what = f"{batch} must be at least max_model_tokens = {longest}: prefill-first takes whole prompts"
            raise self.blame(BadInput(what, key="[engine] max_batch_tokens"))


def _found(setting: Setting, directory: Path) -> Setting:
    """A relative path from the command line: the scenario's folder goes first, as in the file, then the current one."""
    key, value = setting.path.rpartition(".")[2], setting.value
    if key in PATHS and isinstance(value, str) and not _exists(directory / value) and _exists(Path(value)):
        return replace(setting, value=str(Path(value).resolve()))
    return setting


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, say; whoever reads the file says so
        return False


def _source_of(key: str | None, source: str, settings: Sequence[Setting], missing: bool = False) -> str:
    """The option that set a key (or its table, or a part of it; or the kind that makes a missing one required), or the
    file."""
    path = ".".join((key or "").replace("[", "").replace("]", "").split()) if key else ""
    for setting in reversed(settings):
        own, table = setting.path + ".", path.rpartition(".")[0]
        if path and (own.startswith(path + ".") or (path + ".").startswith(own)):
            return setting.option
        if missing and setting.path == f"{table}.kind":
            return setting.option
    return source


def read_toml(path: Path, kind: str, largest: int) -> dict[str, Any]:
    """The tables of a TOML file that a user wrote, a `kind` of at most `largest` bytes. BadInput for anything else."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise BadInput("is not a regular file", source=str(path))
        with path.open("rb") as file:
            raw = file.read(largest + 1)
    except OSError as error:
        raise BadInput(_reason(error), source=str(path)) from None
    except ValueError as error:  # a NUL in the name
        raise BadInput(str(error), source=shown(str(path))) from None
    if len(raw) > largest:
        raise BadInput(f"larger than {largest} bytes: not a {kind}", source=str(path))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"not UTF-8: byte {raw[error.start]:#04x} at position {error.start}", source=str(path)) from None
    return parse_toml(text, str(path), kind)


def parse_toml(text: str, source: str, kind: str = "scenario") -> dict[str, Any]:
    """The tables of a TOML text. BadInput names `source` and, for a line that is too long, its number."""
    for row, line in enumerate(text.split("\n"), start=1):
        if len(line) > LONGEST_LINE:
            raise BadInput(f"longer than {LONGEST_LINE} characters: not a {kind}", source=source, key=f"line {row}")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, or an integer of more digits than Python reads
        raise BadInput(f"not TOML: {error}", source=source) from None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
