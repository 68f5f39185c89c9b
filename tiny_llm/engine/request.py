"""What the engine knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .params import SamplingParams


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer.

    number: the order of arrival, and the priority: the lower, the older. limit: most
    tokens of the answer (max_tokens, or what the context leaves), at least 1.
    computed: tokens whose K/V are stored, or on their way. in_flight: tokens sampled
    but not read yet, 0 or 1. digests: of the full pages, as PrefixIndex keeps them.
    table: its pages (a PageTable) while it runs. keys: of its random choices, once it
    made one. begun: a step has computed something of it. done: it ended, and whatever
    is still computed for it is dropped.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    output: list[int] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0
    preemptions: int = 0
    digests: list[bytes] = field(default_factory=list)
    table: Any = None
    cached_tokens: int = 0
    cache_miss_reason: str | None = None
    keys: Any = None
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
