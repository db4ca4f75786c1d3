"""The result of a run: tables of facts, and the metrics that are derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim.affine import AffineTable
from sim.distribution import Summary, summarise
from sim.executor import Spent
from sim.matching import resolved
from sim.profile import load
from sim.record import COMPLETED, REFUSED, STEP_COLUMNS, UNFINISHED, Record
from sim.roofline import RooflineTable
from sim.saturation import Saturation, saturation
from sim.scenario import Scenario
from sim.schema import DISTRIBUTIONS
from sim.workload import Workload

if TYPE_CHECKING:
    import polars as pl

    from sim.simulate import Plan

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Report:
    """What a run came to: `summary` (the numbers), `requests` and `steps` (the facts, as polars frames)."""

    plan: Plan
    workload: Workload
    record: Record
    measured: bool = False  # times are of an engine, not of a latency model

    def __repr__(self) -> str:
        done, tbt = self.record.done - len(self.record.reasons), self.distributions["tbt"]["p99"]
        name, policy = self.plan.scenario.name, self.plan.scenario.scheduler.policy
        return f"Report({name!r}, {policy}, {done} of {self.record.offered} completed, TBT P99 {tbt} s)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from sim import tables

        told = [tables.distributions(self.summary), *([tables.limits(self.summary)] if self.summary["slo"] else [])]
        notes = [*self.notes, self.summary["times_from"]]
        return tables.html(self.plan.scenario.name, told, tables.of_run(self.summary), notes)

    @cached_property
    def requests(self) -> pl.DataFrame:
        """One row per offered request; times that were not reached are null."""
        import polars as pl  # where frames are wanted: a machine with a GPU may have no polars

        record, n = self.record, self.record.offered
        status = np.where(np.isnan(self._times("finish")), UNFINISHED, COMPLETED).astype(object)
        reason = np.full(n, None, dtype=object)
        for id, why in record.reasons.items():
            status[id], reason[id] = REFUSED, why
        served = status != REFUSED
        frame = pl.DataFrame(
            {
                "id": np.arange(n),
                "arrival_s": self._times("arrival"),
                "prompt_tokens": self.workload.prompts[:n],
                "output_tokens": np.frombuffer(record.output, dtype=np.int64)[:n],
                "status": pl.Series(status.tolist(), dtype=pl.String),
                "reason": pl.Series(reason.tolist(), dtype=pl.String),
                "replica": pl.Series(np.frombuffer(record.replica, dtype=np.int64)[:n]),
                "scheduled_s": self._times("scheduled"),
                "first_token_s": self._times("first_token"),
                "finished_s": self._times("finish"),
                "preemptions": np.frombuffer(record.preemptions, dtype=np.int64)[:n],
                "longest_gap_s": np.where(self._outputs > 1, self._times("longest_gap"), np.nan),
            }
        )
        return frame.with_columns(
            pl.col(pl.Float64).fill_nan(None), pl.when(pl.Series(served)).then("replica").alias("replica")
        )

    @cached_property
    def steps(self) -> pl.DataFrame:
        """One row per iteration, in order of commit; empty where they were not kept.

        Of a pipeline also `stage_starts_s` and `stage_ends_s`: an array of times each, a stage at a time.
        """
        import polars as pl

        ints = pl.col(pl.Int32).cast(pl.Int64)
        frame = pl.DataFrame({name: self.columns(name) for name in STEP_COLUMNS}).with_columns(ints)
        if (stages := self.plan.deployment.stages) == 1:
            return frame
        times = {name: np.frombuffer(getattr(self.record, name)) for name in ("stage_starts", "stage_ends")}
        return frame.with_columns(pl.Series(f"{name}_s", of.reshape(-1, stages)) for name, of in times.items())

    @cached_property
    def gaps(self) -> pl.DataFrame:
        """The TBT pool: every gap between two tokens of a measured request, ascending, and how many there are of it."""
        import polars as pl

        gaps, counts = self._gaps
        frame = pl.DataFrame({"gap_s": gaps, "count": pl.Series(counts, dtype=pl.Int64)})
        return frame.filter(pl.col("count") > 0).group_by("gap_s").agg(pl.sum("count")).sort("gap_s")

    @property
    def stages(self) -> pl.DataFrame:
        """One row per iteration and pipeline stage; empty with one stage, where the iteration's own times say it."""
        return stages_of(self.steps)

    def columns(self, name: str) -> npt.NDArray[Any]:
        """One column of the iterations, without a frame."""
        rows = np.frombuffer(self.record.steps or b"", dtype=list(STEP_COLUMNS.items()))
        return np.ascontiguousarray(rows[name])

    @cached_property
    def distributions(self) -> dict[str, Summary]:
        """TTFT, TBT, TPOT, E2E and scheduling delay of the measured requests, in seconds."""
        pools = {"ttft": self._ttft, "tpot": self._tpot, "e2e": self._e2e, "scheduling_delay": self._scheduling_delay}
        measured = {name: values[self._measured & ~np.isnan(values)] for name, values in pools.items()}
        return {name: summarise(*self._gaps) if name == "tbt" else summarise(measured[name]) for name in DISTRIBUTIONS}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run in numbers, ready for JSON."""
        record, scenario = self.record, self.plan.scenario
        completed = record.done - len(record.reasons)
        duration = self.duration
        outputs = int(self._outputs.sum())
        slo = self._slo()
        return {
            "name": scenario.name,
            "policy": scenario.scheduler.policy,
            "seed": scenario.workload.seed,
            "offered": record.offered,
            "completed": completed,
            "unfinished": record.offered - record.done,
            "refused": _counted(record.reasons.values()),
            "duration_s": duration,
            "iterations": record.iterations,
            "preemptions": record.preempted,
            "prompt_tokens": int(self.workload.prompts[: record.offered][self._served].sum()),
            "output_tokens": outputs,
            "request_throughput": self._per_second(completed),
            "output_throughput": self._per_second(outputs),
            "kv_blocks": self.plan.deployment.limits.num_blocks,
            "kv_peak": record.kv_peak,
            "busy_s": record.busy,
            "bubble_fraction": self._bubble(),
            "mfu": self._share_of_peak("flops"),
            "mbu": self._share_of_peak("bytes"),
            **{f"{name}_s": distribution for name, distribution in self.distributions.items()},
            "slo": slo,
            "slo_met": all(verdict["met"] for verdict in slo.values()) if slo else None,
            "attainment": None if self._good is None else _ratio(int(self._good.sum()), record.offered),
            "goodput": None if self._good is None else self._per_second(int(self._good.sum())),
            **self.saturation.to_dict(),
            "devices": self.plan.devices,
            "time_share": self._time_share(),
            "left_out": int(record.offered - self._measured.sum()),
            "workload": self.workload.counts,
            "times_from": times_from(self.plan.scenario, measured=self.measured),
            "notes": self.notes,
        }

    @cached_property
    def notes(self) -> list[str]:
        """What the reader should know before believing the numbers."""
        said = [*self.plan.scenario.notes, *self.workload.notes, *self.record.notes]
        if left_out := int(self.record.offered - self._measured.sum()):
            said.append(f"{left_out} requests of warm-up or drain are simulated but not in the distributions")
        if not self._measured.any():
            said.append("no request is left to measure: metrics.warmup and metrics.drain cover all arrivals")
        if unfinished := self.record.offered - self.record.done:
            said.append(f"{unfinished} requests were cut off: their tokens count, their E2E and TPOT do not")
        n = self.distributions["ttft"]["n"]
        if 0 < n < 100:
            said.append(f"P99 of a distribution over {n} requests is its maximum")
        return said

    @cached_property
    def saturation(self) -> Saturation:
        """Whether the queue grew for as long as requests arrived; unknown in a closed loop."""
        if self.workload.arrivals is None or not self.record.iterations:
            return Saturation()
        tokens = (self.workload.prompts + self.workload.outputs)[: self.record.offered]
        served = self._served
        return saturation(
            self._times("arrival")[served],
            self._times("scheduled")[served],
            tokens[served].astype(np.float64),
            replicas=self.plan.deployment.replicas,
        )

    @property
    def duration(self) -> float | None:
        """Seconds from the first arrival to the last commit."""
        if not self.record.iterations:
            return None
        return self.record.last_commit - self.record.arrival[0]

    @cached_property
    def _measured(self) -> npt.NDArray[np.bool_]:
        arrival = self._times("arrival")
        return (arrival >= self.record.measured_from) & (arrival <= self.record.measured_to)

    @cached_property
    def _served(self) -> npt.NDArray[np.bool_]:
        served = np.ones(self.record.offered, dtype=bool)
        served[list(self.record.reasons)] = False
        return served

    @cached_property
    def _outputs(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.record.output, dtype=np.int64)[: self.record.offered]

    @cached_property
    def _ttft(self) -> Floats:
        return self._times("first_token") - self._times("arrival")

    @cached_property
    def _e2e(self) -> Floats:
        return self._times("finish") - self._times("arrival")

    @cached_property
    def _tpot(self) -> Floats:
        """(last token − first) / (o − 1); NaN where there is one token, or no last one yet."""
        gaps = np.where(self._outputs > 1, self._outputs - 1, np.nan)
        return np.asarray((self._times("finish") - self._times("first_token")) / gaps)

    @cached_property
    def _scheduling_delay(self) -> Floats:
        """First scheduled − arrival; a request that never was counts until the end of the run."""
        scheduled = self._times("scheduled")
        return np.where(np.isnan(scheduled), self.record.ended, scheduled) - self._times("arrival")

    @cached_property
    def _gaps(self) -> tuple[Floats, npt.NDArray[np.int32]]:
        """Gaps between tokens and how many there are of each."""
        gaps, counts = np.frombuffer(self.record.gaps), np.frombuffer(self.record.gap_counts, dtype=np.int32)
        if self.plan.scenario.slo.first_token_gap:
            firsts = int((~np.isnan(self._ttft) & self._measured).sum())
            return np.append(gaps, 0.0), np.append(counts, np.int32(firsts))
        return gaps, counts

    @cached_property
    def _good(self) -> npt.NDArray[np.bool_] | None:
        """Which offered requests meet every limit per request; None where there are none."""
        limits = self.plan.scenario.slo.per_request
        if not limits:
            return None
        values = {"ttft": self._ttft, "tpot": self._tpot, "e2e": self._e2e, "tbt_max": self._times("longest_gap")}
        good = ~np.isnan(self._e2e)
        for key, limit in limits.items():
            good &= np.isnan(values[key]) | (values[key] <= limit)
        return good

    def _slo(self) -> dict[str, dict[str, Any]]:
        slo = self.plan.scenario.slo
        verdicts = {}
        for key, limit in slo.percentiles.items():
            metric, _, percentile = key.rpartition("_")
            value = self.distributions[metric][percentile]
            verdicts[key] = {"limit": limit, "value": value, "met": value is not None and value <= limit}
        if slo.attainment is not None and self._good is not None:
            value = _ratio(int(self._good.sum()), self.record.offered)
            met = value is not None and value >= slo.attainment
            verdicts["attainment"] = {"limit": slo.attainment, "value": value, "met": met}
        return verdicts

    def _times(self, column: str) -> Floats:
        """A column of the record, for the requests that were offered."""
        values: Floats = np.frombuffer(getattr(self.record, column), dtype=np.float64)[: self.record.offered]
        return values

    def _per_second(self, count: int) -> float | None:
        return count / self.duration if self.duration else None

    def _bubble(self) -> float | None:
        """Idle time of the stages, as a share of all their time."""
        stages = self.plan.deployment.stages * self.plan.deployment.replicas
        return max(0.0, 1 - self.record.busy / (stages * self.duration)) if self.duration else None

    def _share_of_peak(self, what: str) -> float | None:
        """MFU (of the FLOP/s that the weights' dtype allows) or MBU (of the memory bandwidth) of all devices."""
        model, device = self.plan.model, self.plan.device
        work = getattr(self.record.spent, what, 0.0)
        if not work or not self.duration or model is None or device is None:
            return None
        peak = device.peak_flops(model.dtype) if what == "flops" else device.memory_bandwidth
        return work / (peak * self.plan.devices * self.duration)

    def _time_share(self) -> dict[str, float] | None:
        """Where the stages' busy time goes; None where the latency model does not say."""
        parts = dict(zip(Spent._fields[:-2], self.record.spent or (), strict=False))
        total = sum(parts.values())
        return {name: part / total for name, part in parts.items()} if total else None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _counted(reasons: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1
    return counts


def times_from(scenario: Scenario, *, measured: bool = False) -> str:
    """Where the iteration times come from, and how far to trust them."""
    if measured:
        return "times: measured on this machine's engine"
    latency = resolved(scenario).latency
    if isinstance(latency, AffineTable):
        return "times: affine coefficients of the scenario, taken as given"
    if isinstance(latency, RooflineTable):
        host = "no host time" if latency.step == latency.sequence == 0 else "host time as given"
        return (
            f"times: roofline from data-sheet figures (published) and kernel efficiencies (assumed), {host}; "
            "not calibrated, expect tens of per cent of error"
        )
    return f"times: profile {latency.name} (fitted), {load(latency.name, scenario.directory).trust}"


def stages_of(steps: pl.DataFrame) -> pl.DataFrame:
    """One row per iteration and pipeline stage of a step table: step, replica, stage, start_s, end_s."""
    import polars as pl

    if "stage_starts_s" not in steps.columns:
        return pl.DataFrame(schema=dict.fromkeys(("step", "replica", "stage", "start_s", "end_s"), pl.Float64))
    rows = steps.with_row_index("step").select(
        pl.col("step").cast(pl.Int64),
        "replica",
        pl.int_ranges(pl.col("stage_starts_s").arr.to_list().list.len()).alias("stage"),
        pl.col("stage_starts_s").arr.to_list().alias("start_s"),
        pl.col("stage_ends_s").arr.to_list().alias("end_s"),
    )
    return rows.explode("stage", "start_s", "end_s")
