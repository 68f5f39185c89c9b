"""Token ids of an answer to what a reader sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .reasoning import ReasoningSplit, begins_inside, reasoning_tags
from .stop_strings import StopStrings
from .tokenizer import Tokenizer


class Part(NamedTuple):
    """A piece of text, and whether it is of the reasoning (else of the answer)."""

    text: str
    reasoning: bool


class AnswerText:
    """The text of one answer, token by token: whole characters, up to a stop string.

    The reasoning is told apart where the tokenizer declares its tags. Stop strings are
    looked for in the answer, not in the reasoning; nor do they lie across both.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stop: str | Sequence[str] = (),
        after: int = 0,
        reasoning: bool = True,
    ) -> None:
        """prompt: its token ids, whose end tells whether the model is to reason first.

        after: the text of so many tokens is not searched for stop strings.
        reasoning: False leaves it in the answer, with such tags as have a text.
        Raises ParameterError for stop, TokenizerError if text cannot be streamed.
        """
        self._stops = StopStrings(stop)
        self._unsearched = after
        self._detokenizer = tokenizer.detokenizer()
        self._split: ReasoningSplit | None = None
        tags = reasoning_tags(tokenizer) if reasoning else None
        if tags is not None:
            inside = begins_inside(tags, tokenizer, prompt)
            self._split = ReasoningSplit(tags, begins_inside=inside)

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text, if one has."""
        return self._stops.stop

    def add(self, token: int) -> list[Part]:
        """What is certain now: nothing, or a part, or the end of one and another."""
        thought, answer = "", self._detokenizer.add(token)
        if self._split is not None:
            thought, answer = self._split.add(token, answer)
        if self._unsearched > 0:
            self._unsearched -= 1
        else:
            answer = self._stops.add(answer).text
        return _parts(thought, answer)

    def finish(self) -> list[Part]:
        """What was held back. A stop string may be complete only now."""
        thought, answer = "", self._detokenizer.finish()
        if self._split is not None:
            thought, answer = self._split.finish(answer)
        return _parts(thought, self._stops.add(answer).text + self._stops.finish())


def _parts(thought: str, answer: str) -> list[Part]:
    parts = (Part(thought, True), Part(answer, False))
    return [part for part in parts if part.text]
