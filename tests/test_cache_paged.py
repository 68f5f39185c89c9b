"""Paged caches: where tokens lie, what is shared, copied and given back."""

import mlx.core as mx
import numpy as np
import pytest
from oracle import model
from paged_model import HEADS, KV_HEADS, Request, naive_attention

from tiny_llm.cache import PagePool, fork, rewind
from tiny_llm.errors import OutOfPagesError, ParameterError
from tiny_llm.memory import KvShape, page_count

DIM = 64
TOKEN = 2 * KV_HEADS * DIM * 4  # bytes of one layer


def random(*shape):
    return mx.random.normal(shape)


def new_pool(tokens, windows=(None,), **options):
    shape = KvShape(windows, KV_HEADS, DIM, 4)
    return PagePool(shape, mx.float32, tokens=tokens, **options)


def new_cache(pool, reserve=0):
    return Request.empty(pool, DIM, reserve).cache


def feed(cache, n):
    """Append n random tokens to all layers; returns K and V of the last layer."""
    for entry in cache:
        k, v = random(1, KV_HEADS, n, DIM), random(1, KV_HEADS, n, DIM)
        q = random(1, HEADS, n, DIM)
        mx.eval(entry.attend(q, k, v, scale=0.1, window=entry.window))
    return k, v


def held(entry):
    found = entry.held()
    return np.array(found.keys[0]), np.array(found.values[0])


def peak_of(step):
    """Bytes that a step has allocated at most, beside what there was."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    step()
    return mx.get_peak_memory() - before


# Where tokens lie


def test_a_lone_request_is_one_run_and_is_read_without_copying():
    pool = new_pool(4352)
    cache = new_cache(pool)
    for _ in range(8):
        feed(cache, 512)
    feed(cache, 1)
    assert cache[0].table.slots(0, 0, 4097) == [(0, 4097)]
    # scores and weights take 4097 numbers a head; K and V would be 32 times as much
    assert peak_of(lambda: feed(cache, 1)) < 4097 * TOKEN / 8


@pytest.mark.parametrize("bits", [None, 8])
def test_appending_writes_in_place(bits):
    pool = new_pool(16384, bits=bits)
    cache = new_cache(pool)
    for _ in range(3):
        feed(cache, 1)
    assert pool.nbytes > 4 * 2**20
    assert peak_of(lambda: feed(cache, 1)) < 2**16


def test_writing_is_in_place_in_several_runs_too():
    pool = new_pool(16384)
    k, v = random(KV_HEADS, 40, DIM), random(KV_HEADS, 40, DIM)
    runs = [(100, 130), (7, 10), (9000, 9007)]

    def write():
        pool.write(0, runs, k, v)
        mx.eval(pool.rows)

    assert peak_of(write) < 2**17
    for (first, last), start in zip(runs, (0, 30, 33), strict=True):
        keys, values = pool.read(0, (first, last))
        part = slice(start, start + last - first)
        assert mx.array_equal(keys[0][0], k[:, part])
        assert mx.array_equal(values[0][0], v[:, part])


def test_reserved_pages_lie_side_by_side_whoever_comes_in_between():
    pool = new_pool(640, page_size=16)
    first, second = new_cache(pool, reserve=200), new_cache(pool, reserve=200)
    for _ in range(200):
        feed(first, 1)
        feed(second, 1)
    for cache in (first, second):
        assert len(cache[0].table.slots(0, 0, 200)) == 1
        assert len(cache[0].table.pages[0]) == 13  # of 16 tokens each


def test_the_bytes_of_a_request_are_those_of_its_pages():
    pool = new_pool(640, (None, 20), page_size=16)
    cache = new_cache(pool)
    assert [entry.nbytes for entry in cache] == [0, 0]
    feed(cache, 17)
    assert [entry.nbytes for entry in cache] == [32 * TOKEN, 32 * TOKEN]


def test_an_offset_handed_out_does_not_change_later():
    cache = new_cache(new_pool(64))
    feed(cache, 5)
    before = cache[0].offset
    feed(cache, 1)
    assert (before, cache[0].offset) == (5, 6)


def test_keys_handed_out_do_not_change_later():
    cache = new_cache(new_pool(64))
    k = random(1, KV_HEADS, 5, DIM)
    keys, values, _, _ = cache[0].update_and_fetch(k, k)
    rewind(cache, 0)
    feed(cache, 5)
    assert mx.array_equal(keys, k)
    assert mx.array_equal(values, k)


# Forks


def test_a_fork_takes_no_page_and_copies_only_the_partial_one_when_it_goes_on():
    pool = new_pool(4096, page_size=64)
    first = new_cache(pool)
    feed(first, 10 * 64 + 7)
    assert pool.pages_in_use == 11
    second = fork(first)
    assert pool.pages_in_use == 11
    grown = peak_of(lambda: feed(second, 1))
    assert pool.pages_in_use == 12
    assert grown < 3 * 64 * TOKEN  # the page, and its way there
    assert second[0].table.pages[0][:10] == first[0].table.pages[0][:10]
    feed(first, 1)  # is alone on its own now: nothing more is copied
    assert pool.pages_in_use == 12


def test_a_fork_at_the_end_of_a_page_copies_nothing():
    pool = new_pool(640, page_size=16)
    first = new_cache(pool)
    feed(first, 32)
    second = fork(first)
    feed(second, 1)
    feed(first, 1)
    assert first[0].table.pages[0][:2] == second[0].table.pages[0][:2]
    assert pool.pages_in_use == 4


@pytest.mark.parametrize("who", ["first", "second"])
@pytest.mark.parametrize("back", [0, 3, 20])
def test_whoever_of_a_fork_writes_the_other_sees_nothing_of_it(who, back):
    pool = new_pool(640, (None, None), page_size=16)
    first = new_cache(pool)
    feed(first, 41)
    second = fork(first)
    writer, other = (first, second) if who == "first" else (second, first)
    before = [held(entry) for entry in other]
    rewind(writer, 41 - back)
    feed(writer, 30)
    for entry, rows in zip(other, before, strict=True):
        assert np.array_equal(held(entry), rows)
    for mine, theirs in zip(writer, before, strict=True):
        kept = 41 - back
        assert np.array_equal(held(mine)[0][:, :, :kept], theirs[0][:, :, :kept])
    pool.check()


def test_a_fork_that_is_forgotten_leaves_its_pages_to_the_other_at_once():
    pool = new_pool(8, page_size=4)
    first = new_cache(pool)
    feed(first, 6)
    second = fork(first)
    assert second[0].offset == 6
    del second
    feed(first, 2)  # there is no third page to copy the second one to
    assert pool.pages_in_use == 2


def test_only_paged_requests_can_be_forked():
    for wrong in (model("llama_tied").create_kv_cache(), [], 5):
        with pytest.raises(ParameterError, match="fork needs the entries of a paged"):
            fork(wrong)


# Pages found again


def found(cache, page_size, length):
    """The pages of the first tokens of a request, as an index would find them."""
    table, size = cache[0].table, page_size
    firsts = [
        0 if window is None else max(0, length - window + 1) // size
        for window in table.pool.windows
    ]
    return [
        (first, pages[first - dropped : length // size - dropped])
        for first, pages, dropped in zip(
            firsts, table.pages, table.dropped, strict=True
        )
    ]


@pytest.mark.parametrize("finished", [False, True])
def test_adopted_pages_are_read_where_they_lie_and_written_by_nobody(finished):
    pool = new_pool(640, (None, 20), page_size=16)
    first = new_cache(pool)
    feed(first, 41)
    pages = found(first, 16, 32)
    before = [held(entry) for entry in first]
    if finished:
        for allocator, (_, own) in zip(pool.allocators, pages, strict=True):
            for page in own:
                allocator.mark(page)
        first[0].table.free()
        assert pool.pages_in_use == 0
    second = new_cache(pool)
    in_use = pool.pages_in_use
    second[0].table.adopt(pages, 32)
    assert pool.pages_in_use == in_use + (4 if finished else 0)
    assert [entry.offset for entry in second] == [32, 32]
    assert second[0].table.dropped == [0, 0]
    for one, other in zip(second, before, strict=True):
        assert np.array_equal(held(one), [rows[:, :, :32] for rows in other])
    feed(second, 5)
    rewind(second, 30)
    feed(second, 2)  # into a page of the other, which is copied, or found no more
    for one, other in zip(second, before, strict=True):
        assert np.array_equal(
            [rows[:, :, :30] for rows in held(one)], [rows[:, :, :30] for rows in other]
        )
    if not finished:
        for one, other in zip(first, before, strict=True):
            assert np.array_equal(held(one), other)
    second[0].table.free()
    pool.check()


def test_a_window_adopts_only_the_pages_that_it_sees():
    pool = new_pool(640, (None, 20), page_size=16)
    first, second = new_cache(pool), new_cache(pool)
    feed(first, 100)
    second[0].table.adopt(found(first, 16, 96), 96)
    assert second[0].table.dropped == [0, 4]  # token 96 sees 77 and on
    assert np.array_equal(held(second[1]), [x[:, :, 64:96] for x in held(first[1])])
    k, _ = feed(second, 1)
    assert np.array_equal(held(second[1])[0][:, :, -1:], k)
    with pytest.raises(ParameterError, match="cannot rewind 20 tokens"):
        rewind(second, 77)
    rewind(second, 83)  # 83 sees 64 and on
    rewind(second, 0)
    feed(second, 3)
    assert second[0].table.dropped == [0, 0]
    pool.check()


def test_what_is_reserved_after_an_adoption_lies_side_by_side():
    pool = new_pool(640, page_size=16)
    first = new_cache(pool, reserve=40)
    feed(first, 40)
    second = new_cache(pool, reserve=200)
    second[0].table.adopt(found(first, 16, 32), 32)
    assert len(second[0].table.pages[0]) == 2
    other = new_cache(pool)
    for _ in range(150):
        feed(second, 1)
        feed(other, 1)
    assert len(second[0].table.pages[0]) == 13
    assert len(second[0].table.slots(0, 0, 182)) == 2  # the other's pages and its own


def test_a_reserve_after_an_adoption_takes_the_tightest_run_and_later_growth_does_not():
    pool = new_pool(640, page_size=16)
    first, second = new_cache(pool, reserve=640), new_cache(pool, reserve=80)
    feed(first, 32)
    for page in (*range(10, 13), *range(20, 30)):
        pool.allocators[0].release(page)  # (the first one is not used any more)
    second[0].table.adopt([(0, (0, 1))], 32)
    feed(second, 48)
    assert second[0].table.pages == [(0, 1, 10, 11, 12)]
    feed(second, 1)
    assert second[0].table.pages == [(0, 1, 10, 11, 12, 25)]


def test_a_reserve_without_room_after_an_adoption_is_refused_and_asked_for_again():
    pool = new_pool(160, page_size=16)
    first, second = new_cache(pool), new_cache(pool, reserve=150)
    feed(first, 33)
    second[0].table.adopt(found(first, 16, 32), 32)
    with pytest.raises(OutOfPagesError, match=r"8 more pages .* 10 pages 7 are free"):
        feed(second, 1)
    assert [second[0].offset, pool.pages_in_use] == [32, 3]
    first[0].table.free()
    feed(second, 1)
    assert pool.pages_in_use == 10
    second[0].table.free()
    assert pool.pages_in_use == 0
    feed(second, 1)  # an adoption is forgotten with its pages
    assert pool.pages_in_use == 1


def test_only_an_empty_request_can_adopt():
    pool = new_pool(160, page_size=16)
    first = new_cache(pool)
    feed(first, 33)
    with pytest.raises(AssertionError):
        first[0].table.adopt(found(first, 16, 16), 16)


def test_a_freed_request_leaves_its_first_pages_cached_longest():
    pool = new_pool(160, page_size=16)
    for free in (lambda cache: cache[0].table.free(), lambda cache: cache.clear()):
        cache = new_cache(pool)
        feed(cache, 64)
        pages = cache[0].table.pages[0]
        for page in pages:
            pool.allocators[0].mark(page)
        free(cache)
        assert pool.pages_in_use == 0
        assert tuple(pool.allocators[0].cached)[-4:] == pages[::-1]


# The pool's size


@pytest.mark.parametrize("windows", [(None,), (None, 20), (20, 20)])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_pool_of_bytes_is_as_large_as_they_allow(windows, bits):
    shape = KvShape(windows, KV_HEADS, DIM, 4)
    page = 16 * shape.row_bytes(bits) * len(windows)
    for memory in (page, 10 * page - 1, 10 * page, 10 * page + 1):
        pool = PagePool(shape, mx.float32, memory=memory, page_size=16, bits=bits)
        assert pool.nbytes <= memory < pool.nbytes + page
    with pytest.raises(ParameterError, match=f"memory is {page - 1} bytes, but a page"):
        PagePool(shape, mx.float32, memory=page - 1, page_size=16, bits=bits)


def test_a_pool_of_tokens_has_whole_pages_for_them():
    for tokens, pages in ((1, 1), (16, 1), (17, 2), (160, 10)):
        pool = new_pool(tokens, page_size=16)
        assert pool.allocators[0].free == pages
        assert pool.nbytes == pages * 16 * TOKEN
        feed(new_cache(pool), pages * 16)


def test_requests_with_windows_bound_the_pages_of_a_pool():
    shape = KvShape((None, 20), KV_HEADS, DIM, 4)
    options = {"page_size": 16, "max_requests": 3, "max_append": 32}
    pool = PagePool(shape, mx.float32, tokens=1600, **options)
    each = page_count(10**6, 16, 20, 32)
    assert [a.count for a in pool.allocators] == [100, 3 * each]
    requests = [new_cache(pool) for _ in range(3)]
    for _ in range(16):
        for cache in requests:
            feed(cache, 32)
    pool.check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "one of tokens= and memory="),
        ({"tokens": 8, "memory": 8}, "one of tokens= and memory="),
        ({"tokens": 0}, "tokens must be"),
        ({"memory": -1}, "memory must be"),
        ({"tokens": 8, "page_size": 0}, "page_size must be"),
        ({"tokens": 8, "page_size": 1.5}, "page_size must be"),
        ({"tokens": 8, "bits": 3}, "bits is 3"),
        ({"tokens": 8, "bits": 8, "group_size": 48}, "group_size is 48"),
        ({"tokens": 8, "max_requests": 0}, "max_requests must be"),
        ({"tokens": 8, "max_append": 0}, "max_append must be"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_by_name(options, words):
    with pytest.raises(ParameterError, match=words):
        new_pool(options.pop("tokens", None), **options)


def test_a_pool_of_another_dtype_than_its_shape_counts_with_is_refused():
    with pytest.raises(ParameterError, match=r"float16 takes 2 bytes .* counts with 4"):
        PagePool(KvShape((None,), KV_HEADS, DIM, 4), mx.float16, tokens=64)


def test_running_out_of_pages_names_the_numbers_and_changes_nothing():
    pool = new_pool(80, (None, 20), page_size=16)
    first, second = new_cache(pool), new_cache(pool)
    feed(first, 40)
    feed(second, 20)
    before = [held(entry) for entry in second]
    words = r"2 more pages of 16 tokens .* 5 pages .* full attention 0 are free"
    with pytest.raises(OutOfPagesError, match=words):
        feed(second, 40)
    assert [entry.offset for entry in second] == [20, 20]
    for entry, rows in zip(second, before, strict=True):
        assert np.array_equal(held(entry), rows)
    assert pool.pages_in_use == 10
    feed(second, 12)  # what there is room for
    first[0].table.free()
    feed(second, 28)


def test_a_reserve_that_does_not_fit_is_refused_before_anything_is_stored():
    pool = new_pool(64, page_size=16)
    cache = new_cache(pool, reserve=65)
    with pytest.raises(OutOfPagesError, match=r"5 more pages .* 4 pages 4 are free"):
        feed(cache, 1)
    assert (cache[0].offset, pool.pages_in_use) == (0, 0)


# Windows


def test_a_window_gives_back_the_pages_it_has_left():
    pool = new_pool(1024, (None, 20), page_size=16)
    cache = new_cache(pool)
    most = page_count(10**6, 16, 20)
    for tokens in range(1, 400):
        feed(cache, 1)
        full, windowed = cache[0].table.pages
        assert len(full) == -(-tokens // 16)
        assert len(windowed) <= most
    assert len(windowed) >= most - 1  # what can be rewound is still there


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_64_tokens_can_be_rewound_behind_a_window_and_more_are_refused(page_size):
    pool = new_pool(400, (20,), page_size=page_size)
    cache = new_cache(pool)
    for _ in range(200):
        feed(cache, 1)
    before = held(cache[0])
    with pytest.raises(ParameterError, match=r"cannot rewind 100 .* window of 20"):
        rewind(cache, 100)
    assert np.array_equal(held(cache[0]), before)
    rewind(cache, 136)
    assert np.array_equal(held(cache[0]), [rows[:, :, :-64] for rows in before])
    q, new = random(1, HEADS, 1, DIM), random(1, KV_HEADS, 1, DIM)
    k, v = (np.concatenate([rows, new], axis=2)[0] for rows in held(cache[0]))
    out = cache[0].attend(q, new, new, scale=0.1, window=20)
    assert np.abs(np.array(out[0]) - naive_attention(q[0], k, v, 0.1, 20)).max() < 1e-5
    rewind(cache, 0)
    assert pool.pages_in_use == 0


def test_a_chunk_longer_than_the_window_can_be_taken_back():
    pool = new_pool(400, (5,), page_size=4)
    cache = new_cache(pool)
    feed(cache, 100)
    before = held(cache[0])
    feed(cache, 150)
    rewind(cache, 100)
    found = held(cache[0])
    n = found[0].shape[2]
    assert n >= 64
    assert np.array_equal(found, [rows[:, :, -n:] for rows in before])


def test_pages_that_a_fork_still_holds_are_no_room_when_a_window_leaves_them():
    pool = new_pool(84, (4,), page_size=4)
    first = new_cache(pool)
    feed(first, 84)
    second = fork(first)
    before = first[0].table.pages
    with pytest.raises(OutOfPagesError, match=r"1 more pages .* 21 pages 0 are free"):
        feed(first, 1)
    assert first[0].table.pages == second[0].table.pages == before
    assert [first[0].offset, first[0].table.dropped] == [84, [0]]
    del second
    feed(first, 1)
    assert first[0].table.dropped == [4]  # (84 - 3 - 64) / 4


def test_a_layer_that_is_behind_keeps_what_its_window_sees():
    pool = new_pool(800, (4, 4), page_size=4)
    cache = new_cache(pool)
    feed(cache, 100)
    before = held(cache[1])
    feed(cache[:1], 100)
    other = fork(cache)  # the pages of the step are shared now
    feed(cache[1:], 1)
    feed(other[1:], 1)
    for behind in (cache[1], other[1]):
        first = 101 - held(behind)[0].shape[2]
        assert first <= 100 - 3 - 64
        assert np.array_equal(held(behind)[0][:, :, :-1], before[0][:, :, first:])


# Arguments


def test_what_does_not_fit_the_pool_is_refused_and_changes_nothing():
    cache = new_cache(new_pool(64, (20,)))
    q, k = random(1, HEADS, 2, DIM), random(1, KV_HEADS, 2, DIM)
    half = k.astype(mx.float16)
    two = random(2, KV_HEADS, 2, DIM)
    for wrong_k, wrong_v, window, words in (
        (k, k, 19, "a window of 19, but its pages are kept for 20"),
        (k, k, None, "a window of None"),
        (k, k[:, :, :1], 20, "alike"),
        (two, two, 20, "does not fit a cache of"),
        (half, half, 20, "float16 do not fit a cache of mlx.core.float32"),
    ):
        with pytest.raises(ParameterError, match=words):
            cache[0].attend(q, wrong_k, wrong_v, scale=1.0, window=window)
        assert (cache[0].offset, cache[0].pool.pages_in_use) == (0, 0)
    with pytest.raises(ParameterError, match="makes its own mask"):
        cache[0].update_and_fetch(k, k, 2, mx.zeros((2, 2)))
    with pytest.raises(ParameterError, match="a mask for 3 of 2 new tokens"):
        cache[0].update_and_fetch(k, k, 3, "causal")
    assert cache[0].offset == 0


def test_a_layer_rewound_behind_its_neighbours_is_not_written_to():
    cache = new_cache(new_pool(400, (4, 4), page_size=4))
    for _ in range(10):
        feed(cache, 15)
    cache[0].rewind(150)  # the other layer still holds its tokens
    with pytest.raises(ParameterError, match="layer 0 was rewound to 0"):
        feed(cache, 3)
    rewind(cache, 0)
    feed(cache, 3)
    assert [entry.offset for entry in cache] == [3, 3]


# Saving


@pytest.mark.parametrize("windows", [(None, None), (20, 20), (None, 20)])
@pytest.mark.parametrize("bits", [None, 8])
def test_what_is_held_can_be_put_into_another_cache(windows, bits):
    pool = new_pool(960, windows, page_size=16, bits=bits)
    first = new_cache(pool)
    for _ in range(10):
        feed(first, 17)
    second = new_cache(pool, reserve=40)
    for source, target in zip(first, second, strict=True):
        target.restore(source.held(), DIM)
    for source, target in zip(first, second, strict=True):
        assert target.offset == 170
        mine, theirs = source.held(), target.held()
        for one, other in zip(
            (*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True
        ):
            assert mx.array_equal(one, other)
    assert pool.pages_in_use == 2 * sum(map(len, first[0].table.pages))


def test_putting_back_without_room_changes_nothing():
    pool = new_pool(128, (4,), page_size=4)
    first, second = new_cache(pool), new_cache(pool)
    for _ in range(10):
        feed(first, 15)
    kept = first[0].held()
    with pytest.raises(OutOfPagesError, match="21 more pages"):
        second[0].restore(kept, DIM)
    assert second[0].offset == 0
    feed(second, 3)
    assert second[0].offset == 3


def test_putting_back_does_not_write_into_pages_that_a_fork_shares():
    pool = new_pool(64, page_size=4)
    first = new_cache(pool, reserve=8)
    feed(first, 8)
    second = fork(first)
    before = held(second[0])
    kept = first[0].held()
    rewind(first, 0)  # its reserve stays
    feed(other := new_cache(pool), 8)
    first[0].restore(other[0].held(), DIM)
    assert np.array_equal(held(second[0]), before)
    assert np.array_equal(held(first[0]), held(other[0]))
    del kept


def test_more_can_be_put_back_than_was_reserved():
    pool = new_pool(64, page_size=4)
    first, second = new_cache(pool, reserve=8), new_cache(pool)
    feed(first, 8)
    feed(second, 30)
    rewind(first, 0)
    first[0].restore(second[0].held(), DIM)
    assert np.array_equal(held(first[0]), held(second[0]))
