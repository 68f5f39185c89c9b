"""What is added to, or takes off, single logits: a few tokens of each row at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

Table = tuple[np.ndarray, np.ndarray]  # ids and how often each is there, int32 [U]


def add(logits: mx.array, terms: Sequence[Mapping[int, float]]) -> mx.array:
    """logits [R, V] with what each row's mapping adds to its ids; -inf forbids them."""
    width = max(len(own) for own in terms)
    if width == 0:
        return logits
    ids = np.zeros((len(terms), width), np.int32)
    values = np.zeros((len(terms), width), np.float32)
    for row, own in enumerate(terms):
        if own:
            ids[row, : len(own)] = list(own)
            values[row, : len(own)] = list(own.values())
            # (a place that is not needed repeats one: it is written twice, the same)
            ids[row, len(own) :] = ids[row, 0]
            values[row, len(own) :] = values[row, 0]
    places = mx.array(ids)
    found = mx.take_along_axis(logits, places, axis=1)
    return mx.put_along_axis(logits, places, found + mx.array(values), axis=1)


def penalise(
    logits: mx.array,
    tables: Sequence[Table],
    last: mx.array,
    *,
    frequency: Sequence[float],
    presence: Sequence[float],
    repetition: Sequence[float],
) -> mx.array:
    """logits [R, V] with the penalties of each row for the tokens in its context.

    tables: of each row's context but its last token, which is last [R] and may not have
    been computed yet; (ids, counts) empty where the row has no penalties.
    """
    width = max(len(ids) for ids, _ in tables) + 1
    ids = np.zeros((len(tables), width), np.int32)
    counts = np.zeros((len(tables), width), np.float32)
    for row, (own, times) in enumerate(tables):
        if len(own):
            ids[row, : len(own)], counts[row, : len(own)] = own, times
            ids[row, len(own) : -1], counts[row, len(own) : -1] = own[0], times[0]
        else:
            ids[row, :] = -1
    known, often = mx.array(ids[:, :-1]), mx.array(counts[:, :-1])
    last = last.astype(mx.int32)[:, None]
    places = mx.concatenate([mx.where(known < 0, last, known), last], axis=1)
    same = known == last
    often = mx.concatenate([often + same, mx.zeros(last.shape)], axis=1)
    # all places of the last token have its full count, also the one of its own
    lasting = places == last
    most = mx.maximum(mx.max(often * lasting, axis=1, keepdims=True), 1)
    often = mx.where(lasting, most, often)
    found = mx.take_along_axis(logits, places, axis=1)
    changed = found - often * _column(frequency) - _column(presence)
    factor = _column(repetition)
    changed = mx.where(changed < 0, changed * factor, changed / factor)
    return mx.put_along_axis(logits, places, changed.astype(logits.dtype), axis=1)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]
