"""What came of one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Result:
    """What was generated. The token ids include the closing EOS id and the tokens of
    a stop string, the text does not.

    reasoning: what a model thought before its answer, where its tokenizer declares tags
    for that (tiny_llm/reasoning.py); text is the answer alone then.
    finish_reason: "stop" (an EOS id, a stop id or a stop string came), "length" (as
    many tokens as were asked for, or the context is full); of an engine's requests also
    "cancelled" and "error" (`error` says which); "" while the stream is open or if it
    was closed early.
    stop_reason: with "stop", the id or the stop string that ended it.
    queued_seconds: until work on it began; prompt_seconds: from there to the first
    token; decode_seconds: from there to the last. cached_tokens: of the prompt, found
    in the prefix cache; cache_miss_reason: why not more, where that was little.
    logprobs: of each token, if asked for; top_logprobs: the likeliest (token id,
    log-probability)s in its place, in falling order. prompt_logprobs: the same of each
    token of the prompt but the first, as (own, likeliest).
    choices: where several answers were asked for, all of them, this one first.
    """

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    queued_seconds: float = 0.0
    cached_tokens: int = 0
    cache_miss_reason: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None
    choices: list[Result] = field(default_factory=list, repr=False)
    error: Exception | None = None

    @property
    def first_token_seconds(self) -> float:
        """From the request to its first token."""
        return self.queued_seconds + self.prompt_seconds

    @property
    def total_seconds(self) -> float:
        """From the request to its last token."""
        return self.first_token_seconds + self.decode_seconds

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens over the time from the beginning of work to the first token."""
        return self.prompt_tokens / max(self.prompt_seconds, 1e-9)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first over the time they took; 0 if there are none."""
        return max(len(self.token_ids) - 1, 0) / max(self.decode_seconds, 1e-9)
