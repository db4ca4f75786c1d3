"""When requests arrive: one strict table per kind of ``[workload.arrivals]``.

Gaps are drawn at unit rate and divided by the rate, so that two rates meet the same shape (common random numbers), and
one by one, so that asking for more requests leaves the earlier ones as they were. Times are float64 seconds,
non-decreasing.
"""

from __future__ import annotations

from math import log
from random import Random
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from sim.errors import BadInput
from sim.table import SMALLEST, Count, NonNegative, Positive, Table

FloatArray = npt.NDArray[np.float64]
FilePath = Annotated[str, Field(min_length=1)]


class Poisson(Table):
    """Exponential gaps of mean 1/rate; the first request comes one gap after 0.

    `clip` cuts every gap at clip/rate. Sarathi-Serve's artefact does that with clip = 3, which raises the real rate by
    5.2 % (mean gap 1 - exp(-3) = 0.950 of the nominal one).
    """

    kind: Literal["poisson"] = "poisson"
    rate: Positive
    clip: Positive | None = None
    python_seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    """Draw the gaps as -ln(1 - u) of Python's own generator, so seeded, instead of the scenario's stream: those of
    Sarathi-Serve's artefact, whose seed is 42."""

    def times(self, rng: np.random.Generator, n: int) -> FloatArray:
        """`n` arrival times in seconds."""
        if self.python_seed is None:
            gaps = rng.standard_exponential(n)
        else:
            draws = Random(self.python_seed)
            gaps = np.array([-log(1.0 - draws.random()) for _ in range(n)])
        return _at_rate(_clipped(gaps, self.clip), self.rate)


class Gamma(Table):
    """Gamma-distributed gaps of mean 1/rate and coefficient of variation `cv`; cv = 1 is Poisson, cv > 1 is bursty."""

    kind: Literal["gamma"] = "gamma"
    rate: Positive
    cv: Annotated[Positive, Field(le=100)]
    clip: Positive | None = None

    def times(self, rng: np.random.Generator, n: int) -> FloatArray:
        """`n` arrival times in seconds: shape 1/cv², scale cv²/rate."""
        gaps = rng.standard_gamma(1.0 / self.cv**2, n) * self.cv**2
        return _at_rate(_clipped(gaps, self.clip), self.rate)


class Constant(Table):
    """A request every 1/rate seconds, the first at 1/rate."""

    kind: Literal["constant"] = "constant"
    rate: Positive

    def times(self, _rng: np.random.Generator, n: int) -> FloatArray:
        """`n` arrival times in seconds, each its index (from 1) over the rate; nothing is drawn."""
        return _at_rate(np.ones(n), self.rate)


class AtOnce(Table):
    """Every request at time 0: an offline batch."""

    kind: Literal["at-once"] = "at-once"

    def times(self, _rng: np.random.Generator, n: int) -> FloatArray:
        """`n` zeros."""
        return np.zeros(n)


class Closed(Table):
    """A closed loop: `concurrency` requests at 0; each finish or refusal issues the next one `think` seconds later.

    Its arrival times come from the run, not from here.
    """

    kind: Literal["closed"] = "closed"
    concurrency: Count
    think: NonNegative = 0.0


class TraceArrivals(Table):
    """Arrival times of a trace file (`sim.traces` lists the formats), shifted so that the first request is at 0.

    `scale` multiplies the rate. `rate` instead sets the mean rate of the requests of the run: gaps are scaled so that
    (n - 1) / (last - first) = rate. `repeat` starts the trace again after its last arrival plus its mean gap.
    `shuffle` permutes the gaps; where the same file also gives the lengths, it permutes the rows' lengths instead.
    """

    kind: Literal["trace"] = "trace"
    path: FilePath
    scale: Positive = 1.0
    rate: Positive | None = None
    repeat: bool = False
    shuffle: bool = False

    @model_validator(mode="after")
    def _one_rate(self) -> TraceArrivals:
        if self.rate is not None and self.scale != 1.0:
            raise ValueError(f"scale = {self.scale:g} and rate = {self.rate:g} exclude each other: give one of them")
        return self

    def rescaled(self, times: FloatArray) -> FloatArray:
        """`times` (s, the first at 0) with their gaps divided by `scale`, or scaled to the mean `rate`."""
        if self.rate is None:
            return times / self.scale
        if len(times) < 2:
            return times
        now = mean_rate(times)
        if now is None:
            what = f"{self.rate:g} cannot be reached by scaling gaps: the {len(times)} arrivals are at one instant"
            raise BadInput(what, key="[workload.arrivals] rate")
        return times * (now / self.rate)


Generated = Poisson | Gamma | Constant | AtOnce
Arrivals = Annotated[Poisson | Gamma | Constant | TraceArrivals | AtOnce | Closed, Field(discriminator="kind")]


def mean_rate(times: FloatArray) -> float | None:
    """Requests per second from the first arrival to the last, (n - 1) / (last - first); None where they coincide."""
    span = float(times[-1] - times[0]) if len(times) else 0.0
    return (len(times) - 1) / span if span >= SMALLEST**2 else None


def _clipped(gaps: FloatArray, clip: float | None) -> FloatArray:
    return gaps if clip is None else np.minimum(gaps, clip)


def _at_rate(unit_gaps: FloatArray, rate: float) -> FloatArray:
    times: FloatArray = np.cumsum(unit_gaps) / rate
    return times
