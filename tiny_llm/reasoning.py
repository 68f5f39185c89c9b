"""The reasoning of models that think before they answer, told apart from the answer.

Published tokenizers declare the tags around it as single tokens, so a tag is an id and
not a text: tags that a user or a model merely writes about are spelt otherwise or stand
in the prompt. Some are special tokens, which have no text when decoded; some are not.

    tags                                    models
    <think> </think>                        DeepSeek-R1, Qwen3, GLM-4.5, SmolLM3, ...
    <seed:think> </seed:think>              Seed-OSS
    [THINK] [/THINK]                        Magistral
    <|START_THINKING|> <|END_THINKING|>     Command R7B, Command A Reasoning

(Reasoning parsers of these models: docs.vllm.ai, "Reasoning Outputs" and the modules
of vllm.reasoning.) The channels of gpt-oss and Gemma 4 have headers with names, which
a pair of tags does not describe: their text is not divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .tokenizer import Tokenizer

_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


class ReasoningTags(NamedTuple):
    """The tokens around the reasoning, and their ids."""

    opening: str
    closing: str
    opening_id: int
    closing_id: int


def reasoning_tags(tokenizer: Tokenizer) -> ReasoningTags | None:
    """The tags that the vocabulary has as single tokens; None without any."""
    for opening, closing in _TAGS:
        opening_id = tokenizer.backend.token_to_id(opening)
        closing_id = tokenizer.backend.token_to_id(closing)
        if opening_id is not None and closing_id is not None:
            return ReasoningTags(opening, closing, opening_id, closing_id)
    return None


def begins_inside(
    tags: ReasoningTags, tokenizer: Tokenizer, prompt: Sequence[int]
) -> bool:
    """Whether an answer to these token ids begins inside the reasoning.

    So it is where they end with the opening tag, as some chat templates write it for
    the model, and at most white space behind it.
    """
    for token in reversed(prompt):
        if token == tags.opening_id:
            return True
        if token >= tokenizer.vocab_size:  # the model may have ids without a text
            return False
        if tokenizer.decode([token], skip_special_tokens=False).strip():
            return False
    return False


class ReasoningSplit:
    """Divides one stream of tokens and their text into reasoning and answer.

    Newlines next to a tag belong to the tag and to neither part. A further opening tag
    within the reasoning adds nothing; a closing tag outside it is text. Where a model
    reasons again after some answer, an empty line separates its thoughts.
    """

    def __init__(self, tags: ReasoningTags, *, begins_inside: bool) -> None:
        """begins_inside: the prompt ended with the opening tag."""
        self._tags = tags
        self.inside = begins_inside
        self._after_tag = begins_inside  # and nothing else yet
        self._newlines = ""  # held back: a tag may follow
        self._reasoned = False  # there was some reasoning

    def add(self, token: int, piece: str) -> tuple[str, str]:
        """The next token and the text it brought -> (reasoning, answer), both shown."""
        if token == self._tags.opening_id:
            parts = self._divide(piece.removesuffix(self._tags.opening))
            if not self.inside:
                self._enter(inside=True)
            return parts
        if token == self._tags.closing_id and self.inside:
            parts = self._divide(piece.removesuffix(self._tags.closing))
            self._enter(inside=False)
            return parts
        return self._divide(piece)

    def finish(self, piece: str = "") -> tuple[str, str]:
        """The last text, and the newlines that were held back: no tag follows."""
        reasoning, answer = self._divide(piece)
        # (behind a tag it is but the empty line that would have come before a text)
        newlines = "" if self._after_tag else self._newlines
        self._newlines = ""
        return (reasoning + newlines, "") if self.inside else ("", answer + newlines)

    def _enter(self, *, inside: bool) -> None:
        self.inside, self._after_tag = inside, True
        self._newlines = "\n\n" if inside and self._reasoned else ""

    def _divide(self, piece: str) -> tuple[str, str]:
        if self._after_tag:
            piece = piece.lstrip("\n")
            self._after_tag = not piece
        if not piece:
            return "", ""
        text = self._newlines + piece
        shown = text.rstrip("\n")
        self._newlines = text[len(shown) :]
        if not self.inside:
            return "", shown
        self._reasoned = self._reasoned or bool(shown)
        return shown, ""
