"""From a kind and its options to one cache entry per layer."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import mlx.core as mx

from ..errors import ParameterError
from ..memory import PAGE_SIZE, KvShape, check_packing, fitting_group_size
from .base import KvCache
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
    if kind not in _KINDS:
        names = ", ".join(map(repr, _KINDS))
        raise ParameterError(f"unknown cache kind {kind!r}; there are {names}")
    build = _KINDS[kind]
    known = list(signature(build).parameters)[2:]
    for name in options:
        if name not in known:
            raise ParameterError(
                f"a {kind} cache has no option {name!r}; it has {', '.join(known)}"
            )
    return build(shape, dtype, **options)


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
    if group_size is None:
        group_size = fitting_group_size(shape.head_dim)
    check_packing(bits, group_size, shape.head_dim)
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
    full = shape.windows.count(None)
    sliding = len(shape.windows) - full
    kinds = f"{full} full-attention and {sliding} sliding-window layers"
    if window is None and keep:
        raise ParameterError(f"keep is {keep}, but without window= nothing is bounded")
    if window is None and not sliding:
        raise ParameterError(
            f"a rotating cache needs a window, but the model has {kinds}: give window="
        )
    if window is not None and not full:
        raise ParameterError(
            f"window= bounds full-attention layers, but the model has {kinds}, which "
            f"keep their own: leave it out"
        )
    if group_size is None:
        group_size = fitting_group_size(shape.head_dim)
    if bits is not None:
        check_packing(bits, group_size, shape.head_dim)

    def layer(own: int | None) -> KvCache:
        packing: dict[str, Any] = {"bits": bits, "group_size": group_size}
        if own is not None:
            return RotatingKvCache(own, reserve=reserve, **packing)
        if window is not None:
            return RotatingKvCache(window, keep, reserve=reserve, **packing)
        if bits is not None:
            return QuantizedKvCache(bits, group_size, reserve)
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
    if pool is None:
        if tokens is None and memory is None:
            raise ParameterError(
                "a paged cache needs pool=, or the size of its own: tokens= or memory="
            )
        pool = PagePool(
            shape,
            dtype,
            tokens=tokens,
            memory=memory,
            page_size=PAGE_SIZE if page_size is None else page_size,
            bits=bits,
            group_size=group_size,
            max_requests=1,
            max_append=2048 if max_append is None else max_append,
        )
    else:
        own = {"tokens": tokens, "memory": memory, "page_size": page_size}
        own |= {"bits": bits, "group_size": group_size, "max_append": max_append}
        given = [name for name, value in own.items() if value is not None]
        if given:
            raise ParameterError(f"{given[0]}= is the pool's own; leave it out")
        if not isinstance(pool, PagePool):
            raise ParameterError(f"pool is {pool!r}; a PagePool is needed")
        if (pool.shape, pool.dtype) != (shape, dtype):
            raise ParameterError(
                f"the pool is for {pool.shape} in {pool.dtype}, the model has {shape} "
                f"in {dtype}: use model.create_page_pool()"
            )
    return list(paged_cache(PageTable(pool, reserve)))


_KINDS: dict[str, Callable[..., list[KvCache]]] = {
    "dense": _dense,
    "quantized": _quantized,
    "rotating": _rotating,
    "paged": _paged,
}
