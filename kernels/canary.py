"""A small problem for a variant of a kernel, and its answer from the host.

A device that returns zeros, or a compiler that takes the source for something else,
is found before its numbers reach anybody. The answers are worked out in float64 by
NumPy, so that a broken device cannot confirm itself.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .cached import Shape

# Largest error, relative to the numbers' size of about 1.
_TOLERANCE = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 4e-2}


class PagedProblem(NamedTuple):
    """Inputs of paged_attention for two sequences, and the rows [N, H, D] expected."""

    q: mx.array
    pages: tuple[mx.array, ...]
    table: mx.array
    sequences: mx.array
    scale: float
    sinks: mx.array | None
    expected: np.ndarray


class DenseProblem(NamedTuple):
    """Inputs of dense_quantized_attention, and the outcome [2, H, L, D] expected."""

    q: mx.array
    k: tuple[mx.array, ...]
    v: tuple[mx.array, ...]
    scale: float
    sinks: mx.array | None
    expected: np.ndarray


def paged_problem(shape: Shape) -> PagedProblem:
    """Two sequences: one ends within its second page, one is a single token.

    The first has as many new rows as the variant is made for.
    """
    kv_heads, page, rows = 2, shape.page, shape.rows
    count = page + rows  # tokens of the first
    used = -(-count // page)  # its pages: the last ones, from the end on
    q, numbers, sinks = _numbers(shape, rows + 1, (2 * kv_heads, (used + 1) * page))
    pages, stored = _stored(numbers, shape)
    table = np.zeros((2, max(used, 4)), np.int32)
    table[0, :used] = np.arange(used, 0, -1)
    token = np.arange(count)
    first = stored[:, table[0, token // page] * page + token % page]
    scale = shape.dim**-0.5
    expected = [
        _attention(_double(q[i, :, 0]), first[:, : page + i + 1], scale, sinks)
        for i in range(rows)
    ]
    expected.append(_attention(_double(q[rows, :, 0]), stored[:, :1], scale, sinks))
    sequences = [[count, 0, rows, 0], [1, rows, 1, 0]]
    return PagedProblem(
        q, pages, mx.array(table), mx.array(sequences, dtype=mx.int32), scale, sinks,
        np.stack(expected),
    )  # fmt: skip


def dense_problem(shape: Shape) -> DenseProblem:
    """Two requests of 17 tokens each, the newest of which are queries."""
    kv_heads, rows = 2, shape.rows
    q, numbers, sinks = _numbers(shape, 2 * rows, (2, 2 * kv_heads, 17))
    parts, stored = _stored(numbers, shape)
    q = q.reshape(2, rows, -1, shape.dim).swapaxes(1, 2)
    scale = shape.dim**-0.5
    expected = [
        _attention(_double(q[i, :, r]), stored[i, :, : 18 - rows + r], scale, sinks)
        for i in range(2)
        for r in range(rows)
    ]
    return DenseProblem(
        q,
        tuple(part[:, :kv_heads] for part in parts),
        tuple(part[:, kv_heads:] for part in parts),
        scale,
        sinks,
        np.stack(expected).reshape(2, rows, -1, shape.dim).swapaxes(1, 2),
    )


def difference(found: mx.array, expected: np.ndarray, dtype: mx.Dtype) -> str | None:
    """What is wrong with an outcome, or None."""
    error = np.abs(_double(found).reshape(expected.shape) - expected).max()
    if error <= _TOLERANCE[dtype]:  # (not so for NaN)
        return None
    if not _double(found).any():
        return "it returns zeros only"
    return f"its numbers are wrong by {error:.2g} of about 1"


def _numbers(
    shape: Shape, queries: int, rows: tuple[int, ...]
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Queries [n, H, 1, D] and rows [..., D] for 2 KV heads; sinks if there are any."""
    random, heads = np.random.default_rng(0), 2 * shape.group
    q = mx.array(random.standard_normal((queries, heads, 1, shape.dim)))
    numbers = mx.array(random.standard_normal((*rows, shape.dim)))
    sinks = None
    if shape.sinks:
        sinks = mx.array(random.standard_normal(heads).astype(np.float32))
    return q.astype(shape.dtype), numbers.astype(shape.dtype), sinks


def _stored(numbers: mx.array, shape: Shape) -> tuple[tuple[mx.array, ...], np.ndarray]:
    """The numbers as a cache stores them, and what they are then, in float64."""
    if not shape.bits:
        return (numbers,), _double(numbers)
    size, bits = shape.group_size, shape.bits
    w, s, b = mx.quantize(numbers, group_size=size, bits=bits, stream=mx.cpu)
    whole = mx.dequantize(w, s, b, group_size=size, bits=bits, stream=mx.cpu)
    return (w, s, b), _double(whole)


def _attention(
    q: np.ndarray, rows: np.ndarray, scale: float, sinks: mx.array | None
) -> np.ndarray:
    """q [H, D] over rows [2 Hkv, S, D], the heads of the keys before the values'."""
    kv_heads = rows.shape[0] // 2
    group = q.shape[0] // kv_heads
    scores = np.stack(
        [rows[head // group] @ query * scale for head, query in enumerate(q)]
    )
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    if sinks is not None:
        total += np.exp(_double(sinks)[:, None] - top)
    weights /= total
    return np.stack([w @ rows[kv_heads + i // group] for i, w in enumerate(weights)])


def _double(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32, stream=mx.cpu)).astype(np.float64)
