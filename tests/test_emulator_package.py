"""The drop-in, what it refuses, and what it keeps from call to call."""

import os
import subprocess
import sys
from pathlib import Path

import metal_emulator
import mlx.core as mx
import numpy as np
import pytest
from emulator_sources import EXP
from emulator_tools import needs_emulator
from metal_emulator import FORWARD, Kernel, host
from metal_emulator.capture import InputKind, capture

pytestmark = needs_emulator

RACE = "out[0] = inp[thread_position_in_grid.x];"


def _exp(x: mx.array) -> mx.array:
    """As project code would: it knows nothing of metal_emulator."""
    kernel = mx.fast.metal_kernel(
        name="dropin", input_names=["inp"], output_names=["out"], source=EXP
    )
    return kernel(
        inputs=[x],
        template=[("T", x.dtype)],
        grid=(x.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_drop_in(monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype) -> None:
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulator.metal_kernel)
    monkeypatch.delenv("TINY_LLM_EMULATOR_MODE", raising=False)
    x = mx.random.normal((64,), key=mx.random.key(1)).astype(dtype)
    with metal_emulator.recording() as runs:
        y = _exp(x)
    assert y.dtype == dtype
    assert mx.allclose(y, mx.exp(x), rtol=1e-2)
    [(name, result)] = runs
    assert name == "dropin"
    assert result.traffic["inp"].loaded == 128


def test_the_environment_sets_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulator.metal_kernel)
    monkeypatch.setenv("TINY_LLM_EMULATOR_MODE", "fast")
    with metal_emulator.recording() as runs:
        _exp(mx.zeros(64))
    assert runs[0][1].traffic == {}


def test_drop_in_raises_with_all_reports() -> None:
    kernel = metal_emulator.metal_kernel("racy", ["inp"], ["out"], RACE)
    with pytest.raises(metal_emulator.CheckFailed) as error:
        kernel(
            inputs=[mx.zeros(64)],
            grid=(64, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(2,)],
            output_dtypes=[mx.float32],
        )
    assert "race: body:1 vs body:1" in str(error.value)
    assert "unwritten-output: 4 of 8 bytes of out" in str(error.value)


def test_each_unwritten_output_is_reported() -> None:
    kernel = Kernel("nothing", ["inp"], ["a", "b"], "if (inp[0] > 1) a[0] = b[0] = 1;")
    result = kernel.run(
        [mx.zeros(8)], [(2,), (3,)], [mx.float32] * 2, (1, 1, 1), (1, 1, 1)
    )
    assert result.reports == [
        "unwritten-output: 8 of 8 bytes of a never written",
        "unwritten-output: 12 of 12 bytes of b never written",
    ]


def test_recordings_may_be_nested() -> None:
    with metal_emulator.recording() as outer:
        with metal_emulator.recording() as inner:
            pass
        _copy(mx.zeros(8))
    assert len(outer) == 1
    assert inner == []


COPY = "uint i = thread_position_in_grid.x; out[i] = inp[i];"


def _copy(x: mx.array, mode: str = "check") -> mx.array:
    kernel = metal_emulator.metal_kernel("copy", ["inp"], ["out"], COPY)
    return kernel(
        inputs=[x],
        grid=(x.size, 1, 1),
        threadgroup=(16, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        mode=mode,
    )[0]


@pytest.mark.parametrize("mode", ["check", "fast"])
@pytest.mark.parametrize(
    "x",
    [
        mx.array([9, 10, 32, 13] * 4, mx.int8),  # white space in the job
        mx.array(7, mx.int64),
        mx.array([True, False, True]),
        mx.arange(5000, dtype=mx.uint32),  # several pages
        mx.arange(12.0).reshape(3, 4).T,
    ],
    ids=["spaces", "scalar", "bool", "pages", "transposed"],
)
def test_arrays_arrive_as_they_are(x: mx.array, mode: str) -> None:
    if x.ndim:
        y = _copy(x, mode)
    else:
        kernel = Kernel("scalar", ["inp"], ["out"], "out[0] = inp;")
        run = kernel.run([x], [()], [x.dtype], (1, 1, 1), (1, 1, 1), mode=mode)
        y = mx.array(run.outputs[0])
    assert y.dtype == x.dtype
    assert mx.array_equal(x, y)


def test_numbers_of_other_libraries_are_converted_as_mlx_does() -> None:
    x = np.arange(10.0)  # float64
    kernel = Kernel(
        "half", ["inp", "factor"], ["out"], COPY.replace("inp[i]", "inp[i] * factor")
    )
    result = kernel.run([x, 0.5], [(10,)], [mx.float32], (10, 1, 1), (10, 1, 1))
    np.testing.assert_array_equal(result.outputs[0], x / 2)


@pytest.mark.parametrize(
    ("grid", "threadgroup", "message"),
    [
        ((2048, 1, 1), (2048, 1, 1), "at most 1024 threads"),
        ((8, 0, 1), (8, 1, 1), "grid is three positive sizes"),
        ((8, 1, 1), (8, 1), "threadgroup is three positive sizes"),
    ],
)
def test_sizes_are_refused(grid: tuple, threadgroup: tuple, message: str) -> None:
    kernel = Kernel("sizes", ["inp"], ["out"], RACE)
    with pytest.raises(ValueError, match=message):
        kernel.run([mx.zeros(8)], [(4,)], [mx.float32], grid, threadgroup)


def test_negative_strides_are_refused_or_copied() -> None:
    x = mx.arange(8.0)[::-1]
    mx.eval(x)
    assert mx.array_equal(_copy(x), x)
    kernel = Kernel("copy", ["inp"], ["out"], COPY, ensure_row_contiguous=False)
    with pytest.raises(ValueError, match="inp has negative strides"):
        kernel.run([x], [(8,)], [mx.float32], (8, 1, 1), (8, 1, 1))


@pytest.mark.parametrize("mode", ["check", "fast"])
def test_hang(mode: str) -> None:
    source = "float a = 0; while (inp[0] < 1) a += inp[0]; out[0] = a;"
    result = Kernel("hang", ["inp"], ["out"], source).run(
        *([mx.zeros(64)], [(1,)], [mx.float32], (1, 1, 1), (1, 1, 1)),
        mode=mode,
        orders=((FORWARD, 0),),
        timeout=0.3,
    )
    assert result.kinds == {"hang"}
    assert result.outputs == [None]


def test_a_process_of_mode_fast_serves_many_calls() -> None:
    host.end_hosts()
    for size in (10, 3000, 16, 8):
        x = mx.random.normal((size,), key=mx.random.key(size))
        assert mx.array_equal(_copy(x, "fast"), x)
        assert len(host._kept) == 1
    host.end_hosts()


def test_mode_fast_goes_on_after_a_crash() -> None:
    source = "out[0] = 1; if (inp[0] > 0) out[1 << 20] = 2;"
    kernel = Kernel("crash", ["inp"], ["out"], source)

    def run(value: float) -> metal_emulator.Result:
        inputs, sizes = [mx.full(8, value)], ((1, 1, 1), (1, 1, 1))
        orders = ((FORWARD, 0),)
        return kernel.run(
            inputs, [(1,)], [mx.float32], *sizes, mode="fast", orders=orders
        )

    assert run(0).outputs == [1]
    assert run(1).kinds == {"segv", "exit"}
    assert run(1).outputs == [None]
    assert run(0).outputs == [1]


def test_few_processes_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "_KEPT", 2)
    host.end_hosts()
    for dtype in (mx.int8, mx.int16, mx.int32, mx.int8):
        x = mx.arange(8, dtype=dtype)
        assert mx.array_equal(_copy(x, "fast"), x)
        assert len(host._kept) <= 2
    host.end_hosts()
    assert not host._kept


SHAPES = [(), (1,), (7,), (8,), (2, 3), (2, 4), (1000,), (0, 5), (3, 1, 70), (1, 2, 3)]
METADATA = (
    "int n = thread_position_in_grid.x; "
    "if (n < inp_ndim) out[n] = inp_shape[n] + inp_strides[n];"
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("contiguous", [True, False])
def test_arrays_of_a_kind_share_their_source(shape: tuple, contiguous: bool) -> None:
    """Else a translation must not be kept by the kinds of its inputs."""
    x = mx.zeros(shape, mx.float16)
    source = METADATA if shape else "out[0] = inp;"
    kernel = Kernel("kinds", ["inp"], ["out"], source, "", contiguous)
    template = [("T", mx.float16), ("N", 3)]
    theirs, ours = (
        capture(kernel.definition, [example], [mx.int32], template)
        for example in (x, InputKind.of(x).example())
    )
    assert theirs == ours
    assert ("constant float16_t" in ours) == (x.size < 8)


def test_true_and_one_are_two_template_arguments() -> None:
    kernel = Kernel("sizes", ["inp"], ["out"], "out[0] = sizeof(N);")

    def size_of(value: int | bool) -> np.ndarray:
        grid = ((1, 1, 1), (1, 1, 1))
        template = [("N", value)]
        return kernel.run(
            [mx.zeros(8)], [(1,)], [mx.int32], *grid, template, mode="fast"
        ).outputs[0]

    assert [size_of(value) for value in (1, True, 1)] == [4, 1, 4]


def test_processes_share_an_empty_cache(tmp_path: Path) -> None:
    program = (
        "import mlx.core as mx, metal_emulator\n"
        "from emulator_sources import EXP\n"
        "k = metal_emulator.metal_kernel('shared', ['inp'], ['out'], EXP)\n"
        "k(inputs=[mx.zeros(8)], template=[('T', mx.float32)], grid=(8, 1, 1),\n"
        "  threadgroup=(8, 1, 1), output_shapes=[(8,)], output_dtypes=[mx.float32])\n"
    )
    environment = os.environ | {
        "TINY_LLM_EMULATOR_CACHE": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [p.wait() for p in processes] == [0, 0]
    assert not list(tmp_path.glob("tmp-*"))
