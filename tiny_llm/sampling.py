"""Log-probabilities -> token ids, on the device, row by row.

A sampler is any callable from log-probabilities [B, V] to ids [B]; `make_sampler`
builds the usual ones. The filters and their order are those of transformers' logits
processors: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

from .errors import ParameterError
from .sampling_checks import check_sampling

Sampler = Callable[[mx.array], mx.array]


def make_sampler(
    temperature: float = 1.0,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
) -> Sampler:
    """A sampler: log-probabilities [B, V] -> ids [B].

    temperature: 0 is greedy, and so are values below 1e-4. top_k: keep the k likeliest
    tokens and those that tie with the k-th; 0 or -1: all. top_p: keep the fewest
    likeliest tokens whose probabilities sum to at least p; at least one. min_p: keep
    tokens at least min_p times as likely as the likeliest. seed: the same seed gives
    the same tokens; None takes MLX's global random state.

    Raises ParameterError for a value that cannot be used.
    """
    check_sampling(temperature, top_k, top_p, min_p, seed)
    if temperature < 1e-4:
        return greedy
    keys = None if seed is None else SeededKeys(seed)

    def sample(logprobs: mx.array) -> mx.array:
        kept = filter_logprobs(
            logprobs, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        return mx.random.categorical(kept, key=None if keys is None else keys.next())

    return sample


def greedy(logprobs: mx.array) -> mx.array:
    """The likeliest token of each row; the lowest id among equals."""
    return mx.argmax(logprobs, axis=-1)


def filter_logprobs(
    logprobs: mx.array,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> mx.array:
    """Scaled log-probabilities [B, V], -inf where a filter drops the token.

    Not normalised. At least the likeliest token of each row is kept.
    """
    x = logprobs.astype(mx.float32)
    if temperature != 1.0:
        x = x * (1.0 / temperature)
    vocabulary = x.shape[-1]
    if 0 < top_k < vocabulary:
        kth = mx.min(mx.topk(x, top_k, axis=-1), axis=-1, keepdims=True)
        x = mx.where(x < kth, -mx.inf, x)
    if top_p < 1.0:
        x = _top_p(x, top_p)
    if min_p > 0.0:
        top = mx.max(x, axis=-1, keepdims=True)
        x = mx.where(x < top + math.log(min_p), -mx.inf, x)
    return x


def _top_p(x: mx.array, top_p: float) -> mx.array:
    """Drop the least likely tokens whose probabilities sum to at most 1 - top_p."""
    order = mx.argsort(x, axis=-1)  # ascending
    probs = mx.softmax(mx.take_along_axis(x, order, axis=-1), axis=-1)
    dropped = mx.cumsum(probs, axis=-1) <= 1.0 - top_p
    last = mx.arange(x.shape[-1]) == x.shape[-1] - 1
    dropped = dropped & ~last
    return mx.where(
        mx.put_along_axis(mx.zeros_like(dropped), order, dropped, axis=-1), -mx.inf, x
    )


class SeededKeys:
    """The random keys of one seeded stream: the same seed, the same keys."""

    def __init__(self, seed: int) -> None:
        self._first = self._state = self._key = mx.random.key(seed)
        self._place = -1

    def at(self, place: int) -> mx.array:
        """The key of the place-th token, from 0 on; going back takes as many steps."""
        if place < self._place:
            self._state, self._place = self._first, -1
        while self._place < place:
            state, key = mx.random.split(self._state)
            # (in one line: Ctrl-C may come at any moment)
            self._state, self._key, self._place = state, key, self._place + 1
        return self._key

    def next(self) -> mx.array:
        """The key after the last one."""
        return self.at(self._place + 1)


def checked_choice(ids: object, rows: int) -> mx.array:
    """What a sampler returned, if it is ids [rows]. Raises ParameterError."""
    if (
        not isinstance(ids, mx.array)
        or ids.shape != (rows,)
        or not mx.issubdtype(ids.dtype, mx.integer)
    ):
        found = f"{ids.dtype} {ids.shape}" if isinstance(ids, mx.array) else ids
        raise ParameterError(
            f"the sampler returned {found}; an array of one integer per row of its "
            f"input [{rows}, V] is needed"
        )
    return ids
