"""The buffers that a kernel gets: MLX's arrays as bytes."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import mlx.core as mx
import numpy as np


@dataclass(frozen=True, eq=False)
class Buffer:
    """One buffer argument: an input's bytes, or an output's shape and type.

    An output may have bytes too: what is in it at first.
    """

    name: str
    data: bytes | memoryview | None = None
    shape: tuple[int, ...] = ()
    dtype: mx.Dtype | None = None

    @property
    def is_output(self) -> bool:
        """Whether the kernel writes it."""
        return self.dtype is not None

    @property
    def size(self) -> int:
        """In bytes."""
        if self.dtype is not None:
            return prod(self.shape) * self.dtype.size
        return len(self.data or b"")

    def describe(self) -> str:
        """The buffer's line in the job (see runtime/main.cpp)."""
        filled = self.data is not None
        return f"{self.name} {self.size} {self.is_output:d} {filled:d}\n"


def input_buffers(name: str, x: mx.array, contiguous: bool) -> dict[str, Buffer]:
    """The buffers that MLX may pass for an input, by name.

    ``contiguous``: an array with gaps is passed as a copy without.
    """
    array = _view(x)
    if contiguous and array.ndim:
        array = np.ascontiguousarray(array)
    strides = [stride // array.itemsize for stride in array.strides]
    return {
        name: Buffer(name, _spanned_bytes(name, array)),
        f"{name}_shape": Buffer(f"{name}_shape", np.array(array.shape, "i4").tobytes()),
        f"{name}_strides": Buffer(f"{name}_strides", np.array(strides, "i8").tobytes()),
        f"{name}_ndim": Buffer(f"{name}_ndim", np.int32(array.ndim).tobytes()),
    }


def output_buffer(
    name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None
) -> Buffer:
    """An output's buffer; unset unless there is an ``init_value``."""
    data = None
    if init_value is not None:
        data = _view(mx.full(shape, init_value, dtype=dtype)).tobytes()
    return Buffer(name, data, tuple(shape), dtype)


def _view(x: mx.array) -> np.ndarray:
    """The array's own memory with its strides; bfloat16 as uint16."""
    return np.asarray(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def _spanned_bytes(name: str, x: np.ndarray) -> bytes | memoryview:
    """The memory from an array's first to its last element."""
    if x.flags.c_contiguous:
        return x.reshape(-1).view(np.uint8).data
    if min(x.strides) < 0:
        raise ValueError(
            f"input {name} has negative strides {x.strides}, which the emulator does "
            "not pass on: use ensure_row_contiguous"
        )
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True))
    return ctypes.string_at(x.ctypes.data, last + x.itemsize)
