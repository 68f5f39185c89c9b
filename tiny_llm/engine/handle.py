"""One request as its caller sees it: pieces as they come, then the result."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from ..answer_text import Part
from ..result import Result
from .request import Request
from .values import Logprobs


class Piece(NamedTuple):
    """What one step brought: whole characters, and the new token ids.

    text is "" while a character is not complete (or without a tokenizer), or while it
    may become a stop string; token_ids is empty for text that was held back until the
    end. reasoning: text of the model's thoughts, where its tokenizer declares tags for
    these.
    """

    text: str
    token_ids: list[int]
    reasoning: str = ""


class _Told(NamedTuple):
    """A piece, its token's log-probabilities, and when it came."""

    piece: Piece
    logprobs: Logprobs | None
    time: float


class Driver(Protocol):
    """What makes requests go on."""

    def drive(self, wait: Callable[[], None]) -> None:
        """Bring all requests on by a step: wait for the thread, or take the step."""

    def ensure_thread(self) -> None:
        """Have a thread that steps, without anybody driving."""

    def cancel(self, request: Request) -> None:
        """End a request before the next step."""


class Handle(Iterator[Piece], AsyncIterator[Piece]):
    """Iterate it (`for` or `async for`, by one consumer) for Pieces; or take `result`.

    Iterating raises RequestError where the request failed. Without a started thread,
    waiting for a piece takes the engine's steps in the thread that waits.
    """

    def __init__(self, driver: Driver, request: Request) -> None:
        self.request = request
        self._driver = driver
        self._result = Result(prompt_tokens=len(request.prompt))
        self._told: list[_Told] = []
        self._read = 0  # pieces of them
        self._wakers: deque[Callable[[], object]] = deque()
        self._submitted = time.perf_counter()
        self._started: float | None = None

    @property
    def state(self) -> str:
        """ "waiting", "prefilling", "decoding" or "done"."""
        if self.request.done:
            return "done"
        if self.request.table is None:
            return "waiting"
        return "decoding" if self.request.output else "prefilling"

    @property
    def done(self) -> bool:
        """Whether the answer has ended."""
        return self.request.done

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def prefilled(self) -> int:
        """How many of them were computed, or found in the cache."""
        if self.request.output or self.request.done:
            return len(self.request.prompt)
        return min(self.request.computed, len(self.request.prompt))

    @property
    def token_ids(self) -> list[int]:
        """The answer so far."""
        return list(self.request.output)

    def cancel(self) -> None:
        """End the request; its pages are free after the next step. It may be done."""
        self._driver.cancel(self.request)

    def __iter__(self) -> Handle:
        return self

    def __next__(self) -> Piece:
        while True:
            piece = self._take()
            if piece is not None:
                return piece
            if self.request.done and not self._unread:
                self._raise()
                raise StopIteration
            self._driver.drive(self._wait)

    def wait(self) -> None:
        """Until something new happened: to this request, or without a thread to any."""
        if not self.request.done:
            self._driver.drive(lambda: self._wait(any_piece=False))

    def result(self) -> Result:
        """Wait for the end. Whatever became of the request, nothing is raised."""
        while not self.request.done:
            self.wait()
        return self._result

    def __aiter__(self) -> Handle:
        return self

    async def __anext__(self) -> Piece:
        while True:
            piece = self._take()
            if piece is not None:
                return piece
            if self.request.done and not self._unread:
                self._raise()
                raise StopAsyncIteration
            await self._wait_async()

    async def aresult(self) -> Result:
        """As `result`, for coroutines."""
        while not self.request.done:
            await self._wait_async(any_piece=False)
        return self._result

    # What follows is for the engine.

    @property
    def answer(self) -> list[int]:
        """The tokens that were given out."""
        return [token for told in self._told for token in told.piece.token_ids]

    def start(self) -> bool:
        """Work on it begins; False if it had begun before."""
        if self._started is not None:
            return False
        self._started = time.perf_counter()
        return True

    def add(self, token: int, parts: Sequence[Part], logprobs: Logprobs | None) -> None:
        """A new token, and the text that is complete with it."""
        # (all of it at once: Ctrl-C may come at any moment)
        self._told.append(_Told(_piece(parts, [token]), logprobs, time.perf_counter()))
        self._wake()

    def end(
        self,
        reason: str,
        parts: Sequence[Part] = (),
        error: Exception | None = None,
        stop_reason: str | int | None = None,
    ) -> None:
        """No more comes; parts: what was held back."""
        result, answer = self._result, self.answer
        result.finish_reason, result.error = reason, error
        result.stop_reason = stop_reason
        result.cached_tokens = self.request.cached_tokens
        result.cache_miss_reason = self.request.cache_miss_reason
        started = self._started or time.perf_counter()
        result.queued_seconds = started - self._submitted
        if answer:
            first, last = self._told[0].time, self._told[len(answer) - 1].time
            result.prompt_seconds, result.decode_seconds = first - started, last - first
        if parts:
            self._told[len(answer) :] = [_Told(_piece(parts, []), None, 0.0)]
        result.token_ids = answer
        result.text = "".join(told.piece.text for told in self._told)
        result.reasoning = "".join(told.piece.reasoning for told in self._told)
        logprobs = [told.logprobs for told in self._told if told.logprobs is not None]
        if logprobs:
            result.logprobs = [value.own for value in logprobs]
            if self.request.params.top_logprobs:
                result.top_logprobs = [value.likeliest for value in logprobs]
        if self.request.params.prompt_logprobs is not None:
            told = sorted(self.request.prompt_logprobs.items())
            result.prompt_logprobs = [tuple(value) for _, value in told]
        self.request.done = True
        self._wake()

    @property
    def _unread(self) -> bool:
        return self._read < len(self._told)

    def _take(self) -> Piece | None:
        if not self._unread:
            return None
        self._read += 1
        return self._told[self._read - 1].piece

    def _raise(self) -> None:
        if self._result.error is not None:
            raise self._result.error

    def _wake(self) -> None:
        # No lock: Ctrl-C as it is given back would leave it taken.
        while self._wakers:
            with suppress(RuntimeError):  # the event loop is closed: nobody waits
                self._wakers.popleft()()

    def _wait(self, any_piece: bool = True) -> None:
        """Until there is a piece (any_piece: or was, unread) or the end."""
        event = threading.Event()
        if self._ask(event.set, any_piece):
            # (in slices: an endless wait would not see Ctrl-C on every platform)
            while not event.wait(0.5):
                pass

    async def _wait_async(self, any_piece: bool = True) -> None:
        self._driver.ensure_thread()
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        if self._ask(lambda: loop.call_soon_threadsafe(event.set), any_piece):
            await event.wait()

    def _ask(self, wake: Callable[[], object], any_piece: bool) -> bool:
        """Be woken by what comes next; False if there is something already."""
        self._wakers.append(wake)  # first: what comes after the look wakes
        there = self.request.done or (any_piece and self._unread)
        if there:
            with suppress(ValueError):  # woken in between
                self._wakers.remove(wake)
        return not there


def _piece(parts: Sequence[Part], token_ids: list[int]) -> Piece:
    answer = "".join(part.text for part in parts if not part.reasoning)
    return Piece(answer, token_ids, "".join(p.text for p in parts if p.reasoning))
