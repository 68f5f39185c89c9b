"""One request's pages: which hold its tokens, in the order of the tokens."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from ..errors import OutOfPagesError, ParameterError, whole_number
from ..memory import SLACK
from .base import refuse_rewind
from .pages import PageAllocator
from .pool import PagePool, Slots


class PageTable:
    """The pages of one request, for all layers: a list for each group of the pool.

    Layers append one after the other; the first one to append finds the pages, for all
    groups at once or not at all. A page that is shared is copied before it is written.
    Pages go back when they are rewound, when every layer of their group has left them
    behind its window (but for 64 tokens), and when the table is freed or forgotten.
    """

    def __init__(self, pool: PagePool, reserve: int = 0) -> None:
        """reserve: tokens whose pages are taken with the first ones, side by side."""
        self.pool = pool
        self.reserve = whole_number("reserve", reserve, least=0)
        self.lengths = [0] * len(pool.group_of)  # tokens that each layer holds
        groups = range(len(pool.windows))
        self.pages: list[list[int]] = [[] for _ in groups]
        self.dropped = [0 for _ in groups]  # pages before those, given back
        self._ready = (0, 0)  # tokens that may be written: their pages are our own
        self._runs: dict[tuple[int, int, int], list[Slots]] = {}
        self._end = weakref.finalize(self, _abandon, pool.allocators, self.pages)
        self._end.atexit = False

    @property
    def length(self) -> int:
        """Tokens that any layer holds."""
        return max(self.lengths)

    def prepare(self, start: int, stop: int) -> None:
        """Make the tokens start .. stop writable in all layers.

        Raises OutOfPagesError, nothing changed.
        """
        if self._ready[0] <= start and stop <= self._ready[1]:
            return
        groups = range(len(self.pages))
        plans = [self._plan(group, start, stop) for group in groups]
        for group, plan in zip(groups, plans, strict=True):
            self._carry_out(group, plan)
        self._ready = (start, stop)
        self._runs.clear()

    def restore(self, layer: int, start: int, stop: int) -> None:
        """Take pages for the tokens start .. stop of a layer that holds none yet.

        Raises OutOfPagesError, nothing changed.
        """
        group = self.pool.group_of[layer]
        dropped = self.dropped[group]
        if not self.pages[group]:
            self.dropped[group] = start // self.pool.page_size
        try:  # (also with pages of a reserve: too few, or shared by a fork)
            plan = self._plan(group, start, stop)
        except OutOfPagesError:
            self.dropped[group] = dropped
            raise
        self._carry_out(group, plan)
        self._runs.clear()
        self.lengths[layer] = stop

    def slots(self, group: int, start: int, stop: int) -> list[Slots]:
        """Where the tokens start .. stop lie: runs of neighbouring slots."""
        key = (group, start, stop)
        if key not in self._runs:
            size, skip = self.pool.page_size, self.dropped[group] * self.pool.page_size
            runs: list[Slots] = []
            for token in range(start - start % size, stop, size):
                page = self.pages[group][(token - skip) // size]
                first = page * size + max(start - token, 0)
                last = page * size + min(stop - token, size)
                if runs and runs[-1][1] == first:
                    runs[-1] = (runs[-1][0], last)
                else:
                    runs.append((first, last))
            self._runs[key] = runs
        return self._runs[key]

    def check_rewind(self, layer: int, n: int) -> None:
        """Raise ParameterError unless a layer can forget its newest n tokens."""
        length = self.lengths[layer]
        refuse_rewind(n, length)
        left = length - n
        group = self.pool.group_of[layer]
        window = self.pool.windows[group]
        first = self.dropped[group] * self.pool.page_size
        if window is not None and left and max(0, left - window + 1) < first:
            raise ParameterError(
                f"cannot rewind {n} tokens of a paged cache at {length}: the pages of "
                f"the window of {window} before them are given back; rewind all "
                f"{length} and compute them anew"
            )

    def rewind(self, layer: int, n: int) -> None:
        """Forget the newest n tokens of a layer. Raises as check_rewind."""
        self.check_rewind(layer, n)
        self.lengths[layer] -= n
        self._trim()

    def fork(self) -> PageTable:
        """Another request with the same tokens: all pages shared, none copied yet."""
        other = PageTable(self.pool)
        size = self.pool.page_size
        for group, pages in enumerate(self.pages):
            used = max(0, -(-self.length // size) - self.dropped[group])
            for page in pages[:used]:
                self.pool.allocators[group].hold(page)
            other.pages[group] += pages[:used]
        other.dropped = list(self.dropped)
        other.lengths = list(self.lengths)
        self._ready = (0, 0)
        return other

    def free(self) -> None:
        """Give all pages back; the table is empty then."""
        self.lengths = [0] * len(self.lengths)
        self.reserve = 0
        self._trim()

    def check(self) -> None:
        """Raise AssertionError unless pages and tokens agree."""
        size = self.pool.page_size
        for group, pages in enumerate(self.pages):
            assert len(set(pages)) == len(pages)
            assert all(self.pool.allocators[group].references[p] > 0 for p in pages)
            assert (self.dropped[group] + len(pages)) * size >= self.length

    def _plan(self, group: int, start: int, stop: int) -> _Plan:
        """What makes the tokens start .. stop writable. Raises OutOfPagesError."""
        size = self.pool.page_size
        window, allocator = self.pool.windows[group], self.pool.allocators[group]
        pages, dropped = self.pages[group], self.dropped[group]
        free = allocator.free  # first: forgotten tables share pages until it is read
        leave, until = 0, stop
        if window is not None:
            behind = min(self.lengths) - window + 1 - SLACK
            leave = max(0, behind // size - dropped)
        elif not pages:
            until = max(stop, self.reserve)
        new = max(0, -(-until // size) - dropped - len(pages))
        first = max(0, start // size - dropped)
        shared = [
            place - leave
            for place in range(first, len(pages))
            if allocator.references[pages[place]] > 1
        ]
        needed = new + len(shared)
        free += sum(allocator.references[p] == 1 for p in pages[:leave])
        if needed > free:
            self.pool.refuse(group, needed, free)
        return _Plan(leave, shared, new)

    def _carry_out(self, group: int, plan: _Plan) -> None:
        allocator, pages = self.pool.allocators[group], self.pages[group]
        for page in pages[: plan.leave]:
            allocator.release(page)
        del pages[: plan.leave]
        self.dropped[group] += plan.leave
        for place in plan.shared:
            before = pages[place - 1] if place else None
            (page,) = allocator.allocate(1, after=before)
            self.pool.copy_page(group, pages[place], page)
            allocator.release(pages[place])
            pages[place] = page
        after = pages[-1] if pages else None
        pages += allocator.allocate(plan.new, after=after, final=self.reserve > 0)

    def _trim(self) -> None:
        """Give back the pages beyond the tokens and the reserve."""
        self._ready = (0, 0)
        self._runs.clear()
        length, size = self.length, self.pool.page_size
        for group, (window, pages) in enumerate(
            zip(self.pool.windows, self.pages, strict=True)
        ):
            if length == 0:
                self.dropped[group] = 0
            wanted = length if window is not None else max(length, self.reserve)
            kept = -(-wanted // size) - self.dropped[group]
            for page in pages[kept:]:
                self.pool.allocators[group].release(page)
            del pages[kept:]


class _Plan(NamedTuple):
    """For one group: pages to give back, places of shared pages, pages to take."""

    leave: int
    shared: list[int]
    new: int


def _abandon(allocators: list[PageAllocator], pages: list[list[int]]) -> None:
    for allocator, held in zip(allocators, pages, strict=True):
        allocator.abandon(held)
