"""A naive reference for the semantics of one replica: loops over requests, no grouping, standard library only.

It was written from the text of the contract alone and shares no code with the simulator, so that the two can be
compared exactly: the same requests and settings must give the same doubles.

Readings
--------
Where the contract leaves room, the most literal reading was taken:

 1. A refused arrival is an arrival: it ends an empty answer, so the scheduler is asked again at that instant.
 2. `too_long` is looked at before `never_fits`; a request that is both counts as `too_long`.
 3. The decodes of stall-free are never limited by `token_budget` (one for every running request); they only use it up.
 4. A new request is admitted only if its first chunk has at least one token, so not when the budget is spent.
 5. Admission stops at the first request of the queue that does not fit; nothing overtakes the head.
 6. The watermark is floor(watermark * num_blocks), the product taken in doubles. It is waived for an admission made
    while no request is admitted at all: those in flight and those just admitted to this batch count as admitted.
 7. `max_sequences` counts every admitted request, in flight or not.
 8. The order of a batch is its decodes, then its chunks, each in order of admission. Requests that end in the same
    batch issue their successors (closed loop) in that order.
 9. A chunk's m0 counts the tokens computed since the latest admission; a prompt is done when the p + k tokens that were
    to be prefilled at that admission are computed. C takes p and k as they stand when the batch is scheduled.
10. alternating: the turn after a batch is the other one. If both turns find nothing, the turn has passed twice and
    stands where it was. If prompts are unfinished, the turn admits nothing, even with budget left over. An unfinished
    prompt in flight is invisible, so it does not keep new requests out.
11. alternating, as stall-free, admits nothing new in an iteration that preempted (a decode turn that emptied itself and
    passed on); chunks of prompts already admitted may still go. The next iteration is free to admit.
12. stall-free: after a preemption, chunks of prompts already admitted still go in the same batch.
13. Time limit: the instant equal to the limit is a whole one (commits, arrivals, and the scheduler is asked), so a
    request can be `scheduled` exactly then; its batch is not committed. Requests that arrive later are not offered and
    have no outcome. `scheduled` and `preemptions` count whether or not the batch is committed before the limit.
14. Closed loop: the first min(concurrency, number of requests) ids are issued at 0, before any of them is refused.
15. A scheduling call that preempts and yields no batch leaves its count to the next row.
16. Batch waiting counts the scheduling calls in which prompts could go and were kept back, since the last call in which
    none could or they went. Prompts that have no slot, no memory, or no budget beside the decodes could not go, and new
    ones could not after a preemption; the watermark holds, since decodes are admitted requests.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

POLICIES = ("prefill-first", "orca", "decode-first", "stall-free", "alternating")
RESERVING = ("orca", "decode-first")


@dataclass
class Settings:
    """One replica: its policy, memory, limits, pipeline, affine latency and kind of load."""

    policy: str
    num_blocks: int
    block_tokens: int = 16
    watermark: float = 0.01
    max_sequences: int = 128
    max_model_tokens: int = 8192
    max_batch_tokens: int = 8192
    token_budget: int = 512
    batch_wait_iterations: int = 0
    batch_wait_ratio: float = 0.0
    stages: int = 1
    ahead: bool = False  # ask although the first stage is busy
    hop: float = 0.0
    step: float = 0.0
    token: float = 0.0
    sequence: float = 0.0
    context: float = 0.0
    prefill_attention: float = 0.0
    time_limit: float | None = None
    concurrency: int | None = None
    think: float = 0.0


@dataclass
class Outcome:
    """What became of one request."""

    id: int
    arrival: float
    prompt: int
    output: int
    status: str = "unfinished"
    reason: str | None = None
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    token_times: list[float] = field(default_factory=list)


@dataclass
class StepRow:
    """One committed batch; blocks and queue are those just after it was scheduled."""

    start: float
    end: float
    prefill_tokens: int
    decodes: int
    context_tokens: int
    chunks: list[tuple[int, int, int]]
    decode_ids: list[int]
    kv_blocks_used: int
    waiting: int
    preempted: int


@dataclass(eq=False)
class Request:
    """The state of a request that was queued: `blocks`, `to_prefill` and `computed` are of its latest admission."""

    outcome: Outcome
    blocks: int = 0
    to_prefill: int = 0
    computed: int = 0
    in_flight: bool = False

    @property
    def length(self) -> int:
        """p + k: the prompt and the tokens emitted so far."""
        return self.outcome.prompt + len(self.outcome.token_times)

    @property
    def prompt_done(self) -> bool:
        """Whether everything that was to be prefilled at the latest admission is computed."""
        return self.computed == self.to_prefill


@dataclass
class Batch:
    """The answer of the scheduler: one decode for some requests, a chunk (m0, m) for others."""

    decodes: list[Request] = field(default_factory=list)
    chunks: list[tuple[Request, int, int]] = field(default_factory=list)
    preempted: int = 0

    def requests(self) -> list[Request]:
        """Every request of the batch, in the order of the batch."""
        return self.decodes + [request for request, _, _ in self.chunks]

    def prefill_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(m for _, _, m in self.chunks)

    def tokens(self) -> int:
        """Tokens of the batch: those of the chunks and one for each decode."""
        return self.prefill_tokens() + len(self.decodes)


class Scheduler:
    """The five policies over one waiting queue, one list of admitted requests and one pool of blocks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.waiting: deque[Request] = deque()
        self.admitted: list[Request] = []  # in order of the latest admission, those in flight included
        self.prefill_turn = True  # alternating only
        self.kept_back = 0  # stall-free only

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold so many tokens: the ceiling of the quotient."""
        return (tokens + self.settings.block_tokens - 1) // self.settings.block_tokens

    def free(self) -> int:
        """Blocks held by no admitted request."""
        return self.settings.num_blocks - sum(request.blocks for request in self.admitted)

    def refusal(self, prompt: int, output: int) -> str | None:
        """Why a request is refused on arrival, or None."""
        settings = self.settings
        if prompt + output > settings.max_model_tokens:
            return "too_long"
        if self.blocks_of(prompt + output - 1) > settings.num_blocks:
            return "never_fits"
        if settings.policy in RESERVING and self.blocks_of(settings.max_model_tokens) > settings.num_blocks:
            return "never_fits"
        return None

    def schedule(self) -> Batch:
        """The next batch; it may be empty."""
        batch = Batch()
        if self.settings.policy == "prefill-first":
            self.admit_whole_prompts(batch, self.settings.max_batch_tokens)
            if not batch.chunks:
                self.add_decodes(batch)
        elif self.settings.policy == "orca":
            self.add_decodes(batch)
            self.admit_whole_prompts(batch, None)
        elif self.settings.policy == "decode-first":
            self.add_decodes(batch)
            if not batch.decodes:
                self.admit_whole_prompts(batch, None)
        elif self.settings.policy == "stall-free":
            self.add_decodes(batch)
            if self.keeps_prompts_back(batch):
                self.kept_back += 1
                return batch
            self.kept_back = 0
            self.continue_prompts(batch)
            if not batch.preempted:
                self.admit_chunks(batch)
        elif self.settings.policy == "alternating":
            self.alternate(batch)
        return batch

    def alternate(self, batch: Batch) -> None:
        """Give each turn one chance, the one that is due first; a batch leaves the next turn to the other kind."""
        for _ in range(2):
            if self.prefill_turn:
                self.continue_prompts(batch)
                if not batch.chunks and not batch.preempted:
                    self.admit_chunks(batch)
            else:
                self.add_decodes(batch)
            self.prefill_turn = not self.prefill_turn
            if batch.tokens() > 0:
                return

    def keeps_prompts_back(self, batch: Batch) -> bool:
        """Whether what could go beside the decodes is too little for a batch, and has not waited long enough."""
        settings, decodes = self.settings, len(batch.decodes)
        if decodes == 0 or decodes >= settings.token_budget or self.kept_back >= settings.batch_wait_iterations:
            return False
        unfinished = [request for request in self.admitted if not request.in_flight and not request.prompt_done]
        could_go = sum(request.to_prefill - request.computed for request in unfinished)
        blocks, admitted = 0, len(self.admitted)
        for request in [] if batch.preempted else self.waiting:
            blocks, admitted = blocks + self.blocks_of(request.length), admitted + 1
            spare = math.floor(settings.watermark * settings.num_blocks)
            if admitted > settings.max_sequences or self.free() - blocks < spare:
                break
            could_go += request.length
        return could_go > 0 and decodes + could_go < settings.batch_wait_ratio * settings.token_budget

    def add_decodes(self, batch: Batch) -> None:
        """One decode for every request that is not in flight and whose prompt is done, in order of admission."""
        for request in list(self.admitted):
            if request not in self.admitted or request.in_flight or not request.prompt_done:
                continue  # the first: it was preempted for an earlier decode of this loop
            if self.settings.policy not in RESERVING and not self.grow(request, batch):
                continue
            batch.decodes.append(request)

    def grow(self, request: Request, batch: Batch) -> bool:
        """Give a decode the blocks for its KV length, at the cost of others; False if it was its own victim."""
        if self.blocks_of(request.length) <= request.blocks:
            return True
        while self.free() < 1:
            in_batch = batch.requests()
            victim = [other for other in self.admitted if not other.in_flight and other not in in_batch][-1]
            self.preempt(victim)
            batch.preempted += 1
            if victim is request:
                return False
        request.blocks += 1
        return True

    def preempt(self, victim: Request) -> None:
        """Take away blocks and computed tokens, keep the emitted ones, and put it in front of the queue."""
        self.admitted.remove(victim)
        victim.blocks = 0
        victim.computed = 0
        victim.outcome.preemptions += 1
        self.waiting.appendleft(victim)

    def continue_prompts(self, batch: Batch) -> None:
        """The next chunk of each unfinished prompt that is not in flight, within the token budget."""
        for request in self.admitted:
            if not request.in_flight and not request.prompt_done:
                self.add_chunk(request, batch, self.settings.token_budget - batch.tokens())

    def admit_chunks(self, batch: Batch) -> None:
        """The first chunk of new requests while the token budget and the admission rules allow."""
        while self.settings.token_budget - batch.tokens() > 0 and self.admit_head():
            self.add_chunk(self.admitted[-1], batch, self.settings.token_budget - batch.tokens())

    def admit_whole_prompts(self, batch: Batch, limit: int | None) -> None:
        """Whole prompts from the head of the queue while the limit on tokens and the admission rules allow."""
        while self.waiting:
            if limit is not None and batch.tokens() + self.waiting[0].length > limit:
                return
            if not self.admit_head():
                return
            self.add_chunk(self.admitted[-1], batch, self.admitted[-1].to_prefill)

    def add_chunk(self, request: Request, batch: Batch, most: int) -> None:
        """A chunk of what is left of the prompt, `most` tokens at most; nothing if that is none."""
        m = min(request.to_prefill - request.computed, most)
        if m > 0:
            batch.chunks.append((request, request.computed, m))

    def admit_head(self) -> bool:
        """Admit the head of the queue if there is one and the sequences and the memory allow it."""
        settings = self.settings
        if not self.waiting or len(self.admitted) >= settings.max_sequences:
            return False
        request = self.waiting[0]
        if settings.policy in RESERVING:
            blocks, spare = self.blocks_of(settings.max_model_tokens), 0
        else:
            blocks, spare = self.blocks_of(request.length), math.floor(settings.watermark * settings.num_blocks)
            if not self.admitted:
                spare = 0
        if self.free() - blocks < spare:
            return False
        self.waiting.popleft()
        request.blocks = blocks
        request.to_prefill = request.length
        request.computed = 0
        self.admitted.append(request)
        return True


def duration_of(batch: Batch, settings: Settings) -> float:
    """The time of a batch in each stage: the affine formula, summed left to right."""
    tokens = batch.tokens()
    sequences = len(batch.requests())
    context = sum(request.length for request in batch.decodes)
    attention = sum(m * (m0 + m / 2) for _, m0, m in batch.chunks)
    return (
        settings.step
        + settings.token * tokens
        + settings.sequence * sequences
        + settings.context * context
        + settings.prefill_attention * attention
    )


class Simulation:
    """The clock: arrivals still to come, batches in flight and the end of the last batch of each stage."""

    def __init__(self, settings: Settings, requests: list[tuple[float, int, int]]) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings)
        self.lengths = [(prompt, output) for _, prompt, output in requests]
        self.outcomes: list[Outcome] = []
        self.rows: list[StepRow] = []
        self.in_flight: deque[tuple[Batch, StepRow]] = deque()
        self.stage_end = [-math.inf] * settings.stages
        self.preempted_since_row = 0
        if settings.concurrency is None:
            self.arrivals = deque(arrival for arrival, _, _ in requests)
        else:
            self.arrivals = deque([0.0] * min(settings.concurrency, len(requests)))
        self.issued = len(self.arrivals)

    def run(self) -> None:
        """Go from instant to instant until nothing is left to happen or the time limit is passed."""
        now = -math.inf
        while True:
            instants = [row.end for _, row in self.in_flight] + list(self.arrivals)
            if self.stage_end[0] > now:
                instants.append(self.stage_end[0])
            if not instants:
                return
            now = min(instants)
            if self.settings.time_limit is not None and now > self.settings.time_limit:
                return
            while self.in_flight and self.in_flight[0][1].end <= now:
                self.commit(*self.in_flight.popleft())
            while self.arrivals and self.arrivals[0] <= now:
                self.arrive(self.arrivals.popleft())
            while len(self.in_flight) < self.settings.stages and (self.settings.ahead or self.stage_end[0] <= now):
                if not self.ask(now) or not self.settings.ahead:
                    break

    def arrive(self, arrival: float) -> None:
        """Queue or refuse the next request; its id is the number of those that arrived before it."""
        prompt, output = self.lengths[len(self.outcomes)]
        outcome = Outcome(len(self.outcomes), arrival, prompt, output)
        self.outcomes.append(outcome)
        outcome.reason = self.scheduler.refusal(prompt, output)
        if outcome.reason is None:
            self.scheduler.waiting.append(Request(outcome))
        else:
            outcome.status = "refused"
            self.issue_next(arrival)

    def issue_next(self, now: float) -> None:
        """Closed loop: a finish or a refusal issues the next request, if any is left, `think` seconds later."""
        if self.settings.concurrency is not None and self.issued < len(self.lengths):
            self.issued += 1
            self.arrivals.append(now + self.settings.think)

    def ask(self, now: float) -> bool:
        """Ask the scheduler once and send its batch, if there is one, through the stages."""
        batch = self.scheduler.schedule()
        self.preempted_since_row += batch.preempted
        if batch.tokens() == 0:
            return False
        duration = duration_of(batch, self.settings)
        arrival = now
        for stage in range(self.settings.stages):
            self.stage_end[stage] = max(arrival, self.stage_end[stage]) + duration
            arrival = self.stage_end[stage] + self.settings.hop
        for request in batch.requests():
            request.in_flight = True
            if request.outcome.scheduled is None:
                request.outcome.scheduled = now
        row = StepRow(
            start=now,
            end=self.stage_end[-1],
            prefill_tokens=batch.prefill_tokens(),
            decodes=len(batch.decodes),
            context_tokens=sum(request.length for request in batch.decodes),
            chunks=[(request.outcome.id, m0, m) for request, m0, m in batch.chunks],
            decode_ids=[request.outcome.id for request in batch.decodes],
            kv_blocks_used=self.settings.num_blocks - self.scheduler.free(),
            waiting=len(self.scheduler.waiting),
            preempted=self.preempted_since_row,
        )
        self.preempted_since_row = 0
        self.in_flight.append((batch, row))
        return True

    def commit(self, batch: Batch, row: StepRow) -> None:
        """The batch left the last stage: record it, emit its tokens and let finished requests go."""
        self.rows.append(row)
        for request, _, m in batch.chunks:
            request.computed += m
        for request in batch.requests():
            request.in_flight = False
            if not request.prompt_done:
                continue  # a chunk that leaves prompt tokens over emits nothing
            outcome = request.outcome
            outcome.token_times.append(row.end)
            if outcome.first_token is None:
                outcome.first_token = row.end
            if len(outcome.token_times) == outcome.output:
                outcome.status = "completed"
                outcome.finished = row.end
                self.scheduler.admitted.remove(request)
                self.issue_next(row.end)


def simulate(settings: Settings, requests: list[tuple[float, int, int]]) -> tuple[list[Outcome], list[StepRow]]:
    """Run the requests (arrival, prompt, output), sorted by arrival, to the end: outcomes by id, rows by commit."""
    if settings.policy not in POLICIES:
        raise ValueError(f"unknown policy {settings.policy!r}")
    if settings.policy == "prefill-first" and settings.max_batch_tokens < settings.max_model_tokens:
        raise ValueError("prefill-first needs max_batch_tokens >= max_model_tokens")
    if settings.step + settings.token <= 0:
        raise ValueError("step + token must be > 0")
    simulation = Simulation(settings, requests)
    simulation.run()
    return simulation.outcomes, simulation.rows
