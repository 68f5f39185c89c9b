"""From what a caller gives to a request that can be run: all is checked here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ParameterError, PromptError
from ..generation import checked_prompt
from ..models import Decoder
from ..text import Messages, encode_prompt
from ..tokenizer import Tokenizer
from .params import SamplingParams
from .request import Request

Prompt = str | Messages | Sequence[int]


class Intake:
    """Checks prompts and parameters against a model; without a tokenizer, ids only."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None) -> None:
        self.config, self.tokenizer = model.config, tokenizer

    def request(
        self,
        number: int,
        prompt: Prompt,
        params: SamplingParams | None,
        template_options: Mapping[str, Any] | None,
    ) -> tuple[Request, frozenset[int]]:
        """The request, and the ids that end its answer.

        Raises PromptError, ParameterError or ChatTemplateError.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ParameterError(f"params is {params!r:.60}; SamplingParams are needed")
        ids = self._encode(prompt, template_options)
        for name, tokens in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            for token in tokens:
                if token >= self.config.vocab_size:
                    raise ParameterError(
                        f"{name} has the token id {token}, which is not in the "
                        f"vocabulary of {self.config.vocab_size}"
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
        limit = min(params.max_tokens, room)
        return Request(number, ids, params, limit), frozenset(stop_ids)

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
