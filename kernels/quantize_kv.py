"""New keys and values packed as the pages of the cache hold them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .cached import check_packing
from .kv_rows import check_kv
from .metal import kernel, runs_on_metal
from .quantized import PackedRows, quantize_rows

_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def quantize_kv(k: mx.array, v: mx.array, group_size: int, bits: int) -> PackedRows:
    """Pack k and v [N, Hkv, 1, D] to rows [2 Hkv, N, ...]: the keys' heads come first.

    On Metal one launch, in place of one that lays them out and one that packs; the
    codes, scales and biases are those of quantize_rows. The last axis of k and v must
    be without gaps. Raises ParameterError; with TINY_LLM_KERNELS=metal also
    KernelError.
    """
    check_kv(k, v)
    dim = k.shape[3]
    check_packing(bits, group_size, dim)
    variant = ("quantize_kv", k.dtype, dim, group_size, bits)
    if (
        k.dtype in _DTYPES
        and dim // group_size <= 32  # SIMD groups of a threadgroup
        and runs_on_metal(variant, lambda: _canary(k.dtype, dim, group_size, bits))
    ):
        return _launch(k, v, group_size, bits)
    rows = mx.concatenate([k, v], axis=1).squeeze(2).swapaxes(0, 1)
    return quantize_rows(rows, group_size, bits)


def _launch(k: mx.array, v: mx.array, group_size: int, bits: int) -> PackedRows:
    count, kv_heads, _, dim = k.shape
    outputs = PackedRows._fields
    pack = kernel("quantize_kv", ("k", "v"), outputs)
    scales = (2 * kv_heads, count, dim // group_size)
    threads = 32 * (dim // group_size)
    return PackedRows(
        *pack(
            inputs=[k, v],
            template=[
                ("T", k.dtype),
                ("D", dim),
                ("BITS", bits),
                ("GROUP", group_size),
            ],
            grid=(threads, 2 * kv_heads, count),
            threadgroup=(threads, 1, 1),
            output_shapes=[(*scales[:2], dim * bits // 32), scales, scales],
            output_dtypes=[mx.uint32, k.dtype, k.dtype],
        )
    )


def _canary(dtype: mx.Dtype, dim: int, group_size: int, bits: int) -> str | None:
    """Pack a few rows; they must come back within a step of what they were."""
    random = np.random.default_rng(0)
    rows = mx.array(random.standard_normal((2, 3, 2, 1, dim))).astype(dtype)
    packed = _launch(rows[0], rows[1], group_size, bits)
    found = mx.dequantize(*packed, group_size=group_size, bits=bits, stream=mx.cpu)
    # [2, N, Hkv, 1, D] -> [2 Hkv, N, D]
    wanted = _host(rows)[..., 0, :].swapaxes(1, 2).reshape(found.shape)
    steps = np.repeat(np.abs(_host(packed.scales)), group_size, axis=-1)
    error = (np.abs(_host(found) - wanted) / steps).max() if steps.all() else np.inf
    # (half a step, at the end that has no code of its own up to one; and what rounding
    # scales and numbers adds at code 255)
    if error < (1.05 if dtype == mx.float32 else 4.0):  # (not so for NaN)
        return None
    return f"packed rows come back wrong by {error:.2g} steps"


def _host(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32, stream=mx.cpu))
