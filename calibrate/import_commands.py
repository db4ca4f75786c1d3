"""The commands `calibrate import aiconfigurator`, `calibrate import vidur` and `calibrate import table`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from calibrate import rows, silicon, vidur
from calibrate.tables import Tables
from sim import output
from sim.errors import BadInput, unknown
from sim.hardware import DEFAULT_KV, Dtype, KvDtype, Model, ModelTable, device
from sim.hardware import DeviceTable as DeviceName
from sim.hardware import model as find_model
from sim.options import say, whole

Json = Annotated[bool, Parameter(negative="", show_default=False)]
Count = Annotated[int, Parameter(converter=whole)]


def aiconfigurator(
    *,
    system: str,
    framework: str,
    model: str,
    to: Path,
    version: str | None = None,
    tensor_parallel: Count = 1,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    step: float = 0.0,
    sequence: float = 0.0,
    json: Json = False,
) -> None:
    """Compose iterations of a model from the kernel tables of an installed aiconfigurator-core.

    Parameters
    ----------
    system
        Whose kernels: h100_sxm, h200_sxm, b200_sxm, a100_sxm, l40s, gb200, …
    framework
        vllm, sglang or trtllm.
    model
        A catalogue name, or a Hugging Face config.json.
    to
        The file to write: *.parquet or *.jsonl.
    version
        The framework's version; the newest one by default.
    tensor_parallel
        Among how many devices the model is split.
    dtype
        Of the weights: bfloat16, fp8, int4, or any that the tables name (fp8_block, nvfp4, …).
    kv_dtype
        Of the KV cache: bfloat16 or fp8; 16 bits by default.
    step
        Seconds of host time to add to every iteration: the tables hold kernels alone.
    sequence
        Seconds of host time to add for every request of an iteration.
    """
    rows.check_writable(to)
    chosen = _model(model, dtype, kv_dtype)
    tables = Tables(system, framework, version)
    host = silicon.Host(step, sequence)
    table = silicon.import_rows(tables, chosen, tensor_parallel, dtype=dtype, host=host)
    _answer(table, to, tables.notes, json)


def vidur_(
    linear: Path,
    *,
    model: str,
    device: str,
    to: Path,
    attention: Path | None = None,
    tensor_parallel: Count = 1,
    table_model: str | None = None,
    table_device: str | None = None,
    json: Json = False,
) -> None:
    """Compose iterations of a model from Vidur's profiles of single operators.

    Parameters
    ----------
    linear
        The table of the linear layers: mlp.csv, or one condensed from it.
    model
        The catalogue's name of the model that was profiled, or a Hugging Face config.json.
    device
        The catalogue's name of the device.
    to
        The file to write: *.parquet or *.jsonl.
    attention
        The table of attention: attention.csv. Without one attention is estimated from the data sheet.
    tensor_parallel
        Among how many devices the model is split.
    table_model
        The model's name in a table of several.
    table_device
        The device's name in a table of several.
    """
    rows.check_writable(to)
    choice = vidur.Choice(tensor_parallel, table_model, table_device)
    chosen, on = _model(model, "float16", None), _device(device)
    table = vidur.import_rows(linear, attention, chosen, on, choice)
    _answer(table, to, [f"from the data sheet: {table.provenance['from_data_sheet']}"], json)


def table(
    measurements: Path,
    *,
    to: Path,
    model: str | None = None,
    device: str | None = None,
    source: str | None = None,
    json: Json = False,
) -> None:
    """Check anyone's table of measured iterations and write it as the other commands read it.

    Parameters
    ----------
    measurements
        Parquet, CSV or JSON lines with the columns decodes, context, chunks, prefill_tokens, attention,
        prefill_context and seconds.
    to
        The file to write: *.parquet or *.jsonl.
    model
        The model that was measured; the table's own by default.
    device
        The catalogue's name of the device that was measured; the table's own by default.
    source
        Where the measurements come from, in words.
    """
    rows.check_writable(to)
    loaded = rows.load(measurements)
    given = {"model": model, "catalogue_device": device and _device(device).name, "source": source}
    told = {"source": measurements.name} | loaded.provenance | {key: value for key, value in given.items() if value}
    _answer(rows.Rows(loaded.columns, told), to, [], json)


def _answer(table: rows.Rows, to: Path, notes: list[str], json: bool) -> None:
    rows.save(table, to)
    for note in notes:
        say(note)
    result: dict[str, Any] = {"file": str(to), "rows": len(table), "notes": notes, "provenance": table.provenance}
    if json:
        print(output.as_json(result), end="")
    else:
        print(f"{len(table)} iterations in {to}")


def _model(name: str, dtype: str, kv_dtype: str | None) -> Model:
    """A catalogue entry or a config.json, in the dtype of ours that is nearest to the tables'."""
    nearest: Dtype = dtype if dtype in get_args(Dtype) else "fp8" if dtype.startswith("fp8") else "bfloat16"  # type: ignore[assignment]
    if kv_dtype is not None and kv_dtype not in get_args(KvDtype):
        raise BadInput(unknown("dtype", kv_dtype, get_args(KvDtype)), source="--kv-dtype")
    kept: KvDtype = kv_dtype or DEFAULT_KV[nearest]  # type: ignore[assignment]
    named = {"hf_config": name} if name.endswith(".json") else {"name": name}
    try:
        return find_model(ModelTable(dtype=nearest, kv_dtype=kept, **named), Path())
    except BadInput as error:
        raise BadInput(error.what, source=error.source or "--model") from None


def _device(name: str) -> Any:
    try:
        return device(DeviceName(name=name))
    except BadInput as error:
        raise BadInput(error.what, source="--device") from None
