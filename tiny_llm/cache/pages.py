"""Which pages are free, and how many hold each other one. Numbers only, no arrays."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

from ..errors import OutOfPagesError


class PageAllocator:
    """Pages 0 .. count - 1 with a reference count each.

    Free pages are kept as runs of neighbours. A request that grows gets the neighbours
    of its last page while they are free, and a new one begins in the middle of the
    longest free run, so that both have room to grow: a lone request lies in one run,
    which attention reads without copying.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.references = [0] * count
        self._starts = [0] if count else []  # of the free runs, ascending
        self._lengths = {0: count} if count else {}
        self._free = count
        self._abandoned: deque[Iterable[int]] = deque()

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        while self._abandoned:
            for page in self._abandoned.popleft():
                self.release(page)
        return self._free

    def allocate(
        self, n: int, after: int | None = None, final: bool = False
    ) -> list[int]:
        """n pages, each held once; in the neighbourhood of page `after` if possible.

        final: the holder will not grow, so the tightest run that fits is taken.
        Raises OutOfPagesError, nothing changed.
        """
        if n > self.free:
            raise OutOfPagesError(
                f"{n} pages are needed, but of {self.count} only {self.free} are free"
            )
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
        """One more holder of a page that is in use."""
        assert self.references[page] > 0
        self.references[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        assert self.references[page] > 0
        self.references[page] -= 1
        if self.references[page] == 0:
            self._give(page)

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
        free = [page for page, n in enumerate(references) if n == 0]
        lengths: dict[int, int] = {}
        start = None
        for page in free:
            if start is None or start + lengths[start] != page:
                start, lengths[page] = page, 0
            lengths[start] += 1
        self.references, self._lengths = references, lengths
        self._starts, self._free = list(lengths), len(free)

    def check(self) -> None:
        """Raise AssertionError unless the books agree."""
        assert self.free == self._free  # (takes the abandoned ones back)
        free: set[int] = set()
        assert sorted(self._lengths) == self._starts
        for start in self._starts:
            run = range(start, start + self._lengths[start])
            assert len(run) > 0
            assert start - 1 not in free, "two runs touch"
            free.update(run)
        assert len(free) == self._free
        for page, references in enumerate(self.references):
            assert references >= 0
            assert (references == 0) == (page in free)

    def _choose(self, n: int, final: bool) -> tuple[int, int]:
        """(start, length) of free neighbours to take from."""
        fitting = [s for s in self._starts if self._lengths[s] >= n]
        if final and fitting:
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

    def _give(self, page: int) -> None:
        """Put a page back and join it with free neighbours."""
        self._free += 1
        start, length = page, 1
        place = bisect_left(self._starts, page)
        if place < len(self._starts) and self._starts[place] == page + 1:
            length += self._lengths.pop(self._starts.pop(place))
        if place > 0:
            before = self._starts[place - 1]
            if before + self._lengths[before] == page:
                self._lengths[before] += length
                return
        self._add(start, length)

    def _add(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = length
