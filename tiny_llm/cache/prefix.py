"""Which pages hold the first tokens of a new request already. Numbers only."""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple

from .pages import PageAllocator

_ROOT = b""  # what comes before the first block


class Match(NamedTuple):
    """What a request need not compute.

    tokens: how many, whole pages of them, at least one less than it has.
    held: per group how many pages its window has left behind, and those after them.
    reason: where less than half of what could be was reused, why; None if nothing
    like it was ever stored.
    """

    tokens: int
    held: tuple[tuple[int, tuple[int, ...]], ...]
    reason: str | None


class PrefixIndex:
    """Finds full pages again by the tokens in them and before them.

    A block is as many tokens as a page has. Its digest is BLAKE2b, under a random key,
    of the digest before it and its tokens, so that two sequences have a digest in
    common exactly if they have all tokens up to there in common. A block has at most
    one page in each group of layers; pages that it knows are marked in the allocators,
    and those alone.
    """

    def __init__(
        self,
        allocators: Sequence[PageAllocator],
        page_size: int,
        windows: Sequence[int | None],
    ) -> None:
        """One allocator and one window (None: all tokens are seen) per group."""
        self.allocators, self.page_size = list(allocators), page_size
        self.windows = list(windows)
        self._key = os.urandom(16)
        # the blocks' pages are what counts; all else is made from them by _repair
        self._blocks: dict[bytes, _Block] = {}
        self._children: dict[bytes, dict[bytes, _Block]] = {}  # by the digest before
        self._known: list[dict[int, _Block]] = [{} for _ in windows]  # by page
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # the latest ones
        self._most_evicted = max(1024, sum(a.count for a in allocators))
        for group, allocator in enumerate(self.allocators):
            assert allocator.on_evict is None, "pages belong to one index"
            allocator.on_evict = partial(self._evict, group)

    def extend(self, digests: list[bytes], tokens: Sequence[int]) -> None:
        """Append the digests of the full pages of tokens that the list lacks.

        The tokens that have digests already must not have changed.
        """
        size = self.page_size
        for start in range(len(digests) * size, len(tokens) - size + 1, size):
            before = digests[-1] if digests else _ROOT
            block = array("q", tokens[start : start + size]).tobytes()
            digest = blake2b(before + block, digest_size=16, key=self._key)
            digests.append(digest.digest())

    def match(self, digests: list[bytes], tokens: Sequence[int]) -> Match:
        """The longest prefix of tokens that can be had from stored pages.

        Longest such that each group has what the next token sees: all pages, or those
        of the newest window - 1 tokens. At least one token is left to compute. The
        pages are to be held (PageTable.adopt) before others are allocated. digests is
        extended.
        """
        self.extend(digests, tokens)
        size = self.page_size
        most = max(0, (len(tokens) - 1) // size)
        blocks = [self._blocks.get(digest) for digest in digests[:most]]
        found = [
            [None if block is None else block.pages[group] for block in blocks]
            for group in range(len(self.windows))
        ]
        whole = most  # blocks that the groups without a window have
        for pages, window in zip(found, self.windows, strict=True):
            if window is None:
                whole = min(whole, _leading(pages))
        n = self._longest(found, whole)
        firsts = [self._first(window, n) for window in self.windows]
        held = tuple(
            (first, tuple(page for page in pages[first:n] if page is not None))
            for pages, first in zip(found, firsts, strict=True)
        )
        reason = None
        if 2 * n < most:
            if None not in self.windows:
                whole = _leading(blocks)
            reason = self._reason(digests, tokens, n, whole)
        return Match(n * size, held, reason)

    def add(
        self,
        digests: list[bytes],
        tokens: Sequence[int],
        block: int,
        pages: Sequence[int | None],
    ) -> None:
        """Pages in use hold block `block` of tokens in all layers: findable from here.

        pages: one per group; None: it has none any more. Where the block has a page
        already, that one stays its page, and the other one remains unmarked. digests
        is extended.
        """
        self.extend(digests, tokens)
        size, digest = self.page_size, digests[block]
        with self._whole():
            own = self._blocks.get(digest)
            if own is None:
                before = digests[block - 1] if block else _ROOT
                part = tuple(tokens[block * size : (block + 1) * size])
                own = _Block(digest, before, part, [None] * len(pages))
            for group, page in enumerate(pages):
                if page is None or own.pages[group] is not None:
                    continue
                assert page not in self._known[group], "a page holds one block"
                self.allocators[group].mark(page)
                self._known[group][page] = own
                own.pages[group] = page
            if any(page is not None for page in own.pages):
                self._evicted.pop(digest, None)
                self._children.setdefault(own.before, {})[digest] = own
                self._blocks[digest] = own

    def drop(self, pages_of_groups: Sequence[Sequence[int]]) -> None:
        """Forget pages whose rows may be wrong, and all that may be computed from them.

        That is every block that follows on theirs, or on blocks not known any more.
        Whoever holds the pages keeps them, so a running request that shares one of them
        must not add more before it has computed its own anew.
        """
        with self._whole():
            wrong = {
                known[page].digest
                for known, pages in zip(self._known, pages_of_groups, strict=True)
                for page in pages
                if page in known
            }
            if not wrong:
                return
            right, reached = {}, [_ROOT]
            while reached:
                for digest, block in self._children.get(reached.pop(), {}).items():
                    if digest not in wrong:
                        right[digest] = block
                        reached.append(digest)
            self._blocks = right
            self._repair()

    def check(self) -> None:
        """Raise AssertionError unless the books agree."""
        known: list[dict[int, _Block]] = [{} for _ in self.windows]
        children: dict[bytes, dict[bytes, _Block]] = {}
        for digest, block in self._blocks.items():
            assert digest == block.digest
            assert digest not in self._evicted
            assert any(page is not None for page in block.pages)
            children.setdefault(block.before, {})[digest] = block
            for group, page in enumerate(block.pages):
                if page is not None:
                    assert page not in known[group], "two blocks in a page"
                    assert page in self.allocators[group].findable
                    known[group][page] = block
        assert (known, children) == (self._known, self._children)
        assert len(self._evicted) <= self._most_evicted

    def _first(self, window: int | None, n: int) -> int:
        """The first of n blocks that the token after them sees something of."""
        size = self.page_size
        return 0 if window is None else max(0, n * size - window + 1) // size

    def _longest(self, found: list[list[int | None]], whole: int) -> int:
        """How many blocks, `whole` at most, leave each group with all it needs."""
        runs = [0] * len(found)  # pages side by side that end here
        longest = 0
        for n in range(1, whole + 1):
            for group, pages in enumerate(found):
                runs[group] = 0 if pages[n - 1] is None else runs[group] + 1
            needs = [n - self._first(window, n) for window in self.windows]
            if all(run >= need for run, need in zip(runs, needs, strict=True)):
                longest = n
        return longest

    def _reason(
        self, digests: list[bytes], tokens: Sequence[int], n: int, whole: int
    ) -> str | None:
        """Why only n blocks were reused, where `whole` are there for full attention."""
        if whole > n:
            return "windowed layer"
        if digests[n] in self._evicted or digests[n] in self._blocks:
            return "evicted"
        start = n * self.page_size
        rest = tokens[start : start + self.page_size]
        siblings = self._children.get(digests[n - 1] if n else _ROOT, {})
        alike = max(
            (_common(block.tokens, rest) for block in siblings.values()), default=0
        )
        if not siblings or start + alike == 0:
            return None
        return f"first difference at token {start + alike}"

    def _evict(self, group: int, page: int) -> None:
        """The allocator takes a page for something else."""
        block = self._known[group].get(page)
        if block is None:
            return
        with self._whole():
            self._forget(group, page)
            if block.digest not in self._blocks:
                self._evicted[block.digest] = None
                while len(self._evicted) > self._most_evicted:
                    self._evicted.popitem(last=False)

    def _forget(self, group: int, page: int) -> None:
        """A block has no page in a group any more; the last one takes it along."""
        block = self._known[group][page]
        block.pages[group] = None
        del self._known[group][page]
        if all(other is None for other in block.pages):
            del self._blocks[block.digest]
            siblings = self._children[block.before]
            del siblings[block.digest]
            if not siblings:
                del self._children[block.before]

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Whatever cuts the work off (Ctrl-C), the books agree."""
        try:
            yield
        except BaseException:
            self._repair()
            raise

    def _repair(self) -> None:
        """All books anew, from the pages of the blocks that are marked."""
        blocks, self._children = self._blocks, {}
        self._blocks, self._known = {}, [{} for _ in self.windows]
        for digest, block in blocks.items():
            for group, page in enumerate(block.pages):
                if page in self.allocators[group].findable and page is not None:
                    self._known[group][page] = block
                else:
                    block.pages[group] = None
            if any(page is not None for page in block.pages):
                self._blocks[digest] = block
                self._children.setdefault(block.before, {})[digest] = block
                self._evicted.pop(digest, None)
        for allocator, known in zip(self.allocators, self._known, strict=True):
            for page in allocator.findable - known.keys():
                allocator.unmark(page)


class _Block:
    """A block that has pages: compared by identity."""

    def __init__(
        self,
        digest: bytes,
        before: bytes,
        tokens: tuple[int, ...],
        pages: list[int | None],
    ) -> None:
        self.digest, self.before = digest, before
        self.tokens, self.pages = tokens, pages


def _leading(items: Sequence[object]) -> int:
    """How many come before the first None."""
    return sum(1 for _ in takewhile(lambda item: item is not None, items))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
