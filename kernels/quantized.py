"""Attention over keys and values that are packed in MLX's affine groups.

A row of D numbers becomes D * bits / 32 words (uint32), and a scale and a bias per
group of `group_size`: number = scale * code + bias. Every row is packed by itself, so a
packed row does not depend on its neighbours, on chunks or on pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .attention import attention, causal_mask
from .runtime import on_gpu

# For so few queries the packed product beats unpacking all keys (Metal).
_FEW = 8


class PackedRows(NamedTuple):
    """Rows: words [..., S, D * bits / 32], scales and biases [..., S, groups]."""

    words: mx.array
    scales: mx.array
    biases: mx.array


def quantize_rows(x: mx.array, group_size: int, bits: int) -> PackedRows:
    """Pack x [..., S, D] along D, a multiple of group_size; scales have x's dtype."""
    return PackedRows(*mx.quantize(x, group_size=group_size, bits=bits))


def dequantize_rows(rows: PackedRows, group_size: int, bits: int) -> mx.array:
    """Unpack to [..., S, D], of the scales' dtype."""
    return mx.dequantize(*rows, group_size=group_size, bits=bits)


def quantized_attention(
    q: mx.array,
    k: Sequence[PackedRows],
    v: Sequence[PackedRows],
    *,
    group_size: int,
    bits: int,
    scale: float,
    window: int | None = None,
    keep: int = 0,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """As `attention`, over packed pieces [B, Hkv, S, ...] of keys and values.

    On Metal few queries multiply the packed form, else the rows are unpacked: MLX's
    packed products are slower than that on the CPU.
    """
    length = q.shape[2]
    if not on_gpu() or length > _FEW or len(k) > 1:
        return attention(
            q,
            [dequantize_rows(rows, group_size, bits) for rows in k],
            [dequantize_rows(rows, group_size, bits) for rows in v],
            scale=scale,
            window=window,
            keep=keep,
            softcap=softcap,
            sinks=sinks,
        )
    return _attend_packed(
        q, k[0], v[0], group_size, bits, scale, window, keep, softcap, sinks
    )


def _attend_packed(
    q: mx.array,
    k: PackedRows,
    v: PackedRows,
    group_size: int,
    bits: int,
    scale: float,
    window: int | None,
    keep: int,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    batch, heads, length, dim = q.shape
    kv_heads, context = k.words.shape[1:3]
    groups = heads // kv_heads
    rows = (q * scale).reshape(batch, kv_heads, groups * length, dim)
    scores = mx.quantized_matmul(
        rows, *k, transpose=True, group_size=group_size, bits=bits
    ).astype(mx.float32)
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    split = scores.reshape(batch, heads, length, context)
    if length > 1 or window is not None:
        mask = causal_mask(length, context, window, keep)
        split = mx.where(mask, split, -mx.inf)
    if sinks is not None:  # one more key, whose value is nothing
        sink = sinks.astype(mx.float32)[None, :, None, None]
        sink = mx.broadcast_to(sink, (batch, heads, length, 1))
        split = mx.concatenate([sink, split], axis=-1)
    weights = mx.softmax(split, axis=-1)[..., -context:]
    weights = weights.reshape(scores.shape).astype(v.scales.dtype)
    out = mx.quantized_matmul(
        weights, *v, transpose=False, group_size=group_size, bits=bits
    )
    return out.reshape(batch, heads, length, dim)
