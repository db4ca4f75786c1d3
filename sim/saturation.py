"""Whether a run was asked for more than it can serve: a queue that grows for as long as requests arrive.

The latencies of such a run say how long it was, not how the deployment serves. What is tested is the queue of requests
that were not scheduled yet: it never emptied in the second half of the arrivals, it went on growing there, and at the
last arrival it is longer than chance would make it at a load of 1 (a random walk whose steps vary as the gaps and the
tokens of the requests do, on every replica).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FEWEST = 100  # requests; of fewer, chance decides
BEYOND_CHANCE = 2.0  # standard deviations of that walk
GROWTH = 1.3  # of the queue from half time to the end, and of the delays from the second quarter to the last


@dataclass(frozen=True, slots=True)
class Saturation:
    """`saturated`: None where it cannot be told. Rates in requests/s: `asked_rate` of the arrivals, `served_rate` what
    is scheduled while the queue grows, None unless saturated. `delay_growth`: seconds of scheduling delay more for each
    second of the run."""

    saturated: bool | None = None
    asked_rate: float | None = None
    served_rate: float | None = None
    delay_growth: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def saturation(arrival: Floats, scheduled: Floats, work: Floats, *, replicas: int = 1) -> Saturation:
    """Judge an open-loop run by its requests in order of arrival, the refused left out.

    `scheduled` is NaN where a request never was; `work` is what each asks for, in tokens.
    """
    n = len(arrival)
    span = float(arrival[-1] - arrival[0]) if n else 0.0
    if span <= 0:
        return Saturation()
    asked = (n - 1) / span
    done = ~np.isnan(scheduled)  # of the others it is not known how long they wait
    if n < FEWEST * replicas or done.sum() < FEWEST // 10:
        return Saturation(asked_rate=asked)
    order = np.sort(np.where(done, scheduled, np.inf))
    queue = np.arange(n) - np.searchsorted(order, arrival, side="right")  # that each arrival finds
    came, delay = arrival[done], (scheduled - arrival)[done]
    half, quarter = n // 2, len(delay) // 4
    chance = np.sqrt((_variation(np.diff(arrival)) + _variation(work)) * n * replicas)
    early, late = float(delay[quarter : 2 * quarter].mean()), float(delay[-quarter:].mean())
    saturated = bool(
        queue[half:].min() > 0
        and queue[-1] + 1 >= BEYOND_CHANCE * chance
        and queue[-1] + 1 >= GROWTH * (queue[half] + 1)
        and late >= GROWTH * early
    )
    if not saturated:
        return Saturation(False, asked)
    busy = order[np.isfinite(order)]
    busy = busy[busy >= arrival[half]]
    served = (len(busy) - 1) / float(busy[-1] - busy[0]) if len(busy) > 1 and busy[-1] > busy[0] else None
    away = came - came.mean()
    return Saturation(True, asked, served, float((away * delay).sum() / (away**2).sum()))


def _variation(values: Floats) -> float:
    """The squared coefficient of variation."""
    mean = float(values.mean())
    return float(values.var()) / mean**2 if mean else 0.0


def sentence(summary: Mapping[str, Any]) -> str | None:
    """What a person should read first of a run that is saturated; None of any other."""
    if not summary.get("saturated"):
        return None
    served, growth = summary["served_rate"], summary["delay_growth"]
    holds = f", served {served:.3g}" if served is not None else ""
    return (
        f"saturated: asked {summary['asked_rate']:.3g} requests/s{holds}; requests wait {growth:.2g} s longer for "
        "every second of the run: latencies below tell the length of the run, not of the service"
    )
