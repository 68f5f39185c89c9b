"""The dense cache of one request (or of rows of equal length)."""

import mlx.core as mx

from ..errors import ParameterError, whole_number
from ..kernels import attention
from .base import Mask


class TinyKvFullCache:
    """One layer's keys and values in two contiguous buffers, written in place.

    The buffers grow in steps of 256 tokens: appending one token costs the same at 8k
    of context as at 256, except when a step is full and the buffers are copied to
    larger ones. `reserve` tokens are allocated at once when the final length is known.
    """

    step = 256

    def __init__(self, reserve: int = 0) -> None:
        """reserve: tokens to make room for when the first ones come."""
        self.offset = 0
        self.reserve = whole_number("reserve", reserve, least=0)
        self.keys: mx.array | None = None  # [B, Hkv, capacity, D]
        self.values: mx.array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the reserve included."""
        return sum(buffer.nbytes for buffer in self.state)

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for mx.eval."""
        return [b for b in (self.keys, self.values) if b is not None]

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
        """Append k and v [B, Hkv, S, D], then attend with q [B, H, S, D]."""
        keys, values, _, _ = self.update_and_fetch(k, v)
        return attention(
            q, keys, values, scale=scale, window=window, softcap=softcap, sinks=sinks
        )

    def update_and_fetch(
        self,
        key: mx.array,
        value: mx.array,
        mask_length: int | None = None,
        mask: Mask = None,
    ) -> tuple[mx.array, mx.array, int, Mask]:
        """Append key and value [B, Hkv, S, D]; return (keys, values, stored, mask).

        keys and values are [B, Hkv, stored, D] views: whoever keeps one makes the next
        call copy the buffer. All rows have the same length, so the mask is handed back
        as it came. Raises ParameterError if the shapes do not fit what is stored.
        """
        self._check(key, value)
        end = self.offset + key.shape[2]
        self.keys = _write(self.keys, key, self.offset, self._capacity(end))
        self.values = _write(self.values, value, self.offset, self._capacity(end))
        self.offset = end
        return self.keys[:, :, :end], self.values[:, :, :end], end, mask

    def rewind(self, n: int) -> None:
        """Forget the newest n tokens; their room is kept. Raises ParameterError."""
        if not 0 <= n <= self.offset:
            raise ParameterError(
                f"cannot rewind {n} tokens of a cache that holds {self.offset}"
            )
        self.offset -= n

    def _capacity(self, tokens: int) -> int:
        return -(-max(tokens, self.reserve) // self.step) * self.step

    def _check(self, key: mx.array, value: mx.array) -> None:
        if key.ndim != 4 or key.shape[:3] != value.shape[:3]:
            raise ParameterError(
                f"key {key.shape} and value {value.shape} must be [B, Hkv, S, D] alike"
            )
        stored = self.keys
        if stored is not None and (
            key.shape[:2] != stored.shape[:2] or key.shape[3] != stored.shape[3]
        ):
            raise ParameterError(
                f"key {key.shape} does not fit a cache of {stored.shape}"
            )


def _write(
    buffer: mx.array | None, new: mx.array, start: int, capacity: int
) -> mx.array:
    """The buffer with `new` [B, Hkv, S, D] at `start`, grown to `capacity` if need be.

    In place when nobody else holds the buffer: MLX hands its memory on.
    """
    batch, heads, length, dim = new.shape
    if buffer is None:
        buffer = mx.zeros((batch, heads, capacity, dim), dtype=new.dtype)
    elif start + length > buffer.shape[2]:
        room = mx.zeros((batch, heads, capacity - start, dim), dtype=buffer.dtype)
        buffer = mx.concatenate([buffer[:, :, :start], room], axis=2)
    buffer[:, :, start : start + length] = new
    return buffer
