"""Which pages are free, findable or held, and by how many. Numbers only, no arrays."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from ..errors import OutOfPagesError


class PageAllocator:
    """Pages 0 .. count - 1 with a reference count each.

    Free pages are kept as runs of neighbours. A request that grows gets the neighbours
    of its last page while they are free, and a new one begins in the middle of the
    longest free run, so that both have room to grow: a lone request lies in one run,
    which attention reads without copying.

    A findable page, whose contents somebody may want again, is cached when nobody holds
    it: it counts as free, but is taken for something else only when the others do not
    do, the least recently used one first.
    """

    def __init__(self, count: int, compact: bool = False) -> None:
        """compact: new requests begin at the first free run that fits, none further."""
        self.count, self.compact = count, compact
        self.references = [0] * count
        self._starts = [0] if count else []  # of the free runs, ascending
        self._lengths = {0: count} if count else {}
        self._free = count  # without the cached ones
        self.findable: set[int] = set()
        # those of them that nobody holds, the least recently used first
        self.cached: OrderedDict[int, None] = OrderedDict()
        # told of each findable page that is about to be taken for something else
        self.on_evict: Callable[[int], None] | None = None
        self._abandoned: deque[Iterable[int]] = deque()

    @property
    def free(self) -> int:
        """Pages that nobody holds, the cached ones among them."""
        while self._abandoned:
            for page in self._abandoned.popleft():
                self.release(page)
        return self._free + len(self.cached)

    def allocate(
        self, n: int, after: int | None = None, final: bool = False
    ) -> list[int]:
        """n pages, each held once; in the neighbourhood of page `after` if possible.

        final: the holder will not grow, so the tightest run that fits is taken. Cached
        pages are evicted, n at most, where too few others are free or no n of them are
        neighbours. Raises OutOfPagesError, nothing changed.
        """
        if n > self.free:
            raise OutOfPagesError(
                f"{n} pages are needed, but of {self.count} only {self.free} are free"
            )
        if self.cached and (n > 1 or n > self._free):
            self._make_room(n, after)
        pages: list[int] = []
        if n and after is not None and after + 1 in self._lengths:
            pages += self._take(after + 1, min(n, self._lengths[after + 1]))
        while len(pages) < n:
            start, length = self._choose(n - len(pages), final)
            pages += self._take(start, min(n - len(pages), length))
        for page in pages:
            self.references[page] = 1
        return pages

    def hold(self, page: int) -> None:
        """One more holder of a page that is in use or cached."""
        assert self.references[page] > 0 or page in self.cached
        self.references[page] += 1
        self.cached.pop(page, None)

    def release(self, page: int) -> None:
        """One holder less; the last one leaves the page cached or free."""
        assert self.references[page] > 0
        self.references[page] -= 1
        if self.references[page] == 0:
            if page in self.findable:
                self.cached[page] = None
            else:
                self._give(page)

    def mark(self, page: int) -> None:
        """A page in use becomes findable."""
        assert self.references[page] > 0
        self.findable.add(page)

    def unmark(self, page: int) -> None:
        """A page is findable no longer: free, if nobody holds it."""
        try:
            self.findable.discard(page)
            if page in self.cached:
                del self.cached[page]
                self._give(page)
        except BaseException:  # Ctrl-C
            self._tally(self.references)
            raise

    def claim(self, page: int) -> None:
        """The only holder of a page will write to it: it is findable no longer."""
        if page in self.findable:
            self._forget(page)

    def abandon(self, pages: Iterable[int]) -> None:
        """Release pages before the books are next looked at.

        For finalizers, which the garbage collector may call in the middle of our work.
        """
        self._abandoned.append(pages)

    def recount(self, held: Iterable[Iterable[int]]) -> None:
        """Do the books anew from what each holder has, after work was cut off."""
        self._abandoned.clear()
        references = [0] * self.count
        for pages in held:
            for page in pages:
                references[page] += 1
        self._tally(references)

    def check(self) -> None:
        """Raise AssertionError unless the books agree."""
        assert self.free == self._free + len(self.cached)  # (takes abandoned ones back)
        free: set[int] = set()
        assert sorted(self._lengths) == self._starts
        for start in self._starts:
            run = range(start, start + self._lengths[start])
            assert len(run) > 0
            assert start - 1 not in free, "two runs touch"
            free.update(run)
        assert len(free) == self._free
        assert not free & self.findable
        assert self.findable.issuperset(self.cached)
        for page, references in enumerate(self.references):
            assert references >= 0
            assert (references == 0) == (page in free or page in self.cached)

    def _tally(self, references: list[int]) -> None:
        """All the books, from how many hold each page and what is findable."""
        idle = [page for page, n in enumerate(references) if n == 0]
        cached = OrderedDict.fromkeys(
            page
            for page in [*self.cached, *idle]
            if page in self.findable and references[page] == 0
        )
        lengths: dict[int, int] = {}
        start = None
        for page in idle:
            if page in cached:
                continue
            if start is None or start + lengths[start] != page:
                start, lengths[page] = page, 0
            lengths[start] += 1
        self.references, self.cached, self._lengths = references, cached, lengths
        self._starts, self._free = list(lengths), sum(lengths.values())

    def _make_room(self, n: int, after: int | None) -> None:
        """Evict until the next n pages lie side by side, but n pages at most."""
        beside = -1 if after is None else after + 1  # where the first run may go on
        longest = self._longest(beside)
        for _ in range(min(n, len(self.cached))):
            if self._lengths.get(beside, 0) + longest >= n:
                return
            page = next(iter(self.cached))
            self._forget(page)
            del self.cached[page]
            start = self._give(page)
            if start == beside:  # it may have swallowed the longest of the others
                longest = self._longest(beside)
            else:
                longest = max(longest, self._lengths[start])

    def _longest(self, beside: int) -> int:
        """Pages in the longest free run that does not begin at `beside`."""
        runs = self._lengths.items()
        return max((length for start, length in runs if start != beside), default=0)

    def _forget(self, page: int) -> None:
        # told first: whatever cuts this off, nobody finds a page that is not marked
        if self.on_evict is not None:
            self.on_evict(page)
        self.findable.discard(page)

    def _choose(self, n: int, final: bool) -> tuple[int, int]:
        """(start, length) of free neighbours to take from."""
        fitting = [s for s in self._starts if self._lengths[s] >= n]
        if fitting and (final or self.compact):
            start = fitting[0]
            if final:
                start = min(fitting, key=lambda s: (self._lengths[s], s))
            return start, self._lengths[start]
        start = max(self._starts, key=lambda s: (self._lengths[s], -s))
        length = self._lengths[start]
        half = length // 2
        # the one before may want to grow into the run, which must not spoil this one
        if start > 0 and length - half >= n:
            return start + half, length - half
        return start, length

    def _take(self, start: int, n: int) -> list[int]:
        """Remove n neighbours from the run that holds them."""
        run = self._starts[bisect_left(self._starts, start + 1) - 1]
        length = self._lengths.pop(run)
        self._starts.remove(run)
        if start > run:
            self._add(run, start - run)
        if start + n < run + length:
            self._add(start + n, run + length - start - n)
        self._free -= n
        return list(range(start, start + n))

    def _give(self, page: int) -> int:
        """Put a page back, joined with its neighbours; returns where the run starts."""
        self._free += 1
        start, length = page, 1
        place = bisect_left(self._starts, page)
        if place < len(self._starts) and self._starts[place] == page + 1:
            length += self._lengths.pop(self._starts.pop(place))
        if place > 0:
            before = self._starts[place - 1]
            if before + self._lengths[before] == page:
                self._lengths[before] += length
                return before
        self._add(start, length)
        return start

    def _add(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = length
