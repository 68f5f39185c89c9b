"""Logits processors: callables from (tokens [T], logits [1, V]) to logits [1, V]."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..errors import ParameterError
from .params import SamplingParams
from .rows import Row, adjusted
from .rules import Rules

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


def make_logits_processors(
    *,
    logit_bias: Mapping[int, float] | None = None,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    penalty_window: int | None = None,
    dry_multiplier: float = 0.0,
    dry_base: float = 1.75,
    dry_allowed_length: int = 2,
    dry_window: int | None = None,
    dry_sequence_breakers: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[LogitsProcessor]:
    """What changes logits before a token is chosen; for stream_generate.

    The arguments are those of SamplingParams, in the same order of application;
    breakers and bad words are token ids here. [] if nothing is asked for. Each stream
    needs processors of its own.

    Raises ParameterError.
    """
    params = SamplingParams(
        logit_bias=logit_bias or {},
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        penalty_window=penalty_window,
        dry_multiplier=dry_multiplier,
        dry_base=dry_base,
        dry_allowed_length=dry_allowed_length,
        dry_window=dry_window,
        dry_sequence_breakers=tuple(dry_sequence_breakers),
        bad_words=tuple(tuple(word) for word in bad_words),
    )
    breakers: Any = params.dry_sequence_breakers
    words: Any = params.bad_words
    for name, items in (("dry_sequence_breakers", breakers), ("bad_words", words)):
        if any(isinstance(item, str) for item in items):
            raise ParameterError(f"{name} must be token ids here, got {items!r:.60}")
    rules = Rules(params, bad_words=words, breakers=breakers)
    if not (rules.looks_back or params.logit_bias or words):
        return []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        vocabulary = logits.shape[1]
        used = [*params.logit_bias, *(token for word in words for token in word)]
        if max(used, default=0) >= vocabulary:
            raise ParameterError(
                f"logit_bias or bad_words has the token id {max(used)}, which is not "
                f"in the vocabulary of {vocabulary}"
            )
        context: Any = tokens.tolist() if rules.looks_back else []
        return adjusted(logits, [Row(rules, 0, context)], tokens[-1:], {})

    return [process]
