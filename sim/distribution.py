"""Distributions as the contract defines them: percentiles are ranks, never interpolated."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sim.schema import PERCENTILES

Summary = dict[str, Any]


def summarise(values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64] | None = None) -> Summary:
    """n, mean, population std, min, percentiles and max of `values`, each there `counts` times (default: once).

    A percentile is the value of rank ceil(n·q) in ascending order. With n = 0 the other fields are None.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    ranks = np.arange(1, len(values) + 1) if counts is None else np.cumsum(counts[order])
    n = int(ranks[-1]) if len(ranks) else 0
    if n == 0:
        return dict.fromkeys(("n", "mean", "std", "min", *PERCENTILES, "max")) | {"n": 0}
    weights = np.diff(ranks, prepend=0)
    mean = float(np.dot(ordered, weights) / n)
    variance = float(np.dot((ordered - mean) ** 2, weights) / n)
    there = ordered[weights > 0]
    return {
        "n": n,
        "mean": mean,
        "std": variance**0.5,
        "min": float(there[0]),
        **{name: float(ordered[_position(ranks, n, q)]) for name, q in PERCENTILES.items()},
        "max": float(there[-1]),
    }


def _position(ranks: npt.NDArray[np.int64], n: int, thousandths: int) -> int:
    """Where the value of rank ceil(n·q) stands."""
    rank = -(-n * thousandths // 1000)
    return int(np.searchsorted(ranks, max(rank, 1)))
