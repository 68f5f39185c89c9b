"""Random numbers by seed and place, the same wherever and whenever they are drawn.

A token's number depends on its request's seed and on its place in the answer, and on
nothing else: not on the batch, on preemption or on speculation. The mixing function is
SplitMix64's (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, place: int, stream: int = 0) -> float:
    """A number in [0, 1), one of 2^24, exact in float32.

    stream: of several numbers for the same place.
    """
    mixed = _mix(_mix(seed + _GOLDEN * (stream + 1)) + _GOLDEN * (place + 1))
    return (mixed >> 40) * 2.0**-24


def other_seed(seed: int, number: int) -> int:
    """The seed of the number-th answer to the same prompt; that of answer 0 is seed."""
    return seed if number == 0 else _mix(seed + _GOLDEN * number)


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
