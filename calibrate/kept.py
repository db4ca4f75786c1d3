"""The result files of a validation, and its chart."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from calibrate.validate import Validation
from sim import output


def files(best: Validation, result: Mapping[str, Any]) -> dict[str, bytes]:
    """Result files of a validation. On a machine without polars its steps are JSON, and there is no chart."""
    kept = {
        "validation.json": output.as_json(result).encode(),
        "scenario.toml": best.scenario.to_toml().encode(),
    }
    try:
        import polars as pl
    except ModuleNotFoundError:
        return kept | {"validation_steps.json": output.as_json(best.steps).encode()}
    steps = pl.DataFrame({name: values for name, values in best.steps.items() if values})
    buffer = BytesIO()
    steps.write_parquet(buffer)
    kept |= {"validation_steps.parquet": buffer.getvalue(), "validation.vl.json": chart(steps).to_json().encode()}
    for prefix, report in (("measured", best.measured), ("simulated", best.simulated)):
        kept |= {f"{prefix}/{name}": content for name, content in output.of_run(report).items()}
    return kept


def chart(steps: Any) -> Any:
    """Predicted against measured seconds of every iteration, and their quantiles against each other."""
    from sim import charts

    return (charts.steps(steps) | charts.quantiles(steps)).resolve_scale(color="independent")
