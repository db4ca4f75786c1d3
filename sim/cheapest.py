"""The cheapest deployment for a demand: candidates, each searched for the capacity of one replica and sized.

rate = 30.0                        # requests/s to be served; the scenario's own where left out
headroom = 0.8                     # share of its capacity that a replica is planned to run at
spare = 1                          # replicas beyond those that carry the load
[price]                            # of one device for one hour; [cost] gpu_hour of the scenario where left out
h100-sxm = 3.0
[capacity]                         # how capacities are searched
[set]                              # and [grid] and [[list]] as in a study: a candidate for every point
[grid]
"deployment.tensor_parallel" = [1, 2]
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
from pydantic import Field, ValidationError

from sim.budget import CHUNKED
from sim.capacity import at_rate, capacity, first_rate
from sim.capacity import check as check_capacity
from sim.catalogue import entry
from sim.cost import per_million
from sim.errors import BadInput
from sim.output import as_json
from sim.report import times_from
from sim.scenario import Scenario, read_toml
from sim.settings import Setting, describe
from sim.simulate import plan as look_up
from sim.simulate import simulate, workload
from sim.study import LARGEST_FILE, SearchTable, Study, StudyTable
from sim.sweep import Sweep, run
from sim.table import Positive, Table

if TYPE_CHECKING:
    import polars as pl

OBJECTIVES = ("cost_per_hour", "ttft_s_p50", "ttft_s_p99", "tbt_s_p99")  # of the Pareto front, all to be small
RANKED = ("cost_per_hour", "devices", "ttft_s_p99", "point")
DECIDED = {  # keys that are no axes of a plan, and who says them
    "deployment.replicas": "the plan finds it",
    "workload.arrivals.rate": "the demand is `rate`",
    "workload.arrivals.scale": "the demand is `rate`",
}


class CandidatesTable(Table):
    """A file of candidates."""

    name: str = ""
    rate: Positive | None = None
    headroom: Annotated[float, Field(gt=0, le=1)] = 0.8
    spare: Annotated[int, Field(ge=0, le=1000)] = 1
    price: dict[str, Positive] = Field(default_factory=dict)
    capacity: SearchTable = Field(default_factory=lambda: SearchTable(tolerance=0.02, seeds=3))
    fixed: dict[str, Any] = Field(default_factory=dict, alias="set")
    grid: dict[str, Any] = Field(default_factory=dict)
    listed: list[dict[str, Any]] = Field(default_factory=list, alias="list")


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be served, in requests/s, and how it is planned for. `prices`: per device-hour, by device."""

    rate: float
    headroom: float
    spare: int
    prices: Mapping[str, float] = field(default_factory=dict)
    search: SearchTable = field(default_factory=SearchTable)

    def price(self, scenario: Scenario) -> float:
        """Of one device for one hour."""
        if not self.prices or scenario.device is None:
            return scenario.cost.gpu_hour
        return self.prices[_named(scenario.device.name)]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        told = {"rate": self.rate, "headroom": self.headroom, "spare": self.spare, "prices": dict(self.prices)}
        return told | {"capacity": self.search.model_dump()}


@dataclass(frozen=True)
class Candidates:
    """A demand, and the study whose points are the candidates."""

    demand: Demand
    study: Study

    @classmethod
    def load(
        cls, path: str | Path, scenario: str | Path, settings: Sequence[Setting] = (), *, rate: float | None = None
    ) -> Candidates:
        """Read and check a file of candidates for a scenario; `rate` goes over its own. BadInput names file and key."""
        path, base = Path(path), Scenario.load(scenario)
        data = read_toml(path, "file of candidates", LARGEST_FILE)
        try:
            table = CandidatesTable.model_validate(data)
        except ValidationError as error:
            key, what = describe(error, data)
            raise BadInput(what, source=str(path), key=key) from None
        parts = table.model_dump(by_alias=True, include={"name", "fixed", "grid", "listed", "capacity"})
        study = Study.of(StudyTable(scenario=base.source, what="capacity", **parts), path, settings, base)
        told = {setting.path: setting.option for setting in settings}
        for key, why in DECIDED.items():
            section = study.axes.get(key) or ("[set]" if key in _set_here(study) and key not in told else None)
            if section:
                raise BadInput(why, source=str(path), key=f"{section} {key}")
        prices = _prices(table.price, study)
        one = base.vary(study.fixed)
        check_capacity(one)
        demand = rate or table.rate or first_rate(one, workload(one))
        return cls(Demand(demand, table.headroom, table.spare, prices, table.capacity), study)

    def to_toml(self) -> str:
        """The candidates as planned, every default filled in."""
        study = tomllib.loads(self.study.to_toml("scenario.toml"))
        del study["scenario"], study["what"]
        told = self.demand.to_dict()
        head = {key: told[key] for key in ("rate", "headroom", "spare")}
        price = {"price": dict(self.demand.prices)} if self.demand.prices else {}
        return tomli_w.dumps(head | study | price)


@dataclass(frozen=True)
class Planned:
    """What became of the candidates."""

    candidates: Candidates
    sweep: Sweep

    @cached_property
    def frame(self) -> pl.DataFrame:
        """One row per candidate; `pareto`: no other is as good in every objective and better in one."""
        import polars as pl

        frame = self.sweep.frame
        if not self._feasible:
            return frame.with_columns(pl.lit(False).alias("pareto"))
        front = pareto([[row[key] for key in OBJECTIVES] for row in self._feasible])
        on = [row["point"] for row, kept in zip(self._feasible, front, strict=True) if kept]
        return frame.with_columns(pl.col("point").is_in(on).alias("pareto"))

    @property
    def ranked(self) -> list[dict[str, Any]]:
        """The feasible ones, the cheapest first."""
        feasible = self.frame.filter(self.frame["status"] == "done").to_dicts()
        return sorted(feasible, key=lambda row: tuple(_last(row[key]) for key in RANKED))

    @property
    def infeasible(self) -> list[dict[str, Any]]:
        """The others, each with its reason."""
        points = self.candidates.study.points
        return [{"point": one.point, "settings": points[one.point], "reason": one.reason} for one in self.sweep.failed]

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        if not self.ranked:
            return f"none of {len(self.sweep.outcomes)} candidates serves the demand within the SLO"
        best, axes = self.ranked[0], self.candidates.study.axes
        seconds = " and ".join(
            f"{label} {best[key]:.3g} s"
            for key, label in (("ttft_s_p99", "TTFT P99"), ("tbt_s_p99", "TBT P99"))
            if best[key] is not None
        )
        return (
            f"cheapest: {label_of(best, axes)}, {best['cost_per_hour']:.2f} an hour, "
            f"{best['cost_per_million_output_tokens']:.3g} per million output tokens, {seconds}"
        )

    @property
    def notes(self) -> list[str]:
        """How far the answer may be trusted."""
        if not self.ranked or not (low := self.ranked[0]["replicas_at_capacity_low"]):
            return []
        best = self.ranked[0]
        if low == best["replicas"]:
            return []
        return [
            f"at the lowest capacity of its searches ({best['capacity_low']:.3g} requests/s) it takes {low} replicas"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        ranked = self.ranked
        return {
            "verdict": self.verdict,
            "name": self.candidates.study.name,
            "demand": self.candidates.demand.to_dict(),
            "cheapest": ranked[0] if ranked else None,
            "pareto": [row["point"] for row in ranked if row["pareto"]],
            "results": ranked,
            "infeasible": self.infeasible,
            "notes": self.notes,
        }

    @property
    def files(self) -> dict[str, bytes]:
        """The result files, by name."""
        parquet = BytesIO()
        self.frame.write_parquet(parquet)
        return {
            "plan.parquet": parquet.getvalue(),
            "plan.json": as_json(self.to_dict()).encode(),
            "candidates.toml": self.candidates.to_toml().encode(),
            "scenario.toml": self.candidates.study.base.to_toml(derived=False).encode(),
        }

    @cached_property
    def _feasible(self) -> list[dict[str, Any]]:
        rows = [(one.point, one.results) for one in self.sweep.outcomes]
        return [{"point": point, **results} for point, results in rows if results is not None]


def plan(
    candidates: Candidates,
    *,
    out: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Planned:
    """Size and price every candidate; `out`, `resume` and the rest are those of a sweep."""
    done = run(
        candidates.study,
        out=out,
        resume=resume,
        workers=workers,
        executor=executor,
        progress=progress,
        find=partial(sized, candidates.demand),
        asked=candidates.demand.to_dict(),
        files=lambda sweep: Planned(candidates, sweep).files,
    )
    return Planned(candidates, done)


def sized(demand: Demand, scenario: Scenario) -> dict[str, Any]:
    """What one candidate comes to: the capacity of a replica, how many it takes, what they cost, and the latencies of
    one that carries its share of the demand while the spare ones carry nothing.

    BadInput where no rate meets the SLO.
    """
    one = scenario.with_(deployment__replicas=1)
    policy, search = one.scheduler.policy, demand.search
    (held,) = capacity(one, [policy], tolerance=search.tolerance, seeds=search.seeds)
    if not held.rate:
        raise BadInput(f"no rate meets the SLO: limited by {held.limited_by}")
    replicas = replicas_for(demand, held.rate)
    low, high = held.interval or (held.rate, held.rate)
    share = at_rate(one, demand.rate / replicas)
    report = simulate(share, keep_steps=False)
    served, requests, parallel = look_up(share), report.workload, one.deployment
    price = demand.price(one)
    devices = (replicas + demand.spare) * served.devices
    output, prompt = float(requests.outputs.mean()), float(requests.prompts.mean())
    tokens = {"output": output, "input": prompt, "total": prompt + output}
    summary = report.summary
    return {
        "device": one.device.name if one.device else None,
        "tensor_parallel": parallel.tensor_parallel,
        "pipeline_parallel": parallel.pipeline_parallel,
        "policy": policy,
        "token_budget": served.deployment.limits.token_budget if policy in CHUNKED else None,
        "capacity_rate": held.rate,
        "capacity_low": low,
        "capacity_high": high,
        "limited_by": held.limited_by,
        "replicas": replicas,
        "replicas_at_capacity_low": replicas_for(demand, low) if low else None,
        "spare": demand.spare,
        "devices": devices,
        "device_hour": price,
        "cost_per_hour": price * devices,
        **{
            f"cost_per_million_{kind}_tokens": per_million(price, devices, demand.rate, each)
            for kind, each in tokens.items()
        },
        "rate_per_replica": demand.rate / replicas,
        "load": demand.rate / replicas / held.rate,
        **{key: summary[key[: key.rindex("_")]][key.rpartition("_")[2]] for key in OBJECTIVES[1:]},
        "slo_met": summary["slo_met"],
        "attainment": summary["attainment"],
        "saturated": summary["saturated"],
        "times_from": times_from(one),
        "notes": "; ".join(dict.fromkeys([*summary["notes"], *held.notes])),
    }


def replicas_for(demand: Demand, rate: float) -> int:
    """Replicas that carry the demand, each at no more than its share of capacity; spare ones come on top."""
    return max(1, ceil(demand.rate / (rate * demand.headroom) * (1 - 1e-12)))  # an exact fit is a fit


def pareto(rows: Sequence[Sequence[float | None]]) -> list[bool]:
    """Which rows no other dominates: as small everywhere and smaller somewhere. What is not known is the largest."""
    known = [tuple(_last(value) for value in row) for row in rows]
    return [not any(_dominates(other, row) for other in known) for row in known]


def label_of(row: Mapping[str, Any], axes: Iterable[str]) -> str:
    """A candidate in a few words: replicas, device, parallelism, policy, budget, and what else its axes say."""
    stages = f" PP{row['pipeline_parallel']}" if row["pipeline_parallel"] > 1 else ""
    budget = f" {row['token_budget']}" if row["token_budget"] is not None else ""
    named = ("device.name", "scheduler.policy", "scheduler.token_budget", "latency.name")
    others = [key for key in axes if key not in named and not key.startswith(("deployment.", "cost."))]
    rest = "".join(f" {key.rpartition('.')[2]}={row[key]}" for key in others if row.get(key) is not None)
    where = f"{row['device'] or 'device'} TP{row['tensor_parallel']}{stages}"
    return f"{row['replicas'] + row['spare']} × {where} {row['policy']}{budget}{rest}"


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def _last(value: float | None) -> float:
    return float("inf") if value is None else value


def _set_here(study: Study) -> set[str]:
    return {setting.path for setting in study.fixed}


def _named(device: str) -> str:
    """A device by its name in the catalogue; BadInput for none."""
    return str(entry("device", device)["name"])


def _prices(given: Mapping[str, float], study: Study) -> dict[str, float]:
    """Prices by the catalogue's names. BadInput for a price of no device, or a candidate without one."""
    prices: dict[str, float] = {}
    for name, price in given.items():
        try:
            prices[_named(name)] = price
        except BadInput as error:
            raise BadInput(error.what, source=study.source, key=f"[price] {name}") from None
    if not prices:
        return prices
    if section := study.axes.get("cost.gpu_hour"):
        raise BadInput("[price] says it", source=study.source, key=f"{section} cost.gpu_hour")
    for point in study.points:
        device = study.base.vary(study.settings(point), check=False).device
        if device is not None and (name := _named(device.name)) not in prices:
            what = f"required: the price of one {name} for one hour"
            raise BadInput(what, source=study.source, key=f"[price] {name}")
    return prices
