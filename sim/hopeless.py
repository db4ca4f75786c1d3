"""When a trial can no longer meet its SLO, whatever is still to come."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sim.record import Record
from sim.scenario import Scenario
from sim.schema import PERCENTILES

Bools = npt.NDArray[np.bool_]


class Hopeless:
    """Watches a run (`Hopeless(scenario, outputs)(record, now)`); stops it once too many samples exceed a limit.

    `because` is then the key of [slo] that failed. A run that is stopped would have failed: of n samples at most
    n − ceil(n·q) may exceed a percentile's limit, that number grows with n, and n is at most what it would be if all
    requests were served to their end.
    """

    def __init__(self, scenario: Scenario, outputs: npt.NDArray[np.int64]) -> None:
        self.slo = scenario.slo
        self.time_limit = scenario.engine.time_limit
        self.outputs = outputs
        self.because: str | None = None
        self._gaps_seen = 0
        self._long_gaps: dict[str, int] = {}

    def __call__(self, record: Record, now: float) -> bool:
        n = record.offered
        if not n:
            return False
        columns = {name: _column(record, name)[:n] for name in ("arrival", "scheduled", "first_token", "finish")}
        measured = (columns["arrival"] >= record.measured_from) & (columns["arrival"] <= record.measured_to)
        waits = self._at_least(columns, now)
        for key, limit in self.slo.percentiles.items():
            metric, _, percentile = key.rpartition("_")
            if metric == "tbt":
                total = int((self.outputs - 1).sum()) + len(self.outputs) * self.slo.first_token_gap
                exceeding = self._gaps_over(record, key, limit)
            else:
                total = len(self.outputs)
                exceeding = int((measured & (waits[metric] > limit)).sum()) if metric in waits else 0
            allowed = total - -(-total * PERCENTILES[percentile] // 1000)
            if exceeding > allowed:
                self.because = key
        self._gaps_seen = len(record.gaps)
        return self.because is not None

    def _at_least(self, columns: dict[str, npt.NDArray[np.float64]], now: float) -> dict[str, npt.NDArray[np.float64]]:
        """What each request's durations come to at least, counting what has not happened yet up to now.

        With a time limit, requests that are cut off have no TTFT and no E2E, so only what has happened counts there.
        """
        arrival = columns["arrival"]
        still = {"scheduled": now, "first_token": now, "finish": now}
        if self.time_limit is not None:
            still["first_token"] = still["finish"] = -np.inf
        reached = {name: np.where(np.isnan(columns[name]), still[name], columns[name]) for name in still}
        return {
            "scheduling_delay": reached["scheduled"] - arrival,
            "ttft": reached["first_token"] - arrival,
            "e2e": reached["finish"] - arrival,
        }

    def _gaps_over(self, record: Record, key: str, limit: float) -> int:
        """Gaps beyond the limit so far; only those since the last look are looked at."""
        gaps = np.array(record.gaps[self._gaps_seen :])
        counts = np.array(record.gap_counts[self._gaps_seen :], dtype=np.int64)
        self._long_gaps[key] = self._long_gaps.get(key, 0) + int(counts[gaps > limit].sum())
        return self._long_gaps[key]


def _column(record: Record, name: str) -> npt.NDArray[np.float64]:
    """A copy: the record goes on growing."""
    column: npt.NDArray[np.float64] = np.array(getattr(record, name))
    return column
