"""stream_generate: one request, its arguments checked. (decoding.py has the loop.)

Everything here works on token ids; text.py adds the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any

import mlx.core as mx

from .cache import KvCache
from .chooser import Chooser
from .decoding import Run
from .errors import ParameterError, PromptError, whole_number
from .models import Decoder
from .progress import Progress
from .sampling import LogitsProcessor, Sampler
from .speculation import Drafting, Speculation

# Room made at once for new tokens; beyond, the cache grows in steps.
_RESERVE = 1024


def stream_generate(
    model: Decoder,
    prompt_tokens: Sequence[int] | mx.array,
    *,
    max_new_tokens: int = 256,
    sampler: Sampler | None = None,
    eos_token_ids: Iterable[int] = (),
    cache: Sequence[KvCache] | None = None,
    prefill_chunk: int = 2048,
    progress: Progress | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    speculation: Speculation | None = None,
) -> Iterator[int]:
    """Generate up to max_new_tokens token ids after prompt_tokens, one by one.

    sampler: log-probabilities [1, V] -> ids [1]; None is argmax. An id of
    eos_token_ids is yielded, then generation stops; it also stops where the context is
    full. prefill_chunk: prompt tokens per forward pass; only the last position is
    projected to logits. progress: called with (prompt tokens done, of how many).

    cache (`model.create_kv_cache()`): continued from where it stands, and extended by
    the prompt and by every token yielded, also if the caller stops early. (Only a token
    for which the context or the page pool has no room is left out.)

    logits_processors: (token ids int32 [T], logits [1, V]) -> logits [1, V], applied in
    order before the sampler. The ids are this prompt and all tokens chosen so far.

    speculation: PromptLookup() or DraftModel(model) guess tokens, and one forward pass
    verifies them (speculation/). What is chosen is the same: processors and sampler are
    called for the same rows in the same order, and for none after a wrong guess. The
    cache may be ahead of the tokens yielded until the stream ends or is closed.

    Raises, when called, before any work: PromptError for a prompt that is empty, holds
    an id outside the vocabulary, or is longer than the context; ParameterError for
    other arguments that cannot be used. While iterating: OutOfPagesError if the cache's
    pool is full before max_new_tokens, after the last token that was computed.
    """
    config = model.config
    prompt = checked_prompt(prompt_tokens, config.vocab_size)
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens, least=0)
    prefill_chunk = whole_number("prefill_chunk", prefill_chunk, least=1)
    stop_ids = checked_ids(eos_token_ids)
    for name, function in (("sampler", sampler), ("progress", progress)):
        if function is not None and not callable(function):
            raise ParameterError(f"{name} is {function!r}; a function is needed")
    processors = checked_processors(logits_processors)
    drafting = None
    if speculation is not None:
        if not isinstance(speculation, Speculation):
            raise ParameterError(
                f"speculation is {speculation!r:.60}; PromptLookup() or "
                f"DraftModel(model) is needed"
            )
        drafting = Drafting(speculation, prompt, config.vocab_size)
    if cache is not None:
        _check_cache(cache, config.layers)
    stored = cache[0].offset if cache is not None else 0
    end = stored + len(prompt)
    if end > config.context_length:
        held = f" after {stored} tokens in the cache" if stored else ""
        raise PromptError(
            f"the prompt has {len(prompt)} tokens{held}, but the model's context is "
            f"{config.context_length} tokens"
        )
    # The last token may lie just beyond the context: nothing follows it.
    limit = min(max_new_tokens, config.context_length - end + 1)
    keep = cache is not None
    if cache is None:
        if limit == 0:
            return iter(())
        # only guesses are taken back: a layer with a window need not hold more
        kind = "rotating" if any(config.windows) else "dense"
        cache = model.create_kv_cache(kind, reserve=end + min(limit, _RESERVE))
    chooser = Chooser(sampler, processors, prompt, config.vocab_size)
    run = Run(model, cache, chooser, stop_ids, keep, drafting)
    return run.tokens(prompt, limit, prefill_chunk, progress)


def checked_prompt(tokens: Sequence[int] | mx.array, vocabulary: int) -> list[int]:
    """The prompt as whole numbers in the vocabulary. Raises PromptError."""
    ids: Any = tokens
    if hasattr(ids, "tolist"):  # an array, of MLX or numpy
        if ids.ndim != 1 and ids.shape[:-1] != (1,):
            raise PromptError(
                f"the prompt is an array of shape {ids.shape}; one prompt at a time"
            )
        ids = ids.reshape(-1).tolist()
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise PromptError(f"the prompt is {ids!r:.60}; token ids are needed")
    prompt: list[int] = []
    for token in ids:
        try:
            prompt.append(index(token))
        except TypeError:
            raise PromptError(
                f"the prompt holds {token!r}, which is no token id"
            ) from None
        if not 0 <= prompt[-1] < vocabulary:
            raise PromptError(
                f"token id {token} is not in the vocabulary of {vocabulary}"
            )
    if not prompt:
        raise PromptError("the prompt is empty; at least one token is needed")
    return prompt


def checked_ids(ids: Iterable[int]) -> frozenset[int]:
    """End-of-sequence ids as a set. Raises ParameterError."""
    try:
        values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        return frozenset(index(value) for value in values)
    except TypeError:
        raise ParameterError(
            f"eos_token_ids is {ids!r}; a list of token ids is needed"
        ) from None


def checked_processors(
    processors: Sequence[LogitsProcessor],
) -> tuple[LogitsProcessor, ...]:
    """The processors. Raises ParameterError."""
    items = processors if isinstance(processors, Iterable) else [None]
    functions = tuple(items)
    if not all(map(callable, functions)):
        raise ParameterError(
            f"logits_processors is {processors!r:.60}; a list of functions is needed"
        )
    return functions


def _check_cache(cache: Sequence[KvCache], layers: int) -> None:
    """Raise ParameterError for what is no cache of so many layers."""
    try:
        entries = list(cache)
        offsets = {entry.offset for entry in entries}
    except (TypeError, AttributeError):
        entries, offsets = [], set()
    distinct = len({id(entry) for entry in entries})
    if distinct != layers or len(entries) != layers or len(offsets) != 1:
        raise ParameterError(
            f"the cache has {distinct} entries, but the model {layers} layers, which "
            f"hold the same tokens: use model.create_kv_cache()"
        )
