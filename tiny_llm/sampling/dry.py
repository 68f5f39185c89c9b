"""DRY: tokens that would continue a repetition are made less likely.

As its author p-e-w published it in 2024 (text-generation-webui, pull request 5677).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_LONGEST = 512  # of repetitions: the penalty of such a one forbids the token anyway
_MOST = 1e4


def dry_penalties(
    tokens: Sequence[int],
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    window: int | None = None,
    breakers: Collection[int] = (),
) -> dict[int, float]:
    """Token id -> what is taken off its logit.

    If the last n tokens came before, n >= allowed_length, the token that followed them
    there gets multiplier * base^(n - allowed_length), n the largest such number. A
    repetition does not go across a breaker.
    """
    context = list(tokens if window is None else tokens[len(tokens) - window :])
    if window is not None and window >= len(tokens):
        context = list(tokens)
    places = _matches(context, allowed_length)
    limit = _since_breaker(context, breakers) if places else 0
    if limit < allowed_length:
        return {}
    longest: dict[int, int] = {}
    for place in places:
        length = allowed_length
        while length < min(limit, place) and (
            context[place - 1 - length] == context[-1 - length]
        ):
            length += 1
        token = context[place]
        if token not in breakers:
            longest[token] = max(longest.get(token, 0), length)
    return {
        token: min(multiplier * _power(base, length - allowed_length), _MOST)
        for token, length in longest.items()
    }


def _since_breaker(context: list[int], breakers: Collection[int]) -> int:
    """How long a repetition can be: the tokens after the last breaker."""
    most = min(len(context), _LONGEST)
    newest = reversed(context[len(context) - most :])
    return next((n for n, token in enumerate(newest) if token in breakers), most)


def _matches(context: list[int], length: int) -> list[int]:
    """Places whose `length` tokens before are the context's last ones."""
    if len(context) <= length:
        return []
    last = context[-1]
    tail = context[len(context) - length :]
    found: list[int] = []
    place = len(context) - 1
    # (index() runs in C: most contexts hold the last token only a few times)
    start = length - 1
    while True:
        try:
            start = context.index(last, start, place)
        except ValueError:
            return found
        if context[start - length + 1 : start + 1] == tail:
            found.append(start + 1)
        start += 1


def _power(base: float, exponent: int) -> float:
    try:
        return base**exponent
    except OverflowError:
        return _MOST
