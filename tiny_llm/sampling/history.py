"""What penalties know of the tokens so far: plain Python and NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """How often each token is in a growing context."""

    def __init__(self) -> None:
        self._ids = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.int32)
        self._place: dict[int, int] = {}
        self._length = 0  # tokens counted

    def table(
        self, tokens: Sequence[int], window: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ids among the last `window` tokens, and how often each comes.

        int32 [U] each. The tokens counted at the last call are the first ones of
        these, or there are fewer now.
        """
        if window is not None and window < len(tokens):
            return _counted(tokens[len(tokens) - window :])
        if len(tokens) < self._length:
            self.__init__()  # type: ignore[misc]  # some were taken back
        for token in tokens[self._length :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, 0 * self._counts])
            self._ids[place] = token
            self._counts[place] += 1
        self._length = len(tokens)
        known = len(self._place)
        return self._ids[:known].copy(), self._counts[:known].copy()


def with_more(
    table: tuple[np.ndarray, np.ndarray], tokens: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """A table with a few more tokens; the first one is left as it is."""
    ids, counts = table
    if not tokens:
        return table
    more = _counted(tokens)
    counts = counts.copy()
    there = np.isin(more[0], ids)
    for token, count in zip(more[0][there], more[1][there], strict=True):
        counts[ids == token] += count
    new_ids, new_counts = more[0][~there], more[1][~there]
    return np.concatenate([ids, new_ids]), np.concatenate([counts, new_counts])


def _counted(tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    ids, counts = np.unique(np.array(tokens, np.int32), return_counts=True)
    return ids, counts.astype(np.int32)
