"""The paged KV pool of a replica, as counts. Which page is which is the engine's business."""

from __future__ import annotations


class Blocks:
    """`total` blocks of `block_tokens` tokens; what a request takes, holds and gives back.

    With a `reservation` (Orca, FasterTransformer) every request holds that many blocks from admission to its end.
    Without one, it takes what its prefill needs and then one more whenever it crosses into a new block; admission
    leaves floor(watermark × total) blocks free, decodes need not.
    """

    __slots__ = ("block_tokens", "free", "kept_free", "reservation", "total")

    def __init__(self, total: int, block_tokens: int, watermark: float, reservation: int | None = None) -> None:
        self.total = total
        self.free = total
        self.block_tokens = block_tokens
        self.kept_free = 0 if reservation is not None else int(watermark * total)
        self.reservation = reservation

    @property
    def used(self) -> int:
        return self.total - self.free

    def to_admit(self, tokens: int) -> int:
        """Blocks that a request with so many tokens to prefill takes when it is admitted."""
        return -(-tokens // self.block_tokens) if self.reservation is None else self.reservation

    def held_by_decode(self, tokens: int) -> int:
        """Blocks of a request of `tokens` tokens between two decodes: the KV of all but the newest is computed."""
        return self.to_admit(tokens - 1)

    def allow(self, blocks: int, *, alone: bool) -> bool:
        """Whether an admission may take `blocks` now; the watermark is waived for a request `alone` on the replica."""
        return self.free - blocks >= (0 if alone else self.kept_free)

    def take(self, blocks: int) -> None:
        self.free -= blocks
        assert self.free >= 0, "the scheduler took blocks that were not free"

    def give(self, blocks: int) -> None:
        self.free += blocks
        assert self.free <= self.total, "the scheduler gave back blocks twice"
