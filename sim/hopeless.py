"""When a trial can no longer meet its SLO, whatever is still to come."""

from __future__ import annotations

from math import ceil

import numpy as np
import numpy.typing as npt

from sim.record import Record
from sim.scenario import Scenario
from sim.schema import PERCENTILES

Floats = npt.NDArray[np.float64]
COLUMNS = ("arrival", "scheduled", "first_token", "finish")


class Hopeless:
    """Watches a run (`Hopeless(scenario, outputs)(record, now)`); stops it once too many samples exceed a limit.

    `because` is then the key of [slo] that failed. A run that is stopped would have failed: of n samples at most
    n − ceil(n·q) may exceed a percentile's limit (and of n requests all but a share of `attainment` their own limits),
    that number grows with n, and n is at most what it would be if all requests were served to their end.
    """

    def __init__(self, scenario: Scenario, outputs: npt.NDArray[np.int64]) -> None:
        self.slo = scenario.slo
        self.time_limit = scenario.engine.time_limit
        self.outputs = outputs
        self.because: str | None = None
        self.strain = 0.0  # the largest number beyond a limit so far, as a share of what is allowed in all
        self._gaps_seen = 0
        self._long_gaps: dict[str, int] = {}

    def __call__(self, record: Record, now: float) -> bool:
        n = record.offered
        if not n:
            return False
        columns = {name: _column(record, name)[:n] for name in COLUMNS}
        measured = (columns["arrival"] >= record.measured_from) & (columns["arrival"] <= record.measured_to)
        waits = self._at_least(columns, now)
        self.strain = 0.0
        for key, limit in self.slo.percentiles.items():
            metric, _, percentile = key.rpartition("_")
            if metric == "tbt":
                total = int((self.outputs - 1).sum()) + len(self.outputs) * self.slo.first_token_gap
                exceeding = self._gaps_over(record, key, limit)
            else:
                total = len(self.outputs)
                exceeding = int((measured & (waits[metric] > limit)).sum()) if metric in waits else 0
            self._compare(key, exceeding, total - -(-total * PERCENTILES[percentile] // 1000))
        if (share := self.slo.attainment) is not None:
            self._compare("attainment", self._bad(record, columns, waits), _may_miss(len(self.outputs), share))
        self._gaps_seen = len(record.gaps)
        return self.because is not None

    def _compare(self, key: str, exceeding: int, allowed: int) -> None:
        if exceeding > allowed:
            self.because = key
        self.strain = max(self.strain, exceeding / max(1, allowed))

    def _at_least(self, columns: dict[str, Floats], now: float) -> dict[str, Floats]:
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

    def _bad(self, record: Record, columns: dict[str, Floats], waits: dict[str, Floats]) -> int:
        """Requests that miss a limit of their own already; refused ones miss it whatever it is."""
        n = len(columns["arrival"])
        bad = np.zeros(n, dtype=bool)
        bad[list(record.reasons)] = True
        for key, limit in self.slo.per_request.items():
            if key == "tbt_max":
                bad |= (_column(record, "longest_gap")[:n] > limit) & (self.outputs[:n] > 1)
            elif key == "tpot":
                gaps = np.where(self.outputs[:n] > 1, self.outputs[:n] - 1, np.nan)
                bad |= (columns["finish"] - columns["first_token"]) / gaps > limit
            else:
                bad |= waits[key] > limit
        return int(bad.sum())

    def _gaps_over(self, record: Record, key: str, limit: float) -> int:
        """Gaps beyond the limit so far; only those since the last look are looked at."""
        gaps = np.array(record.gaps[self._gaps_seen :])
        counts = np.array(record.gap_counts[self._gaps_seen :], dtype=np.int64)
        self._long_gaps[key] = self._long_gaps.get(key, 0) + int(counts[gaps > limit].sum())
        return self._long_gaps[key]


class Alone(Hopeless):
    """Watches requests that are served one at a time: also stops once that is unlikely to fail in the end."""

    ENOUGH = 0.05  # of the requests, to see how it goes
    LIKELY = 0.8

    def __call__(self, record: Record, now: float) -> bool:
        done = record.done / len(self.outputs)
        return super().__call__(record, now) or (done >= self.ENOUGH and self.strain < self.LIKELY * done)


def _may_miss(n: int, share: float) -> int:
    """The most of n requests that may miss their limits where (n − missed) / n must be at least `share`."""
    missed = min(n, ceil(n * (1 - share)) + 1)
    while missed and (n - missed) / n < share:
        missed -= 1
    return missed


def _column(record: Record, name: str) -> Floats:
    """A copy: the record goes on growing."""
    column: Floats = np.array(getattr(record, name))
    return column
