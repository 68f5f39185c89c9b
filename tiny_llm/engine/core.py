"""What one step does: schedule, run, postprocess. Everything here is in one thread."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from ..answer_text import Part
from ..errors import RequestError
from ..speculation import Drafting, Speculation, StepCosts
from .budget import StepCost
from .entry import Entry
from .kv import KvMemory
from .request import Request
from .runner import Launched, Runner
from .scheduler import Scheduler, Segment
from .values import Logprobs, Values, values_of


class Core:
    """Brings requests on, step by step.

    Pipelined, a step is launched before the tokens of the one before are read: what
    such a token ends (a stop, a cancellation) is seen one step late, and the row that
    was computed in vain is dropped.
    """

    def __init__(
        self,
        runner: Runner,
        memory: KvMemory,
        scheduler: Scheduler,
        cost: StepCost,
        *,
        pipeline: bool,
        speculation: Speculation | None = None,
    ) -> None:
        self.runner, self.memory, self.scheduler = runner, memory, scheduler
        self.cost, self.pipeline, self.speculation = cost, pipeline, speculation
        self.costs = StepCosts()
        self.entries: dict[int, Entry] = {}  # of all requests that have not ended
        self.steps = self.rows = self.preemptions = 0
        self.prompt_tokens = self.cached_tokens = 0
        self._launched: Launched | None = None
        self._last = time.perf_counter()
        self._cut = False

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever cuts off (Ctrl-C) what is done with it, all requests begin anew.

        All work on requests is to be done in here.
        """
        if self._cut:  # also the restart was
            self.restart()
        self._cut = True
        try:
            yield
        except BaseException:
            self.restart()
            raise
        self._cut = False

    def add(self, entry: Entry) -> None:
        """A new request, unless it is here already."""
        if entry.request.number not in self.entries:
            self.entries[entry.request.number] = entry
            self.scheduler.add(entry.request)

    def cancel(self, request: Request) -> None:
        """End a request that may have ended already."""
        if not request.done:
            self._end(request, "cancelled")

    def step(self) -> bool:
        """One step of all requests; False if there was nothing to do."""
        self._last = time.perf_counter()
        segments = self._schedule()
        if not segments and self._launched is None:
            return False
        if not self.pipeline:
            self._last = time.perf_counter()  # what scheduling allocates costs no row
        for request, *_ in segments or ():
            self._begin(request)
        launched = self._launch(segments) if segments else None
        if self.pipeline:
            launched, self._launched = self._launched, launched
        if launched is not None:
            self._finish(launched)
        return True

    def restart(self) -> None:
        """All requests wait again, with the tokens that their callers have seen."""
        self._launched = None
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        for entry in list(self.entries.values()):
            request = entry.request
            self.memory.close(request)
            if request.done:
                del self.entries[request.number]
                continue
            request.computed = request.in_flight = 0
            request.output[:] = entry.handle.answer
            request.drafting = None
            entry = self.entries[request.number] = entry.renewed()
            self.scheduler.add(request)
            if entry.ended is not None:
                self._end(request, entry.ended)
        self._cut = False

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error."""
        self._end(request, "error", _failure(request, error))

    def check(self) -> None:
        """Raise AssertionError unless all books agree."""
        self.memory.check()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        numbers = [request.number for request in [*running, *waiting]]
        assert numbers == sorted(numbers)
        assert set(numbers) == set(self.entries)
        assert all(request.table is None for request in waiting)
        tables = {id(request.table) for request in running}
        holders = [t for t in self.memory.pool.tables if any(t.pages)]
        assert {id(table) for table in holders} <= tables, "pages without a request"
        if not self.entries:
            assert self.memory.pool.pages_in_use == 0

    def _schedule(self) -> list[Segment] | None:
        if self._launched is not None and not all(
            self.memory.keeps(segment.count) for segment in self._launched.segments
        ):
            self._settle()  # to be run again, if it fails, it needs what it sees
        if self._launched is not None and any(
            map(self._matters, self._launched.segments)
        ):
            self._settle()
        if self.speculation is not None:
            for request in self.scheduler.running:
                if request.drafting is None and request.decoding and request.guesses:
                    self._speculate(request, self.speculation)
        try:
            segments = self.scheduler.schedule(settled=self._launched is None)
        except Exception:
            if self._launched is None:
                raise
            self._redo()
            segments = None
        if segments is None:  # short of pages: read first, that may free some
            self._settle()
            segments = self.scheduler.schedule()
        return segments

    def _matters(self, segment: Segment) -> bool:
        """Whether its tokens must be read before the next step is planned."""
        request, drafting = segment.request, segment.request.drafting
        if not segment.samples or request.done:
            return False
        if segment.drafts or request.rules.waits:
            return True
        beside = max(len(self.scheduler.running) - 1, 0)
        return drafting is not None and bool(drafting.ready(drafting.most, beside))

    def _speculate(self, request: Request, speculation: Speculation) -> None:
        """Begin to guess for a request that decodes."""
        if request.rules.speculates and not request.in_flight:
            vocabulary = self.runner.model.config.vocab_size
            tokens = request.prompt + request.output
            request.drafting = Drafting(speculation, tokens, vocabulary, self.costs)

    def _redo(self) -> None:
        """What is under way may have failed: a failure is told once, to whoever waits.

        (Here to the pool that grew, or to the next step.)
        """
        if self._launched is not None:
            launched, self._launched = self._launched, None
            launched.plan.undo()
            self._one_by_one(launched.segments)

    def _settle(self) -> None:
        """Read what is under way."""
        if self._launched is not None:
            launched, self._launched = self._launched, None
            self._finish(launched)

    def _launch(self, segments: Sequence[Segment]) -> Launched | None:
        """Start a step; unless pipelined, it is over when this returns."""
        launched = None
        try:
            launched = self.runner.launch(segments, self._launched)
            (mx.async_eval if self.pipeline else mx.eval)(launched.arrays())
            # (whoever held the pool's arrays would keep them while the pool grows)
            return launched._replace(pages=[])
        except Exception:
            if launched is None:
                self._settle()
            else:
                launched.plan.undo()
                self._redo()
            self._one_by_one(segments)
            return None

    def _one_by_one(self, segments: Sequence[Segment]) -> None:
        """A step failed: run its requests alone. Who fails alone is at fault.

        (What a step writes it writes again to the same places. Also one that was alone
        in the step: what failed may have been the step before, which is told late.)
        """
        for segment in segments:
            request = segment.request
            if request.done or request.table is None:  # (it begins anew)
                continue
            launched = None
            try:
                launched = self.runner.launch([segment], None)
                mx.eval(launched.arrays())
            except Exception as alone:
                if launched is not None:
                    launched.plan.undo()
                self.memory.forget(request)
                self.fail(request, alone)
                self._heal()
            else:
                self._finish(launched)

    def _heal(self) -> None:
        """If a failure left keys that cannot be computed, begin with empty pages."""
        try:
            mx.eval(self.memory.pool.rows)
        except Exception:
            self.memory.renew()
            self.restart()

    def _finish(self, launched: Launched) -> None:
        """Wait for a step, and give every request its token."""
        try:
            mx.eval(launched.outputs())
        except Exception:
            ahead, self._launched = self._launched, None
            if ahead is not None:
                ahead.plan.undo()
            launched.plan.undo()
            self._one_by_one(launched.segments)
            if ahead is not None:
                self._one_by_one(ahead.segments)
            return
        self._note(launched)
        values = values_of(launched)
        for segment in launched.segments:
            request = segment.request
            request.in_flight -= segment.samples
            if request.done:
                continue
            if segment.samples:
                self._take(segment, values, launched.place[request.number])
            else:
                self.memory.store(request, segment.start, segment.count)

    def _take(self, segment: Segment, values: Values, first: int) -> None:
        """Give a request what its rows, from `first` on, have chosen.

        A row after a guess counts if the row before has chosen just that token.
        """
        request, drafts = segment.request, segment.drafts
        places = range(first, first + segment.sampled)
        tokens = [values.tokens[place] for place in places]
        right = 0
        while right < len(drafts) and tokens[right] == drafts[right]:
            right += 1
        places, tokens = places[: right + 1], tokens[: right + 1]
        rejected = len(drafts) - right
        request.table.rewind_all(rejected)
        request.computed -= rejected
        self.memory.store(
            request, segment.start, segment.count - rejected, drafts[:right]
        )
        if request.drafting is not None:
            if drafts:
                request.drafting.verified(len(drafts), right, tokens)
            else:
                request.drafting.add(tokens[0])
        vocabulary = self.runner.model.config.vocab_size
        for place, token in zip(places, tokens, strict=True):
            wrong = _not_numbers(values.tops[place])
            if wrong is not None:
                self.memory.forget(request)  # nor are its keys
            problem = wrong or values.problem_of(place, vocabulary)
            if problem is not None:
                self.fail(request, problem)
            else:
                self._emit(request, token, values.logprobs_of(place, request))
            if request.done:
                return

    def _emit(self, request: Request, token: int, logprobs: Logprobs | None) -> None:
        entry = self.entries[request.number]
        try:
            parts: list[Part] = []
            if entry.text is not None and token not in entry.stop_ids:
                parts = entry.text.add(token)
        except Exception as error:
            self.fail(request, error)
            return
        request.output.append(token)
        entry.handle.add(token, parts, logprobs)
        if token in entry.stop_ids or (entry.text is not None and entry.text.stop):
            self._end(request, "stop")
        elif len(request.output) >= request.limit:
            self._end(request, "length")

    def _begin(self, request: Request) -> None:
        entry = self.entries[request.number]
        if entry.handle.start():
            request.begun = True
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += request.cached_tokens

    def _end(
        self, request: Request, reason: str, error: Exception | None = None
    ) -> None:
        entry = self.entries[request.number]
        parts: list[Part] = []
        if entry.text is not None:
            try:
                parts = entry.text.finish()
            except Exception as broken:
                reason, error = "error", error or _failure(request, broken)
        self.scheduler.remove(request, finished=reason in ("stop", "length"))
        stop_reason = entry.stop_reason if reason == "stop" else None
        entry.handle.end(reason, parts, error, stop_reason)
        del self.entries[request.number]
        self.preemptions += request.preemptions

    def _note(self, launched: Launched) -> None:
        """How long the step took, for the next ones."""
        now = time.perf_counter()
        rows = sum(segment.count for segment in launched.segments)
        keys = sum(segment.keys for segment in launched.segments)
        self.cost.add(rows, keys, 1000 * (now - self._last))
        if self.speculation is not None:
            self.costs.observe(rows, now - self._last)
        self._last = now
        self.steps += 1
        self.rows += rows


def _failure(request: Request, error: BaseException) -> RequestError:
    failure = RequestError(
        f"request {request.number} failed: {str(error) or repr(error)}"
    )
    failure.__cause__ = error
    return failure


def _not_numbers(top: float) -> Exception | None:
    """What is wrong with logits whose largest is `top`, or None."""
    if math.isfinite(top):
        return None
    if math.isnan(top):
        return RequestError("the model's logits are not numbers")
    return RequestError(f"the model's largest logit is {top}")
