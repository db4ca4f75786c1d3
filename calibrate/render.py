"""Profiles and validations for people: tables, and a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from calibrate.paper.rows import Figure as PaperFigure
from calibrate.validate import Validation
from sim.profile import TERMS, Profile
from sim.roofline import Figures
from sim.show import percent, seconds

UNKNOWN = "other dtypes, other engines and versions, memory that other processes use"
UNITS = {
    "step": "per iteration",
    "decode_step": "per iteration with decodes",
    "sample": "per iteration in which a request gets a token",
    "chunk": "per chunk",
    "sequence": "per request in the batch",
    "context": "per KV token of the decodes",
    "prefill_attention": "per unit m·(m0 + m/2) of a chunk",
    "prefill_context": "per KV token that chunks read",
}


def profile(one: Profile) -> RenderableType:
    """Where a profile comes from, what it says, and how far it holds."""
    valid, known = one.validity, one.provenance
    parallel = f"tensor parallel {one.tensor_parallel}, pipeline parallel {one.pipeline_parallel}"
    return Group(
        Text(one.name, style="bold"),
        Text(f"{one.model} on {one.device}, {parallel}", style="dim"),
        "",
        _terms(one) if one.coefficients is not None else _figures(one),
        "",
        _residuals(one) if one.residuals else "",
        f"errors: {one.trust}",
        "" if one.errors is None else f"in total, on what was held out: {_signed(one.errors.held_out_bias)}",
        f"data up to {valid.tokens:,} tokens and {valid.sequences:,} requests a batch, {valid.context_tokens:,} KV "
        f"tokens a decode, {valid.prefill_context_tokens:,} a chunk; beyond that it extrapolates, and a run says so",
        *(Text(f"· {key}: {_shown(value)}", style="dim") for key, value in known.items()),
        Text("" if "does_not_know" in known else f"· does not know: {UNKNOWN}", style="dim"),
    )


def _terms(one: Profile) -> Table:
    """The coefficients of measured iterations, with what resampling says of them."""
    assert one.coefficients is not None
    table = table_of("term", ">seconds", ">90 % of resamples", "")
    for term in TERMS:
        low, high = one.intervals.get(term, (None, None))
        between = "–" if low is None or high is None else f"{low:.3g} to {high:.3g}"
        table.add_row(term, f"{getattr(one.coefficients, term):.3g}", between, UNITS[term])
    tokens = one.coefficients.tokens
    for knot in tokens.knots[:: max(1, len(tokens.knots) // 6)]:
        table.add_row(f"{knot} tokens", f"{tokens.at(knot):.3g}", "", "linear layers, beyond the smallest batch")
    if (few := one.coefficients.few) is not None:
        for knot in few.knots[1:-1:2]:
            table.add_row(f"{knot} sampled", f"{few.at(knot):.3g}", "", "of few tokens, beyond the terms above")
    return table


def _figures(one: Profile) -> Table:
    """The fitted figures of the roofline model, beside the ones it has without a fit."""
    assert one.roofline is not None
    table = table_of("figure", ">here", ">interval", ">without a fit")
    for name, field in Figures.model_fields.items():
        value = getattr(one.roofline, name)
        low, high = one.intervals.get(name, (None, None))
        between = "–" if low is None or high is None else f"{low:.3g} to {high:.3g}"
        table.add_row(name, _shown(value), between, _shown(field.default))
    return table


def _residuals(one: Profile) -> Table:
    """What it was fitted to or is beside, and what it says."""
    table = table_of("figure", ">published", ">predicted", ">error", "")
    for residual in one.residuals:
        cells = (f"{residual.published:.3g}", f"{residual.predicted:.3g}")
        error = _signed(residual.predicted / residual.published - 1 if residual.published else None)
        table.add_row(residual.what, *cells, error, residual.unit + ("" if residual.fitted else ", not fitted"))
    return table


def figure(one: PaperFigure) -> RenderableType:
    """A figure of the paper: published beside simulated."""
    table = table_of(one.title, ">published", ">simulated", ">error", "")
    for row in one.rows:
        table.add_row(row.what, _number(row.published), _number(row.simulated), _signed(row.error), row.unit)
    notes = (Text(f"· {note}", style="dim") for note in (f"published: {one.reading}", *one.notes))
    return Group(Text(one.name, style="bold"), table, *notes, "")


def validation(attempts: Sequence[Validation], best: Validation) -> RenderableType:
    """Simulated beside measured, with the noise floor."""
    anchored = best.anchored is not None
    table = table_of(
        "", ">measured", ">again", ">noise", ">simulated", ">error", *([">anchored", ">error"] if anchored else [])
    )
    for one in best.metrics():
        cells = [one["metric"], seconds(one["measured_s"]), seconds(one["again_s"]), _signed(one["noise"])]
        cells += [seconds(one["simulated_s"]), _signed(one["error"])]
        cells += [seconds(one["anchored_s"]), _signed(one["error_anchored"])] if anchored else []
        table.add_row(*cells)
    return Group(
        Text(best.scenario.name, style="bold"),
        Text(f"{best.scenario.scheduler.policy} · the same scheduler, measured twice and simulated", style="dim"),
        "",
        table,
        "",
        *_alignment(best.alignment(), anchored),
        _attribution(best.attribution()),
        *_attempts(attempts, best),
        *(Text(f"· {note}", style="dim") for note in best.simulated.notes),
    )


def _alignment(told: Mapping[str, Any], anchored: bool) -> list[str]:
    which = "anchored" if anchored else "predicted"
    lines = [
        f"{told['iterations_measured']:,} iterations; on the measured batches the model is off by "
        f"{told[f'{which}_median_error']:.1%} (median), {told[f'{which}_p90_error']:.1%} (P90), "
        f"{told[f'{which}_total']:+.1%} in total"
    ]
    for name, label in (("again", "the run again"), ("simulated", "the simulation"), ("anchored", "the anchored one")):
        if f"{name}_equal_batches" in told:
            first = told[f"{name}_first_difference"]
            where = "never parts ways" if first is None else f"parts ways at iteration {first:,}"
            lines.append(f"{label} {where}; {told[f'{name}_equal_batches']:.0%} of batches are equal in order")
    return lines


def _attribution(told: Mapping[str, float]) -> str:
    return (
        f"difference in iteration time: {told['latency_model']:+.1%} latency model, {told['schedule']:+.1%} schedule; "
        f"the host took {told['host_share']:.1%} of the measured time"
    )


def _attempts(attempts: Sequence[Validation], best: Validation) -> list[str]:
    """All attempts in short, where there are several."""
    if len(attempts) == 1:
        return []
    lines = [""]
    for number, attempt in enumerate(attempts, start=1):
        key = "error_anchored" if attempt.anchored is not None else "error"
        parts = [f"{one['metric']} {_signed(one[key])} (noise {_signed(one['noise'])})" for one in attempt.metrics()]
        told = ", ".join(part for part in parts if part.startswith(("tbt_p50", "tbt_p99", "ttft_p50")))
        lines.append(f"attempt {number}{', the best' if attempt is best else ''}: {told}")
    return lines


def table_of(*headings: str) -> Table:
    """Columns by heading; one that starts with > is right-justified."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table


def _signed(value: float | None) -> str:
    return percent(None) if value is None else f"{round(value, 3) + 0.0:+.1%}"  # no minus before a zero


def _shown(value: object) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def refitted(told: Mapping[str, Any]) -> RenderableType:
    """A profile refitted to measured runs: errors before and after."""
    table = table_of("result", "metric", ">measured", ">before", ">error", ">after", ">error")
    for row in told["metrics"]:
        cells = [seconds(row["measured_s"]), seconds(row["before_s"]), _signed(row["before_error"])]
        table.add_row(row["file"], row["metric"], *cells, seconds(row["after_s"]), _signed(row["after_error"]))
    return Group(
        Text(f"{told['file']}", style="bold"),
        f"host {seconds(told['step_s'])} an iteration and {told['sequence_s'] * 1e6:.1f} µs a sequence, kernels × "
        f"{told['scale']:.3f}; mean error {told['error_before']:.1%} before, {told['error_after']:.1%} after",
        "",
        table,
    )
