"""A token for each row of scores: filters, then one random number decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..kernels import exp_below
from .candidates import largest, row_bottoms, row_sums
from .filters import Filters, draw, draw_from_many, filter_arrays, keep

# Candidates that are looked at; more only where these do not hold all that is kept.
_FEW, _MORE = 128, 4096
_NOTHING = 1e-26  # exp_below stays above 8e-27


class Selected(NamedTuple):
    """tokens: int32 [R]. logprobs: theirs, float [R], of the distribution that they
    were drawn from; top_ids, top_logprobs: its likeliest, [R, n]; if asked for."""

    tokens: mx.array
    logprobs: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None


Way = Callable[
    [mx.array, Sequence[Filters], mx.array, "int | None"], Selected
]  # fmt: skip


def select(
    scores: mx.array,
    filters: Sequence[Filters],
    uniforms: mx.array,
    *,
    wait: bool = True,
    top: int | None = None,
) -> Selected:
    """Choose from scores [R, V] (logits, or log-probabilities) by filters, one each.

    uniforms: float32 [R] in [0, 1), which decide. wait: whether scores may be computed
    meanwhile; else the vocabulary of rows that may keep many tokens is sorted. top: how
    many likeliest tokens to report.
    """
    scores = scores.astype(mx.float32)
    groups: dict[Way, list[int]] = {}
    for row, own in enumerate(filters):
        if not own.active:
            way: Way = _plain
        elif wait:
            way = _waiting
        else:
            way = _few if 0 < own.top_k <= _FEW // 2 else _sorted
        groups.setdefault(way, []).append(row)
    parts = []
    for way, rows in groups.items():
        own_filters = [filters[row] for row in rows]
        parts.append(way(_rows(scores, rows), own_filters, _rows(uniforms, rows), top))
    return in_order(parts, [row for rows in groups.values() for row in rows])


def in_order(parts: Sequence[Selected], rows: Sequence[int]) -> Selected:
    """One Selected of several, whose rows one after the other are these."""
    if len(parts) == 1:
        return parts[0] if list(rows) == sorted(rows) else _taken(parts[0], rows)
    joined = [
        None if column[0] is None else mx.concatenate(list(column))
        for column in zip(*parts, strict=True)
    ]
    return _taken(Selected(*joined), rows)  # type: ignore[arg-type]


def _taken(found: Selected, rows: Sequence[int]) -> Selected:
    back = mx.argsort(mx.array(list(rows)))
    taken = (None if x is None else x[back] for x in found)
    return Selected(*taken)  # type: ignore[arg-type]


def _rows(x: mx.array, rows: Sequence[int]) -> mx.array:
    return x if len(rows) == x.shape[0] else x[mx.array(list(rows))]


def _plain(
    scores: mx.array, filters: Sequence[Filters], uniforms: mx.array, top: int | None
) -> Selected:
    """Rows that keep all tokens."""
    scores = (scores - mx.max(scores, axis=1, keepdims=True)) * _coldness(filters)
    weights = exp_below(scores, mx.array(0.0))
    tokens = draw_from_many(weights, uniforms, _NOTHING)
    if top is None:
        return Selected(tokens)
    total = mx.log(row_sums(weights))
    own = mx.take_along_axis(scores, tokens[:, None], axis=1) - total
    ids, best = largest(scores, min(max(top, 1), scores.shape[1]))
    return Selected(tokens, own[:, 0], ids[:, :top], (best - total)[:, :top])


def _few(
    scores: mx.array, filters: Sequence[Filters], uniforms: mx.array, top: int | None
) -> Selected:
    """Rows that keep few tokens."""
    return _from_candidates(scores, filters, uniforms, top, _FEW)[0]


def _sorted(
    scores: mx.array, filters: Sequence[Filters], uniforms: mx.array, top: int | None
) -> Selected:
    """Rows that may keep any number of tokens."""
    return _from_candidates(scores, filters, uniforms, top, scores.shape[1])[0]


def _waiting(
    scores: mx.array, filters: Sequence[Filters], uniforms: mx.array, top: int | None
) -> Selected:
    """More candidates only for the rows that turn out to need them."""
    parts: list[Selected] = []
    order: list[int] = []
    todo = list(range(scores.shape[0]))
    for count in (_FEW, _MORE, scores.shape[1]):
        found, complete = _from_candidates(
            _rows(scores, todo),
            [filters[row] for row in todo],
            _rows(uniforms, todo),
            top,
            count,
            wait=True,
        )
        done: Any = True if complete is None else complete.tolist()
        places = [p for p in range(len(todo)) if done is True or done[p]]
        if places:
            kept = (x if x is None else _rows(x, places) for x in found)
            parts.append(Selected(*kept))  # type: ignore[arg-type]
            order += [todo[p] for p in places]
        todo = [row for row in todo if row not in order]
        if not todo:
            break
    return in_order(parts, order)


def _from_candidates(
    scores: mx.array,
    filters: Sequence[Filters],
    uniforms: mx.array,
    top: int | None,
    count: int,
    wait: bool = False,
) -> tuple[Selected, mx.array | None]:
    """Choose among the `count` largest scores; and for which rows that was enough.

    (None: for all.)
    """
    vocabulary = scores.shape[1]
    everything = count >= vocabulary
    cold = _coldness(filters)
    ids, best = largest(scores, min(count, vocabulary))
    peak = best[:, :1]
    arrays = filter_arrays(filters, vocabulary)
    sigma, total = None, None
    if arrays.top_n_sigma is not None:
        sigma = _deviation(scores, peak, wait) * cold
    bounded = all(0 < own.top_k <= count for own in filters)
    if arrays.top_p is not None and not everything and not bounded:
        rest = (scores - peak) * cold
        weights = exp_below(rest, mx.array(0.0))
        if sigma is not None and arrays.top_n_sigma is not None:
            least = -arrays.top_n_sigma * sigma
            weights = weights * ((rest >= least) | (arrays.top_n_sigma == 0))
        total = row_sums(weights)
    weights, complete = keep((best - peak) * cold, arrays, sigma, total)
    if arrays.top_k is not None and not everything:
        # (top-p is a part of what top-k keeps: all of that must be here)
        complete &= ((arrays.top_k <= count) | (arrays.top_k >= vocabulary))[:, 0]
    # By their ids: two scores that change places must not change what is drawn.
    by_id = mx.argsort(ids, axis=1)
    places = draw(mx.take_along_axis(weights, by_id, axis=1), uniforms)[:, None]
    places = mx.take_along_axis(by_id, places, axis=1)
    tokens = mx.take_along_axis(ids, places, axis=1)[:, 0]
    found = Selected(tokens)
    if top is not None:
        shares = mx.log(weights / mx.sum(weights, axis=1, keepdims=True))
        own = mx.take_along_axis(shares, places, axis=1)[:, 0]
        order = mx.argsort(-shares, axis=1)[:, :top]
        # (as wide for any number of candidates: what is missing is not kept)
        more = [(0, 0), (0, min(top, vocabulary) - order.shape[1])]
        best_ids = mx.pad(mx.take_along_axis(ids, order, axis=1), more)
        best = mx.take_along_axis(shares, order, axis=1)
        found = Selected(
            tokens, own, best_ids, mx.pad(best, more, constant_values=-mx.inf)
        )
    return found, None if everything else complete


def _coldness(filters: Sequence[Filters]) -> mx.array:
    """1 / temperature, [R, 1]."""
    return mx.array([[1.0 / own.temperature] for own in filters], dtype=mx.float32)


def _deviation(scores: mx.array, peak: mx.array, wait: bool) -> mx.array:
    """The standard deviation of each row's finite scores, [R, 1]."""
    distance = scores - peak
    count: mx.array | int = scores.shape[1]
    if not (wait and mx.all(row_bottoms(scores) > -1e30).item()):
        finite = scores > -1e30
        distance = mx.maximum(distance, -1e30) * finite
        count = row_sums(finite.astype(mx.float32))
    mean = row_sums(distance) / count
    square = row_sums(distance * distance) / count
    return mx.sqrt(mx.maximum(square - mean * mean, 0.0))
