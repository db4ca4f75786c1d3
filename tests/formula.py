"""Executors that take what a known formula says, written down apart from the product, and the profile that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from calibrate.grid import Point, batch
from calibrate.rows import Row, Rows, row
from sim.executor import Step
from sim.profile import Profile
from sim.request import Batch, Request

TRUTH = {
    "step": 4e-3,
    "decode_step": 1e-3,
    "sample": 3e-3,
    "chunk": 2e-3,
    "sequence": 1e-4,
    "context": 1e-6,
    "prefill_attention": 5e-8,
    "prefill_context": 4e-6,
}
KNOTS = [1, 16, 128, 256, 257, 512]
SECONDS = [0.0, 6e-4, 6e-3, 1.2e-2, 1.5e-2, 2.9e-2]  # a tile more at 257 tokens
PROFILE: dict[str, Any] = {
    "name": "truth",
    "model": "llama-40m",
    "device": "cpu",
    "coefficients": {**TRUTH, "tokens": {"knots": KNOTS, "seconds": SECONDS}},
    "validity": {"tokens": 1024, "sequences": 32, "context_tokens": 1024, "prefill_context_tokens": 1024},
    "errors": {"rows": 400, "held_out_median": 0.01, "held_out_p90": 0.03, "held_out_bias": 0.0},
}
SCENARIO: dict[str, Any] = {
    "name": "formula",
    "model": {"name": "llama-40m"},
    "device": {"name": "cpu"},
    "engine": {"num_blocks": 1200, "max_sequences": 32, "max_model_tokens": 1024},
    "scheduler": {"policy": "stall-free", "token_budget": 300},
    "latency": {"kind": "profile", "name": "truth.toml"},
    "workload": {
        "requests": 40,
        "seed": 5,
        "arrivals": {"kind": "poisson", "rate": 20.0},
        "lengths": {"kind": "uniform", "prompt": [20, 700], "output": [2, 40]},
    },
}
Rule = Callable[[Row], float]


def linear(tokens: float) -> float:
    """Seconds of the linear layers; the last slope goes on."""
    if tokens >= KNOTS[-1]:
        return SECONDS[-1] + (tokens - KNOTS[-1]) * (SECONDS[-1] - SECONDS[-2]) / (KNOTS[-1] - KNOTS[-2])
    return float(np.interp(tokens, KNOTS, SECONDS))


def truth(one: Row) -> float:
    """Seconds of a batch."""
    seconds = TRUTH["step"] + linear(one["decodes"] + one["prefill_tokens"])
    if one["decodes"] > 0:
        seconds += TRUTH["decode_step"]
    if one.get("samples", 1) > 0:
        seconds += TRUTH["sample"]
    seconds += TRUTH["chunk"] * one["chunks"] + TRUTH["sequence"] * (one["decodes"] + one["chunks"])
    seconds += TRUTH["context"] * one["context"] + TRUTH["prefill_attention"] * one["attention"]
    return seconds + TRUTH["prefill_context"] * one["prefill_context"]


def straight(one: Row) -> float:
    """The same without tiles: as much for each token."""
    tokens = one["decodes"] + one["prefill_tokens"]
    return truth(one) - linear(tokens) + 5e-5 * (tokens - 1)


class Formula:
    """Executes by a rule, times `slower`, with relative noise and a share of tenfold outliers where they are asked for.

    `host` is the share of the seconds that it says the host took. After `stop_after` batches it is interrupted.
    """

    def __init__(
        self,
        rule: Rule = truth,
        *,
        slower: float = 1.0,
        noise: float = 0.0,
        outliers: float = 0.0,
        host: float = 0.0,
        seed: int = 0,
        stop_after: int | None = None,
    ) -> None:
        self.rule, self.slower, self.noise, self.outliers, self.host = rule, slower, noise, outliers, host
        self.rng = np.random.default_rng(seed)
        self.left = stop_after
        self.executed: list[Row] = []
        self.pretended: list[tuple[int, int]] = []
        self.forgotten = 0

    def execute(self, batch: Batch) -> Step:
        """What the rule says of the batch."""
        if self.left is not None:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
        one = row(batch)
        self.executed.append(one)
        seconds = self.rule(one) * self.slower
        if self.noise:
            seconds *= max(0.1, 1 + self.noise * self.rng.standard_normal())
        if self.rng.random() < self.outliers:
            seconds *= 10
        return Step((seconds,), host=self.host * seconds)

    def spent(self) -> None:
        """Not told."""

    def notes(self) -> list[str]:
        """None."""
        return []

    def pretend(self, request: Request, tokens: int) -> None:
        """Noted."""
        self.pretended.append((request.id, tokens))

    def forget(self) -> None:
        """Counted."""
        self.forgotten += 1


def measured(
    points: Iterable[Point], rounds: int = 1, executor: Formula | None = None, provenance: dict[str, Any] | None = None
) -> Rows:
    """Rows of so many rounds over the points."""
    one, rng, found = executor or Formula(), np.random.default_rng(7), []
    listed = list(points)
    for number in range(rounds):
        for point in listed:
            made, _ = batch(point, 16, rng)
            found.append(row(made) | {"seconds": one.execute(made).seconds[0], "host": 0.0, "round": number})
    return Rows.of(found, provenance or {})


def predicted(profile: Profile, rows: Rows) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What a profile's numbers say of rows, by the formula of its documentation."""
    terms = profile.coefficients
    linear = np.array([terms.tokens.at(tokens) for tokens in (rows["decodes"] + rows["prefill_tokens"]).tolist()])
    few = np.zeros(len(linear))
    if terms.few is not None:
        few = np.array([terms.few.at(count) if count else 0.0 for count in rows.samples.tolist()])
    return profile.scale * (
        terms.step
        + terms.decode_step * (rows["decodes"] > 0)
        + terms.sample * (rows.samples > 0)
        + terms.chunk * rows["chunks"]
        + terms.sequence * (rows["decodes"] + rows["chunks"])
        + terms.context * rows["context"]
        + terms.prefill_attention * rows["attention"]
        + terms.prefill_context * rows["prefill_context"]
        + linear
        + few
    )
