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


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "grow", "hold", "release", "abandon"]),
        st.integers(0, 7),  # how many, or which
        st.booleans(),
    ),
    max_size=60,
)


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(count=st.integers(1, 24), operations=OPERATIONS)
def test_the_books_agree_with_a_plain_count_whatever_happens(count, operations):
    pages, held = PageAllocator(count), []  # held: pages, once for each holder
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
                if n and last is not None and last + 1 in free:
                    assert taken[0] == last + 1
                held += taken
        elif held:
            page = held[n % len(held)]
            if what == "hold":
                pages.hold(page)
                held.append(page)
            elif what == "release":
                pages.release(page)
                held.remove(page)
            else:
                own = sorted(set(held))[: n + 1]
                pages.abandon(own)
                for each in own:
                    held.remove(each)
        pages.check()
        assert Counter(held) == Counter(
            {page: n for page, n in enumerate(pages.references) if n}
        )
    for page in held:
        pages.release(page)
    pages.check()
    assert pages.allocate(count) == list(range(count))  # all joined to one run
