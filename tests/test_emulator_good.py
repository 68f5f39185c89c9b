"""Correct kernels give no reports and the right numbers."""

import mlx.core as mx
import numpy as np
import pytest
from emulator_sources import (
    EXP,
    MATMUL,
    PAGED_FLOAT,
    PAGED_GROUPED,
    PAGED_INT8,
    Problem,
    run_paged,
)
from emulator_tools import needs_emulator
from metal_emulator import DEFAULT_ORDERS, Kernel

pytestmark = needs_emulator

TOLERANCE = {np.float32: 1e-5, np.float16: 2e-3}


@pytest.mark.parametrize("mode", ["check", "fast"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_exp(dtype: mx.Dtype, mode: str) -> None:
    x = mx.random.normal((1000,), key=mx.random.key(0)).astype(dtype)
    result = Kernel("exponential", ["inp"], ["out"], EXP).run(
        [x], [x.shape], [dtype], (1024, 1, 1), (256, 1, 1), [("T", dtype)], mode=mode
    )
    assert not result.reports
    expected = np.exp(np.array(x.astype(mx.float32)))
    tolerance = 1e-2 if dtype == mx.bfloat16 else 1e-3
    np.testing.assert_allclose(result.outputs[0], expected, rtol=tolerance)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_paged(head_dim: int, dtype: type) -> None:
    problem = Problem(head_dim, dtype)
    result = run_paged(problem, PAGED_FLOAT)
    assert not result.reports
    assert problem.error(result) < TOLERANCE[dtype]


def test_paged_fast_mode() -> None:
    problem = Problem(128, np.float16, lens=(1024, 777))
    result = run_paged(problem, PAGED_FLOAT, mode="fast")
    assert not result.reports
    assert not result.traffic
    assert problem.error(result) < TOLERANCE[np.float16]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_paged_int8(head_dim: int) -> None:
    problem = Problem(head_dim, np.float16, int8=True)
    result = run_paged(problem, PAGED_INT8)
    assert not result.reports
    assert problem.error(result) < TOLERANCE[np.float16]


def test_paged_grouped() -> None:
    problem = Problem(64, np.float32)
    result = run_paged(problem, PAGED_GROUPED, simds=1, grouped=True)
    assert not result.reports
    assert problem.error(result) < TOLERANCE[np.float32]


def _matmul(source: str):
    random = np.random.default_rng(0)
    a = random.standard_normal((32, 64)).astype(np.float16)
    b = random.standard_normal((64, 24)).astype(np.float16)
    result = Kernel("matmul", ["a", "b"], ["out"], source).run(
        [a, b], [(32, 24)], [mx.float32], (32 * 3, 4, 1), (32, 1, 1)
    )
    return result, a.astype(np.float64) @ b


def test_simdgroup_matrix() -> None:
    result, expected = _matmul(MATMUL)
    assert not result.reports
    np.testing.assert_allclose(result.outputs[0], expected, atol=1e-4)


def test_simdgroup_matrix_without_simdgroup_barrier() -> None:
    barrier = "        simdgroup_barrier(mem_flags::mem_threadgroup);\n"
    result, _ = _matmul(MATMUL.replace(barrier, "", 1))
    assert "race" in result.kinds


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_strided_input_and_ragged_grid(dtype: mx.Dtype) -> None:
    x = mx.random.normal((64, 48), key=mx.random.key(0)).astype(dtype)[::2, ::3]
    source = """
        uint e = thread_position_in_grid.x;
        out[e] = inp[elem_to_loc(e, inp_shape, inp_strides, inp_ndim)];
    """
    kernel = Kernel("copy", ["inp"], ["out"], source, ensure_row_contiguous=False)
    result = kernel.run([x], [x.shape], [dtype], (x.size, 1, 1), (100, 1, 1))
    assert not result.reports
    np.testing.assert_array_equal(result.outputs[0], np.array(x.astype(mx.float32)))


def test_atomic_histogram() -> None:
    x = np.random.default_rng(0).integers(0, 16, 2000).astype(np.int32)
    source = """
        uint e = thread_position_in_grid.x;
        atomic_fetch_add_explicit(&out[inp[e]], 1, memory_order_relaxed);
    """
    result = Kernel("hist", ["inp"], ["out"], source, atomic_outputs=True).run(
        [x], [(16,)], [mx.int32], (2000, 1, 1), (256, 1, 1), init_value=0
    )
    assert not result.reports
    np.testing.assert_array_equal(result.outputs[0], np.bincount(x, minlength=16))


def test_half_and_bfloat_are_rounded_after_each_operation() -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(512).astype(np.float16) for _ in range(2))
    source = "uint i = thread_position_in_grid.x; out[i] = a[i] * b[i] + a[i] - b[i];"
    kernel = Kernel("half_ops", ["a", "b"], ["out"], source)
    one = DEFAULT_ORDERS[:1]
    grid = ((512, 1, 1), (256, 1, 1))
    halves = kernel.run([a, b], [(512,)], [mx.float16], *grid, orders=one)
    np.testing.assert_array_equal(halves.outputs[0], a * b + a - b)
    x, y = mx.array(a).astype(mx.bfloat16), mx.array(b).astype(mx.bfloat16)
    bfloats = kernel.run([x, y], [(512,)], [mx.bfloat16], *grid, orders=one)
    expected = np.array((x * y + x - y).astype(mx.float32))
    np.testing.assert_array_equal(bfloats.outputs[0], expected)
