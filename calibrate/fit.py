"""Fitting a latency profile to measured iterations.

Least squares of relative errors, coefficients ≥ 0 (Lawson and Hanson 1974), outliers weighed down (Huber 1964), then
scaled so that the predicted total is the measured one: relative errors alone favour short iterations and would leave
totals a few per cent low. Held-out errors are of whole batches that the fit has not seen; intervals resample batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from calibrate.rows import Rows
from sim.errors import BadInput, unknown
from sim.profile import TERMS, Coefficients, Errors, Profile, Tokens, Validity
from sim.table import SMALLEST

Floats = npt.NDArray[np.float64]
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 129, 160, 192, 256, 257, 384, 512, 513, 768, 1024, 1025)
FARTHER = (1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768)
FEW = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # tokens sampled; where small matrix products have their steps
ROWS_PER_TERM = 4  # of the data, before the fit may bend at FEW as well
HUBER = 1.345  # robust standard deviations beyond which a residual counts less; 95 % efficient on normal ones
ROUNDS = 8
FOLDS = 5
RESAMPLES = 60
INDEPENDENT = 1e-4  # of its length that a term's column must have beside all others for the data to tell it
FAR = 1.1  # times the last place but one is where the last may be
NEEDS = {  # the most particular first: of terms that make each other up, that is the one to name
    "prefill_attention": "chunks of different lengths",
    "prefill_context": "chunks with and without prior context",
    "context": "decodes at different contexts",
    "sequence": "batches with as many tokens and different numbers of requests",
    "chunk": "batches of one chunk and of several",
    "decode_step": "batches with and without decodes",
    "sample": "batches in which no request gets a token, and others",
    "step": "batches of several sizes",
    "tokens": "batches of different numbers of tokens",
}


def fit(
    rows: Rows,
    *,
    name: str,
    model: str,
    device: str,
    tensor_parallel: int = 1,
    without: Sequence[str] = (),
    seed: int = 0,
    resamples: int | None = None,
) -> Profile:
    """A profile of the rows. Terms in `without` are held at 0; 0 `resamples` leave out its intervals.

    BadInput where the data cannot tell a term from the others, which it names.
    """
    for term in without:
        if term not in TERMS:
            raise BadInput(unknown("term", term, TERMS), source="--without")
    knots = _knots(rows)
    always = bool((rows.samples > 0).all())  # then what sampling takes at least is in `step`
    terms = [term for term in TERMS if term not in without and not (term == "sample" and always)]
    design = _design(rows, knots, terms)
    _check_identifiable(design, rows, terms, knots)
    few = [] if "sequence" in without else _few(rows)
    wider = np.column_stack([design, *_segments(rows.samples, few)])
    if len(wider) >= ROWS_PER_TERM * wider.shape[1] and all(alone > INDEPENDENT for alone in _alone(wider, rows)):
        design = wider
    else:
        few = []
    seconds, points = rows["seconds"], _points(rows)
    rng = np.random.default_rng(seed)
    solution = _solve(design, seconds)
    return Profile(
        name=name,
        model=model,
        device=device,
        tensor_parallel=tensor_parallel,
        coefficients=_coefficients(solution, terms, knots, few),
        validity=_validity(rows),
        errors=_held_out(design, seconds, points, rng),
        intervals=_intervals(design, seconds, points, terms, rng, RESAMPLES if resamples is None else resamples),
        provenance=_provenance(rows, points),
    )


def can_fit() -> bool:
    """Whether scipy is here; a machine with a GPU may lack it."""
    try:
        import scipy.optimize  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _knots(rows: Rows) -> list[int]:
    """Where the linear layers may bend: the usual places that were measured, from the smallest batch to the largest.

    None just before the largest: its slope goes on, and must not be that of a single tile.
    """
    tokens = rows["decodes"] + rows["prefill_tokens"]
    measured = set(tokens.astype(int).tolist())
    smallest, largest = min(measured), max(measured)
    usual = {knot for knot in (*KNOTS, *FARTHER) if knot in measured and knot * FAR <= largest}
    found = sorted({smallest, largest} | usual)
    if len(found) < 2:
        raise BadInput(f"the data cannot tell the term 'tokens': it needs {NEEDS['tokens']}", key="seconds")
    return found


def _few(rows: Rows) -> list[int]:
    """Numbers of tokens between which the first ones may take more than the later ones; fewer than the most."""
    measured = set(rows.samples.astype(int).tolist())
    found = [knot for knot in FEW if knot in measured and knot < max(measured)]
    return found if len(found) > 1 else []


def _segments(values: Floats, knots: Sequence[int], *, endless: bool = False) -> list[Floats]:
    """How much of each value lies between each knot and the next; beyond the last too where they are `endless`."""
    ends = [*knots[1:-1], np.inf] if endless else knots[1:]
    return [np.clip(values - start, 0, end - start) for start, end in zip(knots, ends, strict=False)]


def _design(rows: Rows, knots: Sequence[int], terms: Sequence[str]) -> Floats:
    """One column per term and per segment between knots: what a second per unit of it multiplies."""
    tokens = rows["decodes"] + rows["prefill_tokens"]
    columns = {
        "step": np.ones(len(rows)),
        "decode_step": (rows["decodes"] > 0).astype(float),
        "sample": (rows.samples > 0).astype(float),
        "chunk": rows["chunks"],
        "sequence": rows["decodes"] + rows["chunks"],
        "context": rows["context"],
        "prefill_attention": rows["attention"],
        "prefill_context": rows["prefill_context"],
    }
    segments = _segments(tokens, knots, endless=True)  # what the smallest batch takes is in `step`
    return np.column_stack([*(columns[term] for term in terms), *segments])


def _check_identifiable(design: Floats, rows: Rows, terms: Sequence[str], knots: Sequence[int]) -> None:
    """BadInput naming the first term whose column the others make up."""
    names = [*terms, *(f"tokens up to {knot}" for knot in knots[1:])]
    alone = dict(zip(names, _alone(design, rows), strict=True))
    order = list(NEEDS)
    for name in sorted(names, key=lambda name: order.index(name.split()[0])):
        if alone[name] < INDEPENDENT:
            instead = "; or hold it at 0 with --without" if name in TERMS else ""
            what = f"the data cannot tell the term {name!r}: it needs {NEEDS[name.split()[0]]}{instead}"
            raise BadInput(what, key="seconds")


def _alone(design: Floats, rows: Rows) -> list[float]:
    """How much of each column, relative to its length, the other columns do not make up."""
    scaled = design / rows["seconds"][:, None]
    lengths = np.linalg.norm(scaled, axis=0)
    unit = scaled / np.maximum(lengths, 1e-300)
    found = []
    for index, length in enumerate(lengths):
        column, others = unit[:, index], np.delete(unit, index, axis=1)
        left = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
        found.append(float(np.linalg.norm(left)) if length > 0 else 0.0)
    return found


def _solve(design: Floats, seconds: Floats) -> Floats:
    """Coefficients ≥ 0 of least Huber loss of relative errors, scaled to the total of the rows that are no outliers."""
    try:
        from scipy.optimize import nnls
    except ModuleNotFoundError:
        raise BadInput("fitting needs the package scipy: pip install 'servecast[calibrate]'", key="fit") from None
    size = np.maximum(np.linalg.norm(design / seconds[:, None], axis=0), 1e-300)
    scaled, target = design / seconds[:, None] / size, np.ones(len(seconds))
    weights = np.ones(len(seconds))
    solution = np.zeros(design.shape[1])
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        solution, _ = nnls(scaled * root[:, None], target * root, maxiter=50 * design.shape[1])
        residual = scaled @ solution - target
        spread = 1.4826 * float(np.median(np.abs(residual - np.median(residual))))
        weights = np.minimum(1.0, HUBER * max(spread, 1e-12) / np.maximum(np.abs(residual), 1e-300))
    solution = solution / size
    predicted = design @ solution
    return np.asarray(solution * (weights @ seconds) / (weights @ predicted))


def _coefficients(solution: Floats, terms: Sequence[str], knots: Sequence[int], few: Sequence[int]) -> Coefficients:
    solution = np.where(solution < SMALLEST, 0.0, solution)
    scalars = dict(zip(terms, solution.tolist(), strict=False))
    bends = len(terms) + len(knots) - 1
    tokens = _piecewise(knots, solution[len(terms) : bends])
    first = None
    if few:
        first = _piecewise([*few, few[-1] + 1], np.append(solution[bends:], 0.0))  # level from the last knot on
    return Coefficients(tokens=tokens, few=first, **scalars)


def _piecewise(knots: Sequence[int], slopes: Floats) -> Tokens:
    """Seconds at each knot, from 0 at the first."""
    return Tokens(knots=list(knots), seconds=np.cumsum([0.0, *(slopes * np.diff(knots))]).tolist())


def _points(rows: Rows) -> npt.NDArray[np.int64]:
    """Which rows are of the same batch, by number (contexts of decodes are drawn anew, so only to a sixteenth)."""
    context = np.rint(np.log2(np.maximum(rows["context"], 1)) * 4)
    names = ("decodes", "chunks", "prefill_tokens", "prefill_context")
    same = np.column_stack([*(rows[name] for name in names), rows.samples, context])
    return np.asarray(np.unique(same, axis=0, return_inverse=True)[1]).reshape(-1).astype(np.int64)


def _held_out(design: Floats, seconds: Floats, points: npt.NDArray[np.int64], rng: np.random.Generator) -> Errors:
    """Errors on each fifth of the batches, fitted to the other four."""
    fold = rng.permutation(points.max() + 1)[points] % FOLDS
    predicted = np.empty(len(seconds))
    for number in range(FOLDS):
        predicted[fold == number] = design[fold == number] @ _solve(design[fold != number], seconds[fold != number])
    relative = np.abs(predicted / seconds - 1)
    return Errors(
        rows=len(seconds),
        held_out_median=float(np.median(relative)),
        held_out_p90=float(np.quantile(relative, 0.9)),
        held_out_bias=float(predicted.sum() / seconds.sum() - 1),
    )


def _intervals(
    design: Floats,
    seconds: Floats,
    points: npt.NDArray[np.int64],
    terms: Sequence[str],
    rng: np.random.Generator,
    resamples: int,
) -> dict[str, list[float]]:
    """What 90 % of the fits to resampled batches give for each term."""
    members = [np.flatnonzero(points == point) for point in range(points.max() + 1)]
    found = []
    for _ in range(resamples):
        drawn = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members)).tolist()])
        found.append(_solve(design[drawn], seconds[drawn])[: len(terms)])
    if not found:
        return {}
    low, high = np.quantile(np.array(found), [0.05, 0.95], axis=0)
    return {term: [float(low[i]), float(high[i])] for i, term in enumerate(terms)}


def _validity(rows: Rows) -> Validity:
    def most(name: str, instead: Floats) -> int:
        values = rows.columns.get(name, np.array([np.nan]))
        return max(1, int(np.max(instead if np.isnan(values).all() else np.nan_to_num(values))))

    mean_context = rows["context"] / np.maximum(rows["decodes"], 1)
    return Validity(
        tokens=max(1, int((rows["decodes"] + rows["prefill_tokens"]).max())),
        sequences=max(1, int((rows["decodes"] + rows["chunks"]).max())),
        context_tokens=most("longest_context", mean_context),
        prefill_context_tokens=most("longest_chunk", rows["prefill_context"] / np.maximum(rows["chunks"], 1)),
    )


def _provenance(rows: Rows, points: npt.NDArray[np.int64]) -> dict[str, Any]:
    """The measurement's own, and how far repeated measurements of a batch lie from their median."""
    seconds = rows["seconds"]
    medians = np.array([np.median(seconds[points == point]) for point in range(points.max() + 1)])
    noise = np.abs(seconds / medians[points] - 1)
    plain = {key: value for key, value in rows.provenance.items() if isinstance(value, str | int | float | bool)}
    return plain | {
        "batches": len(medians),
        "noise_median": float(np.median(noise)),
        "noise_p90": float(np.quantile(noise, 0.9)),
    }


def save(profile: Profile, path: Any) -> None:
    """Write a profile as TOML, whole or not at all."""
    import tomli_w

    aside = path.with_name(path.name + ".writing")
    try:
        empty = set() if profile.residuals else {"residuals"}
        aside.write_text(tomli_w.dumps(profile.model_dump(exclude_none=True, exclude=empty)), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise BadInput((error.strerror or str(error)).lower(), source=str(path)) from None
