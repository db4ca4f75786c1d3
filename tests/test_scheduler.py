"""The scheduler by hand: a queue, some memory and a budget, and exactly what goes into the next batch.

Requests are numbered from 0 in the order in which they are queued; chunks are (request, tokens before, tokens).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.policies import COMPARED, POLICIES, RESERVING
from sim.request import Batch, Request
from sim.scheduler import Limits, Scheduler

Chunks = list[tuple[int, int, int]]
PAGED = sorted(set(POLICIES) - RESERVING)


class Hand:
    """A scheduler with a queue of requests (prompt, output), asked and answered one batch at a time."""

    def __init__(self, policy: str, requests: list[tuple[int, int]], num_blocks: int = 100, **limits: Any) -> None:
        defaults = {"block_tokens": 4, "watermark": 0.0, "max_model_tokens": 40}
        self.scheduler = Scheduler(Limits(policy, num_blocks, **defaults | limits))
        self.requests: list[Request] = []
        self.now = 0.0
        self.add(*requests)

    def add(self, *requests: tuple[int, int]) -> None:
        for prompt, output in requests:
            self.requests.append(Request(len(self.requests), self.now, prompt, output))
            self.scheduler.add(self.requests[-1])

    def ask(self) -> Batch:
        batch = self.scheduler.schedule(self.now)
        assert batch is not None
        return batch

    @property
    def idle(self) -> bool:
        """Whether the scheduler, asked, has nothing to do."""
        return self.scheduler.schedule(self.now) is None

    def commit(self, batch: Batch) -> list[int]:
        self.now += 1.0
        return [request.id for request in self.scheduler.commit(batch, self.now)]

    def turn(self) -> tuple[list[int], Chunks]:
        """Ask and commit: who decoded, and which chunks."""
        batch = self.ask()
        seen = decodes(batch), chunks(batch)
        self.commit(batch)
        return seen

    def turns(self) -> list[tuple[list[int], Chunks]]:
        """Until there is nothing to do."""
        seen = []
        while batch := self.scheduler.schedule(self.now):
            seen.append((decodes(batch), chunks(batch)))
            self.commit(batch)
        return seen

    @property
    def free(self) -> int:
        return self.scheduler.blocks.free


def decodes(batch: Batch | None) -> list[int]:
    ids = [] if batch.group is None else [request.id for request in batch.group.by_admission()]
    assert len(ids) == batch.decodes
    return ids


def chunks(batch: Batch | None) -> Chunks:
    seen = [(chunk.request.id, chunk.start, chunk.tokens) for chunk in batch.chunks]
    assert sum(tokens for _, _, tokens in seen) == batch.prefill_tokens
    return seen


# All policies


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_to_do(policy: str) -> None:
    """An empty scheduler answers None, as often as it is asked, and is none the worse for it."""
    hand = Hand(policy, [])
    assert hand.idle
    assert hand.idle
    hand.add((4, 1))
    assert chunks(hand.ask()) == [(0, 0, 4)]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_request_alone(policy: str) -> None:
    """A prompt, then o − 1 decodes; everything is free afterwards."""
    hand = Hand(policy, [(5, 3)])
    assert hand.turns() == [([], [(0, 0, 5)]), ([0], []), ([0], [])]
    assert (hand.free, hand.scheduler.held, hand.scheduler.outstanding) == (100, 0, 0)
    assert hand.requests[0].emitted == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_max_sequences(policy: str) -> None:
    """Two at a time: the third waits for a slot, and takes it as soon as one is free."""
    hand = Hand(policy, [(4, 1), (4, 2), (4, 1)], max_sequences=2)
    turns = hand.turns()
    assert turns[0] == ([], [(0, 0, 4), (1, 0, 4)])
    third = next(turn for turn, (_, went) in enumerate(turns) if (2, 0, 4) in went)
    assert third == (2 if policy in ("decode-first", "alternating") else 1)  # those two have decodes to do first


@pytest.mark.parametrize("policy", POLICIES)
def test_first_come_first_served(policy: str) -> None:
    """What does not fit at the head of the queue holds up everyone behind it, however small."""
    hand = Hand(policy, [(8, 1), (9, 1), (1, 1)], num_blocks=4, max_model_tokens=16)
    if policy in RESERVING:  # four blocks each
        assert [went for _, went in hand.turns()] == [[(0, 0, 8)], [(1, 0, 9)], [(2, 0, 1)]]
    else:  # two blocks, three, and one
        assert [went for _, went in hand.turns()] == [[(0, 0, 8)], [(1, 0, 9), (2, 0, 1)]]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_finished_come_in_the_order_of_the_batch(policy: str) -> None:
    """Decodes before prompts, each in order of admission."""
    hand = Hand(policy, [(4, 2), (4, 2), (4, 3)])
    hand.turn()
    hand.add((4, 1))
    done = []
    while batch := hand.scheduler.schedule(hand.now):
        done.append(hand.commit(batch))
    finished = {"prefill-first": [[3], [0, 1], [2]], "decode-first": [[0, 1], [2], [3]]}
    finished["alternating"] = [[0, 1], [3], [2]]
    assert done == finished.get(policy, [[0, 1, 3], [2]])


@pytest.mark.parametrize("policy", POLICIES)
def test_in_flight_is_invisible(policy: str) -> None:
    """A second batch never touches what the first one works on."""
    hand = Hand(policy, [(4, 3)])
    first = hand.ask()
    assert hand.idle
    hand.add((4, 3))
    second = hand.ask()
    assert (chunks(first), chunks(second)) == ([(0, 0, 4)], [(1, 0, 4)])
    assert hand.idle
    hand.commit(first)
    assert decodes(hand.ask()) == [0]


@pytest.mark.parametrize("policy", POLICIES)
def test_two_groups_merge(policy: str) -> None:
    """Decodes of two batches that are both back go together from then on."""
    hand = Hand(policy, [(4, 5)])
    first = hand.ask()
    hand.add((4, 5))
    second = hand.ask()
    hand.commit(first)
    hand.commit(second)
    merged = hand.ask()
    assert (decodes(merged), chunks(merged)) == ([0, 1], [])
    assert merged.context == 10


@pytest.mark.parametrize("policy", POLICIES)
def test_the_finished_are_in_order_of_admission_after_a_merge(policy: str) -> None:
    """Two decodes are joined by one that was admitted before them; all three end in one step."""
    hand = Hand(policy, [(4, 3)])
    first = hand.ask()
    hand.add((4, 2), (4, 2))
    second = hand.ask()
    hand.commit(first)
    third = hand.ask()
    assert (decodes(third), chunks(second)) == ([0], [(1, 0, 4), (2, 0, 4)])
    hand.commit(second)
    hand.commit(third)
    last = hand.ask()
    assert decodes(last) == [0, 1, 2]
    assert hand.commit(last) == [0, 1, 2]


@pytest.mark.parametrize("policy", PAGED)
def test_paged_admission_takes_what_the_prompt_needs(policy: str) -> None:
    """ceil(p / block) blocks, though the first chunk may be smaller; one more when a decode crosses."""
    hand = Hand(policy, [(8, 6)], num_blocks=10, token_budget=5)
    batch = hand.ask()
    assert (hand.free, batch.blocks_used, batch.waiting) == (8, 2, 0)
    hand.commit(batch)
    used = []
    while batch := hand.scheduler.schedule(hand.now):
        used.append(batch.blocks_used)
        hand.commit(batch)
    assert used[-5:] == [3, 3, 3, 3, 4]  # KV of 9, 10, 11, 12 and 13 tokens


@pytest.mark.parametrize("policy", sorted(RESERVING))
def test_reservation(policy: str) -> None:
    """ceil(max_model_tokens / block) blocks from admission to the end, and no watermark."""
    hand = Hand(policy, [(1, 2), (1, 1), (1, 1)], num_blocks=7, max_model_tokens=9, watermark=0.9)
    batch = hand.ask()
    assert chunks(batch) == [(0, 0, 1), (1, 0, 1)]
    assert hand.free == 1
    assert hand.commit(batch) == [1]
    assert hand.free == 4
    assert hand.scheduler.limits.reservation == 3


@pytest.mark.parametrize("policy", PAGED)
def test_the_watermark(policy: str) -> None:
    """floor(0.25 × 10) = 2 blocks stay free for all but the first; exactly two are enough."""
    hand = Hand(policy, [(36, 1)], num_blocks=10, watermark=0.25)
    assert chunks(hand.ask()) == [(0, 0, 36)]  # alone: one block left
    hand = Hand(policy, [(4, 1), (28, 1)], num_blocks=10, watermark=0.25)
    assert chunks(hand.ask()) == [(0, 0, 4), (1, 0, 28)]
    hand = Hand(policy, [(4, 1), (29, 1)], num_blocks=10, watermark=0.25)
    assert chunks(hand.ask()) == [(0, 0, 4)]


def test_refusals() -> None:
    """Too long is looked at first; the last token needs no memory; a reservation may be too large for the pool."""
    prompts, outputs = np.array([12, 12, 13, 1, 16]), np.array([5, 1, 4, 1, 1])
    assert Limits("stall-free", 4, 4, max_model_tokens=17).refusals(prompts, outputs) == {}
    assert Limits("stall-free", 3, 4, max_model_tokens=17).refusals(prompts, outputs) == {
        0: "never_fits",
        2: "never_fits",
        4: "never_fits",
    }
    assert Limits("stall-free", 3, 4, max_model_tokens=16).refusals(prompts, outputs) == {
        0: "too_long",
        2: "too_long",
        4: "too_long",
    }
    assert set(Limits("orca", 4, 4, max_model_tokens=17).refusals(prompts, outputs).values()) == {"never_fits"}
    assert len(Limits("orca", 4, 4, max_model_tokens=17).refusals(prompts, outputs)) == 5
    assert Limits("orca", 5, 4, max_model_tokens=17).refusals(prompts, outputs) == {}


def test_the_policies() -> None:
    """Five of them, four compared, two that reserve."""
    assert set(COMPARED) == set(POLICIES) - {"alternating"}
    assert frozenset({"orca", "decode-first"}) == RESERVING


# prefill-first


def test_prefill_first_prefers_prompts() -> None:
    """A prompt that can go stalls every decode; the batch holds nothing else."""
    hand = Hand("prefill-first", [(4, 3), (4, 3)])
    assert hand.turn() == ([], [(0, 0, 4), (1, 0, 4)])
    assert hand.turn() == ([0, 1], [])
    hand.add((6, 1))
    assert hand.turn() == ([], [(2, 0, 6)])
    assert hand.turn() == ([0, 1], [])


def test_prefill_first_takes_whole_prompts_up_to_the_batch() -> None:
    """8 + 7 tokens fit 16 with one to spare; 2 does not go in part, and 3 does not overtake it."""
    hand = Hand("prefill-first", [(8, 1), (7, 1), (2, 1), (1, 1)], max_batch_tokens=16, max_model_tokens=16)
    assert hand.turn() == ([], [(0, 0, 8), (1, 0, 7)])
    assert hand.turn() == ([], [(2, 0, 2), (3, 0, 1)])
    hand = Hand("prefill-first", [(8, 1), (8, 1), (1, 1)], max_batch_tokens=16, max_model_tokens=16)
    assert hand.turn() == ([], [(0, 0, 8), (1, 0, 8)])


def test_prefill_first_ignores_the_token_budget() -> None:
    hand = Hand("prefill-first", [(8, 1)], token_budget=2)
    assert hand.turn() == ([], [(0, 0, 8)])


# orca


def test_orca_mixes_decodes_and_whole_prompts() -> None:
    """Every decode, and beside them whole prompts of any length."""
    hand = Hand("orca", [(4, 3)], num_blocks=6, max_model_tokens=8, max_batch_tokens=8, token_budget=1)
    assert hand.turn() == ([], [(0, 0, 4)])
    hand.add((7, 1), (7, 2), (7, 1))
    assert hand.turn() == ([0], [(1, 0, 7), (2, 0, 7)])  # three reservations of two blocks
    assert hand.turn() == ([0, 2], [(3, 0, 7)])


# decode-first


def test_decode_first_lets_the_batch_run_dry() -> None:
    """New requests wait until there is no decode at all, though a slot and memory are free."""
    hand = Hand("decode-first", [(4, 2), (4, 3)])
    assert hand.turn() == ([], [(0, 0, 4), (1, 0, 4)])
    hand.add((4, 2), (4, 1))
    assert hand.turn() == ([0, 1], [])
    assert hand.turn() == ([1], [])
    assert hand.turn() == ([], [(2, 0, 4), (3, 0, 4)])


def test_decode_first_fills_beside_what_is_in_flight() -> None:
    """Requests in flight do not block admission: only a decode that could go does."""
    hand = Hand("decode-first", [(4, 3)])
    first = hand.ask()
    hand.add((4, 3))
    assert chunks(hand.ask()) == [(1, 0, 4)]
    hand.add((4, 3))
    hand.commit(first)
    batch = hand.ask()
    assert (decodes(batch), chunks(batch)) == ([0], [])


# stall-free


def test_stall_free_decodes_then_chunks_then_new_ones() -> None:
    """All of one batch counts towards the budget of 8."""
    hand = Hand("stall-free", [(3, 9), (3, 9)], token_budget=8)
    assert hand.turn() == ([], [(0, 0, 3), (1, 0, 3)])
    hand.add((10, 1), (10, 1))
    assert hand.turn() == ([0, 1], [(2, 0, 6)])
    assert hand.turn() == ([0, 1], [(2, 6, 4), (3, 0, 2)])
    assert hand.turn() == ([0, 1], [(3, 2, 6)])
    assert hand.turn() == ([0, 1], [(3, 8, 2)])


def test_stall_free_cuts_every_prompt_at_the_budget() -> None:
    hand = Hand("stall-free", [(20, 1)], token_budget=8)
    assert hand.turns() == [([], [(0, 0, 8)]), ([], [(0, 8, 8)]), ([], [(0, 16, 4)])]


def test_stall_free_admits_nothing_without_a_token_for_it() -> None:
    """The budget is used up to the last token, so the next request stays in the queue and holds no blocks."""
    hand = Hand("stall-free", [(8, 1), (4, 1)], token_budget=8)
    batch = hand.ask()
    assert chunks(batch) == [(0, 0, 8)]
    assert (batch.waiting, batch.blocks_used) == (1, 2)


def test_stall_free_never_drops_a_decode() -> None:
    """More decodes than the budget has tokens: all go, and no chunk beside them."""
    hand = Hand("stall-free", [(1, 5), (1, 5), (1, 5)], token_budget=2)
    assert hand.turn() == ([], [(0, 0, 1), (1, 0, 1)])
    assert hand.turn() == ([0, 1], [])
    assert hand.turn() == ([0, 1], [])
    hand = Hand("stall-free", [(1, 5), (2, 5)], token_budget=2)
    assert hand.turn() == ([], [(0, 0, 1), (1, 0, 1)])
    assert hand.turn() == ([0], [(1, 1, 1)])
    assert hand.turn() == ([0, 1], [])


def test_stall_free_has_several_unfinished_prompts() -> None:
    """With a second batch in flight a second prompt is begun; when both are back the older one goes on first."""
    hand = Hand("stall-free", [(10, 1), (10, 1)], token_budget=4)
    first, second = hand.ask(), hand.ask()
    assert (chunks(first), chunks(second)) == ([(0, 0, 4)], [(1, 0, 4)])
    assert hand.idle
    hand.commit(first)
    hand.commit(second)
    assert hand.turn() == ([], [(0, 4, 4)])
    assert hand.turn() == ([], [(0, 8, 2), (1, 4, 2)])
    assert hand.turn() == ([], [(1, 6, 4)])


def test_unfinished_prompts_stay_in_order_of_admission() -> None:
    """Committed the other way round, 0 is still before 1."""
    hand = Hand("stall-free", [(10, 1), (10, 1)], token_budget=4)
    first, second = hand.ask(), hand.ask()
    hand.commit(second)
    hand.commit(first)
    assert hand.turn() == ([], [(0, 4, 4)])


# alternating


def test_alternating_turns() -> None:
    """A turn of chunks up to the budget, a turn of decodes, and so on; new requests only where none is unfinished."""
    hand = Hand("alternating", [(3, 4), (6, 2), (2, 1)], token_budget=4)
    assert hand.turns() == [
        ([], [(0, 0, 3), (1, 0, 1)]),
        ([0], []),
        ([], [(1, 1, 4)]),
        ([0], []),
        ([], [(1, 5, 1)]),  # 2 waits, though three tokens of the budget are left
        ([0, 1], []),
        ([], [(2, 0, 2)]),
    ]


def test_alternating_passes_an_empty_turn_on() -> None:
    """Without decodes the prefill turns follow one another, and without prompts the decodes do."""
    hand = Hand("alternating", [(8, 3)], token_budget=4)
    assert hand.turns() == [([], [(0, 0, 4)]), ([], [(0, 4, 4)]), ([0], []), ([0], [])]


def test_alternating_after_decodes_it_is_the_prompts_turn() -> None:
    """A decode turn taken in place of an empty prefill turn leaves the next turn to the prompts."""
    hand = Hand("alternating", [(4, 6)], token_budget=8)
    hand.turn()
    assert hand.turn() == ([0], [])
    assert hand.turn() == ([0], [])  # the prefill turn found nothing
    hand.add((4, 6))
    assert hand.turn() == ([], [(1, 0, 4)])
    hand.add((4, 6))
    assert hand.turn() == ([0, 1], [])
    assert hand.turn() == ([], [(2, 0, 4)])


def test_alternating_an_empty_answer_leaves_the_turn_where_it_was() -> None:
    hand = Hand("alternating", [(4, 3)], token_budget=8)
    first = hand.ask()
    assert hand.idle  # the decodes' turn, and nothing is there
    hand.add((4, 3))
    hand.commit(first)
    assert hand.turn() == ([0], [])


# Preemption, one batch at a time


def test_a_victim_in_flight_is_spared() -> None:
    """Request 1 is the latest admitted but in flight; 0 finds no block and is preempted itself."""
    hand = Hand("stall-free", [(4, 5)], num_blocks=2, token_budget=4)
    first = hand.ask()
    hand.add((4, 5))
    second = hand.ask()
    hand.commit(first)
    assert hand.idle
    assert [request.id for request in hand.scheduler.waiting] == [0]
    hand.commit(second)
    batch = hand.ask()
    assert (decodes(batch), chunks(batch)) == ([1], [])
    assert batch.preempted == 1  # of the call that came to nothing
    assert hand.requests[0].preemptions == 1


def test_an_earlier_scheduled_time_stands() -> None:
    """A preempted request keeps the time at which it was scheduled first."""
    hand = Hand("prefill-first", [(4, 3), (4, 3)], num_blocks=3)
    hand.turns()
    assert [request.scheduled for request in hand.requests] == [0.0, 0.0]
    assert hand.requests[1].preemptions == 1


def test_the_latest_admission_counts_not_the_arrival() -> None:
    """Request 0 preempts itself while 1 is in flight and comes back after it: now 1 is served first, at 0's cost.

    Four blocks; at KV length 9 both need a third one.
    """
    hand = Hand("stall-free", [(4, 9)], num_blocks=4, token_budget=16)
    first = hand.ask()
    hand.add((4, 9), (8, 1))
    second = hand.ask()
    assert chunks(second) == [(1, 0, 4), (2, 0, 8)]
    hand.commit(first)
    assert hand.idle
    assert hand.commit(second) == [2]
    assert hand.turn() == ([1], [(0, 0, 5)])
    assert [hand.turn() for _ in range(3)] == [([1, 0], [])] * 3
    assert hand.turn() == ([1], [])
    assert [request.preemptions for request in hand.requests] == [2, 0, 0]
    hand.turns()
    assert [request.emitted for request in hand.requests] == [9, 9, 1]
    assert (hand.free, hand.scheduler.held, hand.scheduler.outstanding) == (4, 0, 0)


# Overlap


def test_with_overlap_an_arrival_is_in_the_batch_after_the_next() -> None:
    hand = Hand("stall-free", [(4, 5)], overlap=True)
    batch = hand.ask()
    hand.add((3, 2))  # while the first batch executes
    hand.commit(batch)
    assert hand.turn() == ([0], [])
    assert hand.turn() == ([0], [(1, 0, 3)])


def test_with_overlap_nothing_waits_for_an_idle_replica() -> None:
    hand = Hand("stall-free", [(4, 1)], overlap=True)
    batch = hand.ask()
    hand.add((3, 1))
    hand.commit(batch)  # the first is done: nothing is left to overlap with
    assert hand.turn() == ([], [(1, 0, 3)])
    hand.add((2, 1))
    assert hand.turn() == ([], [(2, 0, 2)])
    assert hand.idle


# Waiting for a fuller batch


def test_prompts_wait_beside_decodes_for_a_fuller_batch_but_not_for_long() -> None:
    hand = Hand("stall-free", [(4, 20)], token_budget=10, batch_wait_iterations=2, batch_wait_ratio=0.8)
    assert hand.turn() == ([], [(0, 0, 4)])  # nothing to wait beside
    hand.add((3, 9))  # 1 decode and 3 tokens are less than 8
    assert [hand.turn() for _ in range(3)] == [([0], []), ([0], []), ([0], [(1, 0, 3)])]
    hand.add((3, 9))
    assert hand.turn() == ([0, 1], [])  # the count is of this wait
    hand.add((4, 9))
    assert hand.turn() == ([0, 1], [(2, 0, 3), (3, 0, 4)])


def test_what_has_no_slot_does_not_make_a_batch_fuller() -> None:
    limits = {"token_budget": 10, "batch_wait_iterations": 1, "batch_wait_ratio": 0.5, "max_sequences": 2}
    hand = Hand("stall-free", [(4, 9)], **limits)
    hand.turn()
    hand.add((3, 9), (6, 9))
    assert [hand.turn() for _ in range(2)] == [([0], []), ([0], [(1, 0, 3)])]


def test_the_wait_begins_when_a_prompt_could_go() -> None:
    """While no slot is free nothing is counted: the prompt waits its iterations after that."""
    limits = {"token_budget": 10, "batch_wait_iterations": 3, "batch_wait_ratio": 0.9, "max_sequences": 2}
    hand = Hand("stall-free", [(4, 30), (4, 6)], **limits)
    hand.turn()
    hand.add((4, 2))
    while hand.scheduler.held == 2:
        assert hand.turn()[1] == []
    assert [hand.turn() for _ in range(4)] == [([0], []), ([0], []), ([0], []), ([0], [(2, 0, 4)])]


def test_an_unfinished_prompt_counts_with_what_is_left_of_it() -> None:
    hand = Hand("stall-free", [(4, 20)], token_budget=10, batch_wait_iterations=5, batch_wait_ratio=0.8)
    hand.turn()
    hand.add((12, 2))
    assert hand.turn() == ([0], [(1, 0, 9)])
    assert hand.turn() == ([0], [])  # 3 are left: it waits
    hand.add((4, 2))
    assert hand.turn() == ([0], [(1, 9, 3), (2, 0, 4)])


@pytest.mark.parametrize("policy", ["prefill-first", "orca", "decode-first", "alternating"])
def test_the_other_policies_do_not_wait(policy: str) -> None:
    plain, waiting = (
        Hand(policy, [(4, 5), (3, 5)], token_budget=10, batch_wait_iterations=wait, batch_wait_ratio=1.0)
        for wait in (0, 9)
    )
    assert plain.turns() == waiting.turns()
