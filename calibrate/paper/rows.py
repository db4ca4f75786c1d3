"""What a figure of the paper is here: rows of published and simulated values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim.text import number

if TYPE_CHECKING:
    import polars as pl

NEAR, FAR = 0.15, 0.35  # what counts as reproduced, and as followed


@dataclass(frozen=True, slots=True)
class Row:
    """One value: simulated, and published where it is on record."""

    what: str
    unit: str
    published: float | None
    simulated: float | None

    @property
    def error(self) -> float | None:
        """Relative to the published value."""
        if not self.published or self.simulated is None:
            return None
        return self.simulated / self.published - 1


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure or table of the paper: its rows, how the published values were read, and what to know."""

    name: str
    title: str
    reading: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        rows = [
            {"what": r.what, "unit": r.unit, "published": r.published, "simulated": r.simulated, "error": r.error}
            for r in self.rows
        ]
        return {"figure": self.name, "title": self.title, "reading": self.reading, "rows": rows, "notes": self.notes}

    @property
    def frame(self) -> pl.DataFrame:
        """A row for each value: what, unit, published, simulated, error (null where nothing is on record)."""
        import polars as pl

        schema: dict[str, Any] = dict.fromkeys(("what", "unit"), pl.String)
        schema |= dict.fromkeys(("published", "simulated", "error"), pl.Float64)
        return pl.DataFrame(self.to_dict()["rows"], schema=schema)

    def chart(self, by: Callable[[str], str], unit: str | None = None) -> Any:
        """Simulated against published, as an Altair chart, of the rows of one unit (the first row's by default).

        `by` makes a row's colour of what it is.
        """
        from calibrate.paper.chart import against

        return against(self, by, unit or self.rows[0].unit)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from sim import tables

        rows = [
            (row.what, row.unit, number(row.published), number(row.simulated), _signed(row.error)) for row in self.rows
        ]
        table = tables.Table(self.title, ("", "unit", "published", "simulated", "error"), rows)
        return tables.html(self.name, [table], None, [f"published: {self.reading}", *self.notes])


def _signed(error: float | None) -> str:
    return "–" if error is None else f"{error:+.1%}"
