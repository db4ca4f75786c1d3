"""Memory, preemption and time by hand: small cases worked out on paper, held against both simulators.

Unless a case says otherwise, blocks hold 4 tokens, there is no watermark, and every iteration takes 1 s in each stage.
Chunks are (request, tokens computed before, tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import naive
import pytest
import reference
from reference import Rows

Answer = tuple[list[naive.Outcome], list[naive.StepRow]]
Simulate = Callable[[naive.Settings, Rows], Answer]


@pytest.fixture(params=[naive.simulate, reference.simulate], ids=["naive", "servecast"])
def simulate(request: pytest.FixtureRequest) -> Simulate:
    return request.param


def tiny(policy: str, num_blocks: int, **more: Any) -> naive.Settings:
    return naive.Settings(policy, num_blocks, **{"block_tokens": 4, "watermark": 0.0, "step": 1.0} | more)


def token_times(answer: Answer) -> list[list[float]]:
    return [outcome.token_times for outcome in answer[0]]


def finished(answer: Answer) -> list[float | None]:
    return [outcome.finished for outcome in answer[0]]


def row_at(answer: Answer, start: float) -> naive.StepRow:
    return next(row for row in answer[1] if row.start == start)


def test_the_latest_admitted_makes_room(simulate: Simulate) -> None:
    """At t = 5 both need a third block and none is free: request 0 asks first, and 1 is the victim."""
    answer = simulate(tiny("prefill-first", 4), [(0.0, 4, 6), (0.0, 4, 6)])
    assert token_times(answer) == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]]
    assert [outcome.preemptions for outcome in answer[0]] == [0, 1]
    row = row_at(answer, 5)
    assert (row.decode_ids, row.chunks, row.kv_blocks_used, row.waiting, row.preempted) == ([0], [], 3, 1, 1)
    assert row_at(answer, 6).chunks == [(1, 0, 9)]  # the prompt and its five tokens


def test_a_half_prefilled_victim_loses_its_chunks(simulate: Simulate) -> None:
    """Request 1 has 10 of 14 tokens computed when 0 takes its blocks; it starts over, and nothing else is admitted."""
    answer = simulate(tiny("stall-free", 6, token_budget=3), [(0.0, 4, 8), (0.0, 14, 1)])
    assert finished(answer) == [9, 14]
    before, row = row_at(answer, 5), row_at(answer, 6)
    assert before.chunks == [(1, 8, 2)]
    assert (row.decode_ids, row.chunks, row.kv_blocks_used, row.waiting, row.preempted) == ([0], [], 3, 1, 1)
    assert row_at(answer, 9).chunks == [(1, 0, 3)]
    assert answer[0][1].scheduled == 1  # the first time counts
    assert answer[0][1].preemptions == 1


def test_its_own_victim_while_another_is_in_flight(simulate: Simulate) -> None:
    """Two stages: request 0 needs a block, 1 is in flight and safe, so 0 goes itself; the answer is empty and stands.

    The preemption shows in the next row, when 1 is back and goes on alone.
    """
    answer = simulate(tiny("stall-free", 4, token_budget=4, stages=2), [(0.0, 4, 7), (1.0, 4, 7)])
    assert token_times(answer) == [[2, 4, 6, 8, 10, 21, 23], [3, 5, 7, 9, 11, 13, 15]]
    assert [row.start for row in answer[1] if row.preempted] == [11]
    assert (row_at(answer, 11).decode_ids, row_at(answer, 11).waiting) == ([1], 1)
    assert [row.chunks for row in answer[1] if row.start >= 15] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 1)], []]


def test_its_own_victim_with_one_stage(simulate: Simulate) -> None:
    """Request 0 takes the last block, so 1, which is the latest admitted, is the victim of its own decode."""
    answer = simulate(tiny("prefill-first", 3), [(0.0, 4, 3), (0.0, 4, 3)])
    assert token_times(answer) == [[1, 2, 3], [1, 4, 5]]
    assert [outcome.preemptions for outcome in answer[0]] == [0, 1]
    assert row_at(answer, 3).chunks == [(1, 0, 5)]


def test_two_victims_stand_in_front_in_order_of_admission(simulate: Simulate) -> None:
    """Requests 3 and then 2 make room for 0 and 1; the one preempted last is in front, so 2 goes before 3."""
    requests = [(0.0, 4, 2), (0.0, 4, 2), (0.0, 1, 3), (0.0, 1, 3)]
    answer = simulate(tiny("stall-free", 4, token_budget=16), requests)
    assert (row_at(answer, 1).decode_ids, row_at(answer, 1).preempted) == ([0, 1], 2)
    assert row_at(answer, 2).chunks == [(2, 0, 2), (3, 0, 2)]
    assert token_times(answer)[2:] == [[1, 3, 4], [1, 3, 4]]


def test_the_second_victim_is_the_one_that_asked(simulate: Simulate) -> None:
    """Three prompts of one block in three blocks: 2 makes room for 0, then 1 finds nobody after itself but itself."""
    answer = simulate(tiny("stall-free", 3, token_budget=16), [(0.0, 4, 2)] * 3)
    assert finished(answer) == [2, 3, 4]
    assert [outcome.preemptions for outcome in answer[0]] == [0, 1, 1]
    assert (row_at(answer, 1).decode_ids, row_at(answer, 1).waiting, row_at(answer, 1).preempted) == ([0], 2, 2)
    assert row_at(answer, 2).chunks == [(1, 0, 5)]


def test_stall_free_admits_nothing_after_a_preemption(simulate: Simulate) -> None:
    """At t = 1 the victim frees five blocks; neither it nor the request that has just come is let in."""
    answer = simulate(tiny("stall-free", 6, token_budget=16), [(0.0, 4, 3), (0.0, 20, 2), (1.0, 1, 1)])
    row = row_at(answer, 1)
    assert (row.decode_ids, row.chunks, row.kv_blocks_used, row.waiting, row.preempted) == ([0], [], 2, 2, 1)
    assert finished(answer) == [3, 6, 5]


def test_prefill_first_decodes_until_its_victim_fits_again(simulate: Simulate) -> None:
    """The same requests: the victim is at the head of the queue with 21 tokens, and 2, behind it, may not pass."""
    answer = simulate(tiny("prefill-first", 6), [(0.0, 4, 3), (0.0, 20, 2), (1.0, 1, 1)])
    assert (row_at(answer, 1).decode_ids, row_at(answer, 1).waiting, row_at(answer, 1).preempted) == ([0], 2, 1)
    assert (row_at(answer, 2).decode_ids, row_at(answer, 2).chunks) == ([0], [])
    assert [row.chunks for row in answer[1][3:]] == [[(1, 0, 21)], [(2, 0, 1)]]
    assert token_times(answer) == [[1, 2, 3], [1, 4], [5]]


def test_the_watermark_is_waived_on_an_empty_replica_only(simulate: Simulate) -> None:
    """Five of ten blocks stay free, except for a request that has the replica to itself."""
    requests = [(0.0, 28, 2), (0.0, 4, 1), (0.0, 16, 1), (0.0, 4, 1), (0.0, 1, 1)]
    answer = simulate(tiny("stall-free", 10, watermark=0.5, token_budget=64), requests)
    first, third, fourth = (row_at(answer, start) for start in (0, 2, 3))
    assert (first.chunks, first.kv_blocks_used, first.waiting) == ([(0, 0, 28)], 7, 4)
    assert (third.chunks, third.kv_blocks_used, third.waiting) == ([(1, 0, 4), (2, 0, 16)], 5, 2)
    assert fourth.chunks == [(3, 0, 4), (4, 0, 1)]


def test_a_decode_takes_its_block_below_the_watermark(simulate: Simulate) -> None:
    """With half of four blocks kept free, one request of two blocks still grows to four without a preemption."""
    answer = simulate(tiny("prefill-first", 4, watermark=0.5), [(0.0, 8, 9), (0.0, 1, 1)])
    assert finished(answer) == [9, 10]
    assert max(row.kv_blocks_used for row in answer[1]) == 4
    assert sum(row.preempted for row in answer[1]) == 0


def test_the_share_of_the_watermark_is_rounded_down(simulate: Simulate) -> None:
    """floor(0.5 × 3) = 1 block stays free: one more block may go, a second one not."""
    answer = simulate(tiny("prefill-first", 3, watermark=0.5), [(0.0, 4, 1), (0.0, 4, 1), (0.0, 4, 1)])
    assert [row.chunks for row in answer[1]] == [[(0, 0, 4), (1, 0, 4)], [(2, 0, 4)]]


def test_the_last_token_needs_no_memory(simulate: Simulate) -> None:
    """p + o − 1 tokens are held at most: five tokens fit a block of four, and a sixth does not."""
    answer = simulate(tiny("orca", 1, max_model_tokens=4), [(0.0, 2, 2)])
    assert finished(answer) == [2]
    answer = simulate(tiny("stall-free", 1), [(0.0, 3, 2), (0.0, 4, 2), (0.0, 4, 1)])
    assert [outcome.reason for outcome in answer[0]] == [None, "never_fits", None]
    assert max(row.kv_blocks_used for row in answer[1]) == 1


def test_alternating_preempts_the_one_that_asks_for_others_in_flight(simulate: Simulate) -> None:
    """Three stages and one token a turn: every request waits behind many others, and all of them finish."""
    settings = tiny("alternating", 6, token_budget=1, max_model_tokens=16, max_batch_tokens=16, stages=3, token=1.0)
    answer = simulate(settings, [(0.0, 6, 1), (0.0, 1, 5), (0.0, 4, 2), (0.0, 3, 1)])
    assert finished(answer) == [36, 32, 62, 46]


def test_reserving_policies_never_preempt(simulate: Simulate) -> None:
    """Orca reserves max_model_tokens for each, so of four requests that page together only one runs at a time."""
    settings = tiny("orca", 3, max_model_tokens=8)
    answer = simulate(settings, [(0.0, 2, 2)] * 4)
    assert finished(answer) == [2, 4, 6, 8]
    assert {row.kv_blocks_used for row in answer[1]} == {2}
    assert sum(row.preempted for row in answer[1]) == 0


def test_an_affine_pipeline(simulate: Simulate) -> None:
    """Every term of the formula, three stages and the way between them, in sums that doubles hold exactly.

    In each stage (0, 0, 3) takes 1 + 1.5 + 0.125 + 4.5/32 = 2.765625, (1, 0, 2) takes 1 + 1 + 0.125 + 2/32 = 2.1875,
    (0, 3, 1) takes 1 + 0.5 + 0.125 + 3.5/32 = 1.734375 and the decode at 5 tokens 1 + 0.5 + 0.125 + 5/16 = 1.9375.
    Only the second has to wait for a stage: twice, for the first batch to leave it.
    """
    latency = {"step": 1.0, "token": 0.5, "sequence": 0.125, "context": 0.0625, "prefill_attention": 0.03125}
    settings = tiny("stall-free", 20, token_budget=3, stages=3, hop=0.25, **latency)
    answer = simulate(settings, [(0.0, 4, 2), (0.0, 2, 1)])
    assert [row.chunks for row in answer[1]] == [[(0, 0, 3)], [(1, 0, 2)], [(0, 3, 1)], []]
    spans = [(0, 8.796875), (2.765625, 10.984375), (8.796875, 14.5), (14.5, 20.8125)]
    assert [(row.start, row.end) for row in answer[1]] == spans


def test_a_closed_loop_with_refusals_and_no_time_to_think(simulate: Simulate) -> None:
    """Two clients, one slot: 1 is too long and gives way to 2 at once; 3 never fits and gives way to 4 at t = 2."""
    settings = tiny("stall-free", 3, max_sequences=1, max_model_tokens=20, concurrency=2, think=0.0)
    answer = simulate(settings, [(0.0, 4, 2), (0.0, 30, 1), (0.0, 4, 1), (0.0, 12, 2), (0.0, 1, 1)])
    assert [outcome.arrival for outcome in answer[0]] == [0, 0, 0, 2, 2]
    assert [outcome.reason for outcome in answer[0]] == [None, "too_long", None, "never_fits", None]
    assert finished(answer) == [2, None, 3, None, 4]


def test_a_closed_loop_that_thinks(simulate: Simulate) -> None:
    """Requests 0 and 2 end at t = 1 in one batch and issue 3 and 4 half a second later, in that order."""
    answer = simulate(
        tiny("prefill-first", 8, concurrency=3, think=0.5),
        [(0.0, 4, 1), (0.0, 4, 2), (0.0, 4, 1), (0.0, 1, 1), (0.0, 1, 2)],
    )
    assert [outcome.arrival for outcome in answer[0]] == [0, 0, 0, 1.5, 1.5]
    assert row_at(answer, 2).chunks == [(3, 0, 1), (4, 0, 1)]
    assert finished(answer) == [1, 2, 1, 3, 4]


def test_a_time_limit_is_a_whole_instant(simulate: Simulate) -> None:
    """A batch that ends at the limit is committed, who comes then is offered and scheduled, who comes later is not."""
    requests = [(0.0, 4, 2), (0.0, 4, 3), (0.0, 4, 4), (3.0, 1, 1), (3.5, 1, 1)]
    answer = simulate(tiny("stall-free", 8, time_limit=3.0), requests)
    assert token_times(answer) == [[1, 2], [1, 2, 3], [1, 2, 3], []]
    assert [outcome.status for outcome in answer[0]] == ["completed", "completed", "unfinished", "unfinished"]
    assert [outcome.scheduled for outcome in answer[0]] == [0, 0, 0, 3]
    assert answer[1][-1].end == 3


def test_a_time_limit_just_before_the_end_of_a_batch(simulate: Simulate) -> None:
    """The batch that would end at 3 is not committed: its tokens do not exist."""
    answer = simulate(tiny("stall-free", 8, time_limit=2.9999), [(0.0, 4, 4)])
    assert token_times(answer) == [[1, 2]]
    assert len(answer[1]) == 2
