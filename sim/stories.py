"""What is said about late tokens: what each cause is called, what would help, and the story of one wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

from sim.blame import total
from sim.simulate import Plan
from sim.text import percent, seconds
from sim.watched import Iteration, Late

NAMES = {
    "prefill_beside": "prompts in the same batch",
    "prefill_ahead": "prompts that ran ahead of decodes",
    "memory": "waiting for memory after a preemption",
    "recomputation": "computing again what preemptions undid",
    "pipeline": "pipeline bubbles: waiting for stages busy with other batches",
    "decode_batch": "the size of the decode batch",
    "decode_context": "the contexts of the decode batch",
    "iteration": "what an iteration takes with a single decode",
    "communication": "communication",
    "host": "the host",
    "unmodelled": "what the latency model does not account for",
    "queue_memory": "queueing for memory",
    "queue_slots": "queueing for a slot (max_sequences)",
    "queue_others": "queueing behind others",
    "own_prefill": "the prompt's own prefill",
    "interleaving": "others' work during the prefill",
}
FEWEST_SHARE = 0.05  # of a wait; what is less is left out of its story
MOST_TOLD = 3  # causes of one wait
MOST_RANGES = 3  # of requests that are named


def dial(cause: str, plan: Plan, *, first_token: bool = False) -> str:
    """What would help against a cause, in the terms of the scenario, and its price."""
    scenario = plan.scenario
    policy, budget = scenario.scheduler.policy, plan.deployment.limits.token_budget
    parallel, slots = scenario.deployment, plan.deployment.limits.max_sequences
    smaller = f"a smaller scheduler.token_budget (now {budget:,}), at the price of a later first token"
    larger = f"a larger scheduler.token_budget (now {budget:,}), at the price of longer gaps"
    more_memory = (
        f"a larger engine.num_blocks (now {plan.deployment.limits.num_blocks:,})"
        if plan.memory is None
        else "more KV memory (engine.memory_fraction, deployment.tensor_parallel, model.kv_dtype)"
    )
    chunked = policy in ("stall-free", "alternating")
    if cause in ("prefill_ahead", "prefill_beside"):
        if not chunked:
            return "policy stall-free, whose token budget bounds what prompts add to an iteration"
        return smaller if policy == "stall-free" or cause == "prefill_beside" else f"policy stall-free, or {smaller}"
    if cause in ("memory", "recomputation", "queue_memory"):
        reserving = plan.deployment.limits.reservation is not None
        paging = ", or a policy that does not reserve for max_model_tokens" if reserving else ""
        fewer = "" if first_token else f", or fewer requests at a time (engine.max_sequences, now {slots:,})"
        return more_memory + paging + fewer
    if cause == "pipeline":
        even = smaller if policy == "stall-free" else "policy stall-free"
        stages = f"fewer stages (deployment.pipeline_parallel, now {parallel.pipeline_parallel})"
        return f"batches that take the same time ({even}), or {stages}"
    if cause in ("decode_batch", "decode_context"):
        shared = " or a smaller model.kv_dtype" if cause == "decode_context" else ""
        return (
            f"fewer decodes at a time (engine.max_sequences, now {slots:,}, or more deployment.replicas), "
            f"deployment.tensor_parallel{shared}"
        )
    if cause == "queue_slots":
        return f"a larger engine.max_sequences (now {slots:,}), or more deployment.replicas"
    if cause == "queue_others":
        if policy == "decode-first":
            return "another policy: this one admits nobody before every decode is done"
        if plan.deployment.limits.batch_wait_iterations:
            return (
                "fewer scheduler.batch_wait_iterations: prompts wait beside decodes for fuller batches, as part of it"
            )
        return (f"{larger}; or " if chunked else "") + "less load: more deployment.replicas, or a lower rate"
    if cause == "interleaving":
        return larger if chunked else "fewer requests at a time, or more deployment.replicas"
    return {
        "iteration": "no scheduling can: deployment.tensor_parallel, a faster device or a smaller model.dtype",
        "own_prefill": "no scheduling can: deployment.tensor_parallel, or a faster device",
        "communication": "a faster link, or a smaller deployment.tensor_parallel",
        "host": "a faster host loop ([latency] step and sequence)",
        "unmodelled": "nothing in the scenario: the machine took longer than its latency model says, calibrated or not",
    }[cause]


def verdict(tbt: Mapping[str, Any], ttft: Mapping[str, Any], plan: Plan) -> str:
    """The main cause of each kind of lateness, and what would help."""
    return " ".join(
        _verdict(told, what, plan, first_token=first_token)
        for told, what, first_token in ((tbt, "gaps between tokens", False), (ttft, "first tokens", True))
    )


def _verdict(told: Mapping[str, Any], what: str, plan: Plan, *, first_token: bool) -> str:
    if told["limit_s"] is None:
        return f"There are no {what}."
    limit = f"{seconds(told['limit_s'])} ({told['limit_from']})"
    if not told["late"]:
        return f"None of {told['n']:,} {what} is above {limit}."
    largest = told["causes"][0]
    second = told["causes"][1] if len(told["causes"]) > 1 and told["causes"][1]["share"] >= 0.25 else None
    also = f", then {NAMES[second['cause']]} ({percent(second['share'])})" if second else ""
    counts = f"{told['late']:,} of {told['n']:,} {what} are above {limit}"
    main = f"{percent(largest['share'])} of the time beyond it is {NAMES[largest['cause']]}{also}"
    return f"{counts}, and {main}; what would help: {dial(largest['cause'], plan, first_token=first_token)}."


def gap(late: Late, iterations: Sequence[Iteration]) -> str:
    """One sentence on a late token."""
    return f"{_who(late)} waited {seconds(late.seconds)} from {late.since:,.2f} s: {_causes(late, iterations)}"


def ttft(late: Late, iterations: Sequence[Iteration]) -> str:
    """One sentence on a late first token."""
    wait = f"waited {seconds(late.seconds)} for its first token from {late.since:,.2f} s"
    return f"{_who(late)} {wait}: {_causes(late, iterations)}"


def _who(late: Late) -> str:
    others = len(late.requests) - 1
    return f"request {late.requests[0]}" + (f" and {others:,} more" if others else "")


def _causes(late: Late, iterations: Sequence[Iteration]) -> str:
    spent = total(late.levels)
    ordered = sorted(spent, key=lambda cause: -spent[cause])
    told = [cause for cause in ordered if spent[cause] >= FEWEST_SHARE * late.seconds][:MOST_TOLD]
    return ", ".join(f"{seconds(spent[cause])} {_what(cause, late, iterations)}" for cause in told)


def _what(cause: str, late: Late, iterations: Sequence[Iteration]) -> str:
    """A cause of one wait, with the requests and tokens that it was."""
    request, between = late.requests[0], iterations[late.first : late.last]
    last = iterations[late.last - 1]
    mine = [one for one in between if request in one.own]
    beside = mine or [last]
    ahead = [one for one in between if one is not last and request not in one.own]
    if cause == "prefill_beside":
        return f"for {_prompts(beside, request)} in the same iteration{'s' if len(beside) > 1 else ''}"
    if cause == "prefill_ahead":
        return f"for {_prompts(ahead, request)} that ran first"
    if cause in ("recomputation", "own_prefill"):
        if not mine:
            return "for others' prompts, computed again after preemptions"
        tokens = sum(tokens for one in mine for id, tokens in one.chunks if id == request)
        return f"computing {'again ' if cause == 'recomputation' else ''}{tokens:,} tokens of its own"
    if cause == "pipeline":
        busy = takewhile(lambda one: one.end > late.since, reversed(iterations[: late.last]))  # they end in order
        others = [one for one in busy if one.chunks and one is not last and one not in mine]
        return "for stages busy with other batches" + (f" ({_prompts(others, request)})" if others else "")
    if cause == "decode_batch":
        return f"for a batch of {last.decodes:,} decodes"
    if cause == "decode_context":
        return f"for {last.context:,} tokens of KV of {last.decodes:,} decodes"
    if cause == "interleaving":
        decodes = max(one.decodes for one in (*mine, *ahead))
        batch = f"batches of up to {decodes:,} decodes, " if decodes else ""
        return f"for others' work meanwhile ({batch}{_prompts((*mine, *ahead), request)})"
    return {
        "memory": "in the queue, without memory since it was preempted",
        "iteration": "that an iteration takes with a single decode",
        "communication": "of communication",
        "host": "of the host",
        "unmodelled": "that the latency model does not account for",
        "queue_memory": "in the queue for memory",
        "queue_slots": "in the queue for a slot",
        "queue_others": "in the queue behind others",
    }[cause]


def _prompts(iterations: Iterable[Iteration], but: int) -> str:
    """Whose prompts, and how many tokens of them."""
    tokens: dict[int, int] = {}
    for one in iterations:
        for id, many in one.chunks:
            if id != but:
                tokens[id] = tokens.get(id, 0) + many
    if not tokens:
        return "no prompts"
    ranges = _ranges(sorted(tokens))
    named = ", ".join(ranges[:MOST_RANGES]) + (" and others" if len(ranges) > MOST_RANGES else "")
    whose = f"request {named}" if len(tokens) == 1 else f"requests {named}"
    return f"prompts of {whose} ({sum(tokens.values()):,} tokens)"


def _ranges(ids: Sequence[int]) -> list[str]:
    """Numbers in short: 20–24, 30."""
    starts = [ids[0], *(after for before, after in pairwise(ids) if after > before + 1)]
    ends = [*(before for before, after in pairwise(ids) if after > before + 1), ids[-1]]
    return [f"{start}" if start == end else f"{start}–{end}" for start, end in zip(starts, ends, strict=True)]
