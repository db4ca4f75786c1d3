"""A scenario from the arguments of a vLLM server: `servecast scenario from-vllm --device h100-sxm -- --model …`.

Defaults are those of the version in `catalogue/vllm.toml`, `vllm serve`'s where they depend on who asks. What has no
counterpart here is named in the scenario and on stderr; what vLLM does not know either is an error.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from cyclopts import Parameter

from sim import catalogue, hardware, output
from sim.errors import BadInput, unknown
from sim.options import say
from sim.scenario import Scenario
from sim.simulate import plan
from sim.vllm_arguments import SOURCE, Values, known, parse, share, tokens, whole

GIB = 2**30
DTYPES = {"half": "float16", "float16": "float16", "bfloat16": "bfloat16"}
QUANTIZED = {  # --quantization, or quant_method of a config.json, in our dtypes
    **dict.fromkeys(("fp8", "fbgemm_fp8", "ptpc_fp8"), "fp8"),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), "int4"),
    "mxfp4": "int4",  # 4.25 bits a weight; int4 here is 4.16
}
KV_DTYPES = {"float16": "float16", "bfloat16": "bfloat16"} | dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), "fp8")
SUFFIXES = {"fp8": "fp8", "fp8-dynamic": "fp8", "awq": "int4", "gptq": "int4", "gptq-int4": "int4"}
SUFFIXES |= {"quantized.w4a16": "int4", "w4a16": "int4"}  # of a name on Hugging Face: how its weights are stored
VARIANTS = ("instruct", "chat", "base", "hf", "it")  # and parts of one that leave the shape as it is
REASONS = {
    **dict.fromkeys(("download-dir", "load-format", "revision", "trust-remote-code"), "no weights are loaded"),
    **dict.fromkeys(("disable-log-stats", "enable-log-requests", "log-level"), "of logging"),
    **dict.fromkeys(("tokenizer", "tokenizer-mode", "served-model-name"), "there is no text and no API"),
    "seed": "of sampling; [workload] seed is of arrivals and lengths",
    "config": "that file is not read: give its arguments here",
    "enable-prefix-caching": "prefix reuse is not modelled: prompts that share a prefix will be faster than forecast",
    "enforce-eager": "the host's time per step is [latency] step and sequence, 0 unless given",
    "async-scheduling": "the host's time per step is [latency] step and sequence, 0 unless given",
    "enable-expert-parallel": "experts are split with tensor_parallel, as without it",
    "speculative-config": "speculative decoding is not modelled",
    "scheduling-policy": "the queue is first come, first served",
    "cpu-offload-gb": "all weights are on the device",
    "quantization": "not a format that is modelled; [model] dtype is taken as unquantized",
    "kv-cache-dtype": "not a format that is modelled; [model] kv_dtype is 16 bits",
    "dtype": "weights of 32 bits are not modelled; [model] dtype is 16 bits",
}
TRAFFIC = """
# Not vLLM's to say: what is asked of it. Change this to your own traffic.
[workload]
requests = 2048
too_long = "drop"
[workload.arrivals]
kind = "poisson"
rate = 1.0
[workload.lengths]
kind = "dataset"
name = "openchat-sharegpt4"
"""


def from_vllm(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show_default=False)],
    device: str,
    out: Path | None = None,
) -> None:
    """Print the scenario that a vLLM server's arguments come to.

    Parameters
    ----------
    arguments
        The arguments of `vllm serve`, after `--`.
    device
        What it runs on: a name of `servecast list devices`.
    out
        Write the scenario to this file.
    """
    output.prepare_file(out, "--out")
    made = convert(arguments, device)
    if out is None:
        print(made.text, end="")
    else:
        with output.stream(out, "--out") as file:
            file.write(made.text.encode())
    for note in made.notes:
        say(note)
    if out is not None:
        say(f"the scenario is in {out}")


@dataclass(frozen=True, slots=True)
class Converted:
    """A scenario as TOML, and what it leaves out."""

    text: str
    notes: list[str]


def convert(arguments: Sequence[str], device_name: str) -> Converted:
    """The scenario of a server's arguments on a device. BadInput for arguments that vLLM has not, or that cannot be."""
    try:
        device = hardware.device(hardware.DeviceTable(name=device_name))
    except BadInput as error:
        raise BadInput(error.what, source="--device") from None
    made = _Made(parse(arguments), device)
    try:
        made.model()
        made.deployment()
        made.engine()
        text = made.to_toml()
        plan(Scenario.from_toml(text))
    except BadInput as error:
        source = SOURCE if error.source in (None, "scenario") else error.source
        raise BadInput(error.what, source=source, key=error.key) from None
    return Converted(text, made.notes())


@dataclass
class _Made:
    """A scenario in the making: its tables' lines, each with where it comes from."""

    given: Values
    device: hardware.Device
    lines: dict[str, list[str]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # arguments that are mapped
    refused: set[str] = field(default_factory=set)  # whose value has no counterpart
    remarks: list[str] = field(default_factory=list)
    shape: hardware.Model | None = None

    def put(self, table: str, key: str, value: Any, why: str) -> None:
        self.lines.setdefault(table, []).append(f"{tomli_w.dumps({key: value}).strip()}  # {_comment(why)}")

    def take(self, name: str, read: Callable[[str, str], Any], default: Any) -> tuple[Any, str]:
        """The value of an argument, or vLLM's default, and a comment that says which."""
        self.used.add(name)
        if name not in self.given:
            return default, f"vLLM's default of --{name}"
        return read(name, self.given[name]), f"--{name}"

    # The tables

    def model(self) -> None:
        """[model]: a catalogue model, or a config.json that is here."""
        self.used |= {"model", "hf-config-path"}
        name = self.given.get("model")
        if name is None:
            raise BadInput("required: the model that is served", source=SOURCE, key="--model")
        path = _config(Path(str(self.given.get("hf-config-path", name))))
        stored, why = None, ""
        if path is not None:
            self.put("model", "hf_config", str(path), f"--model {name}")
            stored, checkpoint = _stored(path)
            why = "quantization_config of its config.json"
        else:
            found, stored = catalogued(name)
            self.put("model", "name", found, f"--model {name}")
            checkpoint = "float16" if found.startswith("llama-2") else "bfloat16"
            why = f"by the name {name}"
            if found.startswith("gpt-oss"):
                stored, why = "int4", "published in MXFP4, 4.25 bits a weight"
        dtype, source = self._dtype(checkpoint)
        if self.given.get("quantization") is not None:
            if self.given["quantization"] in QUANTIZED:
                stored, why = QUANTIZED[self.given["quantization"]], "--quantization"
                self.used.add("quantization")
            else:
                self.refused.add("quantization")
        self.put("model", "dtype", stored or dtype, why if stored else source)
        kv = self.given.get("kv-cache-dtype", "auto")
        if kv != "auto" and kv not in KV_DTYPES:
            self.refused.add("kv-cache-dtype")
        else:
            self.used.add("kv-cache-dtype")
        of_kv = KV_DTYPES.get(kv, dtype)
        said = "--kv-cache-dtype" if kv in KV_DTYPES else "16 bits, as the model (--kv-cache-dtype auto)"
        self.put("model", "kv_dtype", of_kv, said)
        table = hardware.ModelTable(**tomllib.loads("\n".join(self.lines["model"])))
        self.shape = hardware.model(table, Path())
        self.put("device", "name", self.device.name, "--device")

    def _dtype(self, checkpoint: str) -> tuple[str, str]:
        asked = self.given.get("dtype", "auto")
        if asked in DTYPES:
            self.used.add("dtype")
            return DTYPES[asked], "--dtype"
        if asked in ("float", "float32"):
            self.refused.add("dtype")
        elif asked != "auto":
            raise BadInput(unknown("dtype", asked, [*DTYPES, "auto", "float", "float32"]), source=SOURCE, key="--dtype")
        self.used.add("dtype")
        return checkpoint, "as the checkpoint (--dtype auto)"

    def deployment(self) -> None:
        """[deployment]: data-parallel ranks are replicas behind vLLM's own balancer."""
        for key, name in (
            ("tensor_parallel", "tensor-parallel-size"),
            ("pipeline_parallel", "pipeline-parallel-size"),
            ("replicas", "data-parallel-size"),
        ):
            value, why = self.take(name, whole, 1)
            self.put("deployment", key, value, why)
            if key == "replicas" and value > 1:
                self.put("deployment", "router", "least-loaded", "nearest to vLLM's: fewest waiting, then running")
                if self.shape is not None and self.shape.experts:
                    self.remarks.append("data-parallel ranks are independent replicas here; vLLM's share the experts")

    def engine(self) -> None:
        """[engine] and [scheduler]."""
        assert self.shape is not None
        chunked, how = self.given.get("enable-chunked-prefill", True), "--enable-chunked-prefill"
        self.used.add("enable-chunked-prefill")
        longest, why = self.take("max-model-len", tokens, self.shape.context_limit)
        if longest == -1:
            longest, why = self.shape.context_limit, "the model's; --max-model-len auto may be less, where memory is"
        elif "max-model-len" not in self.given:
            why = "the model's context, vLLM's default"
        batch, sequences = self._batch_defaults(longest, chunked)
        batch, batch_why = self.take("max-num-batched-tokens", tokens, batch)
        if "max-num-batched-tokens" not in self.given:
            batch_why += f" on {self.device.name}"
        if "max-num-seqs" not in self.given:
            sequences = min(sequences, batch)
        sequences, sequences_why = self.take("max-num-seqs", whole, sequences)
        if "max-num-active-seqs" in self.given:
            sequences, sequences_why = self.take("max-num-active-seqs", whole, sequences)
        if "max-num-scheduled-tokens" in self.given:
            batch, batch_why = self.take("max-num-scheduled-tokens", tokens, batch)
        block, block_why = self.take("block-size", whole, 16)
        self.put("engine", "block_tokens", block, block_why)
        self._memory(block)
        watermark, watermark_why = self.take("watermark", share, 0.0)
        self.put("engine", "watermark", watermark, watermark_why)
        self.put("engine", "max_sequences", sequences, sequences_why)
        self.put("engine", "max_model_tokens", longest, why)
        if chunked:
            self.put("scheduler", "policy", "stall-free", f"{how}, vLLM's default")
            self.put("scheduler", "token_budget", batch, batch_why)
        else:
            self.put("engine", "max_batch_tokens", batch, batch_why)
            self.put("scheduler", "policy", "prefill-first", f"without {how}")
        if "enable-prefix-caching" not in self.given:
            self.remarks.append(f"--enable-prefix-caching, on by default: {REASONS['enable-prefix-caching']}")
        self.lines["latency"] = [
            'kind = "roofline"  # not calibrated; kind = "profile", name = "auto" does better where there is one'
        ]

    def _batch_defaults(self, longest: int, chunked: bool) -> tuple[int, int]:
        """--max-num-batched-tokens and --max-num-seqs where they are not given (EngineArgs.get_batch_defaults)."""
        memory, name = self.device.usable_bytes, self.device.name
        if name == "cpu":
            world = int(self.given.get("tensor-parallel-size", 1)) * int(self.given.get("pipeline-parallel-size", 1))
            batch, sequences = 2048 * world, 128 * world
        elif memory >= 160 * GIB:
            batch, sequences = 16384, 1024
        elif memory >= 70 * GIB and "a100" not in name:
            batch, sequences = 8192, 1024
        else:
            batch, sequences = 2048, 256
        if self.given.get("performance-mode") == "throughput":
            self.used.add("performance-mode")
            batch, sequences = 2 * batch, 2 * sequences
        if not chunked:
            batch = max(batch, longest)
        if "max-num-seqs" in self.given:
            sequences = whole("max-num-seqs", self.given["max-num-seqs"])
        return min(batch, sequences * longest), sequences

    def _memory(self, block: int) -> None:
        """KV blocks: given, from the bytes given, or a share of the device."""
        assert self.shape is not None
        if "num-gpu-blocks-override" in self.given:
            value, why = self.take("num-gpu-blocks-override", whole, None)
            self.put("engine", "num_blocks", value, why)
        elif "kv-cache-memory-bytes" in self.given:
            value, why = self.take("kv-cache-memory-bytes", tokens, None)
            tp, pp = (self.given.get(f"{which}-parallel-size", "1") for which in ("tensor", "pipeline"))
            self.shape.check_parallel(int(tp), int(pp))
            per_token = self.shape.kv_bytes_per_token(int(tp), max(self.shape.stage_layers(int(pp))))
            self.put("engine", "num_blocks", max(1, value // (per_token * block)), f"{why} / bytes of a block")
        name = "gpu-memory-utilization"
        if "device-memory-utilization" in self.given:
            name = "device-memory-utilization"
        value, why = self.take(name, share, 0.92)
        self.put("engine", "memory_fraction", value, why)

    # What is said

    def left_out(self) -> Iterator[str]:
        """Arguments without a counterpart, each with the reason."""
        server = [name for part in ("values", "lists", "flags") for name in known()[f"server_{part}"]]
        former = [name for part in ("values", "flags") for name in known()[f"former_{part}"]]
        for name, value in self.given.items():
            if name in self.used and name not in self.refused:
                continue
            argument = f"--{name}" if value is not False else f"--no-{name}"
            if name == "enable-prefix-caching" and value is False:
                yield f"{argument}: as here, prefix reuse is not modelled"
            elif name == "scheduling-policy" and value == "fcfs":
                yield f"{argument} fcfs: as here"
            elif name in REASONS:
                yield f"{argument}{f' {value}' if name in self.refused else ''}: {REASONS[name]}"
            elif name in server:
                yield f"{argument}: of the HTTP server, which is not modelled"
            else:
                old = f"not an argument of vLLM {known()['version']} any more, and " if name in former else ""
                yield f"{argument}: {old}no counterpart here"

    def notes(self) -> list[str]:
        return [f"not mapped: {what}" for what in (*self.left_out(), *self.remarks)]

    def to_toml(self) -> str:
        """The scenario, comments and all."""
        model = self.given["model"]
        head = [
            f"# From the arguments of a vLLM server (defaults of vLLM {known()['version']}).",
            *(f"# {_comment(note)}" for note in self.notes()),
            tomli_w.dumps({"name": f"{Path(model).name} on {self.device.name}, from vLLM's arguments"}).strip(),
        ]
        tables = [f"\n[{table}]\n" + "\n".join(lines) for table, lines in self.lines.items()]
        return "\n".join(head) + "\n" + "\n".join(tables) + "\n" + TRAFFIC


def _comment(text: str) -> str:
    """On one line, whatever a name holds."""
    return "".join(character if character.isprintable() else " " for character in text)


def _config(path: Path) -> Path | None:
    """The config.json at a path, if that is one."""
    try:
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise BadInput("no such file", source=str(path))
        return path.resolve() if path.is_file() else None
    except OSError:  # a name that no file can have
        return None


def _stored(path: Path) -> tuple[str | None, str]:
    """How a checkpoint's weights are stored: the quantized dtype, if any, and the one of 16 bits."""
    try:
        config = json.loads(path.read_bytes())
        quantized = config.get("quantization_config") or {}
        plain = str(config.get("dtype") or config.get("torch_dtype") or "float16")
        method = str(quantized.get("quant_method"))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise BadInput(f"not a config.json: {error}", source=str(path)) from None
    return QUANTIZED.get(method), "bfloat16" if plain == "bfloat16" else "float16"


def catalogued(name: str) -> tuple[str, str | None]:
    """The catalogue model that a name on Hugging Face stands for, and the quantized dtype that the name tells."""
    entries = catalogue.entries("model")
    names = {alias: found for found, facts in entries.items() for alias in (found, *facts.get("aliases", ()))}
    plain, stored = _plain(name)
    for alias, found in names.items():
        if _plain(alias)[0] == plain:
            return found, stored
    told = unknown("model", name, names).partition("; known:")[0]
    raise BadInput(f"{told}; else give a folder with its config.json", source=SOURCE, key="--model")


def _plain(name: str) -> tuple[str, str | None]:
    """A name without organisation, training and storage: meta-llama/Meta-Llama-3.1-8B-Instruct-FP8 is llama-3.1-8b."""
    plain, stored = name.rpartition("/")[2].lower().removeprefix("meta-"), None
    for suffix, dtype in sorted(SUFFIXES.items(), key=lambda item: -len(item[0])):
        if plain.endswith(f"-{suffix}"):
            plain, stored = plain.removesuffix(f"-{suffix}"), dtype
            break
    return "-".join(part for part in plain.split("-") if part not in VARIANTS), stored
