import random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import random_model

from tiny_llm.cache import RotatingKvCache, rewind
from tiny_llm.errors import ParameterError
from tiny_llm.memory import SLACK


def numbered(first, n):
    """Keys [1, 2, n, 4] that say which position and head they are of."""
    position = mx.arange(first, first + n, dtype=mx.float32)[None, None, :, None]
    return (
        position + mx.array([0.25, 0.5])[None, :, None, None] + mx.zeros((1, 2, n, 4))
    )


def append(cache, n):
    keys = numbered(cache.offset, n)
    return cache.update_and_fetch(keys, -keys)


def seen_by(keys, mask, query):
    """Positions that a query sees, from what update_and_fetch returned."""
    positions = np.floor(np.array(keys)[0, 0, :, 0]).astype(int)
    if mask is None:
        return positions.tolist()
    return positions[np.array(mask)[query]].tolist()


def wanted(position, window, keep):
    return [j for j in range(position + 1) if position - j < window or j < keep]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([1, 1, 1, 2, 7, 40, 300, 700])),
        st.tuples(st.just("rewind"), st.integers(0, 90)),
        st.tuples(st.just("rewind all"), st.just(0)),
    ),
    max_size=25,
)


@given(OPERATIONS, st.sampled_from([1, 5, 12, 200]), st.sampled_from([0, 3, 50]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_whatever_happens_each_query_sees_its_window(operations, window, keep):
    cache, length = RotatingKvCache(window, keep), 0
    last = 0  # tokens of the last append, which can always be taken back
    for name, n in operations:
        if name == "append":
            keys, values, count, mask = append(cache, n)
            assert keys.shape[2] == count
            assert mx.array_equal(values, -keys)
            for query in {0, n // 2, n - 1}:
                expected = wanted(length + query, window, keep)
                assert seen_by(keys, mask, query) == expected
            length, last = length + n, n
        else:
            n = length if name == "rewind all" else n
            before = cache.held().keys
            try:
                cache.rewind(n)
            except ParameterError:
                assert n > length or n > max(last, SLACK)
                after = cache.held().keys
                assert all(map(mx.array_equal, after, before))
            else:
                length, last = length - n, max(0, last - n)
        assert cache.offset == length
    keys, _, _, mask = append(cache, 1)
    assert seen_by(keys, mask, 0) == wanted(length, window, keep)


@pytest.mark.parametrize("keep", [0, 4])
def test_memory_is_for_the_window_and_not_for_the_context(keep):
    cache = RotatingKvCache(100, keep)
    sizes = set()
    for _ in range(3000):
        append(cache, 1)
        sizes.add(cache.keys.capacity)
    assert sizes == {256, 512}
    append(cache, 2000)  # while they attend to one another they have to be there
    assert cache.keys.capacity <= 100 + keep + SLACK + 2000
    append(cache, 1)
    assert cache.keys.capacity == 512
    assert cache.offset == 5001


def test_appending_is_in_place_but_for_a_move_in_256():
    cache = RotatingKvCache(2000)
    k = mx.random.normal((1, 4, 1, 64))
    for _ in range(3000):
        mx.eval(cache.attend(k, k, k, scale=1.0))
    moves = 0
    for _ in range(600):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(cache.attend(k, k, k, scale=1.0))
        moves += mx.get_peak_memory() - before > cache.nbytes / 4
        assert mx.get_active_memory() - before < 4096
    assert 1 <= moves <= 3


def test_a_rewind_past_the_window_is_refused_by_name():
    cache = RotatingKvCache(8)
    append(cache, 100)
    for _ in range(900):
        append(cache, 1)
    match = r"rewind 950 .* at 1000: the window of 8 "
    with pytest.raises(ParameterError, match=match):
        cache.rewind(950)
    assert cache.offset == 1000
    cache.rewind(SLACK)
    assert cache.offset == 1000 - SLACK
    cache.rewind(cache.offset)
    keys, _, count, _ = append(cache, 3)
    assert count == 3
    assert seen_by(keys, None, 0) == [0, 1, 2]


def test_the_first_tokens_stay():
    cache = RotatingKvCache(6, keep=2)
    for _ in range(900):
        keys, _, _, mask = append(cache, 1)
    assert seen_by(keys, mask, 0) == [0, 1, *range(894, 900)]


def test_bad_arguments_are_refused():
    with pytest.raises(ParameterError, match=r"window must be .* at least 1, got 0"):
        RotatingKvCache(0)
    with pytest.raises(ParameterError, match="keep must be"):
        RotatingKvCache(4, keep=-1)
    with pytest.raises(ParameterError, match="bits is 3; 8 or 4"):
        RotatingKvCache(4, bits=3)
    packed, narrow = RotatingKvCache(4, bits=8), mx.zeros((1, 1, 1, 32))
    with pytest.raises(ParameterError, match="a head of 32 numbers"):
        packed.update_and_fetch(narrow, narrow)
    cache = RotatingKvCache(4)
    with pytest.raises(ParameterError, match="makes its own mask"):
        cache.update_and_fetch(numbered(0, 1), numbered(0, 1), 1, mx.zeros((1, 1)))
    with pytest.raises(ParameterError, match="a mask for 3 of 1 new tokens"):
        cache.update_and_fetch(numbered(0, 1), numbered(0, 1), 3, "causal")
    q = mx.zeros((1, 4, 1, 4))
    with pytest.raises(ParameterError, match="sees 9 tokens, but its cache keeps 4"):
        cache.attend(q, numbered(0, 1), numbered(0, 1), scale=1.0, window=9)
    assert cache.offset == 0


def test_a_prefix_in_a_windowed_cache_is_reused_exactly_or_not_at_all():
    # random walks over one cache: go back to a common beginning, go on with others
    m = random_model("mistral_swa", sliding_window=8, max_position_embeddings=8192)
    rng, reused, refused = random.Random(5), 0, 0
    for _ in range(8):
        cache = m.create_kv_cache("rotating")
        cached = []
        for _ in range(12):
            length = rng.choice([len(cached), rng.randrange(len(cached) + 1)])
            try:
                rewind(cache, length)
                reused += 1
            except ParameterError:
                assert {entry.offset for entry in cache} == {len(cached)}
                rewind(cache, 0)
                length, refused = 0, refused + 1
            ids = cached[:length] + [
                rng.randrange(300) for _ in range(rng.choice([1, 5, 400]))
            ]
            logits = None
            while length < len(ids):
                part = ids[length : length + rng.choice([1, 60, 300])]
                logits = m(mx.array([part]), offset=length, cache=cache)[0, -1]
                mx.eval(logits)
                length += len(part)
            fresh = m(mx.array([ids]), logits_to_keep=1)[0, -1]
            assert mx.max(mx.abs(logits - fresh)).item() <= 2e-4
            cached = ids
    assert reused > 20
    assert refused > 5
