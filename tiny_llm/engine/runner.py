"""One step on the device: rows of many requests in, a token for each that samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import mlx.core as mx

from ..cache import Append, KvCache, PagePool, StepPlan
from ..cache.batching import batching_cache
from ..models import Decoder
from .compiled import CompiledDecode
from .row_sampler import Sampled, sample
from .scheduler import Segment


class Launched(NamedTuple):
    """A step under way.

    segments: in the order of the rows; place: request number -> its place among those
    that sample; sampled: None if nobody does. fence: computed after the last keys.
    pages: the pool's arrays, which the next step will write to in their turn.
    """

    segments: list[Segment]
    place: dict[int, int]
    sampled: Sampled | None
    plan: StepPlan
    fence: mx.array
    pages: list[mx.array]

    def outputs(self) -> list[mx.array]:
        """What has been computed when the step is over, whatever was begun since."""
        if self.sampled is None:
            return [self.fence]
        tokens, tops, logprobs, _ = self.sampled
        return [tokens, tops, self.fence, *([] if logprobs is None else [logprobs])]

    def arrays(self) -> list[mx.array]:
        """Everything that the step computes, to be started."""
        return [*self.outputs(), *self.pages]


class Runner:
    """Runs the model over the rows of a step. The pages are there, nothing else is."""

    def __init__(
        self, model: Decoder, pool: PagePool, views: bool | None, compiles: bool
    ) -> None:
        """views: as Batch has it. compiles: decoding steps are compiled functions."""
        self.model, self.pool = model, pool
        self.cache = batching_cache(pool, 0, views)
        self.batch = self.cache[0].batch
        self.compiled = CompiledDecode(model, self.cache) if compiles else None

    def launch(self, segments: Sequence[Segment], before: Launched | None) -> Launched:
        """Build a step; nothing has been computed when it returns.

        before: the step before, if its tokens were not read yet. Whatever is raised,
        the tables hold what they held.
        """
        tables = [
            Append(segment.request.table, segment.start, segment.count)
            for segment in segments
        ]
        plan = self.batch.plan_step(tables)
        try:
            return self._launch(plan, segments, before)
        except BaseException:
            plan.undo()
            raise

    def _launch(
        self, plan: StepPlan, segments: Sequence[Segment], before: Launched | None
    ) -> Launched:
        segments = [segments[place] for place in plan.order]
        ids, positions = self._rows(segments, before)
        sampling = [i for i, segment in enumerate(segments) if segment.samples]
        logits = self._logits(ids, positions, plan, segments, sampling)
        sampled, place = None, {}
        if logits is not None:
            requests = [segments[i].request for i in sampling]
            places = [segments[i].place for i in sampling]
            sampled = sample(logits, requests, places)
            place = {request.number: i for i, request in enumerate(requests)}
        plan.commit()
        pages = [array for rows in self.pool.rows for array in rows]
        fence = pages[-1][:1, :1, :1] + 0
        return Launched(segments, place, sampled, plan, fence, pages)

    def _logits(
        self,
        ids: mx.array,
        positions: mx.array,
        plan: StepPlan,
        segments: Sequence[Segment],
        sampling: Sequence[int],
    ) -> mx.array | None:
        """Run the model over the rows; logits [M, V] of the segments that sample."""
        if self.compiled is not None and len(sampling) == plan.rows:
            logits = self.compiled(ids, positions, plan)
            if logits is not None:
                return logits
        rows = None
        if sampling and len(sampling) < plan.rows:
            ends = list(accumulate(segment.count for segment in segments))
            rows = mx.array([ends[i] - 1 for i in sampling])
        self.batch.plan = plan
        try:
            out = self.model(
                ids[:, None],
                offset=positions,
                cache=cast(list[KvCache], self.cache),
                logits_to_keep=1 if sampling else 0,
                rows_to_keep=rows,
            )
        finally:
            self.batch.plan = None
        return out[:, -1] if sampling else None

    def _rows(
        self, segments: Sequence[Segment], before: Launched | None
    ) -> tuple[mx.array, mx.array]:
        """Token ids and positions of all rows, int32 [N]."""
        ids: list[int] = []  # (in Python: NumPy costs a decoding step more)
        positions: list[int] = []
        unread: list[int] = []  # rows whose token the step before chooses
        places: list[int] = []
        for request, start, n, _ in segments:
            known = request.tokens(start, start + n)
            ids.extend(known)
            positions.extend(range(start, start + n))
            if len(known) < n:
                assert before is not None
                unread.append(len(ids))
                places.append(before.place[request.number])
                ids.append(0)
        rows = mx.array(ids, dtype=mx.int32)
        if unread:
            assert before is not None
            assert before.sampled is not None
            rows[mx.array(unread)] = before.sampled.tokens[mx.array(places)]
        return rows, mx.array(positions, dtype=mx.int32)
