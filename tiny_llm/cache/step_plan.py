"""What one step of a batch writes and reads, worked out once for all layers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..kernels import MOST_ROWS
from .lanes import Lane, group_lanes
from .page_index import Append, PageIndex, Tables, page_index
from .pool import PagePool, Slots
from .table import PageTable


class Chunk(NamedTuple):
    """Rows of one request that are read together, and what they see."""

    rows: slice
    read: list[Slots]


class Together(NamedTuple):
    """Lanes of one view: so many from slot `start` on, `stride` slots apart.

    length: slots read of each; mask: float [lanes, length], 0 where a lane ends later,
    or None; before: runs that all see first.
    """

    lanes: int
    start: int
    stride: int
    length: int
    mask: mx.array | None
    before: tuple[Slots, ...]


class GroupPlan(NamedTuple):
    """For the layers of one window.

    pages: where all rows go; without views also what those of short appends see.
    together: the lone rows in views, who is read with whom, in the order `order` of the
    rows (None: as they come), undone by `back`; singles: instead, for formats that are
    not read together. chunks: the requests with several rows that the index does not
    read. clear: slots that will be read and were never written.
    """

    pages: PageIndex
    together: list[Together]
    singles: list[list[Slots]]
    order: mx.array | None
    back: mx.array | None
    chunks: list[Chunk]
    clear: list[Slots]


class StepPlan:
    """The rows of a step: lone ones (decoding) first, then those of longer appends.

    order: the appends' indices in the order of the rows, chosen so that those which are
    read together are neighbours. short: so many rows come first that are read by the
    pages' index; 0 where pages are read in views.
    """

    def __init__(
        self,
        pool: PagePool,
        appends: Sequence[Append],
        cleared: weakref.WeakKeyDictionary[PageTable, list[object]],
        *,
        views: bool,
        keep_order: bool = False,
        tables: Tables | None = None,
    ) -> None:
        """views: read pages where they lie; else by their index, as kernels do.

        cleared: per table, for which of its lists of pages the end is clean already.
        keep_order: the rows come as the appends do, each append of as many rows.
        tables: those of the steps before, to be kept up.
        """
        self.pool, self.views = pool, views
        self._cleared, self._tables = cleared, tables
        self.order = sorted(range(len(appends)), key=lambda i: _kind(appends[i]))
        assert not keep_order or self.order == list(range(len(appends)))
        self.lone = sum(append.rows == 1 for append in appends)
        self._together = views and pool.format.bits is None
        if self.lone and not keep_order and self._together:
            lone, rest = self.order[: self.lone], self.order[self.lone :]
            lanes = self._lanes(0, [appends[i] for i in lone])
            lone = [lone[lane.row] for g in group_lanes(lanes) for lane in g]
            self.order = lone + rest
        self.appends = [appends[i] for i in self.order]
        self.rows = sum(append.rows for append in appends)
        self._indexed = 0 if views else sum(_kind(a) < _LONG for a in appends)
        self.short = sum(append.rows for append in self.appends[: self._indexed])
        self.groups = [self._plan(group) for group in range(len(pool.windows))]

    def with_pages(self, pages: Sequence[PageIndex]) -> StepPlan:
        """The same plan with another index in each group."""
        other = copy.copy(self)
        pairs = zip(self.groups, pages, strict=True)
        other.groups = [group._replace(pages=index) for group, index in pairs]
        return other

    def commit(self) -> None:
        """The tables hold the rows from now on."""
        for table, start, rows in self.appends:
            table.lengths = [start + rows] * len(table.lengths)

    def undo(self) -> None:
        """The tables hold what they held before; nothing was cleared for them.

        Those that were freed in the meantime stay empty.
        """
        for table, start, _ in self.appends:
            if table.length:
                table.lengths = [start] * len(table.lengths)
            self._cleared.pop(table, None)  # that may not have come about

    def _plan(self, group: int) -> GroupPlan:
        pages = page_index(self.pool, group, self.appends, self._indexed, self._tables)
        lone = self.appends[: self.lone] if self.views else []
        order, back = None, None
        together: list[Together] = []
        singles: list[list[Slots]] = []
        clear: list[Slots] = []
        if self._together:
            groups = group_lanes(self._lanes(group, lone))
            rows = [lane.row for lanes in groups for lane in lanes]
            if rows != list(range(len(rows))):
                order, back = mx.array(rows), mx.array(np.argsort(rows))
            together = [_together(lanes) for lanes in groups]
            for lanes in groups:
                longest = max(lane.length for lane in lanes)
                for lane in lanes:
                    if lane.length < longest:
                        clear += self._unclean(group, lone[lane.row], lane)
        else:
            singles = [self._seen(group, append) for append in lone]
        chunks, row = [], self.short or self.lone
        for append in self.appends[self._indexed or self.lone :]:
            rows_ = slice(row, row + append.rows)
            chunks.append(Chunk(rows_, self._seen(group, append)))
            row += append.rows
        return GroupPlan(pages, together, singles, order, back, chunks, clear)

    def _seen(self, group: int, append: Append) -> list[Slots]:
        """The runs of slots that a request's rows see, their own included."""
        window = self.pool.windows[group]
        first = 0 if window is None else max(0, append.start - window + 1)
        return append.table.slots(group, first, append.start + append.rows)

    def _lanes(self, group: int, appends: Sequence[Append]) -> list[Lane]:
        lanes = []
        for row, append in enumerate(appends):
            *before, (start, stop) = self._seen(group, append)
            _, end = _run(append.table, group, append.start)
            lanes.append(Lane(row, tuple(before), start, stop - start, end - start))
        return lanes

    def _unclean(self, group: int, append: Append, lane: Lane) -> list[Slots]:
        """The slots behind a lane, unless they are known to hold finite numbers.

        What is read and masked is multiplied by 0, and 0 * NaN is NaN: pages may have
        been another request's, whatever that left there.
        """
        held: object = append.table.held[group]
        known = self._cleared.setdefault(append.table, [None] * len(self.pool.windows))
        if known[group] is held:
            return []
        known[group] = held
        return [(lane.start + lane.length, lane.start + lane.room)]


_LONG = 2  # the kind of append that the index does not read


def _kind(append: Append) -> int:
    """Lone rows first, then appends that kernels take, then longer ones."""
    return (append.rows > 1) + (append.rows > MOST_ROWS)


def _run(table: PageTable, group: int, token: int) -> Slots:
    """The slot of a token, and where its run of neighbouring pages ends."""
    return table.slots(group, token, 1 << 60)[0]


def _together(lanes: Sequence[Lane]) -> Together:
    length = max(lane.length for lane in lanes)
    mask = None
    if any(lane.length < length for lane in lanes):
        lengths = np.array([[lane.length] for lane in lanes])
        mask = mx.array(
            np.where(np.arange(length) < lengths, 0.0, -np.inf).astype(np.float32)
        )
    stride = lanes[1].start - lanes[0].start if len(lanes) > 1 else 0
    first = lanes[0]
    return Together(len(lanes), first.start, stride, length, mask, first.before)
