"""When each token came: what the sums of `decodes` leave out, logged where a result is to have it.

A request decodes in stretches: it joins a group, emits at so many of the group's steps, and leaves. A group logs when
it took its steps and a request its stretches, so that an iteration costs one number more, whatever its batch.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.decodes import Decodes
from sim.request import Batch, Request

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class TokenLog:
    """The stretches of a run, in order of their ends, and the times of every group's steps; 48 bytes a stretch."""

    def __init__(self) -> None:
        self.ids = array("q")
        self.emitted = array("q")  # tokens that the request had emitted when it joined
        self.since = array("d")  # when the newest of them came
        self.groups = array("q")
        self.entered = array("q")  # it emitted at the group's steps entered + 1 … left
        self.left = array("q")
        self.times: list[array[float]] = []  # of each group: when it took step 1, 2, …

    def group(self, block_tokens: int) -> Logged:
        """A new group of decodes."""
        return Logged(block_tokens, self)

    def stretches(self) -> Stretches:
        """All stretches as arrays, those of a request together and in order."""
        ids = np.frombuffer(self.ids, dtype=np.int64)
        order = np.argsort(ids, kind="stable")
        column = {name: np.frombuffer(getattr(self, name), dtype=np.int64)[order] for name in ("emitted", "groups")}
        entered, left = (np.frombuffer(each, dtype=np.int64)[order] for each in (self.entered, self.left))
        lengths = [len(times) for times in self.times]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[column["groups"]].astype(np.int64)
        times = np.concatenate([np.frombuffer(each) for each in self.times if each] or [np.empty(0)])
        since = np.frombuffer(self.since)[order]
        return Stretches(ids[order], column["emitted"], since, times, offsets + entered, offsets + left)


class Logged(Decodes):
    """A group that logs its steps and its members' stretches."""

    __slots__ = ("log", "number", "times")

    def __init__(self, block_tokens: int, log: TokenLog) -> None:
        super().__init__(block_tokens)
        self.log = log
        self.number = len(log.times)
        self.times = array("d")
        log.times.append(self.times)

    def advance(self, batch: Batch, now: float) -> list[Request]:
        """As any group does."""
        self.times.append(now)
        return super().advance(batch, now)

    def _let_go(self, request: Request) -> None:
        log = self.log
        log.ids.append(request.id)
        log.emitted.append(request.emitted)
        log.since.append(request.last_token)
        log.groups.append(self.number)
        log.entered.append(request.entered)
        log.left.append(self.step)
        super()._let_go(request)


@dataclass(frozen=True, slots=True)
class Stretches:
    """Row i: request `ids[i]` had `emitted[i]` tokens, the newest at `since[i]`, and emitted the following ones at
    `times[first[i]:end[i]]`. Rows of a request are together, in order; times are seconds of the clock."""

    ids: Ints
    emitted: Ints
    since: Floats
    times: Floats
    first: Ints
    end: Ints

    def newest(self) -> Floats:
        """When the last token of each stretch came; before it where it emitted none."""
        if not len(self.times):
            return self.since
        return np.where(self.end > self.first, self.times[np.maximum(self.end - 1, 0)], self.since)

    def between(self) -> npt.NDArray[np.bool_]:
        """Whether a token came between a stretch and the one before it, with the prefill after a preemption. (None
        came where the request only moved to another group.)"""
        had = self.emitted + self.end - self.first
        came = np.zeros(len(self.ids), dtype=bool)
        came[1:] = (self.ids[1:] == self.ids[:-1]) & (self.emitted[1:] == had[:-1] + 1)
        return came

    def last_alone(self, outputs: Ints, finish: Floats) -> npt.NDArray[np.bool_]:
        """Whether a stretch is the last of its request and the request's last token came after it, as above; `outputs`
        (tokens emitted) and `finish` (NaN where it did not) are by request."""
        had = self.emitted + self.end - self.first
        last = np.ones(len(self.ids), dtype=bool)
        last[:-1] = self.ids[1:] != self.ids[:-1]
        last &= (had == outputs[self.ids] - 1) & ~np.isnan(finish[self.ids])
        return last
