"""How long a step takes, learned from the steps just run."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np

STEPS = 64  # remembered
RECENT = 5  # steps whose median tells that the machine's speed has changed
# Before the steps tell: how a step's fixed part, a row and a key compare. With many
# rows of one kind only, the fixed part and the rows cannot be told apart; a row that
# is rather dear makes the first chunk rather small.
FIRST_GUESS = np.array([16.0, 1.0, 0.001])
ROUNDS = 8  # of reweighting
FITS = 3  # at most, each after another change of the speed was found


class Coefficients(NamedTuple):
    """Milliseconds of a step: fixed + per_row * rows + per_key * keys."""

    fixed: float
    per_row: float
    per_key: float


class StepCost:
    """ms = fixed + per_row * rows + per_key * keys, fitted to the last 64 steps.

    keys: the sum over the rows of their context's length, themselves included. Least
    squares of the relative errors, none of the three below 0; errors far beyond the
    usual count less (Huber, Robust estimation of a location parameter, 1964). What the
    steps leave open stays as it was. Where the machine's speed has changed, which three
    of the last 5 steps tell, the older ones count as if they had run at the new one.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS)
        self._shape = FIRST_GUESS
        self._fitted: Coefficients | None = None

    def add(self, rows: int, keys: int, ms: float) -> None:
        """A step of so many rows and keys took so long; a time of 0 says nothing."""
        if rows > 0 and 0 < ms < math.inf:
            self._steps.append((rows, keys, ms))
            self._fitted = None

    @property
    def coefficients(self) -> Coefficients | None:
        """As of now; None before the first step."""
        if self._fitted is None and self._steps:
            self._fitted = self._fit()
        return self._fitted

    def estimate(self, rows: int, keys: int) -> float | None:
        """Milliseconds of such a step; None before the first one."""
        known = self.coefficients
        if known is None:
            return None
        return known.fixed + known.per_row * rows + known.per_key * keys

    def rows_within(
        self, ms: float, context: int, rows: int = 0, keys: int = 0
    ) -> int | None:
        """Rows of one request that fit into ms beside `rows` rows over `keys` keys.

        context: tokens of that request before them. None before the first step.
        """
        base = self.estimate(rows, keys)
        known = self.coefficients
        if base is None or known is None:
            return None
        room = ms - base
        if room <= 0:
            return 0
        # n rows see n * context + n * (n + 1) / 2 keys: a n^2 + b n = room
        a = known.per_key / 2
        b = known.per_row + known.per_key * (context + 0.5)
        divisor = b + math.sqrt(b * b + 4 * a * room)
        most = float(1 << 30)
        if 2 * room >= most * divisor:
            return int(most)
        # to 1e-9: what fits exactly does
        return int(2 * room / divisor * (1 + 1e-9))

    def _fit(self) -> Coefficients:
        rows, keys, actual = np.array(self._steps).T
        of = np.stack([np.ones_like(rows), rows, keys], axis=1)
        guess = self._shape * _median(actual / (of @ self._shape))
        parts = of * guess  # [steps, 3], ms: the factors to be found are near 1
        for _ in range(FITS):
            factors = _factors(parts, actual)
            ratios = actual / np.maximum(parts @ factors, 1e-9)
            start, slower = _change(ratios)
            if not start:
                break
            actual[:start] /= slower
        found = guess * factors
        # never so small that it could not grow again
        least = FIRST_GUESS * (0.05 * _median(actual / (of @ FIRST_GUESS)))
        self._shape = np.maximum(found, least)
        return Coefficients(*found.tolist())


def _factors(parts: Any, actual: Any) -> Any:
    """The factors [3] by which parts [steps, 3] add up to the actual times."""
    factors = np.ones(3)
    for _ in range(ROUNDS):
        fitted = np.maximum(parts @ factors, 1e-9)
        errors = np.abs(actual / fitted - 1.0)
        spread = 1.4826 * _median(errors) + 1e-4
        huber = np.minimum(1.0, 1.345 * spread / np.maximum(errors, 1e-12))
        weights = huber / fitted**2
        # The guess counts as one more observation of each factor: 1 +- 2.
        pull = (spread / 2.0) ** 2
        weighted = parts.T * weights
        factors = _not_negative(
            weighted @ parts + pull * np.eye(3), weighted @ actual + pull
        )
    return factors


def _change(ratios: Any) -> tuple[int, float]:
    """The step at which the speed changed, and old by new ratio; (0, 1.0): it did not.

    Splits the logarithms where that explains most of their squares.
    """
    n = len(ratios)
    if n < 2 * RECENT:
        return 0, 1.0
    logs = np.clip(np.log(ratios), -1.0, 1.0)
    before = np.arange(1, n)
    sums = np.cumsum(logs)
    old, new = sums[:-1] / before, (sums[-1] - sums[:-1]) / (n - before)
    gains = (old - new) ** 2 * before * (n - before)
    at = RECENT - 1 + int(np.argmax(gains[RECENT - 1 : n - RECENT]))
    change = _median(logs[: at + 1]) - _median(logs[at + 1 :])
    noise = _median(np.abs(logs - np.where(np.arange(n) <= at, old[at], new[at])))
    if abs(change) < max(0.1, 3.0 * noise):
        return 0, 1.0
    return at + 1, float(np.exp(change))


def _median(values: Any) -> float:
    """numpy's own takes ten times as long for so few."""
    ordered = np.sort(values)
    middle = len(ordered) // 2
    return float(ordered[middle] + ordered[~middle]) / 2


def _not_negative(matrix: Any, vector: Any) -> Any:
    """The x >= 0 of the least x' M x - 2 v' x; the matrix M [3, 3] is definite."""
    best = np.linalg.solve(matrix, vector)
    if best.min() >= 0:
        return best
    best, least = np.zeros(3), 0.0
    for free in ([0, 1], [0, 2], [1, 2], [0], [1], [2]):
        x = np.zeros(3)
        x[free] = np.linalg.solve(matrix[free][:, free], vector[free])
        value = -float(vector @ x)  # what it is at a stationary point
        if value < least and x.min() >= 0:
            best, least = x, value
    return best
