"""servecast: forecasts of LLM serving.

>>> from sim import Scenario, simulate
>>> report = simulate(Scenario.load("scenarios/chat-mistral-7b.toml"))
>>> report.summary["tbt_s"]["p99"], report.requests, report.steps

`capacity` finds the highest rate that meets a scenario's SLO, `cost` what a million tokens costs there, `explain` why
tokens of a run came late, `sweep` runs every point of a study. What cannot be used raises `BadInput`.
"""

from sim.capacity import Capacity, capacity
from sim.cost import cost
from sim.errors import BadInput
from sim.explain import Explanation, explain
from sim.report import Report
from sim.scenario import Scenario
from sim.simulate import simulate
from sim.study import Study
from sim.sweep import sweep

__all__ = [
    "BadInput",
    "Capacity",
    "Explanation",
    "Report",
    "Scenario",
    "Study",
    "capacity",
    "cost",
    "explain",
    "simulate",
    "sweep",
]
