"""Layouts of keys and values whose quality kv_quality.py compares: real, simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from tiny_llm.errors import ParameterError
from tiny_llm.kernels import (
    attention,
    causal_mask,
    dequantize_rows,
    exp_below,
    quantize_rows,
)


class NewestKeptCache:
    """Every query sees the newest `newest` keys, its own included, as they were.

    The others are packed and unpacked. Keeps all keys and values in full: it shows the
    quality of such a cache, not its memory.
    """

    def __init__(self, bits: int, group_size: int, newest: int) -> None:
        self.packing = group_size, bits
        self.newest = newest
        self.full: list[mx.array] = []  # keys, values: [B, Hkv, S, D]
        self.packed: list[mx.array] = []  # the same, rounded

    @property
    def offset(self) -> int:
        """Tokens appended."""
        return self.full[0].shape[2] if self.full else 0

    @property
    def state(self) -> list[mx.array]:
        """The arrays, for mx.eval."""
        return [*self.full, *self.packed]

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, **options: Any
    ) -> mx.array:
        """Append k and v [B, Hkv, S, D], attend with q [B, H, S, D]; full attention."""
        if any(value is not None for value in options.values()):
            raise ParameterError(f"full attention only is simulated, not {options}")
        rounded = [
            dequantize_rows(quantize_rows(x, *self.packing), *self.packing)
            for x in (k, v)
        ]
        self.full = _append(self.full, [k, v])
        self.packed = _append(self.packed, rounded)
        if self.newest == 0:
            # The same attention as the engine's: rounding is discontinuous, and one
            # more last bit in layer 0 makes another rounding of all that follow.
            return attention(q, *self.packed, scale=scale)
        batch, heads, length, dim = q.shape
        kv_heads, context = self.full[0].shape[1:3]
        q = (q * scale).reshape(batch, kv_heads, heads // kv_heads, length, dim)
        # only these may be near to a query
        first = max(0, context - length - self.newest + 1)
        near = causal_mask(length, context - first, self.newest)
        full_k, full_v = (x[:, :, None, first:] for x in self.full)
        packed_k, packed_v = (x[:, :, None] for x in self.packed)
        scores = q @ packed_k.swapaxes(-1, -2)
        close = mx.where(near, q @ full_k.swapaxes(-1, -2), scores[..., first:])
        scores = mx.concatenate([scores[..., :first], close], axis=-1)
        scores = scores + mx.where(causal_mask(length, context), 0.0, -mx.inf)
        weights = exp_below(scores, mx.max(scores, axis=-1, keepdims=True))
        total = mx.sum(weights, axis=-1, keepdims=True)
        close = mx.where(near, weights[..., first:], 0.0)
        out = weights @ packed_v + close @ (full_v - packed_v[..., first:, :])
        return (out / total).reshape(batch, heads, length, dim)


def _append(held: list[mx.array], new: list[mx.array]) -> list[mx.array]:
    if not held:
        return new
    pairs = zip(held, new, strict=True)
    return [mx.concatenate([old, part], axis=2) for old, part in pairs]


@dataclass(frozen=True)
class Layout:
    """bits None: full keys and values."""

    bits: int | None = None
    group_size: int = 64
    newest: int = 0

    def cache(self, model: Any) -> Any:
        """An empty cache: the engine's own where it has one."""
        if self.bits is None:
            return model.create_kv_cache("dense")
        if self.newest:
            return self.simulated(model)
        packing = {"bits": self.bits, "group_size": self.group_size}
        return model.create_kv_cache("quantized", **packing)

    def simulated(self, model: Any) -> list[NewestKeptCache]:
        """An empty cache that packs and unpacks."""
        assert self.bits is not None
        return [
            NewestKeptCache(self.bits, self.group_size, self.newest)
            for _ in model.layers
        ]
