"""Which calibrated profile a scenario runs on: the one it names, or the shipped one of just what it describes."""

from __future__ import annotations

import re
from functools import cache

from sim import catalogue, hardware
from sim.errors import BadInput
from sim.profile import AUTO, Profile, ProfileTable, load, shipped
from sim.scenario import Scenario

DEFAULT_ENGINE = "vllm"
ROOM = ("memory_bytes", "usable_bytes")  # figures of a device that count whatever the times come from
SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "experts", "experts_per_token")


def resolved(scenario: Scenario) -> Scenario:
    """The scenario with `name = "auto"` of its profile replaced by what it comes to. BadInput where there is none."""
    if not isinstance(scenario.latency, ProfileTable) or scenario.latency.name != AUTO:
        return scenario
    name = _shipped(scenario, scenario.latency.engine or DEFAULT_ENGINE)
    return scenario.with_(latency={"kind": "profile", "name": name})


def profile_of(scenario: Scenario, model: hardware.Model | None, device: hardware.Device | None) -> Profile:
    """The profile, if it is of the model, the weights, the device and the parallelism that the scenario has."""
    assert isinstance(scenario.latency, ProfileTable)
    profile = load(scenario.latency.name, scenario.directory)
    if wrong := _mismatch(profile, scenario, model, device):
        key, what = wrong
        hint = f'; name = "{AUTO}" finds the one of this scenario' if key != "[model] name" else ""
        raise BadInput(f"profile {scenario.latency.name!r} {what}{hint}", key=key)
    return profile


def without_effect(scenario: Scenario) -> str | None:
    """Figures of [device] that the times of a measured profile do not follow."""
    if not isinstance(scenario.latency, ProfileTable) or scenario.device is None:
        return None
    given = scenario.device.model_dump(exclude={"name", *ROOM}, exclude_none=True)
    if not given or load(scenario.latency.name, scenario.directory).coefficients is None:
        return None
    return f"[device] {', '.join(given)}: no effect on the times, which are those of profile {scenario.latency.name}"


def _mismatch(
    profile: Profile, scenario: Scenario, model: hardware.Model | None, device: hardware.Device | None
) -> tuple[str, str] | None:
    """The key that the profile does not go with, and why."""
    told = profile.provenance
    if model is not None and not _is_of(profile.model, model, scenario):
        other = f"not {model.name!r}" if profile.model != model.name else "whose layers are others"
        return "[latency] name", f"was measured with {profile.model!r}, {other}"
    if device is not None and profile.device != device.name:
        return "[latency] name", f"was measured on {profile.device!r}, not {device.name!r}"
    weights, cache = told.get("weights_dtype"), told.get("kv_dtype")
    if model is not None and weights is not None and _size(str(weights)) != _size(model.dtype):
        return "[latency] name", f"is of weights in {weights}, not {model.dtype}"
    if model is not None and cache is not None and _size(str(cache)) != _size(model.kv_dtype):
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
    model.check_parallel(scenario.deployment.tensor_parallel, scenario.deployment.pipeline_parallel)
    known = next((name for name in catalogue.entries("model") if _is_of(name, model, scenario)), model.name)
    of_engine = [name for name in shipped() if name.startswith(f"{engine}-")]
    of_both = [name for name in of_engine if f"/{known}-{device.name}-" in name]
    found = [name for name in of_both if not _mismatch(load(name, scenario.directory), scenario, model, device)]
    if found:
        return max(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name.partition("/")[0])])
    others = ", ".join(name.partition(f"-{device.name}-")[2] for name in of_both)
    parallel = scenario.deployment
    what = (
        f"{engine} has none of {model.name} in {model.dtype} (KV cache in {model.kv_dtype}) on {device.name} at "
        f"tensor_parallel {parallel.tensor_parallel} and pipeline_parallel {parallel.pipeline_parallel}; "
    )
    raise BadInput(
        what + (f"there: {others}" if others else 'see `servecast list profiles`; kind = "roofline" needs none'),
        key="[latency] name",
    )


def _is_of(name: str, model: hardware.Model, scenario: Scenario) -> bool:
    """Whether the model is the one of that name: a config.json is what its figures say, whatever its folder is."""
    if scenario.model is None or scenario.model.hf_config is None or name not in catalogue.entries("model"):
        return name == model.name
    return _shape(name) == tuple(getattr(model, key) for key in SHAPE)


@cache
def _shape(name: str) -> tuple[int, ...]:
    known = catalogue.entry("model", name)
    return tuple(getattr(hardware.Model(**known), key) for key in SHAPE)


def _size(dtype: str) -> str:
    """Types that take the same kernels are one to a profile."""
    return "16 bits" if dtype in ("float16", "bfloat16") else dtype
