"""Length models: the published statistics, integers of at least 1, and what they refuse."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from pydantic import TypeAdapter, ValidationError

from sim.lengths import Dataset, Fixed, Lengths, LogNormal, Spread, Uniform, Zipf, datasets

LENGTHS: TypeAdapter[Any] = TypeAdapter(Lengths)
SHAREGPT = Path(__file__).resolve().parents[2] / "shared/data/traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
DRAWS = 260_000

# Sarathi-Serve (OSDI 2024), Table 2, the two output stds swapped back: P50, P90, std of prompt and output.
TABLE_2 = {
    "openchat-sharegpt4": ((1730, 5696, 2088), (415, 834, 265)),
    "arxiv-summarization": ((7059, 12985, 3638), (208, 371, 101)),
}


def draw(model: Any, n: int = DRAWS, seed: int = 42) -> np.ndarray:
    rows: np.ndarray = model.draw(np.random.default_rng(seed), n)
    assert rows.dtype == np.int64
    assert rows.min() >= 1
    return rows


def rank_correlation(rows: np.ndarray) -> float:
    ranks = [pl.Series(column).rank().to_numpy() for column in rows.T]
    return float(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize("name", TABLE_2)
def test_the_shipped_datasets_reproduce_table_2(name: str) -> None:
    rows = draw(Dataset(name=name))
    assert len(rows) > 200_000
    for column, (p50, p90, std) in zip(rows.T, TABLE_2[name], strict=True):
        assert np.quantile(column, 0.5) == pytest.approx(p50, rel=0.015)
        assert np.quantile(column, 0.9) == pytest.approx(p90, rel=0.015)
        assert column.std() == pytest.approx(std, rel=0.03)


def test_the_table_2_test_can_fail() -> None:
    # The stds as printed, unswapped, are far off.
    output = draw(Dataset(name="openchat-sharegpt4"))[:, 1]
    assert abs(output.std() / 101 - 1) > 1


@pytest.mark.parametrize(("name", "limit"), [("openchat-sharegpt4", 8192), ("arxiv-summarization", 16384)])
def test_no_request_of_a_dataset_exceeds_the_papers_filter(name: str, limit: int) -> None:
    totals = draw(Dataset(name=name)).sum(axis=1)
    assert 0.95 * limit < totals.max() <= limit


def test_every_dataset_names_its_source() -> None:
    assert set(datasets()) == set(TABLE_2)
    assert all(len(model.source) > 20 for model in datasets().values())


@pytest.mark.skipif(not SHAREGPT.exists(), reason="the ShareGPT token counts are not here (../shared/data/traces)")
def test_sharegpt_is_the_trace_it_was_made_from() -> None:
    trace = pl.read_csv(SHAREGPT).select("num_prefill_tokens", "num_decode_tokens").to_numpy()
    model = draw(Dataset(name="openchat-sharegpt4"))
    for real, ours in zip(trace.T, model.T, strict=True):
        assert ours.mean() == pytest.approx(real.mean(), rel=0.01)
        assert ours.max() <= real.max()
        shared = np.sort(np.concatenate([real, ours]))
        cdfs = [np.searchsorted(np.sort(values), shared, side="right") / len(values) for values in (real, ours)]
        assert np.abs(cdfs[0] - cdfs[1]).max() < 0.006  # Kolmogorov-Smirnov distance
    assert rank_correlation(model) == pytest.approx(rank_correlation(trace), abs=0.01)
    assert model.sum(axis=1).mean() == pytest.approx(trace.sum(axis=1).mean(), rel=0.01)


def test_fixed_is_fixed() -> None:
    np.testing.assert_array_equal(draw(Fixed(prompt=7, output=3), 2), [[7, 3], [7, 3]])


def test_uniform_includes_both_ends_evenly() -> None:
    rows = draw(Uniform(prompt=(1, 4), output=(9, 9)), 100_000)
    assert set(rows[:, 1]) == {9}
    values, counts = np.unique(rows[:, 0], return_counts=True)
    assert list(values) == [1, 2, 3, 4]
    np.testing.assert_allclose(counts / len(rows), 0.25, atol=0.01)


def test_uniform_takes_the_arrays_of_toml() -> None:
    model = LENGTHS.validate_python({"kind": "uniform", "prompt": [1, 2], "output": [3, 4]})
    assert LENGTHS.validate_python(model.model_dump()) == model


def test_lognormal_has_its_median_and_p90_and_never_exceeds_max() -> None:
    spread = Spread(median=400, p90=1500, max=100_000)
    assert spread.sigma == pytest.approx(math.log(3.75) / 1.2815515655446004)
    prompts = draw(LogNormal(prompt=spread, output=Spread(median=50, p90=80, max=90)))[:, 0]
    assert np.median(prompts) == pytest.approx(400, rel=0.01)
    assert np.quantile(prompts, 0.9) == pytest.approx(1500, rel=0.02)
    outputs = draw(LogNormal(prompt=spread, output=Spread(median=50, p90=80, max=90)))[:, 1]
    assert outputs.max() == 90
    assert np.mean(outputs == 90) < 0.01  # redrawn, not piled up at the limit


def test_zipf_follows_its_law_and_splits_into_integers() -> None:
    model = Zipf(theta=0.8, min_tokens=10, max_tokens=19, prefill_to_decode_ratio=4.0)
    rows = draw(model, 200_000)
    totals = rows.sum(axis=1)
    law = np.arange(1, 11) ** -0.8
    np.testing.assert_allclose(np.bincount(totals - 10, minlength=10) / len(rows), law / law.sum(), atol=0.005)
    assert (np.abs(rows[:, 1] - totals / 5) <= 0.5).all()


@pytest.mark.parametrize("ratio", [1e-6, 1e6])
def test_zipf_never_gives_an_empty_prompt_or_output(ratio: float) -> None:
    rows = draw(Zipf(min_tokens=2, max_tokens=5, prefill_to_decode_ratio=ratio), 1000)
    assert set(rows.sum(axis=1)) == {2, 3, 4, 5}


@pytest.mark.parametrize("name", TABLE_2)
def test_more_draws_leave_the_earlier_ones_alone(name: str) -> None:
    many, few = draw(Dataset(name=name), 4000), draw(Dataset(name=name), 400)
    np.testing.assert_array_equal(many[: len(few)], few)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"kind": "fixed", "prompt": 0, "output": 1}, "prompt"),
        ({"kind": "fixed", "prompt": 1, "output": 0}, "output"),
        ({"kind": "fixed", "prompt": 1.5, "output": 1}, "prompt"),
        ({"kind": "fixed", "prompt": 2**31 + 1, "output": 1}, "prompt"),
        ({"kind": "uniform", "prompt": [5, 4], "output": [1, 2]}, "prompt"),
        ({"kind": "uniform", "prompt": [1, 2, 3], "output": [1, 2]}, "prompt"),
        ({"kind": "uniform", "prompt": [1.0, 2.0], "output": [1, 2]}, 0),
        ({"kind": "uniform", "prompt": [0, 2], "output": [1, 2]}, 0),
        ({"kind": "lognormal", "prompt": {"median": 10, "p90": 5, "max": 20}, "output": {}}, "prompt"),
        ({"kind": "zipf", "theta": -0.1}, "theta"),
        ({"kind": "zipf", "min_tokens": 9, "max_tokens": 8}, "zipf"),
        ({"kind": "zipf", "min_tokens": 1}, "min_tokens"),
        ({"kind": "dataset", "name": "openchat-sharegpt4", "seed": 1}, "seed"),
    ],
)
def test_nonsense_is_refused_by_key(table: dict[str, Any], key: str | int) -> None:
    with pytest.raises(ValidationError) as refusal:
        LENGTHS.validate_python(table)
    error = refusal.value.errors()[0]
    assert key in (error["loc"][-1], error.get("ctx", {}).get("key"))  # an unknown key is in the context


def test_a_mistyped_dataset_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match="unknown dataset 'openchat-sharegpt'; did you mean 'openchat-sharegpt4'"):
        LENGTHS.validate_python({"kind": "dataset", "name": "openchat-sharegpt"})
