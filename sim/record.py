"""The facts of a run, as flat columns: what happened when. Every metric is derived from them afterwards."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import inf, nan
from struct import Struct

from sim.executor import Spent
from sim.request import Batch, Request

COMPLETED, UNFINISHED, REFUSED = "completed", "unfinished", "refused"
STEP_COLUMNS = {
    "replica": "i4",
    "start_s": "f8",
    "end_s": "f8",
    "prefill_tokens": "i8",
    "decodes": "i4",
    "context_tokens": "i8",
    "chunks": "i4",
    "kv_blocks_used": "i8",
    "waiting": "i8",
    "preempted": "i4",
}  # a packed row, in NumPy's names
_STEP = Struct("<iddqiqiqqi")


class Record:
    """Facts per request (by id), gaps between tokens as (seconds, count) pairs, and a row per iteration if wanted.

    No per-token data: a run of a million requests keeps about 100 bytes for each, and 12 for each iteration.
    """

    def __init__(self, requests: int, *, keep_steps: bool = True) -> None:
        self.measured_from, self.measured_to = -inf, inf  # arrivals that count in the distributions
        self.offered = 0  # requests that arrived: ids 0, 1, … in order
        self.done = 0
        self.arrival = array("d", [nan]) * requests
        self.scheduled = array("d", [nan]) * requests
        self.first_token = array("d", [nan]) * requests
        self.finish = array("d", [nan]) * requests
        self.longest_gap = array("d", [nan]) * requests
        self.output = array("q", [0]) * requests  # tokens emitted
        self.preemptions = array("q", [0]) * requests
        self.replica = array("q", [-1]) * requests
        self.reasons: dict[int, str] = {}  # of refused requests
        self.gaps = array("d")
        self.gap_counts = array("i")
        self.steps = bytearray() if keep_steps else None  # rows of STEP_COLUMNS
        self.stage_ends = array("d")  # beside the steps, where there are several stages: one of each stage
        self.stage_seconds = array("d")
        self.iterations = 0
        self.preempted = 0
        self.kv_peak = 0
        self.busy = 0.0  # stage seconds
        self.last_commit = nan
        self.ended = nan
        self.spent: Spent | None = None
        self.notes: list[str] = []  # of the executors

    def arrived(self, request: Request) -> None:
        """A request was offered."""
        self.offered += 1
        self.arrival[request.id] = request.arrival

    def refused(self, request: Request, reason: str) -> None:
        """It can never be served."""
        self.reasons[request.id] = reason
        self.done += 1

    def admitted(self, requests: Iterable[Request]) -> None:
        """Requests were scheduled for the first time."""
        for request in requests:
            if request.scheduled is not None:
                self.scheduled[request.id] = request.scheduled

    def committed(self, replica: int, batch: Batch) -> None:
        """A batch emitted its tokens."""
        for request in batch.first:
            self.first_token[request.id] = batch.end
        self.iterations += 1
        self.last_commit = batch.end
        self.busy += sum(batch.seconds)
        if batch.gap_count:
            self.gaps.append(batch.gap)
            self.gap_counts.append(batch.gap_count)
        if batch.other_gaps:
            self.gaps.extend(batch.other_gaps)
            self.gap_counts.extend([1] * len(batch.other_gaps))
        if batch.preempted:
            self.preempted += batch.preempted
        if batch.blocks_used > self.kv_peak:
            self.kv_peak = batch.blocks_used
        if self.steps is not None:
            self.steps += _STEP.pack(
                replica,
                batch.start,
                batch.end,
                batch.prefill_tokens,
                batch.decodes,
                batch.context,
                len(batch.chunks),
                batch.blocks_used,
                batch.waiting,
                batch.preempted,
            )
            if len(batch.seconds) > 1:
                self.stage_ends.extend(batch.stage_ends)
                self.stage_seconds.extend(batch.seconds)

    def finished(self, request: Request, now: float) -> None:
        """A request emitted its last token."""
        self.done += 1
        self.finish[request.id] = now
        self.settled(request)

    def settled(self, request: Request) -> None:
        """All that will be known of a request, finished or cut off."""
        id = request.id
        self.replica[id] = request.replica
        self.output[id] = request.emitted
        self.preemptions[id] = request.preemptions
        self.longest_gap[id] = request.longest_gap
