"""Guesses from the text itself: what followed the last tokens when they came before."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ParameterError, whole_number
from .base import Drafter, Speculation

_TRIES = 32  # earlier places that are compared


class PromptLookup(Speculation):
    """Prompt lookup decoding (Saxena 2023): no second model, guesses cost nothing.

    The newest tokens are looked for in prompt and output, and what followed them there
    is the guess. Made for answers that repeat their prompt or themselves: edited code,
    quotes, extracted data.
    """

    def __init__(
        self, max_ngram: int = 8, min_ngram: int = 2, max_draft: int = 31
    ) -> None:
        """Raises ParameterError.

        min_ngram: tokens that must agree for a guess. max_ngram: more are not compared;
        the longer the match, the better the guess, which DraftLength learns.
        max_draft: tokens guessed at a time, at most.
        """
        super().__init__(max_draft)
        self.min_ngram = whole_number("min_ngram", min_ngram, least=1)
        self.max_ngram = whole_number("max_ngram", max_ngram, least=1)
        if self.max_ngram < self.min_ngram:
            raise ParameterError(
                f"max_ngram is {max_ngram}, less than min_ngram, which is {min_ngram}"
            )

    def drafter(self, vocabulary: int) -> LookupDrafter:
        """The index of one request; any vocabulary will do."""
        return LookupDrafter(self.max_ngram, self.min_ngram)


class LookupDrafter(Drafter):
    """The places of all n-grams of min_ngram tokens, in hash chains as in deflate.

    Each token costs one entry; a look compares at most 32 places, the newest first.
    The level of a guess is the number of tokens that agree, less min_ngram.
    """

    free = True

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self.most, self.least = max_ngram, min_ngram
        self.levels = max_ngram - min_ngram + 1
        self._forget()

    def _forget(self) -> None:
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind it
        self._before: list[int] = []  # place -> the one before with the same n-gram
        self._looked = -1, 0, 0  # tokens at the last look, the place found, matching

    def look(self, tokens: Sequence[int]) -> int | None:
        """The level of the longest match, the newest of its length; see Drafter.

        Tokens that do not continue those of the call before are only noticed if they
        are fewer.
        """
        _, match = self._find(tokens)
        return match - self.least if match else None

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """What followed the match; where that runs into the end, it is repeated."""
        place, match = self._find(tokens)
        if not match:
            return []
        draft = list(tokens[place : place + most])
        period = len(tokens) - place
        while len(draft) < most:
            draft.append(draft[len(draft) - period])
        return draft

    def _find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(the place behind the best match, its length or 0)."""
        end = len(tokens)
        if self._looked[0] != end:
            self._index(tokens)
            self._looked = end, *self._longest(tokens)
        return self._looked[1], self._looked[2]

    def _index(self, tokens: Sequence[int]) -> None:
        """Enter the n-grams that some token follows."""
        if len(tokens) < len(self._before):
            self._forget()
        for place in range(len(self._before), len(tokens)):
            earlier = -1
            if place >= self.least:
                key = tuple(tokens[place - self.least : place])
                earlier = self._newest.get(key, -1)
                self._newest[key] = place
            self._before.append(earlier)

    def _longest(self, tokens: Sequence[int]) -> tuple[int, int]:
        end, best, found = len(tokens), 0, 0
        if end < self.least:
            return found, best
        place = self._newest.get(tuple(tokens[end - self.least :]), -1)
        for _ in range(_TRIES):
            if place < 0:
                break
            length = self.least
            while (
                length < min(self.most, place)
                and tokens[place - length - 1] == tokens[end - length - 1]
            ):
                length += 1
            if length > best:
                best, found = length, place
            if best == self.most:
                break
            place = self._before[place]
        return found, best
