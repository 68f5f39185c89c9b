"""Our kernels, and what MLX's users do in their place, over the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from metal_cases import (
    TOLERANCE,
    Case,
    error,
    expected_rows,
    host,
    normal,
    queries,
    stored_rows,
    unpacked,
)
from metal_roofline import GROUP_SIZE, Heads, attention_work

from tiny_llm.kernels import (
    PackedRows,
    dense_quantized_attention,
    dequantize_rows,
    kv_rows,
    paged_attention,
    quantize_kv,
    quantize_rows,
    quantized_attention,
)
from tiny_llm.kernels.cached import splits_for
from tiny_llm.memory import PAGE_SIZE
from tiny_llm.roofline import Work

OURS = "ours"
SPLITS = {"splits 1": 1, "splits 16": 16}  # timed beside the rule's in long contexts
LONG = 4096
STEPS = 4.0  # largest error of packing half precision, in steps of its codes

Call = Callable[[mx.array, int], mx.array]  # queries, number of the call -> output


class Way(NamedTuple):
    """One way to do what a case asks for.

    build: n calls; evaluating what it returns runs them. error: of one call. extra:
    bytes that a call allocates beside its output.
    """

    name: str
    build: Callable[[int], list[mx.array]]
    error: Callable[[], float]
    extra: int = 0


class Problem(NamedTuple):
    """ways: ours first, then with other splits, then the others'. work: of one call.

    tolerance: the largest error that is no fault. splits: by our rule.
    """

    ways: list[Way]
    work: Work
    tolerance: float
    splits: int = 0


def problem(case: Case, working_set: int) -> Problem:
    """The case's arrays, evaluated, and the ways over them."""
    return (_paged if case.paged else _dense)(case, case.copies(working_set))


def _paged(case: Case, copies: int) -> Problem:
    """Also of other lengths; the pages of a request are anywhere in a pool."""
    model, rows, batch = case.model, case.rows, case.batch
    counts = [-(-n // PAGE_SIZE) for n in case.lengths]
    widest, total = max(counts), copies * sum(counts)
    pool = stored_rows(case, np.arange(total * PAGE_SIZE))
    # width and rows of the tables as the engine makes them
    shape = (copies, max(batch, 2), max(4, 1 << (widest - 1).bit_length()))
    tables = np.zeros(shape, np.int32)
    scattered = np.random.default_rng(1).permutation(total)
    for table in tables:
        for own, count in zip(table, counts, strict=False):
            own[:count], scattered = scattered[:count], scattered[count:]
    sequences = np.zeros((shape[1], 4), np.int32)
    for b, n in enumerate(case.lengths):
        sequences[b] = n, b * rows, rows, 0
    pages, which = [mx.array(table) for table in tables], mx.array(sequences)
    asked = queries(case)
    q = mx.contiguous(asked.swapaxes(1, 2)).reshape(batch * rows, model.heads, 1, -1)
    options = {"most_rows": rows, "page_size": PAGE_SIZE, "scale": model.dim**-0.5}
    options |= case.packing

    def ours(splits: int | None) -> Call:
        return lambda q, i: paged_attention(
            q, pool, pages[i % copies], which, splits=splits, **options
        )

    # A page of a head is a row of `flat`. Where each request's are is worked out once,
    # as an engine would for all layers of a step.
    flat = [part.reshape(2 * model.kv_heads * total, -1) for part in pool]
    heads = np.arange(model.kv_heads, dtype=np.int32)[:, None] * total
    keys = [mx.array(table[:batch, None, :widest] + heads) for table in tables]
    values = [index + model.kv_heads * total for index in keys]
    mask: mx.array | str | None = "causal" if rows > 1 else None
    exact = all(n == widest * PAGE_SIZE for n in case.lengths)
    if not exact:
        newest = np.array(case.lengths)[:, None] - rows + np.arange(rows)
        token = np.arange(widest * PAGE_SIZE)
        mask = mx.array(token <= newest[:, None, :, None])
    mx.eval(pages, which, q, flat, keys, values, mask if not exact else [])

    def gather(i: int) -> list[PackedRows | mx.array]:
        found = []
        for index in (keys[i % copies], values[i % copies]):
            parts = [mx.take(part, index, axis=0) for part in flat]
            shape = (batch, model.kv_heads, widest * PAGE_SIZE, -1)
            parts = [part.reshape(shape) for part in parts]
            found.append(PackedRows(*parts) if case.bits else parts[0])
        return found

    def run(i: int) -> list[mx.array]:
        start = i % copies * widest * PAGE_SIZE
        rows = pool[0][None, :, start : start + case.context]
        return [rows[:, : model.kv_heads], rows[:, model.kv_heads :]]

    def stored(b: int) -> list[np.ndarray]:
        own = tables[0, b, :, None] * PAGE_SIZE + np.arange(PAGE_SIZE, dtype=np.int32)
        slots = mx.array(own.reshape(-1)[: case.lengths[b]])
        return [host(mx.take(part, slots, axis=1)) for part in pool]

    def off(out: mx.array) -> float:  # [B rows, H, 1, D], as [B, H, rows, D]
        found = host(out).reshape(batch, rows, model.heads, -1)
        return error(found.swapaxes(1, 2), expected)

    rule = splits_for(shape[1] * model.kv_heads, shape[2] * PAGE_SIZE)
    expected = expected_rows(case, asked, stored)
    ways = [_chain(name, ours(n), q, off) for name, n in _splits(case, rule)]
    ways += _others(case, "gather + ", asked, gather, mask, expected, exact)
    if not case.bits and batch == 1 and exact:
        first = expected_rows(
            case, asked, lambda b: [host(mx.concatenate(run(0), 1))[0]]
        )
        ways += _others(case, "one run, ", asked, run, mask, first, exact)
    return Problem(ways, case.work, TOLERANCE[case.dtype], rule)


def _dense(case: Case, copies: int) -> Problem:
    """All requests have `context` tokens; numbers are packed."""
    model, caches = case.model, []
    for i in range(copies):
        slots = np.arange(case.batch * case.context) + 977 * i
        shape = (2, model.kv_heads, case.batch, case.context, -1)
        parts = [
            part.reshape(shape).swapaxes(1, 2) for part in stored_rows(case, slots)
        ]
        caches.append(
            [PackedRows(*(mx.contiguous(p[j]) for p in parts)) for j in (0, 1)]
        )
        mx.eval(caches[-1])
    q = queries(case)

    def ours(splits: int | None) -> Call:
        scale = model.dim**-0.5
        return lambda q, i: dense_quantized_attention(
            q, *caches[i % copies], splits=splits, scale=scale, **case.packing
        )

    def stored(b: int) -> list[np.ndarray]:
        k, v = caches[0]
        return [host(mx.concatenate([x[b], y[b]])) for x, y in zip(k, v, strict=True)]

    rule = splits_for(case.batch * model.kv_heads, case.context)
    expected = expected_rows(case, q, stored)
    ways = [
        _chain(name, ours(n), q, lambda out: error(host(out), expected))
        for name, n in _splits(case, rule)
    ]
    mask = "causal" if case.rows > 1 else None
    ways += _others(case, "", q, lambda i: caches[i % copies], mask, expected, True)
    return Problem(ways, case.work, TOLERANCE[case.dtype], rule)


def rows_problem(model: Heads, rows: int, bits: int | None) -> Problem:
    """New keys and values of `rows` tokens as pages hold them. No call waits."""
    dtype = mx.bfloat16
    k, v = mx.array(normal(2, rows, model.kv_heads, 1, model.dim)).astype(dtype)
    mx.eval(k, v)

    def ours() -> Sequence[mx.array]:
        return quantize_kv(k, v, GROUP_SIZE, bits) if bits else [kv_rows(k, v)]

    def theirs() -> Sequence[mx.array]:
        both = mx.concatenate([k, v], axis=1).squeeze(2).swapaxes(0, 1)
        return quantize_rows(both, GROUP_SIZE, bits) if bits else [both]

    def way(name: str, call: Callable[[], Sequence[mx.array]]) -> Way:
        def off() -> float:
            found = [host(part) for part in call()]
            wanted = np.concatenate([host(k), host(v)], 1)[:, :, 0].swapaxes(0, 1)
            if not bits:
                return float(np.abs(found[0] - wanted).max())
            steps = (unpacked(found, bits) - wanted) / found[1].repeat(GROUP_SIZE, -1)
            return float(np.abs(steps).max())

        return Way(name, lambda n: [x for _ in range(n) for x in call()], off)

    moved = [attention_work(model, rows, 1, b, dtype.size).bytes for b in (None, bits)]
    name = "concatenate" + (" + mx.quantize" if bits else "")
    ways = [way(OURS, ours), way(name, theirs)]
    return Problem(ways, Work(0, sum(moved)), STEPS if bits else 0.0)


def _splits(case: Case, rule: int) -> list[tuple[str, int | None]]:
    """Names and splits (None: by the rule)."""
    fixed = SPLITS.items() if case.context >= LONG and case.rows == 1 else ()
    return [(OURS, None), *((name, n) for name, n in fixed if n != rule)]


def _others(
    case: Case,
    name: str,
    q: mx.array,
    find: Callable[[int], Sequence[Any]],
    mask: mx.array | str | None,
    expected: dict[int, np.ndarray],
    exact: bool,
) -> list[Way]:
    """What MLX's users do with the keys and values that `find` lays side by side.

    exact: there is nothing else among them, so that products need no mask.
    """
    scale = case.model.dim**-0.5

    def sdpa(q: mx.array, i: int) -> mx.array:
        k, v = find(i)
        if case.bits:
            k, v = (dequantize_rows(rows, GROUP_SIZE, case.bits) for rows in (k, v))
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    def products(q: mx.array, i: int) -> mx.array:
        k, v = find(i)
        return quantized_attention(q, [k], [v], scale=scale, **case.packing)

    calls: list[tuple[str, Call]] = [
        ("dequantize + sdpa" if case.bits else "sdpa", sdpa)
    ]
    if case.bits and exact:
        calls.append(("quantized_matmul", products))

    def wrong(out: mx.array) -> float:
        return error(host(out), expected)

    return [_chain(name + how, call, q, wrong, case.gathered) for how, call in calls]


def _chain(
    name: str,
    call: Call,
    q: mx.array,
    wrong: Callable[[mx.array], float],
    extra: int = 0,
) -> Way:
    """Each call's output is the next one's queries: layers wait for each other, too."""

    def build(n: int) -> list[mx.array]:
        x = q
        for i in range(n):
            x = call(x, i)
        return [x]

    return Way(name, build, lambda: wrong(call(q, 0)), extra)
