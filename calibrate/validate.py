"""The same scenario and the same scheduler objects, simulated and measured, side by side.

Three things can set the two apart: the latency model is wrong about a batch, the host adds time of its own, or the
schedules part ways, because a step that took longer let another request in. They are told apart by predicting every
measured batch: what is wrong there is the model's; the rest of the difference in total time is the schedule's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calibrate.fit import can_fit, fit
from calibrate.grid import Limits, Point, grid
from calibrate.measure import Measurable, interleaved
from calibrate.rows import Row, Rows, row
from sim.errors import BadInput
from sim.executor import Executor, Step
from sim.profile import Profile, ProfileLatency, ProfileTable, load
from sim.report import Report
from sim.request import Batch
from sim.scenario import Scenario
from sim.simulate import Plan, plan, simulate

COMPARED = (
    ("ttft_s", "p50"),
    ("ttft_s", "p90"),
    ("ttft_s", "p99"),
    ("tbt_s", "p50"),
    ("tbt_s", "p90"),
    ("tbt_s", "p99"),
    ("tpot_s", "p50"),
    ("e2e_s", "p50"),
    ("e2e_s", "p99"),
)
EVERY = 4  # iterations between two calibration steps of an anchored run
WARM_UP = 20  # batches before anything is measured
FEWEST = 150  # rows that an anchored profile is fitted to


@dataclass(slots=True)
class Beside:
    """An executor that measures, and notes what a latency model says of the same batch.

    With `points` it executes one of them every few iterations, outside of the run's time: the machine as it is now.
    """

    executor: Measurable
    model: Executor
    anchors: Iterator[Row] | None = None
    rows: list[Row] = field(default_factory=list)
    anchored: list[Row] = field(default_factory=list)

    def execute(self, batch: Batch) -> Step:
        """The measured step."""
        predicted = sum(self.model.execute(batch).seconds)
        step = self.executor.execute(batch)
        self.rows.append(row(batch) | {"seconds": sum(step.seconds), "host": step.host, "predicted": predicted})
        if self.anchors is not None and len(self.rows) % EVERY == 0:
            self.anchored.append(next(self.anchors))
        return step

    def spent(self) -> None:
        """Not told."""

    def notes(self) -> list[str]:
        """None of its own."""
        return []


@dataclass(frozen=True, slots=True)
class Validation:
    """One attempt: the measured run, the same again, the simulated one, and with anchors the simulation from those."""

    scenario: Scenario
    measured: Report
    again: Report
    simulated: Report
    anchored: Report | None
    profile: Profile | None  # of the anchors
    steps: dict[str, list[float]]  # of the measured run: seconds, host, predicted, anchored, and the batch

    def metrics(self) -> list[dict[str, Any]]:
        """One row per compared figure: values, and errors relative to the measured run."""
        told = []
        for name, percentile in COMPARED:
            values = {
                which: report.summary[name][percentile]
                for which, report in self._reports().items()
                if report is not None
            }
            truth = values["measured"]
            errors = {which: value / truth - 1 if truth else None for which, value in values.items()}
            told.append(
                {
                    "metric": f"{name.removesuffix('_s')}_{percentile}",
                    **{f"{which}_s": value for which, value in values.items()},
                    "noise": errors["again"],
                    "error": errors["simulated"],
                    "error_anchored": errors.get("anchored"),
                }
            )
        return told

    def alignment(self) -> dict[str, Any]:
        """How far the schedules agree, and how well single steps are predicted on the measured batches."""
        seconds = np.array(self.steps["seconds"])
        told: dict[str, Any] = {"iterations_measured": len(seconds)}
        for which, report in self._reports().items():
            if which in ("again", "simulated", "anchored") and report is not None:
                equal, first = _agreement(self.measured, report)
                told |= {f"{which}_equal_batches": equal, f"{which}_first_difference": first}
        for which in ("predicted", "anchored"):
            if self.steps[which]:
                predicted = np.array(self.steps[which])
                relative = np.abs(predicted / seconds - 1)
                told[f"{which}_median_error"] = float(np.median(relative))
                told[f"{which}_p90_error"] = float(np.quantile(relative, 0.9))
                told[f"{which}_total"] = float(predicted.sum() / seconds.sum() - 1)
        return told

    def attribution(self) -> dict[str, float]:
        """Parts of the difference in total iteration time, relative to the measured: model, schedule, and the host's
        share of the measured time."""
        measured = sum(self.steps["seconds"])
        which = "anchored" if self.anchored is not None else "predicted"
        report = self.anchored if self.anchored is not None else self.simulated
        predicted = sum(self.steps[which])
        return {
            "latency_model": (predicted - measured) / measured,
            "schedule": (report.record.busy - predicted) / measured,
            "host_share": sum(self.steps["host"]) / measured,
        }

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "name": self.scenario.name,
            "policy": self.scenario.scheduler.policy,
            "metrics": self.metrics(),
            "alignment": self.alignment(),
            "attribution": self.attribution(),
        }

    def _reports(self) -> dict[str, Report | None]:
        return {
            "measured": self.measured,
            "again": self.again,
            "simulated": self.simulated,
            "anchored": self.anchored,
        }


def validate(
    scenario: Scenario,
    executor: Measurable,
    anchor: Measurable | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Measure the scenario twice, simulate it, and compare; `anchor` executes calibration steps in between.

    BadInput for a scenario that cannot be run.
    """
    planned = plan(scenario)
    points = grid(reach(planned))
    anchors = None if anchor is None else interleaved(anchor, points, planned.deployment.limits.block_tokens)
    if not points:
        raise scenario.blame(BadInput("no batch fits into the KV blocks", key="[engine] num_blocks"))
    warm = interleaved(executor, points, planned.deployment.limits.block_tokens)
    for _ in range(WARM_UP):  # the first iterations of a process are slow: caches, allocators, kernels
        next(warm)
    runs = []
    for number in range(2):
        beside = Beside(executor, planned.executor(), anchors)
        executor.forget()
        run = simulate(scenario, keep_tokens=True, engine=lambda _, beside=beside: lambda: beside)  # type: ignore[misc]
        runs.append((run, beside))
        if progress:
            progress(number + 1, 3)
    if not all(beside.rows for _, beside in runs):
        raise scenario.blame(BadInput("no iteration was run: there is nothing to compare", key="[workload]"))
    simulated = simulate(scenario, keep_tokens=True)
    (measured, first), (again, second) = runs
    profile = None if anchors is None else _profile_of([*first.anchored, *second.anchored], anchors, points, planned)
    anchored = None if profile is None else simulate(scenario, engine=lambda _: lambda: ProfileLatency(profile))
    if progress:
        progress(3, 3)
    return Validation(scenario, measured, again, simulated, anchored, profile, _steps(first, profile))


def reach(planned: Plan) -> Limits:
    """How far the batches of this scenario go under its own policy."""
    limits = planned.deployment.limits
    chunked = limits.policy in ("stall-free", "alternating")
    tokens = limits.token_budget if chunked else limits.max_model_tokens
    sequences = max(1, min(limits.max_sequences, limits.num_blocks // 2))  # the last block of each may be almost empty
    cache = limits.num_blocks * limits.block_tokens // 4
    return Limits(max(tokens, limits.max_sequences), sequences, limits.max_model_tokens, cache)


def _profile_of(rows: list[Row], anchors: Iterator[Row], points: list[Point], planned: Plan) -> Profile:
    """The latency model of the machine while it ran: fitted to the calibration steps, some more where they are few."""
    while len(rows) < max(FEWEST, 2 * len(points)):
        rows.append(next(anchors))
    latency = planned.scenario.latency
    if isinstance(latency, ProfileTable) and not can_fit():
        known = load(latency.name, planned.scenario.directory)  # nothing to fit with: its times, scaled to these
        if known.coefficients is None:
            raise BadInput("anchors need a profile of the form [coefficients], or scipy", key="[latency] name")
        predicted = sum(_predicted(known, one) for one in rows)
        return known.model_copy(update={"scale": known.scale * sum(one["seconds"] for one in rows) / predicted})
    assert planned.model is not None
    device = planned.device.name if planned.device else "cpu"
    return fit(Rows.of(rows, {}), name="anchored", model=planned.model.name, device=device)


def _steps(beside: Beside, profile: Profile | None) -> dict[str, list[float]]:
    """Columns of the measured run."""
    names = list(beside.rows[0]) if beside.rows else ["seconds", "host", "predicted"]
    columns = {name: [one[name] for one in beside.rows] for name in names}
    columns["anchored"] = [] if profile is None else [_predicted(profile, one) for one in beside.rows]
    return columns


def _predicted(profile: Profile, one: Row) -> float:
    """What a profile says of a batch that is known by its row."""
    terms = profile.coefficients
    assert terms is not None  # a profile of the roofline form is of no engine here
    counts = terms.seconds(*(int(one[name]) for name in ("decodes", "chunks", "prefill_tokens", "samples")))
    work = terms.context * one["context"] + terms.prefill_attention * one["attention"]
    return profile.scale * (counts + work + terms.prefill_context * one["prefill_context"])


def _agreement(one: Report, other: Report) -> tuple[float, int | None]:
    """The share of iterations, in order, that worked on the same batch, and the first that did not (None: all did)."""
    names = ("prefill_tokens", "decodes", "context_tokens", "chunks", "waiting")
    left, right = (np.column_stack([report.columns(name) for name in names]) for report in (one, other))
    both = min(len(left), len(right))
    same = (left[:both] == right[:both]).all(axis=1)
    different = np.flatnonzero(~same)
    first = int(different[0]) if len(different) else None if len(left) == len(right) else both
    return float(same.sum() / max(len(left), len(right), 1)), first


def worst(attempt: Validation) -> float:
    """How far an attempt is off: the largest of its median TBT, P99 TBT and median TTFT errors."""
    key = "error_anchored" if attempt.anchored is not None else "error"
    errors = [one[key] for one in attempt.metrics() if one["metric"] in ("tbt_p50", "tbt_p99", "ttft_p50")]
    return max((abs(float(error)) for error in errors if error is not None), default=0.0)
