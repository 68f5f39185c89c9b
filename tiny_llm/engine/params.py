"""What one request asks of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ParameterError, whole_number
from ..sampling_checks import check_sampling, is_number

# Decides whatever the logits are, and is still far from overflow.
_MOST_BIAS = 1e6


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when they end.

    max_tokens: most tokens of the answer. temperature, top_k, top_p, min_p, seed: as
    `tiny_llm.sampling.make_sampler` has them; temperature 0 is greedy. stop_token_ids:
    ids that end the answer, beside the model's own. ignore_eos: the model's own do not.
    logit_bias: token id -> what is added to its logit. logprobs: report the tokens'
    log-probabilities. sampler: a callable from log-probabilities [1, V] to ids [1],
    instead of the five values above.

    Raises ParameterError for a value that cannot be used.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: bool = False
    sampler: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        _truth_value("ignore_eos", self.ignore_eos)
        _truth_value("logprobs", self.logprobs)
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        self._set("max_tokens", _count("max_tokens", self.max_tokens, least=1))
        self._set("top_k", int(self.top_k))
        self._set("seed", None if self.seed is None else int(self.seed))
        self._set("stop_token_ids", _token_ids(self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        self._check_sampler()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_sampler(self) -> None:
        if self.sampler is None:
            return
        if not callable(self.sampler):
            raise ParameterError(
                "sampler must be a callable from log-probabilities to token ids, "
                f"got {self.sampler!r}"
            )
        values = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        if values != (0, 0, 1, 0, None):
            raise ParameterError(
                "temperature, top_k, top_p, min_p and seed have no effect beside a "
                "sampler: leave them out, or give them to make_sampler"
            )


def _truth_value(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ParameterError(f"{name} must be True or False, got {value!r}")


def _count(name: str, value: object, *, least: int) -> int:
    if isinstance(value, bool):
        raise ParameterError(f"{name} must be a whole number, not a truth value")
    return whole_number(name, value, least=least)


def _token_ids(ids: object) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise ParameterError(
            f"stop_token_ids must be token ids, such as [2, 107], got {ids!r}"
        )
    return tuple(_count("a stop token id", id, least=0) for id in ids)


def _biases(biases: object) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise ParameterError(
            f"logit_bias must map token ids to numbers, got {biases!r}"
        )
    checked = {}
    for id, bias in biases.items():
        id = _count("a token id of logit_bias", id, least=0)
        if not is_number(bias) or abs(bias) > _MOST_BIAS:
            raise ParameterError(
                f"logit_bias of token {id} must be a finite number within "
                f"{-_MOST_BIAS:g} .. {_MOST_BIAS:g}, got {bias!r:.60}"
            )
        checked[id] = float(bias)
    return checked
