"""From a kind and its options to one cache entry per layer."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, cast

import mlx.core as mx

from ..errors import ParameterError, whole_number
from ..memory import KvShape, check_windows, checked_packing
from .base import KvCache
from .batching import batching_cache
from .full import QuantizedKvCache, TinyKvFullCache
from .paged import paged_cache
from .pool import PagePool
from .rotating import RotatingKvCache
from .table import PageTable


def create_kv_cache(
    kind: str, shape: KvShape, dtype: mx.Dtype, options: dict[str, Any]
) -> list[KvCache]:
    """The entries of all layers. The options are those of the kind's function below.

    Raises ParameterError for an unknown kind or option, and for what cannot be
    combined.
    """
    if not isinstance(kind, str) or kind not in _KINDS:
        names = ", ".join(map(repr, _KINDS))
        raise ParameterError(f"unknown cache kind {kind!r}; there are {names}")
    build = _KINDS[kind]
    _check_options(f"a {kind} cache", build, options)
    return build(shape, dtype, **options)


def create_page_pool(
    shape: KvShape, dtype: mx.Dtype, options: dict[str, Any]
) -> PagePool:
    """A PagePool with options of its own. Raises ParameterError."""
    _check_options("a page pool", PagePool, options)
    return PagePool(shape, dtype, **options)


def _check_options(
    what: str, build: Callable[..., Any], options: dict[str, Any]
) -> None:
    known = [name for name in signature(build).parameters if name not in _GIVEN]
    for name in options:
        if name not in known:
            raise ParameterError(
                f"{what} has no option {name!r}; it has {', '.join(known)}"
            )


_GIVEN = ("shape", "dtype")


def _dense(shape: KvShape, dtype: mx.Dtype, *, reserve: int = 0) -> list[KvCache]:
    """Every key of every layer, also where a window hides it: any rewind is exact."""
    return [TinyKvFullCache(reserve) for _ in shape.windows]


def _quantized(
    shape: KvShape,
    dtype: mx.Dtype,
    *,
    bits: int = 8,
    group_size: int | None = None,
    reserve: int = 0,
) -> list[KvCache]:
    """As dense, packed."""
    packing = checked_packing(bits, group_size, shape.head_dim)
    bits, group_size = packing or (bits, group_size)  # (None: refused by the cache)
    return [QuantizedKvCache(bits, group_size, reserve) for _ in shape.windows]


def _rotating(
    shape: KvShape,
    dtype: mx.Dtype,
    *,
    window: int | None = None,
    keep: int = 0,
    bits: int | None = None,
    group_size: int | None = None,
    reserve: int = 0,
) -> list[KvCache]:
    """Layers with a window of their own hold that; `window` and `keep` bound the rest.

    Without `window` the layers with full attention are dense, and all is exact. With it
    they no longer see everything: the output is another one beyond the window.
    """
    check_windows(shape, window, keep)
    packing = checked_packing(bits, group_size, shape.head_dim)
    options: dict[str, Any] = {"reserve": reserve}
    if packing is not None:
        options |= packing._asdict()

    def layer(own: int | None) -> KvCache:
        if own is not None:
            return RotatingKvCache(own, **options)
        if window is not None:
            return RotatingKvCache(window, keep, **options)
        if packing is not None:
            return QuantizedKvCache(**options)
        return TinyKvFullCache(reserve)

    return [layer(own) for own in shape.windows]


def _paged(
    shape: KvShape,
    dtype: mx.Dtype,
    *,
    pool: PagePool | None = None,
    tokens: int | None = None,
    memory: int | None = None,
    page_size: int | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    max_append: int | None = None,
    reserve: int = 0,
) -> list[KvCache]:
    """Pages of a pool that others share, or of a pool of its own of so many tokens."""
    own = {"tokens": tokens, "memory": memory, "page_size": page_size}
    own |= {"bits": bits, "group_size": group_size, "max_append": max_append}
    pool = _pool_of("paged", pool, shape, dtype, own, 1)
    return list(paged_cache(PageTable(pool, reserve)))


def _batching(
    shape: KvShape,
    dtype: mx.Dtype,
    *,
    slots: int | None = None,
    pool: PagePool | None = None,
    tokens: int | None = None,
    memory: int | None = None,
    page_size: int | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    max_append: int | None = None,
) -> list[KvCache]:
    """Slots for requests side by side; the pages as for "paged"."""
    if slots is None:
        raise ParameterError("a batching cache needs slots=, requests side by side")
    slots = whole_number("slots", slots, least=1)
    own = {"tokens": tokens, "memory": memory, "page_size": page_size}
    own |= {"bits": bits, "group_size": group_size, "max_append": max_append}
    pool = _pool_of("batching", pool, shape, dtype, own, slots)
    return [cast(KvCache, entry) for entry in batching_cache(pool, slots)]


def _pool_of(
    kind: str,
    pool: PagePool | None,
    shape: KvShape,
    dtype: mx.Dtype,
    own: dict[str, int | None],
    requests: int,
) -> PagePool:
    """The pool given, or one of its own with those options for so many requests."""
    given: dict[str, Any] = {k: v for k, v in own.items() if v is not None}
    if pool is None:
        if "tokens" not in given and "memory" not in given:
            raise ParameterError(
                f"a {kind} cache needs pool=, or the size of its own: tokens= or "
                f"memory="
            )
        return PagePool(shape, dtype, max_requests=requests, **given)
    for name in given:
        raise ParameterError(f"{name}= is the pool's own; leave it out")
    if not isinstance(pool, PagePool):
        raise ParameterError(f"pool is {pool!r}; a PagePool is needed")
    if (pool.shape, pool.dtype) != (shape, dtype):
        raise ParameterError(
            f"the pool is for {pool.shape} in {pool.dtype}, the model has {shape} "
            f"in {dtype}: use model.create_page_pool()"
        )
    return pool


_KINDS: dict[str, Callable[..., list[KvCache]]] = {
    "dense": _dense,
    "quantized": _quantized,
    "rotating": _rotating,
    "paged": _paged,
    "batching": _batching,
}
