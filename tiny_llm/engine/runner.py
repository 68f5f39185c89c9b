"""One step on the device: rows of many requests in, a token for each that samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import mlx.core as mx

from ..cache import Append, KvCache, PagePool, StepPlan
from ..cache.batching import batching_cache
from ..models import Decoder
from ..sampling.rows import Row, Sampled, reported, sample_rows
from .compiled import CompiledDecode
from .request import Request
from .scheduler import Segment


class PromptRows(NamedTuple):
    """Log-probabilities of tokens of prompts: (request, place in its prompt) of each,
    and arrays [P], [P, n], [P, n]."""

    places: list[tuple[Request, int]]
    own: mx.array
    top_ids: mx.array
    top_logprobs: mx.array


class Launched(NamedTuple):
    """A step under way.

    segments: in the order of the rows; place: request number -> place of the first of
    its rows among those that sample; sampled: None if nobody does. fence: computed
    after the last keys. pages: the pool's arrays, which the next step will write to in
    their turn.
    """

    segments: list[Segment]
    place: dict[int, int]
    sampled: Sampled | None
    prompts: PromptRows | None
    plan: StepPlan
    fence: mx.array
    pages: list[mx.array]

    def outputs(self) -> list[mx.array]:
        """What has been computed when the step is over, whatever was begun since."""
        sampled = [] if self.sampled is None else self.sampled.arrays()
        prompts = [] if self.prompts is None else list(self.prompts[1:])
        return [*sampled, *prompts, self.fence]

    def arrays(self) -> list[mx.array]:
        """Everything that the step computes, to be started."""
        return [*self.outputs(), *self.pages]


class Runner:
    """Runs the model over the rows of a step. The pages are there, nothing else is."""

    def __init__(
        self,
        model: Decoder,
        pool: PagePool,
        *,
        views: bool | None,
        compiles: bool,
        pipelined: bool,
    ) -> None:
        """views: as Batch has it. compiles: decoding steps are compiled functions.

        pipelined: steps are launched before the one before has been computed.
        """
        self.model, self.pool, self.pipelined = model, pool, pipelined
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
        sampling: list[int] = []  # rows of the step that sample
        place: dict[int, int] = {}
        prompts: dict[int, tuple[Request, int]] = {}  # row -> token that it tells about
        for segment, end in zip(
            segments, accumulate(segment.count for segment in segments), strict=True
        ):
            place[segment.request.number] = len(sampling)
            sampling += range(end - segment.sampled, end)
            for token in segment.prompt_logprobs:
                row = end - segment.count + token - 1 - segment.start
                prompts[row] = segment.request, token
        kept = sorted({*sampling, *prompts})
        logits = self._logits(ids, positions, plan, kept)
        sampled, told = None, None
        if logits is not None:
            at = {row: i for i, row in enumerate(kept)}
            if prompts:
                told = _prompt_rows(logits, [at[row] for row in prompts], prompts)
            if sampling:
                if any(segment.request.rules.matcher for segment in segments):
                    mx.async_eval(logits)  # and the masks are computed meanwhile
                rows = [row for segment in segments for row in _sampled_rows(segment)]
                some = mx.array([at[row] for row in sampling])
                sampled = sample_rows(
                    logits if len(sampling) == len(kept) else logits[some],
                    rows,
                    ids if len(sampling) == plan.rows else ids[mx.array(sampling)],
                    wait=not self.pipelined,
                )
        plan.commit()
        pages = [array for rows in self.pool.rows for array in rows]
        fence = pages[-1][:1, :1, :1] + 0
        return Launched(segments, place, sampled, told, plan, fence, pages)

    def _logits(
        self,
        ids: mx.array,
        positions: mx.array,
        plan: StepPlan,
        kept: Sequence[int],
    ) -> mx.array | None:
        """Run the model over the rows; logits [M, V] of those kept, if any are."""
        if self.compiled is not None and len(kept) == plan.rows:
            logits = self.compiled(ids, positions, plan)
            if logits is not None:
                return logits
        some = mx.array(list(kept)) if 0 < len(kept) < plan.rows else None
        self.batch.plan = plan
        try:
            out = self.model(
                ids[:, None],
                offset=positions,
                cache=cast(list[KvCache], self.cache),
                logits_to_keep=1 if kept else 0,
                rows_to_keep=some,
            )
        finally:
            self.batch.plan = None
        return out[:, -1] if kept else None

    def _rows(
        self, segments: Sequence[Segment], before: Launched | None
    ) -> tuple[mx.array, mx.array]:
        """Token ids and positions of all rows, int32 [N]."""
        ids: list[int] = []  # (in Python: NumPy costs a decoding step more)
        positions: list[int] = []
        unread: list[int] = []  # rows whose token the step before chooses
        places: list[int] = []
        for segment in segments:
            request, start, n = segment.request, segment.start, segment.count
            known = request.tokens(start, start + n - len(segment.drafts))
            known += segment.drafts
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


def _sampled_rows(segment: Segment) -> Iterator[Row]:
    """Those of a segment's rows that sample, as sampling sees them."""
    request, drafts = segment.request, segment.drafts
    rules, first = request.rules, segment.start + segment.count - len(drafts)
    tokens: list[int] = []
    if rules.looks_back and segment.sampled:
        tokens = request.tokens(0, first)
        tokens += [0] * (first - len(tokens))  # (not read yet)
    for n in range(segment.sampled):
        context = [*tokens, *drafts[:n]] if tokens else tokens
        answer = context[len(request.prompt) :]
        yield Row(rules, segment.place + n, context, n, *rules.mask(answer))


def _prompt_rows(
    logits: mx.array, rows: list[int], prompts: dict[int, tuple[Request, int]]
) -> PromptRows:
    places = list(prompts.values())
    tokens = mx.array([request.prompt[token] for request, token in places])
    top = max(request.params.prompt_logprobs or 0 for request, _ in places)
    if len(rows) < logits.shape[0]:
        logits = logits[mx.array(rows)]
    found = reported(tokens, logits, top)
    return PromptRows(places, *found[1:])  # type: ignore[arg-type]
