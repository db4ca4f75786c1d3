"""The engine: the tokens of a dense model under every policy, one scheduler for both worlds, pages, clocks, errors.

Where a test needs the same batches twice, the engine computes them for real but is paid by the affine formula.
"""

# ruff: noqa: E402
from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_engine_dense import CPU, GQA, MODELS, Tensors, dense_logits, tensors_of, weights_of

import gpu_backend
import sim.cluster
import sim.scheduler
from gpu_backend import engine
from gpu_backend.attention import TorchAttention
from gpu_backend.cache import PageTable, storage
from gpu_backend.executor import TorchExecutor
from gpu_backend.layout import Layout
from gpu_backend.model import Decoder, check_supported
from sim.affine import Affine, AffineTable
from sim.cluster import Deployment, serve
from sim.errors import BadInput
from sim.executor import Step
from sim.hardware import Model
from sim.policies import POLICIES
from sim.record import Record
from sim.request import Batch, Request
from sim.scenario import Scenario
from sim.scheduler import Limits, Scheduler
from sim.schema import TorchTable
from sim.simulate import Plan, plan
from sim.workload import Workload

PAGED = ("prefill-first", "stall-free", "alternating")
AFFINE = AffineTable(kind="affine", step=2e-3, token=1e-5, sequence=1e-4, context=1e-7, prefill_attention=1e-8, hop=0.0)
MOST = 256  # tokens of a request
Answers = dict[int, list[int]]


class Paid:
    """Executes with the engine, costs what the formula says, and looks at the pages after every batch."""

    def __init__(self, inner: TorchExecutor, table: AffineTable = AFFINE) -> None:
        self.inner = inner
        self.affine = Affine(table)
        self.pages_used: list[int] = []
        self.blocks_used: list[int] = []
        self.owners: dict[int, set[int]] = {}  # of each page, over the whole run

    def execute(self, batch: Batch) -> Step:
        step = self.inner.execute(batch)
        assert len(step.seconds) == 1
        assert 0 <= step.host <= step.seconds[0]
        self._look(batch)
        return self.affine.execute(batch)

    def _look(self, batch: Batch) -> None:
        """Every page is free or held, once; a request holds just enough pages for what it has computed."""
        pages = self.inner.pages
        held = [page for those in pages.held.values() for page in those]
        assert sorted(held + pages.free) == list(range(pages.total))
        assert pages.used == len(held) <= batch.blocks_used <= pages.total
        for chunk in batch.chunks:
            assert len(pages.held[chunk.request.id]) == -(-(chunk.start + chunk.tokens) // pages.page_tokens)
        for request in batch.group.members.values() if batch.group is not None else ():
            tokens = request.prompt + batch.group.emitted(request)
            assert len(pages.held[request.id]) == -(-tokens // pages.page_tokens)
        self.pages_used.append(pages.used)
        self.blocks_used.append(batch.blocks_used)
        for id, those in pages.held.items():
            for page in those:
                self.owners.setdefault(page, set()).add(id)

    def spent(self) -> None:
        """The formula does not say."""

    def notes(self) -> list[str]:
        return []


def workload(
    requests: int = 24,
    seed: int = 0,
    gap: float = 0.01,
    prompts: tuple[int, int] = (1, 120),
    outputs: tuple[int, int] = (1, 50),
) -> Workload:
    """Lengths within these bounds; Poisson arrivals, `gap` seconds apart."""
    draw = np.random.default_rng(seed)
    return Workload(
        arrivals=np.cumsum(draw.exponential(gap, requests)),
        prompts=draw.integers(*prompts, requests, endpoint=True),
        outputs=draw.integers(*outputs, requests, endpoint=True),
        sessions=None,
        concurrency=None,
        think=0.0,
        counts={},
        notes=(),
    )


def crowded(seed: int = 0) -> Workload:
    """Short prompts and long answers at nearly the same time: they outgrow the memory that let them in."""
    return workload(20, seed, gap=0.001, prompts=(1, 40), outputs=(20, 50))


def few(work: Workload, requests: int) -> Workload:
    """The first requests of these."""
    assert work.arrivals is not None
    return replace(
        work, arrivals=work.arrivals[:requests], prompts=work.prompts[:requests], outputs=work.outputs[:requests]
    )


def limits(policy: str = "stall-free", num_blocks: int = 1000, block_tokens: int = 16, **more: Any) -> Limits:
    return Limits(
        policy,
        num_blocks,
        **{"block_tokens": block_tokens, "max_model_tokens": MOST, "max_batch_tokens": MOST, "token_budget": 48} | more,
    )


def built(
    model: Model,
    tensors: Tensors,
    pages: int,
    page_tokens: int,
    *,
    seed: int = 0,
    like: Sequence[Any] = (),
    **more: Any,
) -> TorchExecutor:
    """The engine on the CPU in float64, with these weights; `like` may name other classes of decoder and attention."""
    decoder, attention = like or (Decoder, TorchAttention)
    cache = storage(model.layers, pages, page_tokens, model.kv_heads, model.head_dim, torch.float64, CPU)
    return TorchExecutor(
        decoder(model, weights_of(model, tensors), cache, MOST),
        attention(model.heads, model.kv_heads, model.head_dim, page_tokens),
        PageTable(pages, page_tokens),
        seed=seed,
        keep_answers=True,
        **more,
    )


def served(executor: Any, on: Limits, work: Workload, **how: Any) -> Record:
    return serve(work, Deployment(on), lambda: executor, routing=np.random.default_rng(0), **how)


def run(
    on: Limits, work: Workload, *, model: Model = GQA, weights_seed: int = 0, seed: int = 0, **how: Any
) -> tuple[Answers, Record, Paid]:
    """The engine under these limits: its answers by request, the record of the run, and what was seen of the pages."""
    inner = built(model, tensors_of(model, weights_seed), on.num_blocks, on.block_tokens, seed=seed)
    paid = Paid(inner)
    record = served(paid, on, work, **how)
    inner.finish()
    return inner.answers, record, paid


def prompt_of(model: Model, id: int, tokens: int, seed: int = 0) -> list[int]:
    """The prompt that the engine makes up for a request."""
    return np.random.default_rng((seed, id)).integers(model.vocab, size=tokens).tolist()


def check_against_dense(model: Model, tensors: Tensors, work: Workload, answers: Answers, seed: int = 0) -> int:
    """Each token of each answer is the dense model's choice after all that came before it. How many there were."""
    assert sorted(answers) == list(range(len(work.prompts)))
    for id, answer in answers.items():
        prompt = prompt_of(model, id, int(work.prompts[id]), seed)
        assert len(answer) == work.outputs[id]
        choices = dense_logits(model, tensors, prompt + answer).argmax(-1).tolist()
        assert choices[len(prompt) - 1 : -1] == answer
    return sum(map(len, answers.values()))


# Tokens


@pytest.fixture(scope="module")
def expected() -> Answers:
    """The answers of the standard requests, once they are known to be the dense model's."""
    answers, _, _ = run(limits(), workload())
    assert check_against_dense(GQA, tensors_of(GQA), workload(), answers) > 600
    return answers


@pytest.mark.parametrize("block_tokens", [1, 7, 64])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_and_no_block_size_changes_a_token(policy: str, block_tokens: int, expected: Answers) -> None:
    """Greedy decoding says the same, however it is scheduled and wherever its KV lies."""
    answers, record, _ = run(limits(policy, 24000 // block_tokens, block_tokens), workload())
    assert answers == expected
    assert record.preempted == 0


@pytest.mark.parametrize(("token_budget", "requests"), [(1, 4), (5, 12), (23, 24), (200, 24)])
@pytest.mark.parametrize("policy", ["stall-free", "alternating"])
def test_no_token_budget_changes_a_token(policy: str, token_budget: int, requests: int, expected: Answers) -> None:
    """Chunks of any size, down to one token, leave the same KV behind."""
    work = few(workload(), requests)
    answers, record, _ = run(limits(policy, token_budget=token_budget), work)
    assert answers == {id: expected[id] for id in range(requests)}
    assert record.iterations >= work.prompts.sum() / token_budget


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("policy", PAGED)
def test_preemption_changes_no_token(policy: str, seed: int) -> None:
    """A request that lost its KV computes it again from its prompt and what it had said, on whatever pages are free."""
    work = crowded(seed)
    tensors = tensors_of(GQA, seed)
    answers, record, paid = run(limits(policy, 48, 4, watermark=0.0), work, weights_seed=seed, seed=seed)
    assert record.preempted >= 5
    assert max(record.preemptions) >= 2  # some more than once
    assert check_against_dense(GQA, tensors, work, answers, seed) > 500
    assert max(len(owners) for owners in paid.owners.values()) > 5  # pages went from hand to hand
    assert paid.inner.pages.used == 0


@pytest.mark.parametrize("policy", ["stall-free", "prefill-first"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gqa"])
def test_every_family_says_what_the_dense_model_says(name: str, policy: str) -> None:
    """Multi-head and multi-query attention, norms on queries and keys, biases, tied embeddings, scaled rotary angles;
    with preemptions."""
    model, work = MODELS[name], few(crowded(7), 12)
    answers, record, _ = run(limits(policy, 40, 4, watermark=0.0), work, model=model)
    assert record.preempted > 0
    assert check_against_dense(model, tensors_of(model), work, answers) > 350


def test_seeds_change_prompts_and_weights(expected: Answers) -> None:
    """Two runs agree because they are equal, not because the model has only one thing to say."""
    assert run(limits(), workload())[0] == expected
    for seeds in ({"seed": 1}, {"weights_seed": 1}):
        answers, _, _ = run(limits(), workload(), **seeds)
        assert all(answers[id] != expected[id] for id in expected if len(expected[id]) > 5)


def test_random_weights_from_the_scenario_say_what_the_dense_model_says() -> None:
    """The way a run takes: engine.build, in float64 where the tokens are to be exact."""
    made = engine.build(
        GQA,
        TorchTable(seed=3),
        pages=100,
        page_tokens=8,
        positions=MOST,
        device=CPU,
        dtype=torch.float64,
        keep_answers=True,
    )
    work = workload(8)
    served(Paid(made), limits(num_blocks=100, block_tokens=8), work)
    made.finish()
    found = made.decoder.weights
    queries, keys = GQA.heads * GQA.head_dim, GQA.kv_heads * GQA.head_dim
    tensors = {
        "model.embed_tokens.weight": found.embedding,
        "model.norm.weight": found.norm,
        "lm_head.weight": found.head,
    }
    for index, layer in enumerate(found.layers):
        block = f"model.layers.{index}."
        parts = layer.qkv.split([queries, keys, keys])
        tensors |= {f"{block}self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
        gate, up = layer.gate_up.chunk(2)
        tensors |= {
            f"{block}input_layernorm.weight": layer.input_norm,
            f"{block}post_attention_layernorm.weight": layer.mlp_norm,
            f"{block}self_attn.o_proj.weight": layer.output,
            f"{block}mlp.gate_proj.weight": gate,
            f"{block}mlp.up_proj.weight": up,
            f"{block}mlp.down_proj.weight": layer.down,
        }
    check_against_dense(GQA, tensors, work, made.answers, seed=3)


def test_measured_times_change_no_token(expected: Answers) -> None:
    """With the seconds that the machine takes, on either clock, batches differ and answers do not."""
    for wall_clock in (False, True):
        inner = built(GQA, tensors_of(GQA), 1000, 16)
        record = served(inner, limits(), workload(), wall_clock=wall_clock)
        inner.finish()
        assert inner.answers == expected
        assert record.done == len(expected)


# One scheduler


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_simulator_and_engine_take_the_same_steps(policy: str, tight: bool) -> None:
    """To the byte, with preemptions and without: the engine computes what the simulator only counts."""
    work = crowded(5)
    on = limits(policy, 48 if tight else 1000, 4, watermark=0.0, max_model_tokens=128)
    simulated = served(Affine(AFFINE), on, work)
    _, measured, _ = run(on, work)
    assert measured.steps is not None
    assert bytes(measured.steps) == bytes(simulated.steps or b"")
    assert simulated.iterations >= 50
    assert (simulated.preempted > 0) == (tight and policy in PAGED)
    for column in ("arrival", "scheduled", "first_token", "finish", "output", "preemptions", "gaps", "gap_counts"):
        assert getattr(measured, column).tobytes() == getattr(simulated, column).tobytes()


@pytest.mark.parametrize("policy", POLICIES)
def test_wall_clock_and_virtual_clock_take_the_same_steps(policy: str) -> None:
    """The same batches at the same times of the clock, which on the wall really pass."""
    work = workload(10, seed=6, gap=0.004)
    _, virtual, _ = run(limits(policy), work)
    began = time.perf_counter()
    answers, wall, _ = run(limits(policy), work, wall_clock=True)
    assert time.perf_counter() - began >= virtual.ended > 0.1
    assert bytes(wall.steps or b"") == bytes(virtual.steps or b"-")
    check_against_dense(GQA, tensors_of(GQA), work, answers)


def test_the_scheduler_that_drives_the_engine_is_the_simulators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a subclass, not a copy: the class itself, and one object of it for the whole run."""
    made: list[Scheduler] = []

    def watched(on: Limits, **how: Any) -> Scheduler:
        made.append(Scheduler(on, **how))
        return made[-1]

    assert sim.cluster.Scheduler is sim.scheduler.Scheduler
    monkeypatch.setattr(sim.cluster, "Scheduler", watched)
    answers, record, _ = run(limits(), workload(5))
    assert len(made) == 1
    assert type(made[0]) is sim.scheduler.Scheduler
    assert made[0].admissions == record.done == len(answers) == 5
    assert made[0].blocks.used == made[0].held == made[0].outstanding == 0


def test_the_engine_has_no_scheduler_of_its_own() -> None:
    """Nothing in gpu_backend schedules, or knows a policy, and only types may come from where that is done."""
    files = sorted(Path(gpu_backend.__file__).parent.rglob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(_without_typing(ast.parse(file.read_text(encoding="utf-8")))):
            where = f"{file.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                assert "schedule" not in node.name.lower(), where
                assert node.name not in {name.replace("-", "_") for name in POLICIES}, where
            if isinstance(node, ast.ClassDef):
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                assert not methods & {"schedule", "commit", "admit", "preempt", "resume"}, where
                assert not any("Scheduler" in ast.unparse(base) for base in node.bases), where
            if isinstance(node, ast.Import):
                assert not any(_schedules(name.name) for name in node.names), where
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name.name}" for name in node.names]
                assert not any(_schedules(name) for name in [node.module or "", *names]), where


def _schedules(module: str) -> bool:
    return module.startswith(("sim.scheduler", "sim.policies", "sim.blocks", "sim.decodes", "simpy"))


def _without_typing(tree: ast.Module) -> ast.Module:
    """The module without what only a type checker reads."""
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    return tree


# Clocks


class FakeClock:
    """Stands still until somebody says that time has passed."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def on_clock(clock: FakeClock, host: float, device: float) -> tuple[type, type]:
    """A decoder that takes `device` seconds a token, and an attention whose plan takes `host`, by that clock alone."""

    class Slow(Decoder):
        def forward(self, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
            clock.now += device * len(tokens)
            return super().forward(tokens, *rest)

    class Planned(TorchAttention):
        def plan(self, layout: Layout) -> None:
            clock.now += host
            super().plan(layout)

    return Slow, Planned


def test_the_loop_runs_on_a_clock_that_is_given(expected: Answers) -> None:
    """An iteration lasts as long as the clock says, its host's share too, and no real time is waited for."""
    clock, steps = FakeClock(), []
    like = on_clock(clock, host=3600.0, device=128.0)
    inner = built(GQA, tensors_of(GQA), 1000, 16, like=like, clock=clock)
    execute = inner.execute

    def noted(batch: Batch) -> Step:
        steps.append((batch.tokens, execute(batch)))
        return steps[-1][1]

    inner.execute = noted  # type: ignore[method-assign]
    began = time.perf_counter()
    record = served(inner, limits(), workload())
    inner.finish()
    assert inner.answers == expected
    assert steps
    for tokens, step in steps:
        assert step == Step((3600.0 + 128.0 * tokens,), hop=0.0, host=3600.0)
    assert record.busy == sum(step.seconds[0] for _, step in steps) == clock.now - 1000.0
    assert record.ended > 100 * 3600
    assert time.perf_counter() - began < 60


def test_the_clock_is_read_before_the_first_and_after_the_last_work() -> None:
    """Finding rows and pages is the host's, choosing tokens is part of the iteration."""
    ticks = count()
    inner = built(GQA, tensors_of(GQA), 10, 16, clock=lambda: float(next(ticks)))
    scheduler = Scheduler(limits(num_blocks=10))
    scheduler.add(Request(0, 0.0, 5, 2))
    batch = scheduler.schedule(0.0)
    assert batch is not None
    assert inner.execute(batch) == Step((2.0,), host=1.0)


# Pages


def test_pages_follow_the_blocks_that_the_scheduler_counts() -> None:
    """prefill-first computes what it admits at once, so pages and blocks are the same number after every batch; the
    others may have counted more. At the end all are free."""
    for policy in POLICIES:
        _, record, paid = run(limits(policy, 48, 4, watermark=0.0, max_model_tokens=128), few(crowded(5), 12))
        assert paid.blocks_used == [int(row["kv_blocks_used"]) for row in _steps(record)]
        assert all(pages <= blocks for pages, blocks in zip(paid.pages_used, paid.blocks_used, strict=True))
        assert (paid.pages_used == paid.blocks_used) == (policy == "prefill-first")
        assert max(paid.pages_used) >= 18
        pages = paid.inner.pages
        assert (pages.used, pages.held, paid.inner.known) == (0, {}, {})
        assert sorted(pages.free) == list(range(48))


def _steps(record: Record) -> Any:
    from sim.record import STEP_COLUMNS

    return np.frombuffer(bytes(record.steps or b""), dtype=[(name, f"<{kind}") for name, kind in STEP_COLUMNS.items()])


def test_a_page_table_gives_each_page_to_one_request() -> None:
    """Grown in order of position, by as much as the tokens need; what is given back is given out again."""
    table = PageTable(5, 4)
    first = table.cover(7, 4)
    assert first == table.cover(7, 1) == table.cover(7, 4)
    assert len(first) == 1
    assert len(table.cover(7, 5)) == 2
    assert table.cover(7, 5)[0] == first[0]
    assert table.cover(8, 0) == []
    second = table.cover(8, 9)
    assert len(second) == 3
    assert not set(second) & set(table.cover(7, 5))
    assert (table.used, table.total, table.page_tokens) == (5, 5, 4)
    back = list(table.cover(7, 5))
    table.release(7)
    table.release(7)
    table.release(99)
    assert table.used == 3
    assert sorted(table.cover(9, 8)) == sorted(back)
    with pytest.raises(AssertionError, match="page that the scheduler did not count"):
        table.cover(8, 13)
    assert table.used == 5


def test_a_preempted_request_gives_its_pages_back_before_the_next_batch() -> None:
    """Two requests on three pages, by hand: the later one is preempted, and the earlier one gets its page."""
    tensors = tensors_of(GQA)
    inner, scheduler = built(GQA, tensors, 3, 4), Scheduler(limits(num_blocks=3, block_tokens=4, watermark=0.0))
    for id, prompt, output in ((0, 7, 5), (1, 3, 5)):
        scheduler.add(Request(id, 0.0, prompt, output))

    def step(now: float) -> Batch:
        batch = scheduler.schedule(now)
        assert batch is not None
        inner.execute(batch)
        scheduler.commit(batch, now + 1)
        return batch

    assert len(step(0.0).chunks) == 2
    lost = list(inner.pages.held[1])
    assert step(1.0).preempted == 0  # 8 and 4 tokens: the pages are full
    batch = step(2.0)  # both want another page, and none is free
    assert (batch.preempted, batch.decodes) == (1, 1)
    assert 1 not in inner.pages.held
    assert inner.pages.held[0][2:] == lost
    for now in range(3, 12):
        if scheduler.held or scheduler.waiting:
            step(float(now))
    inner.finish()
    work = replace(workload(2), prompts=np.array([7, 3]), outputs=np.array([5, 5]))
    assert check_against_dense(GQA, tensors, work, inner.answers) == 10


def test_a_scheduler_that_counts_too_few_blocks_is_found_out() -> None:
    """The engine never takes a page that was not counted, nor goes on when the counts do not cover its pages."""
    scheduler, inner = Scheduler(limits(num_blocks=10)), built(GQA, tensors_of(GQA), 10, 16)
    scheduler.add(Request(0, 0.0, 40, 2))
    batch = scheduler.schedule(0.0)
    assert batch is not None
    assert batch.blocks_used == 3
    batch.blocks_used = 2
    with pytest.raises(AssertionError, match="more pages than the scheduler counted"):
        inner.execute(batch)
    with pytest.raises(AssertionError, match="did not count"):
        served(built(GQA, tensors_of(GQA), 3, 16), limits(num_blocks=1000), workload())


def test_a_run_that_is_cut_off_keeps_what_was_finished(expected: Answers) -> None:
    """At a time limit requests are left unfinished: they have no answer, the others have all of it."""
    answers, record, _ = run(limits(), workload(), time_limit=0.25)
    assert 0 < record.done < len(expected)
    finished = [id for id in expected if not np.isnan(record.finish[id])]
    assert answers == {id: expected[id] for id in finished}


def test_answers_are_kept_only_where_asked_for() -> None:
    """A long run does not fill memory with tokens nobody wants."""
    inner = built(GQA, tensors_of(GQA), 1000, 16)
    inner.keep_answers = False
    served(Paid(inner), limits(), workload(5))
    inner.finish()
    assert inner.answers == {}
    assert inner.known == {}


# Errors

SCENARIO = """
[model]
name = "llama-12m"
[device]
name = "cpu"
[engine]
num_blocks = 16
max_model_tokens = 256
[latency]
kind = "affine"
step = 0.01
[workload]
requests = 3
[workload.arrivals]
kind = "at-once"
[workload.lengths]
kind = "fixed"
prompt = 9
output = 3
"""


def planned(**changes: Any) -> Plan:
    return plan(Scenario.from_toml(SCENARIO).with_(**changes))


def error_of(**changes: Any) -> str:
    """The one line that the engine says to a scenario."""
    with pytest.raises(BadInput) as caught:
        engine.executor(planned(**changes))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("mixtral-8x7b", "a mixture of experts"),
        ("qwen3-30b-a3b", "a mixture of experts"),
        ("gpt-oss-20b", "a mixture of experts"),
        ("gpt-oss-120b", "windowed layers"),
        ("falcon-180b", "parallel attention and LayerNorm"),
    ],
)
def test_models_that_it_does_not_compute(model: str, why: str) -> None:
    """Named, with what it lacks for them, before any weight is made."""
    text = error_of(model__name=model)
    assert text.startswith(f"[model] name: the engine does not run {model}: it has ")
    assert why in text


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"gated": False}, "an MLP without a gate"),
        ({"mlp_bias": True}, "biases in the MLP or after attention"),
        ({"output_bias": True}, "biases in the MLP or after attention"),
        ({"rope_kind": "yarn"}, "yarn rotary scaling"),
        ({"windowed_layers": 1, "window": 64}, "windowed layers"),
        ({"norm_bias": True}, "LayerNorm"),
    ],
)
def test_each_thing_that_it_lacks_has_a_name(change: dict[str, Any], what: str) -> None:
    with pytest.raises(BadInput, match=what):
        check_supported(replace(GQA, **change))
    check_supported(GQA)


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline_parallel", "replicas"])
def test_more_than_one_device(name: str) -> None:
    text = error_of(**{f"deployment__{name}": 2})
    assert text.startswith(f"[deployment] {name}: the engine runs on one device")


def test_no_model_to_run() -> None:
    scenario = Scenario.from_toml(SCENARIO.partition("[engine]")[1] + SCENARIO.partition("[engine]")[2])
    with pytest.raises(BadInput, match=r"\[model\]: the torch executor needs a model"):
        engine.executor(plan(scenario))


def test_a_gpu_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name it is missed; "auto" and "cpu" go on without it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert error_of(torch__device="cuda") == "[torch] device: no CUDA device is available to torch"
    for choice in ("auto", "cpu"):
        assert engine.find_device(TorchTable(device=choice)) == CPU  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [engine.find_device(TorchTable(device=choice)).type for choice in ("auto", "cpu", "cuda")] == [  # type: ignore[arg-type]
        "cuda",
        "cpu",
        "cuda",
    ]


def test_flashinfer_where_there_is_no_gpu() -> None:
    with pytest.raises(BadInput, match=r"\[torch\] attention: .*CUDA"):
        engine.executor(planned(torch__device="cpu", torch__attention="flashinfer"))()
    for choice in ("auto", "torch"):
        table = TorchTable(attention=choice)  # type: ignore[arg-type]
        assert isinstance(engine.attention_on(CPU, table, GQA, 16), TorchAttention)


def test_dtypes_of_a_gpu_and_of_a_cpu() -> None:
    """A GPU runs 16-bit weights; a CPU computes in float32 whatever the scenario says."""
    gpu: Any = SimpleNamespace(type="cuda")
    assert engine.dtype_on(gpu, "float16") is torch.float16
    assert engine.dtype_on(gpu, "bfloat16") is torch.bfloat16
    for dtype in ("fp8", "int4"):
        with pytest.raises(BadInput, match=rf"\[model\] dtype: the engine runs float16, bfloat16, not {dtype}"):
            engine.dtype_on(gpu, dtype)  # type: ignore[arg-type]
    for dtype in ("float16", "bfloat16", "fp8", "int4"):
        assert engine.dtype_on(CPU, dtype) is torch.float32  # type: ignore[arg-type]


def test_dtypes_are_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_device", lambda _: torch.device("cuda"))
    assert error_of(model__dtype="int4").startswith("[model] dtype: the engine runs")
    assert error_of(model__kv_dtype="fp8").startswith("[model] kv_dtype: the engine keeps KV in the weights' float16")


def test_more_memory_than_there_is() -> None:
    """Of the cache: how much it would be. Positions that no request can reach cost nothing."""
    for blocks in (10**10, 10**15):
        with pytest.raises(BadInput) as caught:
            engine.executor(planned(engine__num_blocks=blocks))()
        assert str(caught.value).startswith(f"[engine] num_blocks: weights and {blocks} KV blocks need ")
        assert " GB on cpu: " in str(caught.value)
    made: Any = engine.executor(planned(engine__max_model_tokens=2**40))()
    assert made.decoder.cos.shape[0] == 16 * 16


def test_an_engine_of_a_scenario_runs_it() -> None:
    """Random weights in float32 on a CPU, the scenario's blocks as pages, and a record like any other's."""
    threads = torch.get_num_threads()
    made: Any = engine.executor(planned(torch__device="cpu"))()
    assert torch.get_num_threads() == threads == 1
    assert made.decoder.weights.embedding.dtype is torch.float32
    assert (made.pages.total, made.pages.page_tokens) == (16, 16)
    record = served(
        made, planned().deployment.limits, replace(workload(3), prompts=np.full(3, 9), outputs=np.full(3, 3))
    )
    assert list(record.output) == [3, 3, 3]
    assert record.ended > 0
