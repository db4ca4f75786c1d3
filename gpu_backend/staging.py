"""How a batch's index arrays get to the device: one pinned buffer, one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Staging:
    """Copies columns of integers to the device, int64, through buffers that are kept.

    What `load` answers is valid until the next `load`. With `fixed` the buffers never grow, so that columns of the same
    lengths are always at the same addresses, as a CUDA graph needs. On a CPU nothing is copied twice.
    """

    def __init__(self, device: torch.device, values: int = 4096, *, fixed: bool = False) -> None:
        self.fixed = fixed
        self.target = device
        self.copied = event() if device.type == "cuda" else None
        self._hold(values)

    def load(self, *columns: Sequence[int] | torch.Tensor) -> list[torch.Tensor]:
        """The columns on the device, one after the other."""
        total = sum(map(len, columns))
        if self.copied is not None:
            self.copied.synchronize()  # the device may still be reading the last ones
        if total > len(self.host):
            assert not self.fixed, "a graph's buffers do not grow"
            self._hold(max(total, 2 * len(self.host)))
        start, bounds = 0, []
        for column in columns:
            end = start + len(column)
            self.array[start:end] = column
            bounds.append((start, end))
            start = end
        if self.copied is not None:
            self.device[:total].copy_(self.host[:total], non_blocking=True)
            self.copied.record()
        return [self.device[start:end] for start, end in bounds]

    def _hold(self, values: int) -> None:
        on_gpu = self.copied is not None
        self.host = torch.zeros(values, dtype=torch.int64, pin_memory=on_gpu)
        self.array = self.host.numpy()
        self.device = torch.zeros(values, dtype=torch.int64, device=self.target) if on_gpu else self.host


class DeviceTimer:
    """How long the device took from `start` to `stop`, by CUDA events; unknown on a CPU."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.events = [event(enable_timing=True) for _ in range(2)] if on_gpu else []

    def start(self) -> None:
        if self.events:
            self.events[0].record()

    def stop(self) -> None:
        if self.events:
            self.events[1].record()

    def seconds(self) -> float | None:
        """Of the last pair, once the device is done with it."""
        return self.events[0].elapsed_time(self.events[1]) / 1000 if self.events else None


def event(**options: bool) -> Any:
    """A CUDA event on the current device."""
    make: Any = torch.cuda.Event
    return make(**options)
