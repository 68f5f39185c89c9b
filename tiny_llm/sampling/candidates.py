"""The largest scores of each row, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..kernels import exp_below

_BLOCK = 16
_PARTS = 64


def largest(x: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of each row of x [R, V]: ids int32 and scores, [R, count].

    In falling order, equals by their ids. count is at most V. Of equals at the end of
    the list, any may be in it. The largest n scores lie in the n blocks of tokens with
    the largest maxima: one pass over x finds these, and the rest are few.
    """
    rows, vocabulary = x.shape
    if count * 4 > vocabulary:
        order = mx.argsort(-x, axis=1)[:, :count]  # (stable)
        return order.astype(mx.int32), mx.take_along_axis(x, order, axis=1)
    if count * _BLOCK * 2 > vocabulary:
        ids = mx.argpartition(-x, count - 1, axis=1)[:, :count].astype(mx.int32)
        return _in_order(x, ids)
    over = -vocabulary % _BLOCK
    if over:
        x = mx.pad(x, [(0, 0), (0, over)], constant_values=-mx.inf)
    blocks = x.reshape(rows, _BLOCK, -1)  # (a block: every n-th token)
    step = blocks.shape[2]
    best = mx.argpartition(-mx.max(blocks, axis=1), count - 1, axis=1)[:, :count]
    scores = mx.take_along_axis(blocks, best[:, None], axis=2).reshape(rows, -1)
    starts = mx.arange(_BLOCK, dtype=mx.int32)[:, None] * step
    ids = (best.astype(mx.int32)[:, None] + starts).reshape(rows, -1)
    found = mx.argpartition(-scores, count - 1, axis=1)[:, :count]
    ids = mx.take_along_axis(ids, found, axis=1)
    ids, scores = _in_order(x, ids)
    return mx.minimum(ids, vocabulary - 1), scores  # (what was added is -inf)


def _in_order(x: mx.array, ids: mx.array) -> tuple[mx.array, mx.array]:
    ids = mx.sort(ids, axis=1)
    scores = mx.take_along_axis(x, ids, axis=1)
    order = mx.argsort(-scores, axis=1)  # (stable)
    return (
        mx.take_along_axis(ids, order, axis=1),
        mx.take_along_axis(scores, order, axis=1),
    )


def log_total(x: mx.array) -> mx.array:
    """log(sum(exp(x))) of each row, [R, 1] float32; x: [R, V]."""
    x = x.astype(mx.float32)
    top = mx.max(x, axis=1, keepdims=True)
    return top + mx.log(row_sums(exp_below(x, top)))


def row_tops(x: mx.array) -> mx.array:
    """The largest of each row of x [R, V], [R]; NaN if there is one."""
    return _reduced(x, mx.max)


def row_bottoms(x: mx.array) -> mx.array:
    """The smallest of each row of x [R, V], [R]; NaN if there is one."""
    return _reduced(x, mx.min)


def _reduced(x: mx.array, reduce: Callable[..., mx.array]) -> mx.array:
    count = x.shape[1] // _PARTS * _PARTS
    if count == 0:
        return reduce(x, axis=1)
    # (in parts: five times as fast on the CPU)
    parts = reduce(x[:, :count].reshape(x.shape[0], _PARTS, -1), axis=1)
    return reduce(mx.concatenate([parts, x[:, count:]], axis=1), axis=1)


def row_sums(x: mx.array) -> mx.array:
    """The sum of each row of x [R, V], [R, 1].

    In parts: MLX's own sum of a long row in float32 is off by 2e-4 on the CPU, and
    takes three times as long.
    """
    over = -x.shape[1] % _PARTS
    if over:
        x = mx.pad(x, [(0, 0), (0, over)])
    parts = mx.sum(x.reshape(x.shape[0], _PARTS, -1), axis=1)
    return mx.sum(parts, axis=1, keepdims=True)
