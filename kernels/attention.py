"""Causal attention over all keys so far, grouped queries included."""

from __future__ import annotations

import mlx.core as mx

from .elementwise import attention_weights, exp_below
from .runtime import on_gpu

# Queries are taken in blocks on the CPU: a block sees only the keys up to its end,
# which halves the work of a prompt, and the scores stay within the processor's cache.
_BLOCK = 128


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(q k^T * scale) v; query i of L sees the keys 0 .. S - L + i.

    q: [B, H, L, D]; k, v: [B, Hkv, S, D], S >= L, H a multiple of Hkv. `window` W: only
    the newest W of those keys, itself included. `softcap` c: scores become
    c tanh(score / c). `sinks` [H]: one more score per head, of a key without a value.
    Returns [B, H, L, D]. The softmax is in float32.
    """
    length, context = q.shape[2], k.shape[2]
    if window is not None and length == 1 and context > window:
        k, v, context = k[:, :, -window:], v[:, :, -window:], window
    if window is not None and window >= context:
        window = None
    if on_gpu() and softcap is None:
        mask: str | mx.array | None = None
        if window is not None:
            mask = causal_mask(length, context, window)
        elif length > 1:
            mask = "causal"
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=mask, sinks=sinks
        )
    q = q * scale
    if length == 1:
        return _attend_block(q, k, v, None, softcap, sinks)
    blocks = []
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        last = context - length + stop
        first = 0 if window is None else max(0, last - (stop - start) - window + 1)
        mask = causal_mask(stop - start, last - first, window)
        blocks.append(
            _attend_block(
                q[:, :, start:stop],
                k[:, :, first:last],
                v[:, :, first:last],
                mask,
                softcap,
                sinks,
            )
        )
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def causal_mask(length: int, context: int, window: int | None = None) -> mx.array:
    """Which keys each query sees: bool [L, S]; the last query sees the last key.

    Query i sees key j if 0 <= (S - L + i) - j < window (no bound without a window).
    """
    distance = mx.arange(context - length, context)[:, None] - mx.arange(context)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _attend_block(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: mx.array | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    """One block of scaled queries [B, H, L, D] over [B, Hkv, S, D]."""
    batch, heads, length, dim = q.shape
    kv_heads, context = k.shape[1], k.shape[2]
    groups = heads // kv_heads
    # The query heads of a KV head are rows of one product: K and V are read once.
    rows = q.reshape(batch, kv_heads, groups * length, dim)
    scores = (rows @ k.swapaxes(-1, -2)).astype(mx.float32)
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    if mask is not None:
        # (adding is ten times faster than mx.where here)
        split = scores.reshape(batch, kv_heads, groups, length, context)
        scores = (split + mx.where(mask, 0.0, -mx.inf)).reshape(scores.shape)
    if sinks is None:
        weights, total = attention_weights(scores)
    else:
        sink = mx.repeat(sinks.astype(mx.float32).reshape(kv_heads, groups), length, 1)
        sink = sink[None, :, :, None]  # [1, Hkv, groups * L, 1]
        top = mx.maximum(mx.max(scores, axis=-1, keepdims=True), sink)
        weights = exp_below(scores, top)
        total = mx.sum(weights, axis=-1, keepdims=True) + mx.exp(sink - top)
    out = weights.astype(v.dtype) @ v
    if total is not None:
        out = (out / total).astype(v.dtype)
    return out.reshape(batch, heads, length, dim)
