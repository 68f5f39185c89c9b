"""Rows of tokens in contiguous memory, written in place."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .format import KvFormat, Rows


class RowBuffer:
    """The keys, or the values, of one layer: [B, Hkv, capacity, ...] in a format.

    In place when nobody else holds the arrays: MLX hands their memory on.
    """

    def __init__(self, fmt: KvFormat) -> None:
        self.format = fmt
        self.rows: Rows = ()
        self.shape: tuple[int, int, int] | None = None  # B, Hkv, D

    @property
    def dtype(self) -> mx.Dtype | None:
        """Of the numbers, or of the scales that they are packed with."""
        return self.rows[-1].dtype if self.rows else None

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self.rows[0].shape[2] if self.rows else 0

    def write(self, x: mx.array, start: int, capacity: int) -> None:
        """Store x [B, Hkv, S, D] at row `start`, growing to `capacity` if needed."""
        new = self.format.encode(x)
        stop = start + x.shape[2]
        if self.shape is None:
            self.rows = tuple(_room(part, capacity) for part in new)
            self.shape = x.shape[0], x.shape[1], x.shape[3]
        elif stop > self.capacity:
            self.rows = self.rebuilt([(0, start)], capacity)
        for array, part in zip(self.rows, new, strict=True):
            array[:, :, start:stop] = part

    def rebuilt(self, ranges: Sequence[tuple[int, int]], capacity: int) -> Rows:
        """The rows of `ranges` alone, one after the other, in new memory."""
        kept = sum(stop - start for start, stop in ranges)
        return tuple(
            mx.concatenate(
                [array[:, :, start:stop] for start, stop in ranges]
                + [_room(array, capacity - kept)],
                axis=2,
            )
            for array in self.rows
        )

    def view(self, start: int, stop: int) -> Rows:
        """Rows start to stop. Whoever keeps them makes the next write copy."""
        return tuple(array[:, :, start:stop] for array in self.rows)

    def restore(self, rows: Rows, head_dim: int, capacity: int) -> None:
        """Take over rows [B, Hkv, S, ...] that a view gave, with room to grow."""
        self.shape = rows[0].shape[0], rows[0].shape[1], head_dim
        self.rows = rows
        self.rows = self.rebuilt([(0, rows[0].shape[2])], capacity)


def _room(like: mx.array, tokens: int) -> mx.array:
    batch, heads, _, width = like.shape
    return mx.zeros((batch, heads, tokens, width), dtype=like.dtype)
