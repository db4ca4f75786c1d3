"""Which calibrated profile a scenario runs on: the one it names, or the shipped one of just what it describes."""

from __future__ import annotations

import re

from sim import hardware
from sim.errors import BadInput
from sim.profile import AUTO, Profile, ProfileTable, load, shipped
from sim.scenario import Scenario


def resolved(scenario: Scenario) -> Scenario:
    """The scenario with `name = "auto"` of its profile replaced by what it comes to. BadInput where there is none."""
    if not isinstance(scenario.latency, ProfileTable) or scenario.latency.name != AUTO:
        return scenario
    return scenario.with_(latency__name=_shipped(scenario, scenario.latency.engine))


def profile_of(scenario: Scenario, model: hardware.Model | None, device: hardware.Device | None) -> Profile:
    """The profile, if it is of the model, the weights, the device and the parallelism that the scenario has."""
    assert isinstance(scenario.latency, ProfileTable)
    profile = load(scenario.latency.name, scenario.directory)
    if wrong := _mismatch(profile, scenario, model, device):
        key, what = wrong
        raise BadInput(f"profile {scenario.latency.name!r} {what}", key=key)
    return profile


def _mismatch(
    profile: Profile, scenario: Scenario, model: hardware.Model | None, device: hardware.Device | None
) -> tuple[str, str] | None:
    """The key that the profile does not go with, and why."""
    told = profile.provenance
    if model is not None and profile.model != model.name:
        return "[latency] name", f"was measured with {profile.model!r}, not {model.name!r}"
    if device is not None and profile.device != device.name:
        return "[latency] name", f"was measured on {profile.device!r}, not {device.name!r}"
    weights, cache = told.get("weights_dtype"), told.get("kv_dtype")
    if model is not None and weights is not None and (weights == "fp8") != (model.dtype == "fp8"):
        return "[latency] name", f"is of weights in {weights}, not {model.dtype}"
    if model is not None and cache is not None and (cache == "fp8") != (model.kv_dtype == "fp8"):
        return "[model] kv_dtype", f"is of a KV cache in {cache}, not {model.kv_dtype}"
    for key in ("tensor_parallel", "pipeline_parallel"):
        if (own := getattr(profile, key)) != (asked := getattr(scenario.deployment, key)):
            return f"[deployment] {key}", f"was measured at {own}, not {asked}"
    return None


def _shipped(scenario: Scenario, engine: str) -> str:
    """The name of the shipped profile, of the engine's newest version, that the scenario matches."""
    assert scenario.model is not None  # Scenario.check
    assert scenario.device is not None
    model, device = hardware.model(scenario.model, scenario.directory), hardware.device(scenario.device)
    of_engine = [name for name in shipped() if name.startswith(f"{engine}-")]
    of_both = [name for name in of_engine if f"/{model.name}-{device.name}-" in name]
    found = [name for name in of_both if not _mismatch(load(name, scenario.directory), scenario, model, device)]
    if found:
        return max(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name.partition("/")[0])])
    others = ", ".join(name.partition("/")[2] for name in of_both)
    parallel = scenario.deployment
    what = (
        f"{engine} has none of {model.name} in {model.dtype} (KV cache in {model.kv_dtype}) on {device.name} at "
        f"tensor_parallel {parallel.tensor_parallel} and pipeline_parallel {parallel.pipeline_parallel}; "
    )
    raise BadInput(
        what + (f"it has {others}" if others else 'see `servecast list profiles`; kind = "roofline" needs none'),
        key="[latency] name",
    )
