"""Samplers: callables from log-probabilities [B, V] to token ids [B]."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..errors import ParameterError
from .checks import check_filters
from .filters import Filters
from .random_numbers import uniform
from .select import select

Sampler = Callable[[mx.array], mx.array]


def make_sampler(
    temperature: float = 1.0,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    top_n_sigma: float = 0.0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    seed: int | None = None,
) -> Sampler:
    """A sampler: log-probabilities [B, V] -> ids [B].

    temperature: 0 is greedy, and so are values below 1e-4. The filters, in the order in
    which they are applied: top_n_sigma: keep tokens within so many standard deviations
    of the largest score; 0: all. top_k: keep the k likeliest tokens and those that tie
    with the k-th; 0 or -1: all. top_p: keep the fewest likeliest tokens whose
    probabilities sum to at least p; at least one. min_p: keep tokens at least min_p
    times as likely as the likeliest. typical_p: keep the tokens whose surprise is
    nearest to the mean, until they have that probability. xtc_probability,
    xtc_threshold: so often, drop all tokens that are likelier than the threshold but
    the least likely of them. seed: the same seed gives the same tokens; None takes
    MLX's global random state.

    Raises ParameterError for a value that cannot be used.
    """
    check_filters(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        top_n_sigma=top_n_sigma,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        seed=seed,
    )
    if temperature < 1e-4:
        return greedy
    filters = Filters(
        temperature, int(top_k), top_p, min_p, typical_p, top_n_sigma, xtc_threshold
    )
    draws = _Draws(seed)

    def sample(logprobs: mx.array) -> mx.array:
        rows, place = logprobs.shape[0], draws.next()
        exclude = [
            xtc_probability > 0 and draws.one(place, row, 1) < xtc_probability
            for row in range(rows)
        ]
        return select(
            logprobs,
            [filters if on else filters._replace(xtc_threshold=1.0) for on in exclude],
            draws.several(place, rows),
        ).tokens

    return sample


def greedy(logprobs: mx.array) -> mx.array:
    """The likeliest token of each row; the lowest id among equals."""
    return mx.argmax(logprobs, axis=-1)


class _Draws:
    """The random numbers of a sampler: by place and row, or of MLX's global state."""

    def __init__(self, seed: int | None) -> None:
        self.seed, self.place = None if seed is None else int(seed), -1

    def next(self) -> int:
        self.place += 1
        return self.place

    def one(self, place: int, row: int, stream: int) -> float:
        if self.seed is None:
            return float(mx.random.uniform().item())  # type: ignore[arg-type]
        return uniform(self.seed, place, 2 * row + stream)

    def several(self, place: int, rows: int) -> mx.array:
        if self.seed is None:
            return mx.random.uniform(shape=(rows,))
        return mx.array([self.one(place, row, 0) for row in range(rows)])


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


def check_logits(logits: object, number: int, shape: tuple[int, ...]) -> None:
    """Raise ParameterError for what are no logits of that shape."""
    if (
        not isinstance(logits, mx.array)
        or logits.shape != shape
        or not mx.issubdtype(logits.dtype, mx.floating)
    ):
        is_array = isinstance(logits, mx.array)
        found = f"{logits.dtype} {logits.shape}" if is_array else f"{logits!r:.60}"  # type: ignore[attr-defined]
        raise ParameterError(
            f"logits_processors[{number}] returned {found}; logits {shape}, as it got "
            f"them, are needed"
        )
