"""What holds under any interleaving: of requests, batches and commits, and of what a group of decodes goes through."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sim.decodes import Decodes
from sim.policies import POLICIES, RESERVING
from sim.request import Batch, Request
from sim.scheduler import Limits, Scheduler

MIXING = {"orca", "stall-free"}  # decodes and prompts in one batch
CHUNKING = {"stall-free", "alternating"}


@dataclass
class Own:
    """The test's own account of a request, kept from what the batches said alone."""

    request: Request
    emitted: int = 0
    computed: int = 0
    to_prefill: int = 0
    admitted: bool = False
    decoding: bool = False
    in_flight: bool = False
    preemptions: int = 0
    done: bool = False


@dataclass
class InFlight:
    batch: Batch
    decodes: list[int]
    chunks: list[tuple[int, int, int]]


@dataclass
class Bench:
    """A scheduler, driven by hand, and the account that it has to agree with after every move."""

    limits: Limits
    clock: Iterator[float]
    scheduler: Scheduler = field(init=False)
    own: dict[int, Own] = field(default_factory=dict)
    in_flight: deque[InFlight] = field(default_factory=deque)
    story: list[object] = field(default_factory=list)
    queued: int = 0
    unreported: int = 0  # preempted in calls that came to nothing

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)

    def blocks(self, tokens: int) -> int:
        if self.limits.policy in RESERVING:
            return -(-self.limits.max_model_tokens // self.limits.block_tokens)
        return -(-tokens // self.limits.block_tokens)

    def add(self, prompt: int, output: int) -> None:
        prompt = min(prompt, self.limits.max_model_tokens - 1)
        output = min(output, self.limits.max_model_tokens - prompt)
        request = Request(self.queued, next(self.clock), prompt, output)
        self.own[self.queued] = Own(request)
        self.queued += 1
        self.scheduler.add(request)
        self.check()

    def schedule(self) -> bool:
        batch = self.scheduler.schedule(next(self.clock))
        self.note_victims()
        if batch is None:
            self.check()
            return False
        decodes = [] if batch.group is None else sorted(batch.group.members)
        chunks = [(chunk.request.id, chunk.start, chunk.tokens) for chunk in batch.chunks]
        self.check_batch(batch, decodes, chunks)
        for id, start, tokens in chunks:
            own = self.own[id]
            if not own.admitted:
                own.admitted, own.to_prefill = True, own.request.prompt + own.emitted
            assert start == own.computed
            assert start + tokens <= own.to_prefill
            own.in_flight = True
        for id in decodes:
            self.own[id].in_flight = True
        assert batch.preempted == self.unreported
        self.unreported = 0
        self.in_flight.append(InFlight(batch, decodes, chunks))
        self.story.append((decodes, chunks, batch.preempted, batch.blocks_used, batch.waiting))
        self.check()
        return True

    def note_victims(self) -> None:
        """Whoever was admitted and waits now was preempted; in flight, nobody may be."""
        for request in self.scheduler.waiting:
            own = self.own[request.id]
            if own.admitted:
                assert not own.in_flight
                own.admitted = own.decoding = False
                own.computed = 0
                own.preemptions += 1
                self.unreported += 1

    def check_batch(self, batch: Batch, decodes: list[int], chunks: list[tuple[int, int, int]]) -> None:
        """Only what is there and not in flight, once, within the policy's limits."""
        policy, limits = self.limits.policy, self.limits
        ids = decodes + [id for id, _, _ in chunks]
        assert len(set(ids)) == len(ids) > 0
        assert not any(self.own[id].in_flight or self.own[id].done for id in ids)
        assert all(self.own[id].decoding for id in decodes)
        assert not any(self.own[id].decoding for id, _, _ in chunks)
        tokens = sum(m for _, _, m in chunks)
        assert all(m > 0 for _, _, m in chunks)
        assert (batch.decodes, batch.prefill_tokens) == (len(decodes), tokens)
        assert batch.context == sum(self.own[id].request.prompt + self.own[id].emitted for id in decodes)
        assert batch.attention == sum(m * (m0 + m / 2) for _, m0, m in chunks)
        assert policy in MIXING or not (decodes and chunks)
        if policy in CHUNKING and chunks:
            assert len(decodes) + tokens <= limits.token_budget
        if policy == "prefill-first":
            assert tokens <= limits.max_batch_tokens
        if policy not in CHUNKING:
            assert all(m == self.own[id].request.prompt + self.own[id].emitted for id, _, m in chunks)

    def commit(self) -> None:
        """The oldest batch comes back."""
        flight = self.in_flight.popleft()
        expected = []
        for id in flight.decodes:
            self.own[id].emitted += 1
        for id, _, tokens in flight.chunks:
            own = self.own[id]
            own.computed += tokens
            if own.computed == own.to_prefill:
                own.emitted += 1
                own.decoding = True
        for id in (*flight.decodes, *(id for id, _, _ in flight.chunks)):
            own = self.own[id]
            own.in_flight = False
            if own.emitted == own.request.output:
                own.done, own.admitted, own.decoding = True, False, False
                expected.append(id)
        finished = [request.id for request in self.scheduler.commit(flight.batch, next(self.clock))]
        assert sorted(finished) == sorted(expected)
        self.story.append(finished)
        self.check()

    def held_blocks(self, own: Own) -> int:
        """From the contract: the prefill's at admission, and for every decode those of its KV length."""
        if not own.admitted:
            return 0
        length = own.request.prompt + own.emitted
        if not own.decoding:
            return self.blocks(own.to_prefill)
        return self.blocks(length if own.in_flight else length - 1)

    def check(self) -> None:
        """Every request is in one place, and blocks, slots, tokens and load are what a recount says."""
        scheduler = self.scheduler
        held = sum(self.held_blocks(own) for own in self.own.values())
        assert scheduler.blocks.used == held
        assert 0 <= scheduler.blocks.free == self.limits.num_blocks - held
        assert scheduler.held == sum(own.admitted for own in self.own.values()) <= self.limits.max_sequences
        idle = [] if scheduler.decoding is None else list(scheduler.decoding.members)
        places = Counter([request.id for request in (*scheduler.waiting, *scheduler.unfinished)] + idle)
        places.update(id for flight in self.in_flight for id in flight.decodes)
        places.update(id for flight in self.in_flight for id, _, _ in flight.chunks)
        assert places == Counter(id for id, own in self.own.items() if not own.done)
        load = 0
        for own in self.own.values():
            request = own.request
            assert request.preemptions == own.preemptions
            if own.decoding:
                group = scheduler.decoding if request.id in idle else self.group_of(request.id)
                assert group is not None
                assert group.emitted(request) == own.emitted < request.output
                load += 1
            elif not own.done:
                assert (request.emitted, request.computed) == (own.emitted, own.computed)
                load += (own.to_prefill if own.admitted else request.prompt + own.emitted) - own.computed
            else:
                assert request.emitted == own.emitted == request.output
        assert scheduler.outstanding == load

    def group_of(self, id: int) -> Decodes | None:
        return next(flight.batch.group for flight in self.in_flight if id in flight.decodes)

    def drain(self, stages: int) -> None:
        """Nothing more arrives: everything ends, in a number of iterations that the tokens bound.

        Each call that yields no batch is followed by a commit, and the oldest request is never preempted for long.
        """
        tokens = sum(own.request.prompt + own.request.output for own in self.own.values() if not own.done)
        bound = 10 + 4 * tokens * (1 + len(self.own))
        for _ in range(bound):
            while len(self.in_flight) < stages and self.schedule():
                pass
            if not self.in_flight:
                break
            self.commit()
        assert all(own.done for own in self.own.values())
        assert (self.scheduler.blocks.free, self.scheduler.held, self.scheduler.outstanding) == (
            self.limits.num_blocks,
            0,
            0,
        )


@st.composite
def limits(draw: st.DrawFn, policy: str) -> Limits:
    """A pool that holds the longest request, and little more for a policy that pages."""
    block, longest = draw(st.integers(1, 4)), draw(st.sampled_from([20, 16, 9, 2]))
    full = -(-longest // block)
    return Limits(
        policy,
        num_blocks=full + draw(st.integers(0, 3 * full if policy in RESERVING else 4)),
        block_tokens=block,
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5])),
        max_sequences=draw(st.sampled_from([8, 4, 2, 1])),
        max_model_tokens=longest,
        max_batch_tokens=longest + draw(st.integers(0, 20)),
        token_budget=draw(st.sampled_from([12, 5, 3, 1])),
    )


Moves = list[tuple[str, int, int]]
moves = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([1, 2, 3, 4, 7, 11]), st.sampled_from([14, 9, 6, 4, 3, 2, 1])),
        st.tuples(st.sampled_from(["schedule", "commit"]), st.just(0), st.just(0)),
    ),
    min_size=12,
    max_size=60,
)


def play(bench: Bench, todo: Moves, stages: int) -> None:
    for what, prompt, output in todo:
        if what == "add":
            bench.add(prompt, output)
        elif what == "schedule" and len(bench.in_flight) < stages:
            bench.schedule()
        elif what == "commit" and bench.in_flight:
            bench.commit()
    bench.drain(stages)


def ticking(step: Callable[[int], float]) -> Iterator[float]:
    tick = 0
    while True:
        tick += 1
        yield step(tick)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data(), todo=moves, stages=st.integers(1, 4))
def test_any_interleaving(policy: str, data: st.DataObject, todo: Moves, stages: int) -> None:
    """No block lost or owned twice, no token, no request; nothing in flight is touched; everything ends.

    And the clock is none of the scheduler's business: at other times it decides the same.
    """
    limit = data.draw(limits(policy))
    bench, other = Bench(limit, ticking(float)), Bench(limit, ticking(lambda tick: (tick // 3) * 1e6))
    play(bench, todo, stages)
    play(other, todo, stages)
    assert bench.story == other.story


class Member:
    """The test's own account of a request that decodes: all its token times."""

    def __init__(self, request: Request, now: float) -> None:
        self.request = request
        self.times = [now]

    @property
    def length(self) -> int:
        return self.request.prompt + len(self.times)

    @property
    def longest(self) -> float:
        return max((late - early for early, late in pairwise(self.times)), default=0.0)


class Groups(RuleBasedStateMachine):
    """Two groups of decodes: members join, step, are preempted, come back, and go from one group to the other."""

    @initialize(block=st.integers(1, 6))
    def start(self, block: int) -> None:
        self.block = block
        self.groups = [Decodes(block), Decodes(block)]
        self.members: tuple[dict[int, Member], dict[int, Member]] = ({}, {})
        self.out: list[Member] = []
        self.now = 0.0
        self.born = 0

    @rule(gap=st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0, 0.1]))
    def wait(self, gap: float) -> None:
        self.now += gap

    @rule(
        which=st.integers(0, 1),
        prompt=st.integers(1, 9),
        outputs=st.lists(st.sampled_from([3, 2, 4, 5, 9]), min_size=1, max_size=3),
        measured=st.booleans(),
    )
    def join(self, which: int, prompt: int, outputs: list[int], measured: bool) -> None:
        """Requests whose first tokens came just now; one may be of the warm-up."""
        for output in outputs:
            request = Request(self.born, self.now, prompt, output, measured=measured or len(outputs) > 1)
            request.admission = self.born
            self.born += 1
            request.emitted, request.first_token, request.last_token = 1, self.now, self.now
            self.groups[which].join(request)
            self.members[which][request.id] = Member(request, self.now)

    @precondition(lambda self: any(self.members))
    @rule(which=st.integers(0, 1))
    def advance(self, which: int) -> None:
        """Every member emits a token now; the gaps of the measured ones are told."""
        group, members = self.groups[which], self.members[which]
        if not members:
            return
        batch = Batch()
        finished = group.advance(batch, self.now)
        gaps: Counter[float] = Counter()
        done = []
        for member in members.values():
            if member.request.measured:
                gaps[self.now - member.times[-1]] += 1
            member.times.append(self.now)
            if len(member.times) == member.request.output:
                done.append(member.request.id)
        told = Counter(batch.other_gaps)
        told[batch.gap] += batch.gap_count
        assert +told == gaps
        assert [request.id for request in finished] == sorted(done, key=lambda id: members[id].request.admission)
        for id in done:
            self.account(members.pop(id))

    @precondition(lambda self: any(self.members))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A member is taken out, and its own counts are right from then on."""
        which = data.draw(st.sampled_from([which for which in (0, 1) if self.members[which]]))
        member = self.members[which].pop(data.draw(st.sampled_from(sorted(self.members[which]))))
        self.groups[which].remove(member.request)
        self.account(member)
        self.out.append(member)

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0, 1), data=st.data())
    def come_back(self, which: int, data: st.DataObject) -> None:
        """It prefills again, with one more token, and decodes on; in either group."""
        member = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        request = member.request
        if len(member.times) + 1 == request.output:
            return
        request.longest_gap = max(request.longest_gap, self.now - request.last_token)
        request.emitted += 1
        request.last_token = self.now
        request.admission = self.born
        self.born += 1
        member.times.append(self.now)
        self.groups[which].join(request)
        self.members[which][request.id] = member

    @rule(into=st.integers(0, 1))
    def absorb(self, into: int) -> None:
        """One takes in the other, larger or smaller, which is thrown away."""
        self.groups[into].absorb(self.groups[1 - into])
        assert self.groups[1 - into].count == self.groups[1 - into].context == 0
        self.groups[1 - into] = Decodes(self.block)
        self.members[into].update(self.members[1 - into])
        self.members[1 - into].clear()

    @rule(which=st.integers(0, 1))
    def settle(self, which: int) -> None:
        """Every member's own counts are brought up to date, and nothing else changes."""
        self.groups[which].settle()
        for member in self.members[which].values():
            self.account(member)

    def account(self, member: Member) -> None:
        request = member.request
        assert (request.emitted, request.last_token) == (len(member.times), member.times[-1])
        assert request.longest_gap == member.longest

    @invariant()
    def the_sums_are_those_of_a_recount(self) -> None:
        if not hasattr(self, "groups"):
            return
        for group, members in zip(self.groups, self.members, strict=True):
            assert group.members.keys() == members.keys()
            assert group.count == len(members)
            assert group.measured == sum(member.request.measured for member in members.values())
            assert group.context == sum(member.length for member in members.values())
            phases = Counter((member.length - group.step) % self.block for member in members.values())
            assert group.phases == [phases[phase] for phase in range(self.block)]
            crossing = {id for id, member in members.items() if (member.length - 1) % self.block == 0}
            assert group.blocks_needed() == len(crossing)
            assert {id for id, member in members.items() if group.needs_block(member.request)} == crossing
            assert all(group.emitted(member.request) == len(member.times) for member in members.values())
            finishing = {
                (request.id, step - group.step) for step, those in group.finishing.items() for request in those
            }
            assert finishing == {(id, m.request.output - len(m.times)) for id, m in members.items()}
            assert [r.admission for r in group.by_admission()] == sorted(m.request.admission for m in members.values())


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=250, stateful_step_count=40, deadline=None, derandomize=True)
