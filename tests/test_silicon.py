"""Importing public kernel tables: reading and cleaning them, what lies between their rows, composing iterations.

Tables made by hand, in the layout of aiconfigurator-core, hold everywhere; where the package is installed its own must
give the worked example.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from calibrate import fit as fitting
from calibrate import rows, silicon, tables, vidur
from calibrate.compose import composition, iteration_seconds
from calibrate.kernels import all_reduce, attention, gemm, moe
from calibrate.silicon import Host, import_rows, points
from calibrate.surface import Curve, Surface, by_nearest, mixture
from calibrate.tables import Tables
from sim.__main__ import main
from sim.errors import BadInput
from sim.hardware import DeviceTable, Model, ModelTable, device
from sim.hardware import model as find_model

installed = pytest.mark.skipif(
    importlib.util.find_spec(tables.PACKAGE) is None, reason="aiconfigurator-core is not installed (extra 'silicon')"
)
FIGURES = """gpu:
  mem_bw: 1000000000000 # a made-up device
  mem_bw_empirical_scaling_factor: 0.8
  mem_empirical_constant_latency: 0.000003
  mem_capacity: 80e9
"""
RATE, HALVED, BYTES = 1e14, 1e-12, 2e-12  # FLOP/s of GEMMs; seconds per pair and head, per KV token and KV head
KV_LIMIT = 4096  # batch x length beyond which the made-up decode table is empty


def model(name: str, dtype: Any = "bfloat16") -> Model:
    return find_model(ModelTable(name=name, dtype=dtype, kv_dtype="bfloat16"), Path())


def write(root: Path, family: str, name: str, found: Sequence[Mapping[str, Any]], version: str = "1.0") -> None:
    """One table; its latencies are given in seconds and written in milliseconds."""
    folder = root / "data" / "made_up" / family / ("nccl" if name == "nccl_perf" else "vllm") / version
    folder.mkdir(parents=True, exist_ok=True)
    frame = pl.DataFrame([{"framework": "VLLM", "version": version, "kernel_source": "k"} | row for row in found])
    frame.with_columns(pl.col("latency") * 1e3).write_parquet(folder / f"{name}.parquet")


def gemm_rows(dtype: str = "bfloat16") -> list[dict[str, Any]]:
    sizes = (64, 256, 1024, 4096, 16384)
    return [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": 2 * m * n * k / RATE}
        for m in (1, 16, 256, 1024)
        for n in sizes
        for k in sizes
    ]


def attention_rows(phase: str) -> list[dict[str, Any]]:
    found = []
    for kv, heads in ((1, 2), (1, 8), (2, 8), (2, 16)):
        for batch in (1, 4, 16):
            for length in (1, 16, 256, 1024):
                row = {"batch_size": batch, "num_heads": heads, "num_key_value_heads": kv, "head_dim": 64}
                row |= {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
                if phase == "context":
                    row |= {"isl": length, "step": 0, "latency": batch * heads * length**2 * HALVED}
                elif batch * length <= KV_LIMIT:
                    row |= {"isl": 1, "step": length, "latency": batch * heads * (length + 1) * BYTES}
                if "latency" in row:
                    found.append(row)
    return found


def reduce_rows() -> list[dict[str, Any]]:
    return [
        {"num_gpus": 2, "message_size": size, "backend": backend, "latency": floor + size * 1e-11}
        for size in (128, 1 << 24)
        for backend, floor in (("vllm_graph", 5e-6), ("vllm_eager", 44e-6))
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Tables of a made-up system whose every kernel takes what a formula says."""
    place = tmp_path / "systems"
    write(place, "gemm", "gemm_perf", gemm_rows())
    for phase in ("context", "generation"):
        write(place, "attention", f"{phase}_attention_perf", attention_rows(phase))
    write(place, "comm", "custom_allreduce_perf", reduce_rows())
    (place / "made_up.yaml").write_text(FIGURES)
    return place


def made_up(root: Path, version: str | None = None) -> Tables:
    return Tables("made_up", "vllm", version, root=root)


SMALL = Model(
    name="small", layers=3, hidden=256, heads=8, kv_heads=2, head_dim=64, intermediate=1000, vocab=3000,
    context_limit=2048,
)  # fmt: skip


# Reading and cleaning


def test_milliseconds_become_seconds_and_repeated_keys_their_median(root: Path) -> None:
    again = [row | {"latency": row["latency"] * factor} for row in gemm_rows() for factor in (1.0, 1.1, 3.0)]
    write(root, "gemm", "gemm_perf", again)
    found = made_up(root)
    assert gemm(found, "bfloat16", 256, 1024).at(16) == pytest.approx(1.1 * 2 * 16 * 256 * 1024 / RATE)
    assert any("100 keys measured more than once, up to 200 % apart: medians" in note for note in found.notes)


def test_of_several_kernels_for_a_key_the_fastest_counts(root: Path) -> None:
    slow = [row | {"latency": row["latency"] * 9, "kernel_source": "slow"} for row in gemm_rows()]
    write(root, "gemm", "gemm_perf", gemm_rows() + slow)
    found = made_up(root)
    assert gemm(found, "bfloat16", 256, 1024).at(16) == pytest.approx(2 * 16 * 256 * 1024 / RATE)
    assert any("several kernels" in note for note in found.notes)


def test_the_newest_version_is_the_default_and_missing_tables_come_from_an_older_one(root: Path) -> None:
    for version in ("0.9.10", "1.2.0rc5", "1.2.0", "1.2.0rc20"):
        write(root, "gemm", "gemm_perf", gemm_rows(), version)
    found = made_up(root)
    assert found.versions == ["0.9.10", "1.0", "1.2.0rc5", "1.2.0rc20", "1.2.0"]
    assert found.version == "1.2.0"
    composition(found, SMALL)
    assert "context_attention_perf is of version 1.0" in found.notes


def test_rows_of_another_version_than_their_folder_are_said(root: Path) -> None:
    write(root, "gemm", "gemm_perf", [row | {"version": "7.7"} for row in gemm_rows()])
    found = made_up(root)
    found.frame("gemm_perf")
    assert found.notes == ["gemm_perf in folder 1.0 holds rows of version 7.7"]


def test_all_reduces_are_those_of_graphs_and_messages_are_elements(root: Path) -> None:
    assert all_reduce(made_up(root), 2).at(1 << 23) == pytest.approx(5e-6 + (1 << 23) * 1e-11)
    with pytest.raises(BadInput, match=r"--tensor-parallel: 4 devices: .* among 1, 2"):
        all_reduce(made_up(root), 4)


def test_nccl_stands_in_where_there_is_no_custom_all_reduce(root: Path) -> None:
    (root / "data/made_up/comm/vllm/1.0/custom_allreduce_perf.parquet").unlink()
    nccl = [
        {"op_name": op, "nccl_dtype": dtype, "num_gpus": 2, "message_size": size, "latency": size * cost}
        for op, cost in (("all_reduce", 2e-9), ("alltoall", 1e-9))
        for dtype in ("half", "int8")
        for size in (256, 1024)
    ]
    write(root, "comm", "nccl_perf", nccl, "2.27.3")
    assert all_reduce(made_up(root), 2).at(512) == pytest.approx(512 * 2e-9)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("made_ip", "vllm", None), "--system: unknown system 'made_ip'; did you mean 'made_up'?"),
        (("made_up", "vlm", None), "--framework: unknown framework 'vlm'; did you mean 'vllm'?"),
        (("made_up", "vllm", "1.1"), "--version: unknown version '1.1'; did you mean '1.0'?"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(root: Path, names: tuple[str, str, str], what: str) -> None:
    with pytest.raises(BadInput) as error:
        Tables(*names, root=root)
    assert str(error.value) == what


def test_a_missing_package_a_table_that_is_none_and_an_absent_dtype(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"--dtype: 'fp8': gemm_perf of made_up has bfloat16"):
        composition(made_up(root), SMALL, 1, "fp8")
    (root / "data/made_up/gemm/vllm/1.0/gemm_perf.parquet").write_bytes(b"no parquet")
    with pytest.raises(BadInput, match="not a table of kernel times"):
        made_up(root).frame("gemm_perf")
    monkeypatch.setattr(tables, "PACKAGE", "no_such_package_here")
    tables.installed.cache_clear()
    with pytest.raises(BadInput, match=r"pip install 'servecast\[silicon\]'"):
        Tables("made_up", "vllm")
    tables.installed.cache_clear()


# Between the rows


def test_gemms_of_one_rate_are_found_between_and_beyond_the_measured_shapes(root: Path) -> None:
    found = made_up(root)
    for n, k in ((300, 700), (4096, 5000), (40000, 256), (20, 20)):
        curve = gemm(found, "float16", n, k)
        for m in (1, 7, 300, 5000):
            assert curve.at(m) == pytest.approx(2 * m * n * k / RATE)


def test_utilisation_lies_between_that_of_the_nearest() -> None:
    m = np.array([1.0, 2.0])
    sites = {(n, k): Curve(m, m * n * k / rate) for (n, k), rate in {(1, 1): 1.0, (4, 1): 3.0}.items()}
    assert by_nearest(sites, 2, 1).at(2) == pytest.approx(2 * 2 / 2.0)


def test_static_scales_take_quantising_off_but_weights_are_still_read(root: Path) -> None:
    write(root, "gemm", "gemm_perf", gemm_rows("fp8"))
    for name, seconds in (("computescale_perf", 3e-6), ("scale_matrix_perf", 1e-6)):
        measured = [
            {"quant_dtype": "fp8", "m": m, "k": k, "latency": seconds * k / 1024}
            for m in (1, 1024)
            for k in (1024, 4096)
        ]
        write(root, "quantize", name, measured)
    found = made_up(root)
    taken = gemm(found, "fp8", 4096, 2048).at(1024) - gemm(found, "fp8_static", 4096, 2048).at(1024)
    assert taken == pytest.approx(2 * 4e-6)
    assert gemm(found, "fp8_static", 4096, 4096).at(1) == pytest.approx(4096**2 / 1e12)


def test_attention_between_heads_lengths_and_batches(root: Path) -> None:
    found = made_up(root)
    context = attention(found, "context", (5, 1), 64, "float16", 0)
    assert context.at(1, 100) == pytest.approx(5 * 100**2 * HALVED)  # log-log: a square stays a square
    assert context.at(3, 2000) == pytest.approx(3 * 5 * 2000**2 * HALVED)
    decode = attention(found, "generation", (12, 2), 64, "bfloat16", 0)
    for batch, length in ((1, 2), (3, 500), (16, 1025), (40, 3000)):  # the last two are not in the table
        assert decode.at(batch, length) == pytest.approx(batch * 12 * length * BYTES)


def test_as_many_kv_heads_as_heads_stand_for_a_larger_batch(root: Path) -> None:
    many = attention(made_up(root), "generation", (32, 8), 64, "bfloat16", 0)  # not measured: 8 times (4, 1)
    assert many.split == 8 or many.split == 4
    assert many.at(2, 100) == pytest.approx(2 * 32 * 100 * BYTES)


def test_multi_head_rows_are_those_with_as_many_kv_heads() -> None:
    surface = Surface.of(np.array([[1.0, 1.0, 1.0], [1.0, 2.0, 2.0]]), "generation")
    other = Surface.of(np.array([[1.0, 1.0, 9.0], [1.0, 2.0, 9.0]]), "generation")
    found = mixture({(8, 8): surface, (1, 1): other}, 8, 8)
    assert found is not None and found.at(1, 2) == 2.0
    assert mixture({(8, 8): surface}, 4, 4) is None


def test_other_head_dims_and_windows_are_scaled_or_cut_and_said(root: Path) -> None:
    found = made_up(root)
    wide = attention(found, "generation", (8, 1), 128, "bfloat16", 0)
    assert wide.at(1, 100) == pytest.approx(2 * 8 * 100 * BYTES)
    attention(found, "generation", (8, 1), 64, "bfloat16", 128)
    assert [note.split(":")[0] for note in found.notes] == [
        "generation_attention_perf has no heads of 128",
        "generation_attention_perf has no window of 128",
    ]


# Composing


def by_hand(decodes: int, context: float, chunks: Sequence[tuple[int, int]], tp: int) -> float:
    """The formula of the made-up kernels, written out."""
    tokens = decodes + sum(m for _, m in chunks)
    heads, kv, h, width = 8 // tp, 2 // tp, 256, 1000 // tp

    def memory(moved: float) -> float:
        return moved / 0.8e12 + 3e-6

    linear = 2 * tokens * h * ((heads + 2 * kv) * 64 + heads * 64 + 3 * width) / RATE
    pairs = sum((m0 + m) ** 2 - m0**2 for m0, m in chunks)
    layer = linear + heads * (pairs * HALVED + context * BYTES)
    layer += 2 * memory(8 * h * tokens) + memory(6 * tokens * width)
    network = (2 * 3 + 1) * (5e-6 + tokens * h * 1e-11) if tp > 1 else 0.0
    logits = 2 * (decodes + len(chunks)) * h * (3000 // tp) / RATE
    return 3 * layer + memory(2 * h * tokens) + logits + network


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("decodes", "context", "chunks"),
    [(0, 0, [(0, 512)]), (4, 1200, []), (8, 4000, [(0, 100)]), (0, 0, [(500, 300)]), (1, 2, [(0, 64), (0, 64)])],
)
def test_an_iteration_is_the_sum_of_its_kernels(
    root: Path, decodes: int, context: int, chunks: list[tuple[int, int]], tp: int
) -> None:
    found = iteration_seconds(made_up(root), SMALL, tp, decodes, context, chunks)
    assert found == pytest.approx(by_hand(decodes, context, chunks, tp), rel=1e-9)


def test_a_token_after_many_costs_no_less_than_a_decode_there(root: Path) -> None:
    found = composition(made_up(root), SMALL)
    alone = found.parts(1, 1000, [])["attention"]
    assert found.parts(0, 0, [(999, 1)])["attention"] == pytest.approx(alone, rel=0.01)


def test_experts_come_from_their_own_table(root: Path) -> None:
    shape = {"hidden_size": 256, "inter_size": 500, "num_experts": 8, "topk": 2, "moe_ep_size": 1}
    experts = [
        shape | {"moe_dtype": dtype, "moe_tp_size": tp, "num_tokens": n, "distribution": skew, "latency": n * cost / tp}
        for dtype, cost in (("bfloat16", 1e-6), ("fp8", 5e-7))
        for tp in (1, 2)
        for n in (1, 1024)
        for skew in ("balanced", "power_law_1.2")
    ]
    write(root, "moe", "moe_perf", experts)
    found = made_up(root)
    assert moe(found, "float16", (256, 500, 8, 2), 2).at(10) == pytest.approx(5e-6)
    assert "experts in bfloat16, tokens distributed as power_law_1.2" in found.notes
    with pytest.raises(BadInput, match=r"nearest are \(256, 500, 8, 2\)"):
        moe(found, "float16", (256, 640, 8, 2), 1)
    with pytest.raises(BadInput, match=r"--tensor-parallel: 4: .* split 1, 2"):
        moe(found, "float16", (256, 500, 8, 2), 4)


def test_rows_say_where_they_come_from_and_fit(root: Path) -> None:
    table = import_rows(made_up(root), SMALL, 2, host=Host(step=1e-3, sequence=1e-5))
    told = table.provenance
    assert (told["system"], told["framework_version"], told["tensor_parallel"]) == ("made_up", "1.0", 2)
    assert "host time is not in the tables" in told["method"]
    batch = table.where((table["decodes"] == 4) & (table["chunks"] == 0))
    assert batch["host"][0] == pytest.approx(1e-3 + 4e-5)
    expected = by_hand(4, batch["context"][0], [], 2) + batch["host"][0]
    assert batch["seconds"][0] == pytest.approx(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "RESAMPLES", 2)
        profile = fitting.fit(table, name="f", model="small", device="made-up", tensor_parallel=2)
    assert profile.errors.held_out_median < 0.01
    assert profile.provenance["framework"] == "vllm"


def test_the_grid_keeps_to_its_limits(root: Path) -> None:
    limits = silicon.limits_of(made_up(root), SMALL, 1)
    assert limits.model_tokens == 2048
    assert all(point.decodes * point.context <= limits.cache_tokens for point in points(limits))
    assert max(point.tokens for point in points(limits)) <= limits.batch_tokens
    with pytest.raises(BadInput, match="--step: -1 must be"):
        import_rows(made_up(root), SMALL, host=Host(step=-1))


# Commands


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        raise SystemExit(main(["calibrate", "import", *words]))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_the_command_writes_what_fit_reads(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "installed", lambda: root)
    to = tmp_path / "rows.parquet"
    said = ("aiconfigurator", "--system", "made_up", "--framework", "vllm", "--to", str(to), "--json")
    status, out, _ = command(capsys, *said, "--model", "llama-3.1-8b")
    assert status == 0
    assert json.loads(out)["rows"] == len(rows.load(to)) > 100
    status, out, err = command(capsys, *said, "--model", "llama-3.1-8c")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and "did you mean 'llama-3.1-8b'?" in err


def test_anyones_table_is_checked_and_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, to = tmp_path / "given.csv", tmp_path / "rows.jsonl"
    header = "decodes,context,chunks,prefill_tokens,attention,prefill_context,seconds\n"
    given.write_text(header + "1,10,0,0,0,0,0.5\n")
    status, out, _ = command(capsys, "table", str(given), "--to", str(to), "--device", "h100", "--json")
    assert status == 0
    assert json.loads(out)["provenance"] == {"source": "given.csv", "catalogue_device": "h100-sxm"}
    assert rows.load(to)["seconds"].tolist() == [0.5]
    given.write_text(header + "1,10,0,0,0,0,-1\n")
    status, _, err = command(capsys, "table", str(given), "--to", str(tmp_path / "other.jsonl"))
    assert status == 2 and "row 1, column seconds" in err
    assert not (tmp_path / "other.jsonl").exists()


# Vidur


def linear_table(path: Path) -> Path:
    """Every operator of a layer takes 1 ms and 1 µs a token, whatever the model."""
    lines = ["device,model,tp,num_tokens," + ",".join(f"{name}_ms" for name in vidur.NEEDED)]
    for name in ("one", "two"):
        lines += [f"a100,{name},1,{n}" + f",{0.25 + n / 4000}" * 4 for n in (1, 8, 64, 512, 4096)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_vidurs_linear_layers_compose(tmp_path: Path) -> None:
    linear, a100 = linear_table(tmp_path / "linear.csv"), device(DeviceTable(name="a100-80gb-sxm"))
    llama = model("llama-2-7b", "float16")
    table = vidur.import_rows(linear, None, llama, a100, vidur.Choice(1, "one"))
    alone = table.where((table["prefill_tokens"] == 64) & (table["decodes"] == 0) & (table["attention"] == 64 * 32))
    head = 2 * 32000 * 4096 / (0.8 * 2039e9)
    assert alone["seconds"][0] == pytest.approx(32 * (1e-3 + 64e-6) + head, rel=0.01)
    assert table.provenance["from_data_sheet"] == "lm_head, attention"
    assert table.provenance["table_model"] == "one"
    with pytest.raises(BadInput, match=r"column model: the table holds several: one, two"):
        vidur.import_rows(linear, None, llama, a100, vidur.Choice())
    with pytest.raises(BadInput, match="--table-model: unknown model 'thre'"):
        vidur.import_rows(linear, None, llama, a100, vidur.Choice(1, "thre"))
    with pytest.raises(BadInput, match="--tensor-parallel: 2: the table has 1"):
        vidur.import_rows(linear, None, llama, a100, vidur.Choice(2, "one"))


def test_vidurs_attention_is_taken_from_its_table(tmp_path: Path) -> None:
    linear, path = linear_table(tmp_path / "linear.csv"), tmp_path / "attention.csv"
    lines = ["time_stats.attn_prefill.median,time_stats.attn_decode.median," + ",".join(vidur.ATTENTION)]
    lines += [f"{m * 1e-3},,1,{m},{m0},True" for m in (1, 64, 4096) for m0 in (0, 4096)]
    lines += [f",{b * c * 1e-6},{b},0,{c},False" for b in (1, 512) for c in (1, 4096)]
    path.write_text("\n".join(lines) + "\n")
    a100 = device(DeviceTable(name="a100-80gb-sxm"))
    table = vidur.import_rows(linear, path, model("llama-2-7b", "float16"), a100, vidur.Choice(1, "one"))
    alone = table.where((table["prefill_tokens"] == 64) & (table["decodes"] == 0) & (table["attention"] == 64 * 32))
    head = 2 * 32000 * 4096 / (0.8 * 2039e9)
    assert alone["seconds"][0] == pytest.approx(32 * (1e-3 + 64e-6 + 64e-6) + head, rel=0.01)
    assert table.provenance["from_data_sheet"] == "lm_head"


# The package's own tables


PREFILLS = {512: 95.8e-3, 1024: 166.3e-3, 2048: 315.3e-3, 4096: 611.7e-3}
DECODES = {1: 26.55e-3, 8: 27.63e-3, 32: 32.26e-3, 128: 44.48e-3}  # at a context of 1024


@installed
def test_the_worked_example() -> None:
    """Yi-34B, TP2, A100 SXM, as published: every cell within 1 %."""
    found, yi = Tables("a100_sxm", "vllm", "0.14.0"), model("yi-34b")
    for tokens, seconds in PREFILLS.items():
        assert iteration_seconds(found, yi, 2, 0, 0, [(0, tokens)]) == pytest.approx(seconds, rel=0.01)
    for batch, seconds in DECODES.items():
        assert iteration_seconds(found, yi, 2, batch, 1024 * batch, []) == pytest.approx(seconds, rel=0.01)
    assert any("408 keys measured more than once, up to 24 % apart" in note for note in found.notes)


@installed
@pytest.mark.parametrize("system", ["h100_sxm", "h200_sxm", "b200_sxm", "a100_sxm"])
def test_profiles_of_the_composed_rows_hold(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "RESAMPLES", 2)
    table = import_rows(Tables(system, "vllm"), model("llama-3.1-70b"), 4)
    profile = fitting.fit(table, name="f", model="llama-3.1-70b", device=system, tensor_parallel=4)
    assert profile.errors.held_out_median < 0.02
    assert profile.errors.held_out_p90 < 0.06


@installed
@pytest.mark.parametrize("name", ["llama-2-7b", "falcon-180b", "mixtral-8x7b", "gpt-oss-120b", "qwen3-30b-a3b"])
def test_other_shapes_of_model_compose(name: str) -> None:
    found = composition(Tables("h100_sxm", "vllm"), model(name), 4)
    few, many = (sum(found.parts(batch, 1024 * batch, []).values()) for batch in (1, 128))
    assert 1e-3 < few < many < 0.5
