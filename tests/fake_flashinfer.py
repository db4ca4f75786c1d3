"""A package that takes what FlashInfer's wrappers take, notes the calls, and attends in plain torch on the CPU.

The signatures are those documented for FlashInfer 0.6.13 and 0.7.4 (https://docs.flashinfer.ai/api/attention.html) as
far as both agree: what is given by another name, or by position where they differ, is a TypeError here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


class Log(list[tuple[str, Any]]):
    """Calls in order: (name, details)."""

    def names(self) -> list[str]:
        return [name for name, _ in self]


class Event:
    """A CUDA event, as far as it is used."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append(("record", None))

    def synchronize(self) -> None:
        self.log.append(("wait", None))


class _Wrapper:
    """What both kinds of wrapper have in common: a plan is kept, and each run attends by it."""

    kind = ""

    def __init__(self, log: Log, made: dict[str, Any]) -> None:
        self.log = log
        self.made = made
        self.planned: dict[str, Any] | None = None
        log.append((f"{self.kind} made", made))

    def _plan(self, **given: Any) -> None:
        for name in ("qo_indptr", "indptr", "indices", "last_page_len"):
            tensor = given[name]
            assert tensor.dtype == torch.int32, name
            assert tensor.device.type == "cpu", name
            assert tensor.is_contiguous(), name
        assert given["q_data_type"] == given["kv_data_type"]
        self.planned = given
        self.log.append((f"{self.kind} plan", given))

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        assert self.planned is not None, "run before plan"
        plan, cache = self.planned, paged_kv_cache
        assert q.is_contiguous()
        assert q.dtype == plan["q_data_type"] == cache.dtype
        assert cache.shape[1:] == (2, plan["kv_heads"], plan["page_size"], plan["head_dim"])  # HND
        assert len(q) == int(plan["qo_indptr"][-1])
        out = torch.empty_like(q) if out is None else out
        assert out.shape == q.shape
        bounds, pages = plan["qo_indptr"].tolist(), plan["indptr"].tolist()
        for index, last in enumerate(plan["last_page_len"].tolist()):
            rows = slice(bounds[index], bounds[index + 1])
            held = plan["indices"][pages[index] : pages[index + 1]].long()
            assert len(held) >= 1
            assert 1 <= last <= plan["page_size"]
            tokens = (len(held) - 1) * plan["page_size"] + last
            both = cache[held].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]  # [2, kv_heads, tokens, head_dim]
            out[rows] = attend(q[rows], both, plan["sm_scale"], causal=plan["causal"])
        self.log.append((f"{self.kind} run", rows.stop))
        return out


def attend(query: torch.Tensor, both: torch.Tensor, scale: float, *, causal: bool) -> torch.Tensor:
    """Rows [rows, heads, head_dim], the last of all tokens in `both`, [2, kv_heads, tokens, head_dim]."""
    key, value = both.repeat_interleave(query.shape[1] // both.shape[1], dim=1)
    scores = torch.einsum("rhd,htd->hrt", query, key) * scale
    if causal:
        rows, tokens = scores.shape[1:]
        scores.masked_fill_(torch.ones(rows, tokens, dtype=torch.bool).triu(tokens - rows + 1), -torch.inf)
    return torch.einsum("hrt,htd->rhd", scores.softmax(-1), value)


class Decode(_Wrapper):
    kind = "decode"

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float | None = None,
    ) -> None:
        self._plan(
            qo_indptr=torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            indptr=indptr,
            indices=indices,
            last_page_len=last_page_len,
            heads=num_qo_heads,
            kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
            causal=False,
        )


class GraphDecode(Decode):
    """Copies its plan into buffers of fixed sizes, as the graph wrapper does, and attends by these."""

    kind = "graph"

    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, **given: Any) -> None:  # type: ignore[override]
        buffers = [self.made[f"{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
        assert len(last_page_len) == len(buffers[2]), "the batch size of a graph is fixed"
        assert len(indices) <= len(buffers[1])
        for buffer, new in zip(buffers, (indptr, indices, last_page_len), strict=True):
            buffer[: len(new)] = new
        super().plan(buffers[0], buffers[1], buffers[2], **given)


class Prefill(_Wrapper):
    kind = "prefill"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        self._plan(
            qo_indptr=qo_indptr,
            indptr=paged_kv_indptr,
            indices=paged_kv_indices,
            last_page_len=paged_kv_last_page_len,
            heads=num_qo_heads,
            kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
            causal=causal,
        )


def module(log: Log) -> Any:
    """What `import flashinfer` gives."""

    def decode(
        float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool = False
    ) -> Decode:
        return Decode(log, {"workspace": float_workspace_buffer, "layout": kv_layout, "cores": use_tensor_cores})

    def prefill(float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> Prefill:
        return Prefill(log, {"workspace": float_workspace_buffer, "layout": kv_layout, "backend": backend})

    def graph(
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> GraphDecode:
        assert len(indptr_buffer) == len(last_page_len_buffer) + 1
        made = {"indptr_buffer": indptr_buffer, "indices_buffer": indices_buffer}
        made |= {"last_page_len_buffer": last_page_len_buffer, "layout": kv_layout, "cores": use_tensor_cores}
        return GraphDecode(log, made | {"workspace": workspace_buffer})

    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=decode,
        BatchPrefillWithPagedKVCacheWrapper=prefill,
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper=graph,
        utils=SimpleNamespace(determine_attention_backend=lambda *_: "fa3"),
        jit=SimpleNamespace(
            gen_batch_decode_module=lambda *traits: ("decode", *traits),
            gen_batch_prefill_module=lambda *traits: ("prefill", *traits),
        ),
    )
