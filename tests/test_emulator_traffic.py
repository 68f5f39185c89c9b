"""Memory traffic: what the checker counts, on the demo kernels and on small ones."""

import mlx.core as mx
import numpy as np
import pytest
from emulator_sources import PAGED_FLOAT, PAGED_GROUPED, PAGED_INT8, Problem, run_paged
from emulator_tools import needs_emulator
from metal_emulator import DEFAULT_ORDERS, FORWARD, SHUFFLED, Kernel, Result, Traffic

pytestmark = needs_emulator

ONE_ORDER = DEFAULT_ORDERS[:1]
GROUP = 4  # 8 query heads, 2 KV heads


def test_every_query_head_reads_its_kv_head() -> None:
    problem = Problem(128, np.float16)
    traffic = run_paged(problem, PAGED_FLOAT, orders=ONE_ORDER).traffic
    for name in ("key_pages", "value_pages"):
        t = traffic[name]
        assert t.distinct == problem.minimum_bytes
        assert t.loaded == t.merged == GROUP * problem.minimum_bytes
        assert t.stored == 0
    size = problem.queries.nbytes
    assert traffic["out"] == Traffic(size, 0, 0, size, size)


def test_grouped_kernel_reads_the_cache_once() -> None:
    problem = Problem(64, np.float32)
    result = run_paged(problem, PAGED_GROUPED, simds=1, grouped=True, orders=ONE_ORDER)
    for name in ("key_pages", "value_pages"):
        t = result.traffic[name]
        assert t.loaded == t.merged == t.distinct == problem.minimum_bytes


def test_scales_are_broadcast_loads() -> None:
    problem = Problem(64, np.float16, int8=True)
    traffic = run_paged(problem, PAGED_INT8, orders=ONE_ORDER).traffic
    scales = sum(problem.lens) * problem.kv_heads * 4
    assert traffic["key_pages"].loaded == GROUP * problem.minimum_bytes
    for name in ("key_scales", "value_scales"):
        t = traffic[name]
        assert t.distinct == scales
        assert t.merged == GROUP * scales
        assert t.loaded == 32 * t.merged


def _run(source: str, orders: tuple = ONE_ORDER) -> Result:
    kernel = Kernel("traffic", ["inp"], ["out"], source)
    x = np.arange(64, dtype=np.float32)
    grid = ((64, 1, 1), (64, 1, 1))
    return kernel.run([x], [(64,)], [mx.float32], *grid, orders=orders)


# Each of the 64 lanes (two SIMD groups) ...; loaded, merged, distinct floats of inp.
PATTERNS = {
    "its own element": ("out[i] = inp[i];", 64, 64, 64),
    "one element for all": ("out[i] = inp[7];", 64, 2, 1),
    "neighbours in pairs": ("out[i] = inp[i / 2];", 64, 32, 32),
    "a loop of differing length": (
        "float a = 0; for (uint j = 0; j <= i % 32; ++j) a += inp[j]; out[i] = a;",
        2 * 32 * 33 // 2,
        64,
        32,
    ),
    "the same element again after a simd_sum": (
        "float a = simd_sum(inp[3]); out[i] = a + inp[3];",
        None,
        None,
        1,
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name: str) -> None:
    source, loaded, merged, distinct = PATTERNS[name]
    result = _run("uint i = thread_position_in_grid.x; " + source)
    assert not result.reports
    t = result.traffic["inp"]
    assert t.distinct == 4 * distinct
    if loaded is not None:
        assert (t.loaded, t.merged) == (4 * loaded, 4 * merged)


def test_read_modify_write_counts_as_both() -> None:
    kernel = Kernel(
        "count",
        ["inp"],
        ["out"],
        "atomic_fetch_add_explicit(&out[thread_position_in_grid.x / 32], 1, "
        "memory_order_relaxed); atomic_fetch_add_explicit(&out[2], int(inp[0]), "
        "memory_order_relaxed);",
        atomic_outputs=True,
    )
    grid = ((64, 1, 1), (64, 1, 1))
    x = np.ones(64, np.float32)
    result = kernel.run([x], [(3,)], [mx.int32], *grid, init_value=0)
    assert not result.reports
    t = result.traffic["out"]
    assert (t.loaded, t.stored, t.distinct) == (512, 512, 12)


def test_traffic_does_not_depend_on_the_order() -> None:
    problem = Problem(64, np.float32)
    runs = [
        run_paged(problem, PAGED_FLOAT, orders=((order, 3),))
        for order in (FORWARD, SHUFFLED)
    ]
    assert runs[0].traffic == runs[1].traffic
