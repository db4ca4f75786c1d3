"""Charts: frames in, Altair charts out.

>>> from sim import Scenario, charts, simulate
>>> charts.tbt(simulate(Scenario.load("scenarios/chat-mistral-7b.toml")))

`tokens`, `tbt`, `ttft`, `kv`, `queue` and `time_parts` take a run or several (a list, or a dict of labels), `batches`
and `timeline` one. A run is a `Report`, or what `sim.results.load` reads from its files. `capacity` and
`latency_at_rate` take what `sim.capacity` gives, `cost` what `sim.cost` gives, `front` and `trend` a frame with a row
for each run. `steps`, `quantiles`, `tbt_quantiles` and `errors` take the results of a validation.

No chart holds more than 5,000 rows: distributions are thinned by rank and series by bins of time, and the subtitle says
how many there were. What has nothing to show raises `NothingToDraw`. Importing this module makes Altair use the
servecast theme, and draw as PNG in notebooks unless a renderer was chosen: its own default needs the network.
"""

import altair as _altair

from sim.charts.measured import errors, quantiles, steps, tbt_quantiles
from sim.charts.rates import capacity, cost, front, latency_at_rate, trend
from sim.charts.runs import batches, kv, queue, tbt, time_parts, timeline, tokens, ttft
from sim.charts.thin import NothingToDraw, Run, Runs

if _altair.renderers.active == "default":
    _altair.renderers.enable("png", scale_factor=2)

__all__ = [
    "NothingToDraw",
    "Run",
    "Runs",
    "batches",
    "capacity",
    "cost",
    "errors",
    "front",
    "kv",
    "latency_at_rate",
    "quantiles",
    "queue",
    "steps",
    "tbt",
    "tbt_quantiles",
    "time_parts",
    "timeline",
    "tokens",
    "trend",
    "ttft",
]
