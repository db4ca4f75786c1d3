"""Calibration: the grid, measuring with interruptions, tables of measurements, and fits that find what was put in.

Executors here take what a known formula says; nothing depends on how fast the machine is.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import tomli_w
from formula import PROFILE, SCENARIO, TRUTH, Formula, linear, measured, predicted, straight, truth
from hypothesis import assume, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from calibrate import commands, rows
from calibrate import fit as fitting
from calibrate import measure as measuring
from calibrate.grid import Limits, Point, batch, grid
from calibrate.measure import FEWEST_ROUNDS, interleaved, limits_of, measure
from calibrate.render import UNITS
from calibrate.rows import REQUIRED, Row, Rows
from calibrate.validate import reach
from sim.__main__ import status
from sim.errors import BadInput
from sim.profile import TERMS, Profile, load
from sim.scenario import Scenario
from sim.simulate import plan

ROOT = Path(__file__).parent.parent
SMALL = Limits(batch_tokens=1024, sequences=32, model_tokens=1024, cache_tokens=9600)
TOLD = {"model": "llama-40m", "catalogue_device": "cpu", "source": "a formula"}


def fitted(table: Rows, without: Sequence[str] = (), seed: int = 0, resamples: int = 2) -> Profile:
    """A fit with few resamples, for tests that do not look at intervals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "RESAMPLES", resamples)
        return fitting.fit(table, name="f", model="llama-40m", device="cpu", without=without, seed=seed)


@cache
def clean() -> Rows:
    """Two rounds of the small grid, without noise."""
    return measured(grid(SMALL), 2, provenance=TOLD)


def table_of(found: Sequence[Row]) -> Rows:
    """Rows made by hand, with the seconds of the formula without tiles."""
    return Rows.of([one | {"seconds": straight(one)} for one in found], {})


def made(decodes: int = 0, context: int = 0, chunks: Sequence[tuple[int, int]] = ()) -> Row:
    """A row by hand; `context` is that of all decodes together."""
    return {
        "decodes": decodes,
        "context": context,
        "chunks": len(chunks),
        "prefill_tokens": sum(m for _, m in chunks),
        "attention": sum(m * (m0 + m / 2) for m0, m in chunks),
        "prefill_context": sum(m0 + m for m0, m in chunks),
    }


def assert_is_truth(found: Profile, tolerance: float = 1e-6) -> None:
    """Every term, and the linear layers at every number of tokens (where those of one token are part of `step`)."""
    for term, value in TRUTH.items():
        assert getattr(found.coefficients, term) == pytest.approx(value, rel=tolerance), term
    for tokens in (*range(1, 600), 1024):
        assert found.coefficients.tokens.at(tokens) == pytest.approx(linear(tokens), rel=tolerance, abs=1e-9), tokens


# Fitting


def test_noiseless_measurements_give_the_coefficients_back() -> None:
    """All of them, to a millionth, with held-out errors of nothing and intervals around them."""
    found = fitted(clean(), resamples=8)
    assert_is_truth(found)
    assert found.errors.held_out_p90 < 1e-9
    assert abs(found.errors.held_out_bias) < 1e-9
    assert found.errors.rows == len(clean())
    assert found.provenance["source"] == "a formula"
    assert set(found.intervals) == set(TERMS)


def test_host_time_is_told_apart() -> None:
    """60 layers launched one by one, and 128 requests to sample: time per step and per request are two terms."""
    points = grid(Limits(2048, 128, 2048, 200_000))
    host = {"step": 60 * 2e-4, "sequence": 5e-5}
    silent = measured(points, 1, Formula(lambda one: 1e-3 + 1e-5 * (one["decodes"] + one["prefill_tokens"])))
    busy = measured(
        points,
        1,
        Formula(
            lambda one: (
                1e-3
                + 1e-5 * (one["decodes"] + one["prefill_tokens"])
                + host["step"]
                + host["sequence"] * (one["decodes"] + one["chunks"])
            )
        ),
    )
    without, with_host = fitted(silent).coefficients, fitted(busy).coefficients
    assert with_host.step - without.step == pytest.approx(host["step"], rel=1e-6)
    assert with_host.sequence == pytest.approx(host["sequence"], rel=1e-6)
    assert without.sequence == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_outliers(seed: int) -> None:
    """5 % noise, and one row in twenty taking ten times as long: batches are still predicted within a few per cent."""
    points = grid(SMALL)
    found = fitted(measured(points, 6, Formula(noise=0.05, outliers=0.05, seed=seed)), resamples=1)
    relative = predicted(found, clean()) / clean()["seconds"] - 1
    assert np.median(np.abs(relative)) < 0.06
    assert np.abs(relative).max() < 0.15
    for term in ("step", "chunk", "context", "prefill_attention"):
        assert getattr(found.coefficients, term) == pytest.approx(TRUTH[term], rel=0.25), term
    assert 0.03 < found.errors.held_out_median < 0.06  # normal noise of 5 % has a median of 3.4 %


def test_the_total_is_unbiased() -> None:
    """Relative errors alone would leave it 4 % low at 20 % noise."""
    noisy = [measured(grid(SMALL), 6, Formula(noise=0.2, seed=seed)) for seed in range(2)]
    totals = [predicted(fitted(table), clean()).sum() / clean()["seconds"].sum() - 1 for table in noisy]
    assert abs(np.mean(totals)) < 0.012
    for table in noisy:
        assert predicted(fitted(table), table).sum() == pytest.approx(table["seconds"].sum(), rel=0.015)


def test_held_out_errors_show_what_the_formula_lacks() -> None:
    """A cost that no term has, or a term held at 0, is an error that is told."""
    lacking = measured(grid(SMALL), 2, Formula(lambda one: truth(one) + 2e-6 * one["decodes"] ** 3))
    assert fitted(lacking).errors.held_out_p90 > 0.02
    assert fitted(clean(), without=["prefill_attention"]).errors.held_out_p90 > 0.02
    assert fitted(clean()).errors.held_out_p90 < 1e-9


def test_held_out_errors_are_of_rows_the_fit_has_not_seen() -> None:
    """With few rows a fit follows their noise; what it has not seen, it predicts worse than what it has."""
    few = measured(grid(SMALL)[::2], 1, Formula(noise=0.1, seed=1))
    found = fitted(few, without=["sequence"])
    seen = np.abs(predicted(found, few) / few["seconds"] - 1)
    assert found.errors.held_out_median > 1.1 * float(np.median(seen))


def test_held_out_errors_are_of_whole_batches() -> None:
    """A batch that is odd in every round is not learnt from another round: repeating rounds does not help."""
    points = grid(SMALL)[::2]
    odd = dict(zip(points, np.random.default_rng(0).uniform(0.7, 1.3, len(points)).tolist(), strict=True))
    table = measured(points, 1)
    table.columns["seconds"] *= list(odd.values())
    once = fitted(table, without=["sequence"]).errors
    often = Rows({name: np.tile(values, 8) for name, values in table.columns.items()}, {})
    assert fitted(often, without=["sequence"]).errors.held_out_median > 0.8 * once.held_out_median


def test_intervals_mostly_cover_the_truth() -> None:
    """Of 90 % intervals of eight terms in four measurements, at least three quarters do; none is upside down."""
    covered = []
    for seed in range(4):
        found = fitted(measured(grid(SMALL), 4, Formula(noise=0.05, seed=seed)), resamples=30, seed=seed)
        for term, (low, high) in found.intervals.items():
            assert 0 <= low <= high
            covered.append(low <= TRUTH[term] <= high)
    assert len(covered) == 32
    assert sum(covered) >= 24


def test_the_range_is_what_was_measured() -> None:
    """The largest of each, whatever the rows' order; from means where the longest are not told."""
    table = clean()
    valid = fitted(table).validity
    assert valid.tokens == int((table["decodes"] + table["prefill_tokens"]).max()) == 1024
    assert valid.sequences == int((table["decodes"] + table["chunks"]).max()) == 32
    assert valid.context_tokens == int(table["longest_context"].max())
    assert valid.prefill_context_tokens == int(table["longest_chunk"].max()) == 1024
    assert valid.context_tokens > 0.6 * SMALL.model_tokens
    plain = Rows({name: table[name] for name in REQUIRED}, {})
    valid = fitted(plain).validity
    assert valid.context_tokens == math.floor((table["context"] / np.maximum(table["decodes"], 1)).max())
    assert valid.prefill_context_tokens == int((table["prefill_context"] / np.maximum(table["chunks"], 1)).max())


def test_noise_is_told() -> None:
    """How far repeated measurements of a batch lie from their median."""
    points = [point for point in grid(SMALL) if not point.decodes]
    hold = ["context", "decode_step", "sequence"]
    assert fitted(measured(points, 3), hold).provenance["noise_p90"] == 0
    assert fitted(measured(points, 3), hold).provenance["batches"] == len(points)
    noisy = fitted(measured(points, 9, Formula(noise=0.1)), hold).provenance
    assert 0.03 < float(noisy["noise_median"]) < 0.09 < float(noisy["noise_p90"]) < 0.2


def test_the_same_rows_give_the_same_profile() -> None:
    """Resamples and folds have a seed."""
    noisy = measured(grid(SMALL), 1, Formula(noise=0.05))
    assert fitted(noisy) == fitted(noisy)


# What the data cannot tell

CONTEXTS, SIZES, LENGTHS = (32, 100, 500), (1, 2, 4, 8, 16, 32), (16, 32, 64, 128, 256)
CHUNKS = [[(s, m)] * k for m in LENGTHS for s in (0, 64, 256) for k in (1, 2)]
MIXED = [made(n, n * c, chunks) for n in SIZES for c in CONTEXTS for chunks in CHUNKS]
DECODES = [made(n, n * c) for n in SIZES for c in CONTEXTS]
PREFILLS = [made(chunks=[(s, m)] * k) for m in LENGTHS for s in (0, 64, 256) for k in (1, 2, 3)]
ALL = [*MIXED, *DECODES, *PREFILLS]

UNTOLD: dict[str, tuple[list[Row], str]] = {
    "decodes only": (DECODES, "prefill_attention"),
    "prefills only": (PREFILLS, "context"),
    "no mixed batches, one request each": (
        [made(1, c) for c in (2, 30, 100)] + [made(chunks=[(s, m)]) for s in (0, 64) for m in LENGTHS],
        "sequence",
    ),
    "a single context": (
        [*PREFILLS, *(made(n, n * 100, [(0, m)]) for n in SIZES for m in LENGTHS), *DECODES[1::3]],
        "context",
    ),
    "always one chunk": ([made(n, n * c, [(s, m)]) for n, c in ((0, 0), (2, 9), (4, 30), (4, 9), (8, 30))
                          for s in (0, 64) for m in LENGTHS], "chunk"),
    "no prior context": ([one for one in ALL if one["prefill_context"] == one["prefill_tokens"]], "prefill_context"),
    "a single chunk length": (
        [*DECODES, *(made(chunks=[(s, 64)] * k) for s in (0, 64, 256) for k in (1, 2, 3))], "prefill_attention"),
    "decodes always": (MIXED + DECODES, "decode_step"),
    "a batch of one size": ([made(8, 8 * c) for c in CONTEXTS], "tokens"),
    "one row": ([made(8, 8)], "tokens"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNTOLD)
def test_what_the_data_cannot_tell_is_refused(what: str) -> None:
    """The message names the term and what would tell it, and can be obeyed until the fit succeeds."""
    found, first = UNTOLD[what]
    table, held = table_of(found), []
    for _ in range(len(TERMS) + 1):
        try:
            one = fitted(table, held)
            break
        except BadInput as error:
            told = str(error)
            term = told.split("'")[1]
            assert held or term == first, told
            assert f"it needs {fitting.NEEDS[term.split()[0]]}" in told
            if term.startswith("tokens"):
                assert "--without" not in told  # it would not help
                return
            assert "hold it at 0 with --without" in told
            held.append(term)
    assert held
    assert all(getattr(one.coefficients, term) == 0 for term in held)
    if what != "a single chunk length":  # there a term that matters had to be held
        assert np.abs(predicted(one, table) / table["seconds"] - 1).max() < 0.1


def test_everything_is_told_by_all_of_it() -> None:
    """The rows that those cases lack parts of are enough together."""
    found = fitted(table_of([*ALL, *(made(chunks=[(0, m)]) for m in (1, 2, 8, 257, 512))]))
    assert found.coefficients.context == pytest.approx(TRUTH["context"], rel=1e-6)


def test_held_terms() -> None:
    """An unknown name is answered with the known ones; a held term is 0 and has no interval."""
    with pytest.raises(BadInput, match="--without: unknown term 'contxt'; did you mean 'context'"):
        fitted(clean(), ["contxt"])
    found = fitted(clean(), ["prefill_context", "chunk"])
    assert found.coefficients.prefill_context == found.coefficients.chunk == 0
    assert set(found.intervals) == set(TERMS) - {"prefill_context", "chunk"}


def test_batches_at_unusual_sizes() -> None:
    """Someone else's measurements hit none of the usual numbers of tokens: the ends of their range are knots."""
    sizes = (5, 7, 11, 37, 101, 202, 303, 701)
    found = [made(n, n * c) for n in (5, 7, 11, 37) for c in (30, 90)]
    found += [made(chunks=[(s, m)]) for s in (0, 77) for m in sizes]
    found += [made(chunks=[(s, m)] * k) for s in (0, 77) for m in (11, 37) for k in (2, 3)]
    found += [made(n, n * 50, [(33, m)] * k) for n in (5, 7) for m in (37, 101) for k in (1, 3)]
    table = table_of(found)
    one = fitted(table)
    assert one.coefficients.tokens.knots == [5, 701]
    assert predicted(one, table) == pytest.approx(table["seconds"], rel=1e-6)


def test_the_last_slope_is_not_that_of_a_tile() -> None:
    """Measured up to just behind a tile's edge, a profile still extrapolates sanely."""
    for longest in (257, 258, 300, 513):
        knots = fitted(measured(grid(Limits(longest, 16, 1024, 9600)))).coefficients.tokens.knots
        assert knots[-1] == longest
        assert knots[-1] >= 1.1 * knots[-2]


# The grid


def limits(draw: st.DrawFn) -> Limits:
    """What a scenario may have: at least two requests of 64 tokens, and memory for one of the longest."""
    model = draw(st.sampled_from([128, 512, 1024, 4096, 8192, 16384, 131072]) | st.integers(128, 40_000))
    sequences = draw(st.sampled_from([2, 4, 32, 128, 256, 512]) | st.integers(2, 300))
    tokens = draw(st.just(model) | st.sampled_from([64, 128, 256, 257, 513, 2048]) | st.integers(64, 40_000))
    return Limits(max(tokens, sequences), sequences, model, int(draw(st.sampled_from([1.0, 2.0, 4.0, 40.0])) * model))


@profile(max_examples=25, deadline=None)
@given(st.composite(limits)(), st.integers(0, 5))
def test_the_grid_tells_every_term(limit: Limits, seed: int) -> None:
    """For any reasonable limits: within them, no point twice, and a fit is never refused."""
    points = grid(limit)
    assert len(set(points)) == len(points)
    executor = Formula(straight)
    for point in points:
        assert 0 < point.tokens <= limit.batch_tokens
        assert point.decodes + len(point.chunks) <= limit.sequences
    if 3 * limit.sequences <= limit.cache_tokens:  # two KV tokens each, spread to three
        assert max(point.decodes for point in points if not point.chunks) == limit.sequences
    drawn = interleaved(executor, points, 16, seed)
    table = Rows.of([next(drawn) for _ in range(2 * len(points))], {})
    assert table["longest_chunk"].max() <= limit.model_tokens
    assert (table["context"] + table["prefill_context"]).max() <= limit.cache_tokens + limit.sequences
    assert max(context for _, context in executor.pretended) <= limit.model_tokens
    found = fitted(table)
    assert found.coefficients.step == pytest.approx(TRUTH["step"], rel=1e-3)
    assert np.abs(predicted(found, table) / table["seconds"] - 1).max() < 1e-5


def on_one_device() -> dict[str, Path]:
    """Scenarios that the engine could run."""
    paths = {
        str(path.relative_to(ROOT / "scenarios")): path
        for path in (ROOT / "scenarios").glob("**/*.toml")
        if path.parent.name != "studies"
    }
    planned = {name: plan(Scenario.load(str(path))) for name, path in sorted(paths.items())}
    return {name: paths[name] for name, one in planned.items() if one.devices == 1 and one.model is not None}


@pytest.mark.parametrize("name", on_one_device())
def test_the_grid_of_every_scenario(name: str) -> None:
    """Both what calibration measures and what a validation anchors with give the formula back."""
    planned = plan(Scenario.load(str(on_one_device()[name])))
    for limit in {limits_of(planned), reach(planned)}:
        table = measured(grid(limit))
        found = fitted(table)
        for term, value in TRUTH.items():
            assert getattr(found.coefficients, term) == pytest.approx(value, rel=1e-5), term
        assert found.validity.tokens == limit.batch_tokens
        assert found.validity.sequences == limit.sequences


@profile(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.sampled_from([1, 8, 16, 32]), st.integers(1, 300), st.integers(16, 600))
def test_points_fit_into_the_blocks(blocks: int, block_tokens: int, sequences: int, longest: int) -> None:
    """Whatever the last block of each request leaves empty."""
    assume(blocks * block_tokens >= 4)
    limit = SimpleNamespace(
        policy="stall-free",
        num_blocks=blocks,
        block_tokens=block_tokens,
        max_sequences=sequences,
        max_model_tokens=longest,
        max_batch_tokens=longest,
        token_budget=32,
    )
    planned: Any = SimpleNamespace(deployment=SimpleNamespace(limits=limit))
    rng = np.random.default_rng(0)
    for point in {*grid(limits_of(planned)), *grid(reach(planned))}:
        _, stand_ins = batch(point, block_tokens, rng)
        assert sum(-(-tokens // block_tokens) for _, tokens in stand_ins) <= blocks, point


def test_a_point_as_a_batch() -> None:
    """Its counts, and requests with the KV that each must seem to have, spread around the mean."""
    one, stand_ins = batch(Point(8, 400, ((100, 28), (0, 5))), 16, np.random.default_rng(0))
    contexts = [tokens for _, tokens in stand_ins[:8]]
    assert (one.decodes, one.context, len(one.chunks), one.prefill_tokens) == (8, sum(contexts), 2, 33)
    assert [(chunk.start, chunk.tokens) for chunk in one.chunks] == [(100, 28), (0, 5)]
    assert one.attention == 28 * (100 + 14) + 5 * 2.5
    assert [tokens for _, tokens in stand_ins[8:]] == [128, 5]
    assert 200 <= min(contexts) < max(contexts) <= 600
    assert len({request.id for request, _ in stand_ins}) == 10


def test_the_largest_context_is_measured() -> None:
    """Decodes go far beyond half of the longest request, or every run near its limit would extrapolate."""
    means = {point.context for point in grid(SMALL) if not point.chunks}
    assert max(means) > 0.6 * SMALL.model_tokens


# Measuring

POINTS = [Point(1, 20), Point(4, 20), Point(chunks=((0, 8),)), Point(chunks=((16, 8),)), Point(2, 30, ((0, 4), (0, 3)))]
KEYS = ("decodes", "chunks", "prefill_tokens", "prefill_context")


def pairs(found: Sequence[Row]) -> list[tuple[float, ...]]:
    """(round, point) of each row, in order."""
    return [(one["round"], *(one[key] for key in KEYS)) for one in found]


def test_rounds_are_whole_and_in_different_orders() -> None:
    """At least three, each with every point once, and drift is not taken for cost."""
    executor = Formula()
    found = measure(executor, POINTS, 16, seconds=0)
    rounds = [[pair[1:] for pair in pairs(found) if pair[0] == number] for number in range(FEWEST_ROUNDS)]
    assert len(found) == FEWEST_ROUNDS * len(POINTS) == 15
    assert all(len(set(one)) == len(POINTS) for one in rounds)
    assert len({tuple(one) for one in rounds}) == FEWEST_ROUNDS
    assert len(executor.executed) == executor.forgotten == 15 + len(POINTS)  # each was warmed up, and forgotten
    assert [one["seconds"] for one in found] == [truth(one) for one in executor.executed[len(POINTS) :]]


def test_it_goes_on_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then finishes the round; the clock is read once a round, and what it says is in the rows."""
    now = iter(range(1000))
    monkeypatch.setattr(measuring.time, "monotonic", lambda: next(now))
    clocks = iter(1000.0 + number for number in range(100))
    told: list[tuple[int, int]] = []
    found = measure(
        Formula(host=0.25),
        POINTS,
        16,
        seconds=4.5,
        clock_mhz=lambda: next(clocks),
        progress=lambda *at: told.append(at),
    )
    assert {one["round"] for one in found} == set(range(3 + 4))
    assert [found[5 * number]["clock_mhz"] for number in range(3)] == [1000.0, 1001.0, 1002.0]
    assert told[-1] == (35, 35)
    assert found[0]["host"] == 0.25 * found[0]["seconds"]


@pytest.mark.parametrize("stop_after", range(5, 21))
def test_an_interrupted_measurement_goes_on(tmp_path: Path, stop_after: int) -> None:
    """At any row, also twice: the same rounds and points in the same order, none twice."""
    whole = pairs(measure(Formula(), POINTS, 16, seconds=0))
    kept = tmp_path / "m.partial"
    if stop_after < 20:
        for stop in (stop_after, len(POINTS) + 1):
            before = len(kept.read_text().splitlines()) if kept.exists() else 0
            try:
                measure(Formula(stop_after=stop), POINTS, 16, seconds=0, kept=kept)
            except KeyboardInterrupt:
                lines = len(kept.read_text().splitlines()) if kept.exists() else 0
                assert lines == before + stop - len(POINTS)
    found = measure(Formula(), POINTS, 16, seconds=0, kept=kept)
    assert pairs(found) == whole
    assert [json.loads(line) for line in kept.read_text().splitlines()] == [
        {**one, "clock_mhz": pytest.approx(float("nan"), nan_ok=True)} for one in found
    ]


def test_what_goes_on_is_warm(tmp_path: Path) -> None:
    """Another process is cold again: every point is executed before a row counts."""
    kept = tmp_path / "m.partial"
    with pytest.raises(KeyboardInterrupt):
        measure(Formula(stop_after=12), POINTS, 16, seconds=0, kept=kept)
    executor = Formula()
    found = measure(executor, POINTS, 16, seconds=0, kept=kept)
    assert len(executor.executed) == len(POINTS) + 15 - 7
    assert {tuple(one[key] for key in KEYS) for one in executor.executed[:5]} == {pair[1:] for pair in pairs(found)}


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path, cut: int) -> None:
    """It is measured again, and the file is whole afterwards."""
    kept, whole = tmp_path / "m.partial", pairs(measure(Formula(), POINTS, 16, seconds=0))
    with pytest.raises(KeyboardInterrupt):
        measure(Formula(stop_after=12), POINTS, 16, seconds=0, kept=kept)
    text = kept.read_text()
    kept.write_text(text[:-cut])
    with pytest.raises(KeyboardInterrupt):  # once more, behind where it was cut
        measure(Formula(stop_after=len(POINTS) + 3), POINTS, 16, seconds=0, kept=kept)
    assert pairs(measure(Formula(), POINTS, 16, seconds=0, kept=kept)) == whole
    assert pairs([json.loads(line) for line in kept.read_text().splitlines()]) == whole


@pytest.mark.parametrize("content", [b"{}\n", b"[1]\n", b"hello\n", b"\xff\xfe\n", b'{"decodes": 1}\n{"de'])
def test_what_another_measurement_left_is_refused(tmp_path: Path, content: bytes) -> None:
    """Not mixed in, and not overwritten."""
    kept = tmp_path / "m.partial"
    kept.write_bytes(content)
    with pytest.raises(BadInput, match="left by another measurement; --fresh forgets it"):
        measure(Formula(), POINTS, 16, seconds=0, kept=kept)
    assert kept.read_bytes() == content


def test_rows_of_another_grid_are_refused(tmp_path: Path) -> None:
    """The limits were changed in between."""
    kept = tmp_path / "m.partial"
    with pytest.raises(KeyboardInterrupt):
        measure(Formula(stop_after=12), POINTS, 16, seconds=0, kept=kept)
    with pytest.raises(BadInput, match="left by another measurement"):
        measure(Formula(), [*POINTS, Point(3, 20)], 16, seconds=0, kept=kept)


def test_nothing_to_measure() -> None:
    """A cache that holds no batch at all."""
    with pytest.raises(BadInput, match="no batch fits"):
        measure(Formula(), [], 16, seconds=0)


def test_interleaved_rows_have_no_end() -> None:
    """Every point once in each pass, in another order each time."""
    drawn = interleaved(Formula(), POINTS, 16)
    passes = [[tuple(one[key] for key in KEYS) for one in (next(drawn) for _ in POINTS)] for _ in range(6)]
    assert all(len(set(one)) == len(POINTS) for one in passes)
    assert len({tuple(one) for one in passes}) > 1


# Tables of measurements


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_tables_read_back(tmp_path: Path, suffix: str) -> None:
    """Every column and the provenance; what was not measured stays so."""
    found = measure(Formula(), POINTS, 16, seconds=0, clock_mhz=lambda: 1980.0)
    del found[3]["clock_mhz"]
    table = Rows.of(found, TOLD | {"threads": 4, "text": 'é "quoted"\n'})
    rows.save(table, tmp_path / f"m{suffix}")
    again = rows.load(tmp_path / f"m{suffix}")
    assert again.provenance == table.provenance
    for name in rows.COLUMNS:
        np.testing.assert_array_equal(again[name], table[name], err_msg=name)
    assert np.isnan(again["clock_mhz"]).sum() == 1
    assert list(tmp_path.iterdir()) == [tmp_path / f"m{suffix}"]


WITHOUT_POLARS = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("polars", "scipy", "altair"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
from pathlib import Path
from calibrate import commands, rows
from calibrate.grid import Point
from calibrate.measure import measure
from formula import Formula
from sim.errors import BadInput
table = rows.Rows.of(measure(Formula(), [Point(1, 20), Point(4, 9)], 16, seconds=0), {"model": "m"})
folder = Path(sys.argv[1])
rows.save(table, folder / "m.jsonl")
assert len(rows.load(folder / "m.jsonl")) == 6
(folder / "m.csv").write_text("seconds\\n1\\n")
for what in (lambda: rows.save(table, folder / "m.parquet"), lambda: rows.load(folder / "m.csv")):
    try:
        what()
    except BadInput as error:
        print(error)
"""


def test_a_machine_without_polars_measures(tmp_path: Path) -> None:
    """Into JSON lines; parquet and CSV are refused by name."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    command = [sys.executable, "-c", WITHOUT_POLARS, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.endswith("m.parquet: parquet needs polars, which is not here: name the file *.jsonl")
    assert "needs polars" in second
    assert rows.load(tmp_path / "m.jsonl").provenance == {"model": "m"}


def test_anyones_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The documented columns are enough, in any order and among others; model and device are asked for."""
    names = [*reversed(REQUIRED), "samples"]
    frame = pl.DataFrame({name: clean()[name] for name in names}).with_columns(pl.lit("x").alias("machine"))
    frame.write_csv(tmp_path / "m.csv")
    to = tmp_path / "mine.toml"
    command = ["calibrate", "fit", str(tmp_path / "m.csv"), "--to", str(to)]
    assert status(command) == 2
    assert capsys.readouterr().err == "servecast: error: --model: the table does not say which model was measured\n"
    assert status([*command, "--model", "m"]) == 2
    assert "--device: the table does not say which device" in capsys.readouterr().err
    assert not to.exists()
    assert status([*command, "--model", "m", "--device", "d"]) == 0
    found = load(str(to), Path())
    assert (found.name, found.model, found.device) == ("mine", "m", "d")
    assert_is_truth(found)


def test_a_table_that_does_not_tell_who_was_sampled() -> None:
    """Then every request was, and what sampling takes is part of the step."""
    all_sampled = clean().where(clean().samples == clean()["decodes"] + clean()["chunks"])
    columns = {name: values for name, values in all_sampled.columns.items() if name != "samples"}
    found = fitted(Rows(columns, {}))
    assert found.coefficients.sample == 0
    assert found.coefficients.step == pytest.approx(TRUTH["step"] + TRUTH["sample"], rel=1e-6)


GOOD = pl.DataFrame({name: [1.0, 2.0, 3.0] for name in REQUIRED})
BAD: dict[str, tuple[pl.DataFrame | bytes | None, tuple[str, ...]]] = {
    "column.csv": (GOOD.drop("attention"), ("column attention: no such column; needed: decodes, context",)),
    "column.parquet": (GOOD.drop("seconds"), ("column seconds: no such column",)),
    "column.jsonl": (b'{"seconds": 1}\n', ("row 1, column decodes",)),
    "nan.csv": (GOOD.with_columns(context=pl.Series([1.0, float("nan"), 2.0])), ("row 2, column context", "nan")),
    "null.parquet": (GOOD.with_columns(context=pl.Series([1.0, 2.0, None])), ("row 3, column context",)),
    "infinite.parquet": (GOOD.with_columns(attention=pl.lit(float("inf"))), ("row 1, column attention", "inf")),
    "negative.csv": (GOOD.with_columns(chunks=pl.Series([1.0, 0.0, -2.0])), ("row 3, column chunks", "-2")),
    "zero.csv": (GOOD.with_columns(seconds=pl.Series([0.0, 1.0, 1.0])), ("row 1, column seconds", "0 must be")),
    "tiny.csv": (GOOD.with_columns(seconds=pl.lit(1e-300)), ("row 1, column seconds", "1e-300")),
    "huge.csv": (GOOD.with_columns(seconds=pl.lit(1e40)), ("row 1, column seconds", "1e+40")),
    "huge.parquet": (GOOD.with_columns(decodes=pl.lit(1e30)), ("row 1, column decodes", "1e+30")),
    "text.csv": (GOOD.with_columns(context=pl.lit("many")), ("not a table of measurements", "context")),
    "empty.csv": (b"", ("not a table of measurements",)),
    "empty.parquet": (b"", ("not a table of measurements",)),
    "empty.jsonl": (b"", ("no rows",)),
    "rows.csv": (GOOD.head(0), ("no rows",)),
    "rows.parquet": (GOOD.head(0), ("no rows",)),
    "text.parquet": (b"hello there, this is no parquet", ("not a table of measurements",)),
    "bytes.csv": (bytes(range(256)) * 3, ("not a table of measurements",)),
    "bytes.jsonl": (bytes(range(128, 256)), ("row 1: not a measured row",)),
    "list.jsonl": (b"[1, 2]\n", ("row 1: not a measured row",)),
    "number.jsonl": (b'{"seconds": 1}\n7\n', ("row 2: not a measured row",)),
    "string.jsonl": (b'{"seconds": "long"}\n', ("row 1: not a measured row",)),
    "provenance.jsonl": (b'{"provenance": 5}\n', ("row 1: not a measured row",)),
    "folder.parquet": (None, ("folder.parquet",)),
    "missing.csv": (None, ("no such file",)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """One line that names the file and the place; nothing is written."""
    content, says = BAD[name]
    path, to = tmp_path / name, tmp_path / "to.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        content.write_csv(path) if name.endswith(".csv") else content.write_parquet(path)
    elif name.startswith("folder"):
        path.mkdir()
    assert status(["calibrate", "fit", str(path), "--to", str(to), "--model", "m", "--device", "d"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1, told.err
    assert told.err.startswith(f"servecast: error: {path}: ")
    assert all(part in told.err for part in says), told.err
    assert not to.exists()


# The commands


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The engine's modules, replaced: `make` makes the executor."""
    held: dict[str, Any] = {"make": Formula, "executors": []}

    def executor(_: object) -> Callable[[], Formula]:
        def build() -> Formula:
            held["executors"].append(held["make"]())
            one: Formula = held["executors"][-1]
            one.device = "none"  # type: ignore[attr-defined]
            return one

        return build

    module = SimpleNamespace(executor=executor, describe=lambda _: {"device": "a formula"}, clock_mhz=lambda _: 1.0)
    monkeypatch.setattr(commands, "needing_torch", lambda *_: module)
    return held


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    """A scenario that is calibrated before there is a profile."""
    path, tables = tmp_path / "scenario.toml", copy.deepcopy(SCENARIO)
    tables["engine"] |= {"num_blocks": 100, "max_sequences": 4, "max_model_tokens": 256}
    tables["scheduler"]["token_budget"] = 200
    path.write_text(tomli_w.dumps(tables | {"latency": {"kind": "roofline"}}), encoding="utf-8")
    return str(path)


@pytest.mark.usefixtures("fake")
def test_measure_fit_show(tmp_path: Path, scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One command after the other; what is shown is what was put in."""
    table, to = tmp_path / "m.parquet", tmp_path / "p.toml"
    assert status(["calibrate", "measure", scenario, "--to", str(table), "--seconds", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == 3 * told["batches"]
    assert told["provenance"] == {
        "device": "a formula",
        "source": "measured by servecast",
        "model": "llama-40m",
        "catalogue_device": "cpu",
        "scenario": "formula",
    }
    assert not list(tmp_path.glob("*.partial"))
    assert status(["calibrate", "fit", str(table), "--to", str(to), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == load(str(to), Path()).model_dump()
    assert found["coefficients"]["sequence"] == pytest.approx(TRUTH["sequence"], rel=1e-6)
    assert found["provenance"]["source"] == "measured by servecast"
    assert status(["calibrate", "show", str(to)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for term, unit in UNITS.items():
        low, high = found["intervals"][term]
        assert f"{term} {found['coefficients'][term]:.3g} {low:.3g} to {high:.3g} {unit}" in shown
    assert "llama-40m on cpu, tensor parallel 1, pipeline parallel 1" in shown
    assert "data up to 256 tokens and 4 requests a batch" in shown
    errors = found["errors"]
    half, most = f"{errors['held_out_median']:.1%}", f"{errors['held_out_p90']:.1%}"
    assert f"errors: within {half} of half and {most} of nine tenths" in shown
    assert "in total, on what was held out: " in shown
    assert (errors["held_out_median"], errors["held_out_p90"]) == pytest.approx((0, 0), abs=5e-4)
    assert "· source: measured by servecast" in shown


def test_show_a_profile_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without intervals or provenance, as JSON that is strict, and with terms that are 0."""
    path = tmp_path / "hand.toml"
    bare = {"coefficients": {"tokens": {"knots": [1, 2], "seconds": [0.0, 1.0]}}}
    path.write_text(tomli_w.dumps(PROFILE | bare), encoding="utf-8")
    assert status(["calibrate", "show", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "step 0 – per iteration" in shown
    assert "sequence 0 – per request in the batch" in shown
    assert status(["calibrate", "show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == load(str(path), Path()).model_dump()
    assert status(["calibrate", "show", "nothing.toml"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interruption_at_the_command_line(
    tmp_path: Path, scenario: str, fake: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 and no table; the same command goes on; --fresh starts again."""
    table = tmp_path / "m.jsonl"
    command = ["calibrate", "measure", scenario, "--to", str(table), "--seconds", "0"]
    batches = len(grid(limits_of(plan(Scenario.load(scenario)))))

    def interrupted() -> None:
        fake["make"] = lambda: Formula(stop_after=batches + 10)
        assert status(command) == 1
        assert capsys.readouterr().err.splitlines()[-1] == "servecast: error: interrupted"
        assert not table.exists()
        fake["make"] = Formula

    interrupted()
    assert status(command) == 0
    assert len(fake["executors"][-1].executed) == batches + 3 * batches - 10
    assert len(rows.load(table)) == 3 * batches
    table.unlink()
    interrupted()
    assert status([*command, "--fresh"]) == 0
    assert len(fake["executors"][-1].executed) == batches + 3 * batches


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere/m.parquet", "no such directory"),
        ("m.csv", "must end in .parquet or .jsonl"),
        ("m", "must end in .parquet or .jsonl"),
        ("folder.parquet", "is a directory"),
    ],
)
def test_where_no_table_can_be_written(
    tmp_path: Path, scenario: str, fake: dict[str, Any], capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    """Refused before anything is measured."""
    (tmp_path / "folder.parquet").mkdir()
    assert status(["calibrate", "measure", scenario, "--to", str(tmp_path / name)]) == 2
    told = capsys.readouterr().err
    assert told == f"servecast: error: {tmp_path / name}: {told.rpartition(': ')[2]}"
    assert says in told
    assert not fake["executors"]


def test_where_no_profile_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the file."""
    rows.save(clean(), tmp_path / "m.parquet")
    to = tmp_path / "nowhere" / "p.toml"
    assert status(["calibrate", "fit", str(tmp_path / "m.parquet"), "--to", str(to)]) == 2
    assert capsys.readouterr().err.startswith(f"servecast: error: {to}: ")


def test_fit_at_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal names the table; with the term held it is written, and the table's own names can be overruled."""
    table, to = tmp_path / "decodes.jsonl", tmp_path / "p.toml"
    rows.save(clean().where(clean()["chunks"] == 0), table)
    command = ["calibrate", "fit", str(table), "--to", str(to)]
    assert status(command) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"servecast: error: {table}: ")
    assert "cannot tell the term 'prefill_attention'" in told
    held = "prefill_attention, prefill_context,chunk,sequence,decode_step"
    assert status([*command, "--model", "mine", "--without", held]) == 0
    found = tomllib.loads(to.read_text(encoding="utf-8"))
    assert (found["model"], found["device"]) == ("mine", "cpu")
    assert status([*command, "--without", "chunks"]) == 2
    assert "--without: unknown term 'chunks'; did you mean 'chunk'?" in capsys.readouterr().err


@pytest.mark.usefixtures("fake")
def test_small_caches_at_the_command_line(tmp_path: Path, scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache of a block is measured; one that holds no batch is refused."""
    command = ["calibrate", "measure", scenario, "--to", str(tmp_path / "m.jsonl"), "--seconds", "0"]
    for blocks, tokens, expected in ((1, 16, 0), (30, 1, 0), (1, 1, 2)):
        sizes = ["--set", f"engine.num_blocks={blocks}", "--set", f"engine.block_tokens={tokens}"]
        assert status([*command, *sizes]) == expected
    assert "[engine] num_blocks: no batch fits" in capsys.readouterr().err


def test_the_first_requests_may_take_more() -> None:
    """Small matrix products: what the first requests add beyond `sequence` each is found, and level afterwards."""
    first = {0: 0.0, 1: 0.0, 2: 0.002, 3: 0.004}
    table = measured(grid(SMALL), 2, Formula(lambda one: truth(one) + first.get(int(one["samples"]), 0.005)))
    found = fitted(table)
    assert found.coefficients.few is not None
    assert found.errors.held_out_p90 < 0.01
    known = found.coefficients.few
    assert [known.at(n) - known.at(1) for n in (2, 3, 4)] == pytest.approx([0.002, 0.004, 0.005], rel=0.1)
    assert known.at(10_000) == known.at(known.knots[-1])


def test_few_batches_do_not_bend_it() -> None:
    """Where the data is thin the term is left out, not fitted to noise."""
    thin = measured(grid(SMALL)[::3], 1, Formula())
    assert len(thin) < 150
    with contextlib.suppress(BadInput):
        assert fitted(thin).coefficients.few is None
