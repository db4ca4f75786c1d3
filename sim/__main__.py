"""`python -m sim` and the console command `servecast`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from io import TextIOWrapper
from types import FrameType

from cyclopts import CycloptsError

from sim.errors import BadInput


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 2 bad input (one line on stderr), 1 anything else."""
    if isinstance(sys.stdout, TextIOWrapper):  # JSON is UTF-8 in every locale, and a file's name may be anything
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.exit(status(sys.argv[1:] if arguments is None else arguments))


def status(arguments: Sequence[str]) -> int:
    """The exit status of a command."""
    try:
        signal.signal(signal.SIGTERM, _stop)
        from sim.cli import app

        app(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except BadInput as error:
        return _fail(str(error), 2)
    except CycloptsError as error:
        return _fail(" ".join(str(error).split()), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 1)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BrokenProcessPool:
        return _fail("a worker process was ended from outside, for want of memory perhaps", 1)
    except MemoryError:
        return _fail("out of memory", 1)
    except OSError as error:  # of the terminal or a full disk; files of the user are BadInput
        return _fail((error.strerror or str(error)).lower(), 1)
    return 0


def _fail(what: str, code: int) -> int:
    print(f"servecast: error: {what}", file=sys.stderr)
    return code


def _stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough: a second would be in the way of ending in order
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
