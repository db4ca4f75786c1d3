"""Profiles of current engines: kernel tables, and one pair of host terms for each engine.

The tables hold kernels alone. What an engine spends beside them on an iteration and on a sequence of it was fitted to
serving measurements (`HOST`), one pair per engine, whatever the model, the device and its precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from calibrate import fit as fitting
from calibrate.kernels import STATIC
from calibrate.silicon import DEVICES, Host, import_rows
from calibrate.tables import Tables
from sim.hardware import Dtype, KvDtype, ModelTable
from sim.hardware import model as find_model
from sim.profile import Profile

HOST = {"vllm": Host(0.0, 0.0), "trtllm": Host(0.0, 0.0), "sglang": Host(0.0, 0.0)}
HOST_FROM: dict[str, str] = {}
PRECISIONS = {"bf16": "bfloat16", "fp8": "fp8", "fp8-static": STATIC, "fp8-block": "fp8_block"}
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

    def tables(self, version: str | None = None) -> Tables:
        return Tables(self.system, self.framework, version)

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
