"""Weights from folders of safetensors that the test writes, and random ones from a seed."""

# ruff: noqa: E402
from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from test_engine_dense import (
    CPU,
    GQA,
    MODELS,
    Tensors,
    dense_logits,
    one_pass,
    sequence,
    shapes,
    tensors_of,
    weights_of,
)

from gpu_backend import engine
from gpu_backend.model import Weights
from gpu_backend.weights import from_folder, random
from sim.errors import BadInput
from sim.hardware import Model
from sim.schema import TorchTable

INDEX = "model.safetensors.index.json"


def save(tensors: Tensors, path: Path) -> None:
    safetensors_torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def write_single(folder: Path, tensors: Tensors) -> None:
    save(tensors, folder / "model.safetensors")


def write_parts(folder: Path, tensors: Tensors, parts: int = 3) -> None:
    """Every third tensor in one part: neighbours, and the pieces of a stacked matrix, lie in different files."""
    files = [f"model-{part + 1:05d}-of-{parts:05d}.safetensors" for part in range(parts)]
    names = sorted(tensors)
    for part, file in enumerate(files):
        save({name: tensors[name] for name in names[part::parts]}, folder / file)
    places = {name: files[index % parts] for index, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}), encoding="utf-8")


def load(folder: Path, model: Model = GQA, dtype: torch.dtype = torch.float64) -> Weights:
    return from_folder(model, folder, dtype, CPU)


def flat(weights: Weights) -> list[torch.Tensor | None]:
    """Every tensor, in a fixed order."""
    found = [weights.embedding, weights.norm, weights.head]
    for layer in weights.layers:
        found += [getattr(layer, name) for name in layer.__slots__]
    return found


def same(one: Weights, other: Weights) -> bool:
    pairs = zip(flat(one), flat(other), strict=True)
    return all(b is None if a is None else b is not None and torch.equal(a, b) for a, b in pairs)


def error_of(folder: Path, model: Model = GQA) -> str:
    """The one line that a folder gets; it names the folder or a file in it."""
    with pytest.raises(BadInput) as caught:
        load(folder, model)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(folder))
    return text.removeprefix(str(folder))


# Folders that are well


@pytest.mark.parametrize("write", [write_single, write_parts])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_is_what_was_written(name: str, write: Callable[..., None], tmp_path: Path) -> None:
    """To the bit, in one file or in parts, for every family; and it computes what the dense model computes."""
    model = MODELS[name]
    tensors = tensors_of(model, seed=4)
    write(tmp_path, tensors)
    loaded = load(tmp_path, model)
    assert same(loaded, weights_of(model, tensors))
    assert all(tensor is None or tensor.dtype == torch.float64 for tensor in flat(loaded))
    tokens = sequence(model, 40)
    expected = dense_logits(model, tensors, tokens)
    torch.testing.assert_close(one_pass(model, loaded, tokens), expected, rtol=1e-9, atol=1e-9)


def test_every_tensor_of_the_file_is_used(tmp_path: Path) -> None:
    """Changing any one changes the weights: none is read under another's name."""
    for name in ("qwen", "biased"):
        model = MODELS[name]
        tensors = tensors_of(model)
        original = weights_of(model, tensors)
        for changed in shapes(model):
            write_single(tmp_path, tensors | {changed: tensors[changed] + 1})
            assert not same(load(tmp_path, model), original), changed


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    """Also where the file has an lm_head beside them, as some exporters write."""
    model = MODELS["biased"]
    tensors = tensors_of(model)
    write_single(tmp_path, tensors | {"lm_head.weight": torch.zeros(model.vocab, model.hidden)})
    loaded = load(tmp_path, model)
    assert loaded.head is loaded.embedding
    assert torch.equal(loaded.head, tensors["model.embed_tokens.weight"])


def test_tensors_come_in_the_dtype_asked_for(tmp_path: Path) -> None:
    """16-bit files run in float32 on a CPU, with the values that they have."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(GQA).items()}
    write_parts(tmp_path, tensors)
    loaded = load(tmp_path, dtype=torch.float32)
    assert all(tensor is None or tensor.dtype == torch.float32 for tensor in flat(loaded))
    assert same(loaded, weights_of(GQA, {name: tensor.float() for name, tensor in tensors.items()}))


def test_other_files_and_other_tensors_are_left_alone(tmp_path: Path) -> None:
    """Old checkpoints keep their rotary frequencies; folders hold tokenizers, and weights in other formats."""
    tensors = tensors_of(GQA)
    write_single(tmp_path, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    plant_pickles(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    assert same(load(tmp_path), weights_of(GQA, tensors))
    assert not (tmp_path / "ran").exists()


def test_parts_may_be_links(tmp_path: Path) -> None:
    """Hugging Face's cache keeps files by their hash, and a snapshot's folder links to them."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    tensors = tensors_of(GQA)
    write_parts(snapshot, tensors)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))
    assert same(load(snapshot), weights_of(GQA, tensors))


def test_a_scenario_names_a_folder_beside_it(tmp_path: Path) -> None:
    """[torch] weights is relative to the scenario's folder."""
    (tmp_path / "tiny").mkdir()
    tensors = tensors_of(GQA)
    write_single(tmp_path / "tiny", tensors)
    for named in ("tiny", str(tmp_path / "tiny")):
        made = engine.build(
            GQA,
            TorchTable(weights=named),
            pages=4,
            page_tokens=16,
            positions=64,
            device=CPU,
            dtype=torch.float64,
            folder=tmp_path,
        )
        assert same(made.decoder.weights, weights_of(GQA, tensors))


# Folders that are not


class Trap:
    """Whoever unpickles it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


def plant_pickles(folder: Path) -> None:
    """Files that run code when they are unpickled, under every name that loaders know."""
    for name in (
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "model.pt",
        "consolidated.00.pth",
        "model.pkl",
    ):
        (folder / name).write_bytes(pickle.dumps(Trap(folder / "ran")))


def test_pickles_are_never_read(tmp_path: Path) -> None:
    """Not found, not even by an index that names one, nor by a pickle under the right name."""
    plant_pickles(tmp_path)
    pickle.loads((tmp_path / "model.pkl").read_bytes())
    (tmp_path / "ran").unlink()  # the trap works
    what = ": [torch] weights: has no model.safetensors and no model.safetensors.index.json"
    assert error_of(tmp_path) == what
    places = dict.fromkeys(shapes(GQA), "pytorch_model.bin")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    assert error_of(tmp_path).startswith("/pytorch_model.bin: cannot be read: ")
    (tmp_path / INDEX).unlink()
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.pkl").read_bytes())
    assert error_of(tmp_path).startswith("/model.safetensors: not an index of safetensors: ")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("write", [write_single, write_parts])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
)
def test_a_missing_tensor(name: str, write: Callable[..., None], tmp_path: Path) -> None:
    tensors = tensors_of(GQA)
    del tensors[name]
    write(tmp_path, tensors)
    assert error_of(tmp_path) == f": no tensor {name!r}"


def test_a_missing_lm_head_says_why_it_is_missed(tmp_path: Path) -> None:
    tensors = tensors_of(GQA)
    del tensors["lm_head.weight"]
    write_single(tmp_path, tensors)
    assert error_of(tmp_path) == ": no tensor 'lm_head.weight'; tie_word_embeddings is false"


@pytest.mark.parametrize("part", ["q_norm.weight", "k_norm.weight", "q_proj.bias", "v_proj.bias"])
def test_missing_norms_and_biases(part: str, tmp_path: Path) -> None:
    """A folder without what the configuration promises."""
    model = replace(GQA, qk_norm=True, qkv_bias=True)
    tensors = tensors_of(model)
    del tensors[f"model.layers.0.self_attn.{part}"]
    write_single(tmp_path, tensors)
    assert error_of(tmp_path, model) == f": no tensor 'model.layers.0.self_attn.{part}'"


@pytest.mark.parametrize("name", list(shapes(MODELS["qwen"])))
def test_a_tensor_of_another_shape(name: str, tmp_path: Path) -> None:
    """Every tensor's shape is looked at; one that is only transposed is wrong too."""
    model = MODELS["qwen"]
    tensors = tensors_of(model)
    shape = shapes(model)[name]
    for wrong in ({(shape[0] + 1, *shape[1:]), (1, *shape), shape[::-1]}) - {shape}:
        write_single(tmp_path, tensors | {name: torch.zeros(wrong)})
        what = f"/model.safetensors: tensor {name!r} is {list(wrong)}, qwen has {list(shape)}"
        assert error_of(tmp_path, model) == what


def test_quantised_tensors(tmp_path: Path) -> None:
    """Their scales are other tensors: read as they are they would be noise."""
    name = "model.layers.0.self_attn.q_proj.weight"
    for dtype, shown in ((torch.int8, "int8"), (torch.float8_e4m3fn, "float8_e4m3fn")):
        tensors = tensors_of(GQA)
        write_single(tmp_path, tensors | {name: torch.zeros(tensors[name].shape).to(dtype)})
        assert error_of(tmp_path) == (
            f"/model.safetensors: tensor {name!r} is {shown}: quantised weights are not supported"
        )


def test_no_folder(tmp_path: Path) -> None:
    """Missing, a file, or empty."""
    assert error_of(tmp_path / "none") == ": [torch] weights: not a folder"
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert error_of(tmp_path / "file") == ": [torch] weights: not a folder"
    (tmp_path / "empty").mkdir()
    assert error_of(tmp_path / "empty").startswith(": [torch] weights: has no model.safetensors")


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 3000, -8, -1])
def test_a_truncated_file(kept: int, tmp_path: Path) -> None:
    """Cut anywhere, alone or as a part."""
    write_single(tmp_path, tensors_of(GQA))
    write_parts(tmp_path, tensors_of(GQA))
    for file in (tmp_path / "model-00002-of-00003.safetensors", tmp_path / "model.safetensors"):
        file.write_bytes(file.read_bytes()[:kept])
    assert error_of(tmp_path).startswith("/model-00002-of-00003.safetensors: cannot be read: ")
    (tmp_path / INDEX).unlink()
    assert error_of(tmp_path).startswith("/model.safetensors: not an index of safetensors: ")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", '"text"', "{}", '{"weight_map": null}', '{"weight_map": []}', "[" * 100_000, "\x00"],
    ids=range(11),
)
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    write_single(tmp_path, tensors_of(GQA))
    (tmp_path / INDEX).write_text(text, encoding="utf-8")
    assert error_of(tmp_path).startswith(f"/{INDEX}: not an index of safetensors: ")


def test_an_index_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b'{"weight_map": {"\xff": "a"}}')
    assert error_of(tmp_path).startswith(f"/{INDEX}: not an index of safetensors: ")


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", "sub/model.safetensors", ".", "a/../b"])
def test_an_index_that_points_elsewhere(file: str, tmp_path: Path) -> None:
    """Only files of the folder itself are read, even if the file is there and is well."""
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    for folder in (tmp_path, inside / "sub"):
        write_single(folder, tensors_of(GQA))
    places = dict.fromkeys(shapes(GQA), file)
    (inside / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    assert error_of(inside).startswith(f"/{INDEX}: not an index of safetensors: {file!r} is not in the folder")


@pytest.mark.parametrize("file", ["", "..", "model-9.safetensors", "sub", 7, None, "a\x00b"])
def test_an_index_of_files_that_cannot_be_read(file: object, tmp_path: Path) -> None:
    """Missing ones, folders, and what is no name at all."""
    (tmp_path / "sub").mkdir()
    places = dict.fromkeys(shapes(GQA), file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    error_of(tmp_path)


def test_an_index_that_is_wrong_about_a_part(tmp_path: Path) -> None:
    """The tensor is not in the file that it is said to be in."""
    write_parts(tmp_path, tensors_of(GQA))
    index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"] = dict.fromkeys(index["weight_map"], files[0])
    (tmp_path / INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert error_of(tmp_path).startswith(f"/{files[0]}: cannot be read: ")


# Random weights


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_are_the_seeds(name: str) -> None:
    """The same from the same seed, of the shapes that a checkpoint has; others from another seed."""
    model = MODELS[name]
    made = random(model, torch.float64, CPU, seed=5)
    assert same(made, random(model, torch.float64, CPU, seed=5))
    torch.manual_seed(99)  # the global generator has no say
    assert same(made, random(model, torch.float64, CPU, seed=5))
    other = random(model, torch.float64, CPU, seed=6)
    assert not torch.equal(made.embedding, other.embedding)
    assert all(not torch.equal(a.qkv, b.qkv) for a, b in zip(made.layers, other.layers, strict=True))
    alike = weights_of(model, tensors_of(model))
    assert [t is None or t.shape for t in flat(made)] == [t is None or t.shape for t in flat(alike)]
    assert (made.head is made.embedding) == model.tied_embeddings


def test_random_weights_are_small_and_norms_are_one() -> None:
    """Std 0.02, mean 0, no two tensors alike; the largest seed works."""
    made = random(MODELS["qwen"], torch.float32, CPU, seed=2**63 - 1)
    assert float(made.embedding.std()) == pytest.approx(0.02, rel=0.03)
    assert abs(float(made.embedding.mean())) < 1e-3
    for layer in made.layers:
        for norm in (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm):
            assert norm is not None
            assert (norm == 1).all()
        assert float(layer.down.std()) == pytest.approx(0.02, rel=0.05)
    assert (made.norm == 1).all()
    assert not torch.equal(made.layers[0].qkv, made.layers[1].qkv)
    assert not torch.equal(made.embedding, made.head)


def test_random_weights_are_the_same_in_every_dtype() -> None:
    """Drawn in float32, then rounded."""
    wide, narrow = (random(GQA, dtype, CPU, seed=1) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(wide.embedding.to(torch.bfloat16), narrow.embedding)
    assert torch.equal(wide.layers[1].down.to(torch.bfloat16), narrow.layers[1].down)
