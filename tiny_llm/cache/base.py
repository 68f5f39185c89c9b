"""What every cache layout offers to a model, for one layer."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from ..kernels import attention

Mask = mx.array | str | None


class KvCache(Protocol):
    """Keys and values of one layer: appended to, attended over, rewound.

    key, value: [B, Hkv, S, D]; q: [B, H, S, D].
    """

    @property
    def offset(self) -> int:
        """Tokens stored."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated, those held in reserve included."""
        ...

    @property
    def state(self) -> list[mx.array]:
        """The arrays to evaluate when a step's outputs are not read."""
        ...

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Append k and v, then attend; as kernels.attention. Returns [B, H, S, D]."""
        ...

    def update_and_fetch(
        self,
        key: mx.array,
        value: mx.array,
        mask_length: int | None = None,
        mask: Mask = None,
    ) -> tuple[mx.array, mx.array, int, Mask]:
        """Append, and return (all keys, all values, tokens stored, mask).

        For people who bring their own attention. mask_length: the number of queries
        the mask is for; layouts that need no mask of their own hand `mask` back.
        """
        ...

    def rewind(self, n: int) -> None:
        """Forget the newest n tokens. Raises ParameterError, state untouched."""
        ...


class NoCache:
    """Stands in where a model is called without a cache: nothing is kept."""

    offset = 0
    nbytes = 0

    @property
    def state(self) -> list[mx.array]:
        """Nothing."""
        return []

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Causal attention of the tokens at hand among themselves."""
        return attention(
            q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks
        )

    def update_and_fetch(
        self,
        key: mx.array,
        value: mx.array,
        mask_length: int | None = None,
        mask: Mask = None,
    ) -> tuple[mx.array, mx.array, int, Mask]:
        """What came in."""
        return key, value, key.shape[2], mask

    def rewind(self, n: int) -> None:
        """Nothing to forget."""
