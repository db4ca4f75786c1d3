"""Result files, read back: what `--out DIR` kept. BadInput names the file, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import polars as pl
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from sim.errors import BadInput, shown
from sim.report import stages_of

LARGEST = 1 << 27  # bytes of a JSON file


class Distribution(TypedDict):
    n: int
    mean: float | None
    min: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class Verdict(TypedDict):
    limit: float
    value: float | None
    met: bool


class Summary(TypedDict):
    """What a page needs of summary.json; there is more in it."""

    name: str
    policy: str
    offered: int
    completed: int
    unfinished: int
    refused: dict[str, int]
    duration_s: float | None
    iterations: int
    preemptions: int
    request_throughput: float | None
    output_throughput: float | None
    kv_blocks: int
    kv_peak: int
    busy_s: float
    bubble_fraction: float | None
    mfu: float | None
    mbu: float | None
    ttft_s: Distribution
    tbt_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    scheduling_delay_s: Distribution
    slo: dict[str, Verdict]
    attainment: float | None
    goodput: float | None
    time_share: dict[str, float] | None
    times_from: str
    notes: list[str]


class _Comparison(TypedDict):
    results: list[Summary]


class _Trial(TypedDict):
    rate: float
    met: bool
    limited_by: str | None
    stopped: bool
    values: dict[str, float | None]


class _Capacity(TypedDict):
    policy: str
    rate: float
    interval: tuple[float, float] | None
    limited_by: str | None
    trials: list[_Trial]
    seeds: dict[str, float]
    notes: list[str]


class _Capacities(TypedDict):
    results: list[_Capacity]


class _Sensitivity(TypedDict):
    load: dict[str, float | None]
    gpu_hour: dict[str, float | None]
    slo: dict[str, dict[str, Any]]


class _Cost(TypedDict):
    name: str
    policy: str
    per_million_output_tokens: float | None
    per_million_tokens: float | None
    interval_per_million_output_tokens: list[float | None] | None
    rate: float
    rate_from: str
    limited_by: str | None
    devices: int
    gpu_hour: float
    mean_output_tokens: float
    mean_prompt_tokens: float
    sensitivity: _Sensitivity
    notes: list[str]


class _Metric(TypedDict):
    metric: str
    measured_s: float | None
    simulated_s: float | None
    noise: float | None
    error: float | None
    error_anchored: float | None


class _Alignment(TypedDict):
    iterations_measured: int


class _Attribution(TypedDict):
    latency_model: float
    schedule: float
    host_share: float


class _Validation(TypedDict):
    name: str
    policy: str
    metrics: list[_Metric]
    alignment: _Alignment
    attribution: _Attribution


SUMMARY: TypeAdapter[Any] = TypeAdapter(Summary)
COMPARISON: TypeAdapter[Any] = TypeAdapter(_Comparison)
CAPACITY: TypeAdapter[Any] = TypeAdapter(_Capacities)
COST: TypeAdapter[Any] = TypeAdapter(_Cost)
VALIDATION: TypeAdapter[Any] = TypeAdapter(_Validation)
REQUESTS = ("arrival_s", "replica", "first_token_s", "finished_s", "output_tokens")
STEPS = ("replica", "start_s", "end_s", "prefill_tokens", "decodes", "chunks", "kv_blocks_used", "waiting")
GAPS = ("gap_s", "count")
STEPS_MEASURED = ("seconds", "predicted", "decodes", "chunks")


@dataclass(frozen=True, repr=False)
class Run:
    """The files of one run, as `Report` has them."""

    directory: Path
    summary: Mapping[str, Any]
    requests: pl.DataFrame
    steps: pl.DataFrame
    gaps: pl.DataFrame
    scenario: str  # as run, TOML

    @property
    def stages(self) -> pl.DataFrame:
        """One row per iteration and pipeline stage; empty with one stage."""
        return stages_of(self.steps)

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r}, {self.summary['policy']})"


@dataclass(frozen=True)
class Kept:
    """All that a directory holds; what it does not hold is None."""

    directory: Path
    scenario: str | None
    validation: Mapping[str, Any] | None = None
    validation_steps: pl.DataFrame | None = None
    capacity: list[dict[str, Any]] | None = None
    cost: Mapping[str, Any] | None = None
    sweep: pl.DataFrame | None = None
    study: str | None = None
    run: Run | None = None
    runs: Mapping[str, Run] | None = None  # of a comparison by policy, or measured and simulated


RESULTS = ("summary.json", "comparison.json", "capacity.json", "cost.json", "sweep.parquet", "validation.json")


def load(directory: str | Path) -> Run:
    """The run that `run --out DIRECTORY` kept (or one policy of `compare --out`). BadInput for what is not one."""
    here = _directory(directory)
    return Run(
        here,
        _json(here / "summary.json", SUMMARY),
        _frame(here / "requests.parquet", REQUESTS),
        _frame(here / "steps.parquet", STEPS),
        _frame(here / "gaps.parquet", GAPS),
        _text(here / "scenario.toml"),
    )


def find(directory: str | Path) -> Kept:
    """Every result in a directory. BadInput where there is none, or one cannot be read."""
    here = _directory(directory)
    if not any(_there(here / name) for name in RESULTS):
        raise BadInput(f"holds no results: none of {', '.join(RESULTS)}", source=str(directory))
    found: dict[str, Any] = {}
    if _there(here / "validation.json"):
        found["validation"] = _json(here / "validation.json", VALIDATION)
        if _there(steps := here / "validation_steps.parquet"):
            found["validation_steps"] = _frame(steps, STEPS_MEASURED)
        sides = ("measured", "simulated", "anchored")
        found["runs"] = {side: load(here / side) for side in sides if _there(here / side / "summary.json")}
    if _there(here / "capacity.json"):
        found["capacity"] = _json(here / "capacity.json", CAPACITY)["results"]
    if _there(here / "cost.json"):
        found["cost"] = _json(here / "cost.json", COST)
    if _there(here / "sweep.parquet"):
        found["sweep"] = _frame(here / "sweep.parquet", ("point", "status"), numeric=False)
        found["study"] = _text(here / "study.toml") if _there(here / "study.toml") else None
    if _there(here / "summary.json"):
        found["run"] = load(here)
    if _there(here / "comparison.json"):
        policies = [summary["policy"] for summary in _json(here / "comparison.json", COMPARISON)["results"]]
        if "validation" in found:
            raise BadInput("holds both a comparison and a validation: keep them apart", source=str(directory))
        found["runs"] = {policy: load(here / _plain(policy, here)) for policy in policies}
    scenario = _text(here / "scenario.toml") if _there(here / "scenario.toml") else None
    return Kept(here, scenario, **found)


def _plain(policy: str, here: Path) -> str:
    """A policy's name, which is a folder's; a file that was tampered with must not lead elsewhere."""
    from sim.policies import POLICIES

    if policy not in POLICIES:
        raise BadInput(f"policy {shown(policy)} is not known", source=str(here / "comparison.json"))
    return policy


def _directory(directory: str | Path) -> Path:
    here = Path(directory)
    try:
        if here.is_dir():
            return here
        what = "is not a directory" if here.exists() else "no such directory"
    except OSError as error:
        what = _reason(error)
    raise BadInput(what, source=str(directory))


def _there(path: Path) -> bool:
    return path.exists()


def _json(path: Path, shape: TypeAdapter[Any]) -> Any:
    """A JSON file of a known shape; what else it holds is kept."""
    try:
        value = json.loads(_text(path), parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {error}", source=str(path)) from None
    try:
        shape.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or None
        raise BadInput(f"not as servecast writes it: {first['msg'].lower()}", source=str(path), key=key) from None
    return value


def _frame(path: Path, columns: tuple[str, ...], *, numeric: bool = True) -> pl.DataFrame:
    """A parquet file with at least these columns."""
    try:
        frame = pl.read_parquet(path, glob=False)
    except OSError as error:
        raise BadInput(_reason(error), source=str(path)) from None
    except pl.exceptions.PolarsError as error:
        first = (str(error).splitlines() or ["cannot be read"])[0]
        raise BadInput(f"not parquet: {first}", source=str(path)) from None
    for column in columns:
        if column not in frame.columns:
            raise BadInput(f"lacks the column {column!r}", source=str(path))
        if numeric and not (frame[column].dtype.is_numeric() or frame[column].dtype == pl.Null):
            raise BadInput(f"holds {frame[column].dtype}, not numbers", source=str(path), key=f"column {column}")
    return frame


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise BadInput(f"larger than {LARGEST} bytes: not a result of servecast", source=str(path))
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(_reason(error), source=str(path)) from None
    except UnicodeDecodeError:
        raise BadInput("not UTF-8", source=str(path)) from None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON")
