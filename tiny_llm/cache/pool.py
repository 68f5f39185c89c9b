"""The memory that all paged requests share: one array per layer, cut into pages."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..errors import OutOfPagesError, ParameterError, whole_number
from ..memory import (
    PAGE_SIZE,
    KvShape,
    checked_packing,
    largest,
    page_count,
    physical_memory,
)
from .format import KvFormat, Rows
from .pages import PageAllocator

MAX_APPEND = 2048  # tokens at a time, unless told otherwise
_MOST_PAGES = 1 << 24  # more would only take long to count

Slots = tuple[int, int]  # neighbouring rows of the pool, start to stop


class PagePool:
    """Pages of `page_size` tokens for every layer of a model, bounded in number.

    Per layer one array [2 * Hkv, slots, ...] in a format, the heads of K and then those
    of V; page p is the slots p * page_size and on. Layers of the same window form a
    group: they share page numbers, and a request has one list of pages for each group.
    A model whose layers are alike has one group.
    """

    def __init__(
        self,
        shape: KvShape,
        dtype: mx.Dtype,
        *,
        tokens: int | None = None,
        memory: int | None = None,
        page_size: int = PAGE_SIZE,
        bits: int | None = None,
        group_size: int | None = None,
        max_requests: int | None = None,
        max_append: int | None = None,
        grows: bool = False,
    ) -> None:
        """The size: room for `tokens` tokens, or at most `memory` bytes.

        bits, group_size: packed as QuantizedKvCache does. max_requests: so many
        requests at once, appending max_append tokens at most (2048 unless told
        otherwise), bound the pages of layers with a window; without it they get as
        many as the others. grows: memory is allocated when pages are first used (one
        layer is copied at a time), else all of it now.
        Raises ParameterError.
        """
        self.shape, self.dtype = shape, dtype
        self.tables: weakref.WeakSet[Any] = weakref.WeakSet()  # PageTables
        if dtype.size != shape.element_bytes:
            raise ParameterError(
                f"{dtype} takes {dtype.size} bytes a number, but the shape counts with "
                f"{shape.element_bytes}"
            )
        self.page_size = whole_number("page_size", page_size, least=1)
        packing = checked_packing(bits, group_size, shape.head_dim)
        self.format = KvFormat() if packing is None else KvFormat(*packing)
        append = whole_number(
            "max_append", MAX_APPEND if max_append is None else max_append, least=1
        )
        if max_requests is not None:
            max_requests = whole_number("max_requests", max_requests, least=1)
        elif max_append is not None:
            raise ParameterError(
                f"max_append={max_append} has no effect without max_requests="
            )
        self.max_requests, self.max_append = max_requests, append
        if (tokens is None) == (memory is None):
            raise ParameterError("give the pool's size as one of tokens= and memory=")
        self.windows = sorted(set(shape.windows), key=lambda w: (w is not None, w or 0))
        self.group_of = [self.windows.index(window) for window in shape.windows]
        # of a page in one layer
        page_bytes = self.page_size * shape.row_bytes(*(packing or ()))
        layers = [self.group_of.count(group) for group in range(len(self.windows))]

        def counts(pages: int) -> list[int]:
            """Pages of each group, `pages` of them where nothing bounds them."""
            counted = []
            for window in self.windows:
                most = pages
                if window is not None and max_requests is not None:
                    each = page_count(1 << 60, self.page_size, window, append)
                    most = min(pages, each * max_requests)
                counted.append(most)
            return counted

        def cost(pages: int) -> int:
            pairs = zip(counts(pages), layers, strict=True)
            return sum(n * layer * page_bytes for n, layer in pairs)

        if tokens is not None:
            pages = page_count(whole_number("tokens", tokens, least=1), self.page_size)
        else:
            limit = whole_number("memory", memory, least=1)
            pages = largest(limit, cost)
            if pages < 1:
                raise ParameterError(
                    f"memory is {limit} bytes, but a page of {self.page_size} tokens "
                    f"takes {cost(1)}"
                )
        if cost(pages) > physical_memory() or max(counts(pages)) > _MOST_PAGES:
            raise ParameterError(
                f"a pool of {cost(pages)} bytes does not fit into the machine's "
                f"{physical_memory()}"
            )
        self.page_bytes, self.most_bytes, self.grows = page_bytes, cost(pages), grows
        self.allocators = [
            PageAllocator(count, compact=grows) for count in counts(pages)
        ]
        self.rows: list[Rows] = []
        self.renew()

    def renew(self) -> None:
        """Allocate the arrays anew, all 0."""
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        sample = self.format.encode(mx.zeros((1, dim), dtype=self.dtype))
        if not self.grows:
            self.rows = []  # before the new ones come; those that grow begin empty
        made: list[Rows] = []
        for group in self.group_of:
            slots = 0 if self.grows else self._slots(group)
            shapes = [(2 * heads, slots, part.shape[-1]) for part in sample]
            pairs = zip(shapes, sample, strict=True)
            made.append(tuple(mx.zeros(shape, x.dtype) for shape, x in pairs))
        mx.eval(made)
        self.rows = made

    def back(
        self, group: int, page: int, *, ahead: int = 0, limit: int | None = None
    ) -> bool:
        """Have memory for the pages up to `page`, and `ahead` more if it is not there.

        limit: bytes after which the layers left wait for the next call. False: so it
        was. An array grows by half at least: in all, growing costs about two copies.
        """
        size = self.page_size
        for layer, own in enumerate(self.group_of):
            rows = self.rows[layer]
            have = rows[0].shape[1] // size
            if own != group or have > page:
                continue
            if limit is not None and limit <= 0:
                return False
            count = self.allocators[group].count
            pages = min(count, max(page + 1 + ahead, have * 3 // 2))
            more = [(0, 0), (0, (pages - have) * size), (0, 0)]
            larger = tuple(mx.pad(x, more) for x in rows)
            mx.eval(larger)
            self.rows[layer] = larger
            if limit is not None:
                limit -= sum(x.nbytes for x in larger)
        return True

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, free pages included; most_bytes at most."""
        return sum(array.nbytes for rows in self.rows for array in rows)

    @property
    def pages_in_use(self) -> int:
        """Pages that somebody holds, over all groups."""
        return sum(a.count - a.free for a in self.allocators)

    def write(
        self, layer: int, slots: Sequence[Slots], k: mx.array, v: mx.array
    ) -> None:
        """Store k and v [Hkv, S, D] of one layer into S slots, in place."""
        self.write_rows(
            layer, slots, self.format.encode(mx.concatenate([k, v], axis=0))
        )

    def write_rows(self, layer: int, slots: Sequence[Slots], rows: Rows) -> None:
        """Store rows [2 * Hkv, S, ...] in the pool's format into S slots."""
        for array, part in zip(self.rows[layer], rows, strict=True):
            if len(slots) == 1:
                start, stop = slots[0]
                array[:, start:stop] = part
            else:
                array[:, _indices(slots)] = part

    def places(self, slots: mx.array) -> Rows:
        """Slots int [n] as write_at takes them, for all layers alike."""
        shape = 2 * self.shape.kv_heads, slots.shape[0]
        return tuple(
            mx.broadcast_to(slots[:, None], (*shape, array.shape[2]))
            for array in self.rows[0]
        )

    def write_at(self, layer: int, places: Rows, rows: Rows) -> None:
        """Store rows [2 * Hkv, n, ...] in the pool's format at `places` of slots.

        In place, as an indexed assignment would be, but at half its time and a fifth of
        its operations.
        """
        arrays = zip(self.rows[layer], places, rows, strict=True)
        self.rows[layer] = tuple(
            mx.put_along_axis(array, where, part, axis=1)
            for array, where, part in arrays
        )

    def clear(self, layer: int, slots: Sequence[Slots]) -> None:
        """Set slots to 0."""
        for array in self.rows[layer]:
            for start, stop in slots:
                array[:, start:stop] = 0

    def read(self, layer: int, slots: Slots) -> tuple[Rows, Rows]:
        """K and V [1, Hkv, S, ...] of neighbouring slots, as views."""
        heads, (start, stop) = self.shape.kv_heads, slots
        rows = self.rows[layer]
        keys = tuple(array[None, :heads, start:stop] for array in rows)
        values = tuple(array[None, heads:, start:stop] for array in rows)
        return keys, values

    def lanes(
        self, layer: int, start: int, stride: int, count: int, length: int
    ) -> tuple[mx.array, mx.array]:
        """K and V [count, Hkv, length, D] from slots at equal distances, as views.

        Only of numbers, not of packed rows. Request i is read from start + i * stride.
        """
        (rows,) = self.rows[layer]
        heads = self.shape.kv_heads
        _, slots, dim = rows.shape
        shape = (count, heads, length, dim)
        strides = (stride * dim, slots * dim, dim, 1)
        first = start * dim
        keys = mx.as_strided(rows, shape, strides, first)
        return keys, mx.as_strided(rows, shape, strides, first + heads * slots * dim)

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy what one page holds to another, in all layers of a group."""
        size = self.page_size
        layers = [layer for layer, own in enumerate(self.group_of) if own == group]
        arrays = [array for layer in layers for array in self.rows[layer]]
        first, last = source * size, (source + 1) * size
        pages = [mx.contiguous(array[:, first:last]) for array in arrays]
        # a copy still to be made would hold the whole array, and the write copy it
        mx.eval(pages)
        for array, page in zip(arrays, pages, strict=True):
            array[:, target * size : (target + 1) * size] = page

    def refuse(self, group: int, needed: int, free: int) -> None:
        """Raise OutOfPagesError: the numbers, and what would help."""
        window = self.windows[group]
        layers = "full attention" if window is None else f"window {window}"
        where = "" if len(self.windows) == 1 else f" of the layers with {layers}"
        remedy = "free other requests, or make a larger pool"
        if window is not None and self.max_requests is not None:
            remedy += (
                f" (it is made for max_requests={self.max_requests} that append "
                f"max_append={self.max_append} tokens at a time)"
            )
        total = self.allocators[group].count
        raise OutOfPagesError(
            f"{needed} more pages of {self.page_size} tokens are needed, but of the "
            f"pool's {total} pages{where} {free} are free; {remedy}"
        )

    def recount(self) -> None:
        """Do the books anew from the tables, after work on them was cut off."""
        tables = list(self.tables)
        for group, allocator in enumerate(self.allocators):
            allocator.recount(table.held[group].pages for table in tables)

    def check(self) -> None:
        """Raise AssertionError unless the books of all groups agree."""
        for allocator in self.allocators:
            allocator.check()

    def _slots(self, group: int) -> int:
        return self.allocators[group].count * self.page_size


def _indices(slots: Sequence[Slots]) -> mx.array:
    return mx.concatenate([mx.arange(start, stop) for start, stop in slots])
