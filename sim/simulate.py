"""From a scenario to its result: what serves, what it serves, and the run itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from sim import hardware, memory
from sim.affine import Affine, AffineTable
from sim.budget import CHUNKED, Budget, assume, invert, limit_of, smallest
from sim.cluster import Deployment, Watch, serve
from sim.errors import BadInput
from sim.executor import Executor, LatencyModel
from sim.matching import profile_of, resolved, without_effect
from sim.profile import ProfileLatency, ProfileRoofline
from sim.report import Report
from sim.roofline import Roofline, RooflineTable
from sim.scenario import Scenario
from sim.scheduler import Limits, Scheduler
from sim.schema import SchedulerTable
from sim.workload import Workload, build, streams


@dataclass(frozen=True, slots=True)
class Plan:
    """A scenario made ready to run: names looked up, memory divided, nothing drawn yet."""

    scenario: Scenario
    model: hardware.Model | None
    device: hardware.Device | None
    memory: memory.Memory | None  # None where num_blocks was given
    deployment: Deployment
    executor: Callable[[], LatencyModel]

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        parallel = self.scenario.deployment
        return parallel.tensor_parallel * parallel.pipeline_parallel * parallel.replicas


Engine = Callable[[Plan], Callable[[], Executor]]


def plan(scenario: Scenario) -> Plan:
    """Look up and size everything that the scenario names. BadInput for what cannot be."""
    try:
        return _plan(scenario.for_policy(scenario.scheduler.policy))
    except BadInput as error:
        raise scenario.blame(error) from None


def workload(scenario: Scenario) -> Workload:
    """The requests of a scenario. BadInput for what cannot be read or drawn."""
    try:
        work = build(scenario.workload, scenario.engine.max_model_tokens, scenario.directory)
        _check_together(scenario, work)
    except BadInput as error:
        raise scenario.blame(error) from None
    return work


def simulate(
    scenario: Scenario,
    *,
    keep_steps: bool = True,
    keep_tokens: bool = False,
    wall_clock: bool = False,
    watch: Watch | None = None,
    requests: Workload | None = None,
    engine: Engine | None = None,
    scheduler: Callable[[Limits], Scheduler] | None = None,
) -> Report:
    """Run a scenario. `requests` are used instead of the workload that the scenario describes, where given.

    `keep_tokens` logs when every token came, for `sim.bench`. `engine(plan)` makes what executes batches instead of the
    scenario's latency model (`gpu_backend.engine.executor`).

    `watch(record, now)` sees the run from time to time and stops it by returning True; `wall_clock` lets requests
    arrive in real time; `scheduler(limits)` makes one that is watched (`sim.watched`). BadInput for a scenario that
    cannot be run.
    """
    planned = plan(scenario)
    work = requests if requests is not None else workload(planned.scenario)
    _check_together(planned.scenario, work)
    metrics = scenario.metrics
    try:
        record = serve(
            work,
            planned.deployment,
            engine(planned) if engine is not None else planned.executor,
            routing=np.random.default_rng(streams(scenario.workload.seed).routing),
            time_limit=planned.scenario.engine.time_limit,
            warmup=metrics.warmup,
            drain=metrics.drain,
            keep_steps=keep_steps,
            keep_tokens=keep_tokens,
            wall_clock=wall_clock,
            watch=watch,
            scheduler=scheduler,
        )
    except BadInput as error:  # an engine that cannot be made
        raise scenario.blame(error) from None
    return Report(planned, work, record, measured=engine is not None)


def _check_together(scenario: Scenario, work: Workload) -> None:
    """What neither the scenario nor its requests can tell alone."""
    if scenario.deployment.router == "sticky" and work.sessions is None:
        what = "sticky needs a trace with sessions (a column session_id)"
        raise scenario.blame(BadInput(what, key="[deployment] router"))
    if (drain := scenario.metrics.drain) and work.arrivals is None:
        what = f"{drain:g} s before the last arrival is not known in a closed loop; only warmup is"
        raise scenario.blame(BadInput(what, key="[metrics] drain"))


def _plan(scenario: Scenario) -> Plan:
    scenario = resolved(scenario)
    if (told := without_effect(scenario)) is not None:
        scenario = scenario.noting(told)
    parallel, engine = scenario.deployment, scenario.engine
    tp, pp = parallel.tensor_parallel, parallel.pipeline_parallel
    model = hardware.model(scenario.model, scenario.directory) if scenario.model else None
    device = hardware.device(scenario.device) if scenario.device else None
    if model is not None:
        model.check_parallel(tp, pp)
    executor = _executor(scenario, model, device)
    scenario = _with_budget(scenario, executor)
    limits = _limits(scenario)
    room = None
    if engine.num_blocks is None:
        assert model is not None  # Scenario.check
        assert device is not None
        room = memory.num_blocks(
            model,
            device,
            tp=tp,
            pp=pp,
            block_tokens=engine.block_tokens,
            memory_fraction=engine.memory_fraction,
            max_batch_tokens=_largest_batch(limits),
            max_sequences=engine.max_sequences,
        )
        limits = replace(limits, num_blocks=room.num_blocks)
    deployment = Deployment(limits, pp, parallel.replicas, parallel.router, engine.schedule_ahead)
    return Plan(scenario, model, device, room, deployment, executor)


def _limits(scenario: Scenario) -> Limits:
    engine, budget = scenario.engine, scenario.scheduler.token_budget
    assert budget != "auto"  # _plan
    return Limits(
        policy=scenario.scheduler.policy,
        num_blocks=engine.num_blocks or 0,
        block_tokens=engine.block_tokens,
        watermark=engine.watermark,
        max_sequences=engine.max_sequences,
        max_model_tokens=engine.max_model_tokens,
        max_batch_tokens=engine.max_batch_tokens or engine.max_model_tokens,
        token_budget=budget,
        overlap=scenario.scheduler.overlap,
        batch_wait_iterations=scenario.scheduler.batch_wait_iterations,
        batch_wait_ratio=scenario.scheduler.batch_wait_ratio,
    )


def derived(scenario: Scenario, executor: Executor, requests: Workload | None = None) -> Budget:
    """The budget that the scenario's TBT limit allows, at the contexts of its workload. BadInput without a limit."""
    _, limit = limit_of(scenario)
    return invert(scenario, executor, limit, assume(scenario, requests or workload(scenario), limit))


def _with_budget(scenario: Scenario, executor: Callable[[], Executor]) -> Scenario:
    """token_budget = "auto" made a number."""
    if scenario.scheduler.token_budget != "auto":
        return scenario
    if scenario.scheduler.policy not in CHUNKED:
        return scenario.with_(scheduler__token_budget=SchedulerTable().token_budget)  # not read
    found = derived(scenario, executor())
    tokens = found.tokens or smallest(scenario, found.assumed.decodes)
    told = "; ".join((f"token_budget = auto: {tokens} tokens", *found.notes))
    return scenario.with_(scheduler__token_budget=tokens).noting(told)


def _largest_batch(limits: Limits) -> int:
    """Tokens of the largest batch that memory must be kept for: an engine measures itself with one before it serves."""
    chunked = limits.policy in ("stall-free", "alternating")
    return max(limits.token_budget, limits.max_sequences) if chunked else limits.max_batch_tokens


def _executor(
    scenario: Scenario, model: hardware.Model | None, device: hardware.Device | None
) -> Callable[[], LatencyModel]:
    latency, parallel = scenario.latency, scenario.deployment
    if isinstance(latency, AffineTable):
        return partial(Affine, latency, parallel.pipeline_parallel)
    if isinstance(latency, RooflineTable):
        assert model is not None  # Scenario.check
        assert device is not None
        return partial(Roofline, latency, model, device, parallel.tensor_parallel, parallel.pipeline_parallel)
    profile = profile_of(scenario, model, device)
    if profile.coefficients is not None:
        return partial(ProfileLatency, profile)
    assert model is not None  # Scenario.check
    assert device is not None
    return partial(ProfileRoofline, profile, model, device)
