"""Saved caches: a prompt's keys and values in a file, to go on from in another process.

The file is a safetensors file (see tensor_file.py) with the tensors

    layers.N.keys, layers.N.values     [1, Hkv, tokens held, D], the newest last; packed
                                       words where the cache packs them, then also
    ....keys.scales, ....keys.biases   (and the values'), one per group
    token_ids                          int32 [tokens]

and the metadata `format`, `version`, and as JSON `cache` (kind, options, dtype,
tokens), `model` (see models/identity.py) and `notes`. No unused slot is in it; of a
layer with a window only the tokens it sees, and 64 more, so that rewinding as many
stays exact.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .cache import Held, KvCache, Layout, PagedKvCache, PagePool
from .cache_facts import (
    CacheFacts,
    check_kind,
    check_model,
    make_metadata,
    read_facts,
)
from .errors import CacheFileError, CorruptFileError, ParameterError, whole_number
from .memory import SLACK, STEP
from .models import Decoder
from .tensor_file import TensorFile, TensorSpec, dtype_name, write_tensors

_PARTS = ("", ".scales", ".biases")


class SavedCache(NamedTuple):
    """A loaded cache: one entry per layer, the ids it holds, and the saver's notes."""

    cache: list[KvCache]
    token_ids: list[int]
    notes: dict[str, str]


def save_kv_cache(
    path: str | os.PathLike[str],
    model: Decoder,
    cache: Sequence[KvCache],
    token_ids: Sequence[int] | mx.array,
    *,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Save the cache of one sequence, of any kind, to go on from with load_kv_cache.

    token_ids: the ids of the tokens that the cache holds, all of them: after
    stream_generate those of the prompt and those yielded. notes: any texts, given back
    when it is loaded. An existing file is replaced: at every moment the path leads to a
    whole file (see write_tensors). The cache stays as it is.

    Raises ParameterError for what does not belong together (ids, cache, model), and
    CacheFileError if the file cannot be written.
    """
    ids = _checked_ids(token_ids, model.config.vocab_size)
    tokens = _common_length(model, cache)
    if len(ids) != tokens:
        raise ParameterError(
            f"{len(ids)} token ids for a cache of {tokens} tokens: all that it holds "
            f"are needed"
        )
    layouts = [entry.layout for entry in cache]
    kind, options = _kind_of(layouts, model.config.windows)
    made = _create(model, kind, options, tokens=1)
    if layouts != [entry.layout for entry in made]:
        raise ParameterError(
            "the layers of the cache are of kinds that model.create_kv_cache() does "
            "not put together, so it could not be loaded"
        )
    arrays: dict[str, mx.array] = {}
    for index, (entry, layout) in enumerate(zip(cache, layouts, strict=True)):
        held = _trimmed(entry.held(), layout)
        for name, rows in (("keys", held.keys), ("values", held.values)):
            for part, array in zip(_PARTS, rows, strict=False):
                arrays[f"layers.{index}.{name}{part}"] = array
    arrays["token_ids"] = mx.array(ids, dtype=mx.int32)
    specs = {n: TensorSpec(dtype_name(a.dtype), a.shape) for n, a in arrays.items()}
    wrong = _misfit(specs, model, layouts, tokens)
    if wrong:
        raise ParameterError(f"the cache is not one of this model's: {wrong}")
    metadata = make_metadata(model, kind, options, tokens, notes or {})
    write_tensors(path, metadata, arrays)


def load_kv_cache(
    path: str | os.PathLike[str],
    model: Decoder,
    *,
    kind: str | None = None,
    pool: PagePool | None = None,
    reserve: int | None = None,
) -> SavedCache:
    """Load what save_kv_cache saved, of the same model: it goes on exactly as it was.

    kind: refuse a file of any other kind. pool: for a paged cache, the pool to take
    pages of; without one it gets a pool of its own. reserve: new tokens to make room
    for (at most to the end of the context); None: 256, and none in a pool given.

    Raises CacheFileError for a file of another model, kind, dtype or version,
    CorruptFileError for one that is missing, damaged or something else (a checksum
    covers every byte), OutOfPagesError if the pool has no room: then it is as before.
    """
    with TensorFile(path) as file:
        facts = read_facts(file)
        check_model(file, facts, model)
        check_kind(file, facts, "paged" if pool is not None else None)
        check_kind(file, facts, kind)
        if reserve is None:
            reserve = STEP if pool is None else 0
        room = facts.tokens + whole_number("reserve", reserve, least=0)
        cache = _matching_cache(file, facts, model, pool, room)
        file.check_data()
        ids: list[int] = file.read("token_ids").tolist()  # type: ignore[assignment]
        if not all(0 <= i < model.config.vocab_size for i in ids):
            raise CorruptFileError(
                f"{file.path} has token ids that are not in the vocabulary of "
                f"{model.config.vocab_size}"
            )
        try:
            for index, entry in enumerate(cache):
                entry.restore(_read_layer(file, index, facts), model.config.head_dim)
                mx.eval(entry.state)  # or what was read would stay in memory too
        except BaseException:
            if isinstance(cache[0], PagedKvCache):
                cache[0].table.free()
            raise
    return SavedCache(cache, ids, facts.notes)


def inspect(path: str | os.PathLike[str]) -> CacheFacts:
    """What a saved cache is, from its header alone. Raises as load_kv_cache."""
    with TensorFile(path) as file:
        return read_facts(file)


def _matching_cache(
    file: TensorFile,
    facts: CacheFacts,
    model: Decoder,
    pool: PagePool | None,
    room: int,
) -> list[KvCache]:
    """An empty cache that the tensors of the file fit into. Raises as load_kv_cache."""
    room = min(room, model.config.context_length + 1)
    try:
        cache = _create(model, facts.kind, facts.options, tokens=room, pool=pool)
    except ParameterError as error:
        if pool is not None:
            raise
        raise CorruptFileError(f"{file.path} cannot be used: {error}") from error
    layouts = [entry.layout for entry in cache]
    made = _kind_of(layouts, model.config.windows)
    if made != (facts.kind, facts.options):
        raise CacheFileError(
            f"{file.path} holds a {facts.kind} cache with {facts.options}, which does "
            f"not fit into a pool of pages with {made[1]}"
        )
    wrong = _misfit(file.specs, model, layouts, facts.tokens)
    if wrong:
        raise CorruptFileError(f"{file.path} contradicts itself: {wrong}")
    return cache


def _kind_of(
    layouts: Sequence[Layout], windows: Sequence[int | None]
) -> tuple[str, dict[str, int]]:
    """The kind, and the options with which create_kv_cache makes such layers."""
    kinds = [layout.kind for layout in layouts]
    kind = "rotating" if "rotating" in kinds else kinds[0]
    first = layouts[kinds.index(kind)]
    options = {
        "bits": first.bits,
        "group_size": first.group_size,
        "page_size": first.page_size,
    }
    for own, layout in zip(windows, layouts, strict=True):
        if own is None and layout.kind == "rotating":
            options |= {"window": layout.window, "keep": layout.keep}
    return kind, {name: n for name, n in options.items() if n is not None}


def _create(
    model: Decoder,
    kind: str,
    options: Mapping[str, int],
    *,
    tokens: int,
    pool: PagePool | None = None,
) -> list[KvCache]:
    """An empty cache with room for so many tokens. Raises ParameterError."""
    longest = model.config.context_length
    if options.get("page_size", 0) > longest:  # one page might not fit into memory
        raise ParameterError(
            f"pages of {options['page_size']} tokens are not saved for a context of "
            f"{longest} tokens"
        )
    if pool is not None:
        return model.create_kv_cache(kind, pool=pool, reserve=tokens)
    if kind == "paged":
        return model.create_kv_cache(kind, tokens=tokens, **options)
    return model.create_kv_cache(kind, reserve=tokens, **options)


def _trimmed(held: Held, layout: Layout) -> Held:
    """Without the tokens that a window has passed long ago."""
    if layout.window is None:
        return held
    rows = held.keys[0].shape[2]
    first = min(layout.keep, rows)
    surplus = max(0, rows - first - (layout.window - 1 + SLACK))
    surplus -= surplus % (layout.page_size or 1)  # whole pages
    if not surplus:
        return held

    def cut(array: mx.array) -> mx.array:
        newest = array[:, :, first + surplus :]
        return mx.concatenate([array[:, :, :first], newest], axis=2)

    keys, values = (tuple(map(cut, part)) for part in (held.keys, held.values))
    return Held(keys, values, held.offset)


def _misfit(
    specs: Mapping[str, TensorSpec],
    model: Decoder,
    layouts: Sequence[Layout],
    tokens: int,
) -> str | None:
    """What is wrong with the tensors of a cache of so many tokens; None: nothing."""
    dtype = dtype_name(model.kv_dtype())
    expected = {"token_ids": TensorSpec("I32", (tokens,))}
    pages: dict[int | None, int] = {}  # held rows of the layers that share pages
    for index, layout in enumerate(layouts):
        keys = specs.get(f"layers.{index}.keys")
        if keys is None or len(keys.shape) != 4:
            return f"layer {index} has no keys [1, Hkv, tokens, D]"
        rows = keys.shape[2]
        if layout.page_size is not None:
            aligned = (tokens - rows) % layout.page_size == 0
            if not aligned or pages.setdefault(layout.window, rows) != rows:
                return f"layer {index} holds {rows} tokens, which are not whole pages"
        least = tokens
        if layout.window is not None:
            least = min(tokens, layout.keep + layout.window - 1)
        if not least <= rows <= tokens:
            return f"layer {index} holds {rows} of {tokens} tokens, {least} are needed"
        for part, kind, width in _parts(layout, model.config.head_dim, dtype):
            spec = TensorSpec(kind, (1, model.config.kv_heads, rows, width))
            expected[f"layers.{index}.keys{part}"] = spec
            expected[f"layers.{index}.values{part}"] = spec
    for name in sorted({*expected, *specs}):
        if specs.get(name) != expected.get(name):
            return (
                f"{name} is {_said(specs.get(name))}, not {_said(expected.get(name))}"
            )
    return None


def _parts(layout: Layout, dim: int, dtype: str) -> Iterator[tuple[str, str, int]]:
    """(name, dtype, numbers) of the arrays of a row."""
    if layout.bits is None or layout.group_size is None:
        yield _PARTS[0], dtype, dim
        return
    yield _PARTS[0], "U32", dim * layout.bits // 32
    for name in _PARTS[1:]:
        yield name, dtype, dim // layout.group_size


def _said(spec: TensorSpec | None) -> str:
    return "missing" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _read_layer(file: TensorFile, index: int, facts: CacheFacts) -> Held:
    def rows(name: str) -> tuple[mx.array, ...]:
        names = [f"layers.{index}.{name}{part}" for part in _PARTS]
        return tuple(file.read(name) for name in names if name in file.specs)

    return Held(rows("keys"), rows("values"), facts.tokens)


def _common_length(model: Decoder, cache: Sequence[KvCache]) -> int:
    """Tokens in every layer of the cache. Raises ParameterError."""
    layers = model.config.layers
    if len(cache) != layers or not all(hasattr(entry, "held") for entry in cache):
        raise ParameterError(
            f"the cache has {len(cache)} entries, but the model {layers} layers: save "
            f"what model.create_kv_cache() made"
        )
    if any(isinstance(entry.offset, mx.array) for entry in cache):
        raise ParameterError(
            "a batch is saved request by request: [entry.request(slot) for entry in "
            "cache]"
        )
    lengths = {entry.offset for entry in cache}
    if len(lengths) != 1:
        raise ParameterError(f"the layers hold {sorted(lengths)} tokens; rewind them")
    (length,) = lengths
    if length == 0:
        raise ParameterError("the cache is empty: there is nothing to save")
    return length


def _checked_ids(token_ids: Sequence[int] | mx.array, vocabulary: int) -> list[int]:
    with suppress(TypeError, ValueError, OverflowError):
        ids = np.array(token_ids)
        whole = np.issubdtype(ids.dtype, np.integer) and ids.ndim == 1
        if whole and ids.size and ids.min() >= 0 and ids.max() < vocabulary:
            return [int(i) for i in ids]
    raise ParameterError(
        f"token_ids is {token_ids!r:.60}; a list of ids in the vocabulary of "
        f"{vocabulary} is needed"
    )
