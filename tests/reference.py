"""Both simulators on one workload: the real one, made to answer as the naive reference does, and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import isnan

import naive
import numpy as np

from sim.affine import Affine, AffineTable
from sim.cluster import Deployment, serve
from sim.executor import Step
from sim.record import STEP_COLUMNS, Record
from sim.request import Batch
from sim.scheduler import Limits
from sim.workload import Workload

Rows = list[tuple[float, int, int]]


class Spy(Affine):
    """Executes by the affine formula, and keeps what each batch was made of when it was launched."""

    def __init__(self, table: AffineTable, stages: int) -> None:
        super().__init__(table, stages)
        self.chunks: list[list[tuple[int, int, int]]] = []
        self.decodes: list[list[int]] = []
        self.emitting: list[list[int]] = []
        self.batches: list[Batch] = []
        self.seconds: list[float] = []

    def execute(self, batch: Batch) -> Step:
        decodes = [] if batch.group is None else [request.id for request in batch.group.by_admission()]
        last = [chunk.request.id for chunk in batch.chunks if chunk.start + chunk.tokens == chunk.request.to_prefill]
        self.chunks.append([(chunk.request.id, chunk.start, chunk.tokens) for chunk in batch.chunks])
        self.decodes.append(decodes)
        self.emitting.append(decodes + last)
        step = super().execute(batch)
        self.seconds.append(step.seconds[0])
        self.batches.append(batch)
        return step


@dataclass
class Run:
    """What the real simulator said of a workload: its record, and each replica's steps as the naive rows."""

    record: Record
    outcomes: list[naive.Outcome]
    rows: list[list[naive.StepRow]]
    spies: list[Spy]


def limits_of(settings: naive.Settings) -> Limits:
    """The same limits, as the scheduler takes them."""
    return Limits(
        policy=settings.policy,
        num_blocks=settings.num_blocks,
        block_tokens=settings.block_tokens,
        watermark=settings.watermark,
        max_sequences=settings.max_sequences,
        max_model_tokens=settings.max_model_tokens,
        max_batch_tokens=settings.max_batch_tokens,
        token_budget=settings.token_budget,
        batch_wait_iterations=settings.batch_wait_iterations,
        batch_wait_ratio=settings.batch_wait_ratio,
    )


def workload_of(settings: naive.Settings, requests: Rows, sessions: Sequence[int] | None = None) -> Workload:
    """The requests as arrays; the arrival times of a closed loop are not used."""
    return Workload(
        arrivals=None if settings.concurrency else np.array([arrival for arrival, _, _ in requests], dtype=float),
        prompts=np.array([prompt for _, prompt, _ in requests], dtype=np.int64),
        outputs=np.array([output for _, _, output in requests], dtype=np.int64),
        sessions=None if sessions is None else np.array(sessions, dtype=np.int64),
        concurrency=settings.concurrency,
        think=settings.think,
        counts={},
        notes=(),
    )


def run(
    settings: naive.Settings,
    requests: Rows,
    *,
    replicas: int = 1,
    router: str = "round-robin",
    sessions: Sequence[int] | None = None,
    seed: int = 0,
    warmup: float = 0.0,
    drain: float = 0.0,
    wall_clock: bool = False,
    keep_tokens: bool = False,
) -> Run:
    """Serve the requests with the real simulator."""
    names = ("step", "token", "sequence", "context", "prefill_attention", "hop")
    table = AffineTable(kind="affine", **{name: getattr(settings, name) for name in names})
    spies: list[Spy] = []

    def executor() -> Spy:
        spies.append(Spy(table, settings.stages))
        return spies[-1]

    record = serve(
        workload_of(settings, requests, sessions),
        Deployment(limits_of(settings), settings.stages, replicas, router, settings.ahead),
        executor,
        routing=np.random.default_rng(seed),
        time_limit=settings.time_limit,
        warmup=warmup,
        drain=drain,
        wall_clock=wall_clock,
        keep_tokens=keep_tokens,
    )
    rows = _rows(record, spies)
    return Run(record, _outcomes(record, requests, rows, spies), rows, spies)


def simulate(settings: naive.Settings, requests: Rows) -> tuple[list[naive.Outcome], list[naive.StepRow]]:
    """As `naive.simulate`: outcomes by id, rows by commit."""
    result = run(settings, requests)
    return result.outcomes, result.rows[0]


def compare(settings: naive.Settings, requests: Rows) -> Run:
    """Both simulators agree on every fact of the run, times to the last bit."""
    outcomes, rows = naive.simulate(settings, requests)
    result = run(settings, requests)
    assert result.outcomes == outcomes
    assert result.rows[0] == rows
    record = result.record
    assert record.iterations == len(rows)
    assert record.preempted == sum(row.preempted for row in rows)
    assert record.kv_peak == max((row.kv_blocks_used for row in rows), default=0)
    assert record.done == sum(outcome.status != "unfinished" for outcome in outcomes)
    gaps = [[late - early for early, late in pairwise(outcome.token_times)] for outcome in outcomes]
    assert pooled_gaps(record) == sorted(chain.from_iterable(gaps))
    for outcome, own in zip(outcomes, gaps, strict=True):
        longest = record.longest_gap[outcome.id]
        assert isnan(longest) if outcome.status == "refused" else longest == max(own, default=0.0), outcome
    return result


def pooled_gaps(record: Record) -> list[float]:
    """Every gap between two tokens of one request, in ascending order."""
    return sorted(gap for gap, count in zip(record.gaps, record.gap_counts, strict=True) for _ in range(count))


def stage_seconds(settings: naive.Settings, spy: Spy, until: float) -> float:
    """Busy time of all stages up to `until`, batch by batch and stage by stage, from the rule of section 3 alone."""
    free = [0.0] * settings.stages
    busy = 0.0
    for batch, seconds in zip(spy.batches, spy.seconds, strict=True):
        ready = batch.start
        for stage in range(settings.stages):
            begin = max(ready, free[stage])
            free[stage] = begin + seconds
            busy += max(0.0, min(free[stage], until) - min(begin, until))
            ready = free[stage] + settings.hop
    return busy


def _rows(record: Record, spies: list[Spy]) -> list[list[naive.StepRow]]:
    """The record's rows per replica, with what their batches were made of (batches of a replica end in order)."""
    assert record.steps is not None
    rows: list[list[naive.StepRow]] = [[] for _ in spies]
    for row in np.frombuffer(bytes(record.steps), dtype=list(STEP_COLUMNS.items())).tolist():
        replica, start, end, prefill_tokens, decodes, context, chunks, used, waiting, preempted = row
        nth = len(rows[replica])
        parts, ids = spies[replica].chunks[nth], spies[replica].decodes[nth]
        assert (len(parts), len(ids)) == (chunks, decodes)
        fact = naive.StepRow(start, end, prefill_tokens, decodes, context, parts, ids, used, waiting, preempted)
        rows[replica].append(fact)
    return rows


def _outcomes(record: Record, requests: Rows, rows: list[list[naive.StepRow]], spies: list[Spy]) -> list[naive.Outcome]:
    """The record's requests, their token times read off the batches that were committed."""
    token_times: dict[int, list[float]] = {}
    for replica, spy in enumerate(spies):
        for row, emitting in zip(rows[replica], spy.emitting, strict=False):
            for id in emitting:
                token_times.setdefault(id, []).append(row.end)
    outcomes = []
    for id in range(record.offered):
        finished, reason = _time(record.finish[id]), record.reasons.get(id)
        outcomes.append(
            naive.Outcome(
                id,
                record.arrival[id],
                prompt=requests[id][1],
                output=requests[id][2],
                status="refused" if reason else "unfinished" if finished is None else "completed",
                reason=reason,
                scheduled=_time(record.scheduled[id]),
                first_token=_time(record.first_token[id]),
                finished=finished,
                preemptions=record.preemptions[id],
                token_times=token_times.get(id, []),
            )
        )
        assert record.output[id] == len(outcomes[-1].token_times)
    return outcomes


def _time(value: float) -> float | None:
    return None if isnan(value) else value
