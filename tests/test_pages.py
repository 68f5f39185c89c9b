from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_llm.cache.pages import PageAllocator
from tiny_llm.errors import OutOfPagesError


def neighbours(pages):
    return pages == list(range(pages[0], pages[0] + len(pages)))


def with_free_runs(*lengths):
    """An allocator whose free pages are runs of these lengths, with a page between."""
    pages = PageAllocator(sum(lengths) + len(lengths))
    pages.allocate(pages.count)
    start, starts = 0, []
    for length in lengths:
        for page in range(start, start + length):
            pages.release(page)
        starts.append(start)
        start += length + 1
    return pages, starts


def test_a_lone_request_is_one_run_to_the_last_page():
    pages = PageAllocator(40)
    held = pages.allocate(3)
    while pages.free:
        held += pages.allocate(1, after=held[-1])
    assert held == list(range(40))
    pages.check()


def test_two_growing_requests_each_stay_in_one_run_until_the_pool_is_full():
    pages = PageAllocator(64)
    first, second = pages.allocate(1), pages.allocate(1)
    for _ in range(31):
        first += pages.allocate(1, after=first[-1])
        second += pages.allocate(1, after=second[-1])
    assert neighbours(first)
    assert neighbours(second)
    assert pages.free == 0


def test_a_third_request_gets_room_to_grow_too():
    pages = PageAllocator(64)
    held = [pages.allocate(1) for _ in range(3)]
    for _ in range(15):
        for own in held:
            own += pages.allocate(1, after=own[-1])
    assert all(neighbours(own) for own in held)


def test_what_the_neighbours_cannot_give_is_taken_elsewhere():
    pages, (first, second) = with_free_runs(3, 5)
    assert pages.allocate(4, after=first - 1) == [0, 1, 2, second + 2]
    assert pages.free == 4
    pages.check()


def test_a_final_request_takes_the_tightest_run_that_fits():
    for n, chosen in ((1, 1), (2, 1), (3, 2), (4, 0), (5, 0)):
        pages, starts = with_free_runs(5, 2, 3)
        start = starts[chosen]
        assert pages.allocate(n, final=True) == list(range(start, start + n))
        pages.check()


def test_a_final_request_that_fits_no_run_gets_the_longest_ones():
    pages, (first, _, third) = with_free_runs(5, 2, 3)
    taken = pages.allocate(8, final=True)
    assert taken == [*range(first, first + 5), *range(third, third + 3)]


def test_a_page_is_free_when_its_last_holder_has_released_it():
    pages = PageAllocator(2)
    (page,) = pages.allocate(1)
    pages.hold(page)
    pages.hold(page)
    for references in (2, 1):
        pages.release(page)
        assert (pages.references[page], pages.free) == (references, 1)
    pages.release(page)
    assert pages.free == 2
    pages.check()


def test_more_than_is_free_is_refused_and_changes_nothing():
    pages, starts = with_free_runs(2, 1)
    references = list(pages.references)
    with pytest.raises(OutOfPagesError, match=r"4 pages are needed.*of 5 only 3 are"):
        pages.allocate(4, after=1)
    assert (pages.references, pages.free) == (references, 3)
    pages.check()
    assert sorted(pages.allocate(3)) == [0, 1, starts[1]]


def test_no_pages_are_an_empty_list_even_where_none_are_free():
    pages = PageAllocator(1)
    held = pages.allocate(1)
    assert pages.allocate(0) == pages.allocate(0, after=held[0]) == []


def test_abandoned_pages_are_back_when_the_books_are_next_looked_at():
    pages = PageAllocator(4)
    mine, theirs = pages.allocate(2), pages.allocate(2)
    pages.hold(mine[0])
    pages.abandon(mine)
    pages.abandon(theirs)
    assert pages.references[theirs[0]] == 1  # a finalizer changes nothing
    assert pages.free == 3
    assert [pages.references[page] for page in mine] == [1, 0]
    assert sorted(pages.allocate(3)) == sorted([mine[1], *theirs])


@pytest.mark.parametrize("page", [0, 3])
def test_a_page_that_nobody_holds_is_our_own_mistake(page):
    pages = PageAllocator(4)
    with pytest.raises(AssertionError):
        pages.release(page)
    with pytest.raises(AssertionError):
        pages.hold(page)


# Findable pages


def with_cached(count, *cached):
    """All pages in use, but for cached ones: the first is the least recently used."""
    pages, evicted = PageAllocator(count), []
    pages.allocate(count)
    pages.on_evict = evicted.append
    for page in cached:
        pages.mark(page)
        pages.release(page)
    return pages, evicted


def test_a_findable_page_stays_findable_until_its_room_is_needed():
    pages, evicted = with_cached(4, 2)
    assert (pages.free, list(pages.cached), evicted) == (1, [2], [])
    pages.release(0)
    assert pages.allocate(1) == [0]  # a free one is taken first
    assert (pages.findable, evicted) == ({2}, [])
    assert pages.allocate(1) == [2]
    assert (pages.findable, list(pages.cached), evicted) == (set(), [], [2])
    pages.check()


def test_whoever_holds_a_cached_page_again_has_it_to_itself_and_it_stays_findable():
    pages, evicted = with_cached(4, 2, 1)
    pages.hold(2)
    assert (pages.references[2], list(pages.cached)) == (1, [1])
    pages.check()
    assert pages.allocate(1) == [1]
    with pytest.raises(OutOfPagesError):
        pages.allocate(1)
    pages.release(2)
    assert (list(pages.cached), evicted) == ([2], [1])


def test_the_least_recently_used_pages_are_evicted_first():
    pages, evicted = with_cached(9, 4, 0, 8, 2)
    pages.hold(4)
    pages.release(4)
    for _ in range(4):
        pages.allocate(1)
    assert evicted == [0, 8, 2, 4]


def test_pages_are_evicted_until_enough_lie_side_by_side():
    pages, evicted = with_cached(12, 5, 7, 6, 2)
    for page in (0, 9, 11):
        pages.release(page)
    assert pages.allocate(3) == [5, 6, 7]
    assert evicted == [5, 7, 6]


def test_no_more_pages_are_evicted_than_are_asked_for_however_they_lie():
    pages, evicted = with_cached(12, 0, 2, 4, 6, 7, 8)
    pages.release(10)
    assert len(pages.allocate(3)) == 3
    assert evicted == [0, 2, 4]
    pages.check()


def test_pages_beside_the_last_one_are_not_evicted_for_where_the_rest_fits_one_run():
    pages, evicted = with_cached(12, 11, 0)
    for page in (4, 7, 8):
        pages.release(page)
    assert pages.allocate(3, after=3) == [4, 7, 8]
    assert evicted == []


def test_pages_evicted_beside_the_last_one_count_once():
    pages, evicted = with_cached(8, 2, 3, 5, 6, 0)
    assert pages.allocate(4, after=1) == [2, 3, 5, 6]
    assert evicted == [2, 3, 5, 6]


def test_growing_by_a_page_evicts_nothing_while_others_are_free():
    pages, evicted = with_cached(8, 4)
    pages.release(6)
    assert pages.allocate(1, after=3) == [6]
    assert pages.allocate(1, after=3) == [4]
    assert evicted == [4]


def test_a_page_unmarked_is_free_as_soon_as_nobody_holds_it():
    pages, evicted = with_cached(4, 1, 2)
    pages.unmark(1)
    pages.mark(0)
    pages.unmark(0)
    pages.release(0)
    pages.unmark(3)  # was never findable
    pages.check()
    assert (pages.free, list(pages.cached)) == (3, [2])
    assert (pages.allocate(2), evicted) == ([0, 1], [])


def test_a_page_that_its_holder_claims_for_writing_is_not_found_any_more():
    pages, evicted = with_cached(4)
    pages.mark(3)
    pages.claim(3)
    pages.claim(2)
    assert (pages.findable, evicted) == (set(), [3])
    pages.release(3)
    assert list(pages.cached) == []


def test_counting_anew_keeps_the_order_of_cached_pages():
    pages, _ = with_cached(6, 3, 1, 5)
    pages.mark(0)
    pages.recount([[1, 2], [2]])
    assert list(pages.cached) == [3, 5, 0]
    assert (pages.references, pages.free) == ([0, 1, 2, 0, 0, 0], 4)
    pages.check()


def test_only_a_page_in_use_can_be_marked():
    pages, _ = with_cached(2, 1)
    pages.release(0)
    for page in (0, 1):
        with pytest.raises(AssertionError):
            pages.mark(page)


def eviction_order(cached, free, n, after):
    """Pages to evict for n: tried one by one on a plain set of free pages."""
    evicted, free = [], set(free)

    def runs():
        starts = [page for page in free if page - 1 not in free]
        return {s: next(n for n in range(1, 999) if s + n not in free) for s in starts}

    while cached and (n > 1 or n > len(free)) and len(evicted) < n:
        lengths = runs()
        beside = lengths.pop(after + 1, 0) if after is not None else 0
        if len(free) >= n and max(lengths.values(), default=0) >= n - beside:
            break
        evicted.append(cached[0])
        free.add(cached[0])
        cached = cached[1:]
    return evicted


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("take", "take", "grow", "hold", "release", "release", "abandon"),
                *("mark", "mark", "mark", "unmark", "revive", "claim", "recount"),
            ]
        ),
        st.integers(0, 7),  # how many, or which
        st.booleans(),
    ),
    max_size=60,
)


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(count=st.integers(1, 24), operations=OPERATIONS)
def test_the_books_agree_with_a_plain_count_whatever_happens(count, operations):
    pages, held = PageAllocator(count), []  # held: pages, once for each holder
    findable, cached, evicted = set(), [], []
    pages.on_evict = evicted.append
    for what, n, final in operations:
        if what in ("take", "grow"):
            last = held[n % len(held)] if held and what == "grow" else None
            free = set(range(count)) - set(held)
            if n > len(free):
                with pytest.raises(OutOfPagesError):
                    pages.allocate(n, after=last, final=final)
            else:
                taken = pages.allocate(n, after=last, final=final)
                assert len(set(taken)) == len(taken) == n
                assert set(taken) <= free
                expected = eviction_order(cached, free - set(cached), n, last)
                assert evicted == expected
                cached = cached[len(expected) :]
                assert not set(taken) & set(cached)
                findable -= set(evicted)
                if n and last is not None and last + 1 in free - set(cached):
                    assert taken[0] == last + 1
                held += taken
        elif what == "revive":
            if cached:
                held.append(cached.pop(n % len(cached)))
                pages.hold(held[-1])
        elif what == "unmark":
            page = n % count
            pages.unmark(page)
            findable.discard(page)
            cached = [other for other in cached if other != page]
        elif what == "recount":  # (who holds what is not lost)
            pages.recount([held[::2], held[1::2]])
        elif held:
            page = held[n % len(held)]
            if what == "hold":
                pages.hold(page)
                held.append(page)
            elif what == "release":
                pages.release(page)
                held.remove(page)
            elif what == "mark":
                pages.mark(page)
                findable.add(page)
            elif what == "claim":
                pages.claim(page)
                assert evicted == [page] * (page in findable)
                findable.discard(page)
            else:
                own = sorted(set(held))[: n + 1]
                pages.abandon(own)
                for each in own:
                    held.remove(each)
                assert pages.free == count - len(set(held))
            cached += sorted(findable - set(held) - set(cached))
        pages.check()
        assert (pages.findable, list(pages.cached)) == (findable, cached)
        assert pages.free == count - len(set(held))
        evicted.clear()
        assert Counter(held) == Counter(
            {page: n for page, n in enumerate(pages.references) if n}
        )
    for page in held:
        pages.release(page)
    for page in range(count):
        pages.unmark(page)
    pages.check()
    assert pages.allocate(count) == list(range(count))  # all joined to one run
