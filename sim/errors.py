"""The one error that a user can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_NAMES = 40  # that a line names
LONGEST = 60  # characters of a value or a name in an error


class BadInput(Exception):
    """Input that cannot be used: names its source, its key, and what is wrong with which limit.

    The command line prints it as one line, ``servecast: error: SOURCE: [table] key: what``, and exits with status 2.
    """

    def __init__(self, what: str, *, source: str | None = None, key: str | None = None) -> None:
        """`source` is a file (or an option such as ``--set``); `key` is ``[table] key`` or ``row N, column C``."""
        super().__init__(what)
        self.what = what
        self.source = source
        self.key = key

    def within(self, *, source: str | None = None, key: str | None = None) -> BadInput:
        """The same error with its source or key filled in where they were still open."""
        return BadInput(self.what, source=self.source or source, key=self.key or key)

    def __str__(self) -> str:
        """One line, whatever the parts hold."""
        return " ".join(": ".join(part for part in (self.source, self.key, self.what) if part).split())

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: as on the command line."""
        return [f"servecast: error: {self}"]

    def __reduce__(self) -> tuple[object, ...]:
        """Keeps its parts when it crosses to another process."""
        return _rebuild, (self.what, self.source, self.key)


def _rebuild(what: str, source: str | None, key: str | None) -> BadInput:
    return BadInput(what, source=source, key=key)


def shown(value: object) -> str:
    """A value as an error shows it: in part, where it is long or nested."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A sentence for a name that does not exist: the nearest where one is near, else all of them, or some of many."""
    names = sorted(known)
    name = name if len(name) <= LONGEST else name[: LONGEST - 3] + "..."
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names[:MOST_NAMES])}"
    if not near and len(names) > MOST_NAMES:
        hint = f"{len(names)} are known, among them {', '.join(difflib.get_close_matches(name, names, 3, 0.0))}"
    return f"unknown {kind} {name!r}; {hint}"
