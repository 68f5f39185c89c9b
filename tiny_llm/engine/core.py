"""What one step does: schedule, run, postprocess. Everything here is in one thread."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import RequestError
from ..tokenizer import Tokenizer
from .budget import StepCost
from .handle import Handle
from .kv import KvMemory
from .request import Request
from .runner import Launched, Runner
from .scheduler import Scheduler, Segment


class Entry(NamedTuple):
    """What is kept of a request beside the scheduler's view of it.

    tokenizer, detokenizer: None for an engine of token ids only.
    """

    request: Request
    handle: Handle
    stop_ids: frozenset[int]
    tokenizer: Tokenizer | None
    detokenizer: Any

    @property
    def ended(self) -> str | None:
        """Why the answer that was given out is complete; None: it is not."""
        answer = self.handle.answer
        if answer and answer[-1] in self.stop_ids:
            return "stop"
        return "length" if len(answer) >= self.request.limit else None

    def renewed(self) -> Entry:
        """With a detokenizer that has seen what was given out, and nothing else."""
        if self.tokenizer is None:
            return self
        detokenizer = self.tokenizer.detokenizer()
        for token in self.handle.answer:
            if token not in self.stop_ids:
                detokenizer.add(token)
        return self._replace(detokenizer=detokenizer)


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
    ) -> None:
        self.runner, self.memory, self.scheduler = runner, memory, scheduler
        self.cost, self.pipeline = cost, pipeline
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
            self.entries[request.number] = entry.renewed()
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
        tokens, tops, logprobs, errors = _values(launched)
        for segment in launched.segments:
            request = segment.request
            request.in_flight -= segment.samples
            if request.done:
                continue
            if not segment.samples:
                self.memory.store(request, segment.start, segment.count)
                continue
            place = launched.place[request.number]
            wrong = _not_numbers(tops[place])
            if wrong is not None:
                self.memory.forget(request)  # nor are its keys
                self.fail(request, wrong)
                continue
            self.memory.store(request, segment.start, segment.count)
            problem = errors.get(place) or self._not_a_token(tokens[place])
            if problem is not None:
                self.fail(request, problem)
                continue
            logprob = logprobs[place] if request.params.logprobs else None
            self._emit(request, tokens[place], logprob)

    def _not_a_token(self, token: int) -> Exception | None:
        vocabulary = self.runner.model.config.vocab_size
        if 0 <= token < vocabulary:
            return None
        return RequestError(
            f"the sampler chose an id that is not in the vocabulary of {vocabulary}"
        )

    def _emit(self, request: Request, token: int, logprob: float | None) -> None:
        entry = self.entries[request.number]
        stops = token in entry.stop_ids
        try:
            text = ""
            if entry.detokenizer is not None and not stops:
                text = entry.detokenizer.add(token)
        except Exception as error:
            self.fail(request, error)
            return
        request.output.append(token)
        entry.handle.add(token, text, logprob)
        if stops or len(request.output) >= request.limit:
            self._end(request, "stop" if stops else "length")

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
        text = ""
        if entry.detokenizer is not None:
            try:
                text = entry.detokenizer.finish()
            except Exception as broken:
                reason, error = "error", error or _failure(request, broken)
        self.scheduler.remove(request, finished=reason in ("stop", "length"))
        entry.handle.end(reason, text, error)
        del self.entries[request.number]
        self.preemptions += request.preemptions

    def _note(self, launched: Launched) -> None:
        """How long the step took, for the next ones."""
        now = time.perf_counter()
        rows = sum(segment.count for segment in launched.segments)
        keys = sum(segment.keys for segment in launched.segments)
        self.cost.add(rows, keys, 1000 * (now - self._last))
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


def _values(
    launched: Launched,
) -> tuple[list[int], list[float], list[float], dict[int, BaseException]]:
    """What a step chose, as numbers of Python."""
    if launched.sampled is None:
        return [], [], [], {}
    tokens, tops, logprobs, errors = launched.sampled
    found: Any = (tokens.tolist(), tops.tolist())
    chosen: Any = [] if logprobs is None else logprobs.tolist()
    return found[0], found[1], chosen, errors
