"""Calibrated profiles: the formula by hand, where they are found, what is refused, and when a run extrapolates."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from formula import PROFILE, SCENARIO, TRUTH, truth

from calibrate.grid import Point, batch
from calibrate.rows import row
from sim import hardware
from sim import profile as profiles
from sim.__main__ import status
from sim.affine import AffineTable
from sim.profile import TERMS, Coefficients, Profile, ProfileLatency, ProfileRoofline, Tokens, load
from sim.report import times_from
from sim.roofline import RooflineTable
from sim.scenario import Scenario
from sim.simulate import simulate

Tables = dict[str, Any]


def changed(tables: Tables, path: str, value: Any) -> Tables:
    """A copy with one key set."""
    result = copy.deepcopy(tables)
    *names, key = path.split(".")
    table = result
    for name in names:
        table = table.setdefault(name, {})
    table[key] = value
    return result


def written(folder: Path, profile: Tables | str = PROFILE, scenario: Tables = SCENARIO) -> Path:
    """A scenario file, with the profile beside it."""
    text = profile if isinstance(profile, str) else tomli_w.dumps(profile)
    (folder / "truth.toml").write_text(text, encoding="utf-8")
    path = folder / "scenario.toml"
    path.write_text(tomli_w.dumps(scenario), encoding="utf-8")
    return path


def seconds_of(profile: Tables, point: Point) -> float:
    """Seconds of a batch under a profile."""
    made, _ = batch(point, 16, np.random.default_rng(3))
    (seconds,) = ProfileLatency(Profile.model_validate(profile)).execute(made).seconds
    return float(seconds)


# The formula


def hand(point: Point, context: int | None = None) -> float:
    """Seconds by a profile of round figures; `context` replaces that of the decodes."""
    coefficients = {
        "step": 1.0,
        "decode_step": 0.5,
        "chunk": 0.25,
        "sequence": 0.125,
        "context": 2.0**-10,
        "prefill_attention": 2.0**-12,
        "prefill_context": 2.0**-8,
        "tokens": {"knots": [4, 256, 257, 513], "seconds": [0.0, 2.0, 6.0, 8.0]},
    }
    made, _ = batch(point, 16, np.random.default_rng(3))
    if context is not None:
        made.context = context
    one = Profile.model_validate(PROFILE | {"coefficients": coefficients})
    return float(ProfileLatency(one).execute(made).seconds[0])


def test_decodes_alone() -> None:
    """Four decodes with 1,024 KV tokens among them: 1 + 0.5 + 4/8 + 1."""
    assert hand(Point(4, 256), context=1024) == 1.0 + 0.5 + 0.5 + 1.0


def test_chunks_alone() -> None:
    """Chunks of 128 tokens after 64 and of 128 after none: attention 128·128 + 128·64, KV read 192 + 128."""
    expected = 1.0 + 2 * 0.25 + 2 * 0.125 + (128 * 128 + 128 * 64) / 4096 + (192 + 128) / 256 + 2.0
    assert hand(Point(chunks=((64, 128), (0, 128)))) == expected


def test_decodes_and_chunks_add_up() -> None:
    """Sixteen decodes with 2,048 KV tokens and a chunk of 497: 513 tokens, 17 requests."""
    expected = 1.0 + 0.5 + 0.25 + 17 / 8 + 2.0 + 497 * 497 / 2 / 4096 + 497 / 256 + 8.0
    assert hand(Point(16, 128, ((0, 497),)), context=2048) == expected


def test_only_requests_that_get_a_token_are_sampled() -> None:
    """A chunk in the middle of its prompt costs no sampling; `few` is of the tokens sampled, level beyond its end."""
    tokens = {"knots": [1, 2], "seconds": [0.0, 0.0]}
    few = {"knots": [1, 2, 4, 5], "seconds": [0.0, 0.5, 1.0, 1.0]}
    one = Profile.model_validate(PROFILE | {"coefficients": {"sample": 8.0, "tokens": tokens, "few": few}})

    def seconds(point: Point) -> float:
        return float(ProfileLatency(one).execute(batch(point, 16, np.random.default_rng(3))[0]).seconds[0])

    assert seconds(Point(chunks=((32, 16),), unfinished=True)) == 0.0
    assert seconds(Point(chunks=((32, 16),))) == 8.0
    assert seconds(Point(1, 32, ((32, 16),), unfinished=True)) == 8.0
    assert seconds(Point(1, 32, ((32, 16),))) == 8.5
    assert seconds(Point(3, 32)) == 8.75
    assert seconds(Point(64, 32)) == 9.0


def test_scale_multiplies_it_all() -> None:
    """`scale` applies to the sum."""
    point = Point(8, 100, ((32, 50),))
    assert seconds_of(PROFILE | {"scale": 1.5}, point) == pytest.approx(1.5 * seconds_of(PROFILE, point), rel=1e-12)


def test_terms_that_are_not_given_are_zero() -> None:
    """Host time per step and per request, like every term, is its own coefficient and 0 where it is unset."""
    tokens = Tokens(knots=[1, 2], seconds=[0.0, 0.0])
    assert all(getattr(Coefficients(tokens=tokens), term) == 0 for term in TERMS)
    bare = {"coefficients": {"tokens": {"knots": [1, 2], "seconds": [0.0, 0.0]}}}
    assert seconds_of(PROFILE | bare, Point(128, 100)) == 0
    with_step, with_sequence = (copy.deepcopy(bare), copy.deepcopy(bare))
    with_step["coefficients"]["step"] = 0.015  # type: ignore[assignment]
    with_sequence["coefficients"]["sequence"] = 1e-4  # type: ignore[assignment]
    assert seconds_of(PROFILE | with_step, Point(128, 100)) == pytest.approx(0.015)
    assert seconds_of(PROFILE | with_sequence, Point(128, 100)) == pytest.approx(0.0128)


def test_the_tests_formula_is_the_profiles() -> None:
    """The executor that other tests calibrate takes exactly what its profile says."""
    rng, latency = np.random.default_rng(0), ProfileLatency(Profile.model_validate(PROFILE))
    for point in (Point(1, 2), Point(31, 300), Point(5, 70, ((0, 300), (128, 17))), Point(chunks=((256, 700),))):
        made, _ = batch(point, 16, rng)
        assert latency.execute(made).seconds[0] == pytest.approx(truth(row(made)), rel=1e-12)


TOKENS = Tokens(knots=[4, 256, 257, 513], seconds=[1.0, 3.0, 7.0, 9.0])


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [
        (4, 1.0),
        (130, 2.0),
        (256, 3.0),
        (257, 7.0),  # one token more, one tile more
        (256.5, 5.0),
        (385, 8.0),
        (513, 9.0),
        (769, 11.0),  # the last slope goes on
        (1, 1.0 - 3 * 2 / 252),  # and so does the first
    ],
)
def test_tokens_are_piecewise_linear(tokens: float, seconds: float) -> None:
    """Between knots, at knots, beyond both ends."""
    assert TOKENS.at(tokens) == pytest.approx(seconds, rel=1e-12)


def test_tokens_never_cost_less_than_nothing() -> None:
    """Below the first knot a steep slope stops at 0."""
    steep = Tokens(knots=[100, 200], seconds=[0.5, 50.0])
    assert steep.at(1) == 0
    assert steep.at(100) == 0.5


def test_asking_again_gives_the_same() -> None:
    """What is remembered of a batch's counts does not depend on the order of questions."""
    one = ProfileLatency(Profile.model_validate(PROFILE))
    rng = np.random.default_rng(1)
    batches = [batch(point, 16, rng)[0] for point in (Point(4, 50), Point(4, 90), Point(4, 50, ((0, 8),)))] * 2
    asked = [one.execute(made).seconds for made in batches]
    assert asked[:3] == asked[3:]
    assert [row(made)["decodes"] for made in batches[:3]] == [4, 4, 4]
    assert asked[1][0] - asked[0][0] == pytest.approx(TRUTH["context"] * (batches[1].context - batches[0].context))


# Where profiles are found


def test_a_path_is_relative_to_the_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the command is called from; the scenario's own folder comes before the current one."""
    scenario, elsewhere = written(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "truth.toml").write_text(tomli_w.dumps(PROFILE | {"name": "another"}), encoding="utf-8")
    monkeypatch.chdir(elsewhere)
    assert load("truth.toml", tmp_path).name == "truth"
    assert simulate(Scenario.load(str(scenario))).summary["completed"] == 40


def test_or_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what `--set latency.name=` on a command line means."""
    written(tmp_path)
    (tmp_path / "scenarios").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("truth.toml", tmp_path / "scenarios").name == "truth"
    assert load(str(tmp_path / "truth.toml"), Path("/nowhere")).name == "truth"


def test_shipped_profiles_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come before files, and a typo is answered with the nearest."""
    written(tmp_path)
    monkeypatch.setattr(profiles, "shipped", lambda: {"h100/llama": tmp_path / "truth.toml"})
    assert load("h100/llama", Path()).name == "truth"
    with pytest.raises(profiles.BadInput, match=r"unknown profile 'h100/lama'; did you mean 'h100/llama'\?"):
        load("h100/lama", tmp_path)
    assert load("truth.toml", tmp_path).name == "truth"


def test_every_shipped_profile_loads() -> None:
    """Each is valid, and says where it comes from."""
    for name in profiles.shipped():
        assert load(name, Path()).provenance, name


# What is refused: one line, status 2


def refusal(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What the command line says of it."""
    assert status(["run", str(path), *options]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1, told.err
    assert told.err.startswith("servecast: error: ")
    return told.err


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ("name = ", ("truth.toml", "not a profile")),
        ("\x00\x01", ("truth.toml", "not a profile")),
        ("x = " + "[" * 20_000, ("truth.toml", "not a profile")),
        ("x = " + "9" * 9_000, ("truth.toml",)),
        (changed(PROFILE, "colour", 1), ("unknown key 'colour'",)),
        (changed(PROFILE, "coefficients.contxt", 1e-6), ("[coefficients] contxt", "did you mean 'context'?")),
        (changed(PROFILE, "coefficients.step", -1.0), ("[coefficients] step", "-1.0")),
        (changed(PROFILE, "coefficients.step", "1"), ("[coefficients] step",)),
        (changed(PROFILE, "coefficients.step", float("nan")), ("[coefficients] step", "nan")),
        (changed(PROFILE, "scale", 0.0), ("scale",)),
        (changed(PROFILE, "coefficients.tokens.seconds", [0.0, 6e-4, 6e-3, 5e-3, 1.5e-2, 2e-2]), ("must not fall",)),
        (changed(PROFILE, "coefficients.tokens.seconds", [0.0, 6e-4]), ("6 knots and 2 seconds",)),
        (changed(PROFILE, "coefficients.tokens", {"knots": [1, 1], "seconds": [0.0, 1.0]}), ("must ascend",)),
        (changed(PROFILE, "coefficients.tokens", {"knots": [1], "seconds": [0.0]}), ("knots",)),
        (changed(PROFILE, "validity.tokens", 0), ("[validity] tokens",)),
        ({name: table for name, table in PROFILE.items() if name != "errors"}, ("[coefficients] come with [errors]",)),
        ({}, ("required",)),
        (changed(PROFILE, "model", "mistral-7b"), ("[latency] name", "'mistral-7b', not 'llama-40m'")),
        (changed(PROFILE, "tensor_parallel", 2), ("[deployment] tensor_parallel", "measured at 2, not 1")),
    ],
)
def test_bad_profiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: Tables | str, says: tuple[str, ...]
) -> None:
    """Each names the key, or the file where it cannot be read."""
    told = refusal(written(tmp_path, profile), capsys)
    assert all(part in told for part in says), told


@pytest.mark.parametrize("name", ["missing.toml", ".", "x" * 1_000, "a\x00b"])
def test_names_that_no_file_has(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The scenario's key is to blame."""
    told = refusal(written(tmp_path, scenario=changed(SCENARIO, "latency.name", name)), capsys)
    assert "scenario.toml: [latency] name: " in told
    assert len(told) < 400


def test_pipelines_have_no_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not in this version."""
    told = refusal(written(tmp_path), capsys, "--set", "deployment.pipeline_parallel=2")
    assert "--set: [deployment] pipeline_parallel" in told


def test_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that are no text."""
    scenario = written(tmp_path)
    (tmp_path / "truth.toml").write_bytes(b"name = '\xff'")
    assert "truth.toml: not a profile" in refusal(scenario, capsys)


# When a run extrapolates

FIELDS = {
    "tokens": "tokens up to",
    "sequences": "sequences up to",
    "context_tokens": "context tokens up to",
    "prefill_context_tokens": "prefill context tokens up to",
}


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How far the scenario's run goes, from its own tables."""
    report = simulate(Scenario.load(str(written(tmp_path_factory.mktemp("reached")))))
    steps = report.steps.to_dicts()
    assert report.summary["preemptions"] == 0  # or prefills would go beyond prompts
    return {
        "tokens": max(one["prefill_tokens"] + one["decodes"] for one in steps),
        "sequences": max(one["decodes"] + one["chunks"] for one in steps),
        "context_tokens": max(-(-one["context_tokens"] // one["decodes"]) for one in steps if one["decodes"]),
        "prefill_context_tokens": int(report.requests["prompt_tokens"].max()),  # type: ignore[arg-type]
    }


def notes_with(folder: Path, validity: dict[str, int]) -> list[str]:
    """What the summary of a run says about extrapolation."""
    scenario = written(folder, PROFILE | {"validity": validity})
    summary = simulate(Scenario.load(str(scenario))).summary
    return [note for note in summary["notes"] if "extrapolated" in note]


def test_no_note_within_the_range(tmp_path: Path, reached: dict[str, int]) -> None:
    """A run that goes exactly as far as the measurements does not extrapolate."""
    assert notes_with(tmp_path, reached) == []


@pytest.mark.parametrize("field", FIELDS)
def test_a_note_beyond_the_range(tmp_path: Path, reached: dict[str, int], field: str) -> None:
    """One less was measured, and the note names that limit and no other."""
    (note,) = notes_with(tmp_path, reached | {field: reached[field] - 1})
    assert note.startswith("profile 'truth' is extrapolated: ")
    said = f"{FIELDS[field]} {reached[field]:,} (measured up to {reached[field] - 1:,})"
    assert note.removeprefix("profile 'truth' is extrapolated: ") == said


def test_contexts_count_as_a_whole() -> None:
    """Two decodes with 7 KV tokens go beyond 3 each; asked of a profile itself, batch by batch."""
    one = ProfileLatency(Profile.model_validate(changed(PROFILE, "validity.context_tokens", 3)))
    made = batch(Point(2, 100), 16, np.random.default_rng(0))[0]
    for context, notes in ((6, 0), (7, 1)):
        made.context = context
        one.execute(made)
        assert len(one.notes()) == notes
    assert one.notes() == ["profile 'truth' is extrapolated: context tokens up to 4 (measured up to 3)"]


def test_the_note_and_the_source_are_shown(
    tmp_path: Path, reached: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """On the screen and in the JSON, with the profile's errors."""
    scenario = written(tmp_path, PROFILE | {"validity": dict.fromkeys(reached, 1)})
    assert status(["run", str(scenario)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "is extrapolated: tokens up to" in shown
    assert "within 1.0% of half and 3.0% of nine tenths of the measurements held out" in shown
    assert status(["run", str(scenario), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert sum("is extrapolated" in note for note in summary["notes"]) == 1
    assert "profile truth.toml (fitted)" in summary["times_from"]


def test_times_from_tells_the_kinds_apart(tmp_path: Path) -> None:
    """Given, assumed, fitted or measured; a roofline says whether host time is in it."""
    one = Scenario.load(str(written(tmp_path)))
    assert times_from(one, measured=True) == "times: measured on this machine's engine"
    affine = one.model_copy(update={"latency": AffineTable(kind="affine", step=0.1)})
    assert "affine coefficients" in times_from(affine)
    for step, told in ((0.0, "no host time"), (0.01, "host time as given")):
        roofline = one.model_copy(update={"latency": RooflineTable(kind="roofline", step=step)})
        assert told in times_from(roofline)


# The other form: fitted figures of the roofline model

FITTED: Tables = {
    "name": "fitted",
    "model": "yi-34b",
    "device": "a100-80gb-pcie",
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "roofline": {
        "compute_efficiency": 0.5,
        "overlap": 0.25,
        "kv_efficiency": 0.6,
        "step": 0.004,
        "reduce_latency": 2e-5,
    },
    "validity": {"tokens": 64, "sequences": 4, "context_tokens": 4096, "prefill_context_tokens": 4096},
    "residuals": [
        {"what": "a", "unit": "s", "published": 1.0, "predicted": 1.1},
        {"what": "b", "unit": "s", "published": 2.0, "predicted": 1.0, "fitted": False},
    ],
}
PIPELINE: Tables = {
    "model": {"name": "yi-34b"},
    "device": {"name": "a100-80gb-pcie"},
    "deployment": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "latency": {"kind": "profile", "name": "truth.toml"},
    "workload": {
        "requests": 40,
        "arrivals": {"kind": "poisson", "rate": 2.0},
        "lengths": {"kind": "uniform", "prompt": [1, 600], "output": [1, 60]},
    },
}


def test_a_profile_of_figures_runs_as_the_roofline_with_them(tmp_path: Path) -> None:
    """Pipelines too; only its notes and what it is called are different."""
    by_profile = simulate(Scenario.load(written(tmp_path, FITTED, PIPELINE)))
    direct = {"latency": {"kind": "roofline"} | FITTED["roofline"]}
    by_hand = simulate(Scenario.load(written(tmp_path, FITTED, PIPELINE | direct)))
    assert by_profile.requests.equals(by_hand.requests)
    assert by_profile.steps.equals(by_hand.steps)
    assert "within 10% of half and 10% of all of the 1 figures" in by_profile.summary["times_from"]


def test_it_tells_what_it_extrapolates(tmp_path: Path) -> None:
    """Batches of more tokens and requests than the data had, and longer prompts."""
    small = changed(changed(FITTED, "validity.sequences", 1), "validity.prefill_context_tokens", 100)
    (note,) = simulate(Scenario.load(written(tmp_path, small, PIPELINE))).record.notes
    assert "tokens up to 512 (measured up to 64)" in note
    assert "(measured up to 1)" in note
    assert "(measured up to 100)" in note
    assert "; context" not in note


def test_its_scale_multiplies_the_stages(tmp_path: Path) -> None:
    """Not the hop between them."""
    one = Scenario.load(written(tmp_path, FITTED | {"scale": 2.0}, PIPELINE))
    twice = simulate(one).columns("end_s")[0] - simulate(one).columns("start_s")[0]
    once = simulate(Scenario.load(written(tmp_path, FITTED, PIPELINE)))
    assert twice == pytest.approx(2 * (once.columns("end_s")[0] - once.columns("start_s")[0]), rel=0.01)


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        (changed(FITTED, "coefficients", PROFILE["coefficients"]), ("exactly one of",)),
        ({key: value for key, value in FITTED.items() if key != "roofline"}, ("exactly one of",)),
        (changed(FITTED, "roofline.memory_efficiency", 1.01), ("[roofline] memory_efficiency", "1.01")),
        (changed(FITTED, "roofline.overlap", -0.1), ("[roofline] overlap",)),
        (changed(FITTED, "roofline.kind", "roofline"), ("[roofline] kind", "unknown key")),
        (changed(FITTED, "pipeline_parallel", 1), ("[deployment] pipeline_parallel", "measured at 1, not 2")),
        (changed(FITTED, "device", "h100-sxm"), ("[latency] name", "'h100-sxm', not 'a100-80gb-pcie'")),
        (changed(PROFILE, "pipeline_parallel", 2), ("pipeline",)),
    ],
)
def test_bad_profiles_of_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: Tables, says: tuple[str, ...]
) -> None:
    """Beyond physics, of two forms, of another device or pipeline."""
    told = refusal(written(tmp_path, profile, PIPELINE), capsys)
    assert all(part in told for part in says), told


def test_overlap_hides_the_shorter_of_arithmetic_and_reading() -> None:
    """1: the longer alone, 0: both, one after the other; in between linearly."""
    point = Point(chunks=((0, 512),))

    def seconds(overlap: float) -> float:
        figures = FITTED["roofline"] | {"overlap": overlap, "step": 0.0}
        one = Profile.model_validate(FITTED | {"roofline": figures})
        model = hardware.model(hardware.ModelTable(name="yi-34b"), Path())
        device = hardware.device(hardware.DeviceTable(name="a100-80gb-pcie"))
        return sum(ProfileRoofline(one, model, device).execute(batch(point, 16, np.random.default_rng(3))[0]).seconds)

    hidden, half, shown = seconds(1.0), seconds(0.5), seconds(0.0)
    weights = 34.39e9 - 2 * 64000 * 7168  # parameters of the layers (the model's card), on two devices per stage
    assert shown - hidden == pytest.approx(weights * 2 / 2 / (1935e9 * 0.75), rel=0.01)
    assert half == pytest.approx((hidden + shown) / 2, rel=1e-9)


def test_a_page_of_a_fitted_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures beside those without a fit, what it was fitted to and what it is only beside."""
    written(tmp_path, FITTED)
    assert status(["calibrate", "show", str(tmp_path / "truth.toml")]) == 0
    told = capsys.readouterr().out
    assert "compute_efficiency" in told
    assert "+10.0%" in told
    assert "-50.0%" in told
    assert "not fitted" in told
