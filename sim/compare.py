"""The same requests under several policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.parallel import each
from sim.policies import COMPARED
from sim.report import Report
from sim.scenario import Scenario
from sim.simulate import Engine, simulate

if TYPE_CHECKING:
    import polars as pl


class Comparison(list[Report]):
    """A report for each policy, in the order that was asked for; a table in a notebook."""

    @property
    def frame(self) -> pl.DataFrame:
        """One row per policy: the numbers of its summary, those of distributions as `tbt_s_p99`."""
        import polars as pl

        return pl.DataFrame([flat(report.summary) for report in self], infer_schema_length=None)

    def _repr_html_(self) -> str:
        from sim import tables

        summaries = [report.summary for report in self]
        notes = [*dict.fromkeys(note for one in summaries for note in [*one["notes"], one["times_from"]])]
        title = summaries[0]["name"] if summaries else "no policy"
        return tables.html(title, [tables.side_by_side(summaries)], tables.of_comparison(summaries), notes)


def compare(
    scenario: Scenario,
    policies: Sequence[str] = COMPARED,
    *,
    keep_steps: bool = True,
    keep_tokens: bool = False,
    wall_clock: bool = False,
    engine: Engine | None = None,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Run the same requests under each policy. `progress(done, of)` counts policies. BadInput as for `simulate`."""
    tasks = [_Task(scenario.for_policy(policy), wall_clock, keep_steps, keep_tokens, engine) for policy in policies]
    reports: dict[int, Report] = {}
    for position, report in each(_run_task, tasks, workers=workers):
        reports[position] = report
        if progress:
            progress(len(reports), len(tasks))
    return Comparison(reports[position] for position in range(len(tasks)))


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as one: names are joined by `_`, lists are a text."""
    columns: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            columns |= {f"{name}_{key}": part for key, part in flat(value).items()}
        else:
            columns[name] = "; ".join(value) if isinstance(value, list) else value
    return columns


@dataclass(frozen=True, slots=True)
class _Task:
    scenario: Scenario
    wall_clock: bool
    keep_steps: bool
    keep_tokens: bool
    engine: Engine | None


def _run_task(task: _Task) -> Report:
    return simulate(
        task.scenario,
        keep_steps=task.keep_steps,
        keep_tokens=task.keep_tokens,
        wall_clock=task.wall_clock,
        engine=task.engine,
    )
