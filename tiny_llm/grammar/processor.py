"""A logits processor that keeps one stream's output to a grammar."""

from __future__ import annotations

import mlx.core as mx

from ..errors import ParameterError, whole_number
from ..token_masks import apply_masks
from .matcher import Matcher


class GrammarProcessor:
    """For one output: (tokens [T], logits [1, V]) -> logits, -inf where not allowed.

    tokens are the prompt and the output so far; they are read on the host. A history
    that differs from the one before is taken back as far as needed, so retries and
    speculation work.

    matcher: from GrammarCompiler.compile; it is copied. prompt_length: how many of the
    tokens come before the output.
    """

    def __init__(self, matcher: Matcher, prompt_length: int) -> None:
        self.matcher = matcher.copy()
        self._prompt = whole_number("prompt_length", prompt_length, least=0)
        self._taken: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Raises GrammarError if the tokens after the prompt do not follow it."""
        if tokens.ndim != 1 or len(tokens) < self._prompt:
            raise ParameterError(
                f"tokens of shape {tokens.shape} do not hold the prompt of "
                f"{self._prompt} tokens"
            )
        output: list[int] = tokens[self._prompt :].tolist()  # type: ignore[assignment]
        same = 0
        for old, new in zip(self._taken, output, strict=False):
            if old != new:
                break
            same += 1
        self.matcher.rollback(len(self._taken) - same)
        del self._taken[same:]
        for token in output[same:]:
            self.matcher.advance(token)
            self._taken.append(token)
        return apply_masks(logits, [0], self.matcher.mask()[None])
