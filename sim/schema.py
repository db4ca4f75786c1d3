"""The tables of a scenario file, as CONTRACT-style TOML: every key, its type, its limits and its default."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel, model_validator
from pydantic_core import PydanticCustomError

from sim.affine import AffineTable
from sim.errors import shown, unknown
from sim.policies import POLICIES
from sim.profile import ProfileTable
from sim.roofline import RooflineTable
from sim.router import ROUTERS
from sim.table import LARGEST, Count, NonNegative, Positive, Table, one_of

PERCENTILES = {"p50": 500, "p75": 750, "p90": 900, "p95": 950, "p99": 990, "p999": 999}  # in thousandths
DISTRIBUTIONS = ("ttft", "tbt", "tpot", "e2e", "scheduling_delay")
PER_REQUEST = ("ttft", "tpot", "tbt_max", "e2e")  # limits that each request meets or not
SLO_KEYS = (
    *(f"{metric}_{p}" for metric in DISTRIBUTIONS for p in PERCENTILES),
    *PER_REQUEST,
    "attainment",
    "first_token_gap",
)


BlockTokens = Annotated[int, Field(ge=1, le=65536)]
ModelTokens = Annotated[int, Field(ge=2, le=2**40)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Watermark = Annotated[float, Field(ge=0, lt=1)]
Budget = Count | Literal["auto"]


class DeploymentTable(Table):
    """[deployment]: devices per stage, stages per replica, replicas, and who chooses among them."""

    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    pipeline_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    router: Annotated[str, one_of("router", ROUTERS)] = "round-robin"


class EngineTable(Table):
    """[engine]: memory and limits of one replica."""

    block_tokens: BlockTokens = 16
    memory_fraction: Fraction = 0.85
    num_blocks: Count | None = None
    watermark: Watermark = 0.01
    max_sequences: Count = 128
    max_model_tokens: ModelTokens = 8192
    max_batch_tokens: Count | None = None
    time_limit: Positive | None = None
    schedule_ahead: bool = False
    """Ask for a batch as soon as fewer than one per stage are in flight, though the first stage may be busy, as
    Sarathi-Serve's artefact does; by default it is asked when the first stage is free."""


class SchedulerTable(Table):
    """[scheduler]: the policy and its token budget."""

    policy: Annotated[str, one_of("policy", POLICIES)] = "stall-free"
    token_budget: Budget = 512
    overlap: bool = False  # the next batch is decided while one executes: an arrival waits an iteration more
    batch_wait_iterations: Annotated[int, Field(ge=0, le=10**9)] = 0
    batch_wait_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Prompts wait beside decodes, so many iterations at most, until a batch would hold that share of the token budget:
    TensorRT-LLM's batch_wait_timeout_iters and batch_wait_max_tokens_ratio. Of stall-free alone."""

    @model_validator(mode="after")
    def _waits_need_both(self) -> SchedulerTable:
        if (self.batch_wait_iterations > 0) != (self.batch_wait_ratio > 0):
            raise ValueError("batch_wait_iterations and batch_wait_ratio go together: prompts wait only with both")
        return self


class PolicyTable(Table):
    """[policy.NAME]: keys of [engine] and [scheduler] that are different for one policy."""

    block_tokens: BlockTokens | None = None
    memory_fraction: Fraction | None = None
    num_blocks: Count | None = None
    watermark: Watermark | None = None
    max_sequences: Count | None = None
    max_model_tokens: ModelTokens | None = None
    max_batch_tokens: Count | None = None
    time_limit: Positive | None = None
    token_budget: Budget | None = None


Latency = Annotated[AffineTable | RooflineTable | ProfileTable, Field(discriminator="kind")]


class SloTable(RootModel[dict[str, bool | float]]):
    """[slo]: limits in seconds on percentiles (METRIC_PERCENTILE) or on every request, and the attainment asked for.

    `first_token_gap` adds one gap of 0 s per request to the TBT pool, as Sarathi-Serve's artefact does.
    """

    @model_validator(mode="before")
    @classmethod
    def _keys_and_limits(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key, value in data.items():
            if wrong := _wrong_limit(key, value):
                raise PydanticCustomError("slo", "{what}", {"key": key, "what": wrong})
        if "attainment" in data and not set(PER_REQUEST) & set(data):
            raise PydanticCustomError(
                "slo", f"needs a limit per request: {', '.join(PER_REQUEST)}", {"key": "attainment"}
            )
        return data

    @property
    def first_token_gap(self) -> bool:
        return bool(self.root.get("first_token_gap", False))

    @property
    def percentiles(self) -> dict[str, float]:
        """Limits on percentiles of a distribution."""
        return {
            key: limit for key, limit in self.root.items() if key not in (*PER_REQUEST, "attainment", "first_token_gap")
        }

    @property
    def per_request(self) -> dict[str, float]:
        """Limits that every request meets or not."""
        return {key: limit for key, limit in self.root.items() if key in PER_REQUEST}

    @property
    def attainment(self) -> float | None:
        """The share of offered requests that must meet them all."""
        return self.root.get("attainment")


def _wrong_limit(key: str, value: object) -> str | None:
    """What is wrong with a key of [slo] or its value, if anything."""
    if key not in SLO_KEYS:
        return unknown("key", key, SLO_KEYS)
    if key == "first_token_gap":
        return None if isinstance(value, bool) else f"{shown(value)} must be true or false"
    what, largest = ("share of requests", 1) if key == "attainment" else ("number of seconds", LARGEST)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= largest:
        return None
    return f"{shown(value)} must be a {what} greater than 0 and at most {largest:g}"


class MetricsTable(Table):
    """[metrics]: what is left out of the distributions, in seconds of arrivals."""

    warmup: NonNegative = 0.0
    drain: NonNegative = 0.0


class TorchTable(Table):
    """[torch]: how the engine runs, with `--executor torch`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention: Literal["auto", "torch", "flashinfer"] = "auto"
    weights: Annotated[str, Field(min_length=1)] | None = None  # a folder of safetensors; random ones where left out
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of random weights and prompts
    threads: Annotated[int, Field(ge=1, le=1024)] = 1  # on a CPU; more than one is slower beside other work


class CostTable(Table):
    """[cost]: the price of one device for one hour, in any currency."""

    gpu_hour: Positive = 3.0
