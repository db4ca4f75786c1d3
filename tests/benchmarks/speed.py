"""How fast the simulator is. Run on demand: `make bench`, or `python tests/benchmarks/speed.py --million`.

Rates are iterations per second of process time on one core, best of three, and their ratio to a bare SimPy loop of
timeouts in the same run: these machines are noisy, ratios less so.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import simpy

sys.path[:0] = [str(Path(__file__).parents[1])]

import naive

from sim import Scenario, simulate
from sim.policies import POLICIES
from sim.report import Report
from sim.simulate import workload

AFFINE = """
kind = "affine"
step = 0.012
token = 6e-5
sequence = 2e-5
context = 3e-8
prefill_attention = 1e-9
"""
SCENARIO = """
name = "benchmark"
[model]
name = "mistral-7b"
[device]
name = "a100-80gb-sxm"
[engine]
num_blocks = 100_000
[scheduler]
token_budget = 640
[latency]
{latency}
[workload]
requests = 8_000
[workload.arrivals]
kind = "poisson"
rate = 7.0
[workload.lengths]
{lengths}
"""
CHAT = 'kind = "dataset"\nname = "openchat-sharegpt4"'  # prompts of 2,340 tokens on average: a chunk in every iteration
SHORT = 'kind = "uniform"\nprompt = [100, 900]\noutput = [100, 900]'
ROOFLINE = 'kind = "roofline"'


def bare_loop(events: int = 300_000) -> float:
    """Events per second of a process that does nothing but wait."""
    env = simpy.Environment()

    def wait() -> object:
        while True:
            yield env.timeout(1.0)

    env.process(wait())  # type: ignore[arg-type]
    start = time.process_time()
    env.run(until=events)
    return events / (time.process_time() - start)


def measured(scenario: Scenario, *, keep_steps: bool = False) -> tuple[float, Report]:
    """Process seconds of one run, its workload made before."""
    requests = workload(scenario)
    start = time.process_time()
    report = simulate(scenario, keep_steps=keep_steps, requests=requests)
    return time.process_time() - start, report


def iterations(scenario: Scenario, *, keep_steps: bool = False) -> tuple[float, float]:
    """Iterations per second, best of three, and the mean decodes of an iteration."""
    best = min((measured(scenario, keep_steps=keep_steps) for _ in range(3)), key=lambda pair: pair[0])
    seconds, report = best
    decodes = report.record.gap_counts
    return report.record.iterations / seconds, sum(decodes) / report.record.iterations


def policies() -> None:
    """Every policy, with both latency models, and a pipeline of two stages."""
    bare = max(bare_loop() for _ in range(3))
    print(f"bare SimPy timeouts: {bare:,.0f} a second\n")
    print(f"{'':42}{'iterations/s':>14}{'of bare':>9}{'mean batch':>12}")
    for latency, table in (("affine", AFFINE), ("roofline", ROOFLINE)):
        for name, lengths in (("short", SHORT), ("chat", CHAT)):
            scenario = Scenario.from_toml(SCENARIO.format(latency=table, lengths=lengths))
            for policy in POLICIES if name == "short" else ("stall-free",):
                for stages in (1, 2) if policy == "stall-free" else (1,):
                    one = scenario.with_(scheduler__policy=policy, deployment__pipeline_parallel=stages)
                    tell(f"{latency}, {name}, {policy}, {stages} stage", iterations(one), bare)
        tell(f"{latency}, {name}, stall-free, step table", iterations(scenario, keep_steps=True), bare)


def tell(what: str, found: tuple[float, float], bare: float) -> None:
    """A line of the table."""
    rate, batch = found
    print(f"{what:42}{rate:>14,.0f}{rate / bare:>9.3f}{batch:>12.0f}")


def whole_run() -> None:
    """A warm run of 1,000 requests from scenario to summary."""
    scenario = Scenario.from_toml(SCENARIO.format(latency=ROOFLINE, lengths=CHAT)).with_(workload__requests=1_000)

    def once() -> float:
        start = time.process_time()
        _ = simulate(scenario).summary
        return time.process_time() - start

    print(f"\nwarm run of 1,000 chat requests, scenario to summary: {min(once() for _ in range(3)):.2f} s")


def against_naive() -> None:
    """The naive reference of the tests on the same requests: a loop over the running requests."""
    scenario = Scenario.from_toml(SCENARIO.format(latency=AFFINE, lengths=CHAT)).with_(workload__requests=300)
    seconds, report = measured(scenario)
    work, limits = report.workload, report.plan.deployment.limits
    assert work.arrivals is not None
    settings = naive.Settings(
        limits.policy,
        limits.num_blocks,
        token_budget=limits.token_budget,
        step=0.012,
        token=6e-5,
        sequence=2e-5,
        context=3e-8,
        prefill_attention=1e-9,
    )
    requests = list(zip(work.arrivals.tolist(), work.prompts.tolist(), work.outputs.tolist(), strict=True))
    start = time.process_time()
    outcomes, _ = naive.simulate(settings, requests)
    slow = time.process_time() - start
    assert [o.finished for o in outcomes] == list(report.record.finish), "they must agree to the bit"
    print(f"naive reference on 300 requests: {slow:.1f} s against {seconds:.3f} s, {slow / seconds:.0f} times as long")


def million(requests: int = 1_000_000, replicas: int = 64) -> None:
    """A million requests on 64 replicas, and a quarter of them for the cost per request."""
    scenario = Scenario.from_toml(SCENARIO.format(latency=AFFINE, lengths=CHAT)).with_(
        deployment__replicas=replicas, workload__arrivals__rate=2.0 * replicas
    )
    for count in (requests // 4, requests):
        seconds, report = measured(scenario.with_(workload__requests=count))
        completed = report.summary["completed"]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{count:,} requests on {replicas} replicas: {seconds:.0f} s, {seconds / count * 1e6:.0f} µs a request, "
            f"{report.record.iterations:,} iterations, peak {peak:.2f} GiB, {completed:,} completed, "
            f"P99 TBT {report.summary['tbt_s']['p99']:.4f} s"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", action="store_true", help="a million requests on 64 replicas, and nothing else")
    if parser.parse_args().million:
        million()
    else:
        policies()
        whole_run()
        against_naive()
