import sys
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from test_kernels import SHAPES, reference

from tiny_llm import kernels

PACKINGS = [(64, 64, 8), (64, 64, 4), (64, 32, 8), (64, 32, 4), (128, 64, 4)]
OPTIONS = [
    {},
    {"window": 1},
    {"window": 16},
    {"window": 16, "keep": 3},
    {"softcap": 2.0},
    {"window": 16, "softcap": 2.0, "sinks": True},
]


def random(*shape):
    return mx.random.normal(shape)


def pack(x, group_size, bits):
    return kernels.quantize_rows(x, group_size, bits)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("shape", [*SHAPES, (1, 9, 3, 8, 50), (1, 9, 3, 9, 50)])
@pytest.mark.parametrize(("dim", "group_size", "bits"), PACKINGS)
def test_packed_attention_is_attention_over_the_rounded_rows(
    dim, group_size, bits, shape, options, gpu, monkeypatch
):
    batch, heads, kv_heads, length, context = shape
    q = random(batch, heads, length, dim)
    k, v = (random(batch, kv_heads, context, dim) for _ in range(2))
    pk, pv = pack(k, group_size, bits), pack(v, group_size, bits)
    rounded = [kernels.dequantize_rows(rows, group_size, bits) for rows in (pk, pv)]
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = random(heads)
    module = sys.modules["tiny_llm.kernels.quantized"]
    monkeypatch.setattr(module, "on_gpu", lambda: gpu)
    found = kernels.quantized_attention(
        q, [pk], [pv], group_size=group_size, bits=bits, scale=dim**-0.5, **options
    )
    expected = reference(q, *rounded, dim**-0.5, **options)
    assert found.dtype == q.dtype
    assert np.abs(np.array(found) - expected).max() < 1e-5


@pytest.mark.parametrize("length", [1, 5, 20])
@pytest.mark.parametrize("gpu", [False, True])
def test_packed_keys_in_pieces_are_keys(length, gpu, monkeypatch):
    q, k, v = random(1, 9, length, 64), random(1, 3, 90, 64), random(1, 3, 90, 64)
    module = sys.modules["tiny_llm.kernels.quantized"]
    monkeypatch.setattr(module, "on_gpu", lambda: gpu)
    packed = {"group_size": 64, "bits": 4}

    def attend(borders):
        pieces = [slice(a, b) for a, b in pairwise(borders)]
        return kernels.quantized_attention(
            q,
            [pack(k[:, :, piece], 64, 4) for piece in pieces],
            [pack(v[:, :, piece], 64, 4) for piece in pieces],
            scale=0.3,
            **packed,
        )

    whole, found = attend((0, 90)), attend((0, 1, 40, 64, 90))
    assert np.abs(np.array(found) - np.array(whole)).max() < 1e-5


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("length", [1, 6])
def test_grouped_heads_are_not_taken_for_rows_of_the_batch(batch, length):
    # 9 query heads over 3 KV heads; with a batch of 3 a mix-up has a shape that fits
    q, k, v = random(batch, 9, length, 64), *(random(batch, 3, 40, 64) for _ in "kv")
    before = np.array(q)
    pk, pv = pack(k, 64, 8), pack(v, 64, 8)
    together = kernels.quantized_attention(
        q, [pk], [pv], group_size=64, bits=8, scale=0.125
    )
    for row in range(batch):
        one = slice(row, row + 1)
        alone = reference(q[one], k[one], v[one], 0.125)
        assert np.abs(np.array(together[one]) - alone).max() < 0.02  # what 8 bits cost
    assert np.array_equal(np.array(q), before)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_half_precision_does_not_overflow(dtype, bits):
    q, k, v = (5 * random(1, 4, n, 64) for n in (1, 300, 300))
    q, k, v = q.astype(dtype), (k + 100).astype(dtype), (v + 100).astype(dtype)
    pk, pv = pack(k, 64, bits), pack(v, 64, bits)
    found = kernels.quantized_attention(
        q, [pk], [pv], group_size=64, bits=bits, scale=0.01
    )
    assert found.dtype == dtype
    rounded = [kernels.dequantize_rows(rows, 64, bits) for rows in (pk, pv)]
    expected = reference(q, *rounded, 0.01)
    assert np.abs(np.array(found.astype(mx.float32)) - expected).max() < 2


def test_a_row_is_packed_by_itself():
    x = random(1, 3, 50, 64)
    whole = pack(x, 32, 4)
    for i in (0, 7, 49):
        one = pack(x[:, :, i : i + 1], 32, 4)
        for a, b in zip(whole, one, strict=True):
            assert mx.array_equal(a[:, :, i : i + 1], b)
