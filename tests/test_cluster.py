"""The cluster: routers, what happens first at one instant, closed loops, clocks, and runs that have to end."""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import naive
import numpy as np
import pytest
from reference import Rows, limits_of, pooled_gaps, run, simulate, workload_of

import sim.cluster
from sim.affine import Affine, AffineTable
from sim.cluster import Deployment, serve
from sim.errors import BadInput
from sim.record import Record
from sim.request import Request
from sim.router import ROUTERS
from sim.scenario import Scenario
from sim.simulate import simulate as simulate_scenario

PAGED = ("prefill-first", "stall-free", "alternating")


def steady(policy: str = "stall-free", num_blocks: int = 1000, **more: Any) -> naive.Settings:
    """Iterations of 1 s."""
    return naive.Settings(policy, num_blocks, **{"block_tokens": 4, "watermark": 0.0, "step": 1.0} | more)


def homes(settings: naive.Settings, requests: Rows, **how: Any) -> list[int]:
    """Which replica each request went to."""
    return list(run(settings, requests, **how).record.replica)


def loaded(*outstanding: int) -> list[Any]:
    """Replicas that are nothing but a load."""
    return [SimpleNamespace(index=i, scheduler=SimpleNamespace(outstanding=load)) for i, load in enumerate(outstanding)]


def choices(router: str, replicas: list[Any], n: int, seed: int = 0, session: int | None = None) -> list[int]:
    choose = ROUTERS[router](replicas, np.random.default_rng(seed))
    return [choose(Request(id, 0.0, 1, 1, session=session)).index for id in range(n)]


# Routers


def test_round_robin_goes_by_order_of_arrival() -> None:
    """In turn, whatever the load; a request that is refused on arrival takes no turn."""
    requests = [(0.0, 100, 5), (0.0, 1, 1), (0.0, 1, 1), (0.0, 9000, 1), (3.0, 1, 1), (4.0, 1, 1)]
    assert homes(steady(), requests, replicas=3) == [0, 1, 2, -1, 0, 1]
    assert choices("round-robin", loaded(9, 0), 3) == [0, 1, 0]


def test_least_loaded_ties_go_to_the_lowest_index() -> None:
    assert choices("least-loaded", loaded(3, 1, 1), 2) == [1, 1]
    assert choices("least-loaded", loaded(0, 0, 0), 2) == [0, 0]


def test_least_loaded_counts_outstanding_tokens() -> None:
    """Prompt tokens not yet computed, and one per decode: never the output tokens still to come.

    At t = 0 the loads are 10 and 4, then 10 and 5. At t = 1 replica 0 has one decode, and replica 1 two.
    """
    requests = [(0.0, 10, 2), (0.0, 4, 90), (0.0, 1, 90), (0.5, 1, 1), (1.0, 1, 1)]
    assert homes(steady(), requests, replicas=2, router="least-loaded") == [0, 1, 1, 1, 0]


def test_least_loaded_counts_what_is_left_of_a_prompt() -> None:
    """After one chunk of 8 out of 20 tokens, 12 are outstanding: fewer than 13, more than 11."""
    for other, expected in ((13, 0), (12, 0), (11, 1)):
        requests = [(0.0, 20, 1), (0.5, other, 1), (1.0, 1, 1)]
        assert homes(steady(token_budget=8), requests, replicas=2, router="least-loaded") == [0, 1, expected]


def test_power_of_two_takes_the_less_loaded_of_two() -> None:
    """Of three replicas the emptiest is drawn twice in three; the fullest never wins; ties go to the lower index."""
    picks = choices("power-of-two", loaded(5, 9, 1), 3000)
    assert picks.count(1) == 0
    assert picks.count(2) == pytest.approx(2000, abs=150)
    even = choices("power-of-two", loaded(1, 1, 1), 3000)
    assert even.count(2) == 0
    assert even.count(0) == pytest.approx(2000, abs=150)
    assert choices("power-of-two", loaded(7), 3) == [0, 0, 0]


def test_power_of_two_is_drawn_from_the_seed() -> None:
    requests = [(0.25 * i, 5, 3) for i in range(60)]
    first, again, other = (homes(steady(), requests, replicas=5, router="power-of-two", seed=s) for s in (1, 1, 2))
    assert first == again != other
    both = [homes(steady(), requests, replicas=2, router=router) for router in ("power-of-two", "least-loaded")]
    assert both[0] == both[1]


def test_sticky_keeps_sessions() -> None:
    """A session stays where its first request went, which is the least loaded then."""
    requests = [(0.0, 9, 1), (0.0, 5, 1), (0.0, 4, 1), (0.0, 7, 1), (0.0, 1, 1), (9.0, 1, 1)]
    sessions = [4, 8, 15, 4, 8, 4]
    assert homes(steady(), requests, replicas=3, router="sticky", sessions=sessions) == [0, 1, 2, 0, 1, 0]
    assert choices("sticky", loaded(2, 1), 3) == [1, 1, 1]


def test_sticky_needs_sessions() -> None:
    with pytest.raises(BadInput, match=r"router.*session"):
        simulate_scenario(Scenario.from_toml(DEEP).with_(deployment__router="sticky"))


# One instant


@pytest.mark.parametrize("policy", naive.POLICIES)
def test_commits_come_before_arrivals_and_arrivals_before_the_scheduler(policy: str) -> None:
    """With one slot, who arrives at the instant of a finish is scheduled in that instant."""
    settings = steady(policy, max_sequences=1, max_model_tokens=100)
    outcomes, rows = simulate(settings, [(0.0, 4, 1), (1.0, 4, 1), (1.5, 4, 1)])
    assert [outcome.scheduled for outcome in outcomes] == [0, 1, 2]
    assert [row.start for row in rows] == [0, 1, 2]


@pytest.mark.parametrize("policy", naive.POLICIES)
def test_the_scheduler_is_asked_once_an_instant(policy: str) -> None:
    """All that arrive together go together, on an idle replica and at the end of a batch."""
    settings = steady(policy, max_model_tokens=100)
    _, rows = simulate(settings, [(0.5, 4, 1), (0.5, 4, 1), (1.5, 4, 1), (1.5, 4, 1)])
    assert [[id for id, _, _ in row.chunks] for row in rows] == [[0, 1], [2, 3]]


def test_instants_are_the_same_only_if_bit_equal() -> None:
    """Three iterations of 0.1 s end at 0.30000000000000004: later than 0.3, and not a bit earlier than itself."""
    end = 0.1 + 0.1 + 0.1
    assert end > 0.3
    settings = steady(step=0.1)
    for arrival, scheduled in ((end, end), (np.nextafter(end, 1), end + 0.1), (0.3, end)):
        outcomes, rows = simulate(settings, [(0.0, 4, 9), (float(arrival), 1, 1)])
        assert rows[2].end == end
        assert outcomes[1].scheduled == scheduled


def test_a_sum_that_no_delay_gives() -> None:
    """Arrivals are at their times to the last bit, though the clock would not get there by adding a difference."""
    assert 0.2 + (0.9 - 0.2) != 0.9
    for settings in (steady(step=0.001), steady(step=0.001, stages=2), steady(step=0.35)):  # idle, or at work until 0.9
        outcomes, _ = simulate(settings, [(0.2, 1, 1), (0.9, 1, 1)])
        assert [outcome.scheduled for outcome in outcomes] == [0.2, 0.9]
    outcomes, _ = simulate(steady(step=0.2, concurrency=1, think=0.7), [(0.0, 1, 1), (0.0, 1, 1)])
    assert outcomes[1].arrival == 0.2 + 0.7


def test_an_arrival_ends_an_empty_answer_in_a_pipeline() -> None:
    """Stage 1 is free at 1 and there is nothing to do; who comes at 1.25 goes at once, while the first is in flight."""
    outcomes, rows = simulate(steady(stages=2), [(0.0, 4, 1), (1.25, 4, 1)])
    assert [(row.start, row.end) for row in rows] == [(0, 2), (1.25, 3.25)]
    assert outcomes[1].scheduled == 1.25


def test_all_replicas_commit_before_any_request_is_routed() -> None:
    """Both end their batch at t = 1: replica 1, listed last, is empty by then and gets the request."""
    requests = [(0.0, 4, 5), (0.0, 4, 1), (1.0, 4, 1)]
    assert homes(steady(), requests, replicas=2, router="least-loaded") == [0, 1, 1]


# Closed loops, warm-up, limits


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("policy", naive.POLICIES)
def test_a_closed_loop_keeps_its_number(policy: str, replicas: int) -> None:
    """Never more than `concurrency` at a time, each next one `think` after a finish, all offered in the end."""
    settings = steady(policy, max_model_tokens=100, concurrency=5, think=0.25)
    requests = [(0.0, 1 + 7 * i % 30, 1 + 5 * i % 11) for i in range(40)]
    outcomes = run(settings, requests, replicas=replicas).outcomes
    assert len(outcomes) == 40
    assert [outcome.arrival for outcome in outcomes[:6]] == [
        0,
        0,
        0,
        0,
        0,
        min(o.finished or 0 for o in outcomes) + 0.25,
    ]
    ends = sorted(outcome.finished or 0.0 for outcome in outcomes)
    assert [outcome.arrival for outcome in outcomes[5:]] == [end + 0.25 for end in ends[:35]]


def test_a_closed_loop_of_refusals_ends() -> None:
    """Ten thousand at one instant, none of which can be served: no recursion, no iteration."""
    result = run(steady(num_blocks=1, concurrency=1), [(0.0, 99, 1)] * 10_000)
    assert (result.record.done, result.record.iterations, result.record.ended) == (10_000, 0, 0.0)


@pytest.mark.parametrize("concurrency", [None, 4])
def test_warm_up_and_drain_leave_out_and_change_nothing(concurrency: int | None) -> None:
    """Facts are the same; the pool of gaps has only those of requests that arrived between."""
    settings = steady("prefill-first", 12 if concurrency is None else 6, stages=2, concurrency=concurrency)
    requests = [(0.5 * i, 1 + i % 9, 1 + i % 7) for i in range(40)]
    drain = 4.0 if concurrency is None else 0.0
    plain, cut = run(settings, requests), run(settings, requests, warmup=3.0, drain=drain)
    assert plain.outcomes == cut.outcomes
    assert plain.rows == cut.rows
    assert list(plain.record.longest_gap) == list(cut.record.longest_gap)
    last = 19.5 - drain if concurrency is None else float("inf")
    inside = [outcome for outcome in cut.outcomes if 3.0 <= outcome.arrival <= last]
    assert any(outcome.arrival == 3.0 for outcome in inside) or concurrency
    assert 0 < len(inside) < 40
    assert any(outcome.preemptions for outcome in inside)
    gaps = [late - early for outcome in inside for early, late in pairwise(outcome.token_times)]
    assert pooled_gaps(cut.record) == sorted(gaps)


def test_a_limit_before_the_first_arrival() -> None:
    """Nobody was offered, nothing happened, and that is an end too."""
    record = run(steady(time_limit=1.0), [(2.0, 4, 1)]).record
    assert (record.offered, record.done, record.iterations) == (0, 0, 0)


def test_a_watcher_may_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the record from time to time; what was done until then is kept, and nothing else."""
    monkeypatch.setattr(sim.cluster, "EVENTS_BETWEEN_LOOKS", 7)
    seen = []

    def watch(record: Record, now: float) -> bool:
        seen.append((now, record.iterations))
        return now > 30

    settings, requests = steady(), [(float(i), 4, 5) for i in range(100)]
    record = serve(
        workload_of(settings, requests),
        Deployment(limits_of(settings)),
        lambda: Affine(AffineTable(kind="affine", step=1.0)),
        routing=np.random.default_rng(0),
        watch=watch,
    )
    assert seen == sorted(seen)
    assert 30 < record.ended == seen[-1][0] < 40
    assert 0 < record.done < record.offered < 100
    assert record.iterations == seen[-1][1]


# Clocks and sizes


@pytest.mark.parametrize("concurrency", [None, 3])
def test_the_wall_clock_gives_the_steps_of_the_virtual_one(concurrency: int | None) -> None:
    """The same scheduler, the same executor, real time: every fact is the same, and it takes that long."""
    settings = steady(step=0.01, token=0.0001, stages=2, num_blocks=9, concurrency=concurrency, think=0.02)
    requests = [(0.013 * i, 3 + i, 4) for i in range(8)]
    virtual = run(settings, requests)
    began = time.perf_counter()
    wall = run(settings, requests, wall_clock=True)
    took = time.perf_counter() - began
    assert wall.rows == virtual.rows
    assert wall.outcomes == virtual.outcomes
    assert virtual.record.last_commit <= took + 0.01
    assert took < 1.0


def test_a_thousand_replicas() -> None:
    """Two requests each; they all do the same at the same time."""
    record = run(steady(), [(0.0, 4, 3)] * 2000, replicas=1000).record
    assert list(record.replica) == [*range(1000), *range(1000)]
    assert set(record.finish) == {3.0}
    assert record.iterations == 3000


DEEP = """
[model]
name = "llama-2-7b"
[device]
name = "a100-80gb-pcie"
[engine]
num_blocks = 4000
[latency]
kind = "roofline"
[workload]
requests = 1000
arrivals = { kind = "at-once" }
lengths = { kind = "fixed", prompt = 200, output = 4 }
"""


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("policy", ["prefill-first", "stall-free"])
def test_depths_that_do_not_divide_the_layers(policy: str, stages: int) -> None:
    """32 layers over 2 to 5 stages, a thousand requests at once: it ends, the first stages have the remainder, and the
    idle time of the stages is reported."""
    scenario = Scenario.from_toml(DEEP).with_(deployment__pipeline_parallel=stages, scheduler__policy=policy)
    report = simulate_scenario(scenario)
    assert report.plan.model is not None
    layers = report.plan.model.stage_layers(stages)
    assert (sum(layers), max(layers) - min(layers), list(layers)) == (32, 32 % stages > 0, sorted(layers, reverse=True))
    assert (report.summary["completed"], report.summary["unfinished"]) == (1000, 0)
    assert 0 < report.summary["bubble_fraction"] < 1
    assert report.summary["output_tokens"] == 4000


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("policy", PAGED)
def test_no_livelock_where_memory_is_short(policy: str, stages: int) -> None:
    """200 requests of 512 in and 256 out at once in under 1,000 blocks, and one that can never fit: the run ends, the
    clock goes on with every iteration, and the one is refused with its reason."""
    settings = naive.Settings(policy, 500, max_model_tokens=9000, max_batch_tokens=9000, step=0.01, stages=stages)
    result = run(settings, [*[(0.0, 512, 256)] * 200, (0.0, 8000, 2)])
    assert [outcome.status for outcome in result.outcomes] == ["completed"] * 200 + ["refused"]
    assert result.outcomes[200].reason == "never_fits"
    assert all(early.start < late.start and early.end < late.end for early, late in pairwise(result.rows[0]))
    assert result.record.preempted > 50
    assert result.record.kv_peak == 500
