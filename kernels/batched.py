"""Attention of one query each of many requests, whose keys are read in one product."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .attention import weigh
from .runtime import on_gpu


def batched_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | None = None,
    shared: Sequence[tuple[mx.array, mx.array]] = (),
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(q k^T * scale) v, for a query per request.

    q: [B, H, 1, D]; k, v: [B, Hkv, S, D], of which request b sees what mask [B, S] adds
    0 and not -inf to (None: all). shared: keys and values [1, Hkv, n, D] before those,
    which all see: they are read once for all (cf. Hydragen, Juravsky et al. 2024).
    What is masked must be finite. softcap, sinks: as in `attention`.
    Returns [B, H, 1, D]. The softmax is in float32.
    """
    if on_gpu() and softcap is None and not shared:
        seen = None if mask is None else mask[:, None, None].astype(q.dtype)
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=seen, sinks=sinks
        )
    batch, heads, _, dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    rows = (q * scale).reshape(batch, kv_heads, groups, dim)
    parts = []
    if shared:
        together = _as_one(rows)
        parts = [_apart(together @ k_.swapaxes(-1, -2), batch) for k_, _ in shared]
    parts.append(rows @ k.swapaxes(-1, -2))
    scores = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
    context = scores.shape[-1]
    if mask is not None:
        before = context - mask.shape[-1]
        if before:
            mask = mx.pad(mask, [(0, 0), (before, 0)])
        mask = mask[:, None, None, None]
    weights, total = weigh(scores.astype(mx.float32), 1, mask, softcap, sinks)
    weights = weights.astype(v.dtype)
    start = 0
    out = None
    for _, v_ in shared:
        stop = start + v_.shape[2]
        part = _apart(_as_one(weights[..., start:stop]) @ v_, batch)
        out, start = part if out is None else out + part, stop
    own = (weights if start == 0 else weights[..., start:]) @ v
    out = own if out is None else out + own
    if total is not None:
        out = (out / total).astype(v.dtype)
    return out.reshape(batch, heads, 1, dim)


def _as_one(x: mx.array) -> mx.array:
    """[B, Hkv, groups, n] -> [1, Hkv, B * groups, n]: the rows of one product."""
    batch, kv_heads, groups, n = x.shape
    if batch == 1:
        return x
    return x.swapaxes(0, 1).reshape(1, kv_heads, batch * groups, n)


def _apart(x: mx.array, batch: int) -> mx.array:
    """[1, Hkv, B * groups, n] -> [B, Hkv, groups, n]."""
    _, kv_heads, rows, n = x.shape
    if batch == 1:
        return x
    return x.reshape(kv_heads, batch, rows // batch, n).swapaxes(0, 1)
