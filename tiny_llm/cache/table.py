"""One request's pages: which hold its tokens, in the order of the tokens."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import OutOfPagesError, ParameterError, whole_number
from ..memory import SLACK
from .base import refuse_rewind
from .page_index import Append, PageIndex, page_index
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
        """reserve: tokens whose pages are taken with the first ones, side by side.

        The first ones after an adoption count too. Layers with a window take none in
        reserve: theirs come and go.
        """
        self.pool = pool
        self.reserve = whole_number("reserve", reserve, least=0)
        self.lengths = [0] * len(pool.group_of)  # tokens that each layer holds
        # each is replaced as a whole, never changed: Ctrl-C may come at any moment
        self.held = [HeldPages(0, ()) for _ in pool.windows]
        self._begin = [0] * len(self.held)  # before it tokens of a group never came
        self._ready = (0, 0)  # tokens that may be written: their pages are our own
        self._adopted = False  # and nothing reserved since
        self._backed = True  # the pool has memory for all the pages held
        self._runs = [(held, _runs(held, 1)) for held in self.held]
        self._indices: dict[int, tuple[HeldPages, Slots, PageIndex]] = {}
        pool.tables.add(self)
        self._end = weakref.finalize(self, _abandon, pool.allocators, self.held)
        self._end.atexit = False

    @property
    def length(self) -> int:
        """Tokens that any layer holds."""
        return max(self.lengths)

    @property
    def pages(self) -> list[tuple[int, ...]]:
        """The pages of each group, in the order of the tokens."""
        return [held.pages for held in self.held]

    @property
    def dropped(self) -> list[int]:
        """For each group, how many pages before those have been given back."""
        return [held.dropped for held in self.held]

    def prepare(self, start: int, stop: int, *, back: bool = True) -> None:
        """Make the tokens start .. stop writable in all layers.

        back False: only take the pages; the pool may have no memory for them before
        `back` is done. Raises OutOfPagesError, nothing changed.
        """
        if back:
            self.back()
        if self._ready[0] <= start and stop <= self._ready[1]:
            return
        with self._books():
            groups = range(len(self.held))
            plans = [
                self._plan(group, self.held[group], start, stop) for group in groups
            ]
            for group, plan in zip(groups, plans, strict=True):
                self._carry_out(group, plan, back)
            self._adopted = False
            self._ready = (start, stop)

    def back(self, *, ahead: int = 0, limit: int | None = None) -> bool:
        """Have the pool make memory for all pages held, as PagePool.back."""
        if not self._backed:
            self._backed = all(
                self.pool.back(
                    group, max(held.pages, default=-1), ahead=ahead, limit=limit
                )
                for group, held in enumerate(self.held)
            )
        return self._backed

    def adopt(self, held: Sequence[tuple[int, Sequence[int]]], length: int) -> None:
        """Hold found pages as those of the first `length` tokens of an empty table.

        held: per group how many pages the window has left behind, and those after them
        (Match.held). The pages must hold these tokens in all layers.
        """
        assert self.length == 0, "only an empty table adopts"
        assert not any(self.pages)
        found = [HeldPages(dropped, tuple(pages)) for dropped, pages in held]
        lengths = [length] * len(self.lengths)
        with self._books():
            for allocator, (_, pages) in zip(self.pool.allocators, found, strict=True):
                for page in pages:
                    allocator.hold(page)
            # (in one line: Ctrl-C finds an empty table or one that holds them all)
            self.held[:], self.lengths, self._adopted = found, lengths, True
            self._ready = (0, 0)

    def restore(self, layer: int, start: int, stop: int) -> None:
        """Take pages for the tokens start .. stop of a layer that holds none yet.

        Raises OutOfPagesError, nothing changed.
        """
        group = self.pool.group_of[layer]
        held = self.held[group]
        if not held.pages:
            held = HeldPages(start // self.pool.page_size, ())
        with self._books():  # (also with pages of a reserve: too few, or shared)
            plan = self._plan(group, held, start, stop)
            self.held[group] = held
            self._carry_out(group, plan)
        self._begin[group], self.lengths[layer] = start, stop

    def slots(self, group: int, start: int, stop: int) -> list[Slots]:
        """Where the tokens start .. stop lie: runs of neighbouring slots."""
        held, runs = self._runs[group]
        if held is not self.held[group]:
            held = self.held[group]
            runs = _runs(held, self.pool.page_size)
            self._runs[group] = held, runs
        return [
            (slot + max(start - token, 0), slot + min(stop - token, count))
            for token, slot, count in runs
            if token < stop and start < token + count
        ]

    def index(self, group: int, start: int, stop: int) -> PageIndex:
        """Where the tokens start .. stop go and what they see; made for all layers."""
        held, was, index = self._indices.get(group, (None, None, None))
        if index is None or held is not self.held[group] or was != (start, stop):
            index = page_index(self.pool, group, [Append(self, start, stop - start)], 1)
            self._indices[group] = self.held[group], (start, stop), index
        return index

    def check_rewind(self, layer: int, n: int) -> None:
        """Raise ParameterError unless a layer can forget its newest n tokens."""
        length = self.lengths[layer]
        refuse_rewind(n, length)
        left = length - n
        group = self.pool.group_of[layer]
        window = self.pool.windows[group]
        first = self.held[group].dropped * self.pool.page_size
        first = max(first, self._begin[group])
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

    def rewind_all(self, n: int) -> None:
        """Forget the newest n tokens of all layers, or raise as check_rewind."""
        if n == 0:
            return
        for layer in range(len(self.lengths)):
            self.check_rewind(layer, n)
        self.lengths = [length - n for length in self.lengths]
        self._trim()

    def fork(self, reserve: int = 0) -> PageTable:
        """Another request with the same tokens: all pages shared, none copied yet.

        reserve: as in __init__; taken with the first page that it needs of its own.
        """
        other = PageTable(self.pool, reserve)
        size = self.pool.page_size
        with self._books():
            for group, (dropped, pages) in enumerate(self.held):
                used = pages[: max(0, -(-self.length // size) - dropped)]
                for page in used:
                    self.pool.allocators[group].hold(page)
                other.held[group] = HeldPages(dropped, used)
            other.lengths, other._begin = list(self.lengths), list(self._begin)
            other._backed, other._adopted = self._backed, reserve > 0
            self._ready = (0, 0)
        return other

    def free(self) -> None:
        """Give all pages back; the table is empty then."""
        self.lengths = [0] * len(self.lengths)
        self.reserve, self._adopted = 0, False
        self._trim()

    def check(self) -> None:
        """Raise AssertionError unless pages and tokens agree."""
        size = self.pool.page_size
        for group, (dropped, pages) in enumerate(self.held):
            assert len(set(pages)) == len(pages)
            assert all(self.pool.allocators[group].references[p] > 0 for p in pages)
            assert (dropped + len(pages)) * size >= self.length

    @contextmanager
    def _books(self) -> Iterator[None]:
        """Whatever cuts the block off, the pool's books agree with its tables."""
        try:
            yield
        except OutOfPagesError:
            raise
        except BaseException:
            self._ready = (0, 0)
            self.pool.recount()
            raise

    def _plan(self, group: int, held: HeldPages, start: int, stop: int) -> _Plan:
        """What makes the tokens start .. stop writable. Raises OutOfPagesError."""
        size = self.pool.page_size
        window, allocator = self.pool.windows[group], self.pool.allocators[group]
        dropped, pages = held
        free = allocator.free  # first: forgotten tables share pages until it is read
        leave, until = 0, stop
        if window is not None:
            behind = min(self.lengths) - window + 1 - SLACK
            leave = max(0, behind // size - dropped)
        elif not pages or self._adopted:
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
        findable = [  # (where a rewind led back into pages that were complete)
            page
            for page in pages[first:]
            if page in allocator.findable and allocator.references[page] == 1
        ]
        return _Plan(leave, shared, findable, new)

    def _carry_out(self, group: int, plan: _Plan, back: bool = True) -> None:
        if plan == _Plan(0, [], [], 0):
            return
        allocator, (dropped, held) = self.pool.allocators[group], self.held[group]
        pages = list(held[plan.leave :])
        # given up before they are free: they may be written to in what follows
        self.held[group] = HeldPages(dropped + plan.leave, tuple(pages))
        for page in held[: plan.leave]:
            allocator.release(page)
        for page in plan.findable:
            allocator.claim(page)
        for place in plan.shared:
            before = pages[place - 1] if place else None
            (page,) = allocator.allocate(1, after=before)
            self.pool.back(group, page)
            self.pool.copy_page(group, pages[place], page)
            allocator.release(pages[place])
            pages[place] = page
        after = pages[-1] if pages else None
        final = self.reserve > 0 and self.pool.windows[group] is None
        final = final and (not pages or self._adopted)
        pages += allocator.allocate(plan.new, after=after, final=final)
        if back:
            self.pool.back(group, max(pages, default=0))
        else:
            self._backed = False
        self.held[group] = HeldPages(dropped + plan.leave, tuple(pages))

    def _trim(self) -> None:
        """Give back the pages beyond the tokens and their reserve."""
        self._ready = (0, 0)
        length, size = self.length, self.pool.page_size
        if not length:
            self._begin = [0] * len(self.held)
        with self._books():
            for group, (dropped, pages) in enumerate(self.held):
                windowed = self.pool.windows[group] is not None
                wanted = (
                    max(length, self.reserve) if length and not windowed else length
                )
                kept = pages[: max(0, -(-wanted // size) - dropped)]
                if length and len(kept) == len(pages):
                    continue
                self.held[group] = HeldPages(dropped if length else 0, kept)
                for page in reversed(pages[len(kept) :]):  # heads stay findable longest
                    self.pool.allocators[group].release(page)


class HeldPages(NamedTuple):
    """Of one group: how many pages were given back, and those after them."""

    dropped: int
    pages: tuple[int, ...]


class _Plan(NamedTuple):
    """For one group: pages to give back, places of shared pages, pages that must not be
    found any more, pages to take."""

    leave: int
    shared: list[int]
    findable: list[int]
    new: int


def _runs(held: HeldPages, size: int) -> list[tuple[int, int, int]]:
    """(first token, first slot, tokens) of each run of neighbouring pages."""
    runs: list[tuple[int, int, int]] = []
    for place, page in enumerate(held.pages, start=held.dropped):
        if runs and runs[-1][1] + runs[-1][2] == page * size:
            token, slot, count = runs[-1]
            runs[-1] = token, slot, count + size
        else:
            runs.append((place * size, page * size, size))
    return runs


def _abandon(allocators: list[PageAllocator], held: list[HeldPages]) -> None:
    for allocator, (_, pages) in zip(allocators, held, strict=True):
        allocator.abandon(pages[::-1])
