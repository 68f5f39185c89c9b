"""The interface: ``metal_kernel`` in place of ``mx.fast.metal_kernel``."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

import mlx.core as mx

from .buffers import Buffer, input_buffers, output_buffer
from .build import MODES, CompileError, build
from .capture import Definition, InputKind, capture
from .lint import lint
from .result import Result
from .run import FORWARD, REVERSED, SHUFFLED, Order, execute
from .translate import Translation, translate

DEFAULT_ORDERS: tuple[Order, ...] = ((FORWARD, 0), (REVERSED, 0), (SHUFFLED, 1))

_recordings: list[list[tuple[str, Result]]] = []


class CheckFailed(AssertionError):
    """The checker has reports; the message holds all of them."""


@cache
def _lint(header: str, source: str) -> str:
    return "\n".join(lint(header, source))


@cache
def _translation(
    definition: Definition,
    inputs: tuple[InputKind, ...],
    output_dtypes: tuple[mx.Dtype, ...],
    template: tuple[tuple[str, type, Any], ...],
) -> Translation:
    """Cached by all that a kernel's text depends on; True and 1 are two types."""
    arguments = [(name, value) for name, _, value in template]
    examples = [kind.example() for kind in inputs]
    metal = capture(definition, examples, output_dtypes, arguments)
    return translate(metal, definition.source)


class Kernel:
    """A custom kernel. ``run`` returns a Result; a call raises on any report."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
    ) -> None:
        self.definition = Definition(
            name,
            tuple(input_names),
            tuple(output_names),
            source,
            header,
            ensure_row_contiguous,
            atomic_outputs,
        )

    def run(
        self,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        mode: str = "check",
        orders: Sequence[Order] = DEFAULT_ORDERS,
        timeout: float = 60.0,
    ) -> Result:
        """Builds the kernel and runs it in each order.

        mode: ``check``, or ``fast``: without the checker. timeout: seconds of
        processor time for each order. Raises CompileError, and ValueError for sizes
        that Metal or MLX would refuse.
        """
        definition = self.definition
        _check_sizes(grid, threadgroup)
        if mode not in MODES:
            raise ValueError(f"mode is one of {MODES}: {mode!r}")
        if mode == "check" and (errors := _lint(definition.header, definition.source)):
            raise CompileError(errors)
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        kernel = _translation(
            definition,
            tuple(map(InputKind.of, arrays)),
            tuple(output_dtypes),
            tuple((name, type(value), value) for name, value in template or ()),
        )
        buffers: dict[str, Buffer] = {}
        for name, x in zip(definition.input_names, arrays, strict=True):
            buffers |= input_buffers(name, x, definition.ensure_row_contiguous)
        outputs = zip(
            definition.output_names, output_shapes, output_dtypes, strict=True
        )
        for name, shape, dtype in outputs:
            buffers[name] = output_buffer(name, shape, dtype, init_value)
        result = execute(
            build(kernel, mode),
            [buffers[name] for name in kernel.buffers],
            grid,
            threadgroup,
            mode,
            orders,
            timeout,
        )
        for recording in _recordings:
            recording.append((definition.name, result))
        return result

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
        mode: str | None = None,
        orders: Sequence[Order] = DEFAULT_ORDERS,
    ) -> list[mx.array]:
        """As a kernel from MLX, but at once; raises CheckFailed on any report."""
        mode = mode or os.environ.get("TINY_LLM_EMULATOR_MODE", "check")
        result = self.run(
            inputs,
            output_shapes,
            output_dtypes,
            grid,
            threadgroup,
            template,
            init_value,
            mode,
            orders if mode == "check" else orders[:1],
        )
        if result.reports:
            raise CheckFailed("\n".join(result.reports))
        return [
            mx.array(output).astype(dtype)
            for output, dtype in zip(result.outputs, output_dtypes, strict=True)
        ]


def _check_sizes(grid: Sequence[int], threadgroup: Sequence[int]) -> None:
    for what, sizes in (("grid", grid), ("threadgroup", threadgroup)):
        if len(sizes) != 3 or min(sizes) < 1:
            raise ValueError(f"a {what} is three positive sizes: {sizes}")
    if prod(threadgroup) > 1024:
        raise ValueError(f"a threadgroup has at most 1024 threads: {threadgroup}")


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Any = None,
) -> Kernel:
    """Drop-in for ``mx.fast.metal_kernel``; put it there with monkeypatch."""
    del compile_options  # fast math and the like: clang is told what to do
    return Kernel(
        name,
        input_names,
        output_names,
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
    )


@contextmanager
def recording() -> Iterator[list[tuple[str, Result]]]:
    """Collects (kernel name, Result) of every run inside, for their traffic."""
    results: list[tuple[str, Result]] = []
    _recordings.append(results)
    try:
        yield results
    finally:
        # By identity: two of them may be equal.
        _recordings[:] = [r for r in _recordings if r is not results]
