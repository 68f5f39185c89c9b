"""Random problems for the attention kernels, and their answers in float64.

What a kernel must not use is NaN: slots that hold no token of a sequence, tokens that
no row sees, numbers beside a view. Words there are random, table entries -1.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import metal_emulator
import mlx.core as mx
import numpy as np
import pytest
from emulator_tools import needs_emulator

from tiny_llm import kernels
from tiny_llm.kernels import metal
from tiny_llm.kernels.paged import paged_reference


def _metal_works():
    """(Virtual machines may have a Metal that returns zeros for everything.)"""
    if not mx.metal.is_available():
        return False
    return mx.sum(mx.arange(64, stream=mx.gpu), stream=mx.gpu).item() == 2016


METAL = _metal_works()
needs_kernels = pytest.mark.skipif(False, reason="Metal") if METAL else needs_emulator
"""For tests with `on_metal`: real Metal or the emulator must be here."""

# Errors are counted as parts of a row's largest number (see largest_error).
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
OWN_SCALE = 0.3


@pytest.fixture
def on_metal(monkeypatch):
    """Kernels run on Metal, or in the emulator, which raises on any report."""
    monkeypatch.setenv(metal.VARIABLE, "metal")
    monkeypatch.delenv("TINY_LLM_EMULATOR_MODE", raising=False)
    if not METAL:
        monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulator.metal_kernel)
    metal.forget()
    yield
    metal.forget()


@pytest.fixture
def no_canaries(monkeypatch):
    """Kernels are used without being checked first."""
    for name in ("paged", "dense_quantized", "quantize_kv", "kv_rows"):
        # (the package has functions of those names)
        module = import_module(f"tiny_llm.kernels.{name}")
        monkeypatch.setattr(module, "runs_on_metal", lambda *_: True)


@dataclass(frozen=True)
class Case:
    """A problem; sequence s has contexts[s] tokens, of which the last rows[s] are new.

    bits, group_size: 0 for plain numbers. group: query heads of a KV head. view: q is a
    part of what also holds K and V, as models pass it, and every other array lies in a
    wider one of its own. dropped: pages that no row sees were given back. sink: how far
    the sinks of even heads lie above the scores, and those of odd heads below. lift:
    added to all scores and sinks; rise: to the scores of a new token, once for each of
    the new ones before it (both only for pages of numbers, whose scores then are exact
    in float32).
    """

    dtype: str = "float32"
    dim: int = 64
    packing: tuple[int, int] = (0, 0)
    page: int = 16
    group: int = 3
    kv_heads: int = 2
    contexts: tuple[int, ...] = (17, 1, 100, 33)
    rows: tuple[int, ...] = (1, 1, 1, 1)
    window: int | None = None
    dropped: bool = False
    softcap: float | None = None
    sinks: bool = False
    sink: float = 0.0
    scale: float | None = None
    splits: int | None = 1
    view: bool = False
    lift: float = 0.0
    rise: float = 0.0

    @property
    def bits(self) -> int:
        return self.packing[0]

    @property
    def group_size(self) -> int:
        return self.packing[1]

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def type(self) -> mx.Dtype:
        return getattr(mx, self.dtype)

    def options(self) -> dict[str, Any]:
        """What every way of attention is told, but the sinks."""
        found: dict[str, Any] = {
            "scale": self.scale or self.dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
        }
        if self.bits:
            found |= {"bits": self.bits, "group_size": self.group_size}
        return found

    def seen(self, sequence: int) -> range:
        """The tokens of a sequence that one of its rows sees."""
        context, rows = self.contexts[sequence], self.rows[sequence]
        if rows == 0:
            return range(0)
        oldest = context - rows + 1 - (self.window or context)
        return range(max(0, oldest), context)

    def row_bytes(self) -> int:
        """Bytes of one token's key in one head, scales and biases included."""
        if not self.bits:
            return self.dim * self.type.size
        scales = 2 * self.dim // self.group_size * self.type.size
        return self.dim * self.bits // 8 + scales

    def live_bytes(self) -> int:
        """Bytes of the keys and values that must be read."""
        tokens = sum(len(self.seen(s)) for s in range(len(self.contexts)))
        return 2 * tokens * self.kv_heads * self.row_bytes()


class Paged(NamedTuple):
    """Inputs of paged_attention; expected [N, H, D] in float64."""

    case: Case
    q: mx.array
    pages: tuple[mx.array, ...]
    table: mx.array
    sequences: mx.array
    sinks: mx.array | None
    expected: np.ndarray

    def attend(self, **changed: Any) -> mx.array:
        case = self.case
        settings = {"splits": case.splits, **case.options(), "sinks": self.sinks}
        return kernels.paged_attention(
            *self[1:5],
            most_rows=max(case.rows),
            page_size=case.page,
            **{**settings, **changed},
        )

    def reference(self) -> mx.array:
        return paged_reference(
            *self[1:5],
            page_size=self.case.page,
            **self.case.options(),
            sinks=self.sinks,
        )


class Dense(NamedTuple):
    """Inputs of dense_quantized_attention; expected [B, H, L, D] in float64."""

    case: Case
    q: mx.array
    k: kernels.PackedRows
    v: kernels.PackedRows
    sinks: mx.array | None
    expected: np.ndarray

    def attend(self, **changed: Any) -> mx.array:
        settings = {"splits": self.case.splits, **self.case.options()}
        return kernels.dense_quantized_attention(
            *self[1:4], **{**settings, "sinks": self.sinks, **changed}
        )

    def reference(self) -> mx.array:
        return kernels.quantized_attention(
            self.q, [self.k], [self.v], **self.case.options(), sinks=self.sinks
        )


def paged(case: Case, seed: int = 0) -> Paged:
    """The rows of the sequences stand in random order in q, their pages in the pool."""
    random = np.random.default_rng(seed)
    count, page = len(case.contexts), case.page
    given_back = [case.seen(s).start // page * case.dropped for s in range(count)]
    used = [
        -(-tokens // page) - before
        for tokens, before in zip(case.contexts, given_back, strict=True)
    ]
    table = np.full((max(count, 2), max(8, *used)), -1, np.int32)
    order = random.permutation(sum(used) + 2)
    slots = []  # of each sequence's tokens
    for s, stop in enumerate(itertools.accumulate(used)):
        table[s, : used[s]] = order[stop - used[s] : stop]
        tokens = np.arange(case.contexts[s])
        own = table[s, np.maximum(tokens // page - given_back[s], 0)]
        slots.append(own * page + tokens % page)
    live = np.zeros((1, len(order) * page, 1), bool)
    lift = np.full(live.shape[1], case.lift)
    for s in range(count):
        live[0, slots[s][case.seen(s)]] = True
        new = np.arange(case.rows[s])
        lift[slots[s][case.contexts[s] - len(new) + new]] += case.rise * new
    shape = (2 * case.kv_heads, live.shape[1], case.dim)
    numbers = random.standard_normal(shape)
    if case.lift or case.rise:
        numbers = np.round(numbers * 4) / 4
        numbers[: case.kv_heads, :, 0] = lift
    pages, stored = _store(random, case, numbers, live)
    first = np.zeros(count, int)
    turn = random.permutation(count)
    first[turn] = np.cumsum([0, *np.array(case.rows)[turn]])[:-1]
    sequences = np.zeros((len(table), 4), np.int32)
    sequences[:count] = np.stack([case.contexts, first, case.rows, given_back], axis=1)
    q = _queries(random, case, sum(case.rows), 1)
    sinks = _sinks(random, case)
    expected = np.zeros((q.shape[0], case.heads, case.dim))
    for s in range(count):
        mine = slice(first[s], first[s] + case.rows[s])
        rows = double(q[mine, :, 0]).swapaxes(0, 1)
        expected[mine] = _attention(case, rows, stored[:, slots[s]], sinks).swapaxes(
            0, 1
        )
    tables = [mx.array(table), mx.array(sequences)]
    if case.view:
        pages = tuple(_within(random, part, i) for i, part in enumerate(pages))
        twice = [mx.repeat(x, 2, axis=0) for x in tables]
        tables = [_within(random, x, i)[::2] for i, x in enumerate(twice)]
    return Paged(case, q, pages, *tables, sinks, expected)


def dense(case: Case, seed: int = 0) -> Dense:
    """As many requests as the case has sequences, all of the first one's sizes.

    Keys and values are views of longer buffers.
    """
    random = np.random.default_rng(seed)
    batch, context, length = len(case.contexts), case.contexts[0], case.rows[0]
    start, room = 3, context + 7  # (of the buffer, where the view lies)
    live = np.zeros((1, 1, room, 1), bool)
    live[:, :, start : start + context] = True
    shape = (batch, 2 * case.kv_heads, room, case.dim)
    parts, stored = _store(random, case, random.standard_normal(shape), live)
    view = [part[:, :, start : start + context] for part in parts]
    view = [part[:, : case.kv_heads] for part in view] + [
        part[:, case.kv_heads :] for part in view
    ]
    if case.view:
        view = [_within(random, part, i) for i, part in enumerate(view)]
    k, v = kernels.PackedRows(*view[:3]), kernels.PackedRows(*view[3:])
    q = _queries(random, case, batch, length)
    sinks = _sinks(random, case)
    rows = stored[:, :, start : start + context]
    expected = [
        _attention(case, double(q[b]), rows[b], sinks) for b in range(batch)
    ]  # fmt: skip
    return Dense(case, q, k, v, sinks, np.stack(expected))


def largest_error(problem: Paged | Dense, found: mx.array) -> float:
    """In parts of the largest number expected in the row [D]; NaN if there is one.

    Numbers of rows average values of about 1: where they are below 0.01, in parts of
    that.
    """
    expected = problem.expected
    assert found.dtype == problem.q.dtype
    assert found.shape == problem.q.shape
    error = np.abs(double(found).reshape(expected.shape) - expected)
    size = np.abs(expected).max(axis=-1, keepdims=True)
    return float((error / np.maximum(0.01, size)).max())


def double(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def unpacked(rows: Sequence[mx.array], bits: int, group_size: int) -> np.ndarray:
    """scale * code + bias, in float64."""
    words, scales, biases = rows
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (np.array(words)[..., None] >> shifts) & np.uint32(2**bits - 1)
    codes = codes.reshape(*words.shape[:-1], -1).astype(np.float64)
    scales, biases = (np.repeat(double(x), group_size, -1) for x in (scales, biases))
    return scales * codes + biases


def pairwise(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Choices in which any two values of two options meet, where that is allowed.

    allowed: judges a choice of some options. Greedy: each choice starts from a pair
    that is missing, and every further option takes the value with which it brings most
    missing ones (in equal cases another one each time).
    """
    missing = dict.fromkeys(pairs(options, allowed))
    chosen: list[dict[str, Any]] = []
    while missing:
        choice: dict[str, Any] = dict(next(iter(missing)))
        for name in sorted(options, key=lambda n: -len(options[n])):
            if name in choice:
                continue
            turn = len(chosen) % len(options[name])
            values = [*options[name][turn:], *options[name][:turn]]
            fitting = [v for v in values if allowed({**choice, name: v})]

            gains = [
                sum(
                    ((name, v), other) in missing or (other, (name, v)) in missing
                    for other in choice.items()
                )
                for v in fitting
            ]
            choice[name] = fitting[gains.index(max(gains))]
        for pair in itertools.permutations(choice.items(), 2):
            missing.pop(pair, None)
        chosen.append(choice)
    return chosen


def pairs(
    options: Mapping[str, Iterable[Any]], allowed: Callable[[dict[str, Any]], bool]
) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    """All ((option, value), (other option, value)) that are allowed."""
    return [
        ((a, x), (b, y))
        for a, b in itertools.combinations(options, 2)
        for x in options[a]
        for y in options[b]
        if allowed({a: x, b: y})
    ]


def _queries(random: np.random.Generator, case: Case, batch: int, length: int):
    """[batch, H, length, D]; of a view, NaN lies between the rows."""
    shape = (batch, length, case.heads + 2 * case.kv_heads, case.dim)
    if not case.view:
        numbers = random.standard_normal((batch, case.heads, length, case.dim))
        if case.lift or case.rise:  # (a key's first number is what its score gets)
            numbers = np.round(numbers * 4) / 4
            numbers[..., 0] = 1 / case.options()["scale"]
        return mx.array(numbers).astype(case.type)
    numbers = random.standard_normal(shape)
    numbers[:, :, case.heads :] = np.nan
    return mx.array(numbers).astype(case.type)[:, :, : case.heads].swapaxes(1, 2)


def _sinks(random: np.random.Generator, case: Case) -> mx.array | None:
    numbers = random.standard_normal(case.heads) + 1 + case.lift
    numbers += np.where(np.arange(case.heads) % 2, -case.sink, case.sink)
    return mx.array(numbers.astype(np.float32)) if case.sinks else None


def _store(
    random: np.random.Generator, case: Case, rows: np.ndarray, live: np.ndarray
) -> tuple[tuple[mx.array, ...], np.ndarray]:
    """Rows [..., D] as a cache stores them, and what they are then, in float64."""
    numbers = mx.array(rows).astype(case.type)
    alive = mx.array(live)
    if not case.bits:
        rows = mx.where(alive, numbers, mx.nan).astype(case.type)
        return (rows,), double(rows)
    packed = kernels.quantize_rows(numbers, case.group_size, case.bits)
    noise = mx.array(random.integers(0, 2**32, packed.words.shape, dtype=np.uint32))
    words = mx.where(alive, packed.words, noise)
    scales, biases = (
        mx.where(alive, x, mx.nan).astype(case.type)
        for x in (packed.scales, packed.biases)
    )
    stored = (words, scales, biases)
    return stored, unpacked(stored, case.bits, case.group_size)


def _within(random: np.random.Generator, x: mx.array, number: int) -> mx.array:
    """x as a view of a buffer that is larger along each axis; another number, others.

    Around it lies NaN, any word, or -1.
    """
    room = [(1, 1 + number + axis) for axis in range(x.ndim)]
    shape = [n + sum(more) for n, more in zip(x.shape, room, strict=True)]
    if x.dtype == mx.uint32:
        around = mx.array(random.integers(0, 2**32, shape, dtype=np.uint32))
    elif x.dtype == mx.int32:
        around = mx.full(shape, -1, dtype=x.dtype)
    else:
        around = mx.full(shape, mx.nan, dtype=x.dtype)
    place = tuple(slice(1, 1 + n) for n in x.shape)
    around[place] = x
    return around[place]


def _attention(
    case: Case, q: np.ndarray, stored: np.ndarray, sinks: mx.array | None
) -> np.ndarray:
    """q [H, L, D] over rows [2 Hkv, S, D], the heads of the keys before the values'."""
    length, context = q.shape[1], stored.shape[1]
    out = np.zeros(q.shape)
    for head, row in itertools.product(range(case.heads), range(length)):
        position = context - length + row
        first = max(0, position + 1 - (case.window or context))
        kv_head = head // case.group
        keys = stored[kv_head, first : position + 1]
        scores = keys @ q[head, row] * case.options()["scale"]
        if case.softcap is not None:
            scores = case.softcap * np.tanh(scores / case.softcap)
        sink = -np.inf if sinks is None else double(sinks)[head]
        top = max(scores.max(), sink)
        weights = np.exp(scores - top)
        total = weights.sum() + np.exp(sink - top)
        values = stored[case.kv_heads + kv_head, first : position + 1]
        out[head, row] = weights @ values / total
    return out
