"""Which tokens are kept, and the choice among them, for rows of sorted candidates.

Every row has settings of its own, so all settings are arrays [R]. Definitions are those
of transformers' logits processors; top-n-sigma is that of Tang et al. 2024, XTC that of
its first implementation (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx


class Filters(NamedTuple):
    """One row's settings; those that are off have the values given here."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_threshold: float = 1.0

    @property
    def active(self) -> bool:
        """Whether any token may be dropped."""
        return self[1:] != _OFF[1:]


_OFF = Filters()
_BLOCK = 256  # neighbours in a long row


class FilterArrays(NamedTuple):
    """Settings of several rows, float32 [R, 1]; None where no row has the filter."""

    top_k: mx.array | None
    top_p: mx.array | None
    min_p: mx.array | None
    typical_p: mx.array | None
    top_n_sigma: mx.array | None
    xtc_threshold: mx.array | None


def filter_arrays(rows: Sequence[Filters], vocabulary: int) -> FilterArrays:
    """The rows' settings as arrays; top-k that is off becomes the vocabulary."""
    found = {}
    for name in FilterArrays._fields:
        off = getattr(_OFF, name)
        values = [getattr(row, name) for row in rows]
        if name == "top_k":
            off = vocabulary
            values = [k if 0 < k < vocabulary else vocabulary for k in values]
        there = any(value != off for value in values)
        found[name] = mx.array(values, dtype=mx.float32)[:, None] if there else None
    return FilterArrays(**found)


class Kept(NamedTuple):
    """weights: [R, K], proportional to probabilities, 0 where a token is dropped.

    complete: bool [R], whether tokens beyond the candidates would all be dropped too.
    """

    weights: mx.array
    complete: mx.array


def keep(
    x: mx.array,
    filters: FilterArrays,
    sigma: mx.array | None = None,
    total: mx.array | None = None,
) -> Kept:
    """Apply the filters to the K largest scores [R, K] of each row, in falling order.

    sigma: [R, 1], the standard deviation of all scores of the row, for top-n-sigma.
    total: [R, 1], the sum of exp(score - largest) over all scores of the row that
    top-n-sigma keeps, where there are more than K of them (without top-k, which has
    its own); None: there are none, or nobody needs it. At least the first is kept.
    """
    top = x[:, :1]
    weights = mx.exp(x - top)  # (-inf - -inf: a row without any score is no row)
    kept = None
    if filters.top_n_sigma is not None:
        assert sigma is not None
        least = top - filters.top_n_sigma * sigma
        kept = (x >= least) | (filters.top_n_sigma == 0)
    if filters.top_k is not None:
        last = mx.minimum(filters.top_k, x.shape[1]).astype(mx.int32) - 1
        kth = mx.take_along_axis(x, last, axis=1)
        kept = _both(kept, (x >= kth) | (filters.top_k > x.shape[1]))
    if filters.top_p is not None:
        own = weights if kept is None else weights * kept
        sums = mx.cumsum(own, axis=1)
        everything = sums[:, -1:]
        if total is not None:
            if filters.top_k is not None:
                total = mx.where(filters.top_k <= x.shape[1], everything, total)
            everything = total
        kept = _both(kept, sums - own < filters.top_p * everything)
        kept = kept | (mx.arange(x.shape[1]) == 0)
        # (where top-p is off, what rounding leaves of the sum must not drop any)
        kept = kept | ((filters.top_p >= 1) & (own > 0))
    if filters.min_p is not None:
        kept = _both(kept, weights >= filters.min_p)
    complete = mx.zeros((x.shape[0],), dtype=mx.bool_)
    if kept is not None:
        complete = ~kept[:, -1]
        weights = weights * kept
    if filters.typical_p is not None:
        weights = _typical(weights, filters.typical_p)
    if filters.xtc_threshold is not None:
        weights = _exclude_top(weights, filters.xtc_threshold)
    return Kept(weights, complete)


def _both(a: mx.array | None, b: mx.array) -> mx.array:
    return b if a is None else a & b


def _typical(weights: mx.array, mass: mx.array) -> mx.array:
    """Locally typical (Meister et al. 2023): those whose surprise is near the mean."""
    probs = weights / mx.sum(weights, axis=1, keepdims=True)
    surprise = -mx.log(probs)  # inf where dropped
    entropy = mx.sum(mx.where(probs > 0, probs * surprise, 0.0), axis=1, keepdims=True)
    distance = mx.abs(surprise - entropy)
    order = mx.argsort(distance, axis=1)
    sums = mx.cumsum(mx.take_along_axis(probs, order, axis=1), axis=1)
    last = mx.sum(sums < mass, axis=1, keepdims=True)
    last = mx.minimum(last, weights.shape[1] - 1)
    last = mx.take_along_axis(order, last, axis=1)
    limit = mx.take_along_axis(distance, last, axis=1)
    return weights * ((distance <= limit) | (mass >= 1))


def _exclude_top(weights: mx.array, threshold: mx.array) -> mx.array:
    """XTC: of those above the threshold only the least stays, and what equals it."""
    above = weights > threshold * mx.sum(weights, axis=1, keepdims=True)
    least = mx.min(mx.where(above, weights, mx.inf), axis=1, keepdims=True)
    return weights * (weights <= least)


def draw_from_many(weights: mx.array, uniforms: mx.array, nothing: float) -> mx.array:
    """As draw, for long rows: first a block of neighbours, then one of these.

    Weights up to `nothing` count as 0.
    """
    rows, count = weights.shape
    over = -count % _BLOCK
    if over:
        weights = mx.pad(weights, [(0, 0), (0, over)])
    blocks = weights.reshape(rows, -1, _BLOCK)
    totals = mx.sum(blocks, axis=2)
    totals = totals * (totals > nothing * _BLOCK)
    block = draw(totals, uniforms)[:, None]
    before = mx.take_along_axis(mx.cumsum(totals, axis=1), block, axis=1)
    own = mx.take_along_axis(totals, block, axis=1)
    # what is left of the number, within the block
    left = uniforms[:, None] * mx.sum(totals, axis=1, keepdims=True) - (before - own)
    share = mx.clip(left / own, 0.0, 1.0 - 2.0**-24)[:, 0]
    inside = mx.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    return block[:, 0] * _BLOCK + draw(inside * (inside > nothing), share)


def draw(weights: mx.array, uniforms: mx.array) -> mx.array:
    """A place int32 [R] of each row of weights [R, K] >= 0, by numbers [R] in [0, 1).

    The inverse of the distribution function, so a place of weight 0 is never drawn.
    """
    sums = mx.cumsum(weights, axis=1)
    # (a parallel sum may rise at a weight of 0)
    beyond = (sums > uniforms[:, None] * sums[:, -1:]) & (weights > 0)
    place = mx.argmax(beyond, axis=1, keepdims=True)
    # (none: a product that was rounded up to the sum)
    found = mx.take_along_axis(beyond, place, axis=1)
    place = mx.where(found, place, mx.argmax(weights, axis=1, keepdims=True))
    return place[:, 0].astype(mx.int32)
