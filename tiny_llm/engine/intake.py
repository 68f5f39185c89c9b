"""From what a caller gives to a request that can be run: all is checked here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..answer_text import AnswerText
from ..errors import ParameterError, PromptError
from ..generation import checked_prompt
from ..models import Decoder
from ..sampling.params import SamplingParams
from ..sampling.rules import Rules
from ..text import Messages, encode_prompt
from ..tokenizer import Tokenizer
from .request import Request

Prompt = str | Messages | Sequence[int]


class Intake:
    """Checks prompts and parameters against a model; without a tokenizer, ids only."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None) -> None:
        self.config, self.tokenizer = model.config, tokenizer
        self._compiler: Any = None  # of grammars, once there is one

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        template_options: Mapping[str, Any] | None,
    ) -> tuple[Request, frozenset[int]]:
        """The request, without its number yet, and the ids that end its answer.

        Raises PromptError, ParameterError or ChatTemplateError.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ParameterError(f"params is {params!r:.60}; SamplingParams are needed")
        ids = self._encode(prompt, template_options)
        bad_words = self._bad_words(params)
        breakers = self._breakers(params)
        for name, tokens in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("bad_words", [token for word in bad_words for token in word]),
            ("dry_sequence_breakers", breakers),
        ):
            for token in tokens:
                if token >= self.config.vocab_size:
                    raise ParameterError(
                        f"{name} has the token id {token}, which is not in the "
                        f"vocabulary of {self.config.vocab_size}"
                    )
        for name, value in (("stop", params.stop), ("grammar", params.grammar)):
            if value and self.tokenizer is None:
                raise ParameterError(
                    f"{name} needs text, but the engine has no tokenizer: give it one"
                )
        # the last token may lie just beyond the context: nothing follows it
        room = self.config.context_length - len(ids) + 1
        if room < 1:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, but the model's context is "
                f"{self.config.context_length} tokens"
            )
        stop_ids = set(params.stop_token_ids)
        if self.tokenizer is not None and not params.ignore_eos:
            stop_ids |= set(self.tokenizer.eos_token_ids)
        rules = Rules(
            params,
            seed=_seed(params),
            end_ids=stop_ids,
            bad_words=bad_words,
            breakers=breakers,
            matcher=self._matcher(params),
        )
        limit = min(params.max_tokens, room)
        return Request(-1, ids, params, limit, rules), frozenset(stop_ids)

    def text_of(self, request: Request) -> Callable[[], AnswerText] | None:
        """What makes the text of its answer; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return partial(
            AnswerText,
            self.tokenizer,
            request.prompt,
            stop=request.params.stop,
            after=request.params.min_tokens,
        )

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """As token ids: a string also as it is spelt after a space."""
        found: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if not isinstance(word, str):
                found.append(word)
                continue
            if self.tokenizer is None:
                raise ParameterError(
                    f"bad_words has the text {word!r:.60}, but the engine has no "
                    "tokenizer: give token ids"
                )
            for text in (word, " " + word.lstrip()):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids:
                    found.append(tuple(ids))
        return list(dict.fromkeys(found))

    def _breakers(self, params: SamplingParams) -> set[int]:
        """As token ids: of a string the last one that it is spelt with in a text."""
        if not params.dry_multiplier:
            return set()
        found = set()
        for breaker in params.dry_sequence_breakers:
            if not isinstance(breaker, str):
                found.add(breaker)
            elif self.tokenizer is not None:
                text = "a" + breaker
                found.add(self.tokenizer.encode(text, add_special_tokens=False)[-1])
            elif params.dry_sequence_breakers != SamplingParams.dry_sequence_breakers:
                raise ParameterError(
                    f"dry_sequence_breakers has the text {breaker!r:.60}, but the "
                    "engine has no tokenizer: give token ids"
                )
        return found

    def _matcher(self, params: SamplingParams) -> Any:
        if params.grammar is None:
            return None
        if self._compiler is None:
            from ..grammar import GrammarCompiler

            assert self.tokenizer is not None
            self._compiler = GrammarCompiler(self.tokenizer, self.config.vocab_size)
        return self._compiler.compile(params.grammar)

    def _encode(
        self, prompt: Prompt, template_options: Mapping[str, Any] | None
    ) -> list[int]:
        ids: Any = prompt
        if template_options is not None and not _is_chat(prompt):
            raise ParameterError(
                "template_options have an effect on chat messages only, and the prompt "
                "is none"
            )
        if self.tokenizer is not None:
            ids = encode_prompt(self.tokenizer, prompt, template_options)
        elif isinstance(prompt, str):
            raise PromptError(
                "the prompt is text, but the engine has no tokenizer: give it one, or "
                "give token ids"
            )
        return checked_prompt(ids, self.config.vocab_size)


def _is_chat(prompt: Prompt) -> bool:
    """Whether it is messages (or tries to be), neither text nor token ids."""
    return (
        not isinstance(prompt, str)
        and isinstance(prompt, Sequence)
        and any(isinstance(item, Mapping) for item in prompt)
    )


def _seed(params: SamplingParams) -> int:
    if params.seed is not None:
        return params.seed
    return int.from_bytes(os.urandom(8), "little")


def check_parts(model: object, tokenizer: object) -> None:
    """Raise ParameterError for what is no model or no tokenizer."""
    if not callable(getattr(model, "create_page_pool", None)):
        raise ParameterError(
            f"model is {model!r:.60}; a loaded model is needed, as in "
            f"model, tokenizer = tiny_llm.load(...)"
        )
    if tokenizer is not None and not callable(getattr(tokenizer, "detokenizer", None)):
        raise ParameterError(f"tokenizer is {tokenizer!r:.60}; a Tokenizer is needed")
