"""The scheduler of one replica: a waiting queue, a KV pool, and the verbs that a policy is made of.

Pure: no clock, no random draw, no I/O. Whoever runs it says what time it is. The simulator and the engine drive the
same object: `add` a request, `schedule` a batch, execute it, `commit` it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from sim.blocks import Blocks
from sim.decodes import Decodes
from sim.policies import POLICIES, RESERVING
from sim.request import Batch, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What a replica may hold and a batch may contain; the [engine] and [scheduler] tables of a scenario.

    With `overlap` a batch is decided while the one before it executes, as engines of today do to hide the host's time:
    a request that arrives meanwhile is not in the next batch but in the one after it.

    With `batch_wait_iterations` and `batch_wait_ratio` prompts wait beside decodes, so many iterations at most, until a
    batch would hold that share of the token budget (TensorRT-LLM's batch_wait_timeout_iters and
    batch_wait_max_tokens_ratio). Of stall-free alone.
    """

    policy: str
    num_blocks: int
    block_tokens: int = 16
    watermark: float = 0.01
    max_sequences: int = 128
    max_model_tokens: int = 8192
    max_batch_tokens: int = 8192
    token_budget: int = 512
    overlap: bool = False
    batch_wait_iterations: int = 0
    batch_wait_ratio: float = 0.0

    @property
    def reservation(self) -> int | None:
        """Blocks that every request reserves, for the policies that reserve."""
        return -(-self.max_model_tokens // self.block_tokens) if self.policy in RESERVING else None

    def refusals(self, prompts: npt.NDArray[np.int64], outputs: npt.NDArray[np.int64]) -> dict[int, str]:
        """Which requests can never be served here, by position, and why. The last token needs no KV."""
        needed = -(-(prompts + outputs - 1) // self.block_tokens)
        too_long = prompts + outputs > self.max_model_tokens
        never_fits = np.maximum(needed, self.reservation or 0) > self.num_blocks
        return {int(i): "too_long" if too_long[i] else "never_fits" for i in np.flatnonzero(too_long | never_fits)}


class Scheduler:
    """Decides what each iteration of one replica works on.

    Every admitted request is in one place: in flight (in a batch that was scheduled and not yet committed),
    in `unfinished` (its prompt is half computed), or in the group `decoding`.
    """

    __slots__ = (
        "admissions",
        "arriving",
        "blocks",
        "decoding",
        "held",
        "limits",
        "new_group",
        "now",
        "outstanding",
        "policy",
        "preempted",
        "prefill_turn",
        "unfinished",
        "waiting",
        "waits",
    )

    def __init__(self, limits: Limits, new_group: Callable[[int], Decodes] = Decodes) -> None:
        self.limits = limits
        self.new_group = new_group
        self.policy = POLICIES[limits.policy]
        self.blocks = Blocks(limits.num_blocks, limits.block_tokens, limits.watermark, limits.reservation)
        self.waiting: deque[Request] = deque()
        self.arriving: list[Request] = []  # with `overlap`: came after the next batch was decided
        self.unfinished: list[Request] = []  # in order of admission
        self.decoding: Decodes | None = None
        self.held = 0  # requests admitted and not finished, in flight or not
        self.admissions = 0
        self.preempted = 0  # in calls that came to no batch; the next batch reports them
        self.outstanding = 0  # prompt tokens not yet computed, and one per request that decodes
        self.prefill_turn = True  # of `alternating`
        self.waits = 0  # iterations that prompts have been kept waiting for a fuller batch
        self.now = 0.0

    def add(self, request: Request) -> None:
        """Queue a request; requests are added in order of (arrival, id)."""
        late = self.limits.overlap and self.held
        (self.arriving if late else self.waiting).append(request)
        self.outstanding += request.prompt

    def schedule(self, now: float) -> Batch | None:
        """The next batch, its blocks taken; None if there is nothing to do until something changes."""
        self.now = now
        batch = Batch()
        self.policy(self, batch)
        if self.arriving:
            self.waiting.extend(self.arriving)
            self.arriving.clear()
            if not (batch.decodes or batch.chunks):
                self.policy(self, batch)
        if not (batch.decodes or batch.chunks):
            self.preempted += batch.preempted
            return None
        if self.preempted:
            batch.preempted, self.preempted = batch.preempted + self.preempted, 0
        batch.blocks_used = self.blocks.total - self.blocks.free
        batch.waiting = len(self.waiting)
        return batch

    def commit(self, batch: Batch, now: float) -> list[Request]:
        """Its tokens are there: emit them, and return the requests that are done, in the order of the batch."""
        finished: list[Request] = []
        group = batch.group
        if group is not None:
            finished = group.advance(batch, now)
            for request in finished:
                self._finish(request)
            if group.count:
                self.decoding = group if self.decoding is None else _merged(self.decoding, group)
        for chunk in batch.chunks:
            request = chunk.request
            request.computed += chunk.tokens
            self.outstanding -= chunk.tokens
            if request.computed < request.prompt + request.emitted:
                if self.unfinished:
                    insort(self.unfinished, request, key=_by_admission)
                else:
                    self.unfinished.append(request)
            elif self._emit_first(request, batch, now):
                self._finish(request)
                finished.append(request)
        return finished

    # The verbs of the policies

    def decode(self, batch: Batch) -> None:
        """One decode for every running request that is not in flight; preempts where no block is free."""
        group = self.decoding
        if group is None:
            return
        if self.blocks.reservation is None:
            needed = group.blocks_needed()
            if needed <= self.blocks.free:
                self.blocks.free -= needed
            else:
                self._make_room(group, batch)
        if group.count:
            batch.group = group
            batch.decodes = group.count
            batch.context = group.context
        self.decoding = None

    def waits_for_more(self, batch: Batch, budget: int) -> bool:
        """Whether prompts go on waiting, beside decodes, for a fuller batch. Asking counts as an iteration."""
        limits = self.limits
        if self.waits >= limits.batch_wait_iterations or not 0 < batch.decodes < budget:
            self.waits = 0
            return False
        enough = limits.batch_wait_ratio * budget
        prompts, blocks = sum(request.to_prefill - request.computed for request in self.unfinished), 0
        for request in islice(self.waiting, 0 if batch.preempted else limits.max_sequences - self.held):
            blocks += self.blocks.to_admit(request.to_prefill)
            if batch.decodes + prompts >= enough or not self.blocks.allow(blocks, alone=False):
                break
            prompts += request.to_prefill
        waits = 0 < prompts < enough - batch.decodes  # with none that could go there is nothing to wait for
        self.waits = self.waits + 1 if waits else 0
        return waits

    def resume(self, batch: Batch, budget: int) -> int:
        """The next chunk of each unfinished prompt, in order of admission, until the batch holds `budget` tokens.

        Returns what is left of the budget.
        """
        left = budget - batch.decodes
        while self.unfinished and left > 0:
            request = self.unfinished.pop(0)
            tokens = request.prompt + request.emitted - request.computed
            if tokens > left:
                tokens = left
            batch.add(request, tokens)
            left -= tokens
        return left

    def admit(self, batch: Batch, budget: float, *, chunked: bool) -> None:
        """New requests from the head of the queue while memory, sequences and `budget` allow.

        With `chunked` a prompt is cut at the budget, otherwise it goes whole or waits.
        """
        left = budget - batch.decodes - batch.prefill_tokens
        while self.waiting and left > 0 and self.held < self.limits.max_sequences:
            request = self.waiting[0]
            tokens = request.prompt + request.emitted
            blocks = self.blocks.to_admit(tokens)
            if (tokens > left and not chunked) or not self.blocks.allow(blocks, alone=not self.held):
                return
            self.waiting.popleft()
            self.blocks.take(blocks)
            self.held += 1
            self.admissions += 1
            request.admission = self.admissions
            if request.scheduled is None:
                request.scheduled = self.now
                batch.admitted = [*batch.admitted, request]
            if tokens > left:
                tokens = int(left)
            batch.add(request, tokens)
            left -= tokens

    # What they are made of

    def _emit_first(self, request: Request, batch: Batch, now: float) -> bool:
        """A prefill is complete, so a token comes with it: the first, or the next after a preemption. Last one?"""
        if request.first_token is None:
            request.first_token = now
            batch.first = [*batch.first, request]
        else:
            gap = now - request.last_token
            request.longest_gap = max(request.longest_gap, gap)
            if request.measured:
                batch.other_gaps = [*batch.other_gaps, gap]
        request.last_token = now
        request.emitted += 1
        self.outstanding += 1
        if request.emitted == request.output:
            return True
        if self.decoding is None:
            self.decoding = self.new_group(self.blocks.block_tokens)
        self.decoding.join(request)
        return False

    def _finish(self, request: Request) -> None:
        """A request is done; its blocks and its slot are free at once."""
        self.blocks.give(self.blocks.held_by_decode(request.prompt + request.emitted))
        self.held -= 1
        self.outstanding -= 1

    def _make_room(self, group: Decodes, batch: Batch) -> None:
        """Give each decode its block, in order of admission; where none is free, preempt the latest admitted."""
        victims = sorted((*group.members.values(), *self.unfinished), key=_by_admission)
        for request in group.by_admission():
            if request.id not in group.members:
                return  # preempted, and so were all that were admitted after it
            if not group.needs_block(request):
                continue
            while not self.blocks.free and request.id in group.members:
                self._preempt(victims.pop(), group)
                batch.preempted += 1
            if request.id in group.members:
                self.blocks.take(1)

    def _preempt(self, victim: Request, group: Decodes) -> None:
        """A request loses its blocks, keeps its tokens, and goes to the front of the queue."""
        if victim.id in group.members:
            group.remove(victim)
            self.blocks.give(self.blocks.held_by_decode(victim.to_prefill))
            self.outstanding += victim.to_prefill - 1
        else:
            self.unfinished.remove(victim)
            self.blocks.give(self.blocks.to_admit(victim.to_prefill))
            self.outstanding += victim.computed
        victim.computed = 0
        victim.preemptions += 1
        self.held -= 1
        self.waiting.appendleft(victim)


def _by_admission(request: Request) -> int:
    return request.admission


def _merged(one: Decodes, other: Decodes) -> Decodes:
    """Groups that are idle together become one: the larger, so that a request is seldom moved."""
    larger, smaller = (one, other) if one.count > other.count else (other, one)
    larger.absorb(smaller)
    return larger
