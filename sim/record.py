"""The facts of a run, as flat columns: what happened when. Every metric is derived from them afterwards."""

from __future__ import annotations

from array import array
from math import nan

from sim.executor import Spent, Step
from sim.request import Batch, Request

COMPLETED, UNFINISHED = "completed", "unfinished"
STEP_COLUMNS = (
    "replica",
    "start_s",
    "end_s",
    "prefill_tokens",
    "decodes",
    "context_tokens",
    "chunks",
    "kv_blocks_used",
    "waiting",
    "preempted",
)


class Record:
    """Facts per request (by id), gaps between tokens as (seconds, count) pairs, and a row per iteration if wanted.

    No per-token data: a run of a million requests keeps about 100 bytes for each, and 16 for each iteration.
    """

    def __init__(self, requests: int, *, keep_steps: bool = True) -> None:
        self.offered = 0
        self.done = 0
        self.arrival = array("d", [nan]) * requests
        self.scheduled = array("d", [nan]) * requests
        self.first_token = array("d", [nan]) * requests
        self.finish = array("d", [nan]) * requests
        self.longest_gap = array("d", [nan]) * requests
        self.prompt = array("q", [0]) * requests
        self.output = array("q", [0]) * requests  # tokens emitted
        self.preemptions = array("q", [0]) * requests
        self.replica = array("q", [-1]) * requests
        self.reasons: dict[int, str] = {}  # of refused requests
        self.gaps = array("d")
        self.gap_counts = array("q")
        self.steps = array("d") if keep_steps else None  # STEP_COLUMNS, row after row
        self.iterations = 0
        self.preempted = 0
        self.kv_peak = 0
        self.busy = 0.0  # stage seconds
        self.last_commit = nan
        self.ended = nan
        self.spent = [0.0] * len(Spent._fields)

    def arrived(self, request: Request) -> None:
        """A request was offered."""
        self.offered += 1
        self.arrival[request.id] = request.arrival
        self.prompt[request.id] = request.prompt

    def refused(self, request: Request, reason: str) -> None:
        """It can never be served."""
        self.reasons[request.id] = reason
        self.done += 1

    def launched(self, batch: Batch, step: Step) -> None:
        """A batch was given to the executor."""
        for chunk in batch.chunks:
            request = chunk.request
            if request.scheduled is not None:
                self.scheduled[request.id] = request.scheduled
        batch.seconds = step.seconds
        if step.spent is not None:
            spent = self.spent
            for i, amount in enumerate(step.spent):
                spent[i] += amount

    def committed(self, replica: int, batch: Batch) -> None:
        """A batch emitted its tokens."""
        self.iterations += 1
        self.last_commit = batch.end
        for seconds in batch.seconds:
            self.busy += seconds
        if batch.gap_count:
            self.gaps.append(batch.gap)
            self.gap_counts.append(batch.gap_count)
        for gap in batch.other_gaps:
            self.gaps.append(gap)
            self.gap_counts.append(1)
        if batch.preempted:
            self.preempted += batch.preempted
        if batch.blocks_used > self.kv_peak:
            self.kv_peak = batch.blocks_used
        if self.steps is not None:
            self.steps.extend(
                (
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
            )

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
        if request.first_token is not None:
            self.first_token[id] = request.first_token
