"""What one request's choices depend on: its parameters, and its tokens so far."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from .dry import dry_penalties
from .filters import Filters
from .history import TokenCounts, with_more
from .params import SamplingParams
from .random_numbers import uniform


class Rules:
    """One request's rules. matcher: of its grammar, which follows the answer."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int = 0,
        end_ids: Collection[int] = (),
        bad_words: Sequence[tuple[int, ...]] = (),
        breakers: Collection[int] = (),
        matcher: Any = None,
    ) -> None:
        """end_ids: what ends the answer. bad_words, breakers: the params', as ids."""
        self.params, self.seed, self.matcher = params, seed, matcher
        self.end_ids, self.breakers = frozenset(end_ids), frozenset(breakers)
        self._forbidden = [word[0] for word in bad_words if len(word) == 1]
        self._bad_words = [word for word in bad_words if len(word) > 1]
        self._counts = TokenCounts()
        self._followed: list[int] = []  # by the matcher
        self.filters = Filters(
            params.temperature,
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
            params.typical_p,
            params.top_n_sigma,
        )

    @property
    def penalised(self) -> bool:
        """Whether tokens of the context count."""
        own = self.params
        return (
            own.frequency_penalty != 0
            or own.presence_penalty != 0
            or own.repetition_penalty != 1
        )

    @property
    def waits(self) -> bool:
        """Whether the last token must have been read before the next is chosen."""
        own = self.params
        return bool(
            self.matcher is not None
            or self._bad_words
            or own.dry_multiplier
            or own.logits_processors
            or own.sampler is not None
        )

    @property
    def speculates(self) -> bool:
        """Whether guesses may be verified: the caller's own code is not asked about
        rows that may be taken back."""
        return not self.params.logits_processors and self.params.sampler is None

    @property
    def looks_back(self) -> bool:
        """Whether the tokens so far matter at all."""
        return self.penalised or self.waits

    def table(self, tokens: Sequence[int], drafted: int) -> Any:
        """The context but its last token, as adjust.penalise takes it.

        tokens: the whole context; drafted: how many at its end may be taken back.
        """
        window, known = self.params.penalty_window, len(tokens) - 1
        if window is not None and window <= len(tokens):
            return TokenCounts().table(tokens[:-1], max(window - 1, 0))
        sure = len(tokens) - drafted
        table = self._counts.table(tokens[: min(sure, known)], None)
        return with_more(table, tokens[min(sure, known) : known])

    def terms(
        self, tokens: Sequence[int], place: int, must_end: bool = False
    ) -> dict[int, float]:
        """What is added to single logits before the place-th token of the answer.

        tokens: the context, as far as it matters to `waits`. must_end: a grammar allows
        nothing more, which counts for more than min_tokens.
        """
        found: dict[int, float] = {}
        own = self.params
        if own.dry_multiplier:
            penalties = dry_penalties(
                tokens,
                multiplier=own.dry_multiplier,
                base=own.dry_base,
                allowed_length=own.dry_allowed_length,
                window=own.dry_window,
                breakers=self.breakers,
            )
            found = {token: -value for token, value in penalties.items()}
        for token in self._forbidden:
            found[token] = -math.inf
        for word in self._bad_words:
            if tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]:
                found[word[-1]] = -math.inf
        if place < own.min_tokens and not must_end:
            for token in self.end_ids:
                found[token] = -math.inf
        return found

    def mask(self, answer: Sequence[int]) -> tuple[Any, bool]:
        """What a grammar allows after these tokens, uint32 [ceil(V / 32)], or None; and
        whether that is only the end."""
        if self.matcher is None:
            return None, False
        self.follow(answer)
        return self.matcher.mask(), self.matcher.finished

    def follow(self, answer: Sequence[int]) -> None:
        """Bring the grammar's matcher to the state after these tokens."""
        seen, common = self._followed, 0
        while common < min(len(seen), len(answer)) and seen[common] == answer[common]:
            common += 1
        self.matcher.rollback(len(seen) - common)
        del seen[common:]
        for token in answer[common:]:
            self.matcher.advance(token)
            seen.append(token)

    def allowed(self, drafts: list[int], answer: Sequence[int]) -> list[int]:
        """The first ones of guessed tokens that a grammar allows after the answer."""
        if self.matcher is None or not drafts:
            return drafts
        self.follow(answer)
        return drafts[: self.matcher.allowed(drafts)]

    def uniform(self, place: int) -> float:
        """The random number that decides the place-th token of the answer."""
        return uniform(self.seed, place)

    def filters_at(self, place: int) -> Filters:
        """The filters for the place-th token: XTC comes by chance."""
        own = self.params
        if own.xtc_probability and uniform(self.seed, place, 1) < own.xtc_probability:
            return self.filters._replace(xtc_threshold=own.xtc_threshold)
        return self.filters
