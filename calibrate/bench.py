"""Refitting a profile to what `vllm bench serve --save-result --save-detailed` measured.

Kernels are known from tables or from another machine; what a user's engine spends beside them is not. Each result's
requests are simulated by the scenario's scheduler, and the host's seconds per iteration and per sequence and a factor
on the kernels are found by least squares of the logarithms of quantiles of TTFT, TPOT and TBT.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calibrate.score import PAUSE
from sim.errors import BadInput, unknown
from sim.profile import Profile, ProfileLatency
from sim.scenario import Scenario
from sim.simulate import simulate
from sim.workload import Workload

Floats = npt.NDArray[np.float64]
LISTS = ("input_lens", "output_lens", "ttfts", "itls")
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
    try:
        told = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = (error.strerror or str(error)).lower() if isinstance(error, OSError) else "is not JSON"
        raise BadInput(what, source=str(path)) from None
    try:
        return _result(path, told)
    except BadInput as error:
        raise error.within(source=str(path)) from None


def _result(path: Path, told: Any) -> Result:
    if not isinstance(told, dict):
        raise BadInput("is not a JSON object, as a bench result is")
    for name in LISTS:
        if not isinstance(told.get(name), list):
            raise BadInput("is not there: save the result with --save-result --save-detailed", key=name)
        if len(told[name]) != len(told[LISTS[0]]):
            raise BadInput(f"has {len(told[name])} entries, {LISTS[0]} {len(told[LISTS[0]])}", key=name)
    closed = told.get("max_concurrency") is not None and _rate(told.get("request_rate")) is None
    starts = told.get("start_times")
    if not closed and not (isinstance(starts, list) and len(starts) == len(told[LISTS[0]])):
        raise BadInput("is needed where the load is a rate", key="start_times")
    try:
        lengths = np.array([told["input_lens"], told["output_lens"]], dtype=np.float64)
        ttft = np.array(told["ttfts"], dtype=np.float64)
        gaps = [np.array(each, dtype=np.float64) for each in told["itls"]]
        sent = np.array(starts if isinstance(starts, list) else np.zeros(len(ttft)), dtype=np.float64)
    except (TypeError, ValueError):
        raise BadInput("must hold numbers of tokens and seconds", key=", ".join(LISTS)) from None
    good = (lengths >= 1).all(axis=0) & (ttft > 0) & np.isfinite(sent)
    if not good.any():
        raise BadInput("no request was answered")
    order = np.argsort(sent[good], kind="stable") if not closed else np.arange(int(good.sum()))
    prompts, outputs = (np.ascontiguousarray(of[good][order]).astype(np.int64) for of in lengths)
    arrivals = None if closed else np.sort(sent[good]) - sent[good].min()
    concurrency = int(told["max_concurrency"]) if closed else None
    if concurrency is not None and concurrency < 1:
        raise BadInput(f"{concurrency} must be at least 1", key="max_concurrency")
    workload = Workload(arrivals, prompts, outputs, None, concurrency, PAUSE if closed else 0.0, {}, ())
    kept = [gap for gap, one in zip(gaps, good, strict=True) if one]
    tpot = [float(gap.sum()) / (tokens - 1) for gap, tokens in zip(kept, lengths[1][good], strict=True) if tokens > 1]
    pools = {"ttft": ttft[good], "tpot": np.array(tpot), "tbt": np.concatenate([np.zeros(0), *kept])}
    if not len(pools["tpot"]) or not len(pools["tbt"]):
        raise BadInput("no request has a second token", key="output_lens")
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
    try:
        from scipy.optimize import least_squares
    except ModuleNotFoundError:
        raise BadInput("refitting needs the package scipy: pip install 'servecast[calibrate]'") from None
    for term in hold:
        if term not in TERMS:
            raise BadInput(unknown("term", term, TERMS), source="--hold")
    free = [term for term in TERMS if term not in hold]
    if not free:
        raise BadInput("leaves no term to fit", source="--hold")
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
    fitted = profile_at(solved.x * units)
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
    return fitted, rows
