import pytest

from tiny_llm.errors import ParameterError
from tiny_llm.memory import (
    KvShape,
    fits,
    kv_cache_bytes,
    largest,
    largest_batch,
    largest_context,
)

GIB = 2**30
# Llama-3.1-8B in half precision: 32 layers, 8 KV heads of 128
LLAMA = KvShape((None,) * 32, 8, 128, 2)
# two layers, one with a window of 100; a token leaves 2 * 64 * 4 = 512 bytes in each
MIXED = KvShape((None, 100), 1, 64, 4)


def test_a_token_of_llama_3_1_8b_takes_128_kib_and_packed_68_and_36():
    # 2 * 8 * 128 numbers a layer; a group of 64 has a scale and a bias of 2 bytes each
    assert LLAMA.row_bytes() * 32 == 131072
    assert LLAMA.row_bytes(8) * 32 == 68 * 1024
    assert LLAMA.row_bytes(4) * 32 == 36 * 1024
    assert LLAMA.row_bytes(4, group_size=32) * 32 == 40 * 1024


@pytest.mark.parametrize(
    ("kind", "options", "gib"),
    [
        ("dense", {}, 8),
        ("quantized", {}, 4.25),
        ("quantized", {"bits": 4}, 2.25),
        ("paged", {}, 8),
        ("paged", {"bits": 8}, 4.25),
        ("paged", {"bits": 4}, 2.25),
    ],
)
def test_32_conversations_of_2048_tokens(kind, options, gib):
    size = kv_cache_bytes(LLAMA, kind, tokens=2048, batch=32, **options)
    assert size == gib * GIB


def test_layouts_round_up_to_their_granules():
    assert kv_cache_bytes(MIXED, tokens=1) == 2 * 256 * 512
    assert kv_cache_bytes(MIXED, tokens=257) == 2 * 512 * 512
    assert kv_cache_bytes(MIXED, "paged", tokens=65) == 2 * 128 * 512
    assert kv_cache_bytes(MIXED, "paged", tokens=65, page_size=16) == 2 * 80 * 512
    assert kv_cache_bytes(MIXED, tokens=0) == 0


def test_a_window_bounds_its_layer():
    # paged: 99 + 64 + 1 tokens lie in at most 4 pages of 64
    assert kv_cache_bytes(MIXED, "paged", tokens=6400) == (6400 + 256) * 512
    # rotating: 164 tokens rounded up to 256, and 256 to move within
    assert kv_cache_bytes(MIXED, "rotating", tokens=6400) == (6400 + 512) * 512
    bounded = kv_cache_bytes(MIXED, "rotating", tokens=6400, window=200, keep=4)
    assert bounded == (512 + 256 + 512) * 512


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "sparse"}, "unknown cache kind 'sparse'"),
        ({"tokens": -1}, "tokens must be"),
        ({"batch": 1.5}, "batch must be"),
        ({"bits": 8}, "a dense cache has no bits"),
        ({"window": 4}, "for 'rotating', not 'dense'"),
        ({"kind": "paged", "bits": 3}, "bits is 3"),
        ({"kind": "quantized", "group_size": 16}, "group_size is 16"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, words):
    arguments = {"kind": "dense", "tokens": 8, **arguments}
    with pytest.raises(ParameterError, match=words):
        kv_cache_bytes(LLAMA, arguments.pop("kind"), **arguments)


def test_fits_counts_the_weights_to_the_last_byte():
    needed = 8 * GIB + 1000
    plan = {"tokens": 2048, "batch": 32, "weight_bytes": 1000}
    assert fits(needed, LLAMA, **plan)
    assert not fits(needed - 1, LLAMA, **plan)
    assert fits(needed - 1, LLAMA, "quantized", **plan)
    assert not fits(0, LLAMA, tokens=0, weight_bytes=1)


@pytest.mark.parametrize(
    ("kind", "options", "batch"),
    [("dense", {}, 64), ("paged", {}, 64), ("paged", {"bits": 4}, 227)],
)
def test_the_largest_batch_fits_and_one_more_does_not(kind, options, batch):
    # 0.25 GiB a conversation, or 36 / 128 of it: 16 / 0.0703125 = 227.6
    plan = {"tokens": 2048, "weight_bytes": 5, **options}
    memory = 16 * GIB + 5
    assert largest_batch(memory, LLAMA, kind, **plan) == batch
    assert fits(memory, LLAMA, kind, batch=batch, **plan)
    assert not fits(memory, LLAMA, kind, batch=batch + 1, **plan)


def test_the_largest_context_comes_in_whole_granules():
    # 3 GiB are 24576 tokens in all: 768 each for 32
    assert largest_context(3 * GIB, LLAMA, batch=32, most=131072) == 768
    assert largest_context(3 * GIB, LLAMA, batch=31, most=131072) == 768
    paged = largest_context(3 * GIB, LLAMA, "paged", batch=31, most=131072)
    assert paged == 768  # 792 are 12 pages of 64 and a bit
    assert largest_context(3 * GIB, LLAMA, "paged", batch=30, most=131072) == 768
    assert largest_context(3 * GIB, LLAMA, "paged", batch=29, most=131072) == 832


def test_the_models_context_bounds_the_largest_one():
    assert largest_context(10**15, LLAMA, most=131072) == 131072
    windowed = KvShape((100,), 1, 64, 4)  # stops growing
    assert largest_context(10**6, windowed, "rotating", most=512) == 512


def test_nothing_fits_beside_weights_that_are_too_large():
    assert largest_batch(10, LLAMA, tokens=1, weight_bytes=11) == 0
    assert largest_context(10, LLAMA, weight_bytes=11, most=100) == 0
    assert largest_context(10, LLAMA, weight_bytes=10, most=100) == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fits(-1, LLAMA, tokens=1), "memory must be"),
        (lambda: fits(1.5, LLAMA, tokens=1), "memory must be"),
        (lambda: fits(1, LLAMA, tokens=1, weight_bytes=-1), "weight_bytes must be"),
        (lambda: fits(1, LLAMA, "sparse", tokens=1), "unknown cache kind"),
        (lambda: largest_batch(-1, LLAMA, tokens=1), "memory must be"),
        (lambda: largest_batch(1, LLAMA, tokens=0), "tokens must be"),
        (lambda: largest_batch(1, LLAMA, tokens=1, bits=8), "has no bits"),
        (lambda: largest_context(1, LLAMA, most=-1), "most must be"),
        (lambda: largest_context(1, LLAMA, batch=0, most=1), "batch must be"),
        (lambda: largest_context(-1, LLAMA, most=1), "memory must be"),
    ],
)
def test_planning_refuses_numbers_that_cannot_be(call, words):
    with pytest.raises(ParameterError, match=words):
        call()


def test_largest_finds_the_last_number_within_the_limit():
    for limit in range(50):
        assert largest(limit, lambda n: 7 * n) == limit // 7
    assert largest(-1, lambda n: n) == -1
    assert largest(5, lambda n: 5) == 1 << 40
