"""The paper's figures and tables from simulation, beside the published values.

Each figure is a function of `work`, which runs searches and simulations on all cores, and gives rows: what it is, its
unit, the published value (None where none is on record here) and the simulated one. Nothing here is fitted; what the
profiles were fitted to is in their pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from calibrate.paper import measures
from calibrate.paper.rows import FAR, NEAR, Figure, Row
from calibrate.paper.settings import DEPLOYMENTS, POLICIES, SLOS, STUDIED, published, scenario
from sim.parallel import cores, each
from sim.profile import load
from sim.roofline import Figures
from sim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Task:
    """A run, or with `search` the search for a capacity that the artefact would start at that rate."""

    scenario: Scenario
    search: float | None = None


Work = Callable[[Sequence[Task]], list[dict[str, Any]]]


def on_cores(
    tasks: Sequence[Task],
    *,
    requests: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """The `work` of a figure on all cores: what each task finds. `progress(done, of)` counts tasks.

    `requests` at most in every run, for a quick look: what has queues is then not the paper's.
    """
    found: dict[int, dict[str, Any]] = {}
    for position, one in each(partial(_do, requests), tasks, workers=cores()):
        found[position] = one
        if progress:
            progress(len(found), len(tasks))
    return [found[position] for position in range(len(tasks))]


def _do(requests: int | None, task: Task) -> dict[str, Any]:
    one = task.scenario
    if requests is not None and requests < one.workload.requests:
        one = one.with_(workload__requests=requests)
    return measures.run(one) if task.search is None else measures.capacity(one, task.search)


def figure_1(work: Work) -> Figure:
    """Stalls of prefill-first, and P99 TBT against load: Yi-34B TP2, 128 requests, max batch 256."""
    told = published()["stall"]
    changes = {"workload__requests": 128, "engine__max_sequences": 256, "scheduler__token_budget": 1536}
    burst = [
        scenario("yi-34b", "arxiv", policy=policy).with_(workload__arrivals__kind="at-once", **changes)
        for policy in ("prefill-first", "stall-free")
    ]
    rates = (0.55, 0.7, 1.0)
    loaded = [
        scenario("yi-34b", policy=policy).with_(workload__arrivals__rate=rate, **changes)
        for rate in rates
        for policy in ("prefill-first", "stall-free")
    ]
    first, free, *rest = work([Task(one) for one in (*burst, *loaded)])
    rows = [
        Row("1a: output tokens", "tokens", told["output_tokens"], first["output_tokens"]),
        Row("1a: stall-free ends", "s", told["stall-free_end"], free["duration_s"]),
        Row("1a: prefill-first ends", "s", told["prefill-first_end"], first["duration_s"]),
        Row("1a: prefill-first, first decode", "s", told["prefill-first_first_decode"], first["first_decode"]),
        Row("1a: prefill-first, longest stall", "s", told["prefill-first_longest_stall"], first["longest_stall"]),
        Row("1a: stall-free, longest stall", "s", None, free["longest_stall"]),
    ]
    for position, found in enumerate(rest):
        where = f"{found['policy']}, {rates[position // 2]:g} req/s"
        rows.append(Row(f"1b: P99 TBT, {where}", "s", None, found["tbt_s"]["p99"]))
    return Figure("figure-1", "generation stalls (Yi-34B TP2)", told["reading"], rows)


def figure_3(_work: Work) -> Figure:
    """Saturation: prefill throughput is flat, decode throughput grows with the batch (Mistral-7B, 1,024 tokens)."""
    told, one = published()["saturation"], scenario("mistral-7b")
    rows = []
    for batch, value in zip(told["prefill"]["batch"], told["prefill"]["tokens_per_s"], strict=True):
        seconds = measures.iteration(one, chunks=[(0, 1024)] * batch)
        rows.append(Row(f"prefill, batch {batch}", "tokens/s", value, batch * 1024 / seconds))
    for batch, value in zip(told["decode"]["batch"], told["decode"]["tokens_per_s"], strict=True):
        seconds = measures.iteration(one, decodes=batch, context=1024)
        rows.append(Row(f"decode, batch {batch}", "tokens/s", value, batch / seconds))
    prefill, decode = rows[: len(told["prefill"]["batch"])], rows[len(told["prefill"]["batch"]) :]
    shape = [
        Row("prefill, most over least", "ratio", *_of(prefill, lambda values: max(values) / min(values))),
        Row("decode, batch 64 over 1", "ratio", *_of(decode, lambda values: values[-1] / values[0])),
    ]
    return Figure("figure-3", "saturation (Mistral-7B)", told["reading"], rows + shape)


def figure_4(_work: Work) -> Figure:
    """Where the time of one iteration goes (Mistral-7B)."""
    told, one = published()["iteration"], scenario("mistral-7b")
    rows = []
    for tokens, value in zip(told["prefill"]["tokens"], told["prefill"]["seconds"], strict=True):
        rows.append(Row(f"prefill of {tokens}", "s", value, measures.iteration(one, chunks=[(0, tokens)])))
    for batch, value in zip(told["decode"]["batch"], told["decode"]["seconds"], strict=True):
        rows.append(Row(f"decode, batch {batch}", "s", value, measures.iteration(one, decodes=batch, context=1024)))
    whole = measures.iteration(one, chunks=[(0, 1024)])
    rows.append(Row("linear layers in a prefill of 1,024", "share", None, measures.linear(one, 1024) / whole))
    return Figure("figure-4", "one iteration (Mistral-7B)", told["reading"], rows)


def figure_6(_work: Work) -> Figure:
    """Linear layers of LLaMA2-70B step at every tile."""
    told, rows, notes = published()["tiles"], [], []
    for tp in (2, 4):
        one = _llama_on_a100(tp)
        for tokens, value in zip(told["tokens"], told[f"tp{tp}"], strict=True):
            rows.append(Row(f"TP{tp}, {tokens} tokens", "s", value, measures.linear(one, tokens)))
        step = measures.linear(one, 257) / measures.linear(one, 256) - 1
        rows.append(Row(f"TP{tp}, 257 over 256 tokens", "more", told["step_at_256"][f"tp{tp}"], step))
    notes.append("figures of sarathi-2024/yi-34b-a100-tp2, the same cards; none were fitted to this model on them")
    notes.append(
        "in the engine's profile, which they were fitted to, linear layers are slower than measured alone here"
    )
    return Figure("figure-6", "tiles (LLaMA2-70B linear layers, A100)", told["reading"], rows, notes)


def figure_8(work: Work) -> Figure:
    """Pipeline bubbles: a prompt next to decodes leaves a stage idle."""
    told = published()["bubble"]
    one = scenario("falcon-180b")
    prompt, decodes = measures.stage(one, chunks=[(0, 4096)]), measures.stage(one, decodes=32, context=2048)
    rows = [
        Row("prompt of 4,096, on one stage", "s", told["prefill_4k"], prompt),
        Row("32 decodes, on both", "s", told["decode_32"], measures.iteration(one, decodes=32, context=2048)),
        Row("bubble: a stage that waits for the prompt next to decodes", "s", told["bubble"], prompt - decodes),
    ]
    runs = [
        scenario("falcon-180b", policy=policy).with_(workload__arrivals__rate=0.4)
        for policy in ("prefill-first", "stall-free")
    ]
    for policy, found in zip(("prefill-first", "stall-free"), work([Task(one) for one in runs]), strict=True):
        rows.append(Row(f"idle stage time, chat at 0.4 req/s, {policy}", "share", None, found["bubble_fraction"]))
    notes = ["200 ms for 32 decodes is Table 3's, which the pipeline is fitted to; Fig. 13a has 103 ms for it"]
    return Figure("figure-8", "pipeline bubbles (Falcon-180B, TP4-PP2)", told["reading"], rows, notes)


def figure_9(_work: Work) -> Figure:
    """What prefill added to a decode batch costs."""
    rows, readings = [], []
    for name, one in (("mistral-7b", scenario("mistral-7b")), ("llama-2-70b", _llama_on_a100(4))):
        told = published()["hybrid"][name]
        readings.append(f"{name}: {told['reading']}")
        for n, (context, batch) in enumerate(zip(told["context"], told["batch"], strict=True)):
            chunk = told["budget"] - batch
            where = f"{name}, context {context}, batch {batch}"
            alone = measures.iteration(one, batch, context)
            hybrid = measures.iteration(one, batch, context, [(context - chunk, chunk)])
            whole = measures.iteration(one, batch, context, [(0, context)])
            rows += [
                Row(f"{where}: decodes alone", "s", told["decode_only"][n], alone),
                Row(f"{where}: with a chunk", "s", told["with_chunk"][n], hybrid),
                Row(f"{where}: with a whole prompt", "s", told["with_prompt"][n], whole),
            ]
    notes = ["LLaMA2-70B on four A100: figures of sarathi-2024/yi-34b-a100-tp2, the same cards"]
    return Figure("figure-9", "adding prefill to decodes", "; ".join(readings), rows, notes)


def figure_10(work: Work) -> Figure:
    """Capacity of Mistral-7B and Yi-34B."""
    return capacities("figure-10", "capacity (Mistral-7B, Yi-34B TP2)", ("mistral-7b", "yi-34b"), work)


def figure_11(work: Work) -> Figure:
    """Capacity of LLaMA2-70B and Falcon-180B, pipelined."""
    return capacities("figure-11", "capacity (LLaMA2-70B and Falcon-180B, TP4-PP2)", STUDIED[2:], work)


def figure_12(work: Work) -> Figure:
    """Capacity against the P99 TBT limit: chat, 1,024 requests."""
    limits = {"mistral-7b": (0.1, 0.2, 0.3, 0.4, 0.5), "yi-34b": (0.2, 0.4, 0.6, 0.8, 1.0)}
    systems: list[tuple[str, dict[str, Any]]] = [
        *(("prefill-first", {"engine__max_sequences": batch}) for batch in (32, 64, 128)),
        *(("stall-free", {"scheduler__token_budget": budget}) for budget in (512, 2048)),
    ]
    cells = [(name, limit, *system) for name, several in limits.items() for limit in several for system in systems]
    tasks = [
        _search(
            name, "chat", scenario(name, policy=policy).with_(workload__requests=1024, slo__tbt_p99=limit, **changes)
        )
        for name, limit, policy, changes in cells
    ]
    rows = [
        Row(f"{name}, P99 TBT {limit:g} s, {policy} {next(iter(changes.values()))}", "req/s", None, found["rate"])
        for (name, limit, policy, changes), found in zip(cells, work(tasks), strict=True)
    ]
    notes = ["prefill-first with its max batch, stall-free with its token budget and a max batch of 128"]
    return Figure("figure-12", "capacity against the SLO", "not on record here", rows, notes)


def figure_13(work: Work) -> Figure:
    """Falcon-180B over two nodes: tensor parallelism over Ethernet against a pipeline."""
    told, rows = published()["pipeline"], []
    for name, key in (("falcon-180b-tp8", "tp8"), ("falcon-180b", "tp4-pp2")):
        one = scenario(name)
        for batch, value in zip(told["batch"], told[key], strict=True):
            rows.append(Row(f"13a: decode-only TBT, {key}, batch {batch}", "s", value, measures.decode(one, batch)))
    cells = [
        (name, slo, policy)
        for name, policy in (
            ("falcon-180b-tp8", "prefill-first"),
            ("falcon-180b", "prefill-first"),
            ("falcon-180b", "stall-free"),
        )
        for slo in SLOS
    ]
    found = work([_search(name, "chat", scenario(name, "chat", slo, policy)) for name, slo, policy in cells])
    for (name, slo, policy), one_found in zip(cells, found, strict=True):
        capacity = published()["capacity"].get(name, {}).get("chat", {}).get(policy)
        value = capacity[SLOS.index(slo)] if capacity else None
        rows.append(Row(f"13b: capacity, {name}, {policy}, {slo}", "req/s", value, one_found["rate"]))
    notes = [
        "13a: a batch of decodes at the mean context of the dataset, which the two stages share",
        "13a contradicts Table 3: 103 ms where that has 200 for the pipeline, which is fitted to Table 3",
    ]
    return Figure("figure-13", "two nodes (Falcon-180B)", told["reading"], rows, notes)


def figure_14(_work: Work) -> Figure:
    """What chunks cost: prefill time over that of one piece (Yi-34B TP2)."""
    told, one = published()["chunks"], scenario("yi-34b")
    rows = []
    for prompt, ratios in zip(told["prompt"], told["ratio"], strict=True):
        for chunk, value in zip(told["chunk"], ratios, strict=True):
            ratio = measures.prefill(one, prompt, chunk) / measures.prefill(one, prompt, prompt)
            rows.append(Row(f"prompt {prompt}, chunk {chunk}", "ratio", value, ratio))
    return Figure("figure-14", "chunking overhead (Yi-34B TP2)", told["reading"], rows)


def table_3(_work: Work) -> Figure:
    """The SLOs: five times a decode iteration at batch 32 and 4k context."""
    told = published()["base"]
    rows = [
        Row(name, "s", told.get(name, told["falcon-180b"]), measures.iteration(scenario(name), 32, 4096))
        for name in DEPLOYMENTS
    ]
    notes = ["Fig. 13a has 209 ms for Falcon-180B on TP8, but 103 ms on TP4-PP2: the pipeline is fitted to Table 3"]
    return Figure("table-3", "decode iterations behind the SLOs", told["reading"], rows, notes)


def table_4(work: Work) -> Figure:
    """The ablation: hybrid batches alone, chunks alone, both (Yi-34B TP2, 128 requests)."""
    cells = []
    for dataset, rate, longest in (("chat", 1.0, 8192), ("arxiv", 0.5, 16384)):
        for label, policy, budget in (
            ("hybrid batches only", "stall-free", longest),
            ("chunks only", "alternating", 1024),
            ("both", "stall-free", 1024),
        ):
            changes = {"workload__requests": 128, "workload__arrivals__rate": rate, "scheduler__token_budget": budget}
            cells.append((f"{dataset}, {label}", scenario("yi-34b", dataset, policy=policy).with_(**changes)))
    rows = []
    for (label, _), found in zip(cells, work([Task(one) for _, one in cells]), strict=True):
        rows.append(Row(f"{label}: P50 TTFT", "s", None, found["ttft_s"]["p50"]))
        rows.append(Row(f"{label}: P99 TBT", "s", None, found["tbt_s"]["p99"]))
    return Figure("table-4", "ablation (Yi-34B TP2)", "not on record here", rows)


FIGURES: dict[str, Callable[[Work], Figure]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(figure_1, figure_3, figure_4, figure_6, figure_8, figure_9, figure_10, figure_11, figure_12, figure_13),
        *(figure_14, table_3, table_4),
    )
}


def capacities(name: str, title: str, deployments: Iterable[str], work: Work) -> Figure:
    """Capacities of deployments for both datasets, both SLOs and three policies, as in Figs. 10 and 11."""
    told = published()["capacity"]
    cells = [
        (deployment, dataset, slo, policy)
        for deployment in deployments
        for dataset in ("chat", "arxiv")
        for slo in SLOS
        for policy in POLICIES
    ]
    found = work([_search(cell[0], cell[1], scenario(*cell)) for cell in cells])
    rates = [one["rate"] for one in found]
    shown = [told[name][dataset][policy][SLOS.index(slo)] for name, dataset, slo, policy in cells]
    rows = [Row(", ".join(cell), "req/s", *pair) for cell, *pair in zip(cells, shown, rates, strict=True)]
    gains, wrong = [], []
    for first in range(0, len(cells), len(POLICIES)):
        setting = ", ".join(cells[first][:3])
        ours, theirs = rates[first : first + len(POLICIES)], shown[first : first + len(POLICIES)]
        for policy, base, by in zip(POLICIES[:-1], ours, theirs, strict=False):
            what = f"{setting}: stall-free over {policy}"
            gains.append(Row(what, "ratio", theirs[-1] / by, ours[-1] / base if base else None))
        if np.argsort(ours, kind="stable").tolist() != np.argsort(theirs, kind="stable").tolist():
            wrong.append(setting)
    notes = [_tally(rows, "capacities"), _tally(gains, "gains")]
    notes.append(f"the policies are ordered otherwise: {'; '.join(wrong)}" if wrong else "all orderings as published")
    return Figure(name, title, told["reading"], [*rows, *gains], notes)


def _search(name: str, dataset: str, one: Scenario) -> Task:
    return Task(one, DEPLOYMENTS[name].first_rate[dataset])


def _llama_on_a100(tp: int) -> Scenario:
    """LLaMA2-70B on A100 cards in one stage, with the figures of Yi-34B's profile there."""
    profile = load(DEPLOYMENTS["yi-34b"].profile, scenario("yi-34b").directory)
    assert isinstance(profile.roofline, Figures)
    figures = profile.roofline.model_dump(exclude_none=True)
    one = scenario("llama-2-70b", figures=figures)
    return one.with_(device__name="a100-80gb-pcie", deployment={"tensor_parallel": tp})


def _of(rows: Sequence[Row], ratio: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """A ratio of the published values, and of the simulated ones."""
    return ratio([row.published or 0.0 for row in rows]), ratio([row.simulated or 0.0 for row in rows])


def _tally(rows: Sequence[Row], what: str) -> str:
    errors = np.array([abs(row.error) for row in rows if row.error is not None])
    return (
        f"{int((errors <= NEAR).sum())} of {len(errors)} {what} within {NEAR:.0%}, {int((errors <= FAR).sum())} within "
        f"{FAR:.0%}; mean error {errors.mean():.1%}, largest {errors.max():.1%}"
    )
