"""What one request asks of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ParameterError
from . import checks
from .checks import count

# Decides whatever the logits are, and is still far from overflow.
_MOST_BIAS = 1e6
_MOST_CHOICES = 64
_MOST_LOGPROBS = 64
_MOST_BAD_WORDS = 1024
_MODES = ("raw", "processed")
_FILTERS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "seed"),
)
_PENALTIES = (
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "penalty_window"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_window"),
)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when they end.

    Length: max_tokens: most tokens of the answer; min_tokens: nothing ends it before.
    stop: strings that end it, and are not part of its text. stop_token_ids: ids that
    end it, beside the model's own; ignore_eos: the model's own do not.

    Logits, in this order: logit_bias: token id -> what is added. frequency_penalty,
    presence_penalty: taken off for each time a token is in the context, and once if it
    is (OpenAI). repetition_penalty: positive logits of tokens in the context are
    divided by it, others multiplied (Keskar et al. 2019). All three look at prompt and
    answer, or at their last penalty_window tokens. dry_*: DRY lowers the logit of a
    token that would continue a repetition of n >= dry_allowed_length tokens, by
    dry_multiplier * dry_base^(n - dry_allowed_length); within the last dry_window
    tokens, and not across dry_sequence_breakers (strings or token ids). bad_words:
    strings or lists of token ids that must not come. grammar: a tiny_llm.Grammar that
    the answer obeys. logits_processors: callables from (token ids int [T], logits
    [1, V]) to logits [1, V].

    Choice: temperature, below 1e-4 greedy; top_n_sigma (0: off), top_k, top_p, min_p,
    typical_p, xtc_probability and xtc_threshold, seed: as
    `tiny_llm.sampling.make_sampler` has them. sampler: a callable from
    log-probabilities [1, V] to ids [1], instead of all these.

    Report: logprobs: the tokens' log-probabilities; top_logprobs: and those of so many
    likeliest tokens. logprobs_mode: "raw", by the model's own distribution, or
    "processed", by that which the token was chosen from. prompt_logprobs: those of the
    prompt's tokens, and of so many likeliest ones (0: none) in each place.

    Several answers: n of them; best_of (n or more) are computed and those with the
    highest mean log-probability kept.

    Raises ParameterError for a value that cannot be used.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    penalty_window: int | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_window: int | None = None
    dry_sequence_breakers: tuple[str | int, ...] = ("\n", ":", '"', "*")
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    grammar: Any = None
    logits_processors: tuple[Callable[[Any, Any], Any], ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int | None = None
    sampler: Callable[[Any], Any] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    logprobs_mode: str = "raw"
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        checks.truth_value("ignore_eos", self.ignore_eos)
        checks.truth_value("logprobs", self.logprobs)
        checks.check_filters(**{name: getattr(self, name) for name in _FILTERS})
        checks.check_penalties(**{name: getattr(self, name) for name in _PENALTIES})
        self._set("max_tokens", count("max_tokens", self.max_tokens, least=1))
        self._set("min_tokens", count("min_tokens", self.min_tokens, least=0))
        for name in ("top_k", "dry_allowed_length"):
            self._set(name, int(getattr(self, name)))
        for name in ("seed", "penalty_window", "dry_window"):
            value = getattr(self, name)
            self._set(name, None if value is None else int(value))
        self._set("stop", _stops(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("bad_words", _bad_words(self.bad_words))
        self._set("dry_sequence_breakers", _breakers(self.dry_sequence_breakers))
        self._check_length()
        self._check_callables()
        self._check_reports()
        self._check_choices()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < 1e-4 and self.sampler is None

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_length(self) -> None:
        if self.grammar is not None and self.ignore_eos:
            raise ParameterError(
                "ignore_eos has no meaning beside a grammar, which ends by itself"
            )
        if self.min_tokens > self.max_tokens:
            raise ParameterError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}"
            )

    def _check_callables(self) -> None:
        processors = self.logits_processors
        if callable(processors) or not isinstance(processors, Iterable):
            raise ParameterError(
                f"logits_processors is {processors!r:.60}; a list of callables is "
                "needed"
            )
        self._set("logits_processors", tuple(processors))
        for processor in self.logits_processors:
            if not callable(processor):
                raise ParameterError(
                    "logits_processors must be callables from (token ids, logits) to "
                    f"logits, got {processor!r:.60}"
                )
        if self.sampler is None:
            return
        if not callable(self.sampler):
            raise ParameterError(
                "sampler must be a callable from log-probabilities to token ids, "
                f"got {self.sampler!r:.60}"
            )
        changed = [
            name
            for name in _FILTERS
            if getattr(self, name) != getattr(type(self), name)
        ]
        if changed:
            raise ParameterError(
                f"{', '.join(changed)} {'has' if len(changed) == 1 else 'have'} no "
                "effect beside a sampler: leave them out, or give them to make_sampler"
            )

    def _check_reports(self) -> None:
        self._set("top_logprobs", _limited("top_logprobs", self.top_logprobs))
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs needs logprobs=True")
        if self.logprobs_mode not in _MODES:
            raise ParameterError(
                f"logprobs_mode must be 'raw' or 'processed', got "
                f"{self.logprobs_mode!r:.60}"
            )
        if self.logprobs_mode != "raw" and self.sampler is not None:
            raise ParameterError(
                "logprobs_mode 'processed' needs to know the distribution, which a "
                "sampler does not tell"
            )
        if self.prompt_logprobs is not None:
            value = _limited("prompt_logprobs", self.prompt_logprobs)
            self._set("prompt_logprobs", value)

    def _check_choices(self) -> None:
        self._set("n", count("n", self.n, least=1))
        best_of = self.n
        if self.best_of is not None:
            best_of = count("best_of", self.best_of, least=1)
            self._set("best_of", best_of)
            if best_of < self.n:
                raise ParameterError(f"best_of is {best_of}, below n = {self.n}")
        if best_of > _MOST_CHOICES:
            raise ParameterError(
                f"n and best_of may be up to {_MOST_CHOICES}, got {best_of}"
            )
        if best_of > 1 and self.greedy and self.n == best_of:
            raise ParameterError(
                f"n is {self.n}, but at temperature 0 all answers are the same: add a "
                "temperature"
            )
        if best_of > self.n and self.greedy:
            raise ParameterError(
                f"best_of is {best_of}, but at temperature 0 all answers are the same: "
                "add a temperature"
            )


def _limited(name: str, value: object) -> int:
    number = count(name, value, least=0)
    if number > _MOST_LOGPROBS:
        raise ParameterError(f"{name} may be up to {_MOST_LOGPROBS}, got {number}")
    return number


def _stops(stop: object) -> tuple[str, ...]:
    if stop == ():
        return ()
    from ..stop_strings import checked_stops

    return checked_stops(stop)


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise ParameterError(
            f"{name} must be token ids, such as [2, 107], got {ids!r:.60}"
        )
    article = "a stop token id" if name == "stop_token_ids" else f"a token id of {name}"
    return tuple(count(article, id, least=0) for id in ids)


def _biases(biases: object) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise ParameterError(
            f"logit_bias must map token ids to numbers, got {biases!r:.60}"
        )
    checked = {}
    for id, bias in biases.items():
        id = count("a token id of logit_bias", id, least=0)
        if not checks.is_number(bias) or abs(bias) > _MOST_BIAS:
            raise ParameterError(
                f"logit_bias of token {id} must be a finite number within "
                f"{-_MOST_BIAS:g} .. {_MOST_BIAS:g}, got {bias!r:.60}"
            )
        checked[id] = float(bias)
    return checked


def _bad_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(words, (str, bytes)) or not isinstance(words, Iterable):
        raise ParameterError(
            f"bad_words must be a list of strings or of lists of token ids, got "
            f"{words!r:.60}"
        )
    checked: list[str | tuple[int, ...]] = []
    for word in words:
        item = word if isinstance(word, str) else _token_ids("bad_words", word)
        if not item:
            raise ParameterError("bad_words has an empty one, which would forbid all")
        checked.append(item)
    if len(checked) > _MOST_BAD_WORDS:
        raise ParameterError(
            f"bad_words may have up to {_MOST_BAD_WORDS} items, got {len(checked)}"
        )
    return tuple(checked)


def _breakers(breakers: object) -> tuple[str | int, ...]:
    if isinstance(breakers, (str, bytes)) or not isinstance(breakers, Iterable):
        raise ParameterError(
            "dry_sequence_breakers must be a list of strings or token ids, got "
            f"{breakers!r:.60}"
        )
    name = "a token id of dry_sequence_breakers"
    checked = tuple(
        item if isinstance(item, str) else count(name, item, least=0)
        for item in breakers
    )
    if "" in checked:
        raise ParameterError("dry_sequence_breakers has an empty string")
    return checked
