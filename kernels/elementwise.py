"""RMS norm, SwiGLU and the exponential, each as few passes as the device allows.

MLX's CPU exponential is scalar: 12 ns an element. `exp_below` is made of additions,
multiplications and one shift, which the compiler vectorises: 2 ns. But a fused chain
costs the CPU backend about 1 us for each of its operations, whatever the size, so for
few elements the plain operation is the faster one.
"""

import functools

import mlx.core as mx

from .runtime import can_fuse, on_gpu

# 2^f on [-1/2, 1/2]: Chebyshev fit of degree 5, relative error below 1.5e-7.
_EXP2 = (
    1.0000000754953,
    0.6931472067106,
    0.2402210735583,
    0.0555032721421,
    0.0096760370979,
    0.0013400432166,
)
_LOG2E = 1.4426950408889634
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the integer in the low bits
# exp(-60) = 9e-27 is nothing beside the 1 of the largest term; smaller values become
# denormals, which slow down the product with V.
_SMALLEST = -60.0
# From so many elements on our chains are worth it (measured on two cores).
_WORTH_SOFTMAX = 3500
_WORTH_SWIGLU = 2048


def _horner(x: mx.array, coefficients: tuple[float, ...]) -> mx.array:
    total = mx.array(coefficients[-1], dtype=x.dtype)
    for c in coefficients[-2::-1]:
        total = total * x + c
    return total


@functools.partial(mx.compile, shapeless=True)
def _split_exponent(x: mx.array) -> tuple[mx.array, mx.array]:
    t = mx.maximum(x, _SMALLEST) * _LOG2E
    shifted = t + _ROUND
    return shifted, _horner(t - (shifted - _ROUND), _EXP2)


@functools.partial(mx.compile, shapeless=True)
def _join_exponent(shifted: mx.array, mantissa: mx.array) -> mx.array:
    return mantissa + mx.left_shift(shifted, 23)


def _vectorises(x: mx.array, least: int) -> bool:
    """Whether our own chains beat MLX's operations on x, given enough elements."""
    # can_fuse first: it also turns mx.compile off where that would fail
    return can_fuse() and x.size >= least and not on_gpu() and x.dtype == mx.float32


def exp_below(x: mx.array, top: mx.array) -> mx.array:
    """exp(x - top) for x <= top; below exp(-60) it may stay at exp(-60).

    x: [..., S]; top: broadcastable to x. Relative error below 3e-7 + 6e-8 (top - x).
    """
    x = x - top
    if not _vectorises(x, _WORTH_SOFTMAX):
        return mx.exp(x)
    # (fusing the subtraction would broadcast inside the loop and spoil it)
    shifted, mantissa = _split_exponent(x)
    joined = _join_exponent(mx.view(shifted, mx.int32), mx.view(mantissa, mx.int32))
    return mx.view(joined, mx.float32)


def attention_weights(scores: mx.array) -> tuple[mx.array, mx.array | None]:
    """softmax(scores) over the last axis, as (weights, total): weights / total.

    total is None where the weights are normalised already. scores: [..., S] float32;
    dividing the product with V by the total is cheaper than dividing the weights.
    """
    if not _vectorises(scores, _WORTH_SOFTMAX):
        return mx.softmax(scores, axis=-1), None
    weights = exp_below(scores, mx.max(scores, axis=-1, keepdims=True))
    return weights, mx.sum(weights, axis=-1, keepdims=True)


@functools.partial(mx.compile, shapeless=True)
def _normalise(
    x: mx.array, weight: mx.array, squares: mx.array, over: float, eps: float
) -> mx.array:
    return x * mx.rsqrt(squares * over + eps) * weight


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang, Sennrich 2019).

    x: [..., E]; weight: [E], same dtype.
    """
    one_row = x.size == x.shape[-1]
    if can_fuse() and one_row and not on_gpu() and x.dtype == mx.float32:
        squares = mx.sum(x * x, axis=-1, keepdims=True)
        return _normalise(x, weight, squares, 1.0 / x.shape[-1], eps)
    return mx.fast.rms_norm(x, weight, eps)


# tanh(x) / x as a quotient of polynomials in x^2: least squares, reweighted towards the
# largest relative error (6e-9); beyond the limit tanh is 1 in float32 but for 3e-7.
_TANH_LIMIT = 7.9
_TANH_P = (
    9.9999999436532e-01,
    1.34506588925982e-01,
    3.57903770110044e-03,
    2.20240073902482e-05,
    1.54290603976393e-08,
)
_TANH_Q = (
    1.0,
    4.678398690526e-01,
    2.61924112479568e-02,
    3.42372564816969e-04,
    8.59921788862551e-07,
)


@functools.partial(mx.compile, shapeless=True)
def _swiglu_rational(gate: mx.array, up: mx.array) -> mx.array:
    # sigmoid(g) = 1/2 + tanh(g/2)/2
    x = mx.minimum(mx.maximum(gate * 0.5, -_TANH_LIMIT), _TANH_LIMIT)
    x2 = x * x
    tanh = x * _horner(x2, _TANH_P) / _horner(x2, _TANH_Q)
    return gate * (0.5 + 0.5 * tanh) * up


@functools.partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up (Shazeer 2020), element-wise; the shapes are equal."""
    if _vectorises(gate, _WORTH_SWIGLU):
        return _swiglu_rational(gate, up)
    return _swiglu(gate, up)
