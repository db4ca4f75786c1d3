"""What machine this is and what state it is in: the provenance of a measurement."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def describe(device: torch.device) -> dict[str, str | int]:
    """Names and versions of what was measured with."""
    told: dict[str, str | int] = {
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu("model name") or "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        told["cuda"] = torch.version.cuda or "unknown"
        told["driver"] = _driver()
    if commit := _commit():
        told["commit"] = commit
    return told


def clock_mhz(device: torch.device) -> float:
    """The clock now: of the GPU's multiprocessors, or of the first core; NaN where it is not told."""
    try:
        told = torch.cuda.clock_rate(device) if device.type == "cuda" else _cpu("cpu MHz")
        return float(told) if told is not None else float("nan")
    except (RuntimeError, ModuleNotFoundError, ValueError):
        return float("nan")


def _cpu(key: str) -> str | None:
    """The first value of a key of /proc/cpuinfo."""
    try:
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return None


def _driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _commit() -> str | None:
    """The commit of the source tree, where it is one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
