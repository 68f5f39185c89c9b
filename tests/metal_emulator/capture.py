"""The Metal source that MLX itself would compile for a kernel call.

MLX generates the kernel's signature from the arguments. With ``verbose=True`` it
prints the result while a call is traced, which works without a Metal device.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, Any

import mlx.core as mx

# Kept, because tests put metal_emulator.metal_kernel in its place.
_mlx_metal_kernel = mx.fast.metal_kernel

# From so many elements on MLX passes an input as ``device``, else as ``constant``.
_DEVICE_ELEMENTS = 8


@dataclass(frozen=True)
class Definition:
    """What ``mx.fast.metal_kernel`` makes a kernel of."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    ensure_row_contiguous: bool
    atomic_outputs: bool


@dataclass(frozen=True)
class InputKind:
    """As much of an input as its parameter in the signature depends on."""

    dtype: mx.Dtype
    ndim: int
    small: bool

    @classmethod
    def of(cls, x: mx.array) -> "InputKind":
        """The kind of an array."""
        return cls(x.dtype, x.ndim, x.size < _DEVICE_ELEMENTS)

    def example(self) -> mx.array:
        """An array of this kind."""
        length = 1 if self.small else _DEVICE_ELEMENTS
        shape = (length,) + (1,) * (self.ndim - 1) if self.ndim else ()
        return mx.zeros(shape, self.dtype)


def capture(
    definition: Definition,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]],
) -> str:
    """The source for a call of ``mx.fast.metal_kernel``."""
    traced = _mlx_metal_kernel(**asdict(definition))

    def trace(*inputs: mx.array) -> list[mx.array]:
        return traced(
            inputs=list(inputs),
            template=list(template),
            output_dtypes=list(output_dtypes),
            # The source depends on none of these.
            output_shapes=[(1,)] * len(output_dtypes),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            verbose=True,
        )

    with tempfile.TemporaryFile() as printed, tempfile.TemporaryDirectory() as folder:
        with _stdout_to(printed):
            mx.export_function(f"{folder}/kernel.mlxfn", trace, *inputs)
        printed.seek(0)
        text = printed.read().decode()
    return text.split("```\n", 1)[1].rsplit("\n```", 1)[0]


@contextmanager
def _stdout_to(file: IO[bytes]) -> Iterator[None]:
    """Sends file descriptor 1 to ``file``: MLX prints from C++."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
