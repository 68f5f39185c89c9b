from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from oracle import model, random_model

from tiny_llm import load_kv_cache, save_kv_cache
from tiny_llm.cache import (
    PagePool,
    QuantizedKvCache,
    RotatingKvCache,
    TinyKvFullCache,
    create_kv_cache,
)
from tiny_llm.errors import ParameterError
from tiny_llm.memory import KvShape, kv_cache_bytes


def random(*shape):
    return mx.random.normal(shape)


def rounded(x, bits, group_size):
    packed = mx.quantize(x, group_size=group_size, bits=bits)
    return mx.dequantize(*packed, group_size=group_size, bits=bits)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (8, 32), (4, 64), (4, 32)])
def test_what_comes_back_is_each_token_rounded(bits, group_size):
    cache, k, v = QuantizedKvCache(bits, group_size), random(2, 3, 600, 64), None
    v = random(2, 3, 600, 64)
    start = 0
    for length in (1, 300, 2, 297):
        part = slice(start, start + length)
        keys, values, count, mask = cache.update_and_fetch(
            k[:, :, part], v[:, :, part], length, "causal"
        )
        start += length
        assert (count, mask) == (start, "causal")
        assert mx.array_equal(keys, rounded(k[:, :, :start], bits, group_size))
        assert mx.array_equal(values, rounded(v[:, :, :start], bits, group_size))
    cache.rewind(100)
    keys, _, _, _ = cache.update_and_fetch(k[:, :, 500:501], v[:, :, 500:501])
    assert mx.array_equal(keys, rounded(k[:, :, :501], bits, group_size))


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("additive", [False, True])
def test_masks_and_grouped_heads_with_ones_own_attention(batch, additive):
    # 9 query heads over 3 KV heads: a batch of 3 must not be taken for the KV heads
    q, k, v = random(batch, 9, 5, 64), *(random(batch, 3, 20, 64) for _ in "kv")
    seen = mx.random.uniform(shape=(batch, 1, 5, 20)) > 0.3
    mask = mx.where(seen, 0.0, -mx.inf) if additive else seen
    before = np.array(q)
    cache = QuantizedKvCache()
    cache.update_and_fetch(k[:, :, :15], v[:, :, :15])
    keys, values, _, back = cache.update_and_fetch(k[:, :, 15:], v[:, :, 15:], 5, mask)
    assert back is mask
    found = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.1, mask=back)
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask=mask)
    error = mx.max(mx.abs(found - expected)).item()
    assert 0 < error < 0.02
    assert np.array_equal(np.array(q), before)


def test_bytes_are_those_of_words_scales_and_biases():
    for bits, per_row in ((8, 64 + 2 * 4), (4, 32 + 2 * 4)):
        cache = QuantizedKvCache(bits)
        cache.update_and_fetch(random(1, 3, 10, 64), random(1, 3, 10, 64))
        assert cache.nbytes == 256 * 2 * 3 * per_row


def test_impossible_packings_are_refused_when_the_cache_is_made():
    shape = KvShape((None, None), 2, 16, 4)
    for kind, options in (
        ("quantized", {"group_size": 32}),
        ("rotating", {"bits": 8, "group_size": 32, "window": 5}),
        ("paged", {"bits": 4, "group_size": 32, "tokens": 64}),
    ):
        with pytest.raises(
            ParameterError, match="a head of 16 numbers cannot be packed"
        ):
            create_kv_cache(kind, shape, mx.float32, options)
    wide = KvShape((None,), 2, 64, 4)
    for options, message in (
        ({"bits": 2}, "bits is 2; 8 or 4 is needed"),
        ({"bits": True}, "bits is True"),
        ({"group_size": 48}, "group_size is 48; 64 or 32"),
    ):
        with pytest.raises(ParameterError, match=message):
            create_kv_cache("quantized", wide, mx.float32, options)


def test_kinds_and_options_are_refused_by_name():
    m = model("llama_tied")  # two layers of full attention
    swa = model("mistral_swa")  # two sliding ones
    for maker, kind, options, message in (
        (
            m,
            "no such",
            {},
            "'no such'; there are 'dense', 'quantized', 'rotating', 'pag",
        ),
        (m, "dense", {"bits": 8}, "a dense cache has no option 'bits'; it has reserve"),
        (
            m,
            "rotating",
            {},
            "2 full-attention and 0 sliding-window layers: give window=",
        ),
        (
            swa,
            "rotating",
            {"window": 9},
            "0 full-attention and 2 sliding-window layers",
        ),
        (swa, "rotating", {"keep": 2}, "keep is 2, but without window="),
        (m, "paged", {}, "needs pool=, or the size of its own: tokens= or memory="),
        (m, "paged", {"tokens": 9, "memory": 9}, "one of tokens= and memory="),
        (m, "paged", {"memory": 9}, "9 bytes, but a page of 64 tokens takes 32768"),
        (m, "paged", {"pool": 3}, "pool is 3; a PagePool is needed"),
        (m, "paged", {"tokens": 9, "page_size": 0}, "page_size must be a whole number"),
        (m, "dense", {"reserve": 10_000}, "reserve is 10000, but the model's context"),
    ):
        with pytest.raises(ParameterError, match=message):
            maker.create_kv_cache(kind, **options)
    pool = m.create_page_pool(tokens=64)
    with pytest.raises(ParameterError, match="tokens= is the pool's own; leave it out"):
        m.create_kv_cache("paged", pool=pool, tokens=64)
    with pytest.raises(ParameterError, match="the pool is for"):
        swa.create_kv_cache("paged", pool=pool)


def test_mixed_layers_get_the_kind_that_fits_each():
    shape = KvShape((None, 12, None, 12), 2, 64, 4)
    made = create_kv_cache("rotating", shape, mx.float32, {})
    assert [type(entry).__name__ for entry in made] == [
        *("TinyKvFullCache", "RotatingKvCache") * 2
    ]
    made = create_kv_cache("rotating", shape, mx.float32, {"bits": 8})
    assert [type(entry).__name__ for entry in made] == [
        *("QuantizedKvCache", "RotatingKvCache") * 2
    ]
    made = create_kv_cache("rotating", shape, mx.float32, {"window": 40, "keep": 4})
    assert all(isinstance(entry, RotatingKvCache) for entry in made)
    assert [(e.window, e.keep) for e in made] == [(40, 4), (12, 0)] * 2
    pool = PagePool(shape, mx.float32, tokens=4096, max_requests=1, max_append=100)
    full, sliding = pool.allocators
    assert (full.count, sliding.count) == (64, 4)  # ceil((11 + 64 + 100) / 64) + 1


def test_options_without_effect_are_refused_by_name():
    m, swa = model("llama_tied"), model("mistral_swa")
    for make, options, message in (
        (
            partial(m.create_kv_cache, "rotating"),
            {"window": 9, "group_size": 32},
            "bits=",
        ),
        (partial(m.create_kv_cache, "paged"), {"tokens": 9, "group_size": 99}, "bits="),
        (m.create_page_pool, {"tokens": 9, "group_size": 32}, "without bits="),
        (swa.create_page_pool, {"tokens": 9, "max_append": 9}, "without max_requests="),
        (
            partial(m.create_kv_cache, "quantized"),
            {"bits": None},
            "bits is None; a quant",
        ),
        (m.create_page_pool, {"token": 9}, "no option 'token'; it has tokens, memory,"),
        (m.create_kv_cache, {"kind": ["dense"]}, "unknown cache kind .'dense'."),
    ):
        with pytest.raises(ParameterError, match=message):
            make(**options)
    shape = KvShape((None, None), 2, 64, 4)
    for kind, options, message in (
        ("dense", {"group_size": 64}, "without bits="),
        ("dense", {"page_size": 0}, "page_size and max_append are for 'paged'"),
        ("paged", {"page_size": 0}, "page_size must be a whole number of at least 1"),
        ("rotating", {"keep": 3}, "keep is 3, but without window="),
        ("rotating", {"window": -300}, "window must be a whole number"),
        ("rotating", {"window": 3, "keep": -3}, "keep must be a whole number"),
        ("rotating", {"window": "a"}, "window must be a whole number"),
        ("rotating", {}, "2 full-attention and 0 sliding-window layers: give window="),
    ):
        with pytest.raises(ParameterError, match=message):
            kv_cache_bytes(shape, kind, tokens=100, **options)


def test_numpy_integers_are_bits_and_floats_are_not(tmp_path):
    m = random_model("llama_tied", head_dim=64)
    for kind, options in (
        ("quantized", {}),
        ("rotating", {"window": 9}),
        ("paged", {"tokens": 64}),
    ):
        packing = {"bits": np.int64(8), "group_size": np.int32(32)}
        cache = m.create_kv_cache(kind, **options, **packing)
        m(mx.array([[1, 2, 3]]), cache=cache)
        save_kv_cache(tmp_path / "saved.kv", m, cache, [1, 2, 3])
        assert load_kv_cache(tmp_path / "saved.kv", m).cache[0].layout.bits == 8
        for bad in ({"bits": 8.0}, {"bits": 4, "group_size": 64.0}, {"bits": "8"}):
            with pytest.raises(ParameterError, match="is needed"):
                m.create_kv_cache(kind, **options, **bad)


@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize(
    ("queries", "keys", "width"),
    [
        ("float16", "float32", 64),
        ("float32", "float16", 64),
        ("float32", "float32", 128),
    ],
)
def test_queries_of_another_dtype_and_values_of_another_width(
    queries, keys, width, length, monkeypatch
):
    """No kernel takes them, where kernels are asked for either."""
    monkeypatch.setenv("TINY_LLM_KERNELS", "metal")
    cache = QuantizedKvCache(bits=8)
    q = random(1, 4, length, 64).astype(getattr(mx, queries))
    k = random(1, 2, length, 64).astype(getattr(mx, keys))
    v = random(1, 2, length, width).astype(getattr(mx, keys))
    found = cache.attend(q, k, v, scale=0.125)
    assert found.shape == (1, 4, length, width)
    assert found.dtype == q.dtype
    assert cache.offset == length
    k, v = (mx.repeat(x, 2, axis=1).astype(mx.float32) for x in (k, v))
    expected = mx.fast.scaled_dot_product_attention(
        q.astype(mx.float32), k, v, scale=0.125, mask="causal" if length > 1 else None
    )
    assert mx.abs(found - expected).max() < 0.03


KINDS = {
    "dense": {},
    "quantized": {"bits": 8},
    "rotating": {"window": 20},
    "paged": {"tokens": 64, "page_size": 16},
    "packed pages": {"tokens": 64, "page_size": 16, "bits": 8},
}


@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cache_takes_queries_of_another_dtype(
    kind, length, by_table, monkeypatch
):
    monkeypatch.setattr("tiny_llm.cache.paged.reads_pages", lambda: by_table)
    m = random_model("llama_tied", head_dim=64)
    name = "paged" if "pages" in kind else kind
    cache = m.create_kv_cache(name, **KINDS[kind])[0]
    q, k, v = (
        random(1, 4, length, 64),
        random(1, 2, length, 64),
        random(1, 2, length, 64),
    )
    found = cache.attend(q.astype(mx.float16), k, v, scale=0.125)
    assert found.dtype == mx.float16
    mask = "causal" if length > 1 else None
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
    assert mx.abs(found - expected).max() < 0.03


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "bad", [{"window": 0}, {"softcap": 0.0}, {"sinks": mx.zeros(3)}], ids=str
)
def test_after_settings_that_are_refused_no_cache_has_changed(kind, bad):
    m = random_model("llama_tied", head_dim=64)
    name = "paged" if "pages" in kind else kind
    cache = m.create_kv_cache(name, **KINDS[kind])[0]
    q, k = random(1, 4, 3, 64), random(1, 2, 3, 64)
    with pytest.raises(ParameterError):
        cache.attend(q, k, k, scale=0.125, **bad)
    assert cache.offset == 0


def test_keys_of_another_dtype_are_refused_not_cast():
    for cache in (TinyKvFullCache(), QuantizedKvCache(), RotatingKvCache(9)):
        k = random(1, 1, 2, 64)
        cache.update_and_fetch(k, k)
        half = k.astype(mx.float16)
        with pytest.raises(ParameterError, match=r"float16 do not fit a cache of .*32"):
            cache.update_and_fetch(half, half)
        assert cache.offset == 2
