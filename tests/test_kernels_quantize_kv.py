"""Laying out new keys and values, and packing them as MLX's own kernel does."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from emulator_tools import needs_emulator
from kernel_cases import double, needs_kernels, on_metal, unpacked  # noqa: F401
from metal_emulator import DEFAULT_ORDERS, Kernel

from tiny_llm import kernels

HEADER = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels/quantized.h"
DTYPES = ("float32", "float16", "bfloat16")
PACKINGS = [(8, 32), (8, 64), (4, 32), (4, 64)]
DIMS = (64, 96, 128, 256)
NEW, KV_HEADS = 5, 4

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_packing = pytest.mark.parametrize(("bits", "group_size"), PACKINGS)


def constant(rows):
    rows[:] = rows[..., :1, :1]


def zero(rows):
    rows[:] = 0


def negative(rows):
    rows[:] = -np.abs(rows) - 0.1


def positive(rows):
    rows[:] = np.abs(rows) + 0.1


def tiny(rows):
    rows *= 1e-6


def tiniest(rows):
    """No step of 1e-7, the least there is, leads from 0 to the largest of them."""
    rows *= 1e-8


def outlier(rows):
    rows *= 0.01
    rows[..., 7] = 30.0


def ordinary(rows):
    pass


KINDS = (ordinary, constant, zero, negative, positive, tiny, outlier, tiniest)


def mixed(rows):
    """One kind for each head."""
    for head, kind in enumerate(KINDS):
        kind(rows[:, head])


class New(NamedTuple):
    """k, v [N, Hkv, 1, D], and the same as rows [2 Hkv, N, D]."""

    k: mx.array
    v: mx.array
    rows: mx.array


def new(dtype, dim, kind=ordinary):
    random = np.random.default_rng(dim)
    numbers = random.standard_normal((NEW, 2 * KV_HEADS, dim))
    kind(numbers)
    both = mx.array(numbers).astype(getattr(mx, dtype))
    k, v = both[:, :KV_HEADS, None], both[:, KV_HEADS:, None]  # (as models pass them)
    return New(k, v, both.swapaxes(0, 1))


@cache
def mlx_kernel():
    """MLX's affine_quantize, as a kernel with its parameters; its text is only read."""
    text = HEADER.read_text()
    header = [
        text[found.start() : text.index("\n}\n", found.start()) + 3]
        for name in ("get_pack_factor", "get_bytes_per_pack")
        for found in re.finditer(
            rf"template <[^>]*>\ninline constexpr short {name}\(", text
        )
    ]
    assert len(header) == 2
    start = text.index("[[kernel]] void affine_quantize(")
    opening = text.index(") {", start) + len(") {")
    assert text[start:opening].count("[[buffer(") == 4
    return Kernel(
        "affine_quantize",
        ["w"],
        ["out", "scales", "biases"],
        "uint2 index = uint2(thread_position_in_grid.x, thread_position_in_grid.y);\n"
        "uint2 grid_dim = uint2(threads_per_grid.x, threads_per_grid.y);\n"
        + text[opening : text.index("\n}\n", opening)],
        "".join(header),
    )


def as_mlx_packs(rows, bits, group_size):
    """rows [..., D] by MLX's kernel, from its grid in quantized.cpp."""
    threads = rows.size // (group_size // 32)
    scales = (*rows.shape[:-1], rows.shape[-1] // group_size)
    result = mlx_kernel().run(
        [mx.contiguous(rows)],
        output_shapes=[(*rows.shape[:-1], rows.shape[-1] * bits // 8), scales, scales],
        output_dtypes=[mx.uint8, rows.dtype, rows.dtype],
        grid=(threads, 1, 1),
        threadgroup=(min(threads, 1024), 1, 1),
        template=[("T", rows.dtype), ("group_size", group_size), ("bits", bits)],
        orders=DEFAULT_ORDERS[:1],
    )
    assert not result.reports
    out, scales, biases = result.outputs
    return out.view(np.uint32), scales, biases


def as_numbers(packed):
    words, scales, biases = packed
    return np.array(words), *(np.array(x.astype(mx.float32)) for x in (scales, biases))


def assert_same(found, expected):
    for name, a, b in zip(("words", "scales", "biases"), found, expected, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@needs_emulator
@each_packing
@each_dtype
@pytest.mark.usefixtures("on_metal")
def test_rows_are_packed_as_mlx_packs_them_on_metal(dtype, bits, group_size):
    x = new(dtype, 64, mixed)
    found = kernels.quantize_kv(x.k, x.v, group_size, bits)
    assert_same(as_numbers(found), as_mlx_packs(x.rows, bits, group_size))


@needs_emulator
@pytest.mark.parametrize(
    ("dim", "bits", "group_size"),
    [(dim, *packing) for dim in DIMS for packing in PACKINGS if dim % packing[1] == 0],
)
@pytest.mark.usefixtures("on_metal")
def test_rows_of_every_length_are_packed_so(dim, bits, group_size):
    x = new("float16", dim, mixed)
    found = kernels.quantize_kv(x.k, x.v, group_size, bits)
    assert_same(as_numbers(found), as_mlx_packs(x.rows, bits, group_size))


@needs_kernels
@each_packing
@pytest.mark.usefixtures("on_metal")
def test_rows_of_both_signs_are_packed_as_mx_quantize_does(bits, group_size):
    """In float32, where nothing is rounded on the way, on every device."""
    x = new("float32", 128)
    found = kernels.quantize_kv(x.k, x.v, group_size, bits)
    expected = mx.quantize(x.rows, group_size=group_size, bits=bits)
    assert_same(as_numbers(found), as_numbers(expected))


@needs_kernels
@each_packing
@pytest.mark.usefixtures("on_metal")
def test_rows_come_back_within_a_step(bits, group_size):
    """Half a step, but for the end of a group that need not have a code of its own."""
    x = new("float32", 64, mixed)
    found = kernels.quantize_kv(x.k, x.v, group_size, bits)
    steps = np.repeat(np.abs(double(found.scales)), group_size, -1)
    error = np.abs(unpacked(found, bits, group_size) - double(x.rows)) / steps
    assert error.max() <= 1.0001
    assert np.mean(error <= 0.5001) > 0.95


@needs_kernels
@pytest.mark.usefixtures("on_metal")
def test_heads_may_lie_between_those_of_the_queries():
    """As models pass them: parts of [N, 1, H + 2 Hkv, D], swapped."""
    x = new("float32", 64)
    both = mx.contiguous(mx.concatenate([x.k, x.v], axis=1).swapaxes(1, 2))
    both = mx.concatenate([mx.full((NEW, 1, 4, 64), mx.nan), both], axis=2)
    k = both[:, :, 4 : 4 + KV_HEADS].swapaxes(1, 2)
    v = both[:, :, 4 + KV_HEADS :].swapaxes(1, 2)
    found = kernels.quantize_kv(k, v, 32, 8)
    assert_same(as_numbers(found), as_numbers(kernels.quantize_kv(x.k, x.v, 32, 8)))


@needs_kernels
@pytest.mark.usefixtures("on_metal")
def test_keys_and_values_may_have_strides_of_their_own():
    """In the packed rows and in those of numbers."""
    x = new("float32", 64)
    wide = mx.full((NEW, 1, KV_HEADS + 2, 64 + 3), mx.nan)
    wide[:, :, 1:-1, 1:65] = x.v.swapaxes(1, 2)
    k, v = mx.contiguous(x.k), wide[:, :, 1:-1, 1:65].swapaxes(1, 2)
    assert mx.array_equal(kernels.kv_rows(k, v), x.rows)
    found = kernels.quantize_kv(k, v, 32, 8)
    assert_same(as_numbers(found), as_numbers(kernels.quantize_kv(x.k, x.v, 32, 8)))


@needs_emulator
@pytest.mark.usefixtures("on_metal")
def test_mlx_packs_negative_rows_in_finer_steps_on_the_cpu():
    """There a group ends at its largest number, on Metal at 0 if that is larger.

    So rows may differ in their last bits between devices, and kernel and reference too.
    """
    x = new("float32", 64, negative)
    groups = double(x.rows).reshape(2 * KV_HEADS, NEW, 2, 32)
    least, most = groups.min(-1), groups.max(-1)
    on_cpu = mx.quantize(x.rows, group_size=32, bits=8, stream=mx.cpu)
    np.testing.assert_allclose(double(on_cpu[1]) * 255, most - least, rtol=0.01)
    ours = kernels.quantize_kv(x.k, x.v, 32, 8)
    np.testing.assert_allclose(double(ours.scales) * 255, -least, rtol=0.01)


def test_the_reference_lays_out_the_same_rows(monkeypatch):
    monkeypatch.setenv("TINY_LLM_KERNELS", "reference")
    x = new("float16", 64)
    found = kernels.quantize_kv(x.k, x.v, 32, 4)
    expected = kernels.quantize_rows(x.rows, 32, 4)
    assert_same(as_numbers(found), as_numbers(expected))


def test_rows_too_long_for_a_threadgroup_go_to_the_reference(monkeypatch):
    monkeypatch.setenv("TINY_LLM_KERNELS", "metal")
    x = new("float32", 33 * 64)
    found = kernels.quantize_kv(x.k, x.v, 64, 8)
    assert_same(as_numbers(found), as_numbers(kernels.quantize_rows(x.rows, 64, 8)))


@needs_kernels
@pytest.mark.parametrize("dim", [16, 80, 256, 288])
@each_dtype
@pytest.mark.usefixtures("on_metal")
def test_rows_of_numbers_are_laid_out_as_they_are(dtype, dim):
    x = new(dtype, dim)
    swapped = [mx.contiguous(part.swapaxes(1, 2)).swapaxes(1, 2) for part in (x.k, x.v)]
    for k, v in ((x.k, x.v), swapped):
        found = kernels.kv_rows(k, v)
        assert found.dtype == x.rows.dtype
        assert mx.array_equal(found, x.rows)
