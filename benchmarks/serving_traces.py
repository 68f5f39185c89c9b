"""The traces of serving_load.py, the clock that plays one, and what is computed of it.

Plain Python and NumPy: the engines under test run elsewhere (serving_peers.py).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

TRACES = {
    "a": "8 prompts of 128 tokens at once, 64 new tokens each",
    "b": "32 prompts of 128 tokens at once, 64 new tokens each",
    "c": "64 requests arriving at random at 0.27 a second, prompts of 20 to 400 tokens "
    "(half of them behind a shared one of 200 more), answers of 10 to 200",
    "c-all": "the 64 requests of c, all at once",
    "d": "a prompt of 4,000 tokens (32 new) arriving among 8 streams (prompts of 64, "
    "256 new) that have written 16 tokens each",
    "e": "8 prompts of 16 tokens at once, 128 new each: hardly more than decoding",
}
RATE = 0.27  # arrivals per second of trace c


class Arrival(NamedTuple):
    """One request of a trace."""

    at: float  # seconds after the start
    prompt: list[int]
    new_tokens: int
    system: int = 0  # so many first tokens of the prompt are its system prompt
    after: int = 0  # not before all earlier requests have written so many tokens


def arrivals(
    name: str, vocabulary: int, *, quick: bool = False, answers: float = 1.0
) -> list[Arrival]:
    """A trace, the same at every call, in order of arrival.

    Token ids are random, without the ends of the vocabulary (special tokens). `answers`
    scales the number of new tokens. quick: a quarter of the requests, lengths / 8.
    """
    generator = np.random.default_rng(4)
    margin = vocabulary // 100

    def size(tokens: int) -> int:
        return max(tokens // 8, 1) if quick else tokens

    def new(tokens: int) -> int:
        return max(round(size(tokens) * answers), 1)

    def prompt(tokens: int) -> list[int]:
        ids = generator.integers(margin, vocabulary - margin, size(tokens))
        return [int(i) for i in ids]

    def count(requests: int) -> int:
        return max(requests // 4, 2) if quick else requests

    if name == "e":
        return [Arrival(0.0, prompt(16), new(128)) for _ in range(count(8))]
    if name in ("a", "b"):
        requests = count(8 if name == "a" else 32)
        return [Arrival(0.0, prompt(128), new(64)) for _ in range(requests)]
    if name in ("c", "c-all"):
        requests = count(64)
        system = prompt(200)
        behind = set(generator.permutation(requests)[: requests // 2].tolist())
        rate = RATE * 40 if quick else RATE
        times = np.cumsum(generator.exponential(1 / rate, requests))
        times = times - times[0] if name == "c" else np.zeros(requests)
        trace = []
        for n, at in enumerate(times.tolist()):
            head = system if n in behind else []
            own = prompt(int(generator.integers(20, 401)))
            answer = new(int(generator.integers(10, 201)))
            trace.append(Arrival(at, head + own, answer, len(head)))
        return trace
    if name == "d":
        streams = [Arrival(0.0, prompt(64), new(256)) for _ in range(count(8))]
        after = min(size(16), new(256))
        return [*streams, Arrival(0.0, prompt(4000), new(32), after=after)]
    raise ValueError(f"there is no trace {name!r}: choose among {', '.join(TRACES)}")


def warm_up(vocabulary: int) -> list[Arrival]:
    """A small load to be run before the measured one: no token of it is in a trace."""
    low = np.random.default_rng(40).integers(0, max(vocabulary // 100, 1), (3, 48))
    return [Arrival(0.0, row, 8) for row in low.tolist()]


class Load:
    """Plays a trace to an engine, and writes down when each token comes out.

    The engine asks for what is `due`, calls `token` as soon as a token is in the
    caller's hands, and `rest`s where it has nothing to do, until `done`.
    """

    def __init__(
        self,
        trace: Sequence[Arrival],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.trace = trace
        self.clock, self.sleep = clock, sleep
        self.began = 0.0
        self.arrived: list[float] = []  # of those that are due, seconds after the start
        self.times: list[list[float]] = [[] for _ in trace]
        self.tokens: list[list[int]] = [[] for _ in trace]

    def start(self) -> None:
        """The trace begins now: whatever the engine needs, it has made."""
        self.began = self.clock()

    @property
    def done(self) -> bool:
        """All tokens of all requests are there."""
        return all(
            len(times) >= request.new_tokens
            for times, request in zip(self.times, self.trace, strict=True)
        )

    def due(self) -> list[int]:
        """The requests (numbers) that have arrived since the last call.

        They arrived when the trace says, which may be some time ago: what an engine
        makes a request wait before it looks counts as the request's waiting.
        """
        first = len(self.arrived)
        now = self.clock() - self.began
        while (number := len(self.arrived)) < len(self.trace):
            request = self.trace[number]
            at = request.at
            if request.after:
                earlier = self.times[:number]
                if any(len(times) < request.after for times in earlier):
                    break
                at = max(at, *(times[request.after - 1] for times in earlier))
            if at > now:
                break
            self.arrived.append(at)
        return list(range(first, len(self.arrived)))

    def token(self, number: int, token: int) -> None:
        """A token of a request is in the caller's hands."""
        self.times[number].append(self.clock() - self.began)
        self.tokens[number].append(token)

    def rest(self) -> None:
        """Nothing to do: sleep until the next request may have arrived."""
        number = len(self.arrived)
        wait = 0.001
        if number < len(self.trace) and not self.trace[number].after:
            wait = self.trace[number].at - (self.clock() - self.began)
        self.sleep(max(wait, 0.0))


def percentile(values: Iterable[float], percent: float) -> float:
    """With linear interpolation between neighbours; nan of nothing."""
    found = list(values)
    return float(np.percentile(found, percent)) if found else float("nan")


def metrics(
    trace: Sequence[Arrival],
    arrived: Sequence[float],
    times: Sequence[Sequence[float]],
) -> dict[str, float]:
    """Rates per second of the makespan, latencies in seconds.

    stall: the largest gap, from the arrival of a late request on (trace d), of the
    streams that it finds running, to the median of all their gaps; stall_calm: to the
    median of those before it came.
    """
    makespan = max(t[-1] for t in times) - min(arrived)
    new = sum(map(len, times))
    read = sum(len(request.prompt) for request in trace)
    first = [t[0] - at for t, at in zip(times, arrived, strict=True)]
    whole = [t[-1] - at for t, at in zip(times, arrived, strict=True)]
    gaps = [gap for t in times for gap in np.diff(t).tolist()]
    found = {
        "makespan": makespan,
        "new_per_second": new / makespan,
        "prompt_per_second": read / makespan,
        "all_per_second": (new + read) / makespan,
        "first_p50": percentile(first, 50),
        "first_p95": percentile(first, 95),
        "whole_p50": percentile(whole, 50),
        "whole_p95": percentile(whole, 95),
        "gap_p50": percentile(gaps, 50),
        "gap_p95": percentile(gaps, 95),
        "gap_max": max(gaps, default=float("nan")),
    }
    late = [at for at, r in zip(arrived, trace, strict=True) if r.after]
    if late:
        pairs = list(zip(trace, times, strict=True))
        streams = [t for r, t in pairs if not r.after]
        running = [gap for t in streams for gap in np.diff(t).tolist()]
        before = ([at for at in t if at <= late[0]] for t in streams)
        calm = [gap for t in before for gap in np.diff(t).tolist()]
        found["late_first"] = next(t[0] for r, t in pairs if r.after) - late[0]
        since = (t[bisect_right(t, late[0]) - 1 :] for t in streams)
        after = [gap for t in since for gap in np.diff(t).tolist()]
        worst = max(after, default=float("nan"))
        found["stall"] = worst / percentile(running, 50)
        found["stall_calm"] = worst / percentile(calm, 50)
    return found
