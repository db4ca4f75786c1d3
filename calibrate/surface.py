"""Measured kernel times as functions: curves by one size, surfaces by batch and length, and what lies between sites."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Shape = tuple[int, int]  # of a GEMM's matrix of weights: n, k


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Seconds at ascending sizes. Linear between them, constant below, in proportion to the size beyond the last."""

    x: Floats
    seconds: Floats

    def at(self, size: float) -> float:
        """Seconds at a size."""
        last = float(self.x[-1])
        if size > last:
            return float(self.seconds[-1]) * size / last
        return float(np.interp(size, self.x, self.seconds))

    def over(self, sizes: Floats) -> Floats:
        """Seconds at each of many sizes."""
        return np.asarray(np.interp(sizes, self.x, self.seconds) * np.maximum(1.0, sizes / self.x[-1]))


def by_nearest(sites: Mapping[Shape, Curve], n: int, k: int) -> Curve:
    """A GEMM between measured shapes: FLOP/s of the four nearest, weighed by 1 / distance² in log n and log k."""
    nearest = sorted(sites, key=lambda site: (_apart(site, n, k), site))[:4]
    return _weighed(sites, {site: 1 / max(_apart(site, n, k), 1e-9) ** 2 for site in nearest}, n, k)


def _apart(site: Shape, n: int, k: int) -> float:
    return float(np.hypot(np.log(site[0] / n), np.log(site[1] / k)))


def _weighed(sites: Mapping[Shape, Curve], weights: Mapping[Shape, float], n: int, k: int) -> Curve:
    """The weighted mean of the sites' FLOP/s at every m that one of them was measured at."""
    m = np.unique(np.concatenate([sites[site].x for site in weights]))
    rate = sum((weight * site[0] * site[1] / sites[site].over(m) for site, weight in weights.items()), np.zeros(len(m)))
    return Curve(m, n * k * sum(weights.values()) / rate)


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """Seconds by batch (rows) and length (columns), both ascending: linear in batch; linear in length, or log-log."""

    batches: Floats
    lengths: Floats
    seconds: Floats
    powers: bool  # log-log in length

    @classmethod
    def of(cls, rows: Floats, phase: str) -> Surface:
        """From rows (batch, length, seconds); what a device's memory left out is filled in by proportion.

        Prefill ("context"): in proportion to the batch. Decode: each further KV token costs what it costs at the
        largest batch that was measured at that length, for reading the KV cache is bound by bandwidth there.
        """
        batches, lengths = np.unique(rows[:, 0]), np.unique(rows[:, 1])
        seconds = np.full((len(batches), len(lengths)), np.nan)
        at = np.searchsorted(batches, rows[:, 0]), np.searchsorted(lengths, rows[:, 1])
        seconds[at] = rows[:, 2]
        if phase == "context":
            _fill_by_batch(batches, seconds)
        else:
            _fill_by_tokens(batches, lengths, seconds)
        return cls(batches, lengths, seconds, phase == "context")

    def at(self, batch: float, length: float) -> float:
        """Seconds at a batch and a length."""
        low, high, share = _bracket(self.batches, batch)
        first = self._along(low, length)
        return first if share == 0 else (1 - share) * first + share * self._along(high, length)

    def _along(self, row: int, length: float) -> float:
        seconds, lengths = self.seconds[row], self.lengths
        low, high, share = _bracket(lengths, length)
        if share == 0:
            return float(seconds[low])
        if not self.powers:
            return float((1 - share) * seconds[low] + share * seconds[high])
        share = float(np.log(length / lengths[low]) / np.log(lengths[high] / lengths[low]))
        return float(np.exp((1 - share) * np.log(seconds[low]) + share * np.log(seconds[high])))


def _bracket(known: Floats, wanted: float) -> tuple[int, int, float]:
    """Two neighbours and the share of the second; beyond the last the last two go on, below the first it holds."""
    if len(known) == 1 or wanted <= known[0]:
        return 0, 0, 0.0
    high = min(int(np.searchsorted(known, wanted)), len(known) - 1)
    return high - 1, high, float((wanted - known[high - 1]) / (known[high] - known[high - 1]))


def _fill_by_batch(batches: Floats, seconds: Floats) -> None:
    for row in range(1, len(batches)):
        missing = np.isnan(seconds[row])
        seconds[row, missing] = seconds[row - 1, missing] * batches[row] / batches[row - 1]
    for row in range(len(batches) - 2, -1, -1):
        missing = np.isnan(seconds[row])
        seconds[row, missing] = seconds[row + 1, missing] * batches[row] / batches[row + 1]


def _fill_by_tokens(batches: Floats, lengths: Floats, seconds: Floats) -> None:
    rate = 0.0  # seconds per KV token
    for column in range(1, len(lengths)):
        step = float(lengths[column] - lengths[column - 1])
        grown = (seconds[:, column] - seconds[:, column - 1]) / (batches * step)
        measured = np.flatnonzero(~np.isnan(grown))
        rate = max(float(grown[measured[-1]]), 0.0) if len(measured) else rate
        missing = np.isnan(seconds[:, column])
        seconds[missing, column] = seconds[missing, column - 1] + rate * batches[missing] * step
    for column in range(len(lengths) - 2, -1, -1):  # a row that begins late
        missing = np.isnan(seconds[:, column])
        seconds[missing, column] = seconds[missing, column + 1]


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Surfaces with their weights, asked at `split` times the batch."""

    parts: tuple[tuple[float, Surface], ...]
    split: int = 1

    def at(self, batch: float, length: float) -> float:
        """Seconds at a batch and a length."""
        return sum(weight * surface.at(batch * self.split, length) for weight, surface in self.parts)


def mixture(sites: Mapping[tuple[int, int], Surface], heads: int, kv_heads: int, scale: float = 1.0) -> Mixture | None:
    """Attention of `heads` over `kv_heads`, from sites (KV heads, heads): linear in heads at the same KV heads.

    Where those were not measured, g times the batch with a g-th of the heads stands in: the same work, laid out by
    kernels in the same way, for they work on (sequence, KV head) pairs. Beyond the most heads measured, in proportion.
    """
    for split in (g for g in range(1, kv_heads + 1) if kv_heads % g == 0 and heads % g == 0):
        kv, each = kv_heads // split, heads // split
        known = sorted(n for one, n in sites if one == kv)
        if each in known:
            return Mixture(((scale, sites[kv, each]),), split)
        if known and known[0] < each < known[-1]:
            right = bisect_right(known, each)
            low, high = known[right - 1], known[right]
            share = (each - low) / (high - low)
            return Mixture(((scale * (1 - share), sites[kv, low]), (scale * share, sites[kv, high])), split)
    known = sorted(n for one, n in sites if one == kv_heads)
    if not known:
        return None
    nearest = known[-1] if heads > known[-1] else known[0]
    return Mixture(((scale * heads / nearest if heads > nearest else scale, sites[kv_heads, nearest]),))
