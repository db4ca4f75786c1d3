"""Independent pieces of work on all cores, or on any executor: one process after another, here or elsewhere."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from sim.errors import BadInput

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 1024  # pieces that an executor is given before the first of them is done: more than a cluster has cores
CONNECT_SECONDS = 10  # for an answer of a Dask scheduler


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
    with processes(min(workers, len(items))) as pool:
        for position, future in futures(pool, function, items):
            yield position, future.result()


def futures(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], *, ahead: int = AHEAD
) -> Iterator[tuple[int, Future[Result]]]:
    """`function` of every item on an executor: positions and futures, as they get done, from the first on.

    What is left is cancelled, but in a pool of processes, which does that itself when it is shut down.
    """
    done: SimpleQueue[Future[Result]] = SimpleQueue()
    waiting: dict[Future[Result], int] = {}
    left = enumerate(items)

    def submit() -> bool:
        for position, item in islice(left, 1):
            with _interrupts_held():
                future = executor.submit(function, item)
            waiting[future] = position
            future.add_done_callback(done.put)
            return True
        return False

    try:
        while True:
            if len(waiting) < ahead and submit() and done.empty():
                continue
            if not waiting:
                return
            future = done.get()
            yield waiting.pop(future), future
    finally:
        for future in () if isinstance(executor, ProcessPoolExecutor) else waiting:
            future.cancel()


@contextmanager
def processes(workers: int) -> Iterator[Executor]:
    """An executor of spawned processes. An exception, an interrupt above all, ends them at once; so does our end."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _end_with_parent() -> None:
    """A process whose parent was killed would wait for work for ever."""

    def wait() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    Thread(target=wait, daemon=True).start()


@contextmanager
def dask(address: str, say: Callable[[str], None] = lambda _: None) -> Iterator[Executor]:
    """An executor of the Dask cluster whose scheduler is at `address`. BadInput where it or its workers cannot be used.

    A worker that is lost costs nothing but time: what it was at is run elsewhere.
    """
    try:
        distributed = import_module("distributed")
    except ModuleNotFoundError as error:
        what = f"'dask' needs the package {error.name}: pip install 'servecast[dask]'"
        raise BadInput(what, source="--engine") from None
    for name in ("distributed", "distributed.client"):  # what goes wrong is told in lines of our own
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        import_module("distributed.comm").get_address_host_port(address)
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        what = f"no Dask scheduler answers at {address!r}: {str(error) or type(error).__name__}"
        raise BadInput(what, source="--cluster") from None
    executor = client.get_executor()
    try:
        _check_workers(client, say)
        yield executor
    except BaseException:
        with suppress(OSError):  # a timeout, where the cluster is gone
            executor.shutdown(wait=False)
        raise
    finally:
        with suppress(OSError):
            client.close(timeout=1)


def _check_workers(client: Any, say: Callable[[str], None]) -> None:
    """Other versions would give other results."""
    try:
        found = client.run(installed)
    except Exception as error:
        raise BadInput(f"a worker has no servecast {installed()}: {error}", source="--cluster") from None
    for worker, other in found.items():
        if other != installed():
            what = f"the worker at {worker} has servecast {other}, and this is {installed()}"
            raise BadInput(what, source="--cluster")
    if not found:
        say("the cluster has no workers yet; waiting for them")


def installed() -> str:
    """The version of servecast."""
    try:
        return version("servecast")
    except PackageNotFoundError:
        return "not installed"


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started meanwhile never see Ctrl-C, which reaches every process of a terminal: the first answers for
    all. It gets what came meanwhile afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
