"""Text in, text out: stream_generate between a tokenizer and a detokenizer."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex

from .answer_text import AnswerText, Part
from .cache import KvCache
from .errors import OutOfPagesError, ParameterError, PromptError
from .generation import stream_generate
from .models import Decoder
from .progress import Progress
from .result import Result
from .sampling import LogitsProcessor, Sampler
from .speculation import Speculation
from .stop_strings import checked_stops
from .tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class TextStream(Iterator[str]):
    """Pieces of an answer as they come, never half a character nor part of a stop.

    Iterate the stream for the answer's text alone, or `parts()` for the reasoning of
    a thinking model too. `result` grows with them.
    """

    def __init__(self, parts: Iterator[Part], result: Result) -> None:
        self._parts = parts
        self.result = result

    def next_part(self) -> Part | None:
        """The next part, of the reasoning or of the answer; None at the end."""
        return next(self._parts, None)

    def parts(self) -> Iterator[Part]:
        """Parts (text, reasoning) as they come; reasoning tells which kind it is."""
        return iter(self.next_part, None)

    def __next__(self) -> str:
        while (part := self.next_part()) is not None:
            if not part.reasoning:
                return part.text
        raise StopIteration

    def close(self) -> None:
        """End the generation; the cache holds what was yielded."""
        self._parts.close()  # type: ignore[attr-defined]


def stream_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str | Messages | Sequence[int],
    *,
    max_new_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    stop: str | Sequence[str] = (),
    cache: Sequence[KvCache] | None = None,
    template_options: Mapping[str, Any] | None = None,
    reasoning: bool = True,
    speculation: Speculation | None = None,
    prefill_chunk: int = 2048,
    progress: Progress | None = None,
) -> TextStream:
    """Generate text piece by piece; iterate the stream, then look at its `result`.

    prompt: a string (continued as it is, with exactly one BOS if the tokenizer adds
    one), chat messages ({"role": ..., "content": ...}), which go through the chat
    template with template_options, or token ids. It ends at the EOS ids of config,
    generation config and tokenizer, whose text is not shown, or before a stop string
    of the answer, whose tokens the cache and the result's token_ids hold. reasoning:
    a thinking model's reasoning is no part of the answer; False leaves it there. The
    other arguments are those of stream_generate.

    Raises PromptError, ParameterError or ChatTemplateError at once, before any work.
    """
    stops = checked_stops(stop)
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
        logits_processors=logits_processors,
        speculation=speculation,
    )
    result = Result(prompt_tokens=len(ids))
    text = AnswerText(tokenizer, ids, stop=stops, reasoning=reasoning)
    return TextStream(_parts(tokens, tokenizer.eos_token_ids, text, result), result)


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str | Messages | Sequence[int],
    *,
    max_new_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    stop: str | Sequence[str] = (),
    cache: Sequence[KvCache] | None = None,
    template_options: Mapping[str, Any] | None = None,
    reasoning: bool = True,
    speculation: Speculation | None = None,
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
        logits_processors=logits_processors,
        stop=stop,
        cache=cache,
        template_options=template_options,
        reasoning=reasoning,
        speculation=speculation,
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
        _check_no_options(template_options, "a string")
        return tokenizer.encode(prompt)
    items: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(items, bytes) or not isinstance(items, Sequence):
        raise PromptError(
            f"the prompt is {items!r:.60}; a string, messages or token ids are needed"
        )
    if not items:
        raise PromptError("the prompt is empty: no messages and no tokens")
    if all(isinstance(item, SupportsIndex) for item in items):
        _check_no_options(template_options, "token ids")
        return [index(item) for item in items]
    options = template_options or {}
    if not isinstance(options, Mapping) or "messages" in options:
        raise ParameterError(
            f"template_options is {options!r:.60}; a mapping of the template's own "
            f"variables is needed"
        )
    check_template_options(tokenizer, options)
    return tokenizer.encode_chat(items, **options)


def check_template_options(tokenizer: Tokenizer, names: Iterable[str]) -> None:
    """Raise ParameterError for an option that the model's chat template never reads."""
    if not tokenizer.has_chat_template:  # which is said where it is needed
        return
    for name in names:
        if name not in tokenizer.template_variables:
            raise ParameterError(
                f"template_options: the model's chat template has no variable {name!r}"
            )


def _check_no_options(options: Mapping[str, Any] | None, what: str) -> None:
    if options:
        raise ParameterError(
            f"template_options have an effect on chat messages only; the prompt is "
            f"{what}"
        )


def _parts(
    tokens: Iterator[int], eos_ids: frozenset[int], text: AnswerText, result: Result
) -> Iterator[Part]:
    """The parts of the text, noted in the result before they are yielded."""

    def noted(part: Part) -> Part:
        if part.reasoning:
            result.reasoning += part.text
        else:
            result.text += part.text
        return part

    start = first = time.perf_counter()
    try:
        for token in tokens:
            now = time.perf_counter()
            if not result.token_ids:
                first = now
                result.prompt_seconds = now - start
            result.decode_seconds = now - first
            result.token_ids.append(token)
            if token in eos_ids:
                result.stop_reason = token
                break
            yield from map(noted, text.add(token))
            if text.stop is not None:
                break
    except OutOfPagesError:  # all text of the tokens there are, then the error
        yield from map(noted, text.finish())
        raise
    finally:  # what is in the cache beyond the tokens yielded goes
        if isinstance(tokens, Generator):
            tokens.close()
    yield from map(noted, text.finish())
    if text.stop is not None:
        result.stop_reason = text.stop
    result.finish_reason = "length" if result.stop_reason is None else "stop"
