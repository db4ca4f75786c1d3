"""Public kernel tables: reading them from the user's own install of aiconfigurator-core, cleaning, interpolating.

The package (Apache-2.0 by its metadata) holds measured kernel times in milliseconds, by system, framework and version:
`systems/<system>.yaml` and `systems/data/<system>/<family>/<framework>/<version>/<table>.parquet`. Nothing of it is
copied; what is wrong with a table, and what had to be assumed, is in `Tables.notes`. Seconds from here on.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import BadInput, unknown

if TYPE_CHECKING:
    import polars as pl

PACKAGE = "aiconfigurator_core"
FAMILIES = {
    "gemm_perf": "gemm",
    "context_attention_perf": "attention",
    "generation_attention_perf": "attention",
    "moe_perf": "moe",
    "computescale_perf": "quantize",
    "scale_matrix_perf": "quantize",
    "custom_allreduce_perf": "comm",
    "nccl_perf": "comm",
}
DESCRIPTIVE = ("framework", "version", "device", "kernel_source", "latency", "power", "implementation")


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
    ) -> None:
        self.root = root or installed()
        self.system, self.framework = system, framework
        # What has no GEMMs cannot be composed: systems of device figures alone, versions of a few tables.
        places = [path.parts[-5:-1] for path in self.root.glob("data/*/gemm/*/*/gemm_perf.parquet")]
        self._one_of("system", system, sorted({place[0] for place in places}))
        self._one_of("framework", framework, sorted({place[2] for place in places if place[0] == system}))
        there = [place[3] for place in places if (place[0], place[2]) == (system, framework)]
        self.versions = sorted(there, key=order)
        if version is not None:
            self._one_of("version", version, self.versions)
        self.version = version or self.versions[-1]
        self.notes: list[str] = []
        self.used: dict[str, str] = {}  # table: the version whose rows are used
        self._frames: dict[str, pl.DataFrame] = {}
        self.made: dict[object, Any] = {}  # what calibrate.kernels found in them

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
        """Seconds of an operation that moves so many bytes: a constant, and the bandwidth that the package achieved."""
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

    def folder(self, name: str) -> Path | None:
        """Where a table's rows for this version lie: that version, else the newest older one, else the oldest."""
        source = "nccl" if name == "nccl_perf" else self.framework
        files = list((self.root / "data" / self.system / FAMILIES[name] / source).glob(f"*/{name}.parquet"))
        by_version = {path.parent.name: path for path in files}
        if not by_version:
            return None
        if name == "nccl_perf":
            return by_version[max(by_version, key=order)]
        not_newer = [version for version in by_version if order(version) <= order(self.version)]
        return by_version[max(not_newer, key=order) if not_newer else min(by_version, key=order)]

    def frame(self, name: str) -> pl.DataFrame:
        """A table with its times in seconds, each key once. BadInput where this system or framework has none."""
        if name in self._frames:
            return self._frames[name]
        import polars as pl

        path = self.folder(name)
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

    def of_dtype(self, frame: pl.DataFrame, name: str, column: str, wanted: tuple[str, ...]) -> pl.DataFrame:
        """The rows of the first of the wanted dtypes that the table has. BadInput where it has none."""
        there = sorted(frame[column].unique().to_list())
        for dtype in wanted:
            if dtype in there:
                return frame.filter(**{column: dtype})
        option = "--kv-dtype" if column == "kv_cache_dtype" else "--dtype"
        raise BadInput(f"{wanted[0]!r}: {name} of {self.system} has {', '.join(there)}", source=option)


def order(version: str) -> tuple[int, ...]:
    """A version as something to sort by: 1.3.0rc20 before 1.3.0, 0.5.6 before 0.5.6.post2."""
    words = {"dev": -4, "a": -3, "b": -2, "rc": -1, "post": 1}
    parts = re.findall(r"\d+|[a-z]+", version.lower())
    return (*(int(part) if part.isdigit() else words.get(part, 0) for part in parts), 0)
