"""How metal_kernels.py times: all ways in turn, many calls in one evaluation."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import mlx.core as mx
from metal_ways import Problem, Way

from tiny_llm.errors import KernelError

MOST_CALLS = 200  # in one evaluation


class Outcome(NamedTuple):
    """error: None where the way refused. problem: why it was not timed."""

    error: float | None
    seconds: list[float]  # a call, in each round
    problem: str | None = None

    @property
    def median(self) -> float:
        """Seconds of a call."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range of the rounds / median."""
        if len(self.seconds) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / middle


class Effort(NamedTuple):
    """rounds; target: seconds that one evaluation takes at least; bytes: at hand."""

    rounds: int
    target: float
    working_set: int
    memory: int


def seconds(way: Way, calls: int) -> float:
    """Of one call, when so many are evaluated at once."""
    built = way.build(calls)
    start = time.perf_counter()
    mx.eval(built)
    return (time.perf_counter() - start) / calls


def calls_for(way: Way, effort: Effort) -> int:
    """How many calls an evaluation needs to take as long as it should."""
    most = MOST_CALLS
    if way.extra:  # (an evaluation may hold what all its calls gather)
        most = max(1, min(most, effort.memory // 2 // way.extra))
    few = min(2, most)
    seconds(way, few)  # warms up
    return max(few, min(most, round(effort.target / max(seconds(way, few), 1e-9))))


def check(way: Way, tolerance: float) -> Outcome:
    """Its error, before it is timed."""
    try:
        error = way.error()
    except (KernelError, RuntimeError) as reason:
        return Outcome(None, [], " ".join(str(reason).split())[:200])
    if error <= tolerance:  # (not so for NaN)
        return Outcome(error, [])
    return Outcome(error, [], f"WRONG by {error:.2g}")


def measure(found: Problem, effort: Effort) -> dict[str, Outcome]:
    """All ways in turn, round after round; those that are wrong are left out."""
    outcomes = {way.name: check(way, found.tolerance) for way in found.ways}
    right = [way for way in found.ways if outcomes[way.name].problem is None]
    calls = {way.name: calls_for(way, effort) for way in right}
    for _ in range(effort.rounds):
        for way in right:
            outcomes[way.name].seconds.append(seconds(way, calls[way.name]))
    return outcomes


def least_launch() -> float:
    """Seconds of the least that can be launched: 1 is added to one number."""

    def build(n: int) -> list[mx.array]:
        x = mx.zeros(1)
        for _ in range(n):
            x = x + 1
        return [x]

    way = Way("", build, lambda: 0.0)
    return statistics.median(seconds(way, MOST_CALLS) for _ in range(5))


def copy_bandwidth(size: int) -> float:
    """Bytes/s, read and written, when 1 is added to all of `size` bytes."""
    x = mx.zeros(size // 4)
    mx.eval(x)

    def build(n: int) -> list[mx.array]:
        y = x
        for _ in range(n):
            y = y + 1
        return [y]

    way = Way("", build, lambda: 0.0)
    return 2 * size / statistics.median(seconds(way, 4) for _ in range(5))
