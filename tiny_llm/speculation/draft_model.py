"""Guesses of a smaller model that has the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..cache import KvCache, rewind
from ..errors import ParameterError
from ..models import Decoder
from .base import Drafter, Speculation

_RESERVE = 1024  # tokens that room is made for at once
_CHUNK = 2048  # tokens of the prompt in a pass


class DraftModel(Speculation):
    """Speculative decoding with a draft model (Leviathan et al. 2023), greedy drafts.

    It pays where the draft model is several times faster and often right. That its ids
    mean the same as the target's is the caller's word; only their number is checked.
    """

    def __init__(self, model: Decoder, max_draft: int = 7) -> None:
        """max_draft: tokens guessed at a time, at most. Raises ParameterError."""
        super().__init__(max_draft)
        if not isinstance(model, Decoder):
            raise ParameterError(
                f"the draft model is {model!r:.60}; a model of load_model() is needed"
            )
        self.model = model

    def drafter(self, vocabulary: int) -> ModelDrafter:
        """A cache of the draft model for one request; see Speculation."""
        own = self.model.config.vocab_size
        if own != vocabulary:
            raise ParameterError(
                f"the draft model has {own} token ids and the model {vocabulary}: they "
                f"must have the same vocabulary"
            )
        return ModelDrafter(self.model)


class ModelDrafter(Drafter):
    """The draft model's cache; it follows the tokens, whatever was guessed."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._cache: list[KvCache] = []
        self._held: list[int] = []  # in the cache
        self._agreed = 0  # of them, as the target has them

    def look(self, tokens: Sequence[int]) -> int | None:
        """One level, while the draft model's context lasts."""
        return 0 if len(tokens) <= self.model.config.context_length else None

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """The likeliest tokens after `tokens`, one after the other; read at once."""
        # the last one guessed is not stored
        most = min(most, self.model.config.context_length - len(tokens) + 1)
        if most < 1:
            return []
        try:
            return self._propose(list(tokens), most)
        except BaseException:  # only some layers may have the last tokens
            self._cache, self._held = [], []
            raise

    def _propose(self, tokens: list[int], most: int) -> list[int]:
        self._follow(tokens)
        start = len(self._held)
        while True:
            part = tokens[start : start + _CHUNK]
            start += len(part)
            last = start == len(tokens)
            token = self._step(mx.array([part]), logits=int(last))
            if last:
                break
            mx.eval([entry.state for entry in self._cache])
        drafted = [token]
        while len(drafted) < most:
            drafted.append(self._step(drafted[-1][None], logits=1))
            mx.async_eval(drafted[-1])
        draft: list[int] = mx.concatenate(drafted).tolist()  # type: ignore[assignment]
        self._held, self._agreed = tokens + draft[:-1], len(tokens)
        return draft

    def _step(self, ids: mx.array, *, logits: int) -> mx.array:
        """Append ids [1, L]; the likeliest token after them, [1], lazily."""
        offset = self._cache[0].offset
        out = self.model(ids, offset, self._cache, logits_to_keep=logits)
        return mx.argmax(out[:, -1], axis=-1) if logits else mx.zeros((1,))

    def _follow(self, tokens: list[int]) -> None:
        """Rewind the cache to what it holds of `tokens`, but the last of them."""
        common = self._agreed
        if self._held[:common] != tokens[:common]:
            common = 0
        most = min(len(self._held), len(tokens) - 1)
        while common < most and self._held[common] == tokens[common]:
            common += 1
        common = min(common, most)
        try:
            rewind(self._cache, common)
        except ParameterError:  # other tokens than before, and a window has passed them
            self._cache = []
        if not self._cache:
            config = self.model.config
            kind = "rotating" if any(config.windows) else "dense"
            reserve = min(len(tokens) + _RESERVE, config.context_length)
            self._cache = self.model.create_kv_cache(kind, reserve=reserve)
            common = 0
        self._held = tokens[:common]
