"""Stop strings: text that ends an answer, found as the pieces of it come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .errors import ParameterError

MAX_STOPS = 16
MAX_CHARACTERS = 1000  # of one stop string


class Found(NamedTuple):
    """What may be shown now, and the stop string that ended the text (or None)."""

    text: str
    stop: str | None


class StopStrings:
    """Looks for stop strings in one stream of text, whatever its pieces are.

    The text ends before the stop string that is complete first; of those that end at
    the same character, before the longest. So it does not depend on how the text is
    cut into pieces, and is known as soon as it can be. Held back is what may still
    become a stop: the longest end of the text that a stop string begins with.
    """

    def __init__(self, stops: str | Sequence[str]) -> None:
        """stops: see checked_stops, which raises ParameterError."""
        checked = checked_stops(stops)
        # One that holds another before its last character is never complete first:
        # nothing need be held back for it.
        self._matches = [
            _Match(stop)
            for stop in dict.fromkeys(checked)
            if not any(other in stop[:-1] for other in checked)
        ]
        self._held = ""
        self.stop: str | None = None

    def add(self, piece: str) -> Found:
        """Take the next piece of text, of any length.

        Once a stop string was found, text is "" and stop is that string.
        """
        if self.stop is not None:
            return Found("", self.stop)
        if not self._matches:
            return Found(piece, None)
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            complete = [m.stop for m in self._matches if m.advance(character)]
            if complete:
                self.stop, self._held = max(complete, key=len), ""
                return Found(text[: end - len(self.stop)], self.stop)
        shown = len(text) - max(match.length for match in self._matches)
        self._held = text[shown:]
        return Found(text[:shown], None)

    def finish(self) -> str:
        """The text that was held back: no more comes, so it is no stop string."""
        held, self._held, self._matches = self._held, "", []
        return held


class _Match:
    """How much of one stop string the text ends with: Knuth, Morris and Pratt 1977."""

    def __init__(self, stop: str) -> None:
        self.stop, self.length = stop, 0
        # borders[n]: the longest beginning of stop[: n + 1], itself excluded, that it
        # also ends with
        self._borders = [0]
        length = 0
        for character in stop[1:]:
            length = self._longer(length, character)
            self._borders.append(length)

    def advance(self, character: str) -> bool:
        """Whether the stop string is complete with this character of the text."""
        self.length = self._longer(self.length, character)
        return self.length == len(self.stop)

    def _longer(self, length: int, character: str) -> int:
        """The longest match after one more character, from a match of `length`."""
        while length and self.stop[length] != character:
            length = self._borders[length - 1]
        return length + (self.stop[length] == character)


def checked_stops(value: Any, name: str = "stop") -> tuple[str, ...]:
    """Stop strings: one, or a sequence of at most 16, each of 1 to 1000 characters.

    Raises ParameterError, naming the argument.
    """
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, Sequence) or isinstance(stops, bytes | bytearray):
        raise ParameterError(
            f"{name} must be a string or a list of strings, got {value!r:.60}"
        )
    if len(stops) > MAX_STOPS:
        raise ParameterError(
            f"{name} has {len(stops)} strings; at most {MAX_STOPS} are allowed"
        )
    for stop in stops:
        if not isinstance(stop, str):
            raise ParameterError(f"{name} holds {stop!r:.60}, which is no string")
        if not stop:
            raise ParameterError(
                f'{name} holds "", which every text contains; leave it out to stop '
                f"nowhere"
            )
        if len(stop) > MAX_CHARACTERS:
            raise ParameterError(
                f"{name} holds a string of {len(stop)} characters; at most "
                f"{MAX_CHARACTERS} are allowed"
            )
    return tuple(stops)
