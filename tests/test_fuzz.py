"""Scenario files that nobody would write: whatever is in them, the answer is a result or one line, and it comes."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import signal
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.__main__ import status

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 10  # that one example may take; the longest takes about one
MOST = {"requests": 12, "lengths": 400}  # so that whatever is asked for is soon done

Tables = dict[str, Any]
Place = tuple[Any, ...]

TINY = """
[engine]
num_blocks = 200
max_model_tokens = 600
[scheduler]
policy = "prefill-first"
[policy.orca]
max_sequences = 2
[latency]
kind = "affine"
step = 0.01
token = 0.0001
hop = 0.001
[deployment]
pipeline_parallel = 2
replicas = 2
router = "power-of-two"
[workload]
requests = 12
[workload.arrivals]
kind = "closed"
concurrency = 3
think = 0.5
[workload.lengths]
kind = "uniform"
prompt = [1, 300]
output = [1, 30]
[slo]
tbt_p99 = 0.1
[metrics]
warmup = 1.0
"""
ZIPF = """
[engine]
num_blocks = 100
time_limit = 3.0
[latency]
kind = "affine"
step = 0.02
[workload]
requests = 12
too_long = "clip"
[workload.arrivals]
kind = "constant"
rate = 3.0
[workload.lengths]
kind = "zipf"
max_tokens = 400
min_tokens = 20
"""
STARTS = [tomllib.loads(text) for text in (TINY, ZIPF)]
STARTS += [tomllib.loads(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "scenarios").glob("*.toml"))]

ODD = [
    *(0, 1, -1, 2, 3, 7, 31, 2**31, 2**53, 2**63, 10**30, 10**400, -(2**63)),
    *(0.0, -0.0, 0.5, 1.0, -1.0, 1e-9, 1e-30, 5e-324, 1e30, 1.7e308, float("nan"), float("inf"), float("-inf")),
    *(
        True,
        False,
        "",
        " ",
        "0",
        "auto",
        "none",
        "fp8",
        "int4",
        "t.csv",
        ".",
        "\0",
        "\n",
        "é",
        "{key}",
        "[red]",
        "x" * 300,
    ),
    *([], [1], [1, 2], [2, 1], [1.0, 2], [[1]], {}, {"kind": "trace", "path": "t.csv"}, {"kind": "at-once"}),
    *("stall-free", "prefill-first", "orca", "decode-first", "alternating", "drop", "clip", "sticky", "least-loaded"),
    *("poisson", "gamma", "closed", "trace", "uniform", "lognormal", "zipf", "fixed", "affine", "roofline", "profile"),
]
WORDS = [
    "x",
    "kind",
    "rate",
    "path",
    "name",
    "policy",
    "attainment",
    "ttft",
    "num_blocks",
    "repeat",
    "shuffle",
    "{}",
    "a.b",
    "",
]


CHOICES: Tables = {
    "policy": ["stall-free", "prefill-first", "orca", "decode-first", "alternating"],
    "router": ["round-robin", "least-loaded", "power-of-two", "sticky"],
    "too_long": ["drop", "clip", "error"],
    "dtype": ["float16", "fp8", "int4"],
    "arrivals": [
        {"kind": "at-once"},
        {"kind": "closed", "concurrency": 5},
        {"kind": "gamma", "rate": 20.0, "cv": 4.0},
        {"kind": "trace", "path": "t.csv", "repeat": True},
        {"kind": "trace", "path": "t.csv", "rate": 3.0, "shuffle": True},
    ],
    "lengths": [
        {"kind": "trace", "path": "t.csv", "repeat": True},
        {"kind": "zipf", "min_tokens": 2, "max_tokens": 300, "theta": 1.0},
        {
            "kind": "lognormal",
            "prompt": {"median": 9, "p90": 90, "max": 300},
            "output": {"median": 2, "p90": 9, "max": 30},
        },
    ],
    "slo": [
        {"ttft": 0.5, "tbt_max": 0.05, "attainment": 0.9},
        {"tbt_p99": 0.1, "first_token_gap": True},
        {"scheduling_delay_p50": 1e-9},
        {"e2e_p999": 1e9},
    ],
}
FACTORS = [1e-30, 1e-6, 0.01, 0.5, 1.0, 2.0, 100.0, 1e6, 1e30]
ACTIONS = ["plausible"] * 16 + ["odd"] * 3 + ["number", "real", "text", "drop", "name", "add", "copy", "wrap"]


def places(value: Any, here: Place = ()) -> list[Place]:
    """Every table, array and leaf but the whole."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [place for key, part in inner for place in [(*here, key), *places(part, (*here, key))]]


def at(tables: Tables, place: Place) -> Any:
    value: Any = tables
    for key in place:
        value = value[key]
    return value


def plausible(draw: st.DrawFn, key: Any, value: Any) -> Any:
    """Another value of the same kind."""
    if key in CHOICES:
        return copy.deepcopy(draw(st.sampled_from(CHOICES[key])))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(st.sampled_from([1, 2, 3, 5, 16, 100, 1000, value * 2, value * 1000, 2**31, 2**53]))
    if isinstance(value, float):
        return draw(st.sampled_from([value * factor for factor in FACTORS] + FACTORS))
    return value


def mutate(draw: st.DrawFn, tables: Tables) -> None:
    """One change, in place."""
    place = draw(st.sampled_from(places(tables) or [("x",)]))
    table, key = at(tables, place[:-1]), place[-1]
    action = draw(st.sampled_from(ACTIONS))
    if action == "plausible":
        table[key] = plausible(draw, key, table[key])
    elif action == "odd":
        table[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
    elif action == "number":
        table[key] = draw(st.integers(-10, 5000))
    elif action == "real":
        table[key] = draw(st.floats())
    elif action == "text":
        table[key] = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    elif action == "copy":
        table[key] = copy.deepcopy(at(tables, draw(st.sampled_from(places(tables)))))
    elif action == "wrap":
        table[key] = draw(st.sampled_from([lambda value: [value], lambda value: {"x": value}]))(table[key])
    elif isinstance(table, list) or action == "drop":
        del table[key]
    elif action == "name":
        table[draw(st.sampled_from([*WORDS, f"{key}s", f"{key}"[:-1]]))] = table.pop(key)
    else:
        table[draw(st.sampled_from(WORDS))] = copy.deepcopy(draw(st.sampled_from(ODD)))


def bounded(value: Any, key: str = "", lengths: bool = False) -> Any:
    """The same, but for so many requests and so long ones that they would take long to serve."""
    if isinstance(value, dict):
        return {name: bounded(part, name, lengths or name == "lengths") for name, part in value.items()}
    if isinstance(value, list):
        return [bounded(part, key, lengths) for part in value]
    most = MOST["lengths"] if lengths else MOST.get(key)
    if most is None or isinstance(value, bool | str) or not 0 < value <= 2**31:
        return value
    return min(value, most)


@st.composite
def scenarios(draw: st.DrawFn) -> Tables:
    tables = copy.deepcopy(draw(st.sampled_from(STARTS)))
    for part in ("arrivals", "lengths"):  # the public traces are not shipped
        if tables["workload"][part]["kind"] == "trace":
            tables["workload"][part]["path"] = "t.csv"
    for _ in range(draw(st.integers(1, 4))):
        if tables:
            mutate(draw, tables)
    return dict(bounded(tables))


@st.composite
def broken_files(draw: st.DrawFn) -> bytes:
    content = tomli_w.dumps(draw(st.sampled_from(STARTS))).encode()
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 40)))
        part = draw(
            st.one_of(st.binary(max_size=8), st.sampled_from([b"", b'"', b"\n", b"[[", b"]", b"=", b"9", b"e9", b"."]))
        )
        content = content[:start] + part * draw(st.sampled_from([1, 1, 1, 2, 50])) + content[end:]
    return content


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a trace, and the current one."""
    folder = tmp_path_factory.mktemp("fuzz")
    rows = [f"{i * 0.5},{1 + i * 37 % 300},{1 + i * 7 % 20},{i % 3}" for i in range(20)]
    head = "arrived_at,num_prefill_tokens,num_decode_tokens,session_id"
    (folder / "t.csv").write_text("\n".join([head, *rows]) + "\n")
    with contextlib.chdir(folder):
        yield folder


@contextlib.contextmanager
def soon_done() -> Iterator[None]:
    def hang(_number: int, _frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"no answer in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def not_json(word: str) -> NoReturn:
    raise AssertionError(f"{word} is not JSON")


def answers(*arguments: str) -> None:
    """The command answers in time: with strict JSON, or with one line."""
    out, err = io.StringIO(), io.StringIO()
    with soon_done(), warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        warnings.simplefilter("error")  # a warning would be a line on stderr
        code = status(arguments)
    lines = err.getvalue().splitlines()
    if code == 0:
        assert isinstance(json.loads(out.getvalue(), parse_constant=not_json), dict)
        assert all(line.startswith("servecast: ") for line in lines)
    else:
        assert (code, out.getvalue(), len(lines)) == (2, "", 1), err.getvalue()
        assert lines[0].startswith("servecast: error: ")


def fuzz(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


@fuzz(500)
@given(scenarios(), st.sampled_from(["run", "run", "run", "check", "compare"]))
def test_any_tables_are_answered(tables: Tables, command: str) -> None:
    Path("s.toml").write_bytes(tomli_w.dumps(tables).encode())
    answers(command, "s.toml", "--json", "--out", "kept")


@fuzz(40)
@given(scenarios(), st.sampled_from(["capacity", "cost"]))
def test_any_search_is_answered(tables: Tables, command: str) -> None:
    Path("s.toml").write_bytes(tomli_w.dumps(tables).encode())
    answers(command, "s.toml", "--json", "--seeds", "1", "--tolerance", "0.3", "--policy", "stall-free")


@fuzz(300)
@given(broken_files())
def test_any_bytes_are_answered(content: bytes) -> None:
    Path("s.toml").write_bytes(content)
    answers("check", "s.toml", "--json", "--requests", "50")


@fuzz(150)
@given(st.lists(st.sampled_from(places(STARTS[0])), min_size=1, max_size=2), st.text(max_size=12))
def test_any_setting_is_answered(targets: list[Place], value: str) -> None:
    Path("s.toml").write_text(TINY)
    given_settings = [part for place in targets for part in ("--set", f"{'.'.join(map(str, place))}={value}")]
    answers("check", "s.toml", "--json", *given_settings)
