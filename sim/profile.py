"""Calibrated latency profiles: physical terms whose coefficients were fitted to measurements.

An iteration lasts

    step + decode_step·[any decode] + sample·[s > 0] + chunk·(chunks) + sequence·n + few(s) + tokens(T) + context·C
         + prefill_attention·A + prefill_context·K

with T tokens in the batch, n requests, s of them that get a token (the rest are in the middle of their prompts), C KV
tokens of the decodes, A the sum over chunks of m·(m0 + m/2), and K the sum of m0 + m (KV that chunks read). `tokens` is
piecewise linear and never falls; so is `few`, what the first tokens of a batch take beyond `sequence` each, constant
from its last knot on. All coefficients are seconds and ≥ 0.
A profile of the other form has the figures of the roofline model (`sim.roofline`), fitted: efficiencies of a stack on
its devices. It reaches where no iteration was measured one by one: pipelines, and what was published of a system.
A profile is a TOML file; `name` is that of a shipped one or a path.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from functools import cache
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from sim.errors import BadInput, shown, unknown
from sim.executor import Spent, Step
from sim.hardware import Device, Model
from sim.request import Batch
from sim.roofline import Figures, Roofline
from sim.settings import describe
from sim.table import Count, NonNegative, Positive, Table

TERMS = ("step", "decode_step", "sample", "chunk", "sequence", "context", "prefill_attention", "prefill_context")
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


AUTO = "auto"


class ProfileTable(Table):
    """[latency] kind = "profile": a calibrated profile, by its name or its file's path, or "auto": the shipped one of
    the scenario's model, dtypes, device and parallelism, as `engine` runs them."""

    kind: Literal["profile"]
    name: Annotated[str, Field(min_length=1)]
    engine: Literal["vllm", "trtllm", "sglang"] | None = None  # vllm where left out

    @model_validator(mode="after")
    def _engine_goes_with_auto(self) -> ProfileTable:
        if self.engine is not None and self.name != AUTO:
            raise ValueError(f'engine = "{self.engine}" goes with name = "{AUTO}": a profile that is named has its own')
        return self


class Tokens(Table):
    """Seconds of the linear layers at each of `knots` tokens, ascending; the last slope goes on beyond them."""

    knots: Annotated[list[Count], Field(min_length=2)]
    seconds: list[NonNegative]

    @model_validator(mode="after")
    def _rises(self) -> Tokens:
        if len(self.knots) != len(self.seconds):
            raise ValueError(f"{len(self.knots)} knots and {len(self.seconds)} seconds must be as many")
        if any(a >= b for a, b in zip(self.knots, self.knots[1:], strict=False)):
            raise ValueError("knots must ascend")
        if any(a > b for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ValueError("seconds must not fall")
        return self

    def at(self, tokens: float) -> float:
        """Seconds at so many tokens."""
        knots, seconds = self.knots, self.seconds
        right = min(max(bisect_right(knots, tokens), 1), len(knots) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (knots[right] - knots[right - 1])
        return max(0.0, seconds[right - 1] + slope * (tokens - knots[right - 1]))


class Coefficients(Table):
    """Seconds per unit of each term."""

    step: NonNegative = 0.0
    decode_step: NonNegative = 0.0
    sample: NonNegative = 0.0
    chunk: NonNegative = 0.0
    sequence: NonNegative = 0.0
    context: NonNegative = 0.0
    prefill_attention: NonNegative = 0.0
    prefill_context: NonNegative = 0.0
    tokens: Tokens
    few: Tokens | None = None

    def seconds(self, decodes: int, chunks: int, prefill_tokens: int, samples: int) -> float:
        """What depends on counts alone."""
        total = self.step + self.chunk * chunks + self.sequence * (decodes + chunks)
        total += self.tokens.at(decodes + prefill_tokens) + (self.decode_step if decodes else 0.0)
        if samples:
            total += self.sample + (self.few.at(samples) if self.few is not None else 0.0)
        return total


class Validity(Table):
    """The largest values that were measured; beyond them a forecast extrapolates."""

    tokens: Count
    sequences: Count
    context_tokens: Count  # per decode
    prefill_context_tokens: Count  # m0 + m of a chunk


class Errors(Table):
    """What the fit leaves: relative errors of predicted against measured seconds on rows it had not seen."""

    rows: Count
    held_out_median: NonNegative
    held_out_p90: NonNegative
    held_out_bias: float


class Residual(Table):
    """One thing that a profile of the roofline form was fitted to, or is shown beside."""

    what: str
    unit: str
    published: NonNegative
    predicted: NonNegative
    fitted: bool = True  # or only compared

    @property
    def error(self) -> float:
        """How far the prediction is from the published figure, relative to it."""
        return abs(self.predicted / self.published - 1) if self.published else 0.0


class Profile(Table):
    """A fitted latency model, with where it comes from and how far it holds: exactly one of `coefficients` (of measured
    iterations) and `roofline`."""

    name: str
    model: str
    device: str
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    scale: Positive = 1.0
    tile: Count = 1  # tokens are computed in multiples of so many; 1 where that is not known
    coefficients: Coefficients | None = None
    roofline: Figures | None = None
    validity: Validity
    errors: Errors | None = None
    intervals: dict[str, Pair] = Field(default_factory=dict)  # 90 %, over resamples of the measurements
    provenance: dict[str, str | int | float | bool] = Field(default_factory=dict)
    residuals: list[Residual] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_form(self) -> Profile:
        if (self.coefficients is None) == (self.roofline is None):
            raise ValueError("give exactly one of [coefficients] and [roofline]")
        if self.coefficients is not None and self.errors is None:
            raise ValueError("[coefficients] come with [errors]")
        if self.coefficients is not None and self.pipeline_parallel > 1:
            raise ValueError("a pipeline needs the form [roofline]")
        return self

    @property
    def within(self) -> tuple[float, float] | None:
        """How near it comes, as shares: to half of what it was fitted to (or what was held out), and to nine tenths of
        what was held out, or all of the figures it was fitted to. None where there is nothing to compare it with."""
        if self.errors is not None:
            return self.errors.held_out_median, self.errors.held_out_p90
        errors = sorted(one.error for one in self.residuals if one.fitted)
        return (errors[len(errors) // 2], errors[-1]) if errors else None

    @property
    def trust(self) -> str:
        """How near it comes to what it was fitted to."""
        if self.within is None:
            return "nothing to compare it with"
        half, most = self.within
        if self.errors is not None:
            rows = (
                "iterations composed from kernel tables, held out"
                if "tables" in self.provenance
                else "measurements held out"
            )
            return f"within {half:.1%} of half and {most:.1%} of nine tenths of the {rows}"
        count = sum(one.fitted for one in self.residuals)
        return f"within {half:.0%} of half and {most:.0%} of all of the {count} figures it was fitted to"

    def beyond(self, seen: dict[str, int]) -> list[str]:
        """A note where a run left the range of the measurements: `seen` are the largest values of each in it."""
        limits = self.validity.model_dump()
        beyond = [
            f"{name.replace('_', ' ')} up to {seen[name]:,} (measured up to {limit:,})"
            for name, limit in limits.items()
            if seen[name] > limit
        ]
        return [f"profile {self.name!r} is extrapolated: {'; '.join(beyond)}"] if beyond else []


class ProfileRoofline(Roofline):
    """Executes by the roofline model with a profile's figures, and remembers how far beyond its data it went."""

    def __init__(self, profile: Profile, model: Model, device: Device) -> None:
        assert profile.roofline is not None
        super().__init__(profile.roofline, model, device, profile.tensor_parallel, profile.pipeline_parallel)
        self.profile = profile
        self.scale = profile.scale
        self.longest_decode = 0.0
        self.longest_chunk = self.most_tokens = self.most_rows = 0

    def execute(self, batch: Batch) -> Step:
        """The batch's time on each stage."""
        step = super().execute(batch)
        decodes = batch.decodes
        if decodes and batch.context > self.longest_decode * decodes:
            self.longest_decode = batch.context / decodes
        for chunk in batch.chunks:
            if chunk.start + chunk.tokens > self.longest_chunk:
                self.longest_chunk = chunk.start + chunk.tokens
        if decodes + batch.prefill_tokens > self.most_tokens:
            self.most_tokens = decodes + batch.prefill_tokens
        if decodes + len(batch.chunks) > self.most_rows:
            self.most_rows = decodes + len(batch.chunks)
        if self.scale == 1.0:
            return step
        return Step(tuple(seconds * self.scale for seconds in step.seconds), step.hop)

    def work(self, batch: Batch) -> Spent:
        """What one batch is spent on, and the work that it is; it does not count as executed."""
        spent = super().work(batch)
        return Spent._make([*(seconds * self.scale for seconds in spent[:-2]), *spent[-2:]])

    def notes(self) -> list[str]:
        """Where the run left the range of the measurements."""
        seen = {
            "tokens": self.most_tokens,
            "sequences": self.most_rows,
            "context_tokens": ceil(self.longest_decode),
            "prefill_context_tokens": self.longest_chunk,
        }
        return self.profile.beyond(seen)


class ProfileLatency:
    """Executes by a profile's formula, and remembers how far beyond its measurements it was asked to go."""

    def __init__(self, profile: Profile) -> None:
        assert profile.coefficients is not None
        self.profile = profile
        self.terms = profile.coefficients
        self.scale = profile.scale
        self.bases: dict[tuple[int, int, int, int], float] = {}
        self.seen = dict.fromkeys(Validity.model_fields, 0)

    def execute(self, batch: Batch) -> Step:
        """Seconds of the iteration."""
        terms, chunks = self.terms, batch.chunks
        key = (batch.decodes, len(chunks), batch.prefill_tokens, samples(batch))
        base = self.bases.get(key)
        if base is None:
            base = self._base(*key)
        seconds = base + terms.context * batch.context
        if batch.decodes and batch.context > self.seen["context_tokens"] * batch.decodes:
            self.seen["context_tokens"] = -(-batch.context // batch.decodes)
        if chunks:
            reach = sum(chunk.start + chunk.tokens for chunk in chunks)
            seconds += terms.prefill_attention * batch.attention + terms.prefill_context * reach
            if reach > self.seen["prefill_context_tokens"]:
                longest = max(chunk.start + chunk.tokens for chunk in chunks)
                self.seen["prefill_context_tokens"] = max(self.seen["prefill_context_tokens"], longest)
        return Step((seconds * self.scale,))

    def parts(self, batch: Batch) -> dict[str, float]:
        """Seconds of each term."""
        terms, sampled = self.terms, samples(batch)
        told = {
            "step": terms.step,
            "decode_step": terms.decode_step if batch.decodes else 0.0,
            "sample": terms.sample if sampled else 0.0,
            "few": terms.few.at(sampled) if sampled and terms.few is not None else 0.0,
            "chunk": terms.chunk * len(batch.chunks),
            "sequence": terms.sequence * batch.sequences,
            "tokens": terms.tokens.at(batch.tokens),
            "context": terms.context * batch.context,
            "prefill_attention": terms.prefill_attention * batch.attention,
            "prefill_context": terms.prefill_context * sum(chunk.start + chunk.tokens for chunk in batch.chunks),
        }
        return {name: self.scale * seconds for name, seconds in told.items()}

    def spent(self) -> None:
        """Coefficients do not say what the time is spent on."""

    def notes(self) -> list[str]:
        """Where the run left the range of the measurements."""
        return self.profile.beyond(self.seen)

    def _base(self, decodes: int, chunks: int, prefill_tokens: int, sampled: int) -> float:
        """What depends on counts alone."""
        if len(self.bases) > 1 << 16:
            self.bases.clear()
        self.seen["tokens"] = max(self.seen["tokens"], decodes + prefill_tokens)
        self.seen["sequences"] = max(self.seen["sequences"], decodes + chunks)
        base = self.terms.seconds(decodes, chunks, prefill_tokens, sampled)
        self.bases[decodes, chunks, prefill_tokens, sampled] = base
        return base


def samples(batch: Batch) -> int:
    """Requests of a batch that get a token: its decodes, and the chunks that complete a prefill."""
    done = batch.decodes
    for chunk in batch.chunks:
        done += chunk.start + chunk.tokens == chunk.request.prompt + chunk.request.emitted
    return done


@cache
def shipped() -> dict[str, Path]:
    """Profiles that come with servecast: name to file."""
    root = Path(str(resources.files("sim") / "profiles"))
    return {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.glob("**/*.toml"))}


def load(name: str, directory: Path) -> Profile:
    """The profile of that name: shipped, or a file relative to `directory` or the current one. BadInput for others."""
    known = shipped()
    if name in known:
        return _shipped(name)
    try:
        path = next((base / name for base in (directory, Path()) if (base / name).is_file()), None)
    except OSError as error:  # a name that no file can have, or a folder that may not be read
        raise BadInput(f"{shown(name)}: {(error.strerror or str(error)).lower()}", key="[latency] name") from None
    if path is None:
        what = f"no such file, and {unknown('profile', name, known)}" if known else f"no such file: {name}"
        raise BadInput(what, key="[latency] name")
    return _read(path)


@cache
def _shipped(name: str) -> Profile:
    """Read once: a search for a capacity asks for it at every rate."""
    return _read(shipped()[name])


def _read(path: Path) -> Profile:
    data: dict[str, Any] = {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return Profile.model_validate(data)
    except ValidationError as error:
        key, what = describe(error, data)
        raise BadInput(what, source=str(path), key=key) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"not a profile: {error}", source=str(path)) from None
