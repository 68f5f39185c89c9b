"""The loop of one request: prefill, then a token a step, or several that were guessed.

`stream_generate` checks the arguments; what is stored and yielded is decided here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress

import mlx.core as mx

from .cache import KvCache, rewind
from .chooser import Chooser
from .errors import OutOfPagesError, ParameterError
from .models import Decoder
from .progress import Progress
from .speculation import Drafting


class Run:
    """One call of stream_generate, its arguments checked."""

    def __init__(
        self,
        model: Decoder,
        cache: Sequence[KvCache],
        chooser: Chooser,
        stop_ids: frozenset[int],
        keep: bool,
        drafting: Drafting | None,
    ) -> None:
        """keep: the caller goes on using the cache. drafting: guesses, if wanted."""
        self.model, self.cache, self.chooser = model, cache, chooser
        self.stop_ids, self.keep, self.drafting = stop_ids, keep, drafting
        self._due = 0  # tokens that belong into the cache: the prompt, all yielded

    def tokens(
        self, prompt: list[int], limit: int, chunk: int, progress: Progress | None
    ) -> Iterator[int]:
        """Yield the new tokens. When one is yielded, the cache holds it already.

        With guesses it may hold more, until the stream ends or is closed.
        """
        token = self._prefill(prompt, limit, chunk, progress)
        self._due = self.cache[0].offset
        if not limit:
            return
        try:
            yield from self._decode(token, limit)
        finally:
            if self.keep:
                self._rewind_to(self._due)

    def _decode(self, token: mx.array, limit: int) -> Iterator[int]:
        """Yield `limit` tokens at most: `token`, [1] and lazy, and those after it."""
        start, drafting = self._due, self.drafting
        if drafting is not None:
            drafting.lap(0)
        known: int | None = None  # the value of `token`, where it has been read
        while True:
            left = start + limit - self._due
            # guesses stand between `token` and one that the pass itself chooses; the
            # first token of all is not held back for them
            most = left - 2 if left < limit else 0
            if drafting is not None and most > 0 and drafting.ready(most):
                if known is None:
                    known = self._read(token)
                draft = [] if known in self.stop_ids else drafting.draft(most)
                logits = self._verify(known, draft) if draft else None
                if logits is not None:
                    known = yield from self._hand_out_run(known, draft, logits)
                    if known is None:
                        return
                    token = mx.array([known])
                    continue
            # Step t + 1 starts from the lazy token of step t, before that is read.
            ahead, full = None, None
            try:
                if left > 1:
                    ahead = self._step(token)
                elif self.keep and self._has_room():
                    self._forward(token[:, None], logits=0)
            except OutOfPagesError as error:  # `token` is right all the same
                full = error
            if known is None:
                known = self._read(token)
            yield from self._hand_out(known)
            # (all that was asked for has come, stored or not)
            if known in self.stop_ids or left == 1:
                return
            if full is not None:
                raise full
            assert ahead is not None
            token, known = ahead, None

    def _verify(self, token: int, draft: list[int]) -> mx.array | None:
        """One pass over `token` and the guesses; the logits [1, k + 1, V] after each.

        None if there are no pages for all of them.
        """
        try:
            return self._forward(mx.array([[token, *draft]]), logits=len(draft) + 1)
        except OutOfPagesError:
            return None

    def _hand_out_run(
        self, token: int, draft: list[int], logits: mx.array
    ) -> Generator[int, None, int | None]:
        """Yield `token` and the guesses that are right; return the one after them.

        None: a stop id was among them, and the stream has ended.
        """
        assert self.drafting is not None
        rows = mx.argmax(logits[0], axis=-1) if self.chooser.is_argmax else logits
        mx.eval(rows)
        self.drafting.lap(len(draft) + 1)
        yield from self._hand_out(token)
        chosen: list[int] = []
        for value in self._choices(rows, [token, *draft]):
            chosen.append(value)
            if draft[len(chosen) - 1 : len(chosen)] != [value]:
                break
            if value in self.stop_ids:
                self.drafting.verified(len(draft), len(chosen), chosen)
                self._rewind_to(self._due + 1)
                yield from self._hand_out(value)
                return None
            yield from self._hand_out(value)
        self._rewind_to(self._due)
        self.drafting.verified(len(draft), len(chosen) - 1, chosen)
        return chosen[-1]

    def _choices(self, rows: mx.array, inputs: list[int]) -> Iterator[int]:
        """The token after each input, chosen as without guesses, when it is asked for.

        rows: the likeliest ids [k + 1], or logits [1, k + 1, V].
        """
        if self.chooser.is_argmax:
            yield from rows.tolist()  # type: ignore[misc]
            return
        for row, token in enumerate(inputs):
            self.chooser.add(mx.array([token]))
            yield self._value(self.chooser.choose(rows[:, row]))

    def _hand_out(self, token: int) -> Iterator[int]:
        """Yield a token that is stored."""
        self._due += 1
        if self.drafting is None:
            yield token
            return
        with self.drafting.away():
            yield token

    def _prefill(
        self, prompt: list[int], limit: int, chunk: int, progress: Progress | None
    ) -> mx.array:
        """Run the prompt; return the first new token, [1], lazily.

        Without pages for all of it, the cache is as before.
        """
        stored = self.cache[0].offset
        try:
            return self._run_prompt(prompt, limit, chunk, progress)
        except OutOfPagesError:
            with suppress(ParameterError):  # a window has passed what was before
                self._rewind_to(stored)
            raise

    def _run_prompt(
        self, prompt: list[int], limit: int, chunk: int, progress: Progress | None
    ) -> mx.array:
        logits = None
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            last = start + len(part) == len(prompt)
            logits = self._forward(mx.array([part]), logits=1 if last and limit else 0)
            mx.eval(logits, [entry.state for entry in self.cache])
            if progress is not None:
                progress(start + len(part), len(prompt))
        assert logits is not None
        if not limit:
            return mx.zeros((1,), dtype=mx.int32)
        return self.chooser.choose(logits[:, -1])

    def _step(self, token: mx.array) -> mx.array:
        """Append a token [1] and start computing the one after it, [1]."""
        logits = self._forward(token[:, None], logits=1)
        self.chooser.add(token)
        following = self.chooser.choose(logits[:, -1])
        mx.async_eval(following, self.chooser.state)
        return following

    def _forward(self, ids: mx.array, *, logits: int) -> mx.array:
        stored = self.cache[0].offset
        try:
            return self.model(
                self.chooser.within(ids),
                offset=stored,
                cache=self.cache,
                logits_to_keep=logits,
            )
        except BaseException:  # Ctrl-C between two layers: only some have the tokens
            self._rewind_to(stored)
            raise

    def _read(self, token: mx.array) -> int:
        """The value of a token that a plain step has chosen."""
        value = self._value(token)
        if self.drafting is not None:
            self.drafting.add(value)
            self.drafting.lap(1)
        return value

    def _value(self, token: mx.array) -> int:
        """The id in an array [1]. Raises ParameterError outside the vocabulary."""
        value: int = token.item()  # type: ignore[assignment]
        if not 0 <= value < self.chooser.vocabulary:
            raise ParameterError(
                f"the sampler chose the token id {value}, which is not in the "
                f"vocabulary of {self.chooser.vocabulary}"
            )
        return value

    def _rewind_to(self, length: int) -> None:
        if self.cache[0].offset > length:
            rewind(self.cache, length)

    def _has_room(self) -> bool:
        return self.cache[0].offset < self.model.config.context_length
