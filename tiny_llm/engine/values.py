"""What a step has computed, as numbers of Python."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..errors import RequestError
from .request import Request
from .runner import Launched


class Logprobs(NamedTuple):
    """Of a token: its log-probability, and the likeliest (id, log-probability)s."""

    own: float
    likeliest: list[tuple[int, float]]


class Values(NamedTuple):
    """Of each row that sampled: see Sampled."""

    tokens: list[int]
    tops: list[float]
    scores: list[float]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    errors: dict[int, BaseException]

    def problem_of(self, place: int, vocabulary: int) -> BaseException | None:
        """What is wrong with the token that the place-th row has chosen."""
        if place in self.errors:
            return self.errors[place]
        if not 0 <= self.tokens[place] < vocabulary:
            return RequestError(
                f"the sampler chose an id that is not in the vocabulary of {vocabulary}"
            )
        if self.scores and self.scores[place] == -math.inf:
            return RequestError(
                "no token is allowed: bad_words, min_tokens, the grammar or a logits "
                "processor forbid all that are left"
            )
        return None

    def logprobs_of(self, place: int, request: Request) -> Logprobs | None:
        """Those of the place-th row, if its request wants them."""
        if not request.params.logprobs:
            return None
        likeliest = []
        if request.params.top_logprobs:
            pairs = zip(self.top_ids[place], self.top_logprobs[place], strict=True)
            likeliest = [(id, value) for id, value in pairs if value > -math.inf]
        return Logprobs(self.logprobs[place], likeliest[: request.params.top_logprobs])


def values_of(launched: Launched) -> Values:
    """Read a step; the log-probabilities of prompts go to their requests."""
    if launched.prompts is not None:
        own: Any = launched.prompts.own.tolist()
        ids: Any = launched.prompts.top_ids.tolist()
        shares: Any = launched.prompts.top_logprobs.tolist()
        for i, (request, token) in enumerate(launched.prompts.places):
            count = request.params.prompt_logprobs or 0
            likeliest = list(zip(ids[i], shares[i], strict=True))[:count]
            request.prompt_logprobs[token] = Logprobs(own[i], likeliest)
    if launched.sampled is None:
        return Values([], [], [], [], [], [], {})
    arrays: Any = launched.sampled[:6]
    found: Any = [[] if x is None else x.tolist() for x in arrays]
    return Values(*found, launched.sampled.errors)  # type: ignore[call-arg]
