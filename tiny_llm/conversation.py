"""A chat of several turns over one cache: each turn pays only for what is new."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .cache import KvCache, rewind
from .errors import ParameterError, PromptError
from .models import Decoder
from .progress import Progress
from .sampling import Sampler
from .text import TextStream, encode_prompt, stream_text
from .tokenizer import Tokenizer


class Conversation:
    """Messages so far, and a cache that holds their beginning.

    Each turn renders the whole conversation, keeps the cache as far as the token ids
    agree, rewinds the rest (templates may change earlier turns) and computes what is
    new; all of it where a window has passed what would be needed. The answers are those
    of a fresh run over the whole conversation.

    An answer's content is its text without the reasoning, which is given to the
    template as "reasoning_content": most leave it out of later turns. Those then
    compute the last answer anew, from where its reasoning began.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        create_cache: Callable[[], Sequence[KvCache]] | None = None,
    ) -> None:
        """system: the first message, of role "system".

        create_cache: makes an empty cache, as `model.create_kv_cache` (the default)
        or `lambda: model.create_kv_cache("quantized", bits=8)`.
        """
        self.model, self.tokenizer = model, tokenizer
        self.create_cache = create_cache or model.create_kv_cache
        self.template_options = dict(template_options or {})
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system message."""
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self._cache = self.create_cache()
        self._cached: list[int] = []
        self._open: TextStream | None = None
        self._prompt: list[int] = []
        self.reused = 0

    def ask(
        self,
        text: str,
        *,
        max_new_tokens: int = 1024,
        sampler: Sampler | None = None,
        stop: str | Sequence[str] = (),
        prefill_chunk: int = 2048,
        progress: Progress | None = None,
    ) -> TextStream:
        """Add a user message and stream the answer.

        The answer becomes part of the conversation when the next turn begins, as far
        as it was streamed: it may be stopped by `close()` or by an exception.
        `reused` tells how many prompt tokens were already cached. Raises as stream_text
        does; then the conversation is as it was.
        """
        self._finish_turn()
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = encode_prompt(self.tokenizer, messages, self.template_options)
        keep = common_beginning(ids, self._cached)
        keep = min(keep, len(ids) - 1)  # the last token's logits are needed
        if len(ids) > self.model.config.context_length:
            raise PromptError(
                f"the conversation has {len(ids)} tokens, but the model's context is "
                f"{self.model.config.context_length}; start a new one"
            )
        keep = self._rewind(keep)
        stream = stream_text(
            self.model,
            self.tokenizer,
            ids[keep:],
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            stop=stop,
            cache=self._cache,
            prefill_chunk=prefill_chunk,
            progress=progress,
        )
        self.messages, self.reused = messages, keep
        self._prompt, self._open = ids, stream
        return stream

    def _finish_turn(self) -> None:
        """Take the last answer into the messages and the record of the cache."""
        if self._open is None:
            return
        self._open.close()
        result, self._open = self._open.result, None
        message = {"role": "assistant", "content": result.text}
        if result.reasoning:
            message["reasoning_content"] = result.reasoning
        self.messages.append(message)
        self._cached = [*self._prompt, *result.token_ids]
        # An interrupt may have come between two layers; a full context stores one less.
        stored = min(entry.offset for entry in self._cache)
        self._rewind(min(stored, len(self._cached)))

    def _rewind(self, length: int) -> int:
        """Keep at most `length` cached tokens; returns how many."""
        try:
            rewind(self._cache, length)
        except ParameterError:  # a window has passed: then all anew
            length = 0
            rewind(self._cache, 0)
        del self._cached[length:]
        return length


def common_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return min(len(a), len(b))
