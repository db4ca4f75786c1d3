"""Public kernel tables: reading them from the user's own install of aiconfigurator-core, cleaning, interpolating.

The package (Apache-2.0 by its metadata) holds measured kernel times in milliseconds, by system, framework and version:
`systems/<system>.yaml` and `systems/data/<system>/<family>/<framework>/<version>/<table>.parquet`. Nothing of it is
copied; what is wrong with a table, and what had to be assumed, is in `Tables.notes`. Seconds from here on.

How to interpolate was chosen by leaving measured rows out and predicting them from their neighbours. Median errors on
A100 (vllm 0.14.0), H100 (vllm 0.24.0) and B200 (trtllm 1.3.0rc20), bfloat16:
prefill attention by length: log-log 2.2 / 3.5 / 3.4 %, linear 6.0 / 5.2 / 3.7 %; decode attention by length: linear 1.9 /
2.1 / 2.0 %, log-log 2.8 / 3.1 / 3.1 %, by batch: linear 2.6 / 2.7 / 2.4 %, log-log 3.6 / 4.0 / 3.9 %; heads: linear 0.8 to
3.1 %; GEMMs of an unknown n: 5.4 / 3.9 / 4.5 %, of an unknown k: 1.9 / 2.2 / 2.3 %, whether by utilisation or by time;
where the neighbours lie as far apart as those of most models' MLPs do, by the corners around a shape 4.6 / 4.0 / 4.5 %,
by the four nearest sites 6.8 / 5.7 / 6.7 % (A100, H100, B200, all vllm).
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from calibrate.surface import BETWEEN, Curve, Mixture, Surface, mixture
from sim.errors import BadInput, unknown

if TYPE_CHECKING:
    import polars as pl

PACKAGE = "aiconfigurator_core"
FAMILIES = {
    "gemm_perf": "gemm",
    "context_attention_perf": "attention",
    "generation_attention_perf": "attention",
    "moe_perf": "moe",
    "custom_allreduce_perf": "comm",
    "nccl_perf": "comm",
}
DESCRIPTIVE = ("framework", "version", "device", "kernel_source", "latency", "power", "implementation")
HALF = ("bfloat16", "float16", "half")  # the same speed; tables name one of them
GEMM_DTYPES = {"float16": HALF, "bfloat16": HALF, "fp8": ("fp8", "fp8_block"), "int4": ("int4_wo",)}
MOE_DTYPES = GEMM_DTYPES | {"int4": ("int4_wo", "w4a16_mxfp4")}
SKEWS = ("power_law_1.2", "power_law_1.01", "balanced")  # how tokens fall on experts: the package's own default first


@cache
def installed() -> Path:
    """The folder `systems` of the installed package. BadInput where there is none."""
    found = importlib.util.find_spec(PACKAGE)
    for place in (found.submodule_search_locations or ()) if found else ():
        if (Path(place) / "systems" / "data").is_dir():
            return Path(place) / "systems"
    what = "the kernel tables need the package aiconfigurator-core: pip install 'servecast[silicon]'"
    raise BadInput(what, source="calibrate import")


class Tables:
    """The kernel tables of one system and framework, at one version (the newest where none is named)."""

    def __init__(
        self,
        system: str,
        framework: str,
        version: str | None = None,
        *,
        root: Path | None = None,
        between: Literal["corners", "nearest"] = "corners",
    ) -> None:
        self.root, self.between = root or installed(), between
        self.system, self.framework = system, framework
        data = self.root / "data"
        # A system may have device figures and no GEMMs, or only some frameworks': what cannot be composed is not known.
        systems = sorted({path.parts[-3] for path in data.glob("*/gemm/*")})
        self._one_of("system", system, systems)
        self._one_of("framework", framework, [path.name for path in (data / system / "gemm").iterdir()])
        self.versions = sorted((path.name for path in (data / system / "gemm" / framework).iterdir()), key=_order)
        if version is not None:
            self._one_of("version", version, self.versions)
        self.version = version or self.versions[-1]
        self.notes: list[str] = []
        self.used: dict[str, str] = {}  # table: the version whose rows are used
        self._frames: dict[str, pl.DataFrame] = {}
        self._made: dict[object, Curve | Mixture] = {}

    @staticmethod
    def _one_of(kind: str, name: str, known: list[str]) -> None:
        if name not in known:
            raise BadInput(unknown(kind, name, known), source=f"--{kind}")

    def note(self, what: str) -> None:
        """Keep what a reader of the results should know, once."""
        if what not in self.notes:
            self.notes.append(what)

    @cached_property
    def figures(self) -> dict[str, float]:
        """Figures of the device, by the keys of <system>.yaml: bytes/s, FLOP/s, bytes, seconds."""
        path = self.root / f"{self.system}.yaml"
        if not path.is_file():
            raise BadInput("no such file: the device's figures", source=str(path))
        found = re.findall(r"^ +([a-z]\w*): *([\d.]+(?:[eE][+-]?\d+)?)", path.read_text(encoding="utf-8"), re.MULTILINE)
        return {key: float(value) for key, value in found}

    def memory_seconds(self, moved: float) -> float:
        """Seconds of an operation that moves so many bytes: achieved bandwidth and a constant, as the package has it."""
        figures = self.figures
        bandwidth = figures["mem_bw"] * figures["mem_bw_empirical_scaling_factor"]
        return moved / bandwidth + figures["mem_empirical_constant_latency"]

    def describe(self) -> dict[str, str]:
        """Where the times come from, for a profile's provenance."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            package = f"aiconfigurator-core {version('aiconfigurator-core')}"
        except PackageNotFoundError:
            package = "tables in the layout of aiconfigurator-core"
        used = ", ".join(f"{table} {used}" for table, used in sorted(self.used.items()))
        return {
            "source": package,
            "system": self.system,
            "framework": self.framework,
            "framework_version": self.version,
            "tables": used,
            "tables_notes": "; ".join(self.notes),
        }

    # Each table as a function.

    def gemm(self, dtype: str, n: int, k: int) -> Curve:
        """Seconds of (m × k) · (k × n) by m. Between known shapes utilisation is interpolated in log n and log k."""
        key = ("gemm", dtype, n, k)
        if key not in self._made:
            sites = self._gemm_sites(dtype)
            self._made[key] = sites[n, k] if (n, k) in sites else BETWEEN[self.between](sites, n, k)
        made = self._made[key]
        assert isinstance(made, Curve)
        return made

    @cache  # noqa: B019  # as long-lived as the tables
    def _gemm_sites(self, dtype: str) -> dict[tuple[int, int], Curve]:
        frame = self._dtype(self.frame("gemm_perf"), "gemm_perf", "gemm_dtype", GEMM_DTYPES.get(dtype, (dtype,)))
        grouped = frame.sort("m").group_by("n", "k").agg("m", "seconds")
        return {
            (n, k): Curve(np.array(m, dtype=np.float64), np.array(seconds))
            for n, k, m, seconds in grouped.iter_rows()
        }

    def all_reduce(self, gpus: int) -> Curve:
        """Seconds of an all-reduce of so many 16-bit elements among `gpus` devices of a node, launched by a CUDA graph
        where the table tells (an eager launch costs some 40 µs more, and engines use graphs)."""
        key = ("all_reduce", gpus)
        if key not in self._made:
            import polars as pl

            name = "custom_allreduce_perf" if self._folder("custom_allreduce_perf") else "nccl_perf"
            frame = self.frame(name)
            if name == "nccl_perf":
                frame = self._dtype(frame.filter(pl.col("op_name") == "all_reduce"), name, "nccl_dtype", HALF)
            elif "backend" in frame.columns:
                graph = frame.filter(pl.col("backend").str.ends_with("graph"))
                frame = graph if graph.height else frame
            known = sorted(frame["num_gpus"].unique().to_list())
            if gpus not in known:
                degrees = ", ".join(map(str, [1, *known]))
                what = f"{gpus} devices: all-reduces were measured among {degrees}"
                raise BadInput(what, source="--tensor-parallel")
            frame = frame.filter(pl.col("num_gpus") == gpus).group_by("message_size").agg(pl.col("seconds").min())
            frame = frame.sort("message_size")
            self._made[key] = Curve(frame["message_size"].cast(pl.Float64).to_numpy(), frame["seconds"].to_numpy())
        made = self._made[key]
        assert isinstance(made, Curve)
        return made

    def attention(self, phase: str, heads: int, kv_heads: int, head_dim: int, kv_dtype: str, window: int) -> Mixture:
        """Seconds of one layer's attention on one device by batch and length, for its own heads: `phase` "context" is
        causal prefill without prior tokens, "generation" one token after length − 1 others; window 0 is none."""
        key = (phase, heads, kv_heads, head_dim, kv_dtype, window)
        if key not in self._made:
            self._made[key] = self._attention(phase, heads, kv_heads, head_dim, kv_dtype, window)
        made = self._made[key]
        assert isinstance(made, Mixture)
        return made

    def _attention(self, phase: str, heads: int, kv_heads: int, head_dim: int, kv_dtype: str, window: int) -> Mixture:
        import polars as pl

        name = f"{phase}_attention_perf"
        wanted = HALF if kv_dtype in HALF else (kv_dtype,)
        frame = self._dtype(self.frame(name), name, "kv_cache_dtype", wanted)
        queries = [dtype for dtype in (*HALF, "fp8") if dtype in frame["attn_dtype"].unique().to_list()]
        frame = frame.filter(pl.col("attn_dtype") == queries[0]) if queries else frame
        dims = sorted(frame["head_dim"].unique().to_list())
        nearest = min(dims, key=lambda dim: abs(np.log(dim / head_dim)))
        if nearest != head_dim:
            self.note(f"{name} has no heads of {head_dim}: those of {nearest}, scaled")
        frame = frame.filter(pl.col("head_dim") == nearest)
        if "window_size" in frame.columns:
            windowed = frame.filter(pl.col("window_size") == window)
            if not windowed.height:
                self.note(f"{name} has no window of {window}: full attention over no more than the window")
            frame = windowed if windowed.height else frame.filter(pl.col("window_size") == 0)
        elif window:
            self.note(f"{name} has no windows: full attention over no more than the window")
        length = pl.col("isl") + pl.col("step") if phase == "generation" else pl.col("isl")
        frame = frame.with_columns(length=length).select(
            "num_key_value_heads", "num_heads", "batch_size", "length", "seconds"
        )
        sites = {
            (int(keys[0]), int(keys[1])): Surface.of(part.select("batch_size", "length", "seconds").to_numpy(), phase)
            for keys, part in frame.group_by("num_key_value_heads", "num_heads")
        }
        found = mixture(sites, heads, kv_heads, head_dim / nearest)
        if found is None:
            known = ", ".join(f"{heads}/{kv}" for kv, heads in sorted(sites))
            what = f"{name} has nothing near {heads} heads and {kv_heads} KV heads a device; has {known}"
            raise BadInput(what, source="--tensor-parallel")
        return found

    def moe(self, dtype: str, hidden: int, intermediate: int, experts: int, chosen: int, tp: int) -> Curve:
        """Seconds of one layer's routed experts by tokens, split `tp` ways. BadInput for a shape not measured."""
        key = ("moe", dtype, hidden, intermediate, experts, chosen, tp)
        if key not in self._made:
            self._made[key] = self._moe(dtype, hidden, intermediate, experts, chosen, tp)
        made = self._made[key]
        assert isinstance(made, Curve)
        return made

    def _moe(self, dtype: str, hidden: int, intermediate: int, experts: int, chosen: int, tp: int) -> Curve:
        import polars as pl

        frame = self.frame("moe_perf")
        shape = {"hidden_size": hidden, "inter_size": intermediate, "num_experts": experts, "topk": chosen}
        of_shape = frame.filter(**shape)
        if not of_shape.height:
            known = frame.select(*shape).unique().sort(*shape).rows()
            near = min(known, key=lambda row: sum(abs(np.log(a / b)) for a, b in zip(row, shape.values(), strict=True)))
            what = f"moe_perf has no experts of hidden, intermediate, experts, chosen = {tuple(shape.values())}"
            raise BadInput(f"{what}; nearest: {near}", source="--model")
        frame = of_shape.filter(moe_tp_size=tp, moe_ep_size=1)
        if not frame.height:
            known_tp = of_shape.filter(moe_ep_size=1)["moe_tp_size"].unique().sort().to_list()
            what = f"{tp}: experts of this shape were measured split {', '.join(map(str, known_tp))} ways"
            raise BadInput(what, source="--tensor-parallel")
        there = frame["moe_dtype"].unique().sort().to_list()
        wanted = MOE_DTYPES.get(dtype, (dtype,))
        used = next((name for name in wanted if name in there), None)
        if used is None and there == ["w4a16_mxfp4"]:  # gpt-oss, which is published in nothing else
            used = "w4a16_mxfp4"
            self.note("experts of this shape were measured in w4a16_mxfp4 alone")
        if used is None:
            raise BadInput(f"{dtype!r}: experts of this shape were measured in {', '.join(there)}", source="--dtype")
        frame = frame.filter(moe_dtype=used)
        skew = next(name for name in (*SKEWS, frame["distribution"][0]) if name in frame["distribution"])
        self.note(f"experts in {used}, tokens distributed as {skew}")
        frame = frame.filter(distribution=skew).group_by("num_tokens").agg(pl.col("seconds").min()).sort("num_tokens")
        return Curve(frame["num_tokens"].cast(pl.Float64).to_numpy(), frame["seconds"].to_numpy())

    # Reading and cleaning.

    def _folder(self, name: str) -> Path | None:
        """Where a table's rows for this version lie: that version, else the newest older one, else the oldest."""
        source = "nccl" if name == "nccl_perf" else self.framework
        files = list((self.root / "data" / self.system / FAMILIES[name] / source).glob(f"*/{name}.parquet"))
        by_version = {path.parent.name: path for path in files}
        if not by_version:
            return None
        if name == "nccl_perf":
            return by_version[max(by_version, key=_order)]
        not_newer = [version for version in by_version if _order(version) <= _order(self.version)]
        return by_version[max(not_newer, key=_order) if not_newer else min(by_version, key=_order)]

    def frame(self, name: str) -> pl.DataFrame:
        """A table with its times in seconds, each key once. BadInput where this system or framework has none."""
        if name in self._frames:
            return self._frames[name]
        import polars as pl

        path = self._folder(name)
        if path is None:
            what = f"no {name} for {self.system} and {self.framework}"
            raise BadInput(what, source=str(self.root / "data" / self.system / FAMILIES[name]))
        try:
            frame = pl.read_parquet(path)
            frame = frame.filter(pl.col("latency") > 0).with_columns(seconds=pl.col("latency") / 1e3)  # milliseconds
            self._check_versions(name, path, frame)
            self._frames[name] = self._once(name, frame)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise BadInput(f"not a table of kernel times: {str(error).splitlines()[0]}", source=str(path)) from None
        return self._frames[name]

    def _check_versions(self, name: str, path: Path, frame: pl.DataFrame) -> None:
        folder = path.parent.name
        self.used[name] = folder
        if name != "nccl_perf" and folder != self.version:
            self.note(f"{name} is of version {folder}")
        inside = frame["version"].unique().sort().to_list() if "version" in frame.columns else []
        if any(version != folder for version in inside):
            self.note(f"{name} in folder {folder} holds rows of version {', '.join(map(str, inside))}")

    def _once(self, name: str, frame: pl.DataFrame) -> pl.DataFrame:
        """The median of repeated measurements of a kernel; of several kernels for one key the fastest."""
        import polars as pl

        keys = [column for column in frame.columns if column not in (*DESCRIPTIVE, "seconds")]
        kernel = ["kernel_source"] if "kernel_source" in frame.columns else []
        seconds = pl.col("seconds")
        spread = (seconds.max() / seconds.min()).alias("spread")
        of_kernels = frame.group_by(*keys, *kernel).agg(seconds.median(), spread, pl.len().alias("times"))
        repeated = of_kernels.filter(pl.col("times") > 1)["spread"]
        if len(repeated):
            apart = 100 * (repeated.to_numpy().max() - 1)
            self.note(f"{name}: {len(repeated)} keys measured more than once, up to {apart:.0f} % apart: medians")
        best = of_kernels.group_by(keys).agg(seconds.min(), pl.len().alias("kernels"))
        several = int((best["kernels"] > 1).sum())
        if several:
            self.note(f"{name}: {several} keys measured with several kernels: the fastest of each")
        return best.drop("kernels")

    def _dtype(self, frame: pl.DataFrame, name: str, column: str, wanted: tuple[str, ...]) -> pl.DataFrame:
        """The rows of the first of the wanted dtypes that the table has. BadInput where it has none."""
        there = sorted(frame[column].unique().to_list())
        for dtype in wanted:
            if dtype in there:
                return frame.filter(**{column: dtype})
        option = "--kv-dtype" if column == "kv_cache_dtype" else "--dtype"
        raise BadInput(f"{wanted[0]!r}: {name} of {self.system} has {', '.join(there)}", source=option)


def _order(version: str) -> tuple[int, ...]:
    """A version as something to sort by: 1.3.0rc20 before 1.3.0, 0.5.6 before 0.5.6.post2."""
    words = {"dev": -4, "a": -3, "b": -2, "rc": -1, "post": 1}
    parts = re.findall(r"\d+|[a-z]+", version.lower())
    return (*(int(part) if part.isdigit() else words.get(part, 0) for part in parts), 0)

