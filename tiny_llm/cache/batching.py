"""The cache of a running batch: requests of any length side by side, none padded."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..errors import OutOfPagesError, ParameterError, whole_number
from ..kernels import causal_mask, check_attention, reads_pages
from .base import Held, KvCache, Layout, Mask, check_pair
from .page_index import Append, Tables
from .paged import PagedKvCache
from .pool import PagePool
from .rows import attend_rows
from .step_plan import StepPlan
from .table import PageTable


class Batch:
    """What the layers of a batching cache share: slots, and the plan of a step.

    tables: of the request in each slot, or None for an idle one. plan: of the rows that
    the model is called with; None where the rows are those of the slots.
    """

    def __init__(self, pool: PagePool, slots: int, views: bool | None = None) -> None:
        """views: read pages where they lie, or by their index, as kernels do (None: as
        kernels.reads_pages says)."""
        self.pool = pool
        self.tables: list[PageTable | None] = [None] * slots
        self.plan: StepPlan | None = None
        self.views = not reads_pages() if views is None else views
        self._cleared: weakref.WeakKeyDictionary[PageTable, list[object]]
        self._cleared = weakref.WeakKeyDictionary()
        self._tables: Tables = {}
        self._by_hand: StepPlan | None = None
        self._asked: set[int] = set()  # layers that asked for that plan
        self._left: set[int] = set()  # layers that did not run it yet

    def plan_step(self, appends: Sequence[Append]) -> StepPlan:
        """The plan of a step; put it into `plan`, and its rows into the model."""
        return self._plan(appends)

    def _plan(self, appends: Sequence[Append], keep_order: bool = False) -> StepPlan:
        return StepPlan(
            self.pool,
            appends,
            self._cleared,
            views=self.views,
            keep_order=keep_order,
            tables=self._tables,
        )

    def plan_slots(self, layer: int, count: int) -> StepPlan:
        """The plan of `count` rows for every slot, idle ones left out.

        Made when the first layer asks; each that ran it is to say so (`ran`). Raises
        OutOfPagesError or ParameterError, nothing changed.
        """
        if self._by_hand is None or layer in self._asked:
            if self._left:  # they may have cleared nothing
                self._cleared.clear()
            tables = [table for table in self.tables if table is not None]
            for table in tables:
                if len(set(table.lengths)) > 1:
                    raise ParameterError(
                        "a step was cut off: its layers hold different numbers of "
                        "tokens; rewind the requests, or remove them"
                    )
            appends = [Append(table, table.length, count) for table in tables]
            try:
                for table, start, _ in appends:
                    table.prepare(start, start + count)
            except OutOfPagesError:
                for table in tables:
                    table.rewind(0, 0)  # what it took already
                raise
            self._by_hand = self._plan(appends, keep_order=True)
            self._asked, self._left = set(), set(range(len(self.pool.group_of)))
        if any(rows != count for _, _, rows in self._by_hand.appends):
            raise ParameterError(
                f"layer {layer} is given {count} tokens a slot, but the layers before "
                f"it were given another number"
            )
        self._asked.add(layer)
        return self._by_hand

    def ran(self, layer: int) -> None:
        """A layer has done what plan_slots planned."""
        self._left.discard(layer)


class BatchingKvCache:
    """One layer of a batch over the pages of a pool.

    By hand: `add_request(prefilled, slot)` on every layer, then
    `model(tokens [B, 1], offset=[...], cache=batched)` with a row for each slot; those
    of idle slots count for nothing. The engine sets `batch.plan` instead: any mix of
    requests with one row and with several, as [N, 1] rows. All new keys are written
    first, then every request attends over its own pages.
    """

    def __init__(self, batch: Batch, layer: int) -> None:
        self.batch, self.layer, self.pool = batch, layer, batch.pool
        self.group = self.pool.group_of[layer]
        self.window = self.pool.windows[self.group]

    @property
    def offset(self) -> mx.array:
        """Tokens of each slot, int32 [B]; 0 for an idle one. Never changes later."""
        lengths = [t.lengths[self.layer] if t else 0 for t in self.batch.tables]
        return mx.array(lengths, dtype=mx.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that the slots' requests hold in this layer, each once."""
        held = {p for t in self.batch.tables if t for p in t.pages[self.group]}
        return self.pool.page_bytes * len(held)

    @property
    def state(self) -> list[mx.array]:
        """The pool's arrays of this layer, for mx.eval."""
        return list(self.pool.rows[self.layer])

    @property
    def layout(self) -> Layout:
        """Batching, with the pool's settings."""
        bits = self.pool.format.bits
        group_size = None if bits is None else self.pool.format.group_size
        return Layout("batching", self.window, 0, bits, group_size, self.pool.page_size)

    def request(self, slot: int) -> PagedKvCache:
        """This layer of the request in a slot, as a cache of its own.

        Raises ParameterError for an idle slot.
        """
        table = self.batch.tables[self._slot(slot)]
        if table is None:
            raise ParameterError(f"slot {slot} is idle")
        return PagedKvCache(table, self.layer)

    def add_request(self, prefilled: KvCache, slot: int) -> None:
        """Take over this layer of a request that was computed elsewhere.

        A paged cache of the same pool is taken as it is, and must not be used further;
        of other kinds the tokens are copied. Raises ParameterError for a slot in use,
        and for what does not fit; OutOfPagesError. Nothing has changed then.
        """
        slot = self._slot(slot)
        table = self.batch.tables[slot]
        if isinstance(prefilled, PagedKvCache) and prefilled.pool is self.pool:
            if table not in (None, prefilled.table):
                raise ParameterError(f"slot {slot} is in use: remove its request first")
            if prefilled.layer != self.layer:
                raise ParameterError(
                    f"layer {prefilled.layer} of a request for layer {self.layer}"
                )
            if table is None and prefilled.table in self.batch.tables:
                other = self.batch.tables.index(prefilled.table)
                raise ParameterError(
                    f"the request is in slot {other} already: fork it to have it twice"
                )
            self.batch.tables[slot] = prefilled.table
            return
        if table is not None and table.lengths[self.layer]:
            raise ParameterError(f"slot {slot} is in use: remove its request first")
        held = prefilled.held()
        self._check_held(prefilled.layout, held)
        table = PageTable(self.pool) if table is None else table
        dim = self.pool.shape.head_dim
        PagedKvCache(table, self.layer).restore(held, dim)
        if self.window is not None:  # a page begins with tokens that it lacks
            first = table.dropped[self.group] * self.pool.page_size
            start = held.offset - held.keys[0].shape[2]
            self.pool.clear(self.layer, table.slots(self.group, first, start))
        self.batch.tables[slot] = table

    def remove_request(self, slot: int) -> None:
        """Make a slot idle; its pages are free when the last layer's is removed.

        Raises ParameterError for a slot that there is not.
        """
        slot = self._slot(slot)
        table = self.batch.tables[slot]
        if table is not None:
            table.free()
            self.batch.tables[slot] = None

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Append every row's key and value, then attend; as the other layouts' attend.

        q: [B, H, S, D]; k, v: [B, Hkv, S, D], B slots with S new tokens each; or with a
        plan [N, H, 1, D] and [N, Hkv, 1, D], its N rows. Raises ParameterError or
        OutOfPagesError (by hand), nothing changed.
        """
        check_attention(q.shape[1], window, softcap, sinks)
        if self.window is not None and window != self.window:
            raise ParameterError(
                f"the layer sees a window of {window}, but its pages are kept for "
                f"{self.window} tokens"
            )
        attend: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
        plan = self.batch.plan
        if plan is not None:
            self._check(k, v, q, plan.rows, 1)
            return attend_rows(self.pool, self.layer, plan, q, k, v, window, attend)
        return self._by_hand(q, k, v, window, attend)

    def update_and_fetch(
        self,
        key: mx.array,
        value: mx.array,
        mask_length: int | None = None,
        mask: Mask = None,
    ) -> tuple[mx.array, mx.array, int, Mask]:
        """Append S tokens to each slot; return (keys, values, length, mask).

        keys, values: [B, Hkv, n, D], a copy, each slot's tokens at the end and zeros
        before; mask: bool [B, 1, S, n], what each new token sees (an idle slot: all).
        Yours must be None or "causal": the slots' lengths differ.
        """
        if mask is not None and not (isinstance(mask, str) and mask == "causal"):
            raise ParameterError(
                "a batching cache makes its own mask: pass None or 'causal'"
            )
        self._check(key, value, None, len(self.batch.tables), key.shape[2])
        length = key.shape[2]
        self._by_hand(None, key, value, self.window, {})
        keys, values, masks = [], [], []
        tables = self.batch.tables
        seen = [self._fetch(table, length) for table in tables]
        longest = max([length, *(k.shape[1] for k, _ in seen if k is not None)])
        shape = (self.pool.shape.kv_heads, longest, self.pool.shape.head_dim)
        for own_keys, own_values in seen:
            if own_keys is None or own_values is None:
                keys.append(mx.zeros(shape, dtype=self.pool.dtype))
                values.append(keys[-1])
                masks.append(mx.full((length, longest), True))
                continue
            missing = longest - own_keys.shape[1]
            pad = [(0, 0), (missing, 0), (0, 0)]
            keys.append(mx.pad(own_keys, pad))
            values.append(mx.pad(own_values, pad))
            own_mask = causal_mask(length, own_keys.shape[1], self.window)
            masks.append(mx.pad(own_mask, [(0, 0), (missing, 0)]))
        return mx.stack(keys), mx.stack(values), longest, mx.stack(masks)[:, None]

    def check_rewind(self, n: int) -> None:
        """Raise ParameterError unless every request can forget its newest n tokens."""
        for table in self.batch.tables:
            if table is not None:
                table.check_rewind(self.layer, n)

    def rewind(self, n: int) -> None:
        """Every request forgets its newest n tokens; one alone: `request(slot)`."""
        self.check_rewind(n)
        for table in self.batch.tables:
            if table is not None:
                table.rewind(self.layer, n)

    def held(self) -> Held:
        """Refused: a batch is saved request by request."""
        raise ParameterError("a batch is saved request by request: request(slot)")

    def restore(self, held: Held, head_dim: int) -> None:
        """Refused, as `held`."""
        raise ParameterError("a batch is restored by add_request")

    def _slot(self, slot: int) -> int:
        slot = whole_number("slot", slot, least=0)
        if slot >= len(self.batch.tables):
            raise ParameterError(f"slot {slot} of {len(self.batch.tables)}")
        return slot

    def _check(
        self, k: mx.array, v: mx.array, q: mx.array | None, rows: int, length: int
    ) -> None:
        dims = (rows, self.pool.shape.kv_heads, self.pool.shape.head_dim)
        check_pair(k, v, (dims, dims), q, self.pool.dtype)
        if k.shape[2] != length:
            raise ParameterError(f"{k.shape[2]} tokens a row; {length} is needed")

    def _check_held(self, layout: Layout, held: Held) -> None:
        mine = self.layout
        if (layout.bits, layout.group_size) != (mine.bits, mine.group_size):
            raise ParameterError(
                f"the request is stored with bits={layout.bits}, group_size="
                f"{layout.group_size}, the pool with bits={mine.bits}, group_size="
                f"{mine.group_size}"
            )
        if held.offset == 0:
            raise ParameterError("the request holds no tokens: compute its prompt")
        heads, rows = self.pool.shape.kv_heads, self.pool.rows[self.layer]
        for part, own in zip([*held.keys, *held.values], [*rows, *rows], strict=True):
            batch, own_heads, _, width = part.shape
            wanted = (1, heads, own.shape[-1], own.dtype)
            if (batch, own_heads, width, part.dtype) != wanted:
                raise ParameterError(
                    f"the request holds {part.dtype} {list(part.shape)}; layer "
                    f"{self.layer} needs {own.dtype} [1, {heads}, tokens, "
                    f"{own.shape[-1]}]"
                )
        there = held.keys[0].shape[2]
        needed = held.offset
        if self.window is not None:
            needed = min(needed, self.window - 1)
        if there < needed or layout.keep:
            raise ParameterError(
                f"the request holds only {there} of {held.offset} tokens, but layer "
                f"{self.layer} needs {needed}"
            )

    def _by_hand(
        self,
        q: mx.array | None,
        k: mx.array,
        v: mx.array,
        window: int | None,
        attend: dict[str, Any],
    ) -> mx.array:
        """As attend, one row of several tokens for each slot. q None: only append."""
        slots = len(self.batch.tables)
        self._check(k, v, q, slots, k.shape[2])
        length = k.shape[2]
        active = [slot for slot in range(slots) if self.batch.tables[slot]]
        if not active:
            return mx.zeros((0,)) if q is None else mx.zeros_like(q)
        plan = self.batch.plan_slots(self.layer, length)
        index = None if len(active) == slots else mx.array(active)

        def rows(x: mx.array) -> mx.array:
            """[B, heads, S, D] -> the active slots' rows [N, heads, 1, D]."""
            x = x if index is None else x[index]
            if length == 1:
                return x
            return x.swapaxes(1, 2).reshape(-1, x.shape[1], 1, x.shape[3])

        asked = None if q is None else rows(q)
        out = attend_rows(
            self.pool, self.layer, plan, asked, rows(k), rows(v), window, attend
        )
        for append in plan.appends:
            append.table.lengths[self.layer] = append.start + append.rows
        self.batch.ran(self.layer)
        if q is None:
            return out
        if length > 1:
            out = out.reshape(len(active), length, *out.shape[1:2], -1).swapaxes(1, 2)
        if index is None:
            return out
        everyone = mx.zeros(q.shape, dtype=out.dtype)
        everyone[index] = out
        return everyone

    def _fetch(
        self, table: PageTable | None, length: int
    ) -> tuple[mx.array, mx.array] | tuple[None, None]:
        """What the newest `length` tokens of a slot see, [Hkv, n, D]."""
        if table is None:
            return None, None
        stop = table.lengths[self.layer]
        first = 0
        if self.window is not None:
            first = max(0, stop - length - self.window + 1)
        runs = table.slots(self.group, first, stop)
        read = [self.pool.read(self.layer, slots) for slots in runs]
        decode = self.pool.format.decode
        keys = mx.concatenate([decode(rows) for rows, _ in read], axis=2)
        values = mx.concatenate([decode(rows) for _, rows in read], axis=2)
        return keys[0], values[0]


def batching_cache(
    pool: PagePool, slots: int, views: bool | None = None
) -> list[BatchingKvCache]:
    """The entries of all layers over one pool, with so many slots, all idle."""
    batch = Batch(pool, slots, views)
    return [BatchingKvCache(batch, layer) for layer in range(len(pool.group_of))]
