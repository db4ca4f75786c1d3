"""Arrival processes: their laws, their common random numbers, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from sim.arrivals import Arrivals, AtOnce, Closed, Constant, Gamma, Poisson, TraceArrivals, mean_rate
from sim.errors import BadInput

ARRIVALS: TypeAdapter[Any] = TypeAdapter(Arrivals)


def rng(seed: int = 42) -> np.random.Generator:
    return np.random.default_rng(seed)


def gaps(times: np.ndarray) -> np.ndarray:
    return np.diff(times, prepend=0.0)


def test_poisson_gaps_are_exponential_and_the_first_is_not_skipped() -> None:
    times = Poisson(rate=4.0).times(rng(), 200_000)
    assert times.dtype == np.float64
    assert times[0] > 0
    assert (np.diff(times) >= 0).all()
    assert gaps(times).mean() == pytest.approx(0.25, rel=0.01)
    assert gaps(times).std() == pytest.approx(0.25, rel=0.01)
    assert np.mean(gaps(times) > 0.25) == pytest.approx(np.exp(-1), abs=0.005)


def test_two_rates_meet_the_same_shape() -> None:
    slow, fast = Poisson(rate=2.0).times(rng(), 1000), Poisson(rate=8.0).times(rng(), 1000)
    np.testing.assert_array_equal(slow, fast * 4.0)


@pytest.mark.parametrize("process", [Poisson(rate=3.0), Gamma(rate=3.0, cv=2.0), Constant(rate=3.0)])
def test_more_requests_leave_the_earlier_ones_alone(process: Poisson | Gamma | Constant) -> None:
    np.testing.assert_array_equal(process.times(rng(), 5000)[:700], process.times(rng(), 700))


def test_clip_cuts_gaps_as_the_papers_artefact_does() -> None:
    # The mean of an exponential cut at 3 is 1 - exp(-3) = 0.950.
    cut, whole = gaps(Poisson(rate=2.0, clip=3.0).times(rng(), 400_000)), gaps(Poisson(rate=2.0).times(rng(), 400_000))
    assert cut.max() == pytest.approx(1.5)
    assert cut.mean() * 2.0 == pytest.approx(1 - np.exp(-3), rel=0.005)
    untouched = whole < 1.4
    np.testing.assert_allclose(cut[untouched], whole[untouched], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gamma_has_the_rate_and_the_variation_asked_for(cv: float) -> None:
    found = gaps(Gamma(rate=5.0, cv=cv).times(rng(), 400_000))
    assert found.mean() == pytest.approx(0.2, rel=0.02)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.02)


def test_constant_comes_one_gap_after_zero() -> None:
    np.testing.assert_array_equal(Constant(rate=4.0).times(rng(), 4), [0.25, 0.5, 0.75, 1.0])


def test_at_once_is_all_zero() -> None:
    np.testing.assert_array_equal(AtOnce().times(rng(), 3), [0.0, 0.0, 0.0])


def test_a_trace_is_scaled_or_set_to_a_mean_rate() -> None:
    times = np.array([0.0, 1.0, 1.0, 4.0])
    np.testing.assert_array_equal(TraceArrivals(path="t", scale=2.0).rescaled(times), [0.0, 0.5, 0.5, 2.0])
    exact = TraceArrivals(path="t", rate=6.0).rescaled(times)
    assert mean_rate(exact) == pytest.approx(6.0)
    np.testing.assert_allclose(exact, times / 8.0)


def test_mean_rate_is_none_where_there_is_no_span() -> None:
    assert mean_rate(np.array([0.0, 0.0])) is None
    assert mean_rate(np.array([])) is None
    assert mean_rate(np.array([1.0, 2.0, 5.0])) == 0.5


def test_a_rate_for_simultaneous_arrivals_is_refused_by_key() -> None:
    with pytest.raises(
        BadInput, match=r"\[workload.arrivals\] rate: 3 cannot be reached.*2 arrivals are at one instant"
    ):
        TraceArrivals(path="t", rate=3.0).rescaled(np.zeros(2))


@pytest.mark.parametrize("rate", [1e-308, 1e308])
def test_rates_whose_times_float64_could_not_hold_are_refused(rate: float) -> None:
    with pytest.raises(ValidationError, match=f"{rate:g} must be from 1e-30 to 1e.30".replace("+", ".")):
        Poisson(rate=rate)
    assert np.isfinite(Poisson(rate=1e-30).times(rng(), 1000)).all()


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"kind": "poisson", "rate": 0.0}, "rate"),
        ({"kind": "poisson", "rate": -1.0}, "rate"),
        ({"kind": "poisson", "rate": float("nan")}, "rate"),
        ({"kind": "poisson", "rate": float("inf")}, "rate"),
        ({"kind": "poisson", "rate": "2"}, "rate"),
        ({"kind": "poisson", "rate": True}, "rate"),
        ({"kind": "poisson", "rate": 1.0, "cv": 1.0}, "cv"),
        ({"kind": "poisson", "rate": 1.0, "clip": 0.0}, "clip"),
        ({"kind": "poisson"}, "rate"),
        ({"kind": "gamma", "rate": 1.0}, "cv"),
        ({"kind": "gamma", "rate": 1.0, "cv": 0.0}, "cv"),
        ({"kind": "closed", "concurrency": 0}, "concurrency"),
        ({"kind": "closed", "concurrency": 1.5}, "concurrency"),
        ({"kind": "closed", "concurrency": 2, "think": -1.0}, "think"),
        ({"kind": "at-once", "rate": 1.0}, "rate"),
        ({"kind": "trace", "path": ""}, "path"),
        ({"kind": "trace", "path": "x", "scale": 0.0}, "scale"),
    ],
)
def test_nonsense_is_refused_by_key(table: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        ARRIVALS.validate_python(table)
    error = refusal.value.errors()[0]
    assert key in (error["loc"][-1], error.get("ctx", {}).get("key"))  # an unknown key is in the context


def test_scale_and_rate_exclude_each_other_but_a_default_scale_does_not_count() -> None:
    with pytest.raises(ValidationError, match="scale = 2 and rate = 3 exclude each other"):
        ARRIVALS.validate_python({"kind": "trace", "path": "x", "scale": 2.0, "rate": 3.0})
    full = ARRIVALS.validate_python({"kind": "trace", "path": "x", "rate": 3.0})
    assert ARRIVALS.validate_python(full.model_dump()) == full


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="'poisson', 'gamma', 'constant', 'trace', 'at-once', 'closed'"):
        ARRIVALS.validate_python({"kind": "poison", "rate": 1.0})


def test_integers_pass_for_rates() -> None:
    assert ARRIVALS.validate_python({"kind": "poisson", "rate": 2}).rate == 2.0
    assert ARRIVALS.validate_python({"kind": "closed", "concurrency": 4}) == Closed(concurrency=4, think=0.0)


def test_pythons_own_gaps_are_the_artefacts() -> None:
    """Seed 42, cut at 3: the mean of the first 128 gaps is 0.917 of the nominal one, as the artefact's are."""
    one = Poisson(rate=2.0, clip=3.0, python_seed=42)
    times = one.times(rng(), 128)
    assert times[-1] / 128 * 2.0 == pytest.approx(0.917, abs=5e-4)
    assert times.tolist() == one.times(np.random.default_rng(7), 128).tolist()
    assert times.tolist() == one.times(rng(), 2048)[:128].tolist()
