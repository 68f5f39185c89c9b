"""Which rows the next step computes: decode first, then prompts, first come first."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, insort
from operator import attrgetter
from typing import NamedTuple, Protocol

from ..errors import ParameterError, whole_number
from .budget import StepCost
from .request import Request

TARGET_MS = 500.0  # no step is planned to take longer
SLOWER = 2.5  # times the decoding rows' own step, where rows decode
PAUSE_MS = 250.0  # that a step may take beside few streams, also where that is more
SHARED_MS = 1000.0  # that all streams' pauses may add up to: less for more than four
LEAST_ROWS = 8  # of prompts in any step
LOGPROB_ROWS = 64  # in a step of a prompt whose logits are wanted
UNKNOWN_ROWS = 64  # of prompts in a step while its cost is not known
UNKNOWN_ANSWER = 256  # tokens expected while no answer has finished
MARGIN = 1.25  # times the mean answer

_number = attrgetter("number")
_log = logging.getLogger("tiny_llm")


class Memory(Protocol):
    """Where the requests' K/V lie."""

    def open(self, request: Request, reserve: int) -> bool:
        """Find the prefix and take pages for `reserve` tokens.

        Sets request.table, .computed (less than .length), .cached_tokens and
        .cache_miss_reason. False: there are too few pages, and nothing has changed.
        """

    def ready(self, request: Request, coming: int, patient: bool) -> bool:
        """Whether the pages that `open` took can be written to; work on it.

        coming: tokens that those behind it will take pages for. patient: only a part
        of the work at a time, since others wait for their next tokens.
        """

    def grow(self, request: Request, stop: int) -> bool:
        """Make the tokens up to stop writable; what `open` reserved is.

        False: there are too few pages, and nothing has changed.
        """

    def close(self, request: Request) -> None:
        """Give all its pages back; findable ones stay findable."""


class Segment(NamedTuple):
    """Rows of one request in a step.

    samples: its newest token is among them. drafts: the tokens of the last rows are
    guesses, and every row from the newest known token on samples.
    """

    request: Request
    start: int
    count: int  # type: ignore[assignment]  # hides tuple's own, which nobody needs
    samples: bool
    drafts: tuple[int, ...] = ()

    @property
    def sampled(self) -> int:
        """How many of its rows sample: the last ones."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def place(self) -> int:
        """Of the first token that it samples, in the answer."""
        return self.start + self.count - len(self.drafts) - len(self.request.prompt)

    @property
    def prompt_logprobs(self) -> range:
        """Tokens of the prompt that its rows tell the log-probabilities of."""
        if self.request.params.prompt_logprobs is None:
            return range(0)
        return range(
            self.start + 1, min(self.start + self.count + 1, len(self.request.prompt))
        )

    @property
    def keys(self) -> int:
        """The sum over the rows of their context's length, themselves included."""
        return self.count * self.start + self.count * (self.count + 1) // 2


class _Unsettled(Exception):
    """Pages are short, and tokens that were not read yet may free some."""


class _Plan:
    """A step in the making."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.rows = 0
        self.keys = 0
        self.prompt_rows = 0
        self.decoding = 0
        self.target = math.inf
        self.preempted = False
        self.growing = False

    def add(self, request: Request, count: int) -> None:
        start = request.computed
        segment = Segment(request, start, count, start + count == request.length)
        self.segments.append(segment)
        self.rows += count
        self.keys += segment.keys

    def draft(self, at: int, drafts: list[int]) -> None:
        """Let a segment of one row verify guesses."""
        segment = self.segments[at]
        count = segment.count + len(drafts)
        self.rows += len(drafts)
        self.keys -= segment.keys
        self.segments[at] = segment._replace(count=count, drafts=tuple(drafts))
        self.keys += self.segments[at].keys

    def drop(self, request: Request) -> None:
        """What was planned for a request that is preempted."""
        self.preempted = True
        for at, segment in enumerate(self.segments):
            if segment.request is request:
                del self.segments[at]
                self.rows -= segment.count
                self.keys -= segment.keys
                return


class Scheduler:
    """Requests -> steps. First come, first served; the youngest is preempted first.

    waiting, running: in order of the requests' numbers. A request that waits is younger
    than all that run, so the oldest of all always gets on.

    Raises ParameterError where a step could not hold a row of every running request.
    """

    def __init__(
        self, memory: Memory, cost: StepCost, *, max_batch: int, max_step_tokens: int
    ) -> None:
        self.memory = memory
        self.cost = cost
        self.max_batch = whole_number("max_batch", max_batch, least=1)
        self.max_step_tokens = whole_number("max_step_tokens", max_step_tokens, least=1)
        if self.max_step_tokens < self.max_batch:
            raise ParameterError(
                f"max_step_tokens must be at least max_batch ({max_batch}), a row for "
                f"each running request, got {max_step_tokens}"
            )
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._answers = 0
        self._answer_tokens = 0

    def add(self, request: Request) -> None:
        """A new request, to wait for its turn."""
        insort(self.waiting, request, key=_number)

    def remove(self, request: Request, finished: bool = False) -> None:
        """Forget a request, wherever it is, and give its pages back.

        finished: with its whole answer, whose length says what to expect of others.
        Raises KeyError if it is not here.
        """
        for queue in (self.running, self.waiting):
            at = bisect_left(queue, request.number, key=_number)
            if at < len(queue) and queue[at] is request:
                break
        else:
            raise KeyError(f"request {request.number} neither waits nor runs")
        self._close(request)
        del queue[at]
        if finished:
            self._answers += 1
            self._answer_tokens += len(request.output)

    def schedule(self, settled: bool = True) -> list[Segment] | None:
        """The next step: at most one segment of each request.

        Counts the planned rows as computed and the tokens they sample as in flight.
        settled: every sampled token was read (in_flight is 0). [] means that nothing
        can be computed before something else happens. None, only where not settled:
        a request would have to be preempted, but an unread token may end one and free
        pages; nothing has changed: read, and call again.
        """
        plan = _Plan()
        try:
            reading = self._decode(plan, settled)
            reading += min(len(self.waiting), self.max_batch - len(self.running))
            if reading:
                plan.target = self._target(plan, reading)
                self._prefill(plan, settled)
                # Pages just taken from one are not for those behind it; but where
                # nobody runs any more, somebody must.
                if not (plan.preempted or plan.growing) or not self.running:
                    self._admit(plan)
        except _Unsettled:
            return None
        for segment in plan.segments:
            segment.request.computed += segment.count
            segment.request.in_flight += segment.samples
        return plan.segments

    def _decode(self, plan: _Plan, settled: bool) -> int:
        """A row for each request that decodes; returns how many still read prompts."""
        reading = 0
        for request in self.running:  # whose end may be preempted on the way
            if not request.decoding:
                reading += 1
            elif not request.exhausted and self._grow(plan, request, 1, settled):
                plan.add(request, 1)
        plan.decoding = len(plan.segments)
        for at in range(plan.decoding):
            self._draft(plan, at)
        return reading

    def _draft(self, plan: _Plan, at: int) -> None:
        """Add guesses to a row that decodes, if they pay and there is room."""
        request = plan.segments[at].request
        left = request.limit - len(request.output) - 1
        most = min(left, self.max_step_tokens - plan.rows)
        if request.drafting is None or request.in_flight or most < 1:
            return
        try:
            drafts = request.drafting.draft(most, beside=plan.rows - 1)
            drafts = request.rules.allowed(drafts, request.output)
        except Exception:  # of a draft model, say: it costs nobody an answer
            _log.warning(
                "no more guesses for request %d", request.number, exc_info=True
            )
            request.drafting, request.guesses = None, False
            return
        if drafts and self.memory.grow(request, request.computed + 1 + len(drafts)):
            plan.draft(at, drafts)

    def _target(self, plan: _Plan, reading: int) -> float:
        """Milliseconds that the step may take, with `reading` prompts to be read."""
        decoding = plan.decoding
        # Several who wait for their first token, beside no more than four times as
        # many who decode: the sooner they all decode together, the fewer the steps.
        if not decoding or (reading > 1 and 4 * reading >= decoding):
            return TARGET_MS
        alone = self.cost.estimate(plan.rows, plan.keys)
        if alone is None:
            return TARGET_MS
        pause = min(PAUSE_MS, SHARED_MS / decoding)
        return min(TARGET_MS, max(SLOWER * alone, pause))

    def _prefill(self, plan: _Plan, settled: bool) -> None:
        """Rows of the running requests' prompts, the oldest first."""
        for request in self.running:
            if request.decoding:
                continue
            count = self._chunk(plan, request)
            if not count or not self._ready(plan, request):
                return
            if self._grow(plan, request, count, settled):
                plan.add(request, count)
                plan.prompt_rows += count

    def _admit(self, plan: _Plan) -> None:
        """The head of those who wait, while there is room, time and pages for it."""
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            if request.follows or not self._chunk(plan, request):
                return
            if not self.memory.open(request, self._reserve(request)):
                # The engine refuses what can never fit.
                assert self.running, f"request {request.number} finds no pages at all"
                return
            self.running.append(self.waiting.pop(0))
            if not self._ready(plan, request):
                return
            count = self._chunk(plan, request)
            if not count:
                return
            if not self.memory.grow(request, request.computed + count):
                # (pages of layers with a window are not reserved)
                assert len(self.running) > 1, f"request {request.number} alone"
                self.waiting.insert(0, self.running.pop())
                self._close(request)
                request.computed = 0
                return
            plan.add(request, count)
            plan.prompt_rows += count

    def _ready(self, plan: _Plan, request: Request) -> bool:
        """Whether an opened request's pages can be written to; if not, it waits."""
        behind = self.waiting[: self.max_batch - len(self.running)]
        coming = sum(self._reserve(other) for other in behind)
        plan.growing = not self.memory.ready(request, coming, plan.decoding > 0)
        return not plan.growing

    def _chunk(self, plan: _Plan, request: Request) -> int:
        """How many rows of a prompt the step takes beside what is planned already."""
        wanted = request.remaining
        fit = self.cost.rows_within(plan.target, request.computed, plan.rows, plan.keys)
        if fit is None:
            fit = UNKNOWN_ROWS - plan.prompt_rows
        if fit >= LEAST_ROWS and wanted - fit < LEAST_ROWS:
            fit = wanted  # a last chunk of a few rows would cost a step's fixed part
        if request.wants_prompt_logprobs:
            wanted = min(wanted, LOGPROB_ROWS)
        count = min(
            wanted,
            max(fit, LEAST_ROWS - plan.prompt_rows),
            self.max_step_tokens - plan.rows,
        )
        if plan.prompt_rows >= LEAST_ROWS and count < min(wanted, LEAST_ROWS):
            return 0
        return max(count, 0)

    def _reserve(self, request: Request) -> int:
        """Tokens to take pages for: those there are, and the answer as expected."""
        if request.preemptions:
            return request.most
        expected = UNKNOWN_ANSWER
        if self._answers:
            expected = math.ceil(MARGIN * self._answer_tokens / self._answers)
        return min(request.length + expected, request.most)

    def _grow(self, plan: _Plan, request: Request, count: int, settled: bool) -> bool:
        """Make its next `count` tokens writable; False: it was preempted itself."""
        while not self.memory.grow(request, request.computed + count):
            if not settled:
                raise _Unsettled
            youngest = self.running[-1]
            assert not youngest.in_flight, "settled: every token was read"
            self._close(youngest)
            self.running.pop()
            youngest.computed = 0
            youngest.preemptions += 1
            insort(self.waiting, youngest, key=_number)
            plan.drop(youngest)
            if youngest is request:
                return False
        return True

    def _close(self, request: Request) -> None:
        if request.table is not None:
            self.memory.close(request)
            request.table = None
