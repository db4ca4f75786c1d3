"""How long requests are: one strict table per kind of ``[workload.lengths]``.

A generated kind has ``draw(rng, n)``: int64 rows ``[prompt, output]``, both at least 1, at most `n` of them (rows that
the model itself rules out are missing). Draws are taken row by row, so that asking for more requests leaves the earlier
ones as they were.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator, model_validator

from sim.arrivals import FilePath, FloatArray
from sim.errors import unknown
from sim.table import Count, NonNegative, Positive, Table

IntArray = npt.NDArray[np.int64]

MAX_TOKENS = 2**31
"""No prompt or output is longer, generated or read."""

Z90 = 1.2815515655446004
"""The standard normal distribution's 90th percentile."""

Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Range = Annotated[tuple[Tokens, Tokens], Field(strict=False)]  # TOML has arrays, not tuples; the elements stay strict


class Fixed(Table):
    """Every request the same."""

    kind: Literal["fixed"] = "fixed"
    prompt: Tokens
    output: Tokens

    def draw(self, _rng: np.random.Generator, n: int) -> IntArray:
        """`n` equal rows; nothing is drawn."""
        return np.tile(np.array([self.prompt, self.output], dtype=np.int64), (n, 1))


class Uniform(Table):
    """Integers from ``[lo, hi]``, both ends included, prompt and output independent."""

    kind: Literal["uniform"] = "uniform"
    prompt: Range
    output: Range

    @field_validator("prompt", "output")
    @classmethod
    def _ordered(cls, ends: tuple[int, int]) -> tuple[int, int]:
        if ends[0] > ends[1]:
            raise ValueError(f"[{ends[0]}, {ends[1]}] is empty: its first number must be at most its second")
        return ends

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """`n` rows."""
        low, high = np.array([self.prompt, self.output], dtype=np.int64).T
        rows: IntArray = low + (rng.random((n, 2)) * (high - low + 1)).astype(np.int64)
        return rows


class Spread(Table):
    """A log-normal by its median and 90th percentile, before the values above `max` are redrawn (tokens)."""

    median: Positive
    p90: Positive
    max: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Spread:
        if not self.median <= min(self.p90, self.max):
            raise ValueError(f"median = {self.median:g} is above p90 = {self.p90:g} or max = {self.max}")
        return self

    @property
    def sigma(self) -> float:
        """The standard deviation of the logarithm: ln(p90/median) over the normal distribution's P90."""
        return float(np.log(self.p90 / self.median)) / Z90


class LogNormal(Table):
    """Log-normal prompt and output, independent; values above `max` are redrawn, values below 1 become 1."""

    kind: Literal["lognormal"] = "lognormal"
    prompt: Spread
    output: Spread

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """At most `n` rows."""
        both = (self.prompt, self.output)
        with np.errstate(over="ignore"):
            z = rng.standard_normal((n, 2))
            tokens = np.rint([s.median for s in both] * np.exp(z * [s.sigma for s in both]))
        kept = tokens[(tokens <= [s.max for s in both]).all(axis=1)]
        return np.maximum(kept, 1.0).astype(np.int64)


class Zipf(Table):
    """Zipf-distributed total tokens, split at a fixed prompt-to-output ratio; keys and defaults are Vidur's.

    P(total = min_tokens + i) is proportional to 1 / (i + 1)^theta for i = 0 ... max_tokens - min_tokens. Vidur's
    generator (vidur/utils/zipf_generator.py, after Gray et al., SIGMOD 1994) approximates that law and splits into
    fractional tokens; here the law is exact and output = total / (1 + prefill_to_decode_ratio) rounded to an integer,
    both parts at least 1.
    """

    kind: Literal["zipf"] = "zipf"
    theta: NonNegative = 0.6
    min_tokens: Annotated[int, Field(ge=2, le=10_000_000)] = 1024
    max_tokens: Annotated[int, Field(ge=2, le=10_000_000)] = 4096
    prefill_to_decode_ratio: Positive = 20.0

    @model_validator(mode="after")
    def _ordered(self) -> Zipf:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}")
        return self

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """`n` rows."""
        ranks = np.arange(1, self.max_tokens - self.min_tokens + 2, dtype=np.float64)
        cumulative = np.cumsum(ranks**-self.theta)
        index = np.searchsorted(cumulative, rng.random(n) * cumulative[-1], side="right")
        total = self.min_tokens + np.minimum(index, len(ranks) - 1)
        output = np.clip(np.rint(total / (1.0 + self.prefill_to_decode_ratio)).astype(np.int64), 1, total - 1)
        return np.stack([total - output, output], axis=1)


class TraceLengths(Table):
    """Lengths of a trace file (`sim.traces` lists the formats), in file order; `shuffle` permutes them by the seed.

    `repeat` starts the trace again where more requests are asked for than it has rows, freshly permuted if shuffled.
    """

    kind: Literal["trace"] = "trace"
    path: FilePath
    repeat: bool = False
    shuffle: bool = False


class Quantiles(Table):
    """Marginals as quantile tables, joined by a Gaussian copula; rows over `max_total_tokens` are redrawn."""

    source: str
    max_total_tokens: Count
    copula: Annotated[float, Field(gt=-1, lt=1)]
    probabilities: Annotated[tuple[float, ...], Field(strict=False)]
    prompt: Annotated[tuple[Count, ...], Field(strict=False)]
    output: Annotated[tuple[Count, ...], Field(strict=False)]

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """At most `n` rows."""
        z = rng.standard_normal((n, 2))
        z[:, 1] = self.copula * z[:, 0] + np.sqrt(1.0 - self.copula**2) * z[:, 1]
        rows = np.stack([self._tokens(z[:, 0], self.prompt), self._tokens(z[:, 1], self.output)], axis=1)
        return _within(rows, self.max_total_tokens)

    def _tokens(self, z: FloatArray, table: tuple[int, ...]) -> IntArray:
        grid, cdf = _normal_cdf()
        return np.rint(np.interp(z, grid, np.interp(cdf, self.probabilities, table))).astype(np.int64)


class TruncatedLogNormal(Table):
    """A log-normal length model whose rows over `max_total_tokens` are redrawn."""

    source: str
    max_total_tokens: Count
    prompt: Spread
    output: Spread

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """At most `n` rows."""
        return _within(LogNormal(prompt=self.prompt, output=self.output).draw(rng, n), self.max_total_tokens)


@lru_cache(maxsize=1)
def datasets() -> dict[str, Quantiles | TruncatedLogNormal]:
    """The shipped length models by name, from ``sim/catalogue/datasets.toml``."""
    tables = tomllib.loads(files("sim.catalogue").joinpath("datasets.toml").read_text(encoding="utf-8"))
    return {
        name: (Quantiles if "copula" in table else TruncatedLogNormal).model_validate(table)
        for name, table in tables.items()
    }


class Dataset(Table):
    """A shipped length model by name; ``datasets()`` has them, with their sources."""

    kind: Literal["dataset"] = "dataset"
    name: str

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in datasets():
            raise ValueError(unknown("dataset", name, datasets()))
        return name

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """At most `n` rows."""
        return datasets()[self.name].draw(rng, n)


Drawn = Dataset | Fixed | Uniform | LogNormal | Zipf
Lengths = Annotated[Dataset | Fixed | Uniform | LogNormal | Zipf | TraceLengths, Field(discriminator="kind")]


def _within(rows: IntArray, max_total_tokens: int) -> IntArray:
    kept: IntArray = rows[rows.sum(axis=1) <= max_total_tokens]
    return kept


@lru_cache(maxsize=1)
def _normal_cdf() -> tuple[FloatArray, FloatArray]:
    """The standard normal distribution function on a grid, good to 5e-7 by linear interpolation."""
    grid = np.linspace(-8.0, 8.0, 4001)
    return grid, np.array([NormalDist().cdf(z) for z in grid])
