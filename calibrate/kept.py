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
    import altair as alt
    import polars as pl

    which = "anchored" if "anchored" in steps.columns else "predicted"
    part = steps.select("seconds", pl.col(which).alias("predicted"), (pl.col("chunks") > 0).alias("prefill"))
    drawn = part.sample(min(2000, len(part)), seed=0)
    scale = alt.Scale(type="log")
    x, y = alt.X("seconds", scale=scale, title="measured (s)"), alt.Y("predicted", scale=scale, title="predicted (s)")
    line = alt.Chart().mark_line(color="grey", strokeDash=[4, 4]).encode(x=alt.X("seconds"), y=alt.Y("seconds"))
    points = (
        alt.Chart().mark_point(size=12, opacity=0.5).encode(x=x, y=y, color=alt.Color("prefill", title="with prefill"))
    )
    scatter = alt.layer(points, line, data=drawn).properties(title="every iteration", width=320, height=320)
    shares = [share / 200 for share in range(1, 200)]
    quantiles = pl.DataFrame(
        {name: [part[name].quantile(share) for share in shares] for name in ("seconds", "predicted")}
    )
    pairs = alt.Chart().mark_point(size=12).encode(x=x, y=y)
    ranked = alt.layer(pairs, line, data=quantiles).properties(title="quantile against quantile", width=320, height=320)
    return alt.hconcat(scatter, ranked)
