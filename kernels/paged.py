"""Attention of few new tokens of many requests over the pages of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from tiny_llm.errors import ParameterError

from .attention import check_attention
from .batched import batched_attention
from .cached import (
    MOST_ROWS,
    MOST_TOKENS,
    Shape,
    check_packing,
    check_splits,
    launch,
    rounded,
    splits_for,
    supports,
)
from .canary import difference, paged_problem
from .metal import runs_on_metal
from .quantized import PackedRows, dequantize_rows


def paged_attention(
    q: mx.array,
    pages: Sequence[mx.array],
    table: mx.array,
    sequences: mx.array,
    *,
    most_rows: int,
    page_size: int,
    scale: float,
    bits: int | None = None,
    group_size: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    splits: int | None = None,
) -> mx.array:
    """softmax(q k^T * scale) v of each row over its sequence, up to the row itself.

    q: [N, H, 1, D], the rows of all sequences. pages: the arrays of a pool,
    [2 Hkv, slots, D], or with bits and group_size its words, scales and biases (see
    PackedRows), the heads of the keys before those of the values; page p is the slots
    p * page_size and on. table: int32 [S, width], the pages of each sequence.
    sequences: int32 [S, 4]: tokens, the new ones included; the first row of q; rows, at
    most most_rows <= 8, 0 for none; and how many pages before the table's first one
    were given back. What other slots hold, or those behind a sequence's end, is never
    used.
    window, softcap, sinks: as in `attention`. splits: threadgroups that share the keys
    of a sequence (None: by the rule in cached.py; the reference has none).
    Arrays may be views, but the last axis of q and pages must be without gaps; width is
    4 and S is 2 at least; group_size 32 or 64, bits 8 or 4. Returns [N, H, 1, D] in q's
    dtype; of a row of no sequence, anything. Sums and softmax are in float32. The
    reference runs for pages of another type than q's, and for heads that no kernel is
    made for. Raises ParameterError; with TINY_LLM_KERNELS=metal also KernelError.
    """
    _check(q, pages, table, sequences, page_size, bits, group_size)
    if not 1 <= most_rows <= MOST_ROWS:
        raise ParameterError(f"most_rows is {most_rows}; it may be 1 to {MOST_ROWS}")
    check_attention(q.shape[1], window, softcap, sinks)
    check_splits(splits)
    kv_heads = pages[0].shape[0] // 2
    group = q.shape[1] // kv_heads
    if splits is None:
        threadgroups = min(q.shape[0], sequences.shape[0]) * kv_heads
        splits = splits_for(threadgroups, table.shape[1] * page_size)
    shape = Shape(
        q.dtype,
        q.shape[3],
        bits or 0,
        group_size or 0,
        page_size,
        group,
        rounded(most_rows),
        splits > 1,
        sinks is not None,
    )
    if (
        not q.size
        or q.dtype != pages[-1].dtype
        or not supports(q.dtype, q.shape[3], bits or 0)
        or not runs_on_metal(shape, lambda: _canary(shape))
    ):
        return paged_reference(
            q,
            pages,
            table,
            sequences,
            page_size=page_size,
            scale=scale,
            bits=bits,
            group_size=group_size,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    return _launch(
        shape, q, pages, table, sequences, scale, softcap, window, sinks, splits
    )


def paged_reference(
    q: mx.array,
    pages: Sequence[mx.array],
    table: mx.array,
    sequences: mx.array,
    *,
    page_size: int,
    scale: float,
    bits: int | None = None,
    group_size: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """paged_attention in MLX's own operations: every row's keys are gathered."""
    kv_heads = pages[0].shape[0] // 2
    row = mx.arange(q.shape[0], dtype=mx.int32)
    first, count = sequences[:, 1], sequences[:, 2]
    own = mx.argmax((row[:, None] >= first) & (row[:, None] < first + count), axis=1)
    context, first, count, dropped = (sequences[:, i][own] for i in range(4))
    position = (context - count + row - first)[:, None]  # [N, 1]
    place = mx.arange(table.shape[1] * page_size, dtype=mx.int32)
    token = place + dropped[:, None] * page_size  # [N, width * page_size]
    seen = token <= position
    if window is not None:
        seen = seen & (token > position - min(window, MOST_TOKENS))
    slots = mx.repeat(table[own] * page_size, page_size, axis=1) + place % page_size
    slots = mx.where(seen, slots, 0)
    found = [part[:, slots] for part in pages]  # [2 Hkv, N, width * page_size, ...]
    rows = found[0]
    if bits is not None and group_size is not None:
        rows = dequantize_rows(PackedRows(*found), group_size, bits)
    # (what is masked is multiplied by 0, and 0 * NaN is NaN)
    rows = mx.where(seen[..., None], rows, mx.zeros((), rows.dtype)).swapaxes(0, 1)
    return batched_attention(
        q,
        rows[:, :kv_heads],
        rows[:, kv_heads:],
        scale=scale,
        mask=mx.where(seen, 0.0, -mx.inf),
        softcap=softcap,
        sinks=sinks,
    ).astype(q.dtype)


def _launch(
    shape: Shape,
    q: mx.array,
    pages: Sequence[mx.array],
    table: mx.array,
    sequences: mx.array,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: mx.array | None,
    splits: int,
) -> mx.array:
    names = ("words", "scales", "biases") if shape.bits else ("pages",)
    return launch(
        shape,
        q,
        [*zip(names, pages, strict=True), ("table", table), ("sequences", sequences)],
        kv_heads=pages[0].shape[0] // 2,
        sequences=sequences.shape[0],
        scale=scale,
        softcap=softcap,
        window=window,
        sinks=sinks,
        splits=splits,
    )


def _canary(shape: Shape) -> str | None:
    q, pages, table, sequences, scale, sinks, expected = paged_problem(shape)
    splits = 2 if shape.split else 1
    found = _launch(shape, q, pages, table, sequences, scale, None, None, sinks, splits)
    return difference(found, expected, shape.dtype)


def _check(
    q: mx.array,
    pages: Sequence[mx.array],
    table: mx.array,
    sequences: mx.array,
    page_size: int,
    bits: int | None,
    group_size: int | None,
) -> None:
    if (bits is None) != (group_size is None) or len(pages) != (3 if bits else 1):
        raise ParameterError(
            f"bits {bits} and group_size {group_size} with {len(pages)} arrays of "
            f"pages: it takes words, scales and biases with both, or numbers with none"
        )
    if q.ndim != 4 or q.shape[2] != 1:
        raise ParameterError(f"q must be [N, H, 1, D], got {q.shape}")
    dim = q.shape[3]
    if pages[0].ndim != 3:
        raise ParameterError(f"pages must be [2 Hkv, slots, ...], got {pages[0].shape}")
    heads, slots = pages[0].shape[0], pages[0].shape[1]
    if page_size < 1 or slots % page_size:
        raise ParameterError(f"pages of {page_size} tokens in {slots} slots")
    kind = pages[-1].dtype
    if not mx.issubdtype(kind, mx.floating):
        raise ParameterError(f"pages of {kind}, expected numbers of a float type")
    shapes, dtypes = [(heads, slots, dim)], [kind]
    if bits is not None and group_size is not None:
        check_packing(bits, group_size, dim)
        scales = (heads, slots, dim // group_size)
        shapes = [(heads, slots, dim * bits // 32), scales, scales]
        dtypes = [mx.uint32, kind, kind]
    for part, shape, dtype in zip(pages, shapes, dtypes, strict=True):
        if part.shape != shape or part.dtype != dtype:
            raise ParameterError(
                f"pages of {part.dtype} {part.shape} for queries {q.shape}: expected "
                f"{dtype} {shape}"
            )
    if heads < 2 or heads % 2 or q.shape[1] % (heads // 2):
        raise ParameterError(f"{q.shape[1]} query heads over pages of {heads} heads")
    for name, x, least in (("table", table, (2, 4)), ("sequences", sequences, (2, 4))):
        if (
            x.ndim != 2
            or x.dtype != mx.int32
            or x.shape[0] != table.shape[0]
            or x.shape[0] < least[0]
            or x.shape[1] < least[1]
        ):
            raise ParameterError(
                f"{name} must be int32 of {least} or more rows and columns, one row "
                f"for each sequence; got {x.dtype} {x.shape}"
            )
    if sequences.shape[1] != 4:
        raise ParameterError(f"sequences must be [S, 4], got {sequences.shape}")
