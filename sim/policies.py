"""The scheduling policies. Each is an order of three verbs of the scheduler; no more sets them apart.

`prefill-first`: vLLM before chunked prefill. `orca`: Orca (OSDI'22), iteration-level batching. `decode-first`:
FasterTransformer, request-level batching. `stall-free`: Sarathi-Serve (OSDI'24), Algorithm 3. `alternating`: the
Sarathi-Serve paper's ablation, chunked prefill without hybrid batches.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from sim.request import Batch

if TYPE_CHECKING:
    from sim.scheduler import Scheduler

Policy = Callable[["Scheduler", Batch], None]


def prefill_first(scheduler: Scheduler, batch: Batch) -> None:
    """Whole prompts if any can go, else decodes."""
    scheduler.admit(batch, scheduler.limits.max_batch_tokens, chunked=False)
    if not batch.chunks:
        scheduler.decode(batch)


def orca(scheduler: Scheduler, batch: Batch) -> None:
    """Decodes, and whole prompts beside them."""
    scheduler.decode(batch)
    scheduler.admit(batch, inf, chunked=False)


def decode_first(scheduler: Scheduler, batch: Batch) -> None:
    """Decodes while there are any, and only then whole prompts."""
    scheduler.decode(batch)
    if not batch.decodes:
        scheduler.admit(batch, inf, chunked=False)


def stall_free(scheduler: Scheduler, batch: Batch) -> None:
    """Decodes, and what the token budget leaves goes to chunks: unfinished prompts, then new ones."""
    budget = scheduler.limits.token_budget
    scheduler.decode(batch)
    if scheduler.waits_for_more(batch, budget):
        return
    left = scheduler.resume(batch, budget)
    if left > 0 and scheduler.waiting and not batch.preempted:
        scheduler.admit(batch, budget, chunked=True)


def alternating(scheduler: Scheduler, batch: Batch) -> None:
    """A turn of chunks, then a turn of decodes; a turn that finds nothing passes to the other."""
    for prefill_turn in (scheduler.prefill_turn, not scheduler.prefill_turn):
        if not prefill_turn:
            scheduler.decode(batch)
        elif scheduler.unfinished:
            scheduler.resume(batch, scheduler.limits.token_budget)
        elif not batch.preempted:
            scheduler.admit(batch, scheduler.limits.token_budget, chunked=True)
        if batch.decodes or batch.chunks:
            scheduler.prefill_turn = not prefill_turn
            return


POLICIES: dict[str, Policy] = {
    "prefill-first": prefill_first,
    "orca": orca,
    "decode-first": decode_first,
    "stall-free": stall_free,
    "alternating": alternating,
}
RESERVING = frozenset({"orca", "decode-first"})  # blocks for max_model_tokens at admission; the others page
COMPARED = ("prefill-first", "orca", "decode-first", "stall-free")  # the paper's four
