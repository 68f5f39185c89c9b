"""How many tokens to guess: what was right lately against what a pass costs."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

# Steps of so many rows, in times of a step of one, until they are measured. (SmolLM2
# in float32 on two Linux cores.)
_ROWS = (1, 2, 3, 4, 8, 16, 32, 64)
_TIMES = (1.0, 1.3, 1.4, 1.9, 2.6, 3.1, 4.3, 6.7)
_NEW = 0.25  # weight of a new measurement
_DRIFT = 0.005  # per plain step: an old measurement may have been an accident

_MEMORY = 0.95  # weight of what was observed one observation ago
_PRIOR = 2.0  # observations that the first belief counts for
_GAIN = 0.05  # more than plain decoding must be expected, of a lone request
_PAUSE, _LONGEST_PAUSE = 16, 512  # plain steps
_PROBE = 4  # tokens
_SELDOM = 0.02  # that all are right: more guesses gain nothing


class StepCosts:
    """Seconds of a step by its number of rows: measured, or judged by the nearest.

    Sizes are measured in classes (1, 2, 3, 4, to 8, to 16, ...). The first step of each
    class is left out: something may have been compiled in it.
    """

    def __init__(self) -> None:
        self._pace: dict[int, float] = {}  # class -> seconds of one row, by the table
        self._met: set[int] = set()
        self._nearest: dict[int, float] = {}  # class -> the pace to judge it by
        self.draft_seconds = 0.0  # of one guessed token
        self._drafted = False

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        kind = bisect_left(_ROWS, rows)
        if kind not in self._met:
            self._met.add(kind)
            return
        pace = seconds / _times(rows)
        self._pace[kind] = _towards(self._pace.get(kind, pace), pace, _NEW)
        self._nearest = {}
        if rows == 1:
            for other, old in self._pace.items():
                self._pace[other] = _towards(old, self._pace[kind], _DRIFT)

    def observe_draft(self, tokens: int, seconds: float) -> None:
        """So many tokens were guessed in so long."""
        if not self._drafted:
            self._drafted = True
            return
        each = seconds / tokens
        self.draft_seconds = _towards(self.draft_seconds or each, each, _NEW)

    def estimate(self, rows: int) -> float:
        """Seconds of a step; where none was measured, in units of one row."""
        if not self._pace:
            return _times(rows)
        kind = bisect_left(_ROWS, rows)
        if kind not in self._nearest:
            nearest = min(self._pace, key=lambda other: abs(other - kind))
            self._nearest[kind] = self._pace[nearest]
        return self._nearest[kind] * _times(rows)


class DraftLength:
    """Chooses the number of guesses of one request.

    For each level of evidence it estimates how likely a guessed token is right, given
    that those before it were; recent ones count more. Each right token lifts the next
    one by a level. With these p the expected tokens of a pass are
    1 + p1 + p1 p2 + ... (Leviathan et al. 2023, equation 1, for p that differ), and the
    number is that of the most tokens per second; 0 if that is below 1.05 times plain
    decoding. Then guesses that are free are judged without a pass. Of others a few are
    tried after 16 plain steps, and after twice as many each time that it was in vain.
    """

    def __init__(
        self, levels: int = 1, *, free: bool = False, costs: StepCosts | None = None
    ) -> None:
        """levels: kinds of evidence. free: guesses are judged without a pass too."""
        self.levels, self.free = levels, free
        self.costs = StepCosts() if costs is None else costs
        self._plain, self._pause = 0, _PAUSE
        self._begin()

    def _begin(self) -> None:
        steps = max(self.levels - 1, 1)
        self._first = [0.7] * self.levels
        if self.levels > 1:
            self._first = [0.4 + 0.5 * level / steps for level in range(self.levels)]
        self._right, self._seen = [0.0] * self.levels, [0.0] * self.levels

    def likelihood(self, level: int) -> float:
        """How likely the next guessed token is right."""
        level = min(level, self.levels - 1)
        right = self._right[level] + _PRIOR * self._first[level]
        return right / (self._seen[level] + _PRIOR)

    def choose(self, level: int, most: int, beside: int = 0) -> int:
        """The number of tokens to guess with this evidence, 0 to most.

        beside: rows of other requests in the same step, of a token each.
        """
        expected, all_right = 1.0 + beside, 1.0
        gain = 1.0 + _GAIN / expected
        best, number = gain * expected / self.costs.estimate(1 + beside), 0
        for k in range(1, most + 1):
            all_right *= self.likelihood(level + k - 1)
            if all_right < _SELDOM:
                break
            expected += all_right
            seconds = self.costs.estimate(beside + k + 1)
            seconds += k * self.costs.draft_seconds
            if expected / seconds > best:
                best, number = expected / seconds, k
        if number == 0 and not self.free and self._plain >= self._pause:
            return min(_PROBE, most)
        return number

    def observe(self, level: int, accepted: int, drafted: int) -> None:
        """Of the guesses made with this evidence so many were right."""
        for k in range(min(accepted + 1, drafted)):
            at = min(level + k, self.levels - 1)
            self._right[at] = _MEMORY * self._right[at] + (k < accepted)
            self._seen[at] = _MEMORY * self._seen[at] + 1.0
        if self._plain >= self._pause:  # they were tried, after a pause
            if accepted == drafted:
                self._pause = _PAUSE
                self._begin()
            else:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._plain = 0

    def skipped(self) -> None:
        """A token came without guesses for it."""
        self._plain += 1


@cache
def _times(rows: int) -> float:
    at = min(max(bisect_left(_ROWS, rows), 1), len(_ROWS) - 1)
    (a, b), (x, y) = _ROWS[at - 1 : at + 1], _TIMES[at - 1 : at + 1]
    return x + (y - x) * (rows - a) / (b - a)


def _towards(old: float, new: float, weight: float) -> float:
    return old + weight * (new - old)
