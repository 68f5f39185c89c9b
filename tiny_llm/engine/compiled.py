"""Decoding steps as compiled functions: a recurring step is built once, not each time.

Building the graph of a step costs the host as long as some devices need to run it. A
step that only decodes looks the same as the one before, but for the tokens and for the
pages that are read: so it is traced once for each number of requests and width of the
page tables, and replayed (mx.compile). The pool's arrays go in and come out, and are
written in place as long as nobody else holds them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import cast

import mlx.core as mx

from ..cache import KvCache, StepPlan
from ..cache.batching import BatchingKvCache
from ..cache.page_index import PageIndex
from ..models import Decoder

# A shape is worth tracing (ten times the time of building) when it comes up so often.
_RECURRING = 8
_MOST = 32  # traces that are kept; each holds about 1 kB for each operation of a step

_Shape = tuple[tuple[int, ...], ...]
_Arrays = list[tuple[mx.array, ...]]
_Step = Callable[..., tuple[mx.array, _Arrays]]


class CompiledDecode:
    """Runs decoding steps of shapes that recur; the model's weights must not change."""

    def __init__(self, model: Decoder, cache: list[BatchingKvCache]) -> None:
        self.model, self.cache = model, cache
        self.batch, self.pool = cache[0].batch, cache[0].pool
        self._seen: Counter[_Shape] = Counter()
        self._steps: OrderedDict[_Shape, _Step] = OrderedDict()
        self._plan: StepPlan | None = None  # while a step is traced

    def __call__(
        self, ids: mx.array, positions: mx.array, plan: StepPlan
    ) -> mx.array | None:
        """The logits [N, V] of ids [N] at positions [N], or None.

        None, and nothing done: a step that does more than decode, or of a shape that
        has not recurred yet. The pool's arrays become those after the step.
        """
        if plan.views or plan.lone < plan.rows:
            return None
        indices = [group.pages for group in plan.groups]
        pages = [(index.slots, index.table, index.sequences) for index in indices]
        rows = self.pool.rows
        shape = tuple(x.shape for x in (ids, *(p[1] for p in pages)))
        step = self._step((*shape, *(own[0].shape for own in rows)))
        if step is None:
            return None
        self._plan = plan
        try:
            logits, after = step(ids, positions, pages, rows)
        finally:  # (tracing puts arrays without numbers there)
            self.pool.rows, self.batch.plan, self._plan = rows, None, None
        self.pool.rows = after
        return logits

    def _step(self, shape: _Shape) -> _Step | None:
        """The function for a shape, if it is worth one."""
        step = self._steps.get(shape)
        if step is not None:
            self._steps.move_to_end(shape)
            return step
        self._seen[shape] += 1
        if self._seen[shape] < _RECURRING:
            return None
        self._seen.clear()
        while len(self._steps) >= _MOST:
            self._steps.popitem(last=False)
        # (a function of its own each: what was traced goes with it)
        step = cast(_Step, mx.compile(lambda *arrays: self._trace(*arrays)))
        self._steps[shape] = step
        return step

    def _trace(
        self,
        ids: mx.array,
        positions: mx.array,
        pages: list[tuple[mx.array, mx.array, mx.array]],
        rows: _Arrays,
    ) -> tuple[mx.array, _Arrays]:
        assert self._plan is not None
        self.pool.rows = list(rows)
        indices = [PageIndex(self.pool, *arrays, most_rows=1) for arrays in pages]
        self.batch.plan = self._plan.with_pages(indices)
        cache = cast(list[KvCache], self.cache)
        logits = self.model(ids[:, None], offset=positions, cache=cache)
        return logits[:, 0], self.pool.rows
