"""The cache of a layer that sees a window: memory for the window, not the context."""

from __future__ import annotations

import mlx.core as mx

from ..errors import ParameterError, whole_number
from ..kernels import causal_mask, check_attention
from ..memory import SLACK, rotating_tokens
from .base import Held, Layout, Mask, check_pair, refuse_mask, refuse_rewind
from .buffer import RowBuffer
from .format import KvFormat


class RotatingKvCache:
    """The first `keep` tokens and the newest `window`, in bounded buffers.

    A query sees the newest `window` keys, itself included, and the first `keep` (Xiao
    et al. 2023). Rows lie in the order of their positions: they are appended in place,
    and when the buffer is full (once in 256 tokens or more) those still needed are
    moved to its front. So nothing has to be unrolled, as in a ring.

    64 tokens beyond the window stay, so that rewinding as many is exact, and what the
    last append stored can always be taken back. A rewind further than what is held is
    refused. An append of many tokens makes the buffer larger until the next one.
    """

    def __init__(
        self,
        window: int,
        keep: int = 0,
        *,
        bits: int | None = None,
        group_size: int | None = None,
        reserve: int = 0,
    ) -> None:
        """bits: None keeps the numbers as they are, 8 and 4 pack them."""
        self.window = whole_number("window", window, least=1)
        self.keep = whole_number("keep", keep, least=0)
        self.reserve = whole_number("reserve", reserve, least=0)
        self.format = KvFormat(bits, group_size)
        self.keys, self.values = RowBuffer(self.format), RowBuffer(self.format)
        self.offset = 0
        self._rows = 0  # held: min(keep, offset) kept, then the newest

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for array in self.state)

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for mx.eval."""
        return [*self.keys.rows, *self.values.rows]

    @property
    def layout(self) -> Layout:
        """Rotating, with its window."""
        bits = self.format.bits
        group_size = None if bits is None else self.format.group_size
        return Layout("rotating", self.window, self.keep, bits, group_size)

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
        """Append k and v [B, Hkv, S, D], then attend with q [B, H, S, D].

        window: None, or this cache's own where it keeps no first tokens; with another
        one, ParameterError, nothing changed.
        """
        check_attention(q.shape[1], window, softcap, sinks)
        if window is not None and (window != self.window or self.keep):
            kept = f" and the first {self.keep} tokens" if self.keep else ""
            raise ParameterError(
                f"the layer sees {window} tokens, but its cache keeps {self.window}"
                f"{kept}"
            )
        first = self._append(k, v, q)
        return self.format.attend(
            q,
            [self.keys.view(first, self._rows)],
            [self.values.view(first, self._rows)],
            scale=scale,
            window=self.window,
            keep=self.keep,
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
        """Append; return (keys, values, how many, mask) as seen by the new tokens.

        keys and values: [B, Hkv, n, D], in order of position. mask: None if all of them
        are seen by the one query, else bool [S, n], which takes the place of None and
        "causal"; a mask of your own is refused, since n is not known beforehand.
        """
        refuse_mask(mask, mask_length, key)
        first = self._append(key, value)
        length = key.shape[2]
        count = self._rows - first
        keys = self.format.decode(self.keys.view(first, self._rows))
        values = self.format.decode(self.values.view(first, self._rows))
        if length == 1 and count <= self.window:
            return keys, values, count, None
        return (
            keys,
            values,
            count,
            causal_mask(length, count, self.window, self.keep),
        )

    def check_rewind(self, n: int) -> None:
        """Raise ParameterError if what would be seen after it is gone."""
        refuse_rewind(n, self.offset)
        left = self.offset - n
        needed = min(left, self.keep + self.window - 1)
        if left > self.keep and self._rows - n < needed:
            raise ParameterError(
                f"cannot rewind {n} tokens of a rotating cache at {self.offset}: the "
                f"window of {self.window} before them has been overwritten; rewind all "
                f"{self.offset} and compute them anew"
            )

    def rewind(self, n: int) -> None:
        """Forget the newest n tokens. Raises as check_rewind, nothing changed."""
        self.check_rewind(n)
        left = self.offset - n
        self._rows, self.offset = left if left <= self.keep else self._rows - n, left

    def held(self) -> Held:
        """The tokens held: the kept ones, then the newest."""
        rows = self._rows
        return Held(self.keys.view(0, rows), self.values.view(0, rows), self.offset)

    def restore(self, held: Held, head_dim: int) -> None:
        """Put back what a cache of this kind held. Only on an empty cache."""
        if held.offset:
            self._rows = held.keys[0].shape[2]
            capacity = max(self._rows, self._bound(held.offset))
            self.keys.restore(held.keys, head_dim, capacity)
            self.values.restore(held.values, head_dim, capacity)
        self.offset = held.offset

    def _bound(self, tokens: int) -> int:
        return rotating_tokens(max(tokens, self.reserve), self.window, self.keep)

    def _append(self, key: mx.array, value: mx.array, q: mx.array | None = None) -> int:
        """Store the new tokens; returns the first row that they see."""
        stored = self.keys.shape, self.values.shape
        check_pair(key, value, stored, q, self.keys.dtype)
        if self.keys.shape is None:
            self.format.check(key.shape[3])
            self.format.check(value.shape[3])
        new = key.shape[2]
        rows = self._rows
        # no bound can be passed before the rows are as many as the tokens
        capacity = self._bound(rows + new)
        if rows + new > capacity:
            kept = min(self.keep, rows)
            newest = min(rows - kept, self.window - 1 + SLACK)
            ranges = [(0, kept), (rows - newest, rows)]
            rows = kept + newest
            capacity = max(capacity, rows + new)
            keys = self.keys.rebuilt(ranges, capacity)
            values = self.values.rebuilt(ranges, capacity)
            # together, or Ctrl-C between them would leave the layer in pieces
            self.keys.rows, self.values.rows, self._rows = keys, values, rows
        self.keys.write(key, rows, capacity)
        self.values.write(value, rows, capacity)
        self._rows, self.offset = rows + new, self.offset + new
        if self.keep:
            return 0
        return max(0, self._rows - new - self.window + 1)
