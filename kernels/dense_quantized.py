"""Attention of few new tokens over the packed rows of a dense cache."""

from __future__ import annotations

import mlx.core as mx

from tiny_llm.errors import ParameterError

from .attention import check_attention
from .cached import (
    MOST_ROWS,
    Shape,
    check_packing,
    check_splits,
    launch,
    rounded,
    splits_for,
    supports,
)
from .canary import dense_problem, difference
from .metal import runs_on_metal
from .quantized import PackedRows, quantized_attention


def dense_quantized_attention(
    q: mx.array,
    k: PackedRows,
    v: PackedRows,
    *,
    group_size: int,
    bits: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    splits: int | None = None,
) -> mx.array:
    """`attention` over packed keys and values [B, Hkv, S, ...], in one launch.

    q: [B, H, L, D]; k, v: views of the cache's buffers, which are read where they lie;
    the last axis of each array must be without gaps. splits: threadgroups that share
    the keys of a KV head (None: by the rule in cached.py; the reference has none).
    group_size: 32 or 64; bits: 8 or 4. The reference runs for more than 8 new tokens,
    which unpack the rows, for scales of other types than q's, for values of another
    width Dv than keys, and for heads that no kernel is made for.
    Returns [B, H, L, Dv] in q's dtype. Raises ParameterError; with
    TINY_LLM_KERNELS=metal also KernelError.
    """
    _check(q, k, v, bits, group_size)
    batch, heads, length, dim = q.shape
    kv_heads, context = k.words.shape[1], k.words.shape[2]
    group = heads // kv_heads
    check_attention(heads, window, softcap, sinks)
    check_splits(splits)
    if splits is None:
        splits = splits_for(batch * kv_heads, context)
    rows = rounded(length)
    shape = Shape(
        q.dtype, dim, bits, group_size, 0, group, rows, splits > 1, sinks is not None
    )
    if (
        length > MOST_ROWS
        or not q.size
        or not q.dtype == k.scales.dtype == v.scales.dtype
        or v.words.shape != k.words.shape
        or not supports(q.dtype, dim, bits)
        or not runs_on_metal(shape, lambda: _canary(shape))
    ):
        return quantized_attention(
            q,
            [k],
            [v],
            group_size=group_size,
            bits=bits,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    return _launch(shape, q, k, v, scale, softcap, window, sinks, splits)


def _launch(
    shape: Shape,
    q: mx.array,
    k: PackedRows,
    v: PackedRows,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: mx.array | None,
    splits: int,
) -> mx.array:
    named = [
        (f"{rows}_{part}", array)
        for rows, packed in (("k", k), ("v", v))
        for part, array in zip(PackedRows._fields, packed, strict=True)
    ]
    return launch(
        shape,
        q,
        named,
        kv_heads=k.words.shape[1],
        sequences=q.shape[0],
        scale=scale,
        softcap=softcap,
        window=window,
        sinks=sinks,
        splits=splits,
        extra=(k.words.shape[2], q.shape[2]),
    )


def _canary(shape: Shape) -> str | None:
    q, k, v, scale, sinks, expected = dense_problem(shape)
    rows = PackedRows(*k), PackedRows(*v)
    splits = 2 if shape.split else 1
    found = _launch(shape, q, *rows, scale, None, None, sinks, splits)
    return difference(found, expected, shape.dtype)


def _check(
    q: mx.array, k: PackedRows, v: PackedRows, bits: int, group_size: int
) -> None:
    if q.ndim != 4:
        raise ParameterError(f"q must be [B, H, L, D], got {q.shape}")
    batch, heads, length, dim = q.shape
    if k.words.ndim != 4:
        raise ParameterError(f"words must be [B, Hkv, S, ...], got {k.words.shape}")
    check_packing(bits, group_size, dim)
    kv_heads, context = k.words.shape[1], k.words.shape[2]
    if kv_heads < 1 or heads % kv_heads or context < length:
        raise ParameterError(
            f"queries {q.shape} over {context} tokens of {kv_heads} KV heads"
        )
    front = (batch, kv_heads, context)
    values = v.words.shape[-1] * 32 // bits if v.words.ndim else 0
    for rows, width in ((k, dim), (v, values)):
        scales, kind = (*front, width // group_size), rows.scales.dtype
        expected = [
            (mx.uint32, (*front, width * bits // 32)),
            (kind, scales),
            (kind, scales),
        ]
        for part, (dtype, shape) in zip(rows, expected, strict=True):
            if part.dtype != dtype or part.shape != shape:
                raise ParameterError(
                    f"packed rows of {part.dtype} {part.shape} for queries {q.shape}: "
                    f"expected {dtype} {shape}"
                )
