"""One replica: a scheduler and an executor, brought together by a SimPy process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from heapq import heappush
from typing import TYPE_CHECKING, Any

import simpy
from simpy.events import NORMAL, EventPriority

from sim.executor import Executor, Spent
from sim.request import Batch, Request
from sim.scheduler import Scheduler

if TYPE_CHECKING:
    from sim.record import Record

# What happens first at one instant: batches are committed, then requests arrive, then schedulers are asked.
COMMIT = NORMAL
ARRIVE = EventPriority(2)
ASK = EventPriority(3)
LAST = EventPriority(4)


class At(simpy.Event):
    """An event at an absolute time, to the bit, and in its place among those of the same instant.

    SimPy's own `schedule` takes a delay and adds it to the clock, and there are pairs of doubles whose difference,
    added to the one, never gives the other; so this one goes onto the environment's queue as `schedule` would put it.
    """

    def __init__(self, env: simpy.Environment, time: float, priority: EventPriority) -> None:
        self.env = env
        self.callbacks = []
        self._ok = True
        self._value = None
        heappush(env._queue, (time, priority, next(env._eid), self))


class Replica:
    """Serves the requests that are submitted to it. Its pipeline has `stages` stages, each one batch at a time, in
    order; at most `stages` batches are in flight."""

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        scheduler: Scheduler,
        executor: Executor,
        stages: int,
        ahead: bool,
        record: Record,
        on_finished: Callable[[Request], None] | None = None,
    ) -> None:
        self.env = env
        self.index = index
        self.scheduler = scheduler
        self.executor = executor
        self.record = record
        self.on_finished = on_finished
        self.ahead = ahead  # ask for a batch while the first stage is busy: the batch waits there
        self.in_flight: deque[Batch] = deque()
        self.free_at = [0.0] * stages  # when each stage ends what it was given
        self.wake: simpy.Event | None = None  # set while the scheduler's empty answer stands
        env.process(self.serve())

    def submit(self, request: Request) -> None:
        """A request arrives here, now."""
        request.replica = self.index
        self.scheduler.add(request)
        if self.wake is not None:
            self.wake.succeed()
            self.wake = None

    def serve(self) -> Generator[simpy.Event, Any, None]:
        """The main loop: schedule, execute, wait, commit.

        (`env._now` and `env._queue` are `env.now` and what `env.peek` looks at, without the calls: 5 % of a run.)
        """
        env, scheduler, in_flight, free_at = self.env, self.scheduler, self.in_flight, self.free_at
        stages, ahead = len(free_at), self.ahead
        queue = env._queue
        while True:
            now = env._now
            asked = len(in_flight) < stages and (ahead or free_at[0] <= now)
            batch = scheduler.schedule(now) if asked else None
            if batch is not None:
                self.launch(batch, now)
                in_flight.append(batch)
            if len(in_flight) == stages:
                yield At(env, in_flight[0].end, COMMIT)
            elif ahead and batch is not None:
                continue
            else:
                yield self.next_change(idle=asked and batch is None)
            now = env._now
            while in_flight and in_flight[0].end <= now:
                self.commit(in_flight.popleft())
            if queue and queue[0][0] <= now:  # all else of this instant happens before the scheduler is asked
                yield At(env, now, ASK)

    def launch(self, batch: Batch, now: float) -> None:
        """Send a batch down the pipeline: each stage starts when the batch is there and the one before it is done."""
        step = self.executor.execute(batch)
        batch.start = now
        batch.seconds = step.seconds
        if len(step.seconds) == 1:
            batch.end = self.free_at[0] = now + step.seconds[0]
        else:
            batch.stage_starts, batch.stage_ends = [], []
            ready = now
            for stage, (seconds, free) in enumerate(zip(step.seconds, self.free_at, strict=True)):
                start = ready if ready > free else free
                self.free_at[stage] = end = start + seconds
                batch.stage_starts.append(start)
                batch.stage_ends.append(end)
                ready = end + step.hop
            batch.end = batch.stage_ends[-1]
        if batch.admitted:
            self.record.admitted(batch.admitted)

    def next_change(self, *, idle: bool) -> simpy.Event:
        """With room in the pipeline: the next commit or release of stage 1, or an arrival where it is `idle`."""
        if not self.in_flight:
            self.wake = self.env.event()
            return self.wake
        end = self.in_flight[0].end
        if not idle:
            return At(self.env, min(end, self.free_at[0]), COMMIT)
        wake = self.wake = self.env.event()
        if self.free_at[0] > self.env.now:  # asked ahead
            end = min(end, self.free_at[0])
        timer = At(self.env, end, COMMIT)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: self._time_out(wake))
        return wake

    def _time_out(self, wake: simpy.Event) -> None:
        """A commit is due before anything arrived."""
        if self.wake is wake:
            self.wake = None
            wake.succeed()

    def commit(self, batch: Batch) -> None:
        """The last stage is done with a batch: its tokens are emitted."""
        finished = self.scheduler.commit(batch, batch.end)
        self.record.committed(self.index, batch)
        for request in finished:
            self.record.finished(request, batch.end)
            if self.on_finished is not None:
                self.on_finished(request)

    def cut_off(self) -> None:
        """The run is over: note how far the requests that are still here have come, and what the stages still did."""
        scheduler = self.scheduler
        here = [*scheduler.waiting, *scheduler.arriving, *scheduler.unfinished]
        groups = [batch.group for batch in self.in_flight] + [scheduler.decoding]
        for group in groups:
            if group is not None:
                group.settle()
                here.extend(group.members.values())
        here.extend(chunk.request for batch in self.in_flight for chunk in batch.chunks)
        for request in here:
            self.record.settled(request)
        over = self.record.last_commit
        for batch in self.in_flight:
            ends = batch.stage_ends if len(batch.seconds) > 1 else [batch.end]
            for end, seconds in zip(ends, batch.seconds, strict=True):
                self.record.busy += max(0.0, min(end, over) - (end - seconds))
        if (spent := self.executor.spent()) is not None:
            self.record.spent = spent.plus(self.record.spent or Spent())
        self.record.notes.extend(note for note in self.executor.notes() if note not in self.record.notes)
