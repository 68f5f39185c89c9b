"""What sampling parameters may be; without mlx, for those who only carry them."""

from __future__ import annotations

import math

from ..errors import ParameterError, whole_number


def check_filters(
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    top_n_sigma: float = 0.0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    seed: int | None = None,
) -> None:
    """Raise ParameterError for the first value that cannot be used."""
    check_number("temperature", temperature, 0, math.inf)
    check_number("top_p", top_p, 0, 1)
    check_number("min_p", min_p, 0, 1)
    check_number("typical_p", typical_p, 0, 1)
    check_number("top_n_sigma", top_n_sigma, 0, math.inf)
    check_number("xtc_probability", xtc_probability, 0, 1)
    check_number("xtc_threshold", xtc_threshold, 0, 1)
    count("top_k", top_k, least=-1)
    if seed is not None and count("seed", seed, least=0) >= 1 << 64:
        raise ParameterError(f"seed must be below 2^64, got {seed}")


def check_penalties(
    *,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    penalty_window: int | None = None,
    dry_multiplier: float = 0.0,
    dry_base: float = 1.75,
    dry_allowed_length: int = 2,
    dry_window: int | None = None,
) -> None:
    """Raise ParameterError for the first value that cannot be used."""
    # (1e-3: logits divided by less would overflow half types; 0 would be a division)
    check_number("repetition_penalty", repetition_penalty, 1e-3, 1e3)
    check_number("frequency_penalty", frequency_penalty, -100, 100)
    check_number("presence_penalty", presence_penalty, -100, 100)
    check_number("dry_multiplier", dry_multiplier, 0, 100)
    check_number("dry_base", dry_base, 1, 100)
    count("dry_allowed_length", dry_allowed_length, least=1)
    for name, window in (
        ("penalty_window", penalty_window),
        ("dry_window", dry_window),
    ):
        if window is not None:
            count(name, window, least=1)


def is_number(value: object) -> bool:
    """Whether it is a finite number that a float can hold, and no truth value."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of more than 308 digits
        return False


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Raise ParameterError unless it is a number within least .. most."""
    if is_number(value) and least <= value <= most:  # type: ignore[operator]
        return
    limit = f"within {least:g} .. {most:g}"
    if most == math.inf:
        limit = f"{least:g} or more"
    raise ParameterError(f"{name} must be a number {limit}, got {value!r:.60}")


def truth_value(name: str, value: object) -> None:
    """Raise ParameterError unless it is True or False."""
    if not isinstance(value, bool):
        raise ParameterError(f"{name} must be True or False, got {value!r:.60}")


def count(name: str, value: object, *, least: int) -> int:
    """The value as a whole number of at least `least`. Raises ParameterError."""
    if isinstance(value, bool):
        raise ParameterError(f"{name} must be a whole number, not a truth value")
    return whole_number(name, value, least=least)
