"""A scheduler that notes, while a run is made again, what lies between two tokens of which the second came late.

A run keeps no token times, but it is deterministic, so it can be watched afterwards: the decisions are the same, and at
every commit the time since the last token is cut into the iterations and the waits that it was spent in. Of a batch the
latency model also says what it would have cost without its chunks, or without one of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum, inf

from sim.blame import Levels, Seconds, fitted
from sim.decodes import Decodes
from sim.executor import LatencyModel, Spent
from sim.request import Batch, Chunk, Request
from sim.roofline import Roofline
from sim.scheduler import Limits, Scheduler


@dataclass(frozen=True, slots=True)
class Iteration:
    """One batch: `base` (what its decodes alone would have taken), `prefill` (what its chunks add), `again` (those that
    compute again what a preemption undid), `unmodelled` (what the machine took beyond that) and `wait` (for stages that
    were busy) are all of its time, in seconds."""

    start: float
    end: float
    first: float  # seconds of the first stage
    decodes: int
    context: int
    chunks: tuple[tuple[int, int], ...]  # request and tokens
    own: dict[int, float]  # seconds of each request with a chunk, of those that the chunks add together
    base: float
    prefill: float
    again: float
    unmodelled: float
    wait: float


@dataclass(frozen=True, slots=True)
class Late:
    """Tokens that came late, of requests that waited for them together; `levels` as in `sim.blame`."""

    replica: int
    requests: tuple[int, ...]
    tokens: tuple[int, ...]  # of each request: the how manyeth it is, from 1
    since: float  # the token before, or the arrival
    until: float
    levels: Levels
    first: int  # iterations of the replica that started since, and not after: [first, last)
    last: int

    @property
    def seconds(self) -> float:
        return self.until - self.since


@dataclass(slots=True)
class Seen:
    """What is looked for, and what was found, over all replicas."""

    gap_limit: float
    ttft_limit: float
    measured: bool = False  # iterations last what a machine took, `scale` times what the model says, on the whole
    scale: float = 1.0
    gaps: list[Late] = field(default_factory=list)
    ttfts: list[Late] = field(default_factory=list)
    iterations: list[list[Iteration]] = field(default_factory=list)  # of each replica
    work: list[tuple[float, Spent | None]] = field(default_factory=list)  # of each iteration, in order of commit:
    # seconds over all stages, and what they are spent on
    modelled: float = 0.0  # seconds of all iterations, by the model
    lasted: float = 0.0  # seconds that they took


class Costs:
    """What a latency model says of batches that were, and of batches that could have been."""

    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self.flat: dict[int, tuple[float, float, float]] = {}

    def of(self, batch: Batch) -> float:
        """Seconds over all stages and hand-overs."""
        step = self.model.execute(batch)
        return sum(step.seconds) + step.hop * (len(step.seconds) - 1)

    def shares(self, batch: Batch, whole: float, added: float) -> dict[int, float]:
        """The seconds that the chunks of a batch add, shared out in proportion to how much shorter than `whole` the
        batch would have been without each; by tokens, where no single one makes a difference."""
        chunks = batch.chunks
        if len(chunks) < 2:
            return {chunk.request.id: added for chunk in chunks}
        weights = [max(0.0, whole - self.without(batch, chunk)) for chunk in chunks]
        if not any(weights):
            weights = [float(chunk.tokens) for chunk in chunks]
        scale = added / fsum(weights)
        return {chunk.request.id: scale * weight for chunk, weight in zip(chunks, weights, strict=True)}

    def without(self, batch: Batch, left_out: Chunk) -> float:
        """Seconds of a batch without one of its chunks."""
        return self.of(_batch(batch.decodes, batch.context, [chunk for chunk in batch.chunks if chunk is not left_out]))

    def decodes(self, decodes: int, context: int) -> float:
        """Seconds of a batch of decodes alone."""
        return self.of(_batch(decodes, context)) if decodes else 0.0

    def split(self, one: Iteration) -> tuple[Seconds, Seconds]:
        """An iteration's `base`: what a lone decode with no context takes; what the others and the contexts add."""
        lone, lone_communication, lone_host = self._flat(1)
        flat, communication, host = self._flat(one.decodes)
        whole = self.decodes(one.decodes, one.context)
        scale = one.base / whole
        communication, host = communication - lone_communication, host - lone_host
        floor = {
            "iteration": lone - lone_communication - lone_host,
            "communication": lone_communication,
            "host": lone_host,
        }
        more = {
            "decode_batch": flat - lone - communication - host,
            "decode_context": whole - flat,
            "communication": communication,
            "host": host,
        }
        return _scaled(floor, scale), _scaled(more, scale)

    def _flat(self, decodes: int) -> tuple[float, float, float]:
        """So many decodes that have no context: seconds in all, of communication, and of the host."""
        if decodes not in self.flat:
            batch = _batch(decodes, 0)
            seconds, parts = self.of(batch), self.model.parts(batch)
            scale = seconds / fsum(parts.values())
            told = seconds, scale * parts.get("communication", 0.0), scale * parts.get("host", 0.0)
            self.flat[decodes] = told
        return self.flat[decodes]


class Watched(Scheduler):
    """Schedules as `Scheduler` does, and puts what came late into `seen`."""

    def __init__(self, limits: Limits, seen: Seen, model: LatencyModel, sheet: Roofline | None) -> None:
        super().__init__(limits)
        self.seen = seen
        self.costs = Costs(model)
        self.sheet = sheet
        self.index = len(seen.iterations)
        self.iterations: list[Iteration] = []
        seen.iterations.append(self.iterations)
        self.starts: list[float] = []
        # of requests that have no token yet, or were preempted since their last: when, and what computed their chunks
        self.journeys: dict[int, list[float | Iteration]] = {}
        # the queue: when the scheduler was asked, what its head then waited for, and seconds of each until then
        self.blocked = "queue_others"
        self.asked = [-inf]
        self.answers = ["queue_others"]
        self.waited = {"queue_memory": [0.0], "queue_slots": [0.0]}

    def schedule(self, now: float) -> Batch | None:
        """Note what the head of the queue waits for; as nobody overtakes it, all wait for that."""
        self.blocked = "queue_others"
        batch = super().schedule(now)
        for cause, sums in self.waited.items():
            sums.append(sums[-1] + (now - self.asked[-1] if self.answers[-1] == cause else 0.0))
        self.asked.append(now)
        self.answers.append(self.blocked if self.waiting else "queue_others")
        return batch

    def admit(self, batch: Batch, budget: float, *, chunked: bool) -> None:
        """Note why the next one was not."""
        super().admit(batch, budget, chunked=chunked)
        left = budget - batch.decodes - batch.prefill_tokens
        if not self.waiting or left <= 0:
            return
        if self.held >= self.limits.max_sequences:
            self.blocked = "queue_slots"
            return
        tokens = self.waiting[0].to_prefill
        if (chunked or tokens <= left) and not self.blocks.allow(self.blocks.to_admit(tokens), alone=not self.held):
            self.blocked = "queue_memory"

    def commit(self, batch: Batch, now: float) -> list[Request]:
        """Cut the time since each late token's predecessor into its causes, before the tokens are emitted."""
        one = self._note(batch)
        if batch.group is not None:
            self._decoded(batch.group, one)
        for chunk in batch.chunks:
            self._computed(chunk, one)
        return super().commit(batch, now)

    def _preempt(self, victim: Request, group: Decodes) -> None:
        super()._preempt(victim, group)
        self.journeys.setdefault(victim.id, []).append(self.now)
        self.blocked = "queue_memory"

    def _note(self, batch: Batch) -> Iteration:
        """The batch as an iteration, its time cut up."""
        seen, costs = self.seen, self.costs
        whole = costs.of(batch)
        base = whole if not batch.chunks else min(whole, costs.decodes(batch.decodes, batch.context))
        lasted = batch.end - batch.start
        one_stage = len(batch.seconds) == 1
        expected = seen.scale * whole
        unmodelled = max(0.0, lasted - expected) if seen.measured else 0.0
        scale = (lasted - unmodelled) / whole if one_stage else 1.0
        own = costs.shares(batch, whole, (whole - base) * scale)
        again = fsum(own[chunk.request.id] for chunk in batch.chunks if chunk.request.preemptions)
        one = Iteration(
            start=batch.start,
            end=batch.end,
            first=lasted if one_stage else batch.seconds[0],
            decodes=batch.decodes,
            context=batch.context,
            chunks=tuple((chunk.request.id, chunk.tokens) for chunk in batch.chunks),
            own=own,
            base=base * scale,
            prefill=max(0.0, (whole - base) * scale - again),
            again=again,
            unmodelled=unmodelled,
            wait=0.0 if one_stage else max(0.0, lasted - whole),
        )
        self.iterations.append(one)
        self.starts.append(one.start)
        seen.work.append((sum(batch.seconds), self.sheet.work(batch) if self.sheet is not None else None))
        seen.modelled += whole
        seen.lasted += lasted
        return one

    def _decoded(self, group: Decodes, one: Iteration) -> None:
        """The decodes of the batch emit: which of them are late."""
        limit = self.seen.gap_limit
        apart: dict[float, list[Request]] = {}
        for request in group.late:
            apart.setdefault(request.last_token, []).append(request)
        if one.end - group.last > limit:
            others = {request.id for request in group.late}
            apart[group.last] = [request for request in group.members.values() if request.id not in others]
        for since, requests in apart.items():
            measured = [request for request in requests if request.measured]
            if one.end - since > limit and measured:
                floor, more = self.costs.split(one)
                ahead = self._ahead(since, one.start)
                brought = {
                    "prefill_beside": one.prefill,
                    "prefill_ahead": ahead["prefill"],
                    "recomputation": one.again + ahead["again"],
                    "pipeline": ahead["pipeline"] + one.wait,
                    "unmodelled": ahead["unmodelled"] + one.unmodelled,
                }
                tokens = [group.emitted(request) + 1 for request in measured]
                self.seen.gaps.append(self._late(measured, tokens, since, (floor, more, brought)))

    def _computed(self, chunk: Chunk, one: Iteration) -> None:
        """A chunk is computed; if it completes a prefill, its request emits: is it late."""
        request = chunk.request
        journey = self.journeys.setdefault(request.id, [])
        journey.append(one)
        if chunk.start + chunk.tokens < request.to_prefill:
            return
        del self.journeys[request.id]
        if not request.measured:
            return
        if request.first_token is None:
            if one.end - request.arrival > self.seen.ttft_limit:
                spent = self._walked(request, journey)
                beside = ("prefill", "again", "base", "ahead")
                brought = {cause: spent[cause] for cause in ("queue_memory", "queue_slots", "queue_others")} | {
                    "interleaving": fsum(spent[what] for what in beside) - spent["own"] - spent["lost"],
                    "recomputation": spent["lost"],
                    "pipeline": spent["pipeline"],
                    "unmodelled": spent["unmodelled"],
                }
                levels = {"own_prefill": spent["own"]}, brought
                self.seen.ttfts.append(self._late([request], [1], request.arrival, levels))
        elif one.end - request.last_token > self.seen.gap_limit:
            spent = self._walked(request, journey)
            brought = {
                "memory": spent["queue_memory"],
                "recomputation": spent["again"] + spent["base"],
                "prefill_beside": spent["prefill"],
                "prefill_ahead": spent["ahead"],
                "pipeline": spent["pipeline"],
                "unmodelled": spent["unmodelled"],
            }
            self.seen.gaps.append(self._late([request], [request.emitted + 1], request.last_token, (brought,)))

    def _walked(self, request: Request, journey: Sequence[float | Iteration]) -> Seconds:
        """What a request went through until its prefill was complete, since it arrived or emitted its last token.

        `prefill`, `again` and `base` are of the iterations that it was in; `own` of it is of its chunks, and `lost` is
        of those that a preemption undid. `ahead` are prompts of iterations that it was not in, all else of these is
        `again` or `base`.
        """
        spent: Seconds = defaultdict(float)
        unscheduled = queued = request.first_token is None
        at = request.arrival if unscheduled else request.last_token
        for event in journey:
            until = event.start if isinstance(event, Iteration) else event
            if unscheduled:
                _add(spent, self._queued(at, until))
            elif queued:
                spent["queue_memory"] += until - at
            else:
                ahead = self._ahead(at, until)
                spent["ahead"] += ahead.pop("prefill")
                _add(spent, ahead)
            unscheduled, queued = False, not isinstance(event, Iteration)
            if isinstance(event, Iteration):
                spent["own"] += event.own[request.id]
                for what in ("prefill", "again", "base", "unmodelled"):
                    spent[what] += getattr(event, what)
                spent["pipeline"] += event.wait
                at = event.end
            else:
                spent["lost"] += spent.pop("own", 0.0)
                at = event
        return spent

    def _queued(self, since: float, until: float) -> Seconds:
        """What the queue waited for."""
        told = {cause: self._waited(cause, until) - self._waited(cause, since) for cause in self.waited}
        return told | {"queue_others": until - since - sum(told.values())}

    def _waited(self, cause: str, time: float) -> float:
        """Seconds until then that the queue waited for one thing."""
        last = bisect_right(self.asked, time) - 1
        so_far = self.waited[cause][last]
        return so_far + (time - self.asked[last]) if self.answers[last] == cause else so_far

    def _ahead(self, since: float, until: float) -> Seconds:
        """Where the time went of a request that could have been in a batch, and was not: what the first stage did with
        batches that were launched instead. For the rest of it that was busy with what it had, or the pipeline full."""
        spent = {"prefill": 0.0, "again": 0.0, "base": 0.0, "unmodelled": 0.0}
        for number in range(*self._between(since, until)):
            one = self.iterations[number]
            share = one.first / (one.prefill + one.again + one.base + one.unmodelled)
            for what in spent:
                spent[what] += share * getattr(one, what)
        return spent | {"pipeline": until - since - fsum(spent.values())}

    def _between(self, since: float, until: float) -> tuple[int, int]:
        return bisect_left(self.starts, since), bisect_left(self.starts, until)

    def _late(self, requests: Sequence[Request], tokens: Sequence[int], since: float, levels: Levels) -> Late:
        """A late token of each, which came with the newest iteration."""
        until = self.iterations[-1].end
        first, _ = self._between(since, until)
        ids = tuple(request.id for request in requests)
        clean = fitted(levels, until - since)
        return Late(self.index, ids, tuple(tokens), since, until, clean, first, len(self.iterations))


def _batch(decodes: int, context: int, chunks: Sequence[Chunk] = ()) -> Batch:
    """A batch that nobody scheduled."""
    batch = Batch()
    batch.decodes, batch.context, batch.chunks = decodes, context, list(chunks)
    for chunk in chunks:
        batch.prefill_tokens += chunk.tokens
        batch.attention += chunk.tokens * (chunk.start + chunk.tokens / 2)
    return batch


def _add(spent: Seconds, more: Seconds) -> None:
    for what, seconds in more.items():
        spent[what] += seconds


def _scaled(seconds: Seconds, scale: float) -> Seconds:
    return {key: value * scale for key, value in seconds.items()}
