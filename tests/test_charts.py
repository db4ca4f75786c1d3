"""Charts as Vega-Lite with their data: what is drawn is what happened, thinned honestly, with units and n."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from xml.etree import ElementTree

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import charts
from sim.capacity import Capacity, Trial
from sim.charts import theme
from sim.charts.rates import _undominated
from sim.charts.thin import MOST_ROWS, in_time, longest_pause, sampled, tail
from sim.compare import Comparison, compare
from sim.names import titled
from sim.report import Report
from sim.report_commands import FORMATS, picture
from sim.scenario import Scenario
from sim.simulate import simulate

GOLDEN = Path(__file__).parent / "golden" / "charts.json"
SCENARIO = """
name = "tiny"
[model]
name = "mistral-7b"
[device]
name = "a100-80gb-pcie"
[latency]
kind = "roofline"
[workload]
requests = 60
seed = 7
arrivals = { kind = "poisson", rate = 3.0 }
lengths = { kind = "uniform", prompt = [20, 3000], output = [2, 200] }
[slo]
tbt_p99 = 0.1
ttft_p50 = 0.5
"""
COST: dict[str, Any] = {
    "per_million_output_tokens": 0.5,
    "interval_per_million_output_tokens": [0.45, 0.6],
    "rate": 2.0,
    "rate_from": "capacity",
    "devices": 2,
    "gpu_hour": 3.0,
    "sensitivity": {
        "load": {"0.5": 1.0, "1.0": 0.5},
        "gpu_hour": {"0.9": 0.45, "1.1": 0.55},
        "slo": {"1.0": {"rate": 2.0}, "0.5": {"rate": 0.0, "per_million_output_tokens": None}},
    },
}
METRICS: list[dict[str, Any]] = [
    {"metric": "tbt_p99", "measured_s": 0.08, "noise": 0.01, "error": -0.05, "error_anchored": 0.02},
    {"metric": "ttft_p50", "measured_s": 0.2, "noise": -0.03, "error": 0.04, "error_anchored": None},
]
STEPS = pl.DataFrame(
    {"seconds": [0.01, 0.02, 0.04], "predicted": [0.011, 0.02, 0.03], "decodes": [1, 2, 0], "chunks": [0, 0, 1]}
)
SWEEP = pl.DataFrame(
    {
        "scheduler.token_budget": [128, 256, 512, 1024],
        "rate.own": [1.0, 1.0, 2.0, 2.0],
        "tbt_s_p99": [0.02, 0.04, 0.09, 0.2],
    }
    | {"request_throughput": [0.9, 1.0, 2.0, 1.9]}
)


def found(policy: str, rate: float, interval: tuple[float, float] | None) -> Capacity:
    trials = (
        Trial(4.0, met=False, limited_by="tbt_p99", stopped=True),
        Trial(rate, met=True, values={"tbt_p99": 0.05}),
        Trial(rate * 1.5, met=False, limited_by="tbt_p99", values={"tbt_p99": 0.3}),
    )
    return Capacity(policy, rate, interval, "tbt_p99" if rate else "refused", trials, {0: rate, 1: rate * 1.1})


FOUND = [found("prefill-first", 1.0, (0.9, 1.1)), found("stall-free", 2.5, (2.25, 2.75))]


@pytest.fixture(scope="module")
def several() -> Comparison:
    return compare(Scenario.from_toml(SCENARIO), ["prefill-first", "stall-free"])


@pytest.fixture(scope="module")
def piped() -> Report:
    change = {"deployment__pipeline_parallel": 2, "workload__requests": 30}
    return simulate(Scenario.from_toml(SCENARIO).with_(**change))


def all_charts(several: Comparison, piped: Report) -> dict[str, Any]:
    one = several[0]
    return {
        **{name: getattr(charts, name)(one) for name in ("tokens", "tbt", "ttft", "kv", "queue", "time_parts")},
        **{f"{name}s": getattr(charts, name)(several) for name in ("tokens", "tbt", "ttft", "kv", "queue")},
        **{"batches": charts.batches(one), "timeline": charts.timeline(one), "stages": charts.timeline(piped)},
        **{"parts": charts.time_parts(several), "capacity": charts.capacity(FOUND)},
        "capacities": charts.capacity({"strict": FOUND, "relaxed": FOUND}),
        "latency_at_rate": charts.latency_at_rate(FOUND, "tbt_p99", 0.1),
        "cost": charts.cost(COST),
        "front": charts.front(SWEEP, "request_throughput", "tbt_s_p99", by="rate.own", point="scheduler.token_budget"),
        "trend": charts.trend(SWEEP, "scheduler.token_budget", "tbt_s_p99", by="rate.own", limit=0.1),
        **{"steps": charts.steps(STEPS), "quantiles": charts.quantiles(STEPS), "errors": charts.errors(METRICS)},
        "tbt_quantiles": charts.tbt_quantiles(*several),
    }


def rows(chart: Any) -> list[list[dict[str, Any]]]:
    return list(chart.to_dict()["datasets"].values())


def channels(spec: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every encoding of a chart's layers and panels."""
    own = [(name, one) for name, one in spec.get("encoding", {}).items() if isinstance(one, dict)]
    inner = [*spec.get("layer", []), *spec.get("vconcat", [])]
    return own + [pair for part in inner for pair in channels(part)]


def test_every_chart_has_units_n_and_few_rows(several: Comparison, piped: Report) -> None:
    """A quantity's axis has a title with its unit, unless the ticks carry it; the subtitle counts; marks have data."""
    for name, chart in all_charts(several, piped).items():
        spec = chart.to_dict()
        said = " ".join(spec["title"]["subtitle"])
        assert spec["title"]["text"] and any(letter.isdigit() for letter in said), name
        assert sum(map(len, spec["datasets"].values())) <= MOST_ROWS, name
        assert all(spec["datasets"].values()), name
        axes: dict[str, list[dict[str, Any]]] = {"x": [], "y": []}
        for channel, one in channels(spec):
            if channel in axes and one.get("type") == "quantitative":
                axes[channel].append(one)
        for channel, each in axes.items():
            titles = [one["title"] for one in each if one.get("title")]
            assert titles or not each, (name, channel)
            ticks = [(one.get("axis") or {}).get("labelExpr") for one in each]
            words = ("(s)", "(%)", "requests", "tokens", "milliseconds", "share", "cost", "difference", "per second")
            assert any(ticks) or any(word in title for title in titles for word in words) or not each, (name, titles)


def test_one_theme_and_colours_that_all_eyes_tell_apart(several: Comparison) -> None:
    """Okabe and Ito's palette and a grey; a policy has one colour everywhere, alone or beside others."""
    okabe_ito = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
    assert {*theme.PALETTE, *theme.COLOURS.values()} <= okabe_ito | {theme.GREY}
    assert len(set(theme.PALETTE)) == len(theme.PALETTE)
    for runs in (several, several[1]):
        spec = charts.tbt(runs).to_dict()
        scale = next(one["scale"] for name, one in channels(spec) if name == "color")
        assert dict(zip(scale["domain"], scale["range"], strict=True))["stall-free"] == theme.BLUE
        assert spec["config"]["axis"] == theme.config()["axis"]
    shades = theme.colours(["stall-free", "a", "b"]).to_dict()["scale"]["range"]
    assert shades[0] == theme.BLUE and len(set(shades)) == 3


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.001, 100), st.integers(1, 50)), min_size=1, max_size=200, unique_by=lambda p: p[0]),
    st.integers(2, 60),
)
def test_a_thinned_tail_is_exact_where_it_has_points(pairs: list[tuple[float, int]], most: int) -> None:
    """Each point's share is that of the values at least so large; the least and the largest value are kept."""
    pairs.sort()
    values = np.repeat([value for value, _ in pairs], [count for _, count in pairs])
    pool = pl.DataFrame(pairs, schema={"value": pl.Float64, "count": pl.Int64}, orient="row")
    points = tail(pool, most)
    assert len(points) <= most + 2
    assert points["value"][0] == values.min() and points["value"][-1] == values.max()
    for value, share in points.iter_rows():
        assert share == pytest.approx((values >= value).mean(), abs=1e-12)
    assert all(one < other for one, other in pairwise(points["value"]))


def test_tails_agree_with_the_percentiles(several: Comparison) -> None:
    """The line crosses 1 % beside P99, and starts and ends at the least and the largest gap."""
    for report in several:
        (points,) = [data for data in rows(charts.tbt(report)) if "share" in data[0] and len(data) > 2]
        summary = report.summary["tbt_s"]
        assert points[0]["value"] == summary["min"] and points[-1]["value"] == summary["max"]
        above = max(point["value"] for point in points if point["share"] > 0.0105)
        below = min(point["value"] for point in points if point["share"] < 0.0095)
        assert above <= summary["p99"] <= below


def test_the_pool_of_gaps_is_the_distribution(several: Comparison) -> None:
    """Same n, mean and extremes; with the paper's quirk too."""
    quirk = simulate(Scenario.from_toml(SCENARIO).with_(slo__first_token_gap=True))
    for report in (*several, quirk):
        gaps, summary = report.gaps, report.summary["tbt_s"]
        assert gaps["count"].sum() == summary["n"]
        mean = float((gaps["gap_s"] * gaps["count"]).sum()) / summary["n"]
        assert mean == pytest.approx(summary["mean"])
        assert (gaps["gap_s"].min(), gaps["gap_s"].max()) == (summary["min"], summary["max"])
        assert gaps["gap_s"].is_sorted() and gaps["gap_s"].is_unique().all()


def test_stages_are_the_busy_time(piped: Report) -> None:
    """Stage by stage, no two batches at once, and in all as long as the summary says."""
    stages = piped.stages
    assert len(stages) == 2 * len(piped.steps)
    assert float((stages["end_s"] - stages["start_s"]).sum()) == pytest.approx(piped.summary["busy_s"])
    for _, lane in stages.sort("start_s").group_by("stage"):
        assert (lane["start_s"][1:].to_numpy() >= lane["end_s"][:-1].to_numpy() - 1e-12).all()
    last = stages.filter(pl.col("stage") == 1)
    assert last["end_s"].to_list() == piped.steps["end_s"].to_list()
    assert stages["start_s"].min() == piped.steps["start_s"].min()


def test_the_line_counts_every_token(several: Comparison) -> None:
    """Over a window that holds the run, all output tokens; and none before."""
    for report in several:
        assert report.summary["preemptions"] == 0
        (points,) = rows(charts.tokens(report, window=(0.0, report.record.last_commit + 1)))
        assert points[0]["tokens"] == 0
        assert points[-1]["tokens"] == report.summary["output_tokens"]
        assert all(one["tokens"] <= other["tokens"] for one, other in pairwise(points))


def test_the_longest_pause_is_the_longest_gap(several: Comparison) -> None:
    """On one replica, where a running request waits: within the TBT pool, and its maximum under prefill-first."""
    pause = longest_pause(several[0])
    assert pause is not None and pause.seconds == pytest.approx(several[0].summary["tbt_s"]["max"])
    shaded = [data for data in rows(charts.tokens(several)) if "from" in data[0]]
    assert shaded == [[{"from": pause.start, "to": pause.end}]]
    assert "under prefill-first" in charts.tokens(several).to_dict()["title"]["subtitle"][0]


def run_of(steps: list[tuple[float, float, int]], done: list[tuple[float, float]]) -> Any:
    """A run by hand: (start, end, decodes) of iterations; (first token, finish) of requests."""
    frame = pl.DataFrame(steps, schema={"start_s": pl.Float64, "end_s": pl.Float64, "decodes": pl.Int64}, orient="row")
    requests = pl.DataFrame(done, schema={"first_token_s": pl.Float64, "finished_s": pl.Float64}, orient="row")
    return SimpleNamespace(
        steps=frame.with_columns(replica=pl.lit(0)), requests=requests.with_columns(replica=pl.lit(0))
    )


def test_idle_time_is_no_pause() -> None:
    """Nobody waits from 2 s to 10 s: the one request was done. From 11 s to 13 s somebody does."""
    quiet = run_of(
        [(0, 1, 0), (1, 2, 1), (9, 10, 0), (10, 11, 1), (11, 12.5, 0), (12.5, 13, 2)],
        [(1, 2), (10, 13), (12.5, 13)],
    )
    pause = longest_pause(quiet)
    assert pause is not None and (pause.start, pause.end) == (11, 13)
    assert longest_pause(run_of([(0, 1, 0), (1, 2, 1)], [(1, 2)])) is None


def test_bins_of_time_keep_extremes_and_weigh_by_duration() -> None:
    """A value that lasted 3 s counts three times one that lasted 1 s."""
    frame = pl.DataFrame({"start_s": [0.0, 1.0, 4.0], "end_s": [1.0, 4.0, 8.0], "kv": [10, 20, 7]})
    binned = in_time(frame, ["kv"], end=8.0, bins=2)
    assert binned["kv"].to_list() == [17.5, 7.0]
    assert binned["kv_max"].to_list() == [20, 7] and binned["kv_min"].to_list() == [10, 7]
    assert binned["time_s"].to_list() == [2.0, 6.0]


def test_large_runs_are_thinned() -> None:
    """A quarter of a million iterations and gaps under four labels: 5,000 rows at most, peaks kept, and quickly."""
    n = 250_000
    draw = np.random.default_rng(0)
    ends = np.cumsum(draw.uniform(0.01, 0.03, n))
    steps = pl.DataFrame(
        {"replica": np.zeros(n, dtype=int), "start_s": np.concatenate([[0], ends[:-1]]), "end_s": ends}
        | {name: draw.integers(0, 100, n) for name in ("prefill_tokens", "decodes", "kv_blocks_used", "waiting")}
        | {"chunks": np.ones(n, dtype=int)}
    ).with_columns(kv_blocks_used=pl.when(pl.int_range(n) == n // 2).then(990).otherwise("kv_blocks_used"))
    gaps = pl.DataFrame({"gap_s": np.sort(draw.lognormal(-4, 1, n)), "count": draw.integers(1, 9, n)})
    first = np.sort(draw.uniform(0, ends[-1], n // 10))
    requests = pl.DataFrame(
        {
            "replica": np.zeros(len(first), dtype=int),
            "arrival_s": first - draw.lognormal(-1, 1, len(first)),
            "first_token_s": first,
        }
        | {"finished_s": first + 3}
    )
    summary = {"policy": "stall-free", "kv_blocks": 1000, "slo": {}}
    run = SimpleNamespace(steps=steps, gaps=gaps, requests=requests, stages=pl.DataFrame(), summary=summary)
    runs = dict.fromkeys("abcd", run)
    for name in ("tbt", "ttft", "kv", "queue", "tokens"):
        spec = getattr(charts, name)(runs).to_dict()
        assert 100 < sum(map(len, spec["datasets"].values())) <= MOST_ROWS
    (binned,) = rows(charts.kv(run))
    assert max(row["high"] for row in binned) == 0.99
    for name in ("batches", "timeline"):
        assert len(json.dumps(getattr(charts, name)(run).to_dict())) < 200_000
    assert len(sampled(steps, 100)) == 100 and sampled(steps, 100)["end_s"][-1] == ends[-1]


def test_the_batches_hold_all_tokens(several: Comparison) -> None:
    """Areas add up to what was computed."""
    for report in several:
        (binned,) = rows(charts.batches(report))
        width = binned[1]["time_s"] - binned[0]["time_s"]
        for work, column in (("prefill", "prefill_tokens"), ("decode", "decodes")):
            total = sum(row["rate"] for row in binned if row["work"] == work) * width
            assert total == pytest.approx(report.steps[column].sum())


def test_parts_add_up_to_the_mean_iteration(several: Comparison) -> None:
    """In milliseconds, over all stages."""
    (parts,) = rows(charts.time_parts(several))
    for report in several:
        label, summary = report.summary["policy"], report.summary
        total = sum(row["ms"] for row in parts if row["label"] == label)
        assert total == pytest.approx(1e3 * summary["busy_s"] / summary["iterations"])


def test_timelines_show_stages_and_bubbles(several: Comparison, piped: Report) -> None:
    """A lane for each stage; bars of one lane do not overlap; the idle share is that of what is drawn."""
    lanes = next(data for data in rows(charts.timeline(piped)) if "lane" in data[0])
    assert {row["lane"] for row in lanes} == {"stage 1", "stage 2"}
    span = max(row["end_s"] for row in lanes) - min(row["start_s"] for row in lanes)
    idle = 1 - sum(row["end_s"] - row["start_s"] for row in lanes) / (2 * span)
    said = charts.timeline(piped).to_dict()["title"]["subtitle"][1]
    assert said.startswith(f"{idle:.1%}") and "bubbles" in said
    one = next(data for data in rows(charts.timeline(several[0], start=3.0, iterations=10)) if "lane" in data[0])
    assert len(one) == 10 and min(row["start_s"] for row in one) >= 3.0
    with pytest.raises(charts.NothingToDraw, match="no iteration starts at 1e\\+09 s"):
        charts.timeline(several[0], start=1e9)


def test_runs_may_have_labels(several: Comparison) -> None:
    """Their policies, numbers where policies are the same, or what they are given."""

    def labels(runs: Any) -> list[str]:
        spec = charts.tbt(runs).to_dict()
        return next(one["scale"]["domain"] for name, one in channels(spec) if name == "color")

    assert labels(several) == ["prefill-first", "stall-free"]
    assert labels([several[1], several[1]]) == ["stall-free 1", "stall-free 2"]
    assert labels({"budget 512": several[1]}) == ["budget 512"]
    with pytest.raises(charts.NothingToDraw):
        charts.tbt([])


def test_capacities_and_their_gains() -> None:
    """Relative to the first policy, or the one that is asked for; what is not feasible is said."""
    bars = next(data for data in rows(charts.capacity(FOUND)) if "rate" in data[0])
    assert [row["shown"] for row in bars] == ["1", "2.5  (×2.50)"]
    assert [(row["low"], row["high"]) for row in bars] == [(0.9, 1.1), (2.25, 2.75)]
    bars = next(data for data in rows(charts.capacity(FOUND, baseline="stall-free")) if "rate" in data[0])
    assert [row["shown"] for row in bars] == ["1  (×0.40)", "2.5"]
    none = [replace(one, rate=0.0, interval=None, seeds={0: 0.0}) for one in FOUND]
    bars = next(data for data in rows(charts.capacity(none)) if "rate" in data[0])
    assert [row["shown"] for row in bars] == ["not feasible", "not feasible"]
    assert "no interval" in charts.capacity(none).to_dict()["title"]["subtitle"][0]
    with pytest.raises(charts.NothingToDraw):
        charts.capacity([])
    assert rows(charts.capacity([one.to_dict() for one in FOUND])) == rows(charts.capacity(FOUND))


def test_trials_that_were_stopped_have_no_value() -> None:
    """They are marks of their own, at the rate they were tried at."""
    spec = charts.latency_at_rate(FOUND, "tbt_p99", 0.1).to_dict()
    data = list(spec["datasets"].values())
    assert [[row["value"] for row in rows] for rows in data if "value" in rows[0]] == [
        [0.05, 0.3, 0.05, 0.3],
        [None, None],
    ]
    assert [{"limit": 0.1, "shown": "SLO 100 ms"}] in data
    assert "2 were stopped early" in spec["title"]["subtitle"][0]
    with pytest.raises(charts.NothingToDraw, match="TTFT P50"):
        charts.latency_at_rate(FOUND, "ttft_p50")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40),
    st.sampled_from([("higher", "lower"), ("lower", "lower"), ("higher", "higher"), ("lower", "higher")]),
)
def test_a_front_is_what_no_other_beats(points: list[tuple[int, int]], better: tuple[str, str]) -> None:
    """As a loop over all pairs says."""
    signs = [1 if way == "lower" else -1 for way in better]
    costs = {(signs[0] * x, signs[1] * y) for x, y in points}
    best = {
        one for one in costs if not any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in costs)
    }
    front = _undominated(pl.DataFrame(points, schema={"x": pl.Float64, "y": pl.Float64}, orient="row"), better)
    assert {(signs[0] * x, signs[1] * y) for x, y in front.rows()} == best
    assert len(front) == len(best)


def test_quantiles_of_equal_runs_are_equal(several: Comparison) -> None:
    """On the diagonal, all of them."""
    points = next(data for data in rows(charts.tbt_quantiles(several[0], several[0])) if "share" in data[0])
    assert len(points) == 499 and all(row["x"] == row["y"] for row in points)
    values = np.repeat(several[0].gaps["gap_s"].to_numpy(), several[0].gaps["count"].to_numpy())
    for row in points[::50]:
        assert row["x"] == values[max(1, int(np.ceil(round(len(values) * row["share"], 9)))) - 1]


def test_nothing_to_draw_says_why(several: Comparison) -> None:
    """A sentence, and never an empty chart."""
    refused = simulate(Scenario.from_toml(SCENARIO).with_(engine__num_blocks=1))
    assert refused.summary["iterations"] == 0
    for name in ("tokens", "tbt", "ttft", "kv", "queue", "batches", "timeline", "time_parts"):
        with pytest.raises(charts.NothingToDraw) as error:
            getattr(charts, name)(refused)
        assert error.value.what
    affine = simulate(Scenario.from_toml(SCENARIO).with_(latency={"kind": "affine", "step": 0.01}))
    with pytest.raises(charts.NothingToDraw, match="roofline does"):
        charts.time_parts(affine)
    for call in (
        lambda: charts.steps(STEPS.clear()),
        lambda: charts.errors([]),
        lambda: charts.cost(COST | {"per_million_output_tokens": None}),
        lambda: charts.front(SWEEP.clear(), "rate.own", "tbt_s_p99"),
        lambda: charts.tbt_quantiles(several[0], refused),
    ):
        with pytest.raises(charts.NothingToDraw):
            call()


def test_charts_can_be_put_side_by_side(several: Comparison) -> None:
    """As Altair's own can."""
    both = (charts.tbt(several) | charts.ttft(several)) & charts.capacity(FOUND)
    assert picture(both, ".svg").startswith(b"<svg")


def test_names_have_units() -> None:
    """Of figures in summaries and sweeps, of limits, and of scenario keys."""
    assert titled("tbt_s_p99") == titled("tbt_p99") == "TBT P99 (s)"
    assert titled("scheduling_delay_p50") == "scheduling delay P50 (s)"
    assert titled("slo.ttft_p90") == "limit on TTFT P90 (s)"
    assert titled("ttft_s_n") == "ttft_s_n"
    assert titled("workload.arrivals.rate") == "arrival rate (requests/s)"
    assert titled("never.heard.of") == "never.heard.of"


def test_pictures_need_no_network(several: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format, with every socket refused."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    chart = charts.tbt(several)
    made = {suffix: picture(chart, suffix, scale=2) for suffix in FORMATS}
    assert made[".png"].startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(made[".png"][16:20]) > 2 * theme.WIDTH
    root = ElementTree.fromstring(made[".svg"])
    paths = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if "line" in path.get("aria-label", "")]
    assert root.tag.endswith("svg") and ">stall-free<" in made[".svg"].decode() and "NaN" not in made[".svg"].decode()
    assert made[".pdf"].startswith(b"%PDF") and paths is not None
    assert json.loads(made[".json"])["$schema"].startswith("https://vega.github.io/schema/vega-lite/")
    assert b"<script src" not in made[".html"] and b"vegaEmbed" in made[".html"]


def test_specs_are_as_they_were() -> None:
    """Charts of small frames, with their data. `python tests/test_charts.py` writes them anew: look at what changed."""
    assert golden() == json.loads(GOLDEN.read_text(encoding="utf-8"))


def golden() -> dict[str, Any]:
    made = {
        "capacity": charts.capacity(FOUND),
        "latency_at_rate": charts.latency_at_rate(FOUND, "tbt_p99", 0.1),
        "cost": charts.cost(COST),
        "errors": charts.errors(METRICS),
        "steps": charts.steps(STEPS),
        "front": charts.front(SWEEP, "request_throughput", "tbt_s_p99", by="rate.own", point="scheduler.token_budget"),
        "trend": charts.trend(SWEEP, "scheduler.token_budget", "tbt_s_p99", limit=0.1),
    }
    specs = {name: chart.to_dict() for name, chart in made.items()}
    for spec in specs.values():
        for key in ("$schema", "config"):
            del spec[key]
    return json.loads(json.dumps(specs))  # type: ignore[no-any-return]


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(golden(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
