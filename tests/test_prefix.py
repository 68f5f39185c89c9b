"""Prefixes found again: page numbers against whole sequences, then pages with rows."""

import gc
from collections import Counter
from itertools import takewhile

import mlx.core as mx
import numpy as np
import pytest
import test_paged_interrupts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paged_interrupts import interrupted

from tiny_llm.cache import PagePool, PageTable
from tiny_llm.cache.paged import paged_cache
from tiny_llm.cache.pages import PageAllocator
from tiny_llm.cache.prefix import Match, PrefixIndex
from tiny_llm.errors import OutOfPagesError
from tiny_llm.memory import KvShape

SETTINGS = settings(max_examples=300, derandomize=True, database=None, deadline=None)


class Request:
    """Tokens and the pages that hold them, per group, without any rows."""

    def __init__(self, tokens, match):
        self.tokens, self.digests = list(tokens), []
        self.dropped = [dropped for dropped, _ in match.held]
        self.pages = [list(pages) for _, pages in match.held]
        self.added = match.tokens  # so many are findable


class Store:
    """Requests over an index, as the engine will use it; pages without rows."""

    def __init__(self, count=64, page_size=4, windows=(None,)):
        self.allocators = [PageAllocator(count) for _ in windows]
        self.index = PrefixIndex(self.allocators, page_size, windows)
        self.size, self.windows = page_size, windows

    def match(self, tokens):
        return self.index.match([], tokens)

    def open(self, tokens, complete=None):
        """A request all of whose tokens are stored; None: there are no pages."""
        match = self.match(tokens)
        request = Request(tokens, match)
        for allocator, pages in zip(self.allocators, request.pages, strict=True):
            for page in pages:
                allocator.hold(page)
        if not self.grow(request, complete):
            self.close(request)
            return None
        return request

    def grow(self, request, complete=None):
        """Take pages for all tokens, and add the full ones (or `complete` blocks)."""
        needs = [
            -(-len(request.tokens) // self.size) - dropped - len(pages)
            for dropped, pages in zip(request.dropped, request.pages, strict=True)
        ]
        for allocator, n in zip(self.allocators, needs, strict=True):
            if n > allocator.free:
                return False
        for allocator, n, own in zip(
            self.allocators, needs, request.pages, strict=True
        ):
            own += allocator.allocate(n, after=own[-1] if own else None)
        full = len(request.tokens) // self.size
        full = full if complete is None else min(full, complete)
        for block in range(request.added // self.size, full):
            pages = [
                own[block - dropped] if block >= dropped else None
                for dropped, own in zip(request.dropped, request.pages, strict=True)
            ]
            self.index.add(request.digests, request.tokens, block, pages)
            request.added = (block + 1) * self.size
        return True

    def leave(self, request):
        """Give back the pages that windows have left behind."""
        for group, window in enumerate(self.windows):
            if window is not None:
                first = max(0, len(request.tokens) - window + 1) // self.size
                for _ in range(first - request.dropped[group]):
                    self.allocators[group].release(request.pages[group].pop(0))
                    request.dropped[group] += 1

    def close(self, request):
        for allocator, pages in zip(self.allocators, request.pages, strict=True):
            while pages:
                allocator.release(pages.pop())

    def evict(self, group=0):
        """Everything that nobody holds is taken for something else."""
        allocator = self.allocators[group]
        for page in allocator.allocate(allocator.free):
            allocator.release(page)

    def check(self):
        self.index.check()
        for allocator in self.allocators:
            allocator.check()


def tokens_from(start, n):
    return list(range(start, start + n))


# What is found


def test_sequences_share_digests_exactly_as_far_as_they_share_all_tokens():
    index = Store(page_size=2).index
    first, second, third = [], [], []
    index.extend(first, [1, 2, 3, 4, 5, 6, 7])
    index.extend(second, [1, 2, 3, 4, 5, 7, 7])
    index.extend(third, [9, 2, 3, 4, 5, 6])
    assert [len(digests) for digests in (first, second, third)] == [3, 3, 3]
    assert first[:2] == second[:2]
    assert len({*first, *second, *third}) == 7
    slowly = []
    for n in range(8):
        index.extend(slowly, [1, 2, 3, 4, 5, 6, 7][:n])
        assert len(slowly) == n // 2
    assert slowly == first


def test_digests_cannot_be_foreseen_from_the_tokens():
    first, second = [], []
    Store().index.extend(first, tokens_from(0, 8))
    Store().index.extend(second, tokens_from(0, 8))
    assert not set(first) & set(second)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 9])
def test_the_same_prompt_again_leaves_at_least_one_token_to_compute(n):
    store = Store(page_size=4)
    request = store.open(tokens_from(0, n))
    match = store.match(tokens_from(0, n))
    assert match.tokens == {3: 0, 4: 0, 5: 4, 8: 4, 9: 8}[n]
    assert match.held == ((0, tuple(request.pages[0][: match.tokens // 4])),)
    assert match.reason is None


def test_nothing_is_an_empty_match():
    store = Store(windows=(None, 4))
    assert store.match([]) == store.match([1]) == Match(0, ((0, ()), (0, ())), None)


@pytest.mark.parametrize("finished", [False, True])
def test_full_pages_are_found_while_a_request_runs_and_when_it_has_finished(finished):
    store = Store()
    request = store.open(tokens_from(0, 18))
    pages = tuple(request.pages[0][:3])
    if finished:
        store.close(request)
    match = store.match([*tokens_from(0, 13), 99, 99])
    assert (match.tokens, match.held) == (12, ((0, pages),))
    store.check()


def test_a_conversation_pays_only_for_its_new_turn():
    store, tokens = Store(count=64), tokens_from(0, 10)
    for turn in range(5):
        match = store.match(tokens)
        assert len(tokens) - match.tokens <= 10 + 4
        store.close(store.open(tokens))
        tokens += tokens_from(100 * turn + 100, 10)
    assert store.allocators[0].free == 64
    store.check()


def test_two_who_compute_the_same_at_once_leave_the_pages_of_the_first():
    store = Store(page_size=4)
    first = store.open(tokens_from(0, 9), complete=0)
    second = store.open(tokens_from(0, 9))
    store.grow(first)
    assert store.match(tokens_from(0, 9)).held == ((0, tuple(second.pages[0][:2])),)
    store.close(first)
    assert len(store.allocators[0].cached) == 0
    store.check()


# Windows


def test_a_layer_with_a_window_needs_only_what_its_next_token_sees():
    store = Store(page_size=4, windows=(None, 6))
    request = store.open(tokens_from(0, 21))
    full, windowed = (tuple(pages) for pages in request.pages)
    match = store.match(tokens_from(0, 21))  # token 20 sees 15 and on
    assert match.held == ((0, full[:5]), (3, windowed[3:5]))
    store.leave(request)  # token 21 sees 16 and on
    store.evict(group=1)
    assert request.dropped == [0, 4]
    assert store.match(tokens_from(0, 21)).tokens == 0
    # the window of the token after page 5 begins in page 4
    request.tokens += tokens_from(21, 3)
    store.grow(request)
    match = store.match(tokens_from(0, 25))
    assert match.held == ((0, tuple(request.pages[0])), (4, tuple(request.pages[1])))
    assert store.match(tokens_from(0, 24)).reason == "windowed layer"
    store.check()


@pytest.mark.parametrize("windows", [(1,), (1, 2), (None, 1)])
def test_a_window_of_one_token_needs_no_page(windows):
    store = Store(page_size=4, windows=windows)
    store.open(tokens_from(0, 12))
    match = store.match(tokens_from(0, 13))
    group = windows.index(1)
    assert (match.tokens, match.held[group]) == (12, (3, ()))


def test_the_longest_prefix_is_not_where_the_window_has_gone():
    store = Store(page_size=4, windows=(None, 4))
    request = store.open(tokens_from(0, 40))
    windowed = request.pages[1]
    store.allocators[1].release(windowed[7])
    store.evict(group=1)
    del windowed[7]
    assert store.match(tokens_from(0, 33)).tokens == 28
    assert store.match(tokens_from(0, 41)).tokens == 40


# Eviction


def test_evicted_pages_are_not_found_and_the_heads_of_sequences_stay_longest():
    store = Store(count=8, page_size=4)
    assert store.open(tokens_from(0, 33)) is None  # 8 whole pages and a token
    store.close(store.open(tokens_from(0, 32)))
    for taken in range(8):
        match = store.match(tokens_from(0, 33))
        assert match.tokens == 32 - 4 * taken
        store.allocators[0].allocate(1)
        store.check()
    assert store.match(tokens_from(0, 33)).reason == "evicted"
    store.index.check()


def test_a_block_evicted_from_full_attention_alone_is_gone_for_that_reason():
    store = Store(windows=(None, 4))
    store.close(store.open(tokens_from(0, 16)))
    store.evict(group=0)
    assert len(store.allocators[1].cached) == 4
    match = store.match(tokens_from(0, 17))
    assert match == Match(0, ((0, ()), (0, ())), "evicted")
    store.close(store.open(tokens_from(0, 16)))
    assert store.match(tokens_from(0, 17)).tokens == 16
    store.check()


def test_what_is_used_again_outlives_what_is_not():
    store = Store(count=8, page_size=4)
    store.close(store.open(tokens_from(0, 16)))
    store.close(store.open(tokens_from(50, 16)))
    store.close(store.open(tokens_from(0, 16)))
    store.allocators[0].allocate(4)
    assert store.match(tokens_from(0, 17)).tokens == 16
    assert store.match(tokens_from(50, 17)) == Match(0, ((0, ()),), "evicted")


def test_what_was_evicted_is_remembered_for_a_bounded_while():
    store = Store(count=2, page_size=1)
    store.close(store.open([7, 7]))
    for token in range(1500):
        store.close(store.open([token + 10, 5]))
        store.index.check()
    assert store.match([1400, 6, 6]).reason == "evicted"
    assert store.match([7, 7, 7]).reason is None


# Why little was found


def test_the_reason_names_the_first_token_that_differs_from_the_best_sequence():
    store = Store(page_size=4)
    store.open([*tokens_from(0, 8), 50, 51, 52, 53, 54])
    store.open([*tokens_from(0, 8), 50, 51, 62, 63, 64])
    asked = [*tokens_from(0, 8), 50, 51, 52, 99, *tokens_from(200, 20)]
    match = store.match(asked)
    assert (match.tokens, match.reason) == (8, "first difference at token 11")
    asked[1] = 99
    assert store.match(asked).reason == "first difference at token 1"
    asked[0] = 99
    assert store.match(asked) == Match(0, ((0, ()),), None)


def test_there_is_no_reason_where_half_was_found_or_the_stored_sequence_ends():
    store = Store(page_size=4)
    store.open(tokens_from(0, 11))
    assert store.match([*tokens_from(0, 8), *tokens_from(90, 9)]).reason is None
    long = store.match([*tokens_from(0, 8), *tokens_from(90, 13)])
    assert (long.tokens, long.reason) == (8, None)  # of 20: nothing like the rest


# Pages that may be wrong


def test_dropped_pages_are_not_found_nor_what_others_have_computed_from_them():
    store = Store(page_size=4)
    shared = store.open(tokens_from(0, 8))
    failed = store.open([*tokens_from(0, 8), *tokens_from(50, 8)])
    other = store.open([*tokens_from(0, 8), *tokens_from(50, 8), *tokens_from(70, 8)])
    store.index.drop([failed.pages[0][2:]])
    store.check()
    assert store.match(other.tokens) == Match(8, ((0, tuple(shared.pages[0])),), None)
    for request in (shared, failed, other):
        store.close(request)
    store.check()
    assert len(store.allocators[0].cached) == 2
    assert store.allocators[0].free == 64


def test_what_follows_on_a_block_that_is_gone_is_dropped_with_the_wrong_ones():
    store = Store(page_size=4, windows=(None,))
    first = store.open(tokens_from(0, 8))  # who computes the second block first
    other = Request(tokens_from(0, 12), Match(0, ((0, ()),), None))
    store.grow(other)  # computes all by itself, and adds the third block only
    store.close(first)
    for _ in range(60):
        store.allocators[0].allocate(1)
    assert store.match(tokens_from(0, 13)).tokens == 4  # the second one is evicted
    store.index.drop([[store.match(tokens_from(0, 5)).held[0][1][0]]])
    assert store.allocators[0].findable == set()
    store.check()


def test_dropping_what_is_not_known_changes_nothing():
    store = Store(page_size=4)
    request = store.open(tokens_from(0, 11))
    store.index.drop([[request.pages[0][2], 60]])
    assert store.match(tokens_from(0, 9)).tokens == 8


# Against whole sequences


class Sequences:
    """What an index must find: each page's whole sequence of tokens, kept as such."""

    def __init__(self, store):
        self.store, self.evicted = store, set()
        self.stored = [{} for _ in store.windows]  # sequence -> page
        for group, allocator in enumerate(store.allocators):
            allocator.on_evict = self.telling(group, allocator.on_evict)

    def telling(self, group, on_evict):
        def evict(page):
            on_evict(page)
            (sequence,) = [s for s, p in self.stored[group].items() if p == page]
            del self.stored[group][sequence]
            if not self.anywhere(sequence):
                self.evicted.add(sequence)

        return evict

    def anywhere(self, sequence):
        return any(sequence in stored for stored in self.stored)

    def add(self, request, since):
        for stop in range(since + 1, request.added + 1):
            if stop % self.store.size == 0:
                block, sequence = (
                    stop // self.store.size - 1,
                    tuple(request.tokens[:stop]),
                )
                for group, stored in enumerate(self.stored):
                    place = block - request.dropped[group]
                    if place >= 0:
                        stored.setdefault(sequence, request.pages[group][place])
                        self.evicted.discard(sequence)

    def drop(self, pages):
        wrong = {
            sequence
            for stored, own in zip(self.stored, pages, strict=True)
            for sequence, page in stored.items()
            if page in own
        }
        if not wrong:
            return
        size, before = self.store.size, [dict(stored) for stored in self.stored]
        for stored in self.stored:
            for sequence in list(stored):
                heads = [sequence[:n] for n in range(size, len(sequence) + 1, size)]
                if any(
                    head in wrong or not any(head in known for known in before)
                    for head in heads
                ):
                    del stored[sequence]

    def match(self, tokens):
        size = self.store.size
        most = max(0, (len(tokens) - 1) // size)
        heads = [tuple(tokens[: (n + 1) * size]) for n in range(most)]

        def needed(window, n):
            first = 0 if window is None else max(0, n * size - window + 1) // size
            return first, heads[first:n]

        def enough(n, groups):
            return all(
                head in self.stored[group]
                for group in groups
                for head in needed(self.store.windows[group], n)[1]
            )

        groups = range(len(self.stored))
        n = next(n for n in range(most, -1, -1) if enough(n, groups))
        held = []
        for stored, window in zip(self.stored, self.store.windows, strict=True):
            first, sequences = needed(window, n)
            held.append((first, tuple(stored[sequence] for sequence in sequences)))
        return Match(n * size, tuple(held), self.reason(tokens, heads, n))

    def reason(self, tokens, heads, n):
        if 2 * n >= len(heads):
            return None
        full = [
            s for s, w in zip(self.stored, self.store.windows, strict=True) if not w
        ]
        whole = list(
            takewhile(
                lambda head: head in full[0] if full else self.anywhere(head), heads
            )
        )
        if len(whole) > n:
            return "windowed layer"
        if heads[n] in self.evicted or self.anywhere(heads[n]):
            return "evicted"
        size, best = self.store.size, None
        for stored in self.stored:
            for sequence in stored:
                if (
                    len(sequence) == (n + 1) * size
                    and list(sequence[: n * size]) == tokens[: n * size]
                ):
                    pairs = zip(sequence, tokens, strict=False)
                    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                    best = max(best or 0, same)
        return f"first difference at token {best}" if best else None

    def check(self):
        self.store.check()
        for allocator, stored in zip(self.store.allocators, self.stored, strict=True):
            assert allocator.findable == set(stored.values())


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [*["open"] * 4, "grow", "grow", "leave", "close", "close", "drop", "evict"]
        ),
        st.integers(0, 9),  # which
        st.integers(0, 40),  # how many tokens of an earlier one come first
        st.lists(st.integers(0, 1), max_size=24),  # and then these
    ),
    max_size=40,
)


@SETTINGS
@given(
    count=st.integers(2, 30),
    page_size=st.integers(1, 8),
    windows=st.sampled_from(
        [(None,), (None, 5), (None, 1, 9), (3,), (None, 16), (2, 7), (None, 2)]
    ),
    operations=OPERATIONS,
)
def test_what_is_found_is_what_whole_sequences_would_tell(
    count, page_size, windows, operations
):
    store = Store(count, page_size, windows)
    expected, running, seen = Sequences(store), [], [[]]
    for what, number, cut, tokens in operations:
        request = running[number % len(running)] if running else None
        if what == "open":
            tokens = seen[-1 - number % len(seen)][:cut] + tokens
            assert store.match(tokens) == expected.match(tokens)
            request = store.open(tokens, complete=None if number % 3 else number)
            if request is not None:
                expected.add(request, 0)
                running.append(request)
                seen.append(tokens)
        elif request is None:
            continue
        elif what == "grow":
            since = request.added
            request.tokens += tokens
            if store.grow(request):
                expected.add(request, since)
                seen.append(list(request.tokens))
            else:
                del request.tokens[len(request.tokens) - len(tokens) :]
        elif what == "leave":
            store.leave(request)
        elif what == "close":
            running.remove(request)
            store.close(request)
        elif what == "evict":
            allocator = store.allocators[number % len(windows)]
            n = allocator.free - len(allocator.cached) + cut % 6
            taken = [allocator.allocate(1) for _ in range(min(n, allocator.free))]
            for (page,) in taken:
                allocator.release(page)
        else:
            places = [number + cut % 2, None]
            wrong = [pages[slice(*places)] for pages in request.pages]
            store.index.drop(wrong)
            expected.drop(wrong)
        expected.check()
        for tokens in seen[-3:]:
            assert store.match([*tokens, 5]) == expected.match([*tokens, 5])
    for request in running:
        store.close(request)
    expected.check()
    assert [allocator.free for allocator in store.allocators] == [count] * len(windows)


# Pages with rows


WINDOWS, LAYERS, SIZE, DIM = (None, 6), (None, 6, None), 4, 8


def rows_of(tokens, start):
    """[tokens, DIM] from `start` on: a number for all tokens up to each one."""
    numbers, number = [], 1
    for token in tokens:
        number = (number * 31 + token + 1) % 8191
        numbers.append(number)
    return np.repeat(np.array(numbers[start:], dtype=np.float32)[:, None], DIM, axis=1)


class Session:
    """A request that finds its prefix, stores rows in pages and makes them findable."""

    def __init__(self, pool, index, reserve=0):
        self.pool, self.index = pool, index
        self.table = PageTable(pool, reserve)
        self.cache = paged_cache(self.table)
        self.tokens, self.digests = [], []

    def open(self, tokens):
        """Adopt what is found and compute the rest; OutOfPagesError undoes it."""
        match = self.index.match(self.digests, tokens)
        self.table.adopt(match.held, match.tokens)
        self.tokens = list(tokens[: match.tokens])
        try:
            self.feed(tokens[match.tokens :])
        except OutOfPagesError:
            self.table.free()
            self.tokens, self.digests = [], []
            raise
        return match

    def feed(self, tokens):
        """Store rows; the pages that are full then can be found."""
        start, tokens = len(self.tokens), [*self.tokens, *tokens]
        if len(tokens) > start:
            self.table.prepare(start, len(tokens))
            rows = mx.array(rows_of(tokens, start))[None, None]
            for entry in self.cache:
                entry.update_and_fetch(rows, rows)
        self.tokens = tokens
        for block in range(start // SIZE, len(tokens) // SIZE):
            pages = [
                held[block - dropped] if block >= dropped else None
                for held, dropped in zip(
                    self.table.pages, self.table.dropped, strict=True
                )
            ]
            self.index.add(self.digests, tokens, block, pages)

    def rewind(self, length):
        n = len(self.tokens) - length
        for entry in self.cache:
            entry.check_rewind(n)
        for entry in self.cache:
            entry.rewind(n)
        del self.tokens[length:], self.digests[length // SIZE :]

    def fork(self):
        other = Session(self.pool, self.index)
        other.table = self.table.fork()
        other.cache = paged_cache(other.table)
        other.tokens, other.digests = list(self.tokens), list(self.digests)
        return other

    def check(self, stored):
        """stored: what the pool holds, [2, slots, DIM] of each layer."""
        self.table.check()
        stop = len(self.tokens)
        assert self.table.lengths == [stop] * len(LAYERS)
        for layer, group in enumerate(self.pool.group_of):
            first, window = self.table.dropped[group] * SIZE, LAYERS[layer]
            assert first <= (0 if window is None else max(0, stop - window + 1))
            pages = np.array(self.table.pages[group], dtype=np.int64)
            places = np.arange(stop - first)
            rows = stored[layer][:, pages[places // SIZE] * SIZE + places % SIZE]
            assert np.array_equal(rows, np.stack([rows_of(self.tokens, first)] * 2))


def new_pool(tokens):
    return PagePool(
        KvShape(LAYERS, 1, DIM, 4), mx.float32, tokens=tokens, page_size=SIZE
    )


def indexed(tokens):
    pool = new_pool(tokens)
    return pool, PrefixIndex(pool.allocators, SIZE, pool.windows)


def check_all(pool, index, sessions):
    pool.check()
    index.check()
    for group, allocator in enumerate(pool.allocators):
        held = Counter(p for s in sessions for p in s.table.pages[group])
        assert allocator.references == [held[p] for p in range(allocator.count)]
    stored = [np.array(rows) for (rows,) in pool.rows]
    for session in sessions:
        session.check(stored)


def test_a_request_that_goes_back_into_a_findable_page_does_not_spoil_it():
    pool, index = indexed(tokens=80)
    first, second = Session(pool, index), Session(pool, index)
    first.feed(tokens_from(0, 16))
    first.rewind(9)
    assert index.match([], tokens_from(0, 17)).tokens == 16
    first.feed([70, 71, 72, 73])  # alone in the third page: writes into it
    match = index.match([], tokens_from(0, 17))
    assert (match.tokens, match.reason) == (8, None)
    assert index.match([], [*first.tokens, 1]).tokens == 12
    second.open(tokens_from(0, 15))
    first.rewind(5)
    first.feed([80, 81, 82])  # the second page is shared: copied, and found as it was
    assert index.match([], tokens_from(0, 16)).tokens == 12
    check_all(pool, index, [first, second])


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *["open"] * 4,
                *("feed", "feed", "rewind", "rewind", "fork", "free", "forget", "drop"),
            ]
        ),
        st.integers(0, 9),
        st.integers(0, 30),
        st.lists(st.integers(0, 1), max_size=30),
    ),
    max_size=25,
)


@settings(SETTINGS, max_examples=200)
@given(tokens=st.integers(20, 160), steps=STEPS)
def test_whatever_happens_found_pages_hold_the_rows_of_their_tokens(tokens, steps):
    pool, index = indexed(tokens)
    sessions, seen = [], [[]]
    for what, number, cut, tokens in steps:
        session = sessions[number % len(sessions)] if sessions else None
        try:
            if what == "open":
                session = Session(pool, index, reserve=number * 8)
                sessions.append(session)
                session.open(seen[-1 - number % len(seen)][:cut] + tokens)
            elif session is None:
                continue
            elif what == "feed":
                session.feed(tokens)
            elif what == "rewind":
                session.rewind(max(0, len(session.tokens) - cut))
                session.feed(tokens[:5])
            elif what == "fork":
                session = session.fork()
                sessions.append(session)
                session.feed(tokens[:5])
            elif what == "drop":
                index.drop(session.table.pages)
                for a, own in zip(pool.allocators, session.table.pages, strict=True):
                    assert not a.findable & set(own)
            else:
                sessions.remove(session)
                if what == "free":
                    session.table.free()
        except OutOfPagesError:
            pass
        seen.append(list(session.tokens))
        del session
        if what == "forget":
            gc.collect()
        check_all(pool, index, sessions)
        for allocator, known in zip(pool.allocators, index._known, strict=True):
            assert allocator.findable == known.keys()
    for session in sessions:
        session.table.free()
    assert pool.pages_in_use == 0
    check_all(pool, index, [])


# Ctrl-C


class Scene:
    """A request that runs, pages of others that have ended, and little room."""

    def __init__(self):
        self.pool, self.index = indexed(tokens=128)
        self.known = [
            tokens_from(0, 20),
            [*tokens_from(0, 12), *tokens_from(60, 30)],
            tokens_from(100, 35),
            [*tokens_from(0, 20), *tokens_from(80, 21)],
        ]
        self.sessions = [self.new() for _ in range(4)]
        for session, tokens in zip(self.sessions, self.known, strict=True):
            session.open(tokens)
        for session in self.sessions[1:3]:
            session.table.free()
        del self.sessions[1:3]
        self.own = self.new()

    def new(self):
        return Session(self.pool, self.index)

    def open(self):
        self.own.open([*self.known[1], *tokens_from(200, 40)])

    def write_again(self):
        self.sessions[1].rewind(30)
        self.sessions[1].feed(tokens_from(300, 17))

    def free(self):
        self.sessions[1].table.free()

    def drop(self):
        self.index.drop(self.sessions[1].table.pages)

    def check(self):
        for session in (self.own, self.sessions[1]):  # whoever it was, gives up
            session.table.free()
            session.tokens, session.digests = [], []
        gc.collect()
        check_all(self.pool, self.index, [*self.sessions, self.own])
        others = [self.new() for _ in self.known]
        for tokens, other in zip(self.known, others, strict=True):
            match = self.index.match(other.digests, [*tokens, 7])
            other.table.adopt(match.held, match.tokens)
            other.tokens = tokens[: match.tokens]
        check_all(self.pool, self.index, [*self.sessions, self.own, *others])
        for other in others:  # (what was found was right, and anybody can go on)
            other.table.free()
            other.tokens = []
        self.own.open([*self.known[1], *tokens_from(200, 40)])
        check_all(self.pool, self.index, [*self.sessions, self.own, *others])


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("name", ["open", "write_again", "free", "drop"])
def test_an_interrupt_at_any_line_leaves_only_right_pages_to_be_found(
    name, monkeypatch
):
    files = (*test_paged_interrupts.FILES, "cache/prefix.py")
    monkeypatch.setattr(test_paged_interrupts, "FILES", files)
    after = 0
    while True:
        scene = Scene()
        if not interrupted(getattr(scene, name), after):
            break
        scene.check()
        after += {"open": 17, "write_again": 10}.get(name, 3)  # (each is a scene)
    assert after > 50
