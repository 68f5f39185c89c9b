"""What every way to guess tokens offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ParameterError, whole_number

# Guesses at most. With the token before them they are 64 rows, which every cache can
# take back, also one by one (memory.SLACK).
MOST_DRAFT = 63


@dataclass
class Counts:
    """What became of the guesses of all requests so far.

    passes: forward passes that verified guesses; drafted: tokens guessed for them;
    accepted: those that were right.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted tokens of those drafted, 0 to 1; 0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0


class Drafter(ABC):
    """The guesses for one request.

    levels: kinds of evidence for a guess that it tells apart, numbered from 0 (the
    weakest) on. free: whether a guess costs next to nothing.
    """

    levels: int = 1
    free: bool = False

    @abstractmethod
    def look(self, tokens: Sequence[int]) -> int | None:
        """The evidence there is for a guess after `tokens`; None: there is none.

        tokens: prompt and output so far, which begin with those of the call before.
        Must be cheap.
        """

    @abstractmethod
    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `tokens`; [] if there is no guess."""


class Speculation(ABC):
    """A way to guess tokens, for any number of requests.

    `counts` adds up what became of them; nothing else changes here.
    """

    def __init__(self, max_draft: int) -> None:
        """max_draft: tokens guessed at a time, 1 to 63. Raises ParameterError."""
        self.max_draft = whole_number("max_draft", max_draft, least=1)
        if self.max_draft > MOST_DRAFT:
            raise ParameterError(
                f"max_draft is {max_draft}; caches can take back at most {MOST_DRAFT}"
            )
        self.counts = Counts()

    @abstractmethod
    def drafter(self, vocabulary: int) -> Drafter:
        """The state for one request to a model with so many token ids.

        Raises ParameterError if it cannot guess for such a model.
        """
