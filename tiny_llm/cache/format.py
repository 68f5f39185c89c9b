"""How a row of numbers is stored: as it is, or packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..kernels import (
    PackedRows,
    attention,
    dense_quantized_attention,
    dequantize_rows,
    kv_rows,
    quantize_kv,
    quantize_rows,
    quantized_attention,
)
from ..memory import checked_packing

# The arrays of a row: (numbers,), or (words, scales, biases); tokens are on axis -2.
Rows = tuple[mx.array, ...]


@dataclass(frozen=True)
class KvFormat:
    """bits None: rows of numbers; 8 or 4: MLX's affine groups, each row by itself.

    A token is packed as it is written and read packed from then on, by its own query
    too. So which keys are packed does not depend on chunks, pages or rewinding. (A key
    that differs in its last bit may be packed to the next code, though.)
    """

    bits: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        """Whole numbers of our own in the place of numpy's; 64 for no group size."""
        packing = checked_packing(self.bits, self.group_size)
        if packing is not None:
            object.__setattr__(self, "bits", packing.bits)
            object.__setattr__(self, "group_size", packing.group_size)

    def check(self, head_dim: int) -> None:
        """Raise ParameterError if heads of so many numbers cannot be stored so."""
        checked_packing(self.bits, self.group_size, head_dim)

    def encode(self, x: mx.array) -> Rows:
        """x [..., S, D] as it is stored."""
        if self.bits is None or self.group_size is None:
            return (x,)
        return quantize_rows(x, self.group_size, self.bits)

    def encode_rows(self, k: mx.array, v: mx.array) -> Rows:
        """k and v [N, Hkv, 1, D] as a pool stores them, [2 Hkv, N, ...]."""
        if self.bits is None or self.group_size is None:
            return (kv_rows(k, v),)
        return quantize_kv(k, v, self.group_size, self.bits)

    def decode(self, rows: Rows) -> mx.array:
        """What was stored, [..., S, D]; packed numbers come back rounded."""
        if self.bits is None or self.group_size is None:
            return rows[0]
        return dequantize_rows(PackedRows(*rows), self.group_size, self.bits)

    def attend(
        self,
        q: mx.array,
        keys: Sequence[Rows],
        values: Sequence[Rows],
        *,
        scale: float,
        window: int | None = None,
        keep: int = 0,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """kernels.attention over stored pieces [B, Hkv, S, ...] of keys and values."""
        if self.bits is None or self.group_size is None:
            return attention(
                q,
                [rows[0] for rows in keys],
                [rows[0] for rows in values],
                scale=scale,
                window=window,
                keep=keep,
                softcap=softcap,
                sinks=sinks,
            )
        if len(keys) == len(values) == 1 and keep == 0:
            return dense_quantized_attention(
                q,
                PackedRows(*keys[0]),
                PackedRows(*values[0]),
                group_size=self.group_size,
                bits=self.bits,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        return quantized_attention(
            q,
            [PackedRows(*rows) for rows in keys],
            [PackedRows(*rows) for rows in values],
            group_size=self.group_size,
            bits=self.bits,
            scale=scale,
            window=window,
            keep=keep,
            softcap=softcap,
            sinks=sinks,
        )
