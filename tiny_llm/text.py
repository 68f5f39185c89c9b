"""Text in, text out: stream_generate between a tokenizer and a detokenizer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex

from .cache import KvCache
from .errors import ParameterError, PromptError
from .generation import stream_generate
from .models import Decoder
from .progress import Progress
from .result import Result
from .sampling import Sampler
from .tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class TextStream(Iterator[str]):
    """Pieces of text as they come, never half a character; `result` grows with them."""

    def __init__(self, pieces: Iterator[str], result: Result) -> None:
        self._pieces = pieces
        self.result = result

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the generation; the cache holds what was yielded."""
        self._pieces.close()  # type: ignore[attr-defined]


def stream_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str | Messages | Sequence[int],
    *,
    max_new_tokens: int = 256,
    sampler: Sampler | None = None,
    cache: Sequence[KvCache] | None = None,
    template_options: Mapping[str, Any] | None = None,
    prefill_chunk: int = 2048,
    progress: Progress | None = None,
) -> TextStream:
    """Generate text piece by piece; iterate the stream, then look at its `result`.

    prompt: a string (continued as it is, with exactly one BOS if the tokenizer adds
    one), chat messages ({"role": ..., "content": ...}), which go through the chat
    template with template_options, or token ids. It ends at the EOS ids of config,
    generation config and tokenizer, whose text is not shown. The other arguments are
    those of stream_generate.

    Raises PromptError, ParameterError or ChatTemplateError at once, before any work.
    """
    ids = encode_prompt(tokenizer, prompt, template_options)
    tokens = stream_generate(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        eos_token_ids=tokenizer.eos_token_ids,
        cache=cache,
        prefill_chunk=prefill_chunk,
        progress=progress,
    )
    result = Result(prompt_tokens=len(ids))
    return TextStream(_pieces(tokens, tokenizer, result), result)


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str | Messages | Sequence[int],
    *,
    max_new_tokens: int = 256,
    sampler: Sampler | None = None,
    cache: Sequence[KvCache] | None = None,
    template_options: Mapping[str, Any] | None = None,
    prefill_chunk: int = 2048,
    progress: Progress | None = None,
) -> Result:
    """As stream_text, but the whole Result at once."""
    stream = stream_text(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        cache=cache,
        template_options=template_options,
        prefill_chunk=prefill_chunk,
        progress=progress,
    )
    for _ in stream:
        pass
    return stream.result


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: str | Messages | Sequence[int],
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """The token ids of a prompt; see stream_text. Arrays of ids are ids too."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    items: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(items, bytes) or not isinstance(items, Sequence):
        raise PromptError(
            f"the prompt is {items!r:.60}; a string, messages or token ids are needed"
        )
    if not items:
        raise PromptError("the prompt is empty: no messages and no tokens")
    if all(isinstance(item, SupportsIndex) for item in items):
        return [index(item) for item in items]
    options = template_options or {}
    if not isinstance(options, Mapping) or "messages" in options:
        raise ParameterError(
            f"template_options is {options!r:.60}; a mapping of the template's own "
            f"variables is needed"
        )
    return tokenizer.encode_chat(items, **options)


def _pieces(
    tokens: Iterator[int], tokenizer: Tokenizer, result: Result
) -> Iterator[str]:
    detokenizer = tokenizer.detokenizer()
    start = first = time.perf_counter()
    for token in tokens:
        now = time.perf_counter()
        if not result.token_ids:
            first = now
            result.prompt_seconds = now - start
        result.decode_seconds = now - first
        result.token_ids.append(token)
        if token in tokenizer.eos_token_ids:
            result.finish_reason = "stop"
            break
        piece = detokenizer.add(token)
        result.text += piece
        if piece:
            yield piece
    piece = detokenizer.finish()
    result.text += piece
    result.finish_reason = result.finish_reason or "length"
    if piece:
        yield piece
