import mlx.core as mx
import numpy as np
import pytest

from tiny_llm import TinyKvFullCache
from tiny_llm.errors import ParameterError


def random(*shape):
    return mx.random.normal(shape)


def plain_attention(q, k, v, scale):
    """Causal softmax(q k^T) v in float64, one head at a time."""
    q, k, v = (np.array(a, dtype=np.float64) for a in (q, k, v))
    batch, heads, length, _ = q.shape
    context, group = k.shape[2], heads // k.shape[1]
    out = np.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            scores = q[b, h] @ k[b, h // group].T * scale
            for i in range(length):
                scores[i, context - length + i + 1 :] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, h] = weights / weights.sum(-1, keepdims=True) @ v[b, h // group]
    return out


def test_what_was_appended_comes_back_in_order():
    cache = TinyKvFullCache()
    k, v = random(2, 3, 700, 8), random(2, 3, 700, 16)
    start = 0
    for length in (1, 255, 1, 300, 143):
        part = slice(start, start + length)
        keys, values, stored, mask = cache.update_and_fetch(
            k[:, :, part], v[:, :, part], mask_length=length, mask="causal"
        )
        start += length
        assert (stored, mask) == (start, "causal")
        assert mx.array_equal(keys, k[:, :, :start])
        assert mx.array_equal(values, v[:, :, :start])


def test_an_offset_handed_out_does_not_change_later():
    cache = TinyKvFullCache()
    cache.update_and_fetch(random(1, 1, 5, 4), random(1, 1, 5, 4))
    held = cache.offset
    cache.update_and_fetch(random(1, 1, 1, 4), random(1, 1, 1, 4))
    assert (held, cache.offset) == (5, 6)


def test_keys_handed_out_do_not_change_later():
    cache = TinyKvFullCache()
    first = random(1, 1, 5, 4)
    keys, _, _, _ = cache.update_and_fetch(first, first)
    cache.rewind(5)
    cache.update_and_fetch(random(1, 1, 5, 4), random(1, 1, 5, 4))
    assert mx.array_equal(keys, first)


def test_attend_equals_attention_over_all_keys():
    q, k, v = random(2, 6, 40, 16), random(2, 2, 40, 16), random(2, 2, 40, 16)
    expected = plain_attention(q, k, v, 0.25)
    cache, start = TinyKvFullCache(), 0
    for length in (17, 1, 1, 21):
        part = slice(start, start + length)
        out = cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], scale=0.25)
        assert np.abs(np.array(out) - expected[:, :, part]).max() < 1e-5
        start += length


def test_rewind_forgets_the_newest_and_keeps_the_rest():
    cache = TinyKvFullCache()
    k, v = random(1, 1, 10, 4), random(1, 1, 10, 4)
    cache.update_and_fetch(k, v)
    cache.rewind(4)
    assert cache.offset == 6
    new = random(1, 1, 2, 4)
    keys, _, stored, _ = cache.update_and_fetch(new, new)
    assert stored == 8
    assert mx.array_equal(keys, mx.concatenate([k[:, :, :6], new], axis=2))


@pytest.mark.parametrize("n", [-1, 4])
def test_an_impossible_rewind_is_refused_and_changes_nothing(n):
    cache = TinyKvFullCache()
    cache.update_and_fetch(random(1, 1, 3, 4), random(1, 1, 3, 4))
    with pytest.raises(ParameterError, match=f"{n} tokens.*holds 3"):
        cache.rewind(n)
    assert cache.offset == 3


def test_room_is_made_in_steps_of_256_or_at_once_with_a_reserve():
    token = 2 * 3 * 8 * 4  # K and V, heads, dims, bytes
    cache = TinyKvFullCache()
    assert cache.nbytes == 0
    for tokens, capacity in ((1, 256), (255, 256), (1, 512), (600, 1024)):
        cache.update_and_fetch(random(1, 3, tokens, 8), random(1, 3, tokens, 8))
        assert cache.nbytes == capacity * token
    reserved = TinyKvFullCache(reserve=1000)
    reserved.update_and_fetch(random(1, 3, 1, 8), random(1, 3, 1, 8))
    assert reserved.nbytes == 1024 * token
    for bad in (-1, 1e3):
        with pytest.raises(ParameterError, match="reserve must be a whole number"):
            TinyKvFullCache(reserve=bad)


def test_appending_a_token_is_in_place():
    cache = TinyKvFullCache(reserve=4096)
    k = random(1, 4, 1024, 64)
    cache.update_and_fetch(k, k)
    mx.eval(cache.state)
    one = random(1, 4, 1, 64)
    q = random(1, 4, 1, 64)
    for _ in range(3):
        mx.eval(cache.attend(q, one, one, scale=1.0))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(cache.attend(q, one, one, scale=1.0))
    grown = mx.get_peak_memory() - before
    assert grown < cache.nbytes / 10  # a copy of a buffer would be half of nbytes
    assert mx.get_active_memory() - before < 4096


def test_shapes_that_do_not_fit_are_refused():
    cache = TinyKvFullCache()
    with pytest.raises(ParameterError, match="alike"):
        cache.update_and_fetch(random(1, 2, 3, 4), random(1, 2, 2, 4))
    cache.update_and_fetch(random(1, 2, 3, 4), random(1, 2, 3, 4))
    with pytest.raises(ParameterError, match="does not fit"):
        cache.update_and_fetch(random(1, 3, 1, 4), random(1, 3, 1, 4))
    assert cache.offset == 3


def caches():
    from tiny_llm.cache import PagePool, QuantizedKvCache, RotatingKvCache
    from tiny_llm.cache.paged import paged_cache
    from tiny_llm.cache.table import PageTable
    from tiny_llm.memory import KvShape

    pool = PagePool(KvShape((None,), 2, 64, 4), mx.float32, tokens=64)
    yield TinyKvFullCache()
    yield QuantizedKvCache()
    yield RotatingKvCache(8)
    yield paged_cache(PageTable(pool))[0]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((1, 4, 3, 64), (1, 2, 3), (1, 2, 3, 64), "alike"),
        ((1, 4, 3, 64), (1, 2, 3, 64), (1, 2, 3), "alike"),
        ((1, 4, 0, 64), (1, 2, 0, 64), (1, 2, 0, 64), "no tokens to append"),
        ((1, 4, 2, 64), (1, 2, 3, 64), (1, 2, 3, 64), "queries .1, 4, 2, 64. do not"),
        ((1, 5, 3, 64), (1, 2, 3, 64), (1, 2, 3, 64), "multiple of the keys' heads"),
        ((1, 4, 3, 32), (1, 2, 3, 64), (1, 2, 3, 64), "do not fit"),
        ((4, 3, 64), (1, 2, 3, 64), (1, 2, 3, 64), "do not fit"),
    ],
)
def test_every_layout_refuses_bad_shapes_and_stays_as_it_was(which, q, k, v, message):
    cache = list(caches())[which]
    q, k, v = random(*q), random(*k), random(*v)
    with pytest.raises(ParameterError, match=message):
        cache.attend(q, k, v, scale=1.0)
    if "queries" not in message and "fit" not in message and "heads" not in message:
        with pytest.raises(ParameterError, match=message):
            cache.update_and_fetch(k, v)
    with pytest.raises(ParameterError, match=r"cannot rewind 0.5 tokens"):
        cache.rewind(0.5)
    assert cache.offset == 0
    good = random(1, 2, 3, 64)
    assert cache.attend(random(1, 4, 3, 64), good, good, scale=1.0).shape[2] == 3
    assert cache.offset == 3
