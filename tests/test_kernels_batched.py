"""Attention of one query per request against its definition, in float64."""

import sys

import mlx.core as mx
import numpy as np
import pytest

from tiny_llm.kernels import attention, batched_attention

DIM, CONTEXT = 16, 23
HEADS = [(4, 4), (6, 2), (9, 3), (8, 2)]  # query heads a KV head: 1, 3, 3, 4
SHARED = [(), (7,), (1, 12)]  # lengths of what all see before


def reference(q, k, v, scale, seen, softcap, sinks):
    """One request: q [H, D], k and v [Hkv, S, D], seen: bool [S]."""
    group = q.shape[0] // k.shape[0]
    out = np.zeros_like(q)
    for head, query in enumerate(q):
        scores = k[head // group, seen] @ query * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        top = scores.max()
        weights = np.exp(scores - top)
        total = weights.sum()
        if sinks is not None:
            total += np.exp(sinks[head] - top)
        out[head] = weights @ v[head // group, seen] / total
    return out


def double(x):
    return np.array(x, dtype=np.float64)


class Inputs:
    """Queries of `batch` requests, their keys, and how many of them each sees."""

    def __init__(self, batch, heads, shared, masked, seed=0):
        query_heads, kv_heads = heads
        keys = iter(mx.random.split(mx.random.key(seed), 20))

        def normal(*shape):
            return mx.random.normal(shape, key=next(keys))

        self.q = 3 * normal(batch, query_heads, 1, DIM)
        self.k, self.v = (normal(batch, kv_heads, CONTEXT, DIM) for _ in "kv")
        self.shared = [
            tuple(normal(1, kv_heads, length, DIM) for _ in "kv") for length in shared
        ]
        self.lengths = [CONTEXT] * batch
        self.mask = None
        if masked:
            self.lengths = [(CONTEXT, 1, 9, 22, 16)[b] for b in range(batch)]
            seen = np.arange(CONTEXT) < np.array(self.lengths)[:, None]
            self.mask = mx.array(np.where(seen, 0, -np.inf).astype(np.float32))

    def whole(self, b):
        """Keys and values [1, Hkv, S, D] that request b sees, those before first."""
        own = slice(0, self.lengths[b])
        pairs = [*self.shared, (self.k[b : b + 1, :, own], self.v[b : b + 1, :, own])]
        return [mx.concatenate(list(part), axis=2) for part in zip(*pairs, strict=True)]


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shared", SHARED, ids=len)
@pytest.mark.parametrize("options", ["", "softcap", "sinks", "softcap sinks"])
@pytest.mark.parametrize("gpu", [False, True])
def test_each_request_sees_its_own_keys(batch, shared, options, gpu, monkeypatch):
    # (mx.fast.scaled_dot_product_attention, the Metal path, runs on every device)
    module = sys.modules[batched_attention.__module__]
    monkeypatch.setattr(module, "on_gpu", lambda: gpu)
    for heads in HEADS:
        for masked in (False, True):
            check(Inputs(batch, heads, shared, masked), options)


def check(inputs, options):
    batch, heads = inputs.q.shape[:2]
    softcap = 2.0 if "softcap" in options else None
    sinks = mx.linspace(-2.0, 3.0, heads) if "sinks" in options else None
    before = np.array(inputs.q)
    found = batched_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        scale=0.3,
        mask=inputs.mask,
        shared=inputs.shared,
        softcap=softcap,
        sinks=sinks,
    )
    assert found.shape == inputs.q.shape
    assert np.array_equal(np.array(inputs.q), before)
    for b in range(batch):
        k, v = inputs.whole(b)
        q = inputs.q[b : b + 1]
        seen = np.full(k.shape[2], True)
        own = None if sinks is None else double(sinks)
        expected = reference(
            double(q[0, :, 0]), double(k[0]), double(v[0]), 0.3, seen, softcap, own
        )
        assert np.abs(np.array(found[b, :, 0]) - expected).max() < 1e-5
        alone = attention(q, k, v, scale=0.3, softcap=softcap, sinks=sinks)
        assert np.abs(np.array(found[b] - alone[0])).max() < 1e-5


@pytest.mark.parametrize("shared", SHARED, ids=len)
def test_what_is_masked_counts_for_nothing(shared):
    inputs = Inputs(3, (6, 2), shared, masked=True)
    options = {"scale": 0.3, "mask": inputs.mask, "shared": inputs.shared}
    found = batched_attention(inputs.q, inputs.k, inputs.v, **options)
    seen = (inputs.mask == 0)[:, None, :, None]
    k, v = (mx.where(seen, x, 1e4) for x in (inputs.k, inputs.v))
    other = batched_attention(inputs.q, k, v, **options)
    assert mx.array_equal(found, other)


def test_a_neighbour_does_not_change_a_request():
    inputs = Inputs(4, (9, 3), (7,), masked=True)
    options = {"scale": 0.3, "mask": inputs.mask, "shared": inputs.shared}
    found = batched_attention(inputs.q, inputs.k, inputs.v, **options)
    q, k, v = (mx.array(x) for x in (inputs.q, inputs.k, inputs.v))
    q[1], k[1], v[1] = 100.0, -7.0, mx.nan
    other = batched_attention(q, k, v, **options)
    for b in (0, 2, 3):
        assert mx.array_equal(found[b], other[b])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
def test_half_precision_stays_what_it_is(dtype, sinks):
    inputs = Inputs(3, (6, 2), (7,), masked=True)
    sinks = mx.zeros((6,)) if sinks else None
    exact = batched_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        scale=0.3,
        mask=inputs.mask,
        shared=inputs.shared,
        sinks=sinks,
    )
    found = batched_attention(
        *(x.astype(dtype) for x in (inputs.q, inputs.k, inputs.v)),
        scale=0.3,
        mask=inputs.mask,
        shared=[(k.astype(dtype), v.astype(dtype)) for k, v in inputs.shared],
        sinks=sinks,
    )
    assert found.dtype == dtype
    close = 0.03 if dtype == mx.float16 else 0.2
    assert mx.abs(found.astype(mx.float32) - exact).max() < close
