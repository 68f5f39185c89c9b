"""Measured memory against the closed formula, for every kind."""

import mlx.core as mx
import pytest

from tiny_llm.cache import create_kv_cache
from tiny_llm.memory import KvShape, kv_cache_bytes

CONTEXTS = (128, 256, 512, 1024, 2048)
FULL = KvShape((None,) * 4, 3, 64, 4)
MIXED = KvShape((None, 300, 300, 300), 3, 64, 4)
KINDS = [
    ("dense", FULL, {}),
    ("dense", MIXED, {}),
    ("quantized", FULL, {"bits": 8}),
    ("quantized", FULL, {"bits": 4, "group_size": 32}),
    ("rotating", MIXED, {}),
    ("rotating", FULL, {"window": 200, "keep": 4}),
    ("rotating", MIXED, {"bits": 4}),
    ("paged", FULL, {"page_size": 32}),
    ("paged", MIXED, {"page_size": 16}),
    ("paged", FULL, {"page_size": 64, "bits": 8}),
]
IDS = [f"{kind}-{'mixed' if s is MIXED else 'full'}-{len(o)}" for kind, s, o in KINDS]


@pytest.fixture(autouse=True)
def no_recycled_memory():
    """MLX may serve a small array from a larger buffer that was freed before."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


def feed(cache, shape, n):
    """Append n tokens in all layers, and attend."""
    outs = []
    for entry, window in zip(cache, shape.windows, strict=True):
        q = mx.random.normal((1, 9, n, 64))
        k, v = (mx.random.normal((1, 3, n, 64)) for _ in "kv")
        outs.append(entry.attend(q, k, v, scale=0.1, window=window))
    mx.eval(outs, [entry.state for entry in cache])


@pytest.mark.parametrize(("kind", "shape", "options"), KINDS, ids=IDS)
def test_memory_between_contexts_grows_as_the_formula_says(kind, shape, options):
    measured, computed = [], []
    for context in CONTEXTS:
        before = mx.get_active_memory()
        size = {"tokens": context} if kind == "paged" else {}
        cache = create_kv_cache(kind, shape, mx.float32, {**options, **size})
        while cache[0].offset < context:
            feed(cache, shape, min(64, context - cache[0].offset - 1) or 1)
        allocated = mx.get_active_memory() - before
        expected = kv_cache_bytes(shape, kind, tokens=context, **options)
        held = sum(entry.nbytes for entry in cache)
        if kind == "paged":  # the formula counts a request's pages, the pool has more
            assert allocated <= cache[0].pool.nbytes * 1.05
            assert held <= expected
            allocated = cache[0].pool.nbytes if shape is FULL else held
        else:
            assert held == expected
        measured.append(allocated)
        computed.append(expected)
        del cache
    for context, found, expected in zip(CONTEXTS, measured, computed, strict=True):
        tolerance = 0.25 if kind == "paged" and shape is MIXED else 0.05
        assert abs(found - expected) <= tolerance * expected, context
    if shape is FULL and "window" not in options:  # and the slope of the plain formula
        row = shape.row_bytes(options.get("bits"), options.get("group_size"))
        slope = (measured[-1] - measured[2]) / (CONTEXTS[-1] - CONTEXTS[2])
        assert abs(slope - len(shape.windows) * row) <= 0.05 * slope


@pytest.mark.parametrize(("kind", "shape", "options"), KINDS, ids=IDS)
def test_a_token_in_steady_state_allocates_nothing_that_stays(kind, shape, options):
    size = {"tokens": 2048} if kind == "paged" else {}
    cache = create_kv_cache(
        kind, shape, mx.float32, {**options, **size, "reserve": 900}
    )
    feed(cache, shape, 600)
    for _ in range(3):
        feed(cache, shape, 1)
    before = mx.get_active_memory()
    for _ in range(20):
        feed(cache, shape, 1)
        assert mx.get_active_memory() - before <= 1024
