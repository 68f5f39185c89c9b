"""What one step of a batch writes and reads, worked out once for all layers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .lanes import Lane, group_lanes
from .pool import PagePool, Slots
from .table import PageTable


class Append(NamedTuple):
    """Rows of one request: its tokens start .. start + rows, whose pages it has."""

    table: PageTable
    start: int
    rows: int


class Chunk(NamedTuple):
    """Rows of one request that are read together: where they go and what they see."""

    rows: slice
    write: list[Slots]
    read: list[Slots]


class Together(NamedTuple):
    """Lanes of one view: so many from slot `start` on, `stride` slots apart.

    length: slots read of each; mask: float [lanes, length], 0 where a lane ends later,
    or None; before: runs that all see first. gathered: instead, slots [lanes, length].
    """

    lanes: int
    start: int
    stride: int
    length: int
    mask: mx.array | None
    before: tuple[Slots, ...]
    gathered: mx.array | None


class GroupPlan(NamedTuple):
    """For the layers of one window.

    slots: int [n], where the n lone rows go; together: who is read with whom, in the
    order `order` of the rows (None: as they come), undone by `back`. singles: instead,
    for formats that are not read together. chunks: the requests with several rows.
    clear: slots that will be read and were never written.
    """

    slots: mx.array | None
    together: list[Together]
    singles: list[list[Slots]]
    order: mx.array | None
    back: mx.array | None
    chunks: list[Chunk]
    clear: list[Slots]


class StepPlan:
    """The rows of a step: lone ones (decoding) first, then those of longer appends.

    order: the appends' indices in the order of the rows, chosen so that those which are
    read together are neighbours.
    """

    def __init__(
        self,
        pool: PagePool,
        appends: Sequence[Append],
        cleared: weakref.WeakKeyDictionary[PageTable, list[object]],
        *,
        views: bool,
        keep_order: bool = False,
    ) -> None:
        """views: read pages where they lie, in views; else gather them.

        cleared: per table, for which of its lists of pages the end is clean already.
        keep_order: the rows come as the appends do, each append of as many rows.
        """
        self.pool, self.views = pool, views
        self._cleared = cleared
        lone = [i for i, append in enumerate(appends) if append.rows == 1]
        rest = [i for i, append in enumerate(appends) if append.rows > 1]
        assert not keep_order or not lone or not rest
        self.order = lone + rest
        self._together = views and pool.format.bits is None
        if lone and not keep_order and self._together:
            lanes = self._lanes(0, [appends[i] for i in lone])
            self.order = [lone[lane.row] for g in group_lanes(lanes) for lane in g]
            self.order += rest
        self.appends = [appends[i] for i in self.order]
        self.lone = len(lone)
        self.rows = sum(append.rows for append in appends)
        self.groups = [self._plan(group) for group in range(len(pool.windows))]

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
        lone = self.appends[: self.lone]
        where = [_run(append.table, group, append.start)[0] for append in lone]
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
        elif lone and not self.views and self.pool.format.bits is None:
            together = [_gathered([self._seen(group, append) for append in lone])]
        else:
            singles = [self._seen(group, append) for append in lone]
        chunks, row = [], self.lone
        for append in self.appends[self.lone :]:
            stop = append.start + append.rows
            write = append.table.slots(group, append.start, stop)
            rows_ = slice(row, row + append.rows)
            chunks.append(Chunk(rows_, write, self._seen(group, append)))
            row += append.rows
        slots = mx.array(where) if where else None
        return GroupPlan(slots, together, singles, order, back, chunks, clear)

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
    return Together(
        len(lanes), first.start, stride, length, mask, first.before, gathered=None
    )


def _gathered(seen: Sequence[list[Slots]]) -> Together:
    """All rows with the slots that each sees; what is masked is a slot of their own."""
    slots = [np.concatenate([np.arange(a, b) for a, b in runs]) for runs in seen]
    length = max(len(own) for own in slots)
    index = np.stack(
        [np.pad(own, (0, length - len(own)), constant_values=own[0]) for own in slots]
    )
    mask = None
    lengths = np.array([[len(own)] for own in slots])
    if (lengths < length).any():
        mask = mx.array(
            np.where(np.arange(length) < lengths, 0.0, -np.inf).astype(np.float32)
        )
    return Together(len(slots), 0, 0, length, mask, (), mx.array(index))
