"""What metal_kernels.py asks for: the numbers, and the answers in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from metal_roofline import GROUP_SIZE, Heads, attention_work

from tiny_llm.kernels import quantize_rows
from tiny_llm.roofline import Work

# Largest error of attention, relative to the largest number.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 4e-2}
_BLOCK = (
    4099  # slots of random numbers, repeated; a prime: pages differ from each other
)
_CHECKED = 1 << 16  # tokens; of more, only the first and the last request are checked


class Case(NamedTuple):
    """Attention of `rows` new tokens each for `batch` requests, over `context` tokens.

    paged: through a table of scattered pages, else over the packed rows of a dense
    cache. ragged: contexts from a quarter of `context` up to it.
    """

    model: Heads
    batch: int
    context: int
    rows: int = 1
    dtype: mx.Dtype = mx.bfloat16
    bits: int | None = None
    paged: bool = True
    ragged: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request, its new ones included."""
        if not self.ragged or self.batch < 2:
            return [self.context] * self.batch
        most, last = self.context, self.batch - 1
        return [most - most * 3 // 4 * (last - b) // last for b in range(self.batch)]

    @property
    def packing(self) -> dict[str, Any]:
        """bits and group_size; nothing for numbers."""
        return {"bits": self.bits, "group_size": GROUP_SIZE} if self.bits else {}

    @property
    def numbers(self) -> str:
        """How keys and values are stored, in words."""
        name = str(self.dtype).removeprefix("mlx.core.")
        return f"{self.bits} bits, {name}" if self.bits else name

    @property
    def work(self) -> Work:
        """Of one call: the live cache read once, and the arithmetic."""
        tokens, size = sum(self.lengths), self.dtype.size
        return attention_work(self.model, tokens, self.rows, self.bits, size)

    @property
    def gathered(self) -> int:
        """Bytes of the keys and values that the others lay side by side in a call."""
        tokens, size = self.batch * self.context, self.dtype.size
        full = attention_work(self.model, tokens, 1, None, size).bytes
        own = attention_work(self.model, tokens, 1, self.bits, size).bytes
        return own + full if self.bits else full

    def copies(self, working_set: int) -> int:
        """So many caches are read in turn, lest the chip's own cache hold them."""
        return max(1, -(-working_set // self.work.bytes))

    def bytes(self, working_set: int) -> int:
        """What there must be room for: the caches, and two calls of the others'."""
        return self.copies(working_set) * self.work.bytes + 2 * self.gathered


@functools.lru_cache(maxsize=4)
def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def queries(case: Case) -> mx.array:
    """[B, H, rows, D]."""
    model = case.model
    shape = (case.batch, model.heads, case.rows, model.dim)
    q = mx.array(normal(*shape)).astype(case.dtype)
    mx.eval(q)
    return q


def stored_rows(case: Case, slots: np.ndarray) -> list[mx.array]:
    """[2 Hkv, slots, ...]: numbers, or words, scales and biases."""
    block = normal(2 * case.model.kv_heads, _BLOCK, case.model.dim)
    rows: Sequence[mx.array] = [mx.array(block).astype(case.dtype)]
    if case.bits:
        rows = quantize_rows(rows[0], GROUP_SIZE, case.bits)
    index = mx.array((slots % _BLOCK).astype(np.int32))
    found = [mx.take(part, index, axis=1) for part in rows]
    mx.eval(found)
    return found


def expected_rows(
    case: Case, q: mx.array, stored: Callable[[int], list[np.ndarray]]
) -> dict[int, np.ndarray]:
    """Request -> [H, rows, D], in float64. stored: of a request, [2 Hkv, S, ...]."""
    asked, kv_heads, rows = host(q), case.model.kv_heads, case.rows
    many = sum(case.lengths) > _CHECKED
    expected = {}
    for b in {0, case.batch - 1} if many else range(case.batch):
        parts = stored(b)
        numbers = unpacked(parts, case.bits) if case.bits else parts[0]
        k, v = numbers[:kv_heads], numbers[kv_heads:]
        own = asked[b].reshape(kv_heads, -1, case.model.dim)  # [Hkv, H / Hkv rows, D]
        scores = own @ k.swapaxes(1, 2) * case.model.dim**-0.5
        context = k.shape[1]
        newest = context - rows + np.arange(rows * case.model.heads // kv_heads) % rows
        scores[:, np.arange(context) > newest[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = weights @ v / weights.sum(axis=-1, keepdims=True)
        expected[b] = out.reshape(asked[b].shape)
    return expected


def error(found: np.ndarray, expected: dict[int, np.ndarray]) -> float:
    """The largest, relative to the largest number of that request; NaN if any is."""
    return float(
        np.max(
            [np.abs(found[b] - x).max() / np.abs(x).max() for b, x in expected.items()]
        )
    )


def host(x: mx.array) -> np.ndarray:
    """On the host, in float64 (words: as they are)."""
    if x.dtype == mx.uint32:
        return np.array(x)
    return np.array(x.astype(mx.float32)).astype(np.float64)


def unpacked(parts: Sequence[np.ndarray], bits: int) -> np.ndarray:
    """Words, scales and biases as numbers."""
    words, scales, biases = parts
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = words[..., None] >> shifts & np.uint32(2**bits - 1)
    numbers: np.ndarray = codes.reshape(*words.shape[:-1], -1).astype(np.float64)
    numbers *= scales.repeat(GROUP_SIZE, axis=-1)
    numbers += biases.repeat(GROUP_SIZE, axis=-1)
    return numbers
