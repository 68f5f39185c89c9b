"""One request: prefill, then one token a step, the next step begun before it is read.

Everything here works on token ids; text.py adds the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from operator import index
from typing import Any

import mlx.core as mx

from .cache import KvCache, rewind
from .errors import OutOfPagesError, ParameterError, PromptError, whole_number
from .models import Decoder
from .progress import Progress
from .sampling import Sampler, checked_choice

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
) -> Iterator[int]:
    """Generate up to max_new_tokens token ids after prompt_tokens, one by one.

    sampler: log-probabilities [1, V] -> ids [1]; None is argmax. An id of
    eos_token_ids is yielded, then generation stops; it also stops where the context is
    full. prefill_chunk: prompt tokens per forward pass; only the last position is
    projected to logits. progress: called with (prompt tokens done, of how many).

    cache (`model.create_kv_cache()`): continued from where it stands, and extended by
    the prompt and by every token yielded, also if the caller stops early. (Only a token
    for which the context or the page pool has no room is left out.)

    Raises, when called, before any work: PromptError for a prompt that is empty, holds
    an id outside the vocabulary, or is longer than the context; ParameterError for
    other arguments that cannot be used. While iterating: OutOfPagesError if the cache's
    pool is full before max_new_tokens, after the last token that was computed.
    """
    config = model.config
    prompt = checked_prompt(prompt_tokens, config.vocab_size)
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens, least=0)
    prefill_chunk = whole_number("prefill_chunk", prefill_chunk, least=1)
    stop_ids = _checked_ids(eos_token_ids)
    for name, function in (("sampler", sampler), ("progress", progress)):
        if function is not None and not callable(function):
            raise ParameterError(f"{name} is {function!r}; a function is needed")
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
        # nobody rewinds it: a layer with a window need not hold more
        kind = "rotating" if any(config.windows) else "dense"
        cache = model.create_kv_cache(kind, reserve=end + min(limit, _RESERVE))
    return _Run(model, cache, sampler, stop_ids, keep).tokens(
        prompt, limit, prefill_chunk, progress
    )


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


def _checked_ids(ids: Iterable[int]) -> frozenset[int]:
    """End-of-sequence ids as a set. Raises ParameterError."""
    try:
        values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        return frozenset(index(value) for value in values)
    except TypeError:
        raise ParameterError(
            f"eos_token_ids is {ids!r}; a list of token ids is needed"
        ) from None


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


class _Run:
    """One call of stream_generate, its arguments checked."""

    def __init__(
        self,
        model: Decoder,
        cache: Sequence[KvCache],
        sampler: Sampler | None,
        stop_ids: frozenset[int],
        keep: bool,
    ) -> None:
        """keep: the caller goes on using the cache."""
        self.model, self.cache, self.sampler = model, cache, sampler
        self.stop_ids, self.keep = stop_ids, keep

    def tokens(
        self, prompt: list[int], limit: int, chunk: int, progress: Progress | None
    ) -> Iterator[int]:
        """Yield the new tokens. When one is yielded, the cache holds it already."""
        token = self._prefill(prompt, limit, chunk, progress)
        for count in range(1, limit + 1):
            # Step t + 1 starts from the lazy token of step t, before that is read.
            stored = self.cache[0].offset
            ahead, full = None, None
            try:
                if count < limit:
                    ahead = self._step(token)
                elif self.keep and self._has_room():
                    self._forward(token[:, None], logits=0)
            except OutOfPagesError as error:  # `token` is right all the same
                full = error
            value: int = token.item()  # type: ignore[assignment]
            if not 0 <= value < self.model.config.vocab_size:
                self._rewind_to(stored)
                raise ParameterError(
                    f"the sampler chose the token id {value}, which is not in the "
                    f"vocabulary of {self.model.config.vocab_size}"
                )
            yield value
            if value in self.stop_ids:
                return
            if count == limit:  # all that was asked for, stored or not
                return
            if full is not None:
                raise full
            assert ahead is not None
            token = ahead

    def _prefill(
        self, prompt: list[int], limit: int, chunk: int, progress: Progress | None
    ) -> mx.array:
        """Run the prompt; return the first new token, [1], lazily.

        Without pages for all of it, the cache is as before.
        """
        stored = self.cache[0].offset
        try:
            return self._run_prompt(prompt, limit, chunk, progress)
        except OutOfPagesError:
            with suppress(ParameterError):  # a window has passed what was before
                self._rewind_to(stored)
            raise

    def _run_prompt(
        self, prompt: list[int], limit: int, chunk: int, progress: Progress | None
    ) -> mx.array:
        logits = None
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            last = start + len(part) == len(prompt)
            logits = self._forward(mx.array([part]), logits=1 if last and limit else 0)
            mx.eval(logits, [entry.state for entry in self.cache])
            if progress is not None:
                progress(start + len(part), len(prompt))
        assert logits is not None
        return self._sample(logits) if limit else mx.zeros((1,), dtype=mx.int32)

    def _step(self, token: mx.array) -> mx.array:
        """Append a token [1] and start computing the one after it, [1]."""
        stored = self.cache[0].offset
        logits = self._forward(token[:, None], logits=1)
        try:
            following = self._sample(logits)
        except BaseException:  # the caller's sampler failed before `token` was yielded
            self._rewind_to(stored)
            raise
        mx.async_eval(following)
        return following

    def _forward(self, ids: mx.array, *, logits: int) -> mx.array:
        if self.sampler is not None:  # an id of the caller's must not read beyond
            ids = mx.clip(ids, 0, self.model.config.vocab_size - 1)
        stored = self.cache[0].offset
        try:
            return self.model(
                ids, offset=stored, cache=self.cache, logits_to_keep=logits
            )
        except BaseException:  # Ctrl-C between two layers: only some have the tokens
            self._rewind_to(stored)
            raise

    def _sample(self, logits: mx.array) -> mx.array:
        """logits [1, 1, V] -> id [1]."""
        logits = logits[:, -1]
        if self.sampler is None:
            return mx.argmax(logits, axis=-1)
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return checked_choice(self.sampler(logprobs), rows=1)

    def _rewind_to(self, stored: int) -> None:
        rewind(self.cache, stored)

    def _has_room(self) -> bool:
        return self.cache[0].offset < self.model.config.context_length
