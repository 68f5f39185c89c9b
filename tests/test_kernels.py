import os
import subprocess
import sys
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from oracle import DATA

import tiny_llm
from tiny_llm import kernels
from tiny_llm.kernels import elementwise


def reference(q, k, v, scale, window=None, keep=0, softcap=None, sinks=None):
    """Attention by its definition, in float64, query by query."""
    q, k, v = (np.array(a.astype(mx.float32), dtype=np.float64) for a in (q, k, v))
    batch, heads, length, _ = q.shape
    context, group = k.shape[2], heads // k.shape[1]
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in np.ndindex(batch, heads, length):
        last = context - length + i
        first = 0 if window is None else max(0, last - window + 1)
        seen = [j for j in range(last + 1) if j >= first or j < keep]
        keys = k[b, h // group, seen]
        scores = keys @ q[b, h, i] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        top = scores.max()
        weights = np.exp(scores - top)
        total = weights.sum()
        if sinks is not None:
            total += np.exp(float(sinks[h]) - top)
        out[b, h, i] = weights @ v[b, h // group, seen] / total
    return out


SHAPES = [
    # batch, heads, KV heads, queries, keys
    (1, 4, 2, 1, 1),
    (1, 9, 3, 1, 700),
    (2, 4, 4, 1, 33),
    (3, 9, 3, 5, 40),
    (1, 8, 1, 70, 70),
    (1, 4, 2, 300, 411),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 1},
        {"window": 16},
        {"window": 1000},
        {"window": 16, "keep": 3},
        {"softcap": 2.0},
        {"sinks": True},
        {"window": 16, "softcap": 2.0, "sinks": True},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_attention_equals_its_definition(shape, options):
    batch, heads, kv_heads, length, context = shape
    q = mx.random.normal((batch, heads, length, 16), key=mx.random.key(1)) * 3
    k = mx.random.normal((batch, kv_heads, context, 16), key=mx.random.key(2))
    v = mx.random.normal((batch, kv_heads, context, 16), key=mx.random.key(3))
    if "sinks" in options:
        options = {**options, "sinks": mx.arange(heads).astype(mx.float32) - 2}
    out = kernels.attention(q, k, v, scale=0.3, **options)
    assert out.shape == q.shape
    expected = reference(q, k, v, 0.3, **options)
    assert np.abs(np.array(out) - expected).max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 16])
def test_the_metal_path_computes_the_same(shape, window, monkeypatch):
    # mx.fast.scaled_dot_product_attention runs on every device

    batch, heads, kv_heads, length, context = shape
    q = mx.random.normal((batch, heads, length, 16))
    k = mx.random.normal((batch, kv_heads, context, 16))
    v = mx.random.normal((batch, kv_heads, context, 16))
    ours = kernels.attention(q, k, v, scale=0.3, window=window)
    with monkeypatch.context() as patch:
        module = sys.modules[kernels.attention.__module__]
        patch.setattr(module, "on_gpu", lambda: True)
        metal = kernels.attention(q, k, v, scale=0.3, window=window)
    assert mx.abs(ours - metal).max() < 1e-5


@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("options", [{}, {"window": 16}, {"sinks": True}])
@pytest.mark.parametrize("gpu", [False, True])
def test_keys_in_pieces_are_keys(length, options, gpu, monkeypatch):
    q, k, v = (
        mx.random.normal((1, h, n, 16)) for h, n in ((9, length), (3, 90), (3, 90))
    )
    if options.pop("sinks", False):
        options = {"sinks": mx.random.normal((9,))}
    monkeypatch.setattr(
        sys.modules["tiny_llm.kernels.attention"], "on_gpu", lambda: gpu
    )
    whole = kernels.attention(q, k, v, scale=0.3, **options)
    borders = (0, 1, 40, 64, 90)
    pieces = [slice(a, b) for a, b in pairwise(borders)]
    found = kernels.attention(
        q,
        [k[:, :, piece] for piece in pieces],
        [v[:, :, piece] for piece in pieces],
        scale=0.3,
        **options,
    )
    assert np.abs(np.array(found) - np.array(whole)).max() < 1e-5


def test_a_window_of_w_sees_exactly_w_keys():
    mask = np.array(kernels.causal_mask(4, 6, 3))
    assert mask.astype(int).tolist() == [
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]
    assert np.array(kernels.causal_mask(2, 3)).astype(int).tolist() == [
        [1, 1, 0],
        [1, 1, 1],
    ]


@pytest.mark.parametrize("size", [10, 5000])
def test_exp_below_is_the_exponential(size):
    x = mx.linspace(-80.0, 3.0, size)
    out = np.array(kernels.exp_below(x, mx.array([3.0])))
    exact = np.exp(np.maximum(np.array(x, dtype=np.float64) - 3.0, -60.0))
    assert np.abs(out / np.exp(np.array(x, np.float64) - 3.0) - 1)[x > -57].max() < 5e-6
    assert np.abs(out - exact).max() < 3e-7


def test_both_ways_to_softmax_agree(monkeypatch):
    x = mx.random.normal((50, 100)) * 5
    x = mx.where(mx.random.uniform(shape=x.shape) < 0.3, -mx.inf, x)
    weights, total = kernels.elementwise.attention_weights(x)
    plain = mx.softmax(x, axis=-1)
    if total is None:  # no g++ here
        assert mx.array_equal(weights, plain)
    else:
        assert mx.abs(weights / total - plain).max() < 1e-6
    monkeypatch.setattr(elementwise, "can_fuse", lambda: False)
    assert mx.array_equal(elementwise.attention_weights(x)[0], plain)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_swiglu_is_silu_of_gate_times_up(rows):
    gate = mx.random.normal((rows, 64)) * 8
    up = mx.random.normal((rows, 64))
    g, u = np.array(gate, np.float64), np.array(up, np.float64)
    out = np.array(kernels.swiglu(gate, up))
    # (the sigmoid is right within 3e-7, also where it is about 0)
    error = np.abs(out - g / (1 + np.exp(-g)) * u)
    assert (error / np.maximum(1, np.abs(g * u))).max() < 1e-6


@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 64), (64,)])
def test_rms_norm_is_its_formula(shape):
    x, weight = mx.random.normal(shape) * 4, mx.random.normal((64,))
    a = np.array(x, np.float64)
    expected = a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-5) * np.array(weight)
    assert np.abs(np.array(kernels.rms_norm(x, weight, 1e-5)) - expected).max() < 1e-5


@pytest.mark.parametrize("shape", [(1, 1, 32), (1, 32), (2, 1, 32), (2, 5, 32)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
def test_linear_adds_what_it_is_given(shape, bias, residual, gpu, monkeypatch):
    module = sys.modules[kernels.linear.__module__]
    monkeypatch.setattr(module, "on_gpu", lambda: gpu)
    x, weight = mx.random.normal(shape), mx.random.normal((48, 32))
    b = mx.random.normal((48,)) if bias else None
    r = mx.random.normal((*shape[:-1], 48)) if residual else None
    expected = np.array(x, np.float64) @ np.array(weight, np.float64).T
    expected = expected + (0 if b is None else np.array(b))
    expected = expected + (0 if r is None else np.array(r))
    out = kernels.linear(x, weight, b, r)
    assert out.shape == expected.shape
    assert np.abs(np.array(out) - expected).max() < 1e-4


@pytest.mark.parametrize("bits", [4, 8])
def test_linear_over_packed_weights_equals_the_dequantised(bits):
    weight = mx.random.normal((48, 64))
    packed, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
    dense = mx.dequantize(packed, scales, biases, group_size=32, bits=bits)
    x, b, r = mx.random.normal((2, 64)), mx.random.normal((48,)), mx.ones((2, 48))
    out = kernels.linear(x, packed, b, r, kernels.Packed(scales, biases, 32, bits))
    assert mx.abs(out - (x @ dense.T + b + r)).max() < 1e-4


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Metal needs no compiler"
)
@pytest.mark.parametrize("place", ["a file", "missing", "usable"])
def test_a_temporary_folder_that_cannot_be_used_costs_speed_only(place, tmp_path):
    if place == "a file":
        (tmp_path / "mlx").write_text("")
    folder = tmp_path / "nowhere" if place == "missing" else tmp_path
    code = (
        "import tiny_llm\n"
        f"model = tiny_llm.load_model({str(DATA / 'llama_tied')!r})\n"
        "ids = list(range(300))\n"
        "print(list(tiny_llm.stream_generate(model, ids, max_new_tokens=4)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = tiny_llm.stream_generate(
        tiny_llm.load_model(DATA / "llama_tied"), range(300), max_new_tokens=4
    )
    assert done.stdout.strip() == str(list(expected))
    said = "not fused" in done.stderr
    assert said == (place != "usable" and kernels.can_fuse())
