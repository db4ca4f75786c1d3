"""Independent pieces of work on all cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each(
    function: Callable[[Item], Result], items: Sequence[Item], *, workers: int = 1
) -> Iterator[tuple[int, Result]]:
    """`function` of every item with its position, as they get done; in order with one worker.

    With more, `function` and the items must be picklable: processes are spawned, because the threads of numerical
    libraries do not survive a fork. Interrupting leaves no process behind.
    """
    if min(workers, len(items)) <= 1:
        yield from ((position, function(item)) for position, item in enumerate(items))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(items)), mp_context=context) as pool:
        try:
            with _interrupts_held():
                futures = {pool.submit(function, item): position for position, item in enumerate(items)}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started meanwhile never see Ctrl-C, which reaches every process of a terminal: the first answers for
    all. It gets what came meanwhile afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
