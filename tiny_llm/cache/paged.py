"""The cache of one request whose tokens lie in the pages of a shared pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..errors import ParameterError
from ..kernels import MOST_ROWS, causal_mask, check_attention, reads_pages
from .base import Held, Layout, Mask, check_pair, refuse_mask
from .format import Rows
from .rows import attend_by_index
from .table import PageTable


class PagedKvCache:
    """One layer of one request: writes to and reads from the pages of its table.

    The entries of all layers share the table. Tokens in neighbouring pages are read as
    one view; a request in several runs is read run by run (decoding) or copied together
    (longer appends). One request per cache: key and value are [1, Hkv, S, D].
    """

    def __init__(self, table: PageTable, layer: int) -> None:
        self.table, self.layer = table, layer
        self.pool = table.pool
        self.group = self.pool.group_of[layer]
        self.window = self.pool.windows[self.group]

    @property
    def offset(self) -> int:
        """Tokens appended and not rewound."""
        return self.table.lengths[self.layer]

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that the request holds in this layer, shared ones too."""
        pages = len(self.table.held[self.group].pages)
        return self.pool.page_bytes * pages

    @property
    def state(self) -> list[mx.array]:
        """The pool's arrays of this layer, for mx.eval."""
        return list(self.pool.rows[self.layer])

    @property
    def layout(self) -> Layout:
        """Paged, with the pool's page size."""
        bits = self.pool.format.bits
        group_size = None if bits is None else self.pool.format.group_size
        return Layout("paged", self.window, 0, bits, group_size, self.pool.page_size)

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
        """Append k and v [1, Hkv, S, D], then attend with q [1, H, S, D].

        window: that of the pool for this layer, or any if the pool has none. Raises
        ParameterError or OutOfPagesError, nothing changed.
        """
        check_attention(q.shape[1], window, softcap, sinks)
        if self.window is not None and window != self.window:
            raise ParameterError(
                f"the layer sees a window of {window}, but its pages are kept for "
                f"{self.window} tokens"
            )
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
        if k.shape[2] <= MOST_ROWS and reads_pages():
            return self._attend_by_index(q, k, v, window, options)
        keys, values = self._append(k, v, window, q)
        return self.pool.format.attend(q, keys, values, window=window, **options)

    def _attend_by_index(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        window: int | None,
        options: dict[str, Any],
    ) -> mx.array:
        """As attend; every token is a row [N, heads, 1, D] for the kernels."""
        start, stop = self._prepare(k, v, q)
        index = self.table.index(self.group, start, stop)
        rows = self.pool.format.encode_rows(k.swapaxes(0, 2), v.swapaxes(0, 2))
        self.pool.write_at(self.layer, index.places, rows)
        self.table.lengths[self.layer] = stop
        asked = q.swapaxes(0, 2)
        out = attend_by_index(self.pool, self.layer, index, asked, window, options)
        return out.swapaxes(0, 2)

    def update_and_fetch(
        self,
        key: mx.array,
        value: mx.array,
        mask_length: int | None = None,
        mask: Mask = None,
    ) -> tuple[mx.array, mx.array, int, Mask]:
        """Append; return (keys, values, how many, mask) as seen by the new tokens.

        keys and values: [1, Hkv, n, D]. Without a window the mask is handed back; with
        one it is None for one token, else bool [S, n], and yours must be None or
        "causal". Whoever keeps what comes back makes the next append copy the pool's
        array of the layer.
        """
        if self.window is not None:
            refuse_mask(mask, mask_length, key)
        keys, values = self._append(key, value, self.window)
        decode = self.pool.format.decode
        every_key = mx.concatenate([decode(rows) for rows in keys], axis=2)
        every_value = mx.concatenate([decode(rows) for rows in values], axis=2)
        count = every_key.shape[2]
        if self.window is not None:
            length = key.shape[2]
            mask = causal_mask(length, count, self.window) if length > 1 else None
        return every_key, every_value, count, mask

    def check_rewind(self, n: int) -> None:
        """Raise ParameterError if the newest n tokens cannot be forgotten."""
        self.table.check_rewind(self.layer, n)

    def rewind(self, n: int) -> None:
        """Forget the newest n tokens; pages that no layer needs are free then."""
        self.table.rewind(self.layer, n)

    def held(self) -> Held:
        """The tokens in the pages held."""
        first = self.table.held[self.group].dropped * self.pool.page_size
        keys, values = self._read(first)
        return Held(_join(keys), _join(values), self.offset)

    def restore(self, held: Held, head_dim: int) -> None:
        """Put back what a paged cache of the same page size held."""
        if held.offset:
            start = held.offset - held.keys[0].shape[2]
            self.table.restore(self.layer, start, held.offset)
            rows = tuple(
                mx.concatenate([k[0], v[0]], axis=0)
                for k, v in zip(held.keys, held.values, strict=True)
            )
            slots = self.table.slots(self.group, start, held.offset)
            self.pool.write_rows(self.layer, slots, rows)

    def _append(
        self,
        key: mx.array,
        value: mx.array,
        window: int | None,
        q: mx.array | None = None,
    ) -> tuple[list[Rows], list[Rows]]:
        """Store the new tokens; returns what they see, in runs."""
        start, stop = self._prepare(key, value, q)
        slots = self.table.slots(self.group, start, stop)
        self.pool.write(self.layer, slots, key[0], value[0])
        self.table.lengths[self.layer] = stop
        return self._read(0 if window is None else max(0, start - window + 1))

    def _prepare(
        self, key: mx.array, value: mx.array, q: mx.array | None
    ) -> tuple[int, int]:
        """Have pages for the new tokens; returns where they begin and end."""
        dims = (1, self.pool.shape.kv_heads, self.pool.shape.head_dim)
        check_pair(key, value, (dims, dims), q, self.pool.dtype)
        start = self.offset
        stop = start + key.shape[2]
        if start < self.table.held[self.group].dropped * self.pool.page_size:
            raise ParameterError(
                f"layer {self.layer} was rewound to {start} tokens and its neighbours "
                f"were not: rewind all layers alike"
            )
        self.table.prepare(start, stop)
        return start, stop

    def _read(self, first: int) -> tuple[list[Rows], list[Rows]]:
        keys, values = [], []
        for slots in self.table.slots(self.group, first, self.offset):
            k, v = self.pool.read(self.layer, slots)
            keys.append(k)
            values.append(v)
        return keys, values


def paged_cache(table: PageTable) -> list[PagedKvCache]:
    """The entries of all layers over one table."""
    return [PagedKvCache(table, layer) for layer in range(len(table.lengths))]


def fork(cache: Sequence[PagedKvCache]) -> list[PagedKvCache]:
    """Another request that holds the same tokens in the same pages.

    Nothing is copied but, when either goes on, the page that is not full. Raises
    ParameterError for another kind of cache.
    """
    entries = cache if isinstance(cache, Sequence) else ()
    if not entries or not all(isinstance(entry, PagedKvCache) for entry in entries):
        raise ParameterError(
            f"fork needs the entries of a paged cache, got {cache!r:.80}"
        )
    return paged_cache(cache[0].table.fork())


def _join(pieces: Sequence[Rows]) -> Rows:
    return tuple(
        parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=2)
        for parts in zip(*pieces, strict=True)
    )
