"""Causal attention over all keys so far, grouped queries included."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from tiny_llm.errors import ParameterError

from .elementwise import attention_weights, exp_below
from .runtime import on_gpu

# Queries are taken in blocks on the CPU: a block sees only the keys up to its end,
# which halves the work of a prompt, and the scores stay within the processor's cache.
_BLOCK = 128
# So few queries read pieces of keys where they lie; for more, one copy is cheaper.
FEW = 8


def attention(
    q: mx.array,
    k: mx.array | Sequence[mx.array],
    v: mx.array | Sequence[mx.array],
    *,
    scale: float,
    window: int | None = None,
    keep: int = 0,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(q k^T * scale) v; query i of L sees the keys 0 .. S - L + i.

    q: [B, H, L, D]; k, v: [B, Hkv, S, D], S >= L, H a multiple of Hkv; or both in
    pieces along S. `window` W: only the newest W of those keys, itself included, and
    the first `keep` of all. `softcap` c: scores become c tanh(score / c). `sinks` [H]:
    one more score per head, of a key without a value.
    Returns [B, H, L, D], D of the values, in q's dtype. The softmax is in float32.
    """
    ks, vs = _pieces(k), _pieces(v)
    length, context = q.shape[2], sum(piece.shape[2] for piece in ks)
    if window is not None and window >= context:
        window = None
    if len(ks) > 1 and (length > FEW or window is not None or on_gpu()):
        ks, vs = [mx.concatenate(ks, axis=2)], [mx.concatenate(vs, axis=2)]
    if window is not None and length == 1 and keep == 0:
        ks, vs = [ks[0][:, :, -window:]], [vs[0][:, :, -window:]]
        context, window = window, None
    if on_gpu() and softcap is None:
        mask: str | mx.array | None = None
        if window is not None:
            mask = causal_mask(length, context, window, keep)
        elif length > 1:
            mask = "causal"
        return mx.fast.scaled_dot_product_attention(
            q, ks[0], vs[0], scale=scale, mask=mask, sinks=sinks
        ).astype(q.dtype)
    q = q * scale
    if len(ks) > 1 or (length == 1 and window is None):
        mask = None if length == 1 else causal_mask(length, context)
        return _attend_block(q, ks, vs, mask, softcap, sinks)
    blocks = []
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        last = context - length + stop
        first = 0
        if window is not None and keep == 0:
            first = max(0, last - (stop - start) - window + 1)
        blocks.append(
            _attend_block(
                q[:, :, start:stop],
                [ks[0][:, :, first:last]],
                [vs[0][:, :, first:last]],
                causal_mask(stop - start, last - first, window, keep),
                softcap,
                sinks,
            )
        )
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def check_attention(
    heads: int, window: int | None, softcap: float | None, sinks: mx.array | None
) -> None:
    """Raise ParameterError for settings that none of the ways of attention can do."""
    if window is not None and window < 1:
        raise ParameterError(f"window is {window}; it may be 1 or more, or None")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ParameterError(
            f"softcap is {softcap}; it must be finite and above 0, or None"
        )
    if sinks is not None and sinks.shape != (heads,):
        raise ParameterError(f"sinks {sinks.shape} for {heads} heads")


def causal_mask(
    length: int, context: int, window: int | None = None, keep: int = 0
) -> mx.array:
    """Which keys each query sees: bool [L, S]; the last query sees the last key.

    Query i sees key j if 0 <= (S - L + i) - j, and that is < window (no bound without
    one) or j < keep.
    """
    keys = mx.arange(context)
    distance = mx.arange(context - length, context)[:, None] - keys
    seen = distance >= 0
    if window is None:
        return seen
    near = distance < window
    return seen & (near | (keys < keep) if keep else near)


def _pieces(x: mx.array | Sequence[mx.array]) -> list[mx.array]:
    return [x] if isinstance(x, mx.array) else list(x)


def _attend_block(
    q: mx.array,
    k: Sequence[mx.array],
    v: Sequence[mx.array],
    mask: mx.array | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    """One block of scaled queries [B, H, L, D] over pieces of [B, Hkv, S, D]."""
    batch, heads, length, dim = q.shape
    kv_heads = k[0].shape[1]
    groups = heads // kv_heads
    # The query heads of a KV head are rows of one product: K and V are read once.
    rows = q.reshape(batch, kv_heads, groups * length, dim)
    parts = [rows @ piece.swapaxes(-1, -2) for piece in k]
    scores = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
    scores = scores.astype(mx.float32)
    weights, total = weigh(scores, length, mask, softcap, sinks)
    weights, start = weights.astype(v[0].dtype), 0
    out = None
    for piece in v:
        stop = start + piece.shape[2]
        # (slicing a lone piece would cost a node for nothing)
        part = (weights if len(v) == 1 else weights[..., start:stop]) @ piece
        out, start = part if out is None else out + part, stop
    assert out is not None
    if total is not None:
        out = (out / total).astype(v[0].dtype)
    return out.reshape(batch, heads, length, v[0].shape[-1]).astype(q.dtype)


def weigh(
    scores: mx.array,
    length: int,
    mask: mx.array | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> tuple[mx.array, mx.array | None]:
    """softmax of scores float32 [B, Hkv, groups * L, S], as attention_weights has it.

    mask: which keys are seen, bool or what is added to the scores (0 and -inf), [L, S]
    or with leading axes [B, Hkv, groups, L, S]; the others as in `attention`.
    """
    batch, kv_heads, rows, context = scores.shape
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    if mask is not None:
        # (adding is ten times faster than mx.where here)
        split = scores.reshape(batch, kv_heads, rows // length, length, context)
        if mask.dtype == mx.bool_:
            mask = mx.where(mask, 0.0, -mx.inf)
        scores = (split + mask).reshape(scores.shape)
    if sinks is None:
        return attention_weights(scores)
    sink = mx.repeat(sinks.astype(mx.float32).reshape(kv_heads, -1), length, axis=1)
    sink = sink[None, :, :, None]  # [1, Hkv, groups * L, 1]
    top = mx.maximum(mx.max(scores, axis=-1, keepdims=True), sink)
    weights = exp_below(scores, top)
    return weights, mx.sum(weights, axis=-1, keepdims=True) + mx.exp(sink - top)
