"""Speculation in one request: its tokens, its guesses, and when guessing pays."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .base import Speculation
from .length import DraftLength, StepCosts

_BUSY = 0.1  # of a step: when the caller was away longer, nothing was measured


class Drafting:
    """The guesses of one request, and the times of its steps.

    Whoever decodes asks `ready`; if so, it reads all tokens that are computed (`add`),
    asks for a `draft` and tells what became of it (`verified`). Without mlx.
    """

    def __init__(
        self,
        speculation: Speculation,
        prompt: Iterable[int],
        vocabulary: int,
        costs: StepCosts | None = None,
    ) -> None:
        """costs: shared by requests of the same model. Raises ParameterError."""
        self.counts, self.most = speculation.counts, speculation.max_draft
        self.vocabulary = vocabulary
        self.drafter = speculation.drafter(vocabulary)
        self.costs = StepCosts() if costs is None else costs
        self.length = DraftLength(
            self.drafter.levels, free=self.drafter.free, costs=self.costs
        )
        self.tokens = list(prompt)
        self._looked, self._level = -1, 0
        self._guess: int | None = None  # of a free drafter, not verified
        self._mark, self._away = time.perf_counter(), 0.0

    def add(self, token: int) -> None:
        """The next token, which no pass with guesses has chosen."""
        if self._look() is not None and self.drafter.free:
            guess = self.drafter.propose(self.tokens, 1)
            self.length.observe(self._level, int(guess[:1] == [token]), 1)
        self.length.skipped()
        self.tokens.append(token)

    def ready(self, most: int, beside: int = 0) -> bool:
        """Whether guesses, at most so many, would pay after the tokens added.

        beside: rows of other requests in the same step, of a token each.
        """
        level = self._look()
        most = min(most, self.most)
        return level is not None and self.length.choose(level, most, beside) > 0

    def draft(self, most: int, beside: int = 0) -> list[int]:
        """The tokens to verify, at most so many: ids of the vocabulary."""
        level = self._look()
        if level is None:
            return []
        most = self.length.choose(level, min(most, self.most), beside)
        if most < 1:
            return []
        start = time.perf_counter()
        draft = self.drafter.propose(self.tokens, most)[:most]
        good = [0 <= token < self.vocabulary for token in draft]
        draft = draft[: good.index(False)] if False in good else draft
        if draft and not self.drafter.free:
            self._mark = time.perf_counter()
            self.costs.observe_draft(len(draft), self._mark - start)
        return draft

    def verified(self, drafted: int, accepted: int, chosen: list[int]) -> None:
        """A pass over so many guesses accepted some and chose these tokens in all."""
        self.length.observe(self._level, accepted, drafted)
        self.counts.passes += 1
        self.counts.drafted += drafted
        self.counts.accepted += accepted
        self.tokens += chosen

    def lap(self, rows: int) -> None:
        """A step of so many rows ended just now; the one before ended at the last."""
        now = time.perf_counter()
        if rows and self._away <= _BUSY * (now - self._mark):
            self.costs.observe(rows, now - self._mark)
        self._mark, self._away = now, 0.0

    @contextmanager
    def away(self) -> Iterator[None]:
        """While the caller has the last token."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._away += time.perf_counter() - start

    def _look(self) -> int | None:
        """The evidence after all tokens; looked for once."""
        if self._looked != len(self.tokens):
            level = self.drafter.look(self.tokens)
            self._looked, self._level = len(self.tokens), -1 if level is None else level
        return None if self._level < 0 else self._level
