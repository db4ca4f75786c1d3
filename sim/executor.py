"""The seam to hardware: an executor takes a batch and says what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sim.request import Batch


class Spent(NamedTuple):
    """Where time went, in seconds summed over stages, and the work that was done, over all devices."""

    compute: float = 0.0
    weight_reads: float = 0.0
    kv_reads: float = 0.0
    activations: float = 0.0
    communication: float = 0.0
    host: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        """The sum of this and `times` the other."""
        return Spent(*(mine + times * its for mine, its in zip(self, other, strict=True)))


@dataclass(slots=True)  # not frozen: that would treble the cost of making one
class Step:
    """The cost of one iteration: seconds of each pipeline stage, and of the hand-over between two stages.

    `host`: how many of the seconds the host spent before the device could start, where that was measured.
    """

    seconds: tuple[float, ...]
    hop: float = 0.0
    host: float = 0.0


class Executor(Protocol):
    """Executes a batch, synchronously. A model answers at once; hardware has spent the time it returns."""

    def execute(self, batch: Batch) -> Step: ...

    def spent(self) -> Spent | None:
        """What all its iterations so far were spent on; None if it cannot tell."""

    def notes(self) -> list[str]:
        """What the user should know about the times it gave."""
        ...


class LatencyModel(Executor, Protocol):
    """An executor that answers by formula, and so can say what any batch would cost."""

    def parts(self, batch: Batch) -> dict[str, float]:
        """Seconds of a batch by the model's own terms, over all stages and hand-overs; the run is none the wiser.

        Their sum is what `execute` says. `communication` and `host` mean that and nothing else.
        """
        ...
