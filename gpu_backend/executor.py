"""The engine's executor: a batch becomes tensors, one forward pass, and the next token of every request in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from gpu_backend.attention import Attention
from gpu_backend.cache import PageTable
from gpu_backend.layout import Layout, lay_out
from gpu_backend.model import Decoder
from gpu_backend.staging import DeviceTimer, Staging
from sim.errors import BadInput
from sim.executor import Step
from sim.request import Batch, Request

HOST = torch.device("cpu")


@dataclass(slots=True)
class _Known:
    """A request that the engine has seen: its tokens, and how often it had been preempted when it took its pages."""

    request: Request
    tokens: list[int]
    preemptions: int = 0


@dataclass(slots=True)
class _Rows:
    """A batch as rows of tokens; `samplers` are the requests whose last row gives a token."""

    layout: Layout
    tokens: list[int]
    positions: list[int]
    sampled: list[int]
    samplers: list[_Known] = field(default_factory=list)


class Graphs(Protocol):
    """Decode batches that were captured: `gpu_backend.graphs.DecodeGraphs`."""

    def prepare(self, decodes: int) -> None: ...

    def ready(
        self, tokens: Sequence[int], positions: Sequence[int], layout: Layout
    ) -> Callable[[], torch.Tensor] | None: ...


class TorchExecutor:
    """Executes batches for real, and returns what they took.

    The scheduler owns requests and counts blocks; the engine only follows. It learns that a request is done or was
    preempted by looking at it before the next batch, and gives its pages back then. `answers` keeps the emitted tokens
    of finished requests where `keep_answers` is set. Prompts are random tokens, from the seed and the request's id.
    `device_seconds` is what a GPU needed for the last batch's kernels, by its own clock; None on a CPU.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        pages: PageTable,
        *,
        graphs: Graphs | None = None,
        seed: int = 0,
        keep_answers: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.decoder = decoder
        self.attention = attention
        self.pages = pages
        self.graphs = graphs
        self.seed = seed
        self.keep_answers = keep_answers
        self.clock = clock
        self.device = decoder.weights.embedding.device
        self.staging = Staging(self.device)
        self.timer = DeviceTimer(self.device)
        self.device_seconds: float | None = None
        self.known: dict[int, _Known] = {}
        self.answers: dict[int, list[int]] = {}

    def execute(self, batch: Batch) -> Step:
        """Seconds of the whole iteration as the host sees them, and how many of them it spent before the device ran.

        Capturing a graph happens once and is not counted. BadInput where a batch does not fit into the memory left.
        """
        if self.graphs is not None and not batch.chunks:
            self.graphs.prepare(batch.decodes)
        start = self.clock()
        self._let_go()
        rows = self._rows(batch)
        assert self.pages.used <= batch.blocks_used, "the engine holds more pages than the scheduler counted blocks"
        run = self._ready(rows)
        launched = self.clock()
        self.timer.start()
        try:
            answer = run()
        except torch.OutOfMemoryError as error:
            what = f"a batch of {batch.tokens} tokens does not fit beside the KV blocks: {str(error).splitlines()[0]}"
            raise BadInput(what, key="[engine] num_blocks") from None
        self.timer.stop()
        chosen = answer.tolist()  # waits for the device, unless there is nothing to fetch
        if not chosen and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for known, token in zip(rows.samplers, chosen, strict=True):
            known.tokens.append(token)
        end = self.clock()
        self.device_seconds = self.timer.seconds()
        return Step((end - start,), host=launched - start)

    def spent(self) -> None:
        """A measurement does not say what the time was spent on."""

    def notes(self) -> list[str]:
        """Nothing: its times are what they were."""
        return []

    def finish(self) -> None:
        """The run is over: keep what was said, forget the rest."""
        self._let_go()

    def pretend(self, request: Request, tokens: int) -> None:
        """Take the KV of a request's first `tokens` tokens for computed, whatever the pages hold (calibration)."""
        self.known[request.id] = _Known(request, [0] * tokens, request.preemptions)
        self.pages.cover(request.id, tokens)

    def forget(self) -> None:
        """Let go of every request."""
        for id in self.known:
            self.pages.release(id)
        self.known.clear()

    def _let_go(self) -> None:
        """Take the pages of requests that are done, or that lost their blocks, since the last batch."""
        for id, known in list(self.known.items()):
            request = known.request
            done = request.emitted >= request.output
            if done or request.preemptions != known.preemptions:
                self.pages.release(id)
                known.preemptions = request.preemptions
            if done:
                del self.known[id]
                if self.keep_answers:
                    self.answers[id] = known.tokens[request.prompt :]

    def _rows(self, batch: Batch) -> _Rows:
        """The batch's rows: one per decode, then those of its chunks."""
        rows = _Rows(layout=None, tokens=[], positions=[], sampled=[])  # type: ignore[arg-type]
        decodes = []
        for request in batch.group.members.values() if batch.group is not None else ():
            known = self.known[request.id]
            length = len(known.tokens)
            decodes.append((length, self.pages.cover(request.id, length)))
            rows.tokens.append(known.tokens[-1])
            rows.positions.append(length - 1)
            rows.sampled.append(len(rows.tokens) - 1)
            rows.samplers.append(known)
        chunks = []
        for chunk in batch.chunks:
            known = self._meet(chunk.request)
            end = chunk.start + chunk.tokens
            chunks.append((chunk.start, chunk.tokens, self.pages.cover(chunk.request.id, end)))
            rows.tokens.extend(known.tokens[chunk.start : end])
            rows.positions.extend(range(chunk.start, end))
            if end == len(known.tokens):
                rows.sampled.append(len(rows.tokens) - 1)
                rows.samplers.append(known)
        rows.layout = lay_out(decodes, chunks, self.pages.page_tokens, HOST)
        return rows

    def _ready(self, rows: _Rows) -> Callable[[], torch.Tensor]:
        """What computes the next tokens, [samplers], of rows that are planned: a graph where there is one."""
        layout = rows.layout
        if self.graphs is not None and (replay := self.graphs.ready(rows.tokens, rows.positions, layout)) is not None:
            return replay
        tokens, positions, sampled, pages, offsets = self.staging.load(
            rows.tokens, rows.positions, rows.sampled, layout.write_pages, layout.write_offsets
        )
        self.attention.plan(replace(layout, write_pages=pages, write_offsets=offsets))
        return lambda: self.decoder.forward(tokens, positions, sampled, self.attention).argmax(dim=-1)

    def _meet(self, request: Request) -> _Known:
        """What is known of a request, its prompt made up when it is first seen."""
        if request.id not in self.known:
            draw = np.random.default_rng((self.seed, request.id))
            prompt = draw.integers(self.decoder.model.vocab, size=request.prompt).tolist()
            self.known[request.id] = _Known(request, prompt, request.preemptions)
        return self.known[request.id]
