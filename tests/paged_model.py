"""What paged requests must hold and compute: lists of rows, one after the other."""

from dataclasses import dataclass, field
from itertools import count

import mlx.core as mx
import numpy as np

from tiny_llm.cache import PageTable
from tiny_llm.cache import table as table_module
from tiny_llm.cache.paged import paged_cache

HEADS, KV_HEADS = 4, 2


def naive_attention(q, k, v, scale, window=None):
    """q [H, L, D], k and v [Hkv, S, D] -> [H, L, D]: key by key, in float64."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    group, past = q.shape[0] // k.shape[0], k.shape[1] - q.shape[1]
    out = np.zeros_like(q)
    for head in range(q.shape[0]):
        for i in range(q.shape[1]):
            last = past + i + 1
            seen = slice(0 if window is None else max(0, last - window), last)
            scores = k[head // group, seen] @ q[head, i] * scale
            weights = np.exp(scores - scores.max())
            out[head, i] = weights @ v[head // group, seen] / weights.sum()
    return out


class Rows:
    """Makes rows that tell where they belong: no two tokens of a test are alike."""

    def __init__(self, dim):
        self.dim, self.serial = dim, count(1)

    def make(self, position, n, layers):
        """K and V of n tokens: [layers, 2, Hkv, n, D]."""
        serial = next(self.serial)
        shape = (layers, 2, KV_HEADS, n, self.dim)
        rows = np.random.default_rng(serial).standard_normal(shape)
        rows[..., 0] = np.arange(position, position + n) / 128
        rows[..., 1] = serial / 128
        return rows.astype(np.float32)


@dataclass(eq=False)
class Request:
    """A request's cache beside what it must hold: rows [2, Hkv, S, D] per layer."""

    cache: list
    stored: list
    settled: int = 0  # rewinding down to here must be exact
    appended: int = 1  # how many tokens came last
    waiting: list = field(default_factory=list)  # rows that some layers lack still

    @classmethod
    def empty(cls, pool, dim, reserve=0):
        cache = paged_cache(PageTable(pool, reserve))
        nothing = np.zeros((2, KV_HEADS, 0, dim), dtype=np.float32)
        return cls(cache, [nothing] * len(cache))

    @property
    def table(self):
        return self.cache[0].table

    @property
    def lengths(self):
        return [rows.shape[2] for rows in self.stored]

    @property
    def even(self):
        return len(set(self.lengths)) == 1

    def add(self, layer, rows):
        self.stored[layer] = np.concatenate([self.stored[layer], rows], axis=2)

    def cut(self, layer, length):
        self.stored[layer] = self.stored[layer][:, :, :length]

    def check_contents(self):
        """Every row of every layer, bit by bit."""
        for layer, (entry, rows) in enumerate(
            zip(self.cache, self.stored, strict=True)
        ):
            assert entry.offset == rows.shape[2]
            held = entry.held()
            assert held.offset == entry.offset
            if entry.offset == 0:
                continue
            decode = entry.pool.format.decode
            found = [np.array(decode(part))[0] for part in (held.keys, held.values)]
            first = entry.offset - found[0].shape[1]
            window = entry.window
            seen = 0 if window is None else max(0, entry.offset - window + 1)
            assert 0 <= first <= seen
            expected = rows[:, :, first:]
            assert np.array_equal(np.stack(found), expected), f"layer {layer}"


def pages_of_its_own(request, requests):
    """(group, place, page) of each page that no other request holds."""
    return {
        (group, place, page)
        for group, pages in enumerate(request.table.pages)
        for place, page in enumerate(pages, request.table.dropped[group])
        if not any(
            page in other.table.pages[group] for other in requests if other != request
        )
    }


def short_of_pages(request, requests, start, stop):
    """Whether some group lacks pages for the tokens start .. stop of a request.

    Counted from who holds what, not from the pool's books.
    """
    table, pool = request.table, request.table.pool
    size = pool.page_size
    for group, window in enumerate(pool.windows):
        own, dropped = table.pages[group], table.dropped[group]
        others = {
            page
            for other in requests
            if other.table is not table
            for page in other.table.pages[group]
        }
        last = stop if own or window is not None else max(stop, table.reserve)
        kept = own
        if window is not None:
            behind = (
                min(table.lengths) - window + 1 - table_module.SLACK
            ) // size - dropped
            kept = own[max(behind, 0) :]
        new = max(0, -(-last // size) - dropped - len(own))
        shared = sum(page in others for page in own[start // size - dropped :])
        free = pool.allocators[group].count - len(others | set(kept))
        if new + shared > free:
            return True
    return False


def poison(pool, requests):
    """NaN into every slot that holds no token of anybody."""
    for layer, group in enumerate(pool.group_of):
        used = np.zeros(pool.allocators[group].count * pool.page_size, dtype=bool)
        for request in requests:
            table, size = request.table, pool.page_size
            tokens = np.arange(table.dropped[group] * size, table.lengths[layer])
            pages = np.array(table.pages[group], dtype=np.int64)
            used[
                pages[tokens // size - table.dropped[group]] * size + tokens % size
            ] = True
        mask = mx.array(used)[None, :, None]
        pool.rows[layer] = tuple(
            mx.where(
                mask,
                array,
                mx.array(0xFFFFFFFF if array.dtype == mx.uint32 else np.nan).astype(
                    array.dtype
                ),
            )
            for array in pool.rows[layer]
        )
    mx.eval(pool.rows)
