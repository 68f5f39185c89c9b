"""Attention of one layer over the rows of a step: write them all, then read."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..kernels import batched_attention, paged_attention
from .page_index import PageIndex
from .pool import PagePool, Slots
from .step_plan import GroupPlan, StepPlan, Together


def attend_rows(
    pool: PagePool,
    layer: int,
    plan: StepPlan,
    q: mx.array | None,
    k: mx.array,
    v: mx.array,
    window: int | None,
    options: dict[str, Any],
) -> mx.array:
    """Write k and v [N, Hkv, 1, D] to the pool; return attention [N, H, 1, D] of q.

    options: scale, softcap, sinks. q None: only write. Everything is written before
    anything is read: a view of an array that is still to be read would have the next
    write copy the array.
    """
    group = plan.groups[pool.group_of[layer]]
    pool.clear(layer, group.clear)
    pool.write_at(layer, group.pages.places, pool.format.encode_rows(k, v))
    if q is None:
        return k
    if plan.short:
        short = q if plan.short == plan.rows else q[: plan.short]
        out = [attend_by_index(pool, layer, group.pages, short, window, options)]
    else:
        out = _lone(pool, layer, group, q, window, options)
    for chunk in group.chunks:
        asked = q[chunk.rows].swapaxes(0, 2)  # [1, H, rows, D]
        seen = _attend(pool, layer, chunk.read, asked, window, options)
        out.append(seen.swapaxes(0, 2))
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=0)


def attend_by_index(
    pool: PagePool,
    layer: int,
    index: PageIndex,
    q: mx.array,
    window: int | None,
    options: dict[str, Any],
) -> mx.array:
    """The outputs [n, H, 1, D] of rows whose pages the kernels find themselves."""
    return paged_attention(
        q,
        pool.rows[layer],
        index.table,
        index.sequences,
        most_rows=index.most_rows,
        page_size=pool.page_size,
        bits=pool.format.bits,
        group_size=pool.format.group_size,
        window=window,
        **options,
    )


def _lone(
    pool: PagePool,
    layer: int,
    group: GroupPlan,
    q: mx.array,
    window: int | None,
    options: dict[str, Any],
) -> list[mx.array]:
    """The outputs [n, H, 1, D] of the requests with one row, in the rows' order."""
    out = [
        _attend(pool, layer, runs, q[row : row + 1], window, options)
        for row, runs in enumerate(group.singles)
    ]
    ordered = q if group.order is None else q[group.order]
    row = 0
    for together in group.together:
        asked = ordered[row : row + together.lanes]
        out.append(_attend_together(pool, layer, together, asked, options))
        row += together.lanes
    if group.back is None:
        return out
    return [mx.concatenate(out, axis=0)[group.back]]


def _attend(
    pool: PagePool,
    layer: int,
    runs: list[Slots],
    q: mx.array,
    window: int | None,
    options: dict[str, Any],
) -> mx.array:
    """One request's rows [1, H, L, D] over its own runs of slots."""
    read = [pool.read(layer, slots) for slots in runs]
    keys, values = [keys for keys, _ in read], [values for _, values in read]
    return pool.format.attend(q, keys, values, window=window, **options)


def _attend_together(
    pool: PagePool, layer: int, lanes: Together, q: mx.array, options: dict[str, Any]
) -> mx.array:
    """A row [n, H, 1, D] each of requests whose keys are read in one product."""
    k, v = pool.lanes(layer, lanes.start, lanes.stride, lanes.lanes, lanes.length)
    before = [pool.read(layer, slots) for slots in lanes.before]
    shared = [(keys[0], values[0]) for keys, values in before]
    return batched_attention(q, k, v, mask=lanes.mask, shared=shared, **options)
