"""The affine latency model: explicit coefficients, the same for every pipeline stage."""

from __future__ import annotations

from typing import Literal

from sim.executor import Step
from sim.request import Batch
from sim.table import NonNegative, Table


class AffineTable(Table):
    """[latency] kind = "affine": seconds per step, per token, per request, per KV token of the decodes, per unit of
    prefill attention (m·(m0 + m/2) for a chunk of m tokens after m0), and between two stages."""

    kind: Literal["affine"]
    step: NonNegative = 0.0
    token: NonNegative = 0.0
    sequence: NonNegative = 0.0
    context: NonNegative = 0.0
    prefill_attention: NonNegative = 0.0
    hop: NonNegative = 0.0


class Affine:
    """Executes by formula: `step + token·T + sequence·n + context·C + prefill_attention·A` on each of `stages`."""

    __slots__ = ("context", "hop", "prefill_attention", "sequence", "stages", "step", "token")

    def __init__(self, table: AffineTable, stages: int = 1) -> None:
        self.step = table.step
        self.token = table.token
        self.sequence = table.sequence
        self.context = table.context
        self.prefill_attention = table.prefill_attention
        self.hop = table.hop
        self.stages = stages

    def execute(self, batch: Batch) -> Step:
        """Summed from left to right, so that equal batches cost the same to the last bit everywhere."""
        decodes = batch.decodes
        seconds = (
            self.step
            + self.token * (decodes + batch.prefill_tokens)
            + self.sequence * (decodes + len(batch.chunks))
            + self.context * batch.context
            + self.prefill_attention * batch.attention
        )
        return Step((seconds,) if self.stages == 1 else (seconds,) * self.stages, self.hop)

    def parts(self, batch: Batch) -> dict[str, float]:
        """Seconds of each term, over all stages; `communication` is the hand-overs."""
        terms = {
            "step": self.step,
            "token": self.token * batch.tokens,
            "sequence": self.sequence * batch.sequences,
            "context": self.context * batch.context,
            "prefill_attention": self.prefill_attention * batch.attention,
        }
        told = {name: self.stages * seconds for name, seconds in terms.items()}
        return told | {"communication": (self.stages - 1) * self.hop}

    def spent(self) -> None:
        """Coefficients do not say what the time is spent on."""

    def notes(self) -> list[str]:
        """Nothing beyond what the scenario says."""
        return []
