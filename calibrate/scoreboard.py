"""What a score comes to: errors by model, system and engine, and how they compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.score import CAMPAIGNS, PAUSE
from calibrate.silicon import Host

if TYPE_CHECKING:
    from rich.console import RenderableType

GROUP = ("model", "system", "framework", "precision", "version")
METRICS = ("ttft", "tpot")
SIZES = (8, 16, 32, 64, 128)  # concurrencies: up to each, and beyond
Row = Mapping[str, Any]
PEER = {  # median |error| of TPOT and TTFT of aiconfigurator 0.12's own estimator on random rows of the same file
    ("qwen3-32b", "h100_sxm", "vllm"): (0.111, 0.521),
    ("qwen3-32b", "h100_sxm", "trtllm"): (0.102, 0.374),
    ("qwen3-32b", "h100_sxm", "sglang"): (0.238, 0.890),
    ("llama-3.1-70b", "h100_sxm", "vllm"): (0.038, 0.302),
    ("llama-3.1-70b", "h200_sxm", "vllm"): (0.032, 0.320),
    ("llama-3.1-70b", "b200_sxm", "vllm"): (0.155, 0.122),
    ("llama-3.1-70b", "h200_sxm", "trtllm"): (0.337, 0.463),
    ("llama-3.1-70b", "b200_sxm", "trtllm"): (0.415, 0.310),
}
PEER_OF_MODEL = {"llama-3.1-8b": (0.093, 0.665), "qwen3-32b": (0.118, 0.448), "llama-3.1-70b": (0.154, 0.296)}
PEER_FROM = "aiconfigurator 0.12.0, cli_estimate, aggregated, its defaults: 79 to 104 random rows of each model"


def result(rows: Sequence[Row], offered: int, refused: Counter[str], hosts: Mapping[str, Host]) -> dict[str, Any]:
    """All of it, ready for JSON. `refused` counts the file's rows that were no cases, by reason."""
    done = [row for row in rows if row["why_not"] is None]
    models = [
        _errors(of, {"model": model}) | _peer(PEER_OF_MODEL.get(model))
        for model, of in _grouped(done, lambda r: r["model"])
    ]
    if len(models) > 1:
        models.append(_errors(done, {"model": "all"}) | _peer(None))
    groups = []
    for key, of in _grouped(done, lambda r: tuple(r[name] or "" for name in GROUP)):
        told = dict(zip(GROUP, key, strict=True))
        tables = sorted({row["tables_version"] for row in of})
        peer = PEER.get((told["model"], told["system"], told["framework"]))
        by_size = [
            _errors(each, {"concurrency": size}) for size, each in _grouped(of, lambda r: _size(r["concurrency"]))
        ]
        groups.append(
            _errors(of, told | {"tables_version": ", ".join(tables)}) | _peer(peer) | {"by_concurrency": by_size}
        )
    return {
        "rows_in_file": offered,
        "scored": len(done),
        "models": models,
        "groups": groups,
        "not_scored": dict(refused.most_common())
        | dict(Counter(r["why_not"] for r in rows if r["why_not"]).most_common()),
        "host": {name: asdict(host) for name, host in hosts.items()},
        "host_left": _host_left(done),
        "campaigns": {campaign.name: campaign.told for campaign in CAMPAIGNS},
        "pause_s": PAUSE,
        "peer": PEER_FROM,
    }


def _grouped(rows: Iterable[Row], key: Any) -> list[tuple[Any, list[Row]]]:
    return [(name, list(of)) for name, of in groupby(sorted(rows, key=key), key=key)]


def _size(concurrency: int) -> int:
    return next((size for size in SIZES if concurrency <= size), concurrency)


def _errors(rows: Sequence[Row], told: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {**told, "rows": len(rows)}
    for metric in METRICS:
        errors = np.array([row[f"{metric}_error"] for row in rows])
        found[f"{metric}_median"] = float(np.median(np.abs(errors)))
        found[f"{metric}_p90"] = float(np.quantile(np.abs(errors), 0.9))
        found[f"{metric}_bias"] = float(np.median(errors))
    return found


def _peer(known: tuple[float, float] | None) -> dict[str, Any]:
    return {"peer_tpot_median": known[0] if known else None, "peer_ttft_median": known[1] if known else None}


def _host_left(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Host terms beyond those used that TPOT asks for, per engine: relative errors under a soft L1 loss."""
    from scipy.optimize import least_squares  # of the same extra as the tables

    found = {}
    for engine, of in _grouped(rows, lambda row: row["framework"]):
        measured, forecast, size = (
            np.array([row[name] for row in of], dtype=np.float64)
            for name in ("tpot_measured_s", "tpot_s", "concurrency")
        )

        def off(x: Any, measured: Any = measured, forecast: Any = forecast, size: Any = size) -> Any:
            return (forecast + x[0] * 1e-3 + x[1] * 1e-6 * size) / measured - 1

        solved = least_squares(off, [0.1, 1.0], bounds=([0, 0], [100, 1000]), loss="soft_l1", f_scale=0.05)
        found[engine] = {"step_s": float(solved.x[0]) * 1e-3, "sequence_s": float(solved.x[1]) * 1e-6, "rows": len(of)}
    return found


def page(told: Mapping[str, Any]) -> RenderableType:
    """The scoreboard for people."""
    from rich.console import Group
    from rich.text import Text

    from calibrate.render import table_of

    total = table_of(
        "model", ">rows", ">TTFT |error|", ">P90", ">bias", ">TPOT |error|", ">P90", ">bias", ">peer TTFT", ">TPOT"
    )
    for one in told["models"]:
        total.add_row(one["model"], str(one["rows"]), *_cells(one))
    hosts = ", ".join(
        f"{name} {h['step'] * 1e3:.2f} ms + {h['sequence'] * 1e6:.0f} µs" for name, h in told["host"].items()
    )
    left = ", ".join(
        f"{name} {h['step_s'] * 1e3:.2f} ms + {h['sequence_s'] * 1e6:.0f} µs" for name, h in told["host_left"].items()
    )
    notes = [
        f"host terms (per iteration + per sequence): {hosts}; what the rows ask for beyond them: {left}",
        *(f"{name}: {what}" for name, what in told["campaigns"].items()),
        f"peer: {told['peer']}",
        *(f"not scored: {count:,} rows: {why}" for why, count in told["not_scored"].items()),
    ]
    head = Text(f"{told['scored']:,} of {told['rows_in_file']:,} measured rows forecast", style="bold")
    return Group(
        head,
        "",
        total,
        "",
        _each(told["groups"]),
        "",
        _by_size(told["groups"]),
        "",
        *(Text(f"· {note}", style="dim") for note in notes),
    )


def _each(groups: Sequence[Row]) -> RenderableType:
    """A line for each model, system, engine and dtype of the weights."""
    from calibrate.render import table_of

    each = table_of(
        "model",
        "system",
        "engine",
        "weights",
        "tables",
        ">rows",
        ">TTFT",
        ">bias",
        ">TPOT",
        ">bias",
        ">peer TTFT",
        ">TPOT",
    )
    for one in groups:
        ours = [
            f"{one[f'{m}_{what}']:+.1%}" if what == "bias" else f"{one[f'{m}_{what}']:.1%}"
            for m in METRICS
            for what in ("median", "bias")
        ]
        peer = [_share(one["peer_ttft_median"]), _share(one["peer_tpot_median"])]
        engine = f"{one['framework']} {one['version']}".strip()
        each.add_row(
            one["model"], one["system"], engine, one["precision"], one["tables_version"], str(one["rows"]), *ours, *peer
        )
    return each


def _by_size(groups: Sequence[Row]) -> RenderableType:
    """The same by the number of clients."""
    from calibrate.render import table_of

    sizes = sorted({size["concurrency"] for one in groups for size in one["by_concurrency"]})
    sizes = [size for size in sizes if size <= SIZES[-1]]
    by_size = table_of("median |error|, TTFT / TPOT, by clients", *(f">≤ {size}" for size in sizes))
    for one in groups:
        cells = {
            size["concurrency"]: f"{size['ttft_median']:.0%} / {size['tpot_median']:.0%}"
            for size in one["by_concurrency"]
        }
        label = f"{one['model']} {one['system']} {one['framework']} {one['version']}".strip()
        by_size.add_row(label, *(cells.get(size, "") for size in sizes))
    return by_size


def _cells(one: Row) -> list[str]:
    found = []
    for metric in METRICS:
        found += [f"{one[f'{metric}_median']:.1%}", f"{one[f'{metric}_p90']:.1%}", f"{one[f'{metric}_bias']:+.1%}"]
    return [*found, _share(one["peer_ttft_median"]), _share(one["peer_tpot_median"])]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
