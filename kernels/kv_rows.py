"""New keys and values laid out as the pages of the cache hold them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from tiny_llm.errors import ParameterError

from .metal import kernel, runs_on_metal

_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def kv_rows(k: mx.array, v: mx.array) -> mx.array:
    """k and v [N, Hkv, 1, D] as rows [2 Hkv, N, D]: the keys' heads come first.

    On Metal one launch, in place of a copy each; the last axis of k and v must be
    without gaps. Raises ParameterError; with TINY_LLM_KERNELS=metal also KernelError.
    """
    check_kv(k, v)
    variant = ("kv_rows", k.dtype, k.shape[3])
    if k.dtype in _DTYPES and runs_on_metal(
        variant, lambda: _canary(k.dtype, k.shape[3])
    ):
        return _launch(k, v)
    return mx.concatenate([k, v], axis=1).squeeze(2).swapaxes(0, 1)


def check_kv(k: mx.array, v: mx.array) -> None:
    """Raise ParameterError unless k and v are rows of one token each, and alike."""
    if k.shape != v.shape or k.dtype != v.dtype or k.ndim != 4 or k.shape[2] != 1:
        raise ParameterError(
            f"k {k.dtype} {k.shape} and v {v.dtype} {v.shape}: both must be "
            "[N, Hkv, 1, D]"
        )


def _launch(k: mx.array, v: mx.array) -> mx.array:
    count, kv_heads, _, dim = k.shape
    return kernel("kv_rows", ("k", "v"), ("rows",))(
        inputs=[k, v],
        template=[("T", k.dtype), ("D", dim)],
        grid=(dim, 2 * kv_heads, count),
        threadgroup=(min(dim, 256), 1, 1),
        output_shapes=[(2 * kv_heads, count, dim)],
        output_dtypes=[k.dtype],
    )[0]


def _canary(dtype: mx.Dtype, dim: int) -> str | None:
    numbers = np.arange(2 * 3 * 2 * dim).reshape(2, 3, 2, 1, dim) % 256 + 1
    k, v = (mx.array(part).astype(dtype, stream=mx.cpu) for part in numbers)
    wanted = np.concatenate(list(numbers), axis=1)[:, :, 0].swapaxes(0, 1)
    found = np.array(_launch(k, v).astype(mx.float32, stream=mx.cpu))
    return None if (found == wanted).all() else "copied rows are wrong"
