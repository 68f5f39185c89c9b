"""A request, its handle and its text: what the engine keeps of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..answer_text import AnswerText
from .handle import Handle
from .request import Request


class Entry(NamedTuple):
    """What is kept of a request beside the scheduler's view of it.

    new_text: makes the text of an answer; None for an engine of token ids only.
    """

    request: Request
    handle: Handle
    stop_ids: frozenset[int]
    new_text: Callable[[], AnswerText] | None
    text: AnswerText | None

    @property
    def ended(self) -> str | None:
        """Why the answer that was given out is complete; None: it is not."""
        answer = self.handle.answer
        if self.stop_reason is not None:
            return "stop"
        return "length" if len(answer) >= self.request.limit else None

    @property
    def stop_reason(self) -> str | int | None:
        """What ended the answer that was given out: a stop string, or a token's id."""
        if self.text is not None and self.text.stop is not None:
            return self.text.stop
        last = self.handle.answer[-1:]
        return last[0] if last and last[0] in self.stop_ids else None

    def renewed(self) -> Entry:
        """With a text that has seen what was given out, and nothing else."""
        if self.new_text is None:
            return self
        text = self.new_text()
        for token in self.handle.answer:
            if token not in self.stop_ids:
                text.add(token)
        return self._replace(text=text)
