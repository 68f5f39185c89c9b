"""How many bytes a KV cache takes, in closed form, and what fits into a memory.

bytes = 2 (K and V) * layers * Hkv * row * tokens * batch. A row of D numbers takes
D * element_bytes, or in MLX's affine groups D * bits / 8 + 2 * (D / group_size) *
element_bytes (a scale and a bias per group). Every layout rounds its tokens up to
the granules in which it allocates; the caches use these very functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

from .errors import ParameterError, whole_number

STEP = 256  # tokens: contiguous buffers grow by so many
SLACK = 64  # tokens kept beyond a window, so that rewinding as many is exact
PAGE_SIZE = 64  # tokens, unless told otherwise
BITS = (4, 8)
GROUP_SIZES = (32, 64)
KINDS = ("dense", "quantized", "rotating", "paged")


@dataclass(frozen=True)
class KvShape:
    """What a token leaves in the caches of a model.

    windows: per layer, how many of the newest keys a query sees (None: all).
    element_bytes: of a number as it is computed with (float32: 4, float16: 2).
    """

    windows: tuple[int | None, ...]
    kv_heads: int
    head_dim: int
    element_bytes: int

    def row_bytes(self, bits: int | None = None, group_size: int | None = None) -> int:
        """Bytes of K and V of one token in one layer, all heads.

        Raises ParameterError for a packing that there is not.
        """
        numbers = 2 * self.kv_heads * self.head_dim
        packing = checked_packing(bits, group_size, self.head_dim)
        if packing is None:
            return numbers * self.element_bytes
        return (
            numbers * packing.bits // 8
            + 2 * numbers // packing.group_size * self.element_bytes
        )


class Packing(NamedTuple):
    """Numbers of so many bits, in groups with a scale and a bias each."""

    bits: int
    group_size: int


def checked_packing(
    bits: int | None, group_size: int | None, head_dim: int | None = None
) -> Packing | None:
    """The packing asked for; None: none, since bits is None.

    group_size None: 64, or 32 where heads of head_dim numbers need that. head_dim None:
    not known yet. Raises ParameterError if heads cannot be packed so.
    """
    if bits is None:
        if group_size is not None:
            raise ParameterError(
                f"group_size={group_size!r} has no effect without bits="
            )
        return None
    if group_size is None:
        group_size = 32 if head_dim is not None and head_dim % 64 else 64
    bits, group_size = (
        _one_of("bits", bits, BITS),
        _one_of("group_size", group_size, GROUP_SIZES),
    )
    if head_dim is not None and head_dim % group_size:
        smaller = " (32 fits)" if head_dim % 32 == 0 else ""
        raise ParameterError(
            f"a head of {head_dim} numbers cannot be packed in groups of "
            f"{group_size}{smaller}"
        )
    return Packing(bits, group_size)


def _one_of(name: str, value: object, of: tuple[int, ...]) -> int:
    for known in of:
        if value == known and isinstance(value, SupportsIndex):
            return known
    raise ParameterError(f"{name} is {value!r}; {of[1]} or {of[0]} is needed")


def buffer_tokens(tokens: int) -> int:
    """Tokens that a dense buffer for so many has room for."""
    return -(-tokens // STEP) * STEP


def rotating_tokens(tokens: int, window: int, keep: int = 0) -> int:
    """Tokens that a rotating buffer has room for after so many; bounded.

    At the bound it is moved together once in at least STEP tokens.
    """
    bound = buffer_tokens(keep + window + SLACK) + STEP
    return min(buffer_tokens(tokens), bound)


def page_count(
    tokens: int, page_size: int, window: int | None = None, append: int = 1
) -> int:
    """Pages that one request's tokens take at most, `append` of them at a time.

    With a window, pages that it has left are given back, but for SLACK tokens.
    """
    pages = -(-tokens // page_size)
    if window is None:
        return pages
    return min(pages, -(-(window - 1 + SLACK + append) // page_size) + 1)


def kv_cache_bytes(
    shape: KvShape,
    kind: str = "dense",
    *,
    tokens: int,
    batch: int = 1,
    bits: int | None = None,
    group_size: int | None = None,
    window: int | None = None,
    keep: int = 0,
    page_size: int | None = None,
    max_append: int | None = None,
) -> int:
    """Bytes that the caches of `batch` requests of `tokens` tokens each allocate.

    kind and its options as in `model.create_kv_cache`: bits packs ("quantized": 8
    unless told otherwise); window and keep bound the layers that have no window of
    their own ("rotating"). max_append: tokens that a paged layer with a window makes
    room for at once (1: as when decoding). A rotating layer with a window takes up to a
    chunk more while a prompt is read. Raises ParameterError.
    """
    tokens = whole_number("tokens", tokens, least=0)
    batch = whole_number("batch", batch, least=0)
    if kind not in KINDS:
        raise ParameterError(f"unknown cache kind {kind!r}; there are {KINDS}")
    if kind == "dense" and bits is not None:
        raise ParameterError("a dense cache has no bits; the kind is 'quantized'")
    if kind != "rotating" and (window is not None or keep):
        raise ParameterError(f"window and keep are for 'rotating', not {kind!r}")
    if kind != "paged" and (page_size is not None or max_append is not None):
        raise ParameterError(f"page_size and max_append are for 'paged', not {kind!r}")
    if kind == "quantized" and bits is None:
        bits = 8
    if kind == "rotating":
        check_windows(shape, window, keep)
    size = PAGE_SIZE if page_size is None else page_size
    size = whole_number("page_size", size, least=1)
    append = whole_number("max_append", max_append or 1, least=1)
    stored = 0  # tokens, over all layers
    for own in shape.windows:
        if kind == "paged":
            stored += page_count(tokens, size, own, append) * size
        elif kind != "rotating" or (own is None and window is None):
            stored += buffer_tokens(tokens)
        elif own is not None:
            stored += rotating_tokens(tokens, own)
        elif window is not None:
            stored += rotating_tokens(tokens, window, keep)
    return batch * stored * shape.row_bytes(bits, group_size)


def check_windows(shape: KvShape, window: int | None, keep: int) -> None:
    """Raise ParameterError unless `window` and `keep` bound layers that have none."""
    full = shape.windows.count(None)
    kinds = (
        f"{full} full-attention and {len(shape.windows) - full} sliding-window layers"
    )
    keep = whole_number("keep", keep, least=0)
    if window is None:
        if keep:
            raise ParameterError(
                f"keep is {keep}, but without window= nothing is bounded"
            )
        if full == len(shape.windows):
            raise ParameterError(
                f"a rotating cache needs a window, but the model has {kinds}: give "
                f"window="
            )
        return
    whole_number("window", window, least=1)
    if not full:
        raise ParameterError(
            f"window= bounds full-attention layers, but the model has {kinds}, which "
            f"keep their own: leave it out"
        )


def physical_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def largest(limit: int, cost: Callable[[int], int]) -> int:
    """The largest n from 0 on with cost(n) <= limit, for a cost that never falls.

    2^40 where it never comes to the limit, and -1 if even cost(0) is above it.
    """
    if cost(0) > limit:
        return -1
    low, high = 0, 1
    while high < 1 << 40 and cost(high) <= limit:
        low, high = high, 2 * high
    if high >= 1 << 40:
        return 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= limit else (low, middle)
    return low


def fits(
    memory: int,
    shape: KvShape,
    kind: str = "dense",
    *,
    tokens: int,
    batch: int = 1,
    weight_bytes: int = 0,
    **options: Any,
) -> bool:
    """Whether weights and caches take at most `memory` bytes together.

    The options are kv_cache_bytes's. What a step computes with besides (activations,
    logits) is not counted. Raises ParameterError.
    """
    left = _left(memory, weight_bytes)
    needed = kv_cache_bytes(shape, kind, tokens=tokens, batch=batch, **options)
    return needed <= left


def largest_batch(
    memory: int,
    shape: KvShape,
    kind: str = "dense",
    *,
    tokens: int,
    weight_bytes: int = 0,
    **options: Any,
) -> int:
    """How many requests of `tokens` tokens each fit beside the weights; 0 if none.

    As `fits` otherwise.
    """
    tokens = whole_number("tokens", tokens, least=1)

    def cost(batch: int) -> int:
        return kv_cache_bytes(shape, kind, tokens=tokens, batch=batch, **options)

    return max(largest(_left(memory, weight_bytes), cost), 0)


def largest_context(
    memory: int,
    shape: KvShape,
    kind: str = "dense",
    *,
    batch: int = 1,
    weight_bytes: int = 0,
    most: int,
    **options: Any,
) -> int:
    """How many tokens each of `batch` requests may have, `most` at most; 0 if none.

    most: the model's context (caches with windows stop growing). As `fits` otherwise.
    """
    batch = whole_number("batch", batch, least=1)
    most = whole_number("most", most, least=0)

    def cost(tokens: int) -> int:
        return kv_cache_bytes(shape, kind, tokens=tokens, batch=batch, **options)

    return min(max(largest(_left(memory, weight_bytes), cost), 0), most)


def _left(memory: int, weight_bytes: int) -> int:
    """What the weights leave of the memory; negative if they do not fit."""
    memory = whole_number("memory", memory, least=0)
    return memory - whole_number("weight_bytes", weight_bytes, least=0)
