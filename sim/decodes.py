"""Requests that decode together, as a few sums instead of a loop."""

from __future__ import annotations

from bisect import bisect_right

from sim.request import Batch, Request


class Decodes:
    """A group of requests that emit one token each whenever the group takes a step.

    An iteration over n requests costs the same for any n: what they have in common is kept as sums, and what is
    particular to one of them is looked up only when it joins, leaves or finishes.

    * `context`: KV tokens of all members (each its prompt and emitted tokens); grows by `count` a step.
    * `finishing`: the members that finish at each step of the group.
    * `phases`: how many members have a KV length ≡ r + step (mod block), so that one look tells how many cross into
      a new block at the next step.
    * `last`: when the group emitted; members that joined since, and emitted at another time, are `late`, once.
    * `peaks`: steps and gaps, gaps falling, such that the longest gap since any step is one search away.
    """

    __slots__ = (
        "block_tokens",
        "context",
        "count",
        "finishing",
        "last",
        "late",
        "measured",
        "members",
        "peak_gaps",
        "peak_steps",
        "phases",
        "step",
    )

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.step = 0
        self.count = 0
        self.measured = 0
        self.context = 0
        self.last = 0.0
        self.members: dict[int, Request] = {}
        self.late: list[Request] = []
        self.finishing: dict[int, list[Request]] = {}
        self.phases = [0] * block_tokens
        self.peak_steps: list[int] = []
        self.peak_gaps: list[float] = []

    def join(self, request: Request) -> None:
        """Take in a request whose prompt is done and whose newest token came at `request.last_token`."""
        step = self.step
        if not self.count:
            self.last = request.last_token
            self.peak_steps.clear()
            self.peak_gaps.clear()
        request.entered = request.steady_from = step
        if request.last_token != self.last:
            request.steady_from = step + 1
            self.late.append(request)
        context = request.prompt + request.emitted
        self.members[request.id] = request
        self.finishing.setdefault(step + request.output - request.emitted, []).append(request)
        self.phases[(context - step) % self.block_tokens] += 1
        self.context += context
        self.count += 1
        self.measured += request.measured

    def blocks_needed(self) -> int:
        """How many members cross into a new block at the next step."""
        return self.phases[(1 - self.step) % self.block_tokens]

    def needs_block(self, request: Request) -> bool:
        """Whether this member does."""
        return (request.prompt + self.emitted(request) - 1) % self.block_tokens == 0

    def emitted(self, request: Request) -> int:
        """Tokens that a member has emitted by now."""
        return request.emitted + self.step - request.entered

    def advance(self, batch: Batch, now: float) -> list[Request]:
        """Every member emits a token at `now`: note the gaps in `batch`, and let go of those that are done."""
        self.step = step = self.step + 1
        self.context += self.count
        batch.gap = gap = now - self.last
        batch.gap_count = self.measured
        if self.late:
            self._settle_late(batch, now)
        self.last = now
        gaps = self.peak_gaps
        if gaps and gaps[-1] <= gap:
            while len(gaps) > 1 and gaps[-2] <= gap:
                gaps.pop()
                self.peak_steps.pop()
            gaps[-1] = gap
            self.peak_steps[-1] = step
        else:
            gaps.append(gap)
            self.peak_steps.append(step)
        finished = self.finishing.pop(step, None)
        if finished is None:
            return []
        if len(finished) > 1:
            finished.sort(key=_by_admission)
        for request in finished:
            self._let_go(request)
        return finished

    def remove(self, request: Request) -> None:
        """Let go of a member before it is done (preemption)."""
        step = request.entered + request.output - request.emitted
        self.finishing[step].remove(request)
        if not self.finishing[step]:
            del self.finishing[step]
        self._let_go(request)

    def absorb(self, other: Decodes) -> None:
        """Take in all members of another group (the caller gives the smaller one)."""
        for request in list(other.members.values()):
            other._let_go(request)
            self.join(request)

    def by_admission(self) -> list[Request]:
        """The members in order of their latest admission."""
        return sorted(self.members.values(), key=_by_admission)

    def settle(self) -> None:
        """Bring every member's own counts up to date, without letting go of any (the end of a run)."""
        for request in list(self.members.values()):
            self.remove(request)
            self.join(request)

    def _let_go(self, request: Request) -> None:
        """Drop a member from the sums; its own counts take over from here."""
        late = request.steady_from > self.step
        if late:
            self.late.remove(request)
        else:
            request.last_token = self.last
            since = bisect_right(self.peak_steps, request.steady_from)
            if since < len(self.peak_gaps) and self.peak_gaps[since] > request.longest_gap:
                request.longest_gap = self.peak_gaps[since]
        request.emitted += self.step - request.entered
        context = request.prompt + request.emitted
        del self.members[request.id]
        self.phases[(context - self.step) % self.block_tokens] -= 1
        self.context -= context
        self.count -= 1
        self.measured -= request.measured

    def _settle_late(self, batch: Batch, now: float) -> None:
        """Those that joined since the last step waited for another while than the rest."""
        gaps = []
        for request in self.late:
            gap = now - request.last_token
            if gap > request.longest_gap:
                request.longest_gap = gap
            if request.measured:
                gaps.append(gap)
        batch.gap_count -= len(gaps)
        batch.other_gaps = gaps
        self.late.clear()


def _by_admission(request: Request) -> int:
    return request.admission
