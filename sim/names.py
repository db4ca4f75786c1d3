"""What figures are called where people read them: their names, with units."""

from __future__ import annotations

FIGURES = {
    "rate": "requests/s",
    "capacity_rate": "capacity within the SLO (requests/s)",
    "capacity_low": "capacity, least of the seeds (requests/s)",
    "capacity_high": "capacity, most of the seeds (requests/s)",
    "cost_per_million_output_tokens": "cost per million output tokens",
    "limited_by": "limited by",
    "slo_met": "SLO met",
    "request_throughput": "requests completed per second",
    "output_throughput": "output tokens per second",
    "goodput": "requests per second that meet every limit",
    "attainment": "share of requests that meet every limit",
    "per_million_output_tokens": "cost per million output tokens",
    "per_million_tokens": "cost per million tokens, prompt and output",
    "bubble_fraction": "share of stage time that is idle",
    "mfu": "MFU (share of peak FLOP/s)",
    "mbu": "MBU (share of peak memory bandwidth)",
    "kv_peak": "KV blocks in use, peak",
    "preemptions": "preemptions",
    "duration_s": "duration (s)",
    "workload.arrivals.rate": "arrival rate (requests/s)",
    "workload.requests": "requests",
    "workload.seed": "seed",
    "scheduler.policy": "policy",
    "scheduler.token_budget": "token budget (tokens per iteration)",
    "engine.max_sequences": "requests in a batch at most",
    "engine.block_tokens": "tokens per KV block",
    "engine.num_blocks": "KV blocks of a replica",
    "deployment.replicas": "replicas",
    "deployment.tensor_parallel": "tensor-parallel devices",
    "deployment.pipeline_parallel": "pipeline stages",
    "cost.gpu_hour": "price of a device hour",
    "model.name": "model",
    "device.name": "device",
}
METRICS = {"ttft": "TTFT", "tbt": "TBT", "tpot": "TPOT", "e2e": "E2E", "scheduling_delay": "scheduling delay"}
STATISTICS = ("mean", "std", "min", "p50", "p75", "p90", "p95", "p99", "p999", "max")


def titled(name: str) -> str:
    """The name of a figure with its unit; a scenario's key as it is, where its unit is not known."""
    if name in FIGURES:
        return FIGURES[name]
    if name.startswith("slo."):
        return f"limit on {titled(name.removeprefix('slo.'))}"
    for metric, told in METRICS.items():
        rest = name.removeprefix(f"{metric}_").removeprefix("s_")
        if name.startswith(f"{metric}_") and rest in STATISTICS:
            return f"{told} {rest.upper() if rest[0] == 'p' else rest} (s)"
        if name in (metric, f"{metric}_max"):  # limits of single requests
            return f"{told} of each request (s)"
    return name


def short(name: str) -> str:
    """The name of a figure without its unit."""
    return titled(name).partition(" (")[0]


def is_seconds(name: str) -> bool:
    """Whether a figure is a duration."""
    return titled(name).endswith("(s)")


def upper(text: str) -> str:
    """With its first letter in upper case, the rest as it is."""
    return text[:1].upper() + text[1:]
