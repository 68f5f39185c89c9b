"""What beam search returns: the best ended beams, and when no better ones can come."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Literal, NamedTuple

from .errors import ParameterError

EarlyStopping = bool | Literal["never"]


class BeamSequence(NamedTuple):
    """One answer of beam search.

    token_ids: what was generated, the closing EOS id included. sum_logprob: of these
    tokens, from float32 logits. score: sum_logprob / len(token_ids) ** length_penalty.
    finished: an EOS id closes it; False: it was cut at max_new_tokens or the context.
    """

    token_ids: list[int]
    score: float
    sum_logprob: float
    finished: bool


class Hypotheses:
    """The `most` best ended beams by score.

    The rules are those of transformers 5 (GenerationMixin._beam_search) for a batch of
    one; sums are kept in float64.
    """

    def __init__(
        self, most: int, limit: int, length_penalty: float, early_stopping: object
    ) -> None:
        """limit: tokens of the longest beam. Raises ParameterError."""
        self.most, self.limit = most, limit
        self.length_penalty = _checked_penalty(length_penalty, limit)
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise ParameterError(
                f"early_stopping must be False, True or 'never', got {early_stopping!r}"
            )
        self.early_stopping = early_stopping
        self.best: list[BeamSequence] = []  # best first

    def add(self, ended: Iterable[tuple[list[int], float, bool]]) -> None:
        """Beams (token ids, sum of log-probabilities, finished) that ended together."""
        new = [
            BeamSequence(tokens, self._score(total, len(tokens)), total, finished)
            for tokens, total, finished in ended
        ]
        # (stable: of equals the older one stays)
        best = sorted([*self.best, *new], key=lambda own: -own.score)
        self.best = best[: self.most]

    def complete(self, running: float, length: int) -> bool:
        """Whether to stop. running: the best sum of the beams that go on, of `length`.

        True stops at `most` ended beams. False stops when the best running beam, were
        it to end here, would be no better than the worst of them. "never" does so with
        the longest length where that helps the score, so nothing better is missed.
        """
        if len(self.best) < self.most:
            return False
        if self.early_stopping is True:
            return True
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.limit
        return self._score(running, length) <= self.best[-1].score

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self.length_penalty)


def _checked_penalty(value: object, limit: int) -> float:
    """A power that leaves numbers of all lengths. Raises ParameterError."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ParameterError(f"length_penalty must be a finite number, got {value!r}")
    penalty = float(value)
    try:
        largest = math.pow(limit, abs(penalty))
    except OverflowError:
        largest = math.inf
    if largest > 1e30:
        raise ParameterError(
            f"length_penalty is {value!r}: lengths of up to {limit} to that power are "
            f"no numbers to divide by; common are -2 to 2"
        )
    return penalty
