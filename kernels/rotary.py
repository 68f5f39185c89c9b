"""Rotary position embedding (Su et al. 2021) of neighbouring pairs.

Dimension 2i and 2i + 1 of a head are one pair (checkpoints in the Hugging Face layout,
which pairs i with i + D/2, are reordered when they are loaded). A pair is a complex
number and its rotation one multiplication; on the CPU that is how few tokens are
rotated, with one table per forward pass: mx.fast.rope made a token of SmolLM2 5 ms (of
33) slower. But MLX multiplies complex numbers one by one, 14 ns each: for more tokens a
fused chain of real numbers takes half the time, or a third.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import mlx.core as mx

from .runtime import can_fuse, on_gpu

# From so many tokens on, the chain is worth its fixed part (measured on two cores).
_WORTH_REAL = 8


class Rotation(NamedTuple):
    """The rotation of the positions of one forward pass, shared by all layers.

    offset: int32 [B], the position of each row's first token; frequencies: float32
    [D_rot / 2], radians per position; scale: a factor on the result. On a GPU, periods:
    1 / frequencies, as MLX's own kernel takes them. Else one of table: complex64
    [B or 1, 1, L, D_rot / 2], and waves: cosines and sines, with the signs that a pair
    has them, float32 [B or 1, 1, L, D_rot] each.
    """

    offset: mx.array
    frequencies: mx.array
    scale: float
    periods: mx.array | None = None
    table: mx.array | None = None
    waves: tuple[mx.array, mx.array] | None = None


def make_rotation(
    offset: mx.array, length: int, frequencies: mx.array, scale: float = 1.0
) -> Rotation:
    """The rotation for `length` tokens of each row, from position offset[b] on.

    offset: int32 [B], or [1] for all rows alike; frequencies: [D_rot / 2], or one set
    per row, [B, D_rot / 2].
    """
    rotation = Rotation(offset, frequencies, scale)
    if on_gpu() and frequencies.ndim == 1:
        return rotation._replace(periods=1.0 / frequencies)
    positions = offset[:, None, None] + mx.arange(length)[:, None]  # [B, L, 1]
    angles = positions.astype(mx.float32) * frequencies.reshape(
        -1, 1, frequencies.shape[-1]
    )
    angles = angles[:, None]  # [B, 1, L, D_rot / 2]
    cos, sin = scale * mx.cos(angles), scale * mx.sin(angles)
    if on_gpu() or angles.shape[0] * length < _WORTH_REAL or not can_fuse():
        return rotation._replace(table=cos + 1j * sin)
    cos = mx.repeat(cos, 2, axis=-1)
    sin = mx.stack([-sin, sin], axis=-1).reshape(cos.shape)
    return rotation._replace(waves=(cos, sin))


@functools.partial(mx.compile, shapeless=True)
def _swap(pairs: mx.array) -> mx.array:
    """The two float32 of each pair, seen as one uint64, the other way round."""
    half = mx.array(32, mx.uint64)
    return mx.left_shift(pairs, half) | mx.right_shift(pairs, half)


@functools.partial(mx.compile, shapeless=True)
def _turn(x: mx.array, swapped: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    return x * cos + swapped * sin


def rotate(x: mx.array, rotation: Rotation) -> mx.array:
    """Rotate the first D_rot dimensions of each head by its position.

    x: [B, heads, L, D]; returns the same shape and dtype.
    """
    dims = 2 * rotation.frequencies.shape[-1]
    if rotation.periods is not None:
        return _fast_rope(x, dims, rotation)
    head = x if dims == x.shape[-1] else x[..., :dims]
    head32 = head.astype(mx.float32)
    if rotation.table is not None:
        y = mx.view(mx.view(head32, mx.complex64) * rotation.table, mx.float32)
    else:
        assert rotation.waves is not None
        swapped = mx.view(_swap(mx.view(head32, mx.uint64)), mx.float32)
        y = _turn(head32, swapped, *rotation.waves)
    y = y.astype(x.dtype)
    return y if head is x else mx.concatenate([y, x[..., dims:]], axis=-1)


def _fast_rope(x: mx.array, dims: int, rotation: Rotation) -> mx.array:
    """By MLX's own kernel, which does not scale."""
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
        freqs=rotation.periods,
    )
    if rotation.scale == 1.0:
        return y
    if dims == x.shape[-1]:
        return y * rotation.scale
    return mx.concatenate([y[..., :dims] * rotation.scale, y[..., dims:]], axis=-1)
