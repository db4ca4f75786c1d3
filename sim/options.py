"""What the commands share: their options, and how they answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token

from sim import output
from sim.errors import BadInput, shown
from sim.record import Record
from sim.scenario import Scenario
from sim.settings import Setting, parse
from sim.simulate import Engine

SHORTHANDS = {
    "policy": "scheduler.policy",
    "rate": "workload.arrivals.rate",
    "requests": "workload.requests",
    "seed": "workload.seed",
}


def whole(_: Any, tokens: Sequence[Token]) -> int:
    """Strictly an integer; the default converter rounds."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{shown(tokens[0].value)} is not a whole number") from None


Count = Annotated[int, Parameter(converter=whole)]
Seeds = Annotated[int, Parameter(converter=whole)]


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """What every command that takes a scenario takes."""

    settings: Annotated[tuple[str, ...], Parameter(name="--set", negative="", show_default=False)] = ()
    """Override any scenario key: key.path=value. Values are TOML, bare words are strings. Repeatable."""
    policy: str | None = None
    """The scheduling policy (scheduler.policy)."""
    rate: float | None = None
    """Requests per second (workload.arrivals.rate); on a trace, its mean rate."""
    requests: Annotated[int | None, Parameter(converter=whole)] = None
    """How many requests (workload.requests)."""
    seed: Annotated[int | None, Parameter(converter=whole)] = None
    """The seed of every random draw (workload.seed)."""
    executor: Literal["model", "torch"] = "model"
    """What executes a batch: the latency model, or the engine."""
    clock: Literal["virtual", "wall"] = "virtual"
    """Simulated time, or requests that arrive in real time."""
    out: Path | None = None
    """Keep the result files in this directory."""
    json: Annotated[bool, Parameter(negative="", show_default=False)] = False
    """Print one JSON object on stdout and nothing else there."""

    def scenario(self, path: str) -> Scenario:
        """The scenario with these options in place."""
        given = self.overrides()
        output.prepare(self.out)
        return Scenario.load(path, given)

    def overrides(self) -> list[Setting]:
        """The scenario keys that these options set."""
        given = [parse(text) for text in self.settings]
        for option, key in SHORTHANDS.items():
            if (value := getattr(self, option)) is not None:
                given.append(Setting(key, value, f"--{option}"))
        return given

    def engine(self) -> Engine | None:
        """What executes batches where it is not the latency model."""
        if self.executor == "model":
            return None
        engine: Engine = needing_torch("gpu_backend.engine", "--executor").executor
        return engine


def virtual(options: Options, what: str) -> None:
    """BadInput for options that `what` has no use for."""
    if options.clock != "virtual":
        raise BadInput(f"{what} runs on the virtual clock", source="--clock")
    if options.executor != "model":
        raise BadInput(f"{what} runs on the latency model", source="--executor")


def needing_torch(module: str, source: str) -> ModuleType:
    """A module that needs torch, by name: nothing else of the simulator does."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        what = f"'torch' needs the package {error.name}: pip install 'servecast[engine]'"
        raise BadInput(what, source=source) from None


def keep(options: Options, scenario: Scenario, name: str, result: Any) -> None:
    if options.out:
        files = {name: output.as_json(result).encode(), "scenario.toml": scenario.to_toml().encode()}
        output.write(options.out, files)


def answer(options: Options, scenario: Scenario, result: Any, readable: Callable[[ModuleType], Any]) -> None:
    """Print the result; what else was done to the scenario is said beside it, and only where there is a result.

    `readable(show)` is asked for the page only where a person reads: with `--json` no terminal library is loaded.
    """
    for note in scenario.notes:
        say(note)
    if options.json:
        sys.stdout.write(output.as_json(result))
    else:
        from sim import show

        show.to_console(readable(show))
        if options.out:
            say(f"files are in {options.out}")


def say(what: str) -> None:
    print(f"servecast: {what}", file=sys.stderr)


def _unseen(_done: int, _total: int) -> None:
    """Progress that nobody watches."""


@contextmanager
def progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal's stderr, nothing elsewhere: call with (done, of)."""
    if not sys.stderr.isatty():
        yield _unseen
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def watch(advance: Callable[[int, int], None], requests: int) -> Callable[[Record, float], bool]:
    shown = time.monotonic()

    def look(record: Record, _: float) -> bool:
        nonlocal shown
        if time.monotonic() - shown > 0.1:
            shown = time.monotonic()
            advance(record.done, requests)
        return False

    return look
