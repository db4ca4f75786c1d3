"""servecast: forecasts of LLM serving.

>>> from sim import Scenario, charts, simulate
>>> report = simulate(Scenario.load("scenarios/chat-mistral-7b.toml"))
>>> report.summary["tbt_s"]["p99"], report.requests, report.steps
>>> charts.tbt(report)

`compare` runs the same requests under several policies, `capacity` finds the highest rate that meets a scenario's SLO,
`budget` the token budget that its TBT limit allows, `cost` what a million tokens costs, `explain` why tokens of a run
came late, `sweep` runs every point of a study, `results` reads what commands kept. What cannot be used raises
`BadInput`. Charts need Altair, which is imported with `sim.charts` and not before.
"""

from importlib import import_module
from types import ModuleType

from sim.capacity import Capacities, Capacity, capacity
from sim.compare import Comparison, compare
from sim.cost import cost
from sim.errors import BadInput
from sim.explain import Explanation, explain
from sim.planner import budget
from sim.report import Report
from sim.scenario import Scenario
from sim.simulate import simulate
from sim.study import Study
from sim.sweep import sweep

__all__ = [
    "BadInput",
    "Capacities",
    "Capacity",
    "Comparison",
    "Explanation",
    "Report",
    "Scenario",
    "Study",
    "budget",
    "capacity",
    "compare",
    "cost",
    "explain",
    "simulate",
    "sweep",
]


def __getattr__(name: str) -> ModuleType:
    """`sim.charts` and `sim.results`, when they are asked for."""
    if name in ("charts", "results"):
        return import_module(f"sim.{name}")
    raise AttributeError(f"module 'sim' has no attribute {name!r}")
