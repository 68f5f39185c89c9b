"""What sampling parameters may be; without mlx, for those who only carry them."""

from __future__ import annotations

import math

from .errors import ParameterError, whole_number


def check_sampling(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int | None
) -> None:
    """Raise ParameterError for the first value that cannot be used."""
    _number("temperature", temperature, most=math.inf)
    _number("top_p", top_p, most=1.0)
    _number("min_p", min_p, most=1.0)
    whole_number("top_k", top_k, least=-1)
    if isinstance(top_k, bool) or isinstance(seed, bool):
        raise ParameterError("top_k and seed must be whole numbers, not a truth value")
    if seed is not None and whole_number("seed", seed, least=0) >= 1 << 64:
        raise ParameterError(f"seed must be below 2^64, got {seed}")


def is_number(value: object) -> bool:
    """Whether it is a finite number that a float can hold, and no truth value."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of more than 308 digits
        return False


def _number(name: str, value: float, *, most: float) -> None:
    if not (is_number(value) and 0 <= value <= most):
        limit = "0 or more" if most == math.inf else f"within 0 .. {most:g}"
        raise ParameterError(f"{name} must be a number {limit}, got {value!r:.60}")
