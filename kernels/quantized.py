"""Attention over keys and values that are packed in MLX's affine groups.

A row of D numbers becomes D * bits / 32 words (uint32), and a scale and a bias per
group of `group_size`: number = scale * code + bias. Every row is packed by itself, so a
packed row does not depend on its neighbours, on chunks or on pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .attention import FEW, attention, causal_mask, weigh
from .runtime import on_gpu


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
    """As `attention`, over packed pieces [B, Hkv, S, ...] of keys and values."""
    length, context = q.shape[2], sum(rows.words.shape[2] for rows in k)
    if length > FEW:  # unpacking once is cheaper then
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
    if window is not None and window >= context:
        window = None
    if window is not None and length == 1 and keep == 0 and len(k) == 1:
        k, v = [_newest(k[0], window)], [_newest(v[0], window)]
        context, window = window, None
    batch, heads, _, dim = q.shape
    kv_heads = k[0].words.shape[1]
    # the query heads of a KV head are rows of one product
    rows = (q * scale).reshape(batch, kv_heads, -1, dim)
    parts = [_times_keys(rows, piece, group_size, bits) for piece in k]
    scores = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
    scores = scores.astype(mx.float32)
    mask = None
    if length > 1 or window is not None:
        mask = causal_mask(length, context, window, keep)
    weights, total = weigh(scores, length, mask, softcap, sinks)
    out, start = mx.array(0.0), 0
    for piece in v:
        stop = start + piece.words.shape[2]
        part = weights[..., start:stop].astype(q.dtype)
        out, start = out + _times_values(part, piece, group_size, bits), stop
    if total is not None:
        out = out / total
    return out.astype(q.dtype).reshape(batch, heads, length, -1)


def _newest(rows: PackedRows, n: int) -> PackedRows:
    return PackedRows(*(part[:, :, -n:] for part in rows))


def _times_keys(x: mx.array, rows: PackedRows, group_size: int, bits: int) -> mx.array:
    """x [..., R, D] times the transpose of rows [..., S, D]: [..., R, S]."""
    if on_gpu():
        return mx.quantized_matmul(
            x, *rows, transpose=True, group_size=group_size, bits=bits
        )
    if rows.scales.shape[-1] > 1:
        return x @ dequantize_rows(rows, group_size, bits).swapaxes(-1, -2)
    planes, x = _planes(rows, bits), x.astype(mx.float32)
    step = len(planes)
    codes = x[..., 0::step] @ planes[0].swapaxes(-1, -2)
    for place in range(1, step):
        codes = codes + x[..., place::step] @ planes[place].swapaxes(-1, -2)
    ones = mx.sum(x, axis=-1, keepdims=True)
    return codes * rows.scales.swapaxes(-1, -2) + ones * rows.biases.swapaxes(-1, -2)


def _times_values(
    x: mx.array, rows: PackedRows, group_size: int, bits: int
) -> mx.array:
    """x [..., R, S] times rows [..., S, D]: [..., R, D]."""
    if on_gpu():
        return mx.quantized_matmul(
            x, *rows, transpose=False, group_size=group_size, bits=bits
        )
    if rows.scales.shape[-1] > 1:
        return x @ dequantize_rows(rows, group_size, bits)
    x = x.astype(mx.float32)
    scaled = x * rows.scales.swapaxes(-1, -2)
    columns = mx.stack([scaled @ plane for plane in _planes(rows, bits)], axis=-1)
    return columns.reshape(*x.shape[:-1], -1) + x @ rows.biases


def _planes(rows: PackedRows, bits: int) -> list[mx.array]:
    """The codes as numbers: every n-th column of D in a plane of its own, n = 8 / bits.

    With one group per row, scales and biases may be applied to the scores instead of
    to the numbers. That and no shuffling make this 2 to 4 times as fast on the CPU as
    unpacking (MLX's packed products are slower still).
    """
    codes = mx.view(rows.words, mx.uint8)  # little-endian: the first code is lowest
    if bits == 8:
        return [codes.astype(mx.float32)]
    return [(codes & 15).astype(mx.float32), (codes >> 4).astype(mx.float32)]
