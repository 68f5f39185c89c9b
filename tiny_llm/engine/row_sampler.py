"""From the logits of a step to a token id for each row, every row by its own rules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..sampling import SeededKeys, checked_choice, filter_logprobs
from .request import Request


class Sampled(NamedTuple):
    """What a step chose, lazily.

    tokens: int32 [M]; tops: float [M], the largest logit of each row (NaN if any is);
    logprobs: float [M], of the chosen tokens, if any row wants them. errors: row ->
    what its own sampler raised.
    """

    tokens: mx.array
    tops: mx.array
    logprobs: mx.array | None
    errors: dict[int, BaseException]


def sample(
    logits: mx.array, requests: Sequence[Request], places: Sequence[int]
) -> Sampled:
    """Choose for each row of logits [M, V] as its request wants it.

    places: of the chosen tokens in their answers, from 0 on.
    """
    if any(request.params.sampler is not None for request in requests):
        mx.eval(logits)
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    errors: dict[int, BaseException] = {}
    rows: list[int] = []
    chosen: list[mx.array] = []
    for row, request in enumerate(requests):
        if _is_plain(request):
            continue
        try:
            ids = _choose(logits[row : row + 1], request, places[row])
            if request.params.sampler is not None:
                # The caller's own: what it fails at must not be in the step's graph.
                # (That is waited for, so such a step is not pipelined.)
                mx.eval(ids)
            chosen.append(ids)
            rows.append(row)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the caller's sampler, sys.exit() too
            errors[row] = error
    if rows:
        tokens[mx.array(rows)] = mx.concatenate(chosen)
    logprobs = None
    if any(request.params.logprobs for request in requests):
        own = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        own = own.astype(mx.float32)
        logprobs = own - mx.logsumexp(logits.astype(mx.float32), axis=-1)
    return Sampled(tokens, mx.max(logits, axis=-1), logprobs, errors)


def _is_plain(request: Request) -> bool:
    """Whether argmax is all there is to it."""
    params = request.params
    return (
        params.temperature < 1e-4 and params.sampler is None and not params.logit_bias
    )


def _choose(logits: mx.array, request: Request, place: int) -> mx.array:
    """The id, int32 [1], of one row of logits [1, V]."""
    params = request.params
    logits = logits.astype(mx.float32)
    if params.logit_bias:
        ids = mx.array(list(params.logit_bias))
        logits[:, ids] = logits[:, ids] + mx.array(list(params.logit_bias.values()))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if params.sampler is not None:
        chosen = checked_choice(params.sampler(logprobs), rows=1).astype(mx.int64)
        # (an id out of range is told when it is read; it must not be looked up before)
        good = (chosen >= 0) & (chosen < logits.shape[-1])
        return mx.where(good, chosen, -1).astype(mx.int32)
    if params.temperature < 1e-4:
        return mx.argmax(logprobs, axis=-1).astype(mx.int32)
    kept = filter_logprobs(
        logprobs,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
    # the n-th token of a request takes the n-th key of its seed, whenever it is drawn
    chosen = mx.random.categorical(kept, key=_keys(request).at(place))
    return chosen.astype(mx.int32)


def _keys(request: Request) -> SeededKeys:
    keys: SeededKeys | None = request.keys
    if keys is None:
        seed = request.params.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        request.keys = keys = SeededKeys(seed)
    return keys
