"""What paged requests generate: alone, forked, and beside each other in one pool."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from oracle import goldens, model, naive_greedy
from paged_model import poison

from tiny_llm import stream_generate
from tiny_llm.cache import fork, rewind
from tiny_llm.errors import OutOfPagesError, ParameterError

VARIANTS = ["llama_tied", "mistral_swa", "qwen3"]


def in_turn(streams):
    """All that the streams yield, one token of each after the other."""
    yielded, going = [[] for _ in streams], dict(enumerate(streams))
    while going:
        for number, stream in list(going.items()):
            token = next(stream, None)
            if token is None:
                del going[number]
            else:
                yielded[number].append(token)
    return yielded


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_requests_in_one_pool_generate_what_each_does_alone(variant, page_size):
    m = model(variant)
    pool = m.create_page_pool(tokens=384, page_size=page_size)
    poison(pool, [])  # NaN wherever nobody has written
    caches = [m.create_kv_cache("paged", pool=pool) for _ in range(3)]
    streams = [
        stream_generate(m, golden.ids, max_new_tokens=24, cache=cache, prefill_chunk=16)
        for golden, cache in zip(goldens(variant), caches, strict=True)
    ]
    expected = [golden.greedy for golden in goldens(variant)]
    assert in_turn(streams) == expected
    pool.check()
    del caches, streams
    assert pool.pages_in_use == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_neighbours_and_free_pages_do_not_change_logits(variant):
    m = model(variant)
    short, long = goldens(variant)[1], goldens(variant)[2]
    pool = m.create_page_pool(tokens=160, page_size=16)
    poison(pool, [])
    caches = [m.create_kv_cache("paged", pool=pool) for _ in "ab"]
    for cache, golden in zip(caches, (short, long), strict=True):
        ids = golden.ids
        first = m(mx.array([ids[:5]]), cache=cache)
        logits = mx.concatenate([first, m(mx.array([ids[5:]]), 5, cache)], axis=1)
        assert np.abs(np.array(logits[0]) - golden.logits).max() < 2e-4


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_the_same_prompt_twice_recomputes_its_last_token_only(length):
    m, ids = model("llama_tied"), goldens("llama_tied")[2].ids[:length]
    pool = m.create_page_pool(tokens=160, page_size=16)
    first = m.create_kv_cache("paged", pool=pool)
    list(stream_generate(m, ids, max_new_tokens=0, cache=first))
    second = fork(first)
    rewind(second, length - 1)
    expected = naive_greedy(m, ids, 6)
    again = stream_generate(m, ids[-1:], max_new_tokens=6, cache=second)
    assert list(again) == expected
    # ... and the first one's pages are still its own
    rewind(first, length - 1)
    again = stream_generate(m, ids[-1:], max_new_tokens=6, cache=first)
    assert list(again) == expected


@pytest.mark.parametrize("variant", ["llama_tied", "mistral_swa"])
@pytest.mark.parametrize(
    ("shared", "pages", "freed"),
    [(False, 7, True), (True, 7, True), (False, 9, False), (True, 7, False)],
)
def test_a_full_pool_stops_one_request_which_can_go_on_later(
    variant, shared, pages, freed
):
    m, prompt = model(variant), goldens(variant)[2].ids[:34]
    pool = m.create_page_pool(tokens=pages * 16, page_size=16)
    caches = [m.create_kv_cache("paged", pool=pool)]
    if shared:
        list(stream_generate(m, prompt[:-1], max_new_tokens=0, cache=caches[0]))
        caches.append(fork(caches[0]))
    else:
        caches.append(m.create_kv_cache("paged", pool=pool))
    streams = [
        stream_generate(m, prompt[cache[0].offset :], max_new_tokens=35, cache=cache)
        for cache in caches
    ]
    expected, yielded, full = naive_greedy(m, prompt, 35), [[], []], None
    while full is None:
        for number in range(2):
            try:
                yielded[number].append(next(streams[number]))
            except OutOfPagesError:
                full = number
                break
    other, done, stopped = 1 - full, yielded[full], caches[full]
    # every token that was computed has come; there was no page for the last one
    assert 0 < len(done) < 35
    assert done == expected[: len(done)]
    assert stopped[0].offset == len(prompt) + len(done) - 1
    if freed:
        stopped[0].table.free()
    assert yielded[other] + list(streams[other]) == expected
    caches[other][0].table.free()
    left = [*prompt, *done][stopped[0].offset :]
    rest = stream_generate(m, left, max_new_tokens=35 - len(done), cache=stopped)
    assert done + list(rest) == expected
    del caches, streams, stopped, rest
    gc.collect()  # (the exception held frames)
    assert pool.pages_in_use == 0


def test_a_prompt_without_room_leaves_the_cache_and_its_neighbours_as_they_were():
    m, golden = model("llama_tied"), goldens("llama_tied")[1]
    pool = m.create_page_pool(tokens=64, page_size=16)
    first = m.create_kv_cache("paged", pool=pool)
    second = m.create_kv_cache("paged", pool=pool)
    stream = stream_generate(m, golden.ids, max_new_tokens=24, cache=first)
    start = [next(stream)]
    list(stream_generate(m, [3, 4], max_new_tokens=0, cache=second))
    in_use = pool.pages_in_use
    with pytest.raises(OutOfPagesError):
        next(stream_generate(m, [5] * 70, cache=second, prefill_chunk=8))
    assert (second[0].offset, pool.pages_in_use) == (2, in_use)
    assert start + list(stream) == golden.greedy
    again = stream_generate(m, [5], max_new_tokens=4, cache=second)
    assert list(again) == naive_greedy(m, [3, 4, 5], 4)


def test_pages_are_free_as_soon_as_nobody_has_the_cache():
    m = model("llama_tied")
    pool = m.create_page_pool(tokens=64, page_size=16)
    cache = m.create_kv_cache("paged", pool=pool, reserve=33)
    stream = stream_generate(m, [1, 2, 3], cache=cache)
    next(stream)
    assert pool.pages_in_use == 3
    other = fork(cache)
    del cache
    assert pool.pages_in_use == 3  # the stream holds it
    stream.close()
    del stream
    assert pool.pages_in_use == 1  # the fork's
    other[0].table.free()
    assert (pool.pages_in_use, other[0].offset) == (0, 0)
    pool.check()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_forked_requests_go_on_as_if_each_were_alone(variant, page_size):
    m, golden = model(variant), goldens(variant)[1]
    pool = m.create_page_pool(tokens=256, page_size=page_size)
    cache = m.create_kv_cache("paged", pool=pool)
    start = list(stream_generate(m, golden.ids, max_new_tokens=5, cache=cache))
    turns = ([7, 8, 9], [11], [7, 8, 10])
    forks = [cache, fork(cache), fork(cache)]
    streams = [
        stream_generate(m, turn, max_new_tokens=12, cache=own)
        for turn, own in zip(turns, forks, strict=True)
    ]
    for turn, tokens in zip(turns, in_turn(streams), strict=True):
        assert tokens == naive_greedy(m, [*golden.ids, *start, *turn], 12)
    del cache, forks, streams
    assert pool.pages_in_use == 0


@pytest.mark.parametrize("seed", range(3))
def test_rewinding_and_going_on_with_a_window_equals_a_fresh_prefill(seed):
    m, draw = model("mistral_swa"), np.random.default_rng(seed)
    pool = m.create_page_pool(tokens=512, page_size=4)
    cache, ids, refused = m.create_kv_cache("paged", pool=pool), [], 0
    for _ in range(48):
        new = draw.integers(0, 320, draw.integers(1, 40)).tolist()
        logits = m(mx.array([new]), offset=len(ids), cache=cache, logits_to_keep=1)
        ids += new
        fresh = m(mx.array([ids]), logits_to_keep=1)
        assert np.abs(np.array(logits - fresh)).max() < 1e-4
        left = max(len(ids) - int(draw.choice([0, 0, 5, 30, 110])), 0)
        try:
            rewind(cache, left)
            ids = ids[:left]
        except ParameterError:
            refused += 1
        if len(ids) > 400:
            rewind(cache, 0)
            ids = []
    assert refused


@pytest.mark.parametrize("held", [0, 5])
def test_a_refused_prompt_leaves_the_pool_as_it_was_also_with_a_reserve(held):
    m = model("llama_tied")
    pool = m.create_page_pool(tokens=64, page_size=16)
    cache = m.create_kv_cache("paged", pool=pool, reserve=40)
    if held:
        list(stream_generate(m, [1] * held, max_new_tokens=0, cache=cache))
    before = pool.pages_in_use
    with pytest.raises(OutOfPagesError, match="more pages"):
        list(stream_generate(m, [2] * 80, cache=cache, prefill_chunk=16))
    assert cache[0].offset == held
    assert pool.pages_in_use == before
    pool.check()


def test_a_windowed_pool_that_is_full_says_what_it_was_made_for():
    m = model("mistral_swa")
    pool = m.create_page_pool(tokens=4096, page_size=16, max_requests=1, max_append=64)
    caches = [m.create_kv_cache("paged", pool=pool) for _ in range(9)]
    message = r"max_requests=1 that append max_append=64 tokens at a time"

    def fill():
        for cache in caches:
            list(stream_generate(m, [1] * 60, max_new_tokens=0, cache=cache))

    with pytest.raises(OutOfPagesError, match=message):
        fill()


def test_rewind_takes_whole_numbers():
    m = model("llama_tied")
    cache = m.create_kv_cache()
    for bad in ("a", 0.5, -1, None):
        with pytest.raises(ParameterError, match="length must be a whole number"):
            rewind(cache, bad)


@pytest.mark.parametrize("wanted", [4, 5, 6])
def test_only_a_request_that_lacks_tokens_ends_in_an_error(wanted):
    # 12 tokens of prompt and 4 new ones fill the pool: the fifth has come, unstored
    m = model("llama_tied")
    cache = m.create_kv_cache("paged", tokens=16, page_size=16)
    expected = naive_greedy(m, [1] * 12, 5)
    stream = stream_generate(m, [1] * 12, max_new_tokens=wanted, cache=cache)
    assert [next(stream) for _ in range(min(wanted, 5))] == expected[:wanted]
    if wanted == 6:
        with pytest.raises(OutOfPagesError, match="1 more pages"):
            next(stream)
    else:
        assert list(stream) == []
    assert cache[0].offset == 16
