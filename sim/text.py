"""Figures for people: three digits, in the unit that suits them."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """A duration to three digits, in the unit that suits it."""
    if value is None:
        return "–"
    scaled, unit = (value * 1e3, "ms") if value != 0 and abs(value) < 0.9995 else (value, "s")
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:,.{digits}f} {unit}"


def number(value: float | None, digits: int = 3) -> str:
    """Thousands separated; a dash for what is not defined."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}g}" if value < 1000 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
