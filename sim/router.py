"""Routers: which replica a request goes to when it arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sim.request import Request

if TYPE_CHECKING:
    from sim.replica import Replica

Router = Callable[[Request], "Replica"]


def round_robin(replicas: Sequence[Replica], rng: np.random.Generator) -> Router:  # noqa: ARG001
    """In turn, by order of arrival."""
    count, turn = len(replicas), -1

    def choose(_: Request) -> Replica:
        nonlocal turn
        turn = (turn + 1) % count
        return replicas[turn]

    return choose


def outstanding(replica: Replica) -> int:
    """Prompt tokens not yet computed, and one per running decode; what is still to be emitted is not known."""
    return replica.scheduler.outstanding


def least_loaded(replicas: Sequence[Replica], rng: np.random.Generator) -> Router:  # noqa: ARG001
    """The one with the fewest outstanding tokens; ties go to the lowest index."""
    return lambda _: min(replicas, key=outstanding)


def power_of_two(replicas: Sequence[Replica], rng: np.random.Generator) -> Router:
    """The less loaded of two drawn at random (Mitzenmacher 2001); ties go to the lower index."""
    if len(replicas) == 1:
        return lambda _: replicas[0]

    def choose(_: Request) -> Replica:
        first = int(rng.integers(len(replicas)))
        second = int(rng.integers(len(replicas) - 1))
        second += second >= first
        low, high = sorted((first, second))
        return min(replicas[low], replicas[high], key=outstanding)

    return choose


def sticky(replicas: Sequence[Replica], rng: np.random.Generator) -> Router:
    """Where the request's session went before; a new session, or a request without one, goes to the least loaded."""
    choose_new = least_loaded(replicas, rng)
    homes: dict[int, Replica] = {}

    def choose(request: Request) -> Replica:
        if request.session is None:
            return choose_new(request)
        if request.session not in homes:
            homes[request.session] = choose_new(request)
        return homes[request.session]

    return choose


ROUTERS: dict[str, Callable[[Sequence[Replica], np.random.Generator], Router]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "power-of-two": power_of_two,
    "sticky": sticky,
}
