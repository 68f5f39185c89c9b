"""Rotary position embedding (Su et al. 2021) of neighbouring pairs.

Dimension 2i and 2i + 1 of a head are one pair (checkpoints in the Hugging Face layout,
which pairs i with i + D/2, are reordered when they are loaded). A pair is a complex
number and its rotation one multiplication; on the CPU that is how it is done, with one
table per forward pass: mx.fast.rope made a token of SmolLM2 5 ms (of 33) slower.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .runtime import on_gpu


class Rotation(NamedTuple):
    """The rotation of the positions of one forward pass, shared by all layers.

    offset: int32 [B], the position of each row's first token; frequencies: float32
    [D_rot / 2], radians per position; scale: a factor on the result; table: complex64
    [B or 1, 1, L, D_rot / 2], on the CPU.
    """

    offset: mx.array
    frequencies: mx.array
    scale: float
    table: mx.array | None


def make_rotation(
    offset: mx.array, length: int, frequencies: mx.array, scale: float = 1.0
) -> Rotation:
    """The rotation for `length` tokens of each row, from position offset[b] on.

    offset: int32 [B], or [1] for all rows alike; frequencies: [D_rot / 2], or one set
    per row, [B, D_rot / 2].
    """
    table = None
    if not on_gpu() or frequencies.ndim == 2:
        positions = offset[:, None, None] + mx.arange(length)[:, None]  # [B, L, 1]
        angles = positions.astype(mx.float32) * frequencies.reshape(
            -1, 1, frequencies.shape[-1]
        )
        angles = angles[:, None]  # [B, 1, L, D_rot / 2]
        table = scale * (mx.cos(angles) + 1j * mx.sin(angles))
    return Rotation(offset, frequencies, scale, table)


def rotate(x: mx.array, rotation: Rotation) -> mx.array:
    """Rotate the first D_rot dimensions of each head by its position.

    x: [B, heads, L, D]; returns the same shape and dtype.
    """
    dims = 2 * rotation.frequencies.shape[-1]
    if rotation.table is None:
        offset = rotation.offset
        if offset.shape[0] != x.shape[0]:
            offset = mx.broadcast_to(offset, (x.shape[0],))
        y = mx.fast.rope(
            x,
            dims,
            traditional=True,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=1.0 / rotation.frequencies,
        )
        if rotation.scale == 1.0:
            return y
        if dims == x.shape[-1]:
            return y * rotation.scale
        return mx.concatenate([y[..., :dims] * rotation.scale, y[..., dims:]], axis=-1)
    head = x if dims == x.shape[-1] else x[..., :dims]
    pairs = mx.view(head.astype(mx.float32), mx.complex64)
    y = mx.view(pairs * rotation.table, mx.float32).astype(x.dtype)
    return y if head is x else mx.concatenate([y, x[..., dims:]], axis=-1)
