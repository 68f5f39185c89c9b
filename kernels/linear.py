"""The matrix product of every layer, dense or over MLX's packed weights."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .runtime import on_gpu


class Packed(NamedTuple):
    """How a quantised matrix is stored (MLX's affine groups).

    scales, biases: [out, in / group_size]; bits: 2 to 8.
    """

    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int


def linear(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    packed: Packed | None = None,
) -> mx.array:
    """x @ weight^T [+ bias] [+ residual].

    x: [..., in], many rows best as [N, in]; weight: [out, in], or uint32
    [out, in * bits / 32] if packed; bias: [out]; residual: [..., out].
    Returns [..., out].
    """
    if packed is not None:
        y = mx.quantized_matmul(
            x,
            weight,
            packed.scales,
            packed.biases,
            transpose=True,
            group_size=packed.group_size,
            bits=packed.bits,
        )
        return _add(y, bias, residual)
    if residual is None and bias is not None:
        residual, bias = bias, None
    # One row: MKL's GEMV reads the weights at two thirds of the speed of its GEMM of
    # two rows (24 against 19 ms for all of SmolLM2 on two cores).
    one_row = x.size == x.shape[-1] and x.ndim > 1 and not on_gpu()
    if one_row:
        x = mx.broadcast_to(x, (*x.shape[:-2], 2, x.shape[-1]))
    y = x @ weight.T if residual is None else mx.addmm(residual, x, weight.T)
    if one_row:
        y = y[..., :1, :]
    return y if bias is None else y + bias


def _add(y: mx.array, *terms: mx.array | None) -> mx.array:
    for term in terms:
        if term is not None:
            y = y + term
    return y
