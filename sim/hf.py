"""A Hugging Face config.json read into the fields of sim.hardware.Model, with transformers' own defaults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.errors import BadInput

Fields = dict[str, Any]
_LARGEST_FILE = 1 << 20  # bytes
_LARGEST = 10**8  # no dimension of a model comes near; a larger one is a slip


class _Config:
    """The keys of one config.json; each is checked where it is read, and an error names the file and the key."""

    def __init__(self, path: Path, keys: dict[str, Any]) -> None:
        self.path = path
        self.keys = keys

    def bad(self, key: str, what: str) -> BadInput:
        return BadInput(what, source=str(self.path), key=key)

    def has(self, key: str) -> bool:
        return self.keys.get(key) is not None

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is present and not null: an integer of at least 1."""
        key = next((name for name in names if self.has(name)), names[0])
        value = self.keys[key] if self.has(key) else default
        if value is None:
            raise self.bad(key, "missing")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.bad(key, f"must be an integer, not {_shown(value)}")
        if not 1 <= value <= _LARGEST:
            raise self.bad(key, f"{value} is not between 1 and {_LARGEST}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number greater than 0."""
        value = self.keys[key] if self.has(key) else default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.bad(key, f"must be a number greater than 0, not {_shown(value)}")
        return float(value)

    def table(self, key: str) -> _Config:
        """A nested object, empty where it is missing or null."""
        value = self.keys[key] if self.has(key) else {}
        if not isinstance(value, dict):
            raise self.bad(key, f"must be an object, not {_shown(value)}")
        return _Config(self.path, value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.keys[key] if self.has(key) else default
        if not isinstance(value, bool):
            raise self.bad(key, f"must be true or false, not {_shown(value)}")
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read(path: Path) -> Fields:
    """The fields of a Model, named after the file's directory; BadInput for a file, key or family that is no use."""
    config = _load(path)
    family = config.keys.get("model_type")
    if not isinstance(family, str):
        raise config.bad("model_type", "missing" if family is None else f"must be a string, not {_shown(family)}")
    if family not in FAMILIES:
        raise config.bad("model_type", f"unsupported model_type {family!r}; supported: {', '.join(FAMILIES)}")
    fields = FAMILIES[family](config)
    if fields["heads"] % fields["kv_heads"]:
        raise config.bad(
            "num_key_value_heads", f"{fields['kv_heads']} KV heads do not divide {fields['heads']} attention heads"
        )
    if fields.get("experts_per_token", 0) > fields.get("experts", 0):
        raise config.bad("num_experts_per_tok", f"{fields['experts_per_token']} of {fields['experts']} experts")
    name = path.parent.name if path.name == "config.json" else path.stem
    return {"name": name or family, "source": f"{path.name} ({family})"} | fields


def _load(path: Path) -> _Config:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise BadInput("not a regular file", source=str(path))
        if path.is_file() and path.stat().st_size > _LARGEST_FILE:
            raise BadInput(f"larger than {_LARGEST_FILE} bytes: not a config.json", source=str(path))
        keys = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise BadInput(f"no such file: {path}", key="[model] hf_config") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory; name its config.json", key="[model] hf_config") from None
    except (OSError, ValueError) as error:
        raise BadInput(_reason(error), source=str(path)) from None
    except RecursionError:
        raise BadInput("not a config.json: nested too deeply", source=str(path)) from None
    if not isinstance(keys, dict):
        raise BadInput("not a config.json: the top level must be an object", source=str(path))
    return _Config(path, keys)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def _shape(config: _Config) -> Fields:
    """What every family but Falcon spells alike."""
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    if not config.has("head_dim") and hidden % heads:
        raise config.bad("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}; give head_dim")
    return {
        "layers": config.count("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads"),
        "head_dim": config.count("head_dim", default=max(1, hidden // heads)),
        "intermediate": config.count("intermediate_size"),
        "vocab": config.count("vocab_size"),
        "context_limit": config.count("max_position_embeddings"),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "norm_eps": config.number("rms_norm_eps", 1e-5),
        **_rotary(config),
    }


def _rotary(config: _Config) -> Fields:
    """Base and scaling of the rotary positions; transformers 5 keeps both in `rope_parameters`."""
    scaling = config.table("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10_000.0))
    kind = scaling.keys.get("rope_type", scaling.keys.get("type", "default"))
    if not isinstance(kind, str):
        raise config.bad("rope_scaling", f"rope_type must be a string, not {_shown(kind)}")
    if kind != "llama3":
        return {"rope_theta": theta, "rope_kind": kind}
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    defaults = (8.0, 1.0, 4.0, 8192.0)  # Llama 3.1's own
    numbers = tuple(scaling.number(key, default) for key, default in zip(keys, defaults, strict=True))
    return {"rope_theta": theta, "rope_kind": kind, "rope_scaling": numbers}


def _llama(config: _Config) -> Fields:
    if not config.has("num_key_value_heads"):  # models before grouped-query attention
        config.keys["num_key_value_heads"] = config.count("num_attention_heads")
    bias = config.flag("attention_bias", False)
    return _shape(config) | {"qkv_bias": bias, "output_bias": bias, "mlp_bias": config.flag("mlp_bias", False)}


def _mistral(config: _Config) -> Fields:
    """A sliding window, where there is one, holds in every layer; a config without the key means 4096."""
    fields = _shape(config)
    if "sliding_window" in config.keys and config.keys["sliding_window"] is None:
        return fields
    return fields | {"window": config.count("sliding_window", default=4096), "windowed_layers": fields["layers"]}


def _qwen2(config: _Config) -> Fields:
    return _shape(config) | {"qkv_bias": True} | _qwen_window(config)


def _qwen3(config: _Config) -> Fields:
    bias = config.flag("attention_bias", False)
    config.keys["head_dim"] = config.count("head_dim", default=128)
    return _shape(config) | {"qk_norm": True, "qkv_bias": bias, "output_bias": bias} | _qwen_window(config)


def _qwen_window(config: _Config) -> Fields:
    """Layers from max_window_layers on are windowed, and only if use_sliding_window."""
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return {}
    full = config.keys.get("max_window_layers", 28)
    if not isinstance(full, int) or isinstance(full, bool) or full < 0:
        raise config.bad("max_window_layers", f"must be an integer of at least 0, not {_shown(full)}")
    windowed = max(0, config.count("num_hidden_layers") - full)
    return {"window": config.count("sliding_window"), "windowed_layers": windowed}


def _qwen3_moe(config: _Config) -> Fields:
    if config.count("decoder_sparse_step", default=1) != 1 or config.keys.get("mlp_only_layers"):
        key = "mlp_only_layers" if config.keys.get("mlp_only_layers") else "decoder_sparse_step"
        raise config.bad(key, "unsupported: some layers would be dense; every layer must be a mixture of experts")
    config.keys["intermediate_size"] = config.count("moe_intermediate_size")
    return _qwen3(config) | _experts(config, "num_experts")


def _mixtral(config: _Config) -> Fields:
    fields = _shape(config) | _experts(config, "num_local_experts")
    if not config.has("sliding_window"):
        return fields
    return fields | {"window": config.count("sliding_window"), "windowed_layers": fields["layers"]}


def _gpt_oss(config: _Config) -> Fields:
    fields = _shape(config) | _experts(config, "num_local_experts")
    bias = config.flag("attention_bias", True)
    kinds = config.keys.get("layer_types")
    if kinds and (not isinstance(kinds, list) or len(kinds) != fields["layers"]):
        raise config.bad("layer_types", f"must be a list of {fields['layers']} entries, one a layer")
    windowed = kinds.count("sliding_attention") if kinds else -(-fields["layers"] // 2)  # every other one, the first
    return fields | {
        "window": config.count("sliding_window", default=128),
        "windowed_layers": windowed,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": True,
        "router_bias": True,
        "attention_sinks": True,
    }


def _experts(config: _Config, key: str) -> Fields:
    return {"experts": config.count(key), "experts_per_token": config.count("num_experts_per_tok", "experts_per_token")}


def _falcon(config: _Config) -> Fields:
    """Falcon under both its spellings: the first releases' n_layer, n_head, n_head_kv, and transformers' own.

    Missing tie_word_embeddings means untied: the published checkpoints (7B, 40B, 180B) store both tables.
    """
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads", "n_head")
    if hidden % heads:
        raise config.bad("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}")
    grouped = config.flag("new_decoder_architecture", config.has("n_head_kv"))
    parallel = grouped or config.flag("parallel_attn", True)
    bias = config.flag("bias", False)
    separate = heads if not config.flag("multi_query", True) else 1
    return {
        "layers": config.count("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.count("num_kv_heads", "n_head_kv", default=heads) if grouped else separate,
        "head_dim": hidden // heads,
        "intermediate": config.count("ffn_hidden_size", default=4 * hidden),
        "vocab": config.count("vocab_size"),
        "context_limit": config.count("max_position_embeddings", default=2048),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "gated": False,
        "parallel_attention": parallel,
        "norms_per_layer": config.count("num_ln_in_parallel_attn", default=2) if grouped or not parallel else 1,
        "norm_bias": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
    }


FAMILIES: dict[str, Callable[[_Config], Fields]] = {
    "llama": _llama,
    "yi": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "falcon": _falcon,
    "RefinedWeb": _falcon,
    "RefinedWebModel": _falcon,
}
