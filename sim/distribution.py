"""Distributions as the contract defines them: percentiles are ranks, never interpolated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.schema import PERCENTILES

AT_ONCE = 1 << 20  # values
Summary = dict[str, Any]


def summarise(values: npt.NDArray[np.float64], counts: npt.NDArray[np.integer] | None = None) -> Summary:
    """n, mean, population std, min, percentiles and max of `values`, each there `counts` times (default: once).

    A percentile is the value of rank ceil(n·q) in ascending order. With n = 0 the other fields are None. Tens of
    millions of values are summed some at a time, and sorted once: three times their size is all the memory it takes.
    """
    if counts is not None and not counts.all():
        values, counts = values[counts > 0], counts[counts > 0]
    n = len(values) if counts is None else int(counts.sum())
    if n == 0:
        return dict.fromkeys(("n", "mean", "std", "min", *PERCENTILES, "max")) | {"n": 0}
    mean = _total(values, counts, lambda part: part) / n
    variance = _total(values, counts, lambda part: (part - mean) ** 2) / n
    if counts is None:
        ordered, ranks = np.sort(values), np.arange(1, n + 1)
    else:
        order = np.argsort(values)
        ordered, ranks = values[order], np.cumsum(counts[order], dtype=np.int64)
    return {
        "n": n,
        "mean": mean,
        "std": variance**0.5,
        "min": float(ordered[0]),
        **{name: float(ordered[_position(ranks, n, q)]) for name, q in PERCENTILES.items()},
        "max": float(ordered[-1]),
    }


def _total(
    values: npt.NDArray[np.float64],
    counts: npt.NDArray[np.integer] | None,
    what: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
) -> float:
    """The sum of `what` of the values, weighted by their counts."""
    total = 0.0
    for start in range(0, len(values), AT_ONCE):
        part = what(values[start : start + AT_ONCE])
        total += float(part.sum() if counts is None else np.dot(part, counts[start : start + AT_ONCE]))
    return total


def _position(ranks: npt.NDArray[np.int64], n: int, thousandths: int) -> int:
    """Where the value of rank ceil(n·q) stands."""
    rank = -(-n * thousandths // 1000)
    return int(np.searchsorted(ranks, max(rank, 1)))
