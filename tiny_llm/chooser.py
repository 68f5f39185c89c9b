"""From a row of logits to a token, as one request wants it: processors, sampler."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .sampling import LogitsProcessor, Sampler, check_logits, checked_choice


class Chooser:
    """Chooses the tokens of one request, one row of logits after the other.

    A processor gets (tokens int32 [T]: the prompt and all chosen so far, logits [1, V])
    and returns logits [1, V]; they are called in order. Then the sampler gets
    log-probabilities [1, V] in float32; without one it is argmax. Tokens may be lazy.
    """

    def __init__(
        self,
        sampler: Sampler | None,
        processors: Sequence[LogitsProcessor],
        prompt: Sequence[int],
        vocabulary: int,
    ) -> None:
        self.sampler, self.processors = sampler, processors
        self.vocabulary = vocabulary
        self._tokens = mx.array(list(prompt), dtype=mx.int32) if processors else None

    @property
    def is_argmax(self) -> bool:
        """Whether the likeliest token is chosen, whatever came before."""
        return self.sampler is None and not self.processors

    @property
    def state(self) -> list[mx.array]:
        """What is to be computed along with the token chosen."""
        return [] if self._tokens is None else [self._tokens]

    def add(self, token: mx.array) -> None:
        """The next token of the history, [1]."""
        if self._tokens is not None:
            token = self.within(token).astype(mx.int32)
            self._tokens = mx.concatenate([self._tokens, token])

    def within(self, ids: mx.array) -> mx.array:
        """The ids; a bad one of the caller's sampler must not read beyond a table."""
        if self.sampler is None:
            return ids
        return mx.clip(ids, 0, self.vocabulary - 1)

    def choose(self, logits: mx.array) -> mx.array:
        """The id [1] that follows all tokens added, from logits [1, V], lazily.

        Raises ParameterError for what a processor or sampler must not return, and
        whatever they raise.
        """
        shape = logits.shape
        for number, processor in enumerate(self.processors):
            assert self._tokens is not None
            logits = processor(self._tokens, logits)
            check_logits(logits, number, shape)
        if self.sampler is None:
            return mx.argmax(logits, axis=-1)
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return checked_choice(self.sampler(logprobs), rows=1)
