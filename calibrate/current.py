"""Profiles of current engines: kernel tables, and one pair of host terms for each engine.

The tables hold kernels alone. What an engine spends beside them on an iteration and on a sequence of it was fitted to
serving measurements (`HOST`), one pair per engine, whatever the model, the device and its precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate import fit as fitting
from calibrate.kernels import STATIC
from calibrate.silicon import DEVICES, Host, import_rows
from calibrate.tables import Tables
from sim.hardware import DeviceTable, Dtype, KvDtype, ModelTable
from sim.hardware import device as find_device
from sim.hardware import model as find_model
from sim.profile import Profile

HOST = {"vllm": Host(1.18e-3, 15e-6), "trtllm": Host(0.21e-3, 9e-6), "sglang": Host(0.47e-3, 18e-6)}
HOST_FROM = (
    "least squares (soft L1 loss) of the TPOT that kernels alone leave unexplained in the engine's rows of "
    "silicon_sample.csv (aiconfigurator-core 0.12.0), of Llama-3.1-8B, Qwen3-32B and Llama-3.1-70B on H100, H200 and "
    "B200: 279 rows of vllm, 501 of trtllm, 130 of sglang; as `servecast calibrate score --kernels-alone` prints them, "
    "rounded"
)
PRECISIONS = {"bf16": "bfloat16", "fp8": "fp8", "fp8-static": STATIC, "fp8-block": "fp8_block"}
DENSE = {
    "mistral-7b": (1, 2),
    "llama-3.1-8b": (1, 2, 4, 8),
    "qwen3-8b": (1, 2),
    "yi-34b": (1, 2, 4),
    "qwen3-32b": (1, 2, 4, 8),
    "llama-3.1-70b": (1, 2, 4, 8),
    "llama-3.1-405b": (8,),
}
TILE = 128  # tokens: m = 256 to 257 costs 35 %, 512 to 513 16 % (median of sglang's large GEMMs on A100)
DIGITS = 6  # significant ones that a profile keeps


@dataclass(frozen=True, slots=True)
class Deployed:
    """What a profile is of: a catalogue model on a system of the tables, as an engine runs it."""

    framework: str
    system: str
    model: str
    precision: str  # a key of PRECISIONS
    tensor_parallel: int
    kv_dtype: KvDtype = "bfloat16"

    @property
    def weights(self) -> Dtype:
        return "bfloat16" if self.precision == "bf16" else "fp8"

    def name(self, version: str) -> str:
        """A profile's: engine and version, model, device, precision, parallelism."""
        device = DEVICES[self.system]
        return f"{self.framework}-{version}/{self.model}-{device}-{self.precision}-tp{self.tensor_parallel}"


def profile(one: Deployed, tables: Tables, host: Host, *, resamples: int = fitting.RESAMPLES) -> Profile:
    """The profile of a deployment. BadInput where the tables do not hold what it needs."""
    model = find_model(ModelTable(name=one.model, dtype=one.weights, kv_dtype=one.kv_dtype), Path())
    dtype = PRECISIONS[one.precision]
    rows = import_rows(tables, model, one.tensor_parallel, dtype=dtype, host=host)
    return fitting.fit(
        rows,
        name=one.name(tables.version),
        model=one.model,
        device=DEVICES[one.system],
        tensor_parallel=one.tensor_parallel,
        resamples=resamples,
    )


def shipped(one: Deployed, tables: Tables, command: str) -> Profile:
    """A profile as it is packaged: fitted coefficients to DIGITS digits, and all that is known of where they come from.

    No intervals: composed rows are not noisy, and resampling them says nothing about the engine.
    """
    fitted = profile(one, tables, HOST[one.framework], resamples=0)
    told = {
        "made_by": command,
        "weights_dtype": one.weights,
        "precision": one.precision,
        "host_from": HOST_FROM,
        "unknown": "measured serving of this very deployment: run `servecast calibrate score` for what there is",
    }
    rounded = Profile.model_validate(_rounded(fitted.model_dump(exclude_none=True)))
    return rounded.model_copy(update={"tile": TILE, "provenance": rounded.provenance | told})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def catalogue() -> list[Deployed]:
    """What is packaged: the dense catalogue models on vllm, on as few devices as hold them and more; and those that
    there are serving measurements of, on the other engines."""
    found = [
        Deployed("vllm", system, model, precision, parallel)
        for model, degrees in DENSE.items()
        for system in ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm")
        for precision in (("bf16",) if system == "a100_sxm" else ("bf16", "fp8"))
        for parallel in degrees
    ]
    found += [
        Deployed(framework, system, model, precision, parallel)
        for framework, precisions in (("trtllm", ("bf16", "fp8-static")), ("sglang", ("bf16", "fp8-block")))
        for model, parallel in (("llama-3.1-8b", 1), ("qwen3-32b", 2), ("llama-3.1-70b", 4))
        for system in ("h100_sxm", "h200_sxm", "b200_sxm")
        for precision in precisions
    ]
    return [one for one in found if _fits(one)]


def _fits(one: Deployed) -> bool:
    """Whether the weights leave a fifth of the devices' memory for everything else."""
    model = find_model(ModelTable(name=one.model, dtype=one.weights, kv_dtype=one.kv_dtype), Path())
    on = find_device(DeviceTable(name=DEVICES[one.system]))
    return model.stage_weight_bytes(one.tensor_parallel, 1, 0) < 0.8 * on.usable_bytes
