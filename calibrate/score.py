"""Forecasts beside public measurements of serving: the rows of `silicon_sample.csv` of aiconfigurator-core.

A row is a closed loop of so many clients against one deployment. It is forecast by running that loop through the real
scheduler, with a profile composed from the kernel tables of the row's system and engine. How the rows were measured is
not in the file; CAMPAIGNS has what the published scripts of both sources say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import tomli_w

from calibrate import current
from calibrate.current import Deployed
from calibrate.silicon import DEVICES, Host
from calibrate.tables import Tables, installed, order
from sim.errors import BadInput
from sim.parallel import each
from sim.profile import ProfileLatency
from sim.report import Report
from sim.scenario import Scenario
from sim.simulate import simulate

FILE = "silicon_sample.csv"
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
}
PRECISIONS = {None: "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block"}
WAVES = 10  # requests per client, in both campaigns
PAUSE = 1e-3  # seconds between an answer and the client's next request: assumed, so that it never meets the same batch
SEED = 1


@dataclass(frozen=True, slots=True)
class Campaign:
    """How the rows of one source were measured."""

    name: str
    shortest: float  # lengths are uniform from this share of the row's to all of it
    told: str


INFERENCEMAX = Campaign(
    "InferenceMAX",
    0.8,
    "benchmark_serving.py --random-range-ratio 0.8 --num-prompts 10 x concurrency --request-rate inf; vllm serve with "
    "async scheduling, FP8 KV, --max-num-batched-tokens 8192; trtllm-serve with FP8 KV, --max_num_tokens 16384 on "
    "B200, the longest request elsewhere, batch_wait_timeout_iters 20 and batch_wait_max_tokens_ratio 0.9 on 1k/1k "
    "below TP8; FP8 weights are NVIDIA's checkpoints, with static scales",
)
AICONFIGURATOR = Campaign(
    "aiconfigurator",
    1.0,
    "genai-perf, fixed lengths, 10 x concurrency requests; engines as its generator starts them: batches of at most "
    "concurrency + prompt + 1500 tokens, sglang with mixed chunks; assumed: rows of sglang 0.5.1 without; trtllm and "
    "sglang schedule ahead, vllm 0.12 does not",
)
CAMPAIGNS = (INFERENCEMAX, AICONFIGURATOR)


@dataclass(frozen=True, slots=True)
class Case:
    """A row that can be forecast. Seconds and tokens."""

    id: str
    deployed: Deployed
    campaign: Campaign
    version: str | None  # of the engine that was measured
    prompt: int
    output: int
    concurrency: int
    ttft: float
    tpot: float

    @property
    def budget(self) -> int:
        """Tokens of a batch, as the campaign's scripts set them."""
        if self.campaign == AICONFIGURATOR:
            return self.concurrency + self.prompt + 1500
        if self.deployed.framework == "vllm":
            return 8192
        return 16384 if self.deployed.system == "b200_sxm" else self.longest

    @property
    def longest(self) -> int:
        """Tokens of the longest request that the engine was started for."""
        return self.prompt + self.output + 200

    @property
    def prefill_first(self) -> bool:
        """Whether prompts stop the decodes: sglang without mixed chunks."""
        return self.deployed.framework == "sglang" and order(self.version or "") < order("0.5.6")

    @property
    def overlap(self) -> bool:
        """Whether the engine decides a batch while the one before it executes."""
        return self.campaign == INFERENCEMAX or self.deployed.framework != "vllm"

    @property
    def batch_wait(self) -> dict[str, float]:
        """What InferenceMAX's scripts set for trtllm on 1k/1k with fewer than 8 devices."""
        one = self.deployed
        lengths = (self.prompt, self.output) == (1024, 1024)
        if self.campaign == INFERENCEMAX and one.framework == "trtllm" and lengths and one.tensor_parallel < 8:
            return {"batch_wait_iterations": 20, "batch_wait_ratio": 0.9}
        return {}

    def scenario(self) -> Scenario:
        """The row as a scenario; its latency model is put in by the caller."""
        one, shortest = self.deployed, self.campaign.shortest
        between = [[max(1, int(size * shortest)), size] for size in (self.prompt, self.output)]
        tables: dict[str, Any] = {
            "name": self.id,
            "model": {"name": one.model, "dtype": one.weights, "kv_dtype": one.kv_dtype},
            "device": {"name": DEVICES[one.system]},
            "deployment": {"tensor_parallel": one.tensor_parallel},
            "engine": {
                "memory_fraction": 0.9,
                "max_sequences": self.concurrency,
                "max_model_tokens": self.longest,
                "max_batch_tokens": max(self.budget, self.longest),
            },
            "scheduler": {
                "policy": "prefill-first" if self.prefill_first else "stall-free",
                "token_budget": self.budget,
                "overlap": self.overlap,
                **self.batch_wait,
            },
            "latency": {"kind": "affine", "step": 1.0},
            "workload": {
                "requests": WAVES * self.concurrency,
                "seed": SEED,
                "arrivals": {"kind": "closed", "concurrency": self.concurrency, "think": PAUSE},
                "lengths": {"kind": "uniform", "prompt": between[0], "output": between[1]},
            },
        }
        return Scenario.from_toml(tomli_w.dumps(tables))


def read() -> list[dict[str, Any]]:
    """The rows of the user's own install. BadInput where there is none."""
    import polars as pl

    path = installed() / FILE
    try:
        return pl.read_csv(path, infer_schema_length=None).to_dicts()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise BadInput(f"not a table of measurements: {str(error).splitlines()[0]}", source=str(path)) from None


def case(row: dict[str, Any]) -> Case | str:
    """The row as a case, or why it cannot be forecast."""
    model, system, framework = MODELS.get(row["model_path"]), row["system"], row["backend"]
    why = _unsupported(row)
    if why is not None:
        return why
    assert model is not None
    inferencemax = row["silicon_data_source"].startswith("source_file=2026-04-06.csv")
    precision = PRECISIONS[row["gemm_quant_mode"]]
    if precision == "fp8" and (inferencemax or row["model_path"].startswith("nvidia/")):
        precision = "fp8-static"
    return Case(
        id=row["id"],
        deployed=Deployed(framework, system, model, precision, row["tp_size"], "fp8" if inferencemax else "bfloat16"),
        campaign=INFERENCEMAX if inferencemax else AICONFIGURATOR,
        version=row["backend_version"],
        prompt=row["isl"],
        output=row["osl"],
        concurrency=row["batch_size"],
        ttft=row["silicon_ttft_ms"] / 1e3,
        tpot=row["silicon_tpot_ms"] / 1e3,
    )


def _unsupported(row: dict[str, Any]) -> str | None:
    if row["mode"] != "agg":
        return "prefill and decode on different devices"
    if row["model_path"] not in MODELS:
        return "mixtures of experts, latent attention, or not in the catalogue"
    if row["system"] not in DEVICES:
        return f"no catalogue device for {row['system']}"
    if row["gemm_quant_mode"] not in PRECISIONS:
        return "weights in FP4"
    if (row["pp_size"] or 1) > 1 or (row["attention_dp_size"] or 1) > 1:
        return "pipeline or attention-data parallel"
    return None


Progress = Callable[[int, int], None]


def score(
    cases: Sequence[Case],
    *,
    hosts: Mapping[str, Host] = current.HOST,
    workers: int = 1,
    progress: Progress = lambda _done, _all: None,
) -> list[dict[str, Any]]:
    """A row of measured and forecast values for each case, in the order of the cases."""
    key = lambda one: repr(one.deployed)  # noqa: E731
    groups = [list(group) for _, group in groupby(sorted(cases, key=key), key=key)]
    groups.sort(key=lambda group: -sum(one.concurrency * one.output for one in group))
    found: dict[str, dict[str, Any]] = {}
    for _, rows in each(partial(_of_deployment, hosts), groups, workers=workers):
        found |= {row["id"]: row for row in rows}
        progress(len(found), len(cases))
    return [found[one.id] for one in cases]


def _of_deployment(hosts: Mapping[str, Host], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Cases of one deployment share its profile. A deployment that cannot be composed or does not fit says why."""
    one = cases[0].deployed
    try:
        tables = Tables(one.system, one.framework, nearest(one, cases[0].version))
        profile = current.profile(one, tables, hosts[one.framework], resamples=0)
    except BadInput as error:
        return [_row(case, None, None, error.what) for case in cases]
    rows = []
    for case in cases:
        try:
            report = simulate(case.scenario(), keep_steps=False, engine=lambda _: partial(ProfileLatency, profile))
            rows.append(_row(case, tables.version, report, None))
        except BadInput as error:
            rows.append(_row(case, tables.version, None, error.what))
    return rows


def nearest(one: Deployed, version: str | None) -> str:
    """Of the versions that have tables, the newest that is not newer than the measured one; else the oldest."""
    versions = Tables(one.system, one.framework).versions
    older = [known for known in versions if version is not None and order(known) <= order(version)]
    return older[-1] if older else versions[-1] if version is None else versions[0]


def _row(case: Case, version: str | None, report: Report | None, why: str | None) -> dict[str, Any]:
    one = asdict(case.deployed) | {
        "id": case.id,
        "campaign": case.campaign.name,
        "version": case.version,
        "tables_version": version,
        "prompt_tokens": case.prompt,
        "output_tokens": case.output,
        "concurrency": case.concurrency,
        "ttft_measured_s": case.ttft,
        "tpot_measured_s": case.tpot,
    }
    values = dict.fromkeys(("ttft_s", "tpot_s", "ttft_warm_s", "tpot_warm_s", "ttft_error", "tpot_error"))
    if report is not None:
        values |= _means(report, case.concurrency)
        values |= {f"{name}_error": values[f"{name}_s"] / one[f"{name}_measured_s"] - 1 for name in ("ttft", "tpot")}
        why = None if values["ttft_s"] is not None else "no request is served"
    return one | values | {"why_not": why}


def _means(report: Report, concurrency: int) -> dict[str, float]:
    """Means over all requests, as both campaigns report; and without the first of each client."""
    frame = report.requests.drop_nulls("finished_s")
    ttft = (frame["first_token_s"] - frame["arrival_s"]).to_numpy()
    decoded = (frame["output_tokens"] - 1).to_numpy()
    tpot = (frame["finished_s"] - frame["first_token_s"]).to_numpy() / np.maximum(decoded, 1)
    warm = frame["id"].to_numpy() >= concurrency
    return {
        "ttft_s": float(ttft.mean()),
        "tpot_s": float(tpot.mean()),
        "ttft_warm_s": float(ttft[warm].mean()),
        "tpot_warm_s": float(tpot[warm].mean()),
    }
