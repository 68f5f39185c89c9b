"""Where a step's rows go and what they see, as the arrays that kernels read."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

from .format import Rows

if TYPE_CHECKING:
    from .pool import PagePool
    from .table import HeldPages, PageTable

# Tables are of so many rows and columns at least (kernels.paged_attention asks for 8
# elements), and the columns a power of two: few shapes come up.
_ROWS, _WIDTH = 2, 4


class Append(NamedTuple):
    """Rows of one request: its tokens start .. start + rows, whose pages it has."""

    table: PageTable
    start: int
    rows: int


@dataclass(frozen=True)
class PageIndex:
    """Of some requests' rows, for the layers of one window.

    slots: int32 [N], where each row is written. table: int32 [S, width], and sequences:
    int32 [S, 4]: see kernels.paged_attention. most_rows: of a request.
    """

    pool: PagePool
    slots: mx.array
    table: mx.array
    sequences: mx.array
    most_rows: int

    @functools.cached_property
    def places(self) -> Rows:
        """The slots as PagePool.write_at takes them, made once for all layers."""
        return self.pool.places(self.slots)


# For each group, the pages that the last table was made of, and the table.
Tables = dict[int, tuple[list[object], mx.array]]


def page_index(
    pool: PagePool,
    group: int,
    appends: Sequence[Append],
    read: int,
    known: Tables | None = None,
) -> PageIndex:
    """The index of the rows of `appends`; only the first `read` of them are read by it.

    Their pages are there, and the rows follow each other in the order of the appends.
    known: kept from step to step: a table is made when pages come or go.
    """
    held = [append.table.held[group] for append in appends]
    size, slots = pool.page_size, list[int]()
    sequences = [(0, 0, 0, 0)] * max(read, _ROWS)
    for i, ((table, start, rows), own) in enumerate(zip(appends, held, strict=True)):
        if i < read:
            sequences[i] = start + rows, len(slots), rows, own.dropped
        if rows == 1:  # (in Python: NumPy costs a decoding step more)
            page, place = divmod(start, size)
            slots.append(own.pages[page - own.dropped] * size + place)
        else:
            for first, stop in table.slots(group, start, start + rows):
                slots.extend(range(first, stop))
    most = max([rows for _, _, rows in appends[:read]], default=1)
    where = mx.array(slots, dtype=mx.int32)
    pages = _table(group, held[:read], {} if known is None else known)
    seen = mx.array(sequences, dtype=mx.int32)
    return PageIndex(pool, where, pages, seen, most)


def _table(group: int, held: Sequence[HeldPages], known: Tables) -> mx.array:
    before, table = known.get(group, ([], None))
    same = len(before) == len(held) and all(map(operator.is_, before, held))
    if table is not None and same:
        return table
    widest = max([_WIDTH, *(len(own.pages) for own in held)])
    numbers = np.zeros(
        (max(len(held), _ROWS), 1 << (widest - 1).bit_length()), np.int32
    )
    for row, own in zip(numbers, held, strict=False):
        row[: len(own.pages)] = own.pages
    table = mx.array(numbers)
    known[group] = list(held), table
    return table
