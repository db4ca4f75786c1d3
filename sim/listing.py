"""What there is to choose from, and what a scenario comes to, as plain rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim import catalogue, hardware
from sim.lengths import datasets
from sim.policies import POLICIES
from sim.profile import load, shipped
from sim.report import times_from
from sim.scenario import Scenario
from sim.simulate import plan, workload
from sim.workload import mean_rate

Row = dict[str, Any]


def models() -> list[Row]:
    """Catalogue models: parameters and KV bytes per token at 16 bits."""
    rows = []
    for name in catalogue.entries("model"):
        model = hardware.Model(**catalogue.entry("model", name))
        rows.append(
            {
                "name": name,
                "parameters": model.parameters,
                "active_parameters": model.active_parameters,
                "layers": model.layers,
                "kv_bytes_per_token": model.kv_bytes_per_token(),
                "source": model.source,
            }
        )
    return rows


def devices() -> list[Row]:
    """Catalogue devices: the figures of their data sheets."""
    rows = []
    for name in catalogue.entries("device"):
        device = hardware.Device(**catalogue.entry("device", name))
        rows.append(
            {
                "name": name,
                "memory_bytes": device.memory_bytes,
                "memory_bandwidth": device.memory_bandwidth,
                "float16_flops": device.float16_flops,
                "fp8_flops": device.fp8_flops,
                "link_bandwidth": device.link_bandwidth,
                "source": device.source,
            }
        )
    return rows


def profiles() -> list[Row]:
    """Calibrated latency profiles that are shipped."""
    rows = []
    for name in shipped():
        profile = load(name, Path())
        rows.append(
            {
                "name": name,
                "model": profile.model,
                "device": profile.device,
                "tensor_parallel": profile.tensor_parallel,
                "pipeline_parallel": profile.pipeline_parallel,
                "half_within": profile.within and profile.within[0],
                "most_within": profile.within and profile.within[1],
                "trust": profile.trust,
                "source": str(profile.provenance.get("source", "")),
            }
        )
    return rows


def length_models() -> list[Row]:
    """Shipped length models."""
    return [
        {"name": name, "max_total_tokens": entry.max_total_tokens, "source": entry.source}
        for name, entry in datasets().items()
    ]


def policies() -> list[Row]:
    """Scheduling policies."""
    return [{"name": name, "what": (policy.__doc__ or "").strip()} for name, policy in POLICIES.items()]


LISTS: dict[str, Callable[[], list[Row]]] = {
    "models": models,
    "devices": devices,
    "profiles": profiles,
    "datasets": length_models,
    "policies": policies,
}


def explain(scenario: Scenario) -> Row:
    """What a scenario means, without running it: ready for JSON."""
    planned = plan(scenario)
    requests = workload(scenario)
    times = requests.arrivals
    return {
        "name": scenario.name,
        "scenario": scenario.to_toml(),
        "devices": planned.devices,
        "kv_blocks": planned.deployment.limits.num_blocks,
        "kv_blocks_from": "derived" if planned.memory else "given",
        "memory_per_device": None
        if planned.memory is None
        else {
            "weights_bytes": planned.memory.weights_bytes,
            "activation_bytes": planned.memory.activation_bytes,
            "kv_bytes": planned.memory.kv_bytes,
        },
        "requests": len(requests.prompts),
        "mean_rate": None if times is None else mean_rate(times),
        "prompt_tokens": tokens(requests.prompts),
        "output_tokens": tokens(requests.outputs),
        "refused": len(planned.deployment.limits.refusals(requests.prompts, requests.outputs)),
        "workload": requests.counts,
        "notes": [*planned.scenario.notes, *requests.notes],
        "times_from": times_from(scenario),
    }


def tokens(values: Any) -> Row:
    """Lengths in short."""
    ordered = sorted(values.tolist())
    n = len(ordered)
    return {
        "mean": sum(ordered) / n,
        "p50": ordered[-(-n // 2) - 1],
        "p90": ordered[-(-n * 9 // 10) - 1],
        "max": ordered[-1],
    }
