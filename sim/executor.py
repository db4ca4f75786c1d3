"""The seam to hardware: an executor takes a batch and says what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sim.request import Batch


class Spent(NamedTuple):
    """Where an iteration's time went, in seconds summed over stages, and its work over all devices."""

    compute: float
    weight_reads: float
    kv_reads: float
    activations: float
    communication: float
    host: float
    flops: float
    bytes: float


@dataclass(slots=True)  # not frozen: that would treble the cost of making one
class Step:
    """The cost of one iteration: seconds of each pipeline stage, and of the hand-over between two stages."""

    seconds: tuple[float, ...]
    hop: float = 0.0
    spent: Spent | None = None


class Executor(Protocol):
    """Executes a batch, synchronously. A model answers at once; hardware has spent the time it returns."""

    def execute(self, batch: Batch) -> Step: ...
