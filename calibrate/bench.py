"""Refitting a profile to what `vllm bench serve --save-result --save-detailed` measured.

Kernels are known from tables or from another machine; what a user's engine spends beside them is not. Each result's
requests are simulated by the scenario's scheduler, and the host's seconds per iteration and per sequence and a factor
on the kernels are found by least squares of the logarithms of quantiles of TTFT, TPOT and TBT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calibrate.score import PAUSE
from sim.bench_results import read_bench
from sim.errors import BadInput, unknown
from sim.profile import Profile, ProfileLatency
from sim.scenario import Scenario
from sim.simulate import simulate
from sim.workload import Workload

Floats = npt.NDArray[np.float64]
TERMS = {"step": 1e-3, "sequence": 1e-5, "scale": 0.1}  # and the unit in which each is searched
LIMITS = {"step": (0.0, 0.2), "sequence": (0.0, 2e-3), "scale": (0.2, 5.0)}
STRIDE = 1.0  # units; of finite differences
EVALUATIONS = 100
PRIOR = 0.03  # weight of log scale: where nothing tells, kernels take what the base profile says
QUANTILES = {"ttft_p50": 0.5, "ttft_p90": 0.9, "tpot_p50": 0.5, "tpot_p90": 0.9, "tbt_p50": 0.5}
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Result:
    """One measured run: its requests as they were sent, and quantiles of what came of them (seconds)."""

    path: Path
    workload: Workload
    measured: Metrics
    failed: int


def read(path: Path) -> Result:
    """A result file. BadInput for what it lacks."""
    told = read_bench(path, str(path))
    most: Any = told.settings.get("max_concurrency")
    closed = most is not None and _rate(told.settings.get("request_rate")) is None
    if closed and not (isinstance(most, int) and most >= 1):
        raise BadInput(f"{most} must be a whole number of at least 1", source=str(path), key="max_concurrency")
    if not closed and told.starts is None:
        raise BadInput("is needed where the load is a rate", source=str(path), key="start_times")
    sent = np.zeros(len(told.ttfts)) if told.starts is None else told.starts
    good = told.good & (told.ttfts > 0)
    if not good.any():
        raise BadInput("no request was answered", source=str(path))
    order = np.flatnonzero(good) if closed else np.flatnonzero(good)[np.argsort(sent[good], kind="stable")]
    prompts, outputs = told.prompts[order], told.outputs[order]
    arrivals = None if closed else sent[order] - sent[order[0]]
    concurrency, think = (int(most), PAUSE) if closed else (None, 0.0)
    workload = Workload(arrivals, prompts, outputs, None, concurrency, think, {}, ())
    gaps = [told.itls[position] for position in order]
    tpot = np.array([gap.sum() / (tokens - 1) for gap, tokens in zip(gaps, outputs, strict=True) if tokens > 1])
    pools = {"ttft": told.ttfts[order], "tpot": tpot, "tbt": np.concatenate(gaps)}
    if not len(pools["tpot"]) or not len(pools["tbt"]):
        raise BadInput("no request has a second token", source=str(path), key="output_lens")
    return Result(path, workload, _quantiles(pools), int((~good).sum()))


def _rate(value: Any) -> float | None:
    """Requests per second, None for "inf"."""
    try:
        rate = float(value)
    except (TypeError, ValueError):
        return None
    return rate if np.isfinite(rate) else None


def _quantiles(pools: Mapping[str, Floats]) -> Metrics:
    return {name: float(np.quantile(pools[name.partition("_")[0]], share)) for name, share in QUANTILES.items()}


def simulated(result: Result, scenario: Scenario, profile: Profile) -> Metrics:
    """The same quantiles of the same requests, from the scenario's scheduler and the profile."""
    report = simulate(
        scenario, requests=result.workload, keep_steps=False, engine=lambda _: partial(ProfileLatency, profile)
    )
    frame = report.requests
    served = frame.drop_nulls("finished_s")
    if len(served) < len(frame):
        why = ", ".join(frame["reason"].drop_nulls().unique().sort()) or "unfinished"
        what = f"{len(frame) - len(served)} of {len(frame)} requests cannot be served as the scenario has it: {why}"
        raise BadInput(what, source=str(result.path))
    decoded = served.filter(served["output_tokens"] > 1)
    tpot = ((decoded["finished_s"] - decoded["first_token_s"]) / (decoded["output_tokens"] - 1)).to_numpy()
    tbt = report.distributions["tbt"]["p50"]
    found = _quantiles({"ttft": (served["first_token_s"] - served["arrival_s"]).to_numpy(), "tpot": tpot, "tbt": tpot})
    return found | {"tbt_p50": float(tbt) if tbt is not None else found["tpot_p50"]}


def with_host(base: Profile, step: float, sequence: float, scale: float) -> Profile:
    """The base's kernels times `scale`, and host seconds per iteration and per sequence instead of its own."""
    terms, told = base.coefficients, base.provenance
    assert terms is not None  # bench_commands
    kernels = {
        name: max(0.0, getattr(terms, name) - float(told.get(f"host_{name}_s", 0.0))) for name in ("step", "sequence")
    }
    host = {"step": step, "sequence": sequence}
    factor = base.scale * scale
    changed = terms.model_copy(update={name: kernels[name] + host[name] / factor for name in host})
    noted = told | {"host_step_s": step / factor, "host_sequence_s": sequence / factor}
    return base.model_copy(update={"coefficients": changed, "scale": factor, "provenance": noted})


def refit(
    base: Profile,
    results: Sequence[Result],
    scenario: Scenario,
    *,
    hold: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> tuple[Profile, list[dict[str, Any]]]:
    """The refitted profile, and measured and simulated quantiles of each result before and after.

    Terms in `hold` stay what the base has: its host terms, and a scale of 1.
    """
    for term in hold:
        if term not in TERMS:
            raise BadInput(unknown("term", term, TERMS), source="--hold")
    free = [term for term in TERMS if term not in hold]
    if not free:
        raise BadInput("leaves no term to fit", source="--hold")
    fitted = _solve(base, results, scenario, free, progress)
    return fitted, _beside(base, fitted, results, scenario)


def _solve(
    base: Profile,
    results: Sequence[Result],
    scenario: Scenario,
    free: Sequence[str],
    progress: Callable[[int, int], None],
) -> Profile:
    """The profile with the free terms where the errors of all quantiles are least."""
    try:
        from scipy.optimize import least_squares
    except ModuleNotFoundError:
        raise BadInput("refitting needs the package scipy: pip install 'servecast[calibrate]'") from None
    factor = base.scale
    start = {name: float(base.provenance.get(f"host_{name}_s", 0.0)) * factor for name in ("step", "sequence")} | {
        "scale": 1.0
    }
    done = 0

    def profile_at(x: Floats) -> Profile:
        return with_host(base, **(start | dict(zip(free, x.tolist(), strict=True))))

    def off(x: Floats) -> Floats:
        nonlocal done
        done += 1
        progress(min(done, EVALUATIONS), EVALUATIONS)
        candidate = profile_at(x * units)
        errors = [
            float(np.log(found[name] / result.measured[name]))
            for result in results
            for found in [simulated(result, scenario, candidate)]
            for name in QUANTILES
        ]
        return np.array([*errors, PRIOR * float(np.log(candidate.scale / factor))])

    def slopes(x: Floats) -> Floats:
        """By finite steps that a schedule's jumps do not drown."""
        here = off(x)
        return np.column_stack([(off(x + STRIDE * one) - here) / STRIDE for one in np.eye(len(x))])

    units = np.array([TERMS[term] for term in free])
    first = np.array([start[term] for term in free]) / units
    low, high = np.array([LIMITS[term] for term in free]).T / units
    inside = np.clip(first, low + STRIDE, high - STRIDE)
    solved = least_squares(off, inside, jac=slopes, bounds=(low, high), max_nfev=EVALUATIONS // (2 + len(free)))
    return profile_at(solved.x * units)


def _beside(base: Profile, fitted: Profile, results: Sequence[Result], scenario: Scenario) -> list[dict[str, Any]]:
    """Measured and simulated quantiles of each result, before and after."""
    rows = []
    for result in results:
        before, after = simulated(result, scenario, base), simulated(result, scenario, fitted)
        for name in QUANTILES:
            measured = result.measured[name]
            rows.append(
                {
                    "file": str(result.path),
                    "metric": name,
                    "measured_s": measured,
                    "before_s": before[name],
                    "before_error": before[name] / measured - 1,
                    "after_s": after[name],
                    "after_error": after[name] / measured - 1,
                }
            )
    return rows
