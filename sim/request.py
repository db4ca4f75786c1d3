"""A request, and what one iteration works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.decodes import Decodes


class Request:
    """One prompt and the answer it will get; mutable, owned by one scheduler at a time.

    A request has no phases: it has tokens to prefill (the prompt, plus what it had emitted when it was last
    preempted) and a count of those computed. While it decodes, its group counts for it (`sim.decodes`), and
    `emitted`, `last_token` and `longest_gap` hold what was true when it joined. Times are in seconds.
    """

    __slots__ = (
        "admission",
        "arrival",
        "computed",
        "emitted",
        "entered",
        "first_token",
        "id",
        "last_token",
        "longest_gap",
        "measured",
        "output",
        "preemptions",
        "prompt",
        "replica",
        "scheduled",
        "session",
        "steady_from",
    )

    def __init__(
        self, id: int, arrival: float, prompt: int, output: int, *, measured: bool = True, session: int | None = None
    ) -> None:
        self.id = id
        self.arrival = arrival
        self.prompt = prompt
        self.output = output
        self.session = session
        self.measured = measured  # False during warm-up and drain: simulated, left out of the distributions
        self.replica = 0
        self.admission = -1  # number of the latest admission at its replica; meaningless while it waits
        self.computed = 0  # tokens prefilled since the latest admission
        self.emitted = 0
        self.preemptions = 0
        self.scheduled: float | None = None  # first time
        self.first_token: float | None = None
        self.last_token = 0.0  # meaningless while nothing was emitted
        self.longest_gap = 0.0
        self.entered = 0  # its group's step when it joined
        self.steady_from = 0  # its gaps are its group's from after this step of the group

    @property
    def to_prefill(self) -> int:
        """Tokens that an admission has to prefill: the prompt and every token emitted before."""
        return self.prompt + self.emitted

    def __repr__(self) -> str:
        return f"Request({self.id}, arrival={self.arrival:g}, prompt={self.prompt}, output={self.output})"


@dataclass(slots=True)  # not frozen: that would treble the cost of making one
class Chunk:
    """`tokens` of a request's prefill, after `start` that were computed before."""

    request: Request
    start: int
    tokens: int


class Batch:
    """What one iteration works on; the scheduler fills it, and `commit` adds what came of it.

    `decodes` requests decode, with `context` tokens of KV among them (each its prompt and emitted tokens);
    `attention` is the sum over chunks of m·(m0 + m/2) for m tokens after m0. All counts are of tokens unless named
    otherwise. The facts below are there once they are facts: of scheduling, then of execution, then of the commit.
    """

    __slots__ = (
        "admitted",
        "attention",
        "blocks_used",
        "chunks",
        "context",
        "decodes",
        "end",
        "first",
        "gap",
        "gap_count",
        "group",
        "other_gaps",
        "preempted",
        "prefill_tokens",
        "seconds",
        "stage_ends",
        "stage_starts",
        "start",
        "waiting",
    )
    blocks_used: int  # just after scheduling
    waiting: int
    start: float  # of its first stage
    end: float  # of its last stage
    seconds: tuple[float, ...]  # that each stage works on it
    stage_starts: list[float]  # with several stages only, as the next
    stage_ends: list[float]
    gap: float  # seconds since the group's last tokens, of `gap_count` measured requests

    def __init__(self) -> None:
        self.group: Decodes | None = None
        self.decodes = 0
        self.context = 0
        self.chunks: list[Chunk] = []
        self.prefill_tokens = 0
        self.attention = 0.0
        self.preempted = 0
        self.gap_count = 0
        self.admitted: Sequence[Request] = ()  # for the first time, with this batch
        self.first: Sequence[Request] = ()  # whose first token came with it
        self.other_gaps: Sequence[float] = ()

    def add(self, request: Request, tokens: int) -> None:
        """Put the next `tokens` of a request's prefill into the batch."""
        start = request.computed
        self.chunks.append(Chunk(request, start, tokens))
        self.prefill_tokens += tokens
        self.attention += tokens * (start + tokens / 2)

    @property
    def tokens(self) -> int:
        """Tokens computed: one per decode, and those of the chunks."""
        return self.decodes + self.prefill_tokens

    @property
    def sequences(self) -> int:
        """Requests in the batch."""
        return self.decodes + len(self.chunks)

    def __repr__(self) -> str:
        chunks = ", ".join(f"{c.request.id}[{c.start}:{c.start + c.tokens}]" for c in self.chunks)
        return f"Batch(decodes={self.decodes}, context={self.context}, chunks=[{chunks}])"
