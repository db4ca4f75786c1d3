"""A run as `vllm bench serve --save-result --save-detailed` writes one, so that scripts for its results read ours.

Keys, units, order and formulas are those of vLLM 0.33.0 (`vllm/benchmarks/serve.py`), with `--percentile-metrics
ttft,tpot,itl,e2el`: seconds in the lists, milliseconds in `*_ms`, percentiles interpolated (numpy's default) where
summary.json gives ranks, all over the completed requests, warm-up or not. Where the tool's answer is not a simulator's:

* `date` is the zero of the simulated clock: no wall clock goes into a result, and a seed gives the same bytes.
* `duration` counts from the zero of the clock, when the tool starts, and not from the first arrival.
* `backend` is servecast, or servecast-torch for a run of the engine; `label` is the scenario's name; `tokenizer_id` is
  null, as with --skip-tokenizer-init, and `generated_texts` are empty: there is no text.
* `burstiness` is "inf" for constant arrivals, as the tool spells its `request_rate`: a bare Infinity is not JSON.
* Requests that were refused or cut off are the tool's failed ones: a reason in `errors`, `output_lens` 0 and
  `latencies` 0.0, `ttfts` and `itls` as far as they came. `queue_times` are 0: no request waits in the client.
* `policy`, `seed`, `simulator` and `times_from` stand where the tool puts its `--metadata`.
* Over `MOST_GAPS` output tokens `itls` is left out (20 bytes each); everything computed from it stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim.arrivals import Closed, Constant, Gamma, Poisson, TraceArrivals
from sim.record import Record
from sim.report import Report, times_from
from sim.tokens import Stretches

if TYPE_CHECKING:
    from sim.workload import WorkloadTable

Floats = npt.NDArray[np.float64]
Pairs = tuple[Floats, npt.NDArray[np.int64] | None]  # values, and how many there are of each (None: one)

PERCENTILES = (50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
MOST_GAPS = 5_000_000  # some 100 MB of text
EPOCH = "19700101-000000"
_GAPS = '"itls": null'
GOODPUT = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}  # our limits per request, in the tool's names


def of_run(report: Report) -> bytes:
    """The result as one line of strict JSON. The run must have kept its tokens."""
    assert report.record.tokens is not None
    stretches = report.record.tokens.stretches()
    text = json.dumps(_result(report, stretches), allow_nan=False)
    if not too_many(report.record):
        before, here, after = text.rpartition(_GAPS)
        text = f"{before}{here[:-4]}[{', '.join(gaps(report.record, stretches))}]{after}"
    return text.encode()


def too_many(record: Record) -> bool:
    """Whether the run emitted so many tokens that their gaps are not written one by one."""
    return int(_column(record, "output", np.int64).sum()) > MOST_GAPS


def gaps(record: Record, stretches: Stretches) -> Iterator[str]:
    """A JSON list for each offered request: the gaps between its tokens, as json.dumps would write them."""
    n, finish, outputs = record.offered, _column(record, "finish"), _column(record, "output", np.int64)
    steady = [repr(gap) for gap in np.diff(stretches.times).tolist()]
    newest, ids, since = stretches.newest(), stretches.ids, stretches.since
    rows = zip(
        stretches.first.tolist(),
        stretches.end.tolist(),
        stretches.between().tolist(),
        (since - np.concatenate([since[:1], newest[:-1]])).tolist(),
        (np.append(stretches.times, 0.0)[stretches.first] - since).tolist(),
        stretches.last_alone(outputs, finish).tolist(),
        (finish[ids] - newest).tolist(),
        strict=True,
    )
    for many in np.bincount(ids, minlength=n).tolist():
        own: list[str] = []
        for first, end, between, readmitted, joined, alone, last in islice(rows, many):
            if between:
                own.append(repr(readmitted))
            if end > first:
                own.append(repr(joined))
                own += steady[first : end - 1]
            if alone:
                own.append(repr(last))
        yield f"[{', '.join(own)}]"


def _result(report: Report, stretches: Stretches) -> dict[str, Any]:
    """Everything but the gaps themselves; `itls` is null where they are to stand, and not there where they are not."""
    record, n = report.record, report.record.offered
    start, first, finish = (_column(record, name) for name in ("arrival", "first_token", "finish"))
    prompts = report.workload.prompts[:n]
    done = ~np.isnan(finish)
    ttft, latency = np.nan_to_num(first - start), np.nan_to_num(finish - start)
    outputs = np.where(done, _column(record, "output", np.int64), 0)
    many = outputs > 1
    tpot = np.divide(latency - ttft, outputs - 1, out=np.zeros(n), where=many)
    itls, tokens = _pooled(record, stretches, done)
    duration = record.ended
    total_in, total_out, completed = int(prompts[done].sum()), int(outputs.sum()), int(done.sum())
    good = _good(report, done, ttft, latency, tpot)

    def per_second(count: int) -> float | None:
        return count / duration if duration > 0 else None

    result: dict[str, Any] = _setup(report) | {
        "duration": duration,
        "completed": completed,
        "failed": n - completed,
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": per_second(completed),
        "request_goodput": None if good is None else per_second(good),
        "output_throughput": per_second(total_out),
        "total_token_throughput": per_second(total_in + total_out),
        "input_lens": prompts.tolist(),
        "output_lens": outputs.tolist(),
        "ttfts": ttft.tolist(),
        "itls": None,
        "latencies": latency.tolist(),
        "start_times": start.tolist(),
        "queue_times": [0.0] * n,
        "generated_texts": [""] * n,
        "errors": _errors(report, done),
        "max_output_tokens_per_s": _busiest_second(start[done], tokens),
        "max_concurrent_requests": _most_at_once(start[done], latency[done]),
        "rtfx": 0.0,
    }
    if too_many(record):
        del result["itls"]
    for name, pairs in (
        ("ttft", (ttft[done], None)),
        ("tpot", (tpot[many], None)),
        ("itl", itls),
        ("e2el", (latency[done], None)),
    ):
        result |= statistics(name, pairs)
    return result


def _setup(report: Report) -> dict[str, Any]:
    """What the tool was asked to do."""
    scenario = report.plan.scenario
    backend = "servecast-torch" if report.measured else "servecast"
    model = None if report.plan.model is None else report.plan.model.name
    return {
        "date": EPOCH,
        "endpoint_type": backend,
        "backend": backend,
        "label": scenario.name,
        "model_id": model,
        "tokenizer_id": None,
        "num_prompts": scenario.workload.requests,
        "simulator": "servecast",
        "policy": scenario.scheduler.policy,
        "seed": str(scenario.workload.seed),
        "times_from": times_from(scenario, measured=report.measured),
        **traffic(scenario.workload),
    }


def traffic(workload: WorkloadTable) -> dict[str, Any]:
    """Arrivals in the tool's terms: its rate, its burstiness (the shape of gamma-distributed gaps), its concurrency."""
    arrivals = workload.arrivals
    rate = arrivals.rate if isinstance(arrivals, Poisson | Gamma | Constant | TraceArrivals) else None
    burstiness: float | str = 1.0
    if isinstance(arrivals, Gamma):
        burstiness = 1 / arrivals.cv**2
    elif isinstance(arrivals, Constant):
        burstiness = "inf"
    return {
        "request_rate": "inf" if rate is None else rate,
        "burstiness": burstiness,
        "max_concurrency": arrivals.concurrency if isinstance(arrivals, Closed) else None,
    }


def statistics(name: str, pairs: Pairs) -> dict[str, float]:
    """Mean, median, population std and percentiles in milliseconds; 0 where there is nothing, as the tool has it."""
    values, counts = pairs
    n = len(values) if counts is None else int(counts.sum())
    if not n:
        values, counts, n = np.zeros(1), None, 1
    mean = float(np.average(values, weights=counts))
    variance = float(np.average((values - mean) ** 2, weights=counts))
    percentiles = _interpolated(values, counts, PERCENTILES)
    told = {f"mean_{name}_ms": mean, f"median_{name}_ms": percentiles[0], f"std_{name}_ms": variance**0.5}
    told |= {f"p{percent:g}_{name}_ms": value for percent, value in zip(PERCENTILES, percentiles, strict=True)}
    return {key: value * 1000 for key, value in told.items()}


def _interpolated(values: Floats, counts: npt.NDArray[np.int64] | None, percents: tuple[float, ...]) -> list[float]:
    """numpy.percentile of `values`, each there `counts` times, without spelling them out."""
    if counts is None:
        return [float(value) for value in np.percentile(values, percents)]
    order = np.argsort(values)
    ordered, ranks = values[order], np.cumsum(counts[order])
    place = (ranks[-1] - 1) * np.array(percents) / 100
    below = np.floor(place)
    low, high = (
        ordered[np.searchsorted(ranks, np.minimum(at, ranks[-1] - 1), side="right")] for at in (below, below + 1)
    )
    part = place - below
    return [float(value) for value in np.where(part < 0.5, low + (high - low) * part, high - (high - low) * (1 - part))]


def _pooled(record: Record, stretches: Stretches, done: npt.NDArray[np.bool_]) -> tuple[Pairs, Pairs]:
    """Of the completed requests: gaps between tokens, and times of tokens, each with how many there are of it.

    Members of a group that were there for its previous step share a gap, so that the work follows the iterations.
    """
    finish, outputs = _column(record, "finish"), _column(record, "output", np.int64)
    here = done[stretches.ids]
    emits = here & (stretches.end > stretches.first)
    first, end = stretches.first[emits], stretches.end[emits]
    newest, between = stretches.newest(), stretches.between()
    readmitted, alone = np.flatnonzero(here & between), here & stretches.last_alone(outputs, finish)
    lone = np.concatenate([stretches.since[readmitted], finish[stretches.ids[alone]]])
    single = [stretches.times[first] - stretches.since[emits], lone - np.append(newest[readmitted - 1], newest[alone])]
    steps = len(stretches.times) + 1

    def covered(starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many stretches emit at each step, from `starts` on."""
        change = np.bincount(starts, minlength=steps) - np.bincount(end, minlength=steps)
        return np.cumsum(change)[:-1]

    emitting, steady = covered(first), covered(first + 1)[1:]
    times = [stretches.times, _column(record, "first_token")[done], lone]
    return _pairs([np.diff(stretches.times), *single], steady), _pairs(times, emitting)


def _pairs(values: list[Floats], counts: npt.NDArray[np.int64]) -> Pairs:
    """The first of `values` so many times each, the others once."""
    some = counts > 0
    ones = np.ones(sum(map(len, values[1:])), dtype=np.int64)
    return np.concatenate([values[0][some], *values[1:]]), np.concatenate([counts[some], ones])


def _good(
    report: Report,
    done: npt.NDArray[np.bool_],
    ttft: Floats,
    latency: Floats,
    tpot: Floats,
) -> int | None:
    """Completed requests that meet the scenario's limits per request, as far as the tool knows such limits."""
    limits = {key: limit for key, limit in report.plan.scenario.slo.per_request.items() if key in GOODPUT}
    values = {"ttft": ttft, "e2e": latency, "tpot": tpot}
    good = done.copy()
    for key, limit in limits.items():
        good &= values[key] <= limit
    return int(good.sum()) if limits else None


def _errors(report: Report, done: npt.NDArray[np.bool_]) -> list[str]:
    """The reason of every failure, "" for the completed."""
    reasons = report.record.reasons
    return [
        "" if fine else f"refused: {reasons[id]}" if id in reasons else "unfinished when the run ended"
        for id, fine in enumerate(done.tolist())
    ]


def _busiest_second(start: Floats, tokens: Pairs) -> float:
    """Most output tokens in one second, counted from the first start."""
    times, counts = tokens
    if not len(start):
        return 0.0
    _, second = np.unique(np.floor(times - start.min()), return_inverse=True)
    return float(np.bincount(second, weights=counts).max())


def _most_at_once(start: Floats, latency: Floats) -> int:
    """Most requests that are under way in the same second, counted from the first start."""
    if not len(start):
        return 0
    began, ended = np.floor(start - start.min()), np.floor(start + latency - start.min()) + 1
    seconds, place = np.unique(np.concatenate([began, ended]), return_inverse=True)
    came, went = (np.bincount(one, minlength=len(seconds)) for one in (place[: len(began)], place[len(began) :]))
    return max(1, int(np.cumsum(came - went).max()))


def _column(record: Record, name: str, dtype: type = np.float64) -> npt.NDArray[Any]:
    """A column of the record, for the requests that were offered."""
    return np.frombuffer(getattr(record, name), dtype=dtype)[: record.offered]
