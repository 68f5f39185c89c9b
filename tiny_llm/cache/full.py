"""The dense cache of one request (or of rows of equal length)."""

import mlx.core as mx

from ..errors import ParameterError, whole_number
from ..kernels import check_attention
from ..memory import STEP, buffer_tokens
from .base import Held, Layout, Mask, check_pair, refuse_rewind
from .buffer import RowBuffer
from .format import KvFormat


class TinyKvFullCache:
    """One layer's keys and values in two contiguous buffers, written in place.

    The buffers grow in steps of 256 tokens: appending one token costs the same at 8k
    of context as at 256, except when a step is full and the buffers are copied to
    larger ones. `reserve` tokens are allocated at once when the final length is known.
    """

    step = STEP

    def __init__(self, reserve: int = 0) -> None:
        """reserve: tokens to make room for when the first ones come."""
        self.offset = 0
        self.reserve = whole_number("reserve", reserve, least=0)
        self._hold(KvFormat())

    def _hold(self, fmt: KvFormat) -> None:
        self.format = fmt
        self.keys, self.values = RowBuffer(fmt), RowBuffer(fmt)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the reserve included."""
        return sum(array.nbytes for array in self.state)

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for mx.eval."""
        return [*self.keys.rows, *self.values.rows]

    @property
    def layout(self) -> Layout:
        """Dense, or quantized with bits and group size."""
        if self.format.bits is None:
            return Layout("dense")
        return Layout(
            "quantized", bits=self.format.bits, group_size=self.format.group_size
        )

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
        check_attention(q.shape[1], window, softcap, sinks)
        end = self._append(k, v, q)
        return self.format.attend(
            q,
            [self.keys.view(0, end)],
            [self.values.view(0, end)],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
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
        end = self._append(key, value)
        keys = self.format.decode(self.keys.view(0, end))
        values = self.format.decode(self.values.view(0, end))
        return keys, values, end, mask

    def check_rewind(self, n: int) -> None:
        """Raise ParameterError unless 0 <= n <= offset."""
        refuse_rewind(n, self.offset)

    def rewind(self, n: int) -> None:
        """Forget the newest n tokens; their room is kept. Raises ParameterError."""
        refuse_rewind(n, self.offset)
        self.offset -= n

    def held(self) -> Held:
        """All tokens, without the room beyond them."""
        end = self.offset
        return Held(self.keys.view(0, end), self.values.view(0, end), end)

    def restore(self, held: Held, head_dim: int) -> None:
        """Put back what a cache of this kind held. Only on an empty cache."""
        if held.offset:
            capacity = buffer_tokens(max(held.offset, self.reserve))
            self.keys.restore(held.keys, head_dim, capacity)
            self.values.restore(held.values, head_dim, capacity)
        self.offset = held.offset

    def _append(self, key: mx.array, value: mx.array, q: mx.array | None = None) -> int:
        stored = self.keys.shape, self.values.shape
        check_pair(key, value, stored, q, self.keys.dtype)
        if stored[0] is None:
            self.format.check(key.shape[3])
            self.format.check(value.shape[3])
        end = self.offset + key.shape[2]
        capacity = buffer_tokens(max(end, self.reserve))
        self.keys.write(key, self.offset, capacity)
        self.values.write(value, self.offset, capacity)
        self.offset = end
        return end


class QuantizedKvCache(TinyKvFullCache):
    """The dense cache with every token packed in MLX's affine groups.

    Each token is packed as it is written, and read so by its own query too.
    """

    def __init__(
        self, bits: int = 8, group_size: int | None = None, reserve: int = 0
    ) -> None:
        """bits: 8 or 4. group_size: 64 (unless told otherwise) or 32."""
        super().__init__(reserve)
        if bits is None:
            raise ParameterError("bits is None; a quantized cache needs 8 or 4")
        self._hold(KvFormat(bits, group_size))
