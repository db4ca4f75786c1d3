"""Who is to blame for lateness: time beyond a limit, apportioned to what the time was spent on.

What the time was spent on is given in levels, from what cannot be helped to what only others brought. The limit is
filled from the first level up, and what does not fit in is late: so a level is blamed for what is no longer late
without it and those after it. Within a level the blame is shared in proportion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum

Seconds = dict[str, float]  # by cause
Levels = Sequence[Seconds]

GAP_CAUSES = (
    "prefill_beside",
    "prefill_ahead",
    "memory",
    "recomputation",
    "pipeline",
    "decode_batch",
    "decode_context",
    "iteration",
    "communication",
    "host",
    "unmodelled",
)
TTFT_CAUSES = (
    "queue_memory",
    "queue_slots",
    "queue_others",
    "own_prefill",
    "interleaving",
    "recomputation",
    "pipeline",
    "unmodelled",
)


def total(levels: Levels) -> Seconds:
    """Seconds of each cause over all levels."""
    summed: Seconds = {}
    for level in levels:
        for cause, seconds in level.items():
            summed[cause] = summed.get(cause, 0.0) + seconds
    return summed


def fitted(levels: Iterable[Seconds], seconds: float) -> tuple[Seconds, ...]:
    """The levels without rounding: no part below 0, and together exactly the `seconds` that were spent."""
    clean = [{cause: max(0.0, part) for cause, part in level.items()} for level in levels]
    scale = seconds / fsum(part for level in clean for part in level.values())
    assert abs(scale - 1) < 1e-6, f"the causes of {seconds} s are {seconds / scale} s"
    return tuple({cause: part * scale for cause, part in level.items()} for level in clean)


def beyond(levels: Levels, limit: float) -> Seconds:
    """Seconds beyond the limit by cause; they add up to all that is beyond it."""
    late: Seconds = {}
    room = limit
    for level in levels:
        spent = fsum(level.values())
        if spent > room:
            for cause, seconds in level.items():
                late[cause] = late.get(cause, 0.0) + seconds * ((spent - room) / spent)
        room = max(0.0, room - spent)
    return late
