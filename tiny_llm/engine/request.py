"""What the engine knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..sampling.params import SamplingParams


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer.

    number: the order of arrival, and the priority: the lower, the older. limit: most
    tokens of the answer (max_tokens, or what the context leaves), at least 1.
    computed: tokens whose K/V are stored, or on their way. in_flight: tokens sampled
    but not read yet, 0 or 1. digests: of the full pages, as PrefixIndex keeps them.
    table: its pages (a PageTable) while it runs. stored: tokens whose K/V have been
    computed for sure. rules: how its tokens are chosen. prompt_logprobs: place in the
    prompt -> what is known of the token there. leader: an older request with the same
    prompt, whose pages it shares. drafting: its speculation, once it decodes; guesses:
    False once that has failed. begun: a
    step has computed something of it. done: it ended, and whatever is still computed
    for it is dropped.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    rules: Any = None
    output: list[int] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0
    preemptions: int = 0
    digests: list[bytes] = field(default_factory=list)
    table: Any = None
    cached_tokens: int = 0
    cache_miss_reason: str | None = None
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)
    leader: Request | None = None
    drafting: Any = None
    guesses: bool = True
    stored: int = 0
    begun: bool = False
    done: bool = False

    @property
    def length(self) -> int:
        """Tokens there are: the prompt, what was read and what is not read yet."""
        return len(self.prompt) + len(self.output) + self.in_flight

    @property
    def remaining(self) -> int:
        """Rows that can be computed now."""
        return self.length - self.computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether rows of its prompt must still be computed for their logits."""
        return (
            self.params.prompt_logprobs is not None
            and len(self.prompt_logprobs) < len(self.prompt) - 1
        )

    @property
    def follows(self) -> bool:
        """Whether its prompt is being computed for an older request."""
        leader = self.leader
        return (
            leader is not None
            and leader.table is not None
            and not leader.done
            and leader.stored < len(self.prompt) - 1
        )

    @property
    def decoding(self) -> bool:
        """Only its newest token, one it sampled, is to be computed."""
        answered = len(self.output) + self.in_flight
        return answered > 0 and len(self.prompt) + answered - self.computed == 1

    @property
    def exhausted(self) -> bool:
        """Nothing more is to be computed for it."""
        return len(self.output) + self.in_flight >= self.limit

    @property
    def most(self) -> int:
        """Most tokens whose K/V it will ever store: the last of all is not computed."""
        return len(self.prompt) + self.limit - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """The ids of its tokens start .. stop, as far as they were read."""
        prompt = self.prompt[start:stop]
        first = len(self.prompt)
        return prompt + self.output[max(start - first, 0) : max(stop - first, 0)]
