"""Which of two policies holds the higher rate, as far as searches on the same seeds can tell.

Both policies meet the same requests on a seed, so the logarithm of the ratio of their rates is one sample, and
Student's t (1908) on those of all seeds gives an interval for the ratio. A capacity is known to the tolerance of its
search, so a smaller difference is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import exp, log, log1p, pi, sqrt, tan
from typing import Any

from sim.capacity import Capacity

CONFIDENCE = 0.95
MOST_SEEDS = 1000  # more than that many are not worth asking for
SIGNS = 6  # untied seeds that must all agree for a sign test at 95 %: 2 · 0.5⁶ = 0.03


def verdicts(found: Sequence[Capacity], tolerance: float) -> list[dict[str, Any]]:
    """A verdict for every pair, ready for JSON.

    `ratio` is the first's rate over the second's (the geometric mean over seeds), `interval` its 95 % interval; None
    where a rate is 0. `seeds_needed` is a rough number where it cannot be told, None where no number would do.
    """
    return [_verdict(one, other, tolerance) for one, other in combinations(found, 2)]


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: exact for 1 and 2 degrees of freedom, else by its expansion in 1 / freedom
    (Abramowitz and Stegun 26.7.5), within 0.2 % of it."""
    from statistics import NormalDist

    p = (1 + CONFIDENCE) / 2
    if freedom == 1:
        return tan(pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) * sqrt(2 / (4 * p * (1 - p)))
    z, v = NormalDist().inv_cdf(p), freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def _verdict(one: Capacity, other: Capacity, tolerance: float) -> dict[str, Any]:
    pairs = [(rate, other.seeds[seed]) for seed, rate in one.seeds.items() if seed in other.seeds]
    names, n = (one.policy, other.policy), len(pairs)
    if not any(a or b for a, b in pairs):
        return _told(names, n, "equal", "neither is feasible on any seed")
    if n < 2:
        return _told(names, n, None, "one seed says nothing about others", needed=2)
    if not all(a and b for a, b in pairs):
        return _by_sign(names, pairs)
    from statistics import fmean, stdev  # not for every start of the program

    logs = [log(a / b) for a, b in pairs]
    mean, scatter = fmean(logs), stdev(logs)
    half = student(n - 1) * scatter / sqrt(n)
    low, high, known = mean - half, mean + half, log1p(tolerance)
    interval: dict[str, Any] = {"ratio": exp(mean), "interval": [exp(low), exp(high)]}
    if -known <= low and high <= known:
        return _told(names, n, "equal", "they differ by no more than the tolerance of the searches", **interval)
    if low > 0 < mean - known or high < 0 > mean + known:
        return _told(names, n, "first" if mean > 0 else "second", "the interval of their ratio excludes 1", **interval)
    why = "the interval of their ratio holds 1" if low <= 0 <= high else "they differ by less than the tolerance"
    return _told(names, n, None, why, needed=_needed(abs(mean), scatter, known, n), **interval)


def _by_sign(names: tuple[str, str], pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """A rate of 0 has no logarithm: who is ahead on each seed must do."""
    ahead, behind = (sum(sign * (a - b) > 0 for a, b in pairs) for sign in (1, -1))
    winner = "first" if ahead > behind else "second"
    if all(b == 0 < a for a, b in pairs) or all(a == 0 < b for a, b in pairs):
        return _told(names, len(pairs), winner, "the other is not feasible on any seed")
    if min(ahead, behind) == 0 and max(ahead, behind) >= SIGNS:
        return _told(names, len(pairs), winner, "it is ahead on every seed, and the other not feasible on some")
    needed = round(SIGNS * len(pairs) / max(ahead, behind)) if min(ahead, behind) == 0 else None
    why = "one is not feasible on some seeds, and too few seeds agree"
    return _told(names, len(pairs), None, why, needed=needed)


def _needed(mean: float, scatter: float, known: float, n: int) -> int | None:
    """How many seeds would tell, if more of them came out like these; None beyond MOST_SEEDS."""
    for seeds in range(n + 1, MOST_SEEDS + 1):
        half = student(seeds - 1) * scatter / sqrt(seeds)
        if (mean > half and mean > known) or mean + half <= known:
            return seeds
    return None


def _told(
    names: tuple[str, str],
    seeds: int,
    outcome: str | None,
    reason: str,
    *,
    ratio: float | None = None,
    interval: list[float] | None = None,
    needed: int | None = None,
) -> dict[str, Any]:
    first, second = names
    said = {
        "first": f"{first} beats {second}",
        "second": f"{second} beats {first}",
        "equal": f"{first} and {second}: no difference",
        None: f"{first} or {second}: cannot tell, more seeds needed",
    }
    return {
        "policies": list(names),
        "verdict": said[outcome],
        "winner": {"first": first, "second": second}.get(outcome or ""),
        "reason": reason,
        "ratio": ratio,
        "interval": interval,
        "seeds": seeds,
        "seeds_needed": needed,
    }


def line(verdict: Mapping[str, Any]) -> str:
    """One verdict as a person reads it."""
    told, seeds = verdict["verdict"], f"{verdict['seeds']} seed{'s' if verdict['seeds'] > 1 else ''}"
    if verdict["ratio"] is not None:
        ratio, (low, high) = verdict["ratio"], verdict["interval"]
        if verdict["winner"] == verdict["policies"][1]:
            ratio, low, high = 1 / ratio, 1 / high, 1 / low
        detail = f"× {ratio:.3g} ({low:.3g} to {high:.3g} at 95 %, {seeds})"
    else:
        detail = f"{verdict['reason']} ({seeds})"
    if verdict["winner"] is None and "cannot tell" in told:
        needed = verdict["seeds_needed"]
        detail += f"; about {needed} would tell" if needed else f"; no {MOST_SEEDS:,} like these would tell"
    return f"{told}: {detail}"
