"""The cluster: arrivals, a router and replicas under one clock, until every request is done."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy
from simpy.core import StopSimulation
from simpy.rt import RealtimeEnvironment

from sim.decodes import Decodes
from sim.executor import Executor
from sim.record import Record
from sim.replica import ARRIVE, LAST, At, Replica
from sim.request import Request
from sim.router import ROUTERS, Router
from sim.scheduler import Limits, Scheduler

if TYPE_CHECKING:
    from sim.workload import Workload

EVENTS_BETWEEN_LOOKS = 20_000  # how often a watcher sees the record; some 50 ms
Watch = Callable[[Record, float], bool]


@dataclass(frozen=True, slots=True)
class Deployment:
    """What serves: how many replicas of how many pipeline stages, under which limits, behind which router."""

    limits: Limits
    stages: int = 1
    replicas: int = 1
    router: str = "round-robin"
    ahead: bool = False


def serve(
    workload: Workload,
    deployment: Deployment,
    executor: Callable[[], Executor],
    *,
    routing: np.random.Generator,
    time_limit: float | None = None,
    warmup: float = 0.0,
    drain: float = 0.0,
    keep_steps: bool = True,
    keep_tokens: bool = False,
    wall_clock: bool = False,
    watch: Watch | None = None,
    scheduler: Callable[[Limits], Scheduler] | None = None,
) -> Record:
    """Run the workload to its end, or for `time_limit` seconds, or until `watch(record, now)` says to stop.

    Each replica gets its own `executor()` and its own scheduler, of `scheduler(limits)` where one is to be watched.
    Times are seconds of the clock: SimPy's, which skips idle time and lets an iteration last what its executor says, or
    with `wall_clock` the same clock bound to real time.
    """
    env: simpy.Environment = RealtimeEnvironment(strict=False) if wall_clock else simpy.Environment()
    record = Record(len(workload.prompts), keep_steps=keep_steps, keep_tokens=keep_tokens)
    arrivals = _Arrivals(env, workload, deployment.limits, record, warmup, drain)
    new_group = Decodes if record.tokens is None else record.tokens.group
    make = scheduler or partial(Scheduler, new_group=new_group)
    replicas = [
        Replica(
            *(env, index, make(deployment.limits), executor(), deployment.stages, deployment.ahead, record),
            arrivals.finished,
        )
        for index in range(deployment.replicas)
    ]
    arrivals.start(ROUTERS[deployment.router](replicas, routing))
    ends = [arrivals.all_done] if time_limit is None else [arrivals.all_done, At(env, time_limit, LAST)]
    for event in ends:
        assert event.callbacks is not None
        event.callbacks.append(StopSimulation.callback)
    _run(env, record, watch)
    record.ended = env.now
    for replica in replicas:
        replica.cut_off()
    return record


def _run(env: simpy.Environment, record: Record, watch: Watch | None) -> None:
    """All events in order, until none is left."""
    step = env.step
    try:
        while True:
            for _ in range(EVENTS_BETWEEN_LOOKS):
                step()
            if watch is not None and watch(record, env.now):
                return
    except StopSimulation:
        pass


class _Arrivals:
    """Brings the workload's requests to the router: at their times, or a fixed number of them in a closed loop."""

    def __init__(
        self,
        env: simpy.Environment,
        workload: Workload,
        limits: Limits,
        record: Record,
        warmup: float,
        drain: float,
    ) -> None:
        self.env = env
        self.workload = workload
        self.refusals = limits.refusals(workload.prompts, workload.outputs)
        self.record = record
        self.route: Router
        first, last = (0.0, inf) if workload.arrivals is None else (workload.arrivals[0], workload.arrivals[-1])
        record.measured_from, record.measured_to = float(first) + warmup, float(last) - drain
        self.issued = 0
        self.all_done = env.event()

    def start(self, route: Router) -> None:
        """Begin, now that there are replicas to route to."""
        self.route = route
        if self.workload.arrivals is not None:
            self.env.process(self._open())
        else:
            for _ in range(min(self.workload.concurrency or 1, len(self.workload.prompts))):
                self._issue_later(0.0)

    def finished(self, _: Request) -> None:
        """In a closed loop each finish, or refusal, issues the next request `think` seconds later."""
        if self.record.done == len(self.workload.prompts):
            self.all_done.succeed()
        elif self.workload.arrivals is None and self.issued < len(self.workload.prompts):
            self._issue_later(self.workload.think)

    def _open(self) -> Generator[simpy.Event, Any, None]:
        for id, (time, prompt, output, session) in enumerate(_rows(self.workload)):
            if time > self.env.now:
                yield At(self.env, time, ARRIVE)
            self._arrive(id, time, prompt, output, session)

    def _issue_later(self, delay: float) -> None:
        id = self.issued
        self.issued += 1
        prompt, output = int(self.workload.prompts[id]), int(self.workload.outputs[id])
        sessions = self.workload.sessions
        session = None if sessions is None else int(sessions[id])
        time = self.env.now + delay
        event = At(self.env, time, ARRIVE)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: self._arrive(id, time, prompt, output, session))

    def _arrive(self, id: int, time: float, prompt: int, output: int, session: int | None) -> None:
        measured = self.record.measured_from <= time <= self.record.measured_to
        request = Request(id, time, prompt, output, measured=measured, session=session)
        self.record.arrived(request)
        if id in self.refusals:
            self.record.refused(request, self.refusals[id])
            self.finished(request)
        else:
            self.route(request).submit(request)


def _rows(workload: Workload, at_once: int = 65536) -> Iterator[tuple[float, int, int, int | None]]:
    """Arrival, prompt, output and session of every request, as Python's own numbers, some at a time."""
    assert workload.arrivals is not None
    for start in range(0, len(workload.prompts), at_once):
        part = slice(start, start + at_once)
        times = workload.arrivals[part].tolist()
        sessions = [None] * len(times) if workload.sessions is None else workload.sessions[part].tolist()
        yield from zip(times, workload.prompts[part].tolist(), workload.outputs[part].tolist(), sessions, strict=True)
