"""Random schedules for the engine: who arrives when with what, in which pool."""

import random
from functools import cache
from typing import NamedTuple

import oracle
from hypothesis import strategies as st

from tiny_llm import memory

LONGEST = 300  # tokens of a prompt
ANSWER = 24  # tokens of an answer at most
CLOSE = 1e-3  # two logits nearer than this may change places with the products' shapes

_MIXED = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
_WIDE = {"head_dim": 64}  # heads that can be packed
_RANDOM = {
    "qwen2_mixed": ("qwen2", _MIXED),
    "llama_wide": ("llama_tied", _WIDE),
    "mistral_wide": ("mistral_swa", _WIDE),
    "qwen2_wide": ("qwen2", {**_MIXED, **_WIDE}),
}


@cache
def any_model(name):
    if name in oracle.VARIANTS:
        return oracle.model(name)
    variant, changes = _RANDOM[name]
    return oracle.random_model(variant, **changes)


class Sampling(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


class Arrival(NamedTuple):
    """after: steps since the arrival before. stop_at: the token it chooses there alone
    is to end its answer. cancel_after: so many steps from its arrival."""

    after: int
    prompt: tuple
    answer: int
    sampling: Sampling | None = None
    stop_at: int | None = None
    cancel_after: int | None = None


class Case(NamedTuple):
    """spare: pages more than the largest request needs. slack: of pages behind windows.
    margin: logits nearer than that may change places where pages are packed. clock:
    seed of how long steps seem to take. poison: NaN in pages that are free. guesses:
    0, or the seed of what is guessed and verified."""

    model: str
    arrivals: list
    page_size: int = 16
    max_batch: int = 4
    max_step_tokens: int = 512
    spare: int = 0
    slack: int = memory.SLACK
    prefix_cache: bool = True
    pipeline: bool = False
    page_views: bool = True
    kv_bits: int | None = None
    margin: float = CLOSE
    clock: int = 0
    poison: bool = False
    guesses: int = 0


# Prompts: some first tokens of one of three texts, and some of their own.


@cache
def _text(seed):
    return tuple(random.Random(seed).choices(range(300), k=LONGEST))


def prompt_of(length, seed=3):
    return _text(seed)[:length]


@st.composite
def prompts(draw, longest):
    length = draw(st.integers(1, longest))
    shared = draw(st.sampled_from([0, length, length // 2]) | st.integers(0, length))
    text = _text(draw(st.integers(0, 2)))[:shared]
    return text + _text(draw(st.integers(3, 9)))[: length - shared]


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 3),
)
SELDOM = st.sampled_from([False, False, False, True])


@st.composite
def arrivals(draw, longest, crowded):
    answer = draw(st.sampled_from([1, 2, ANSWER]) | st.integers(1, ANSWER))
    if crowded:
        answer = draw(st.integers(ANSWER // 2, ANSWER))
    return Arrival(
        after=draw(st.sampled_from([0, 0, 0, 1, 2, 7])),
        prompt=draw(prompts(longest)),
        answer=answer,
        sampling=draw(SAMPLINGS) if draw(SELDOM) else None,
        stop_at=draw(st.integers(0, answer - 1)) if draw(SELDOM) else None,
        cancel_after=draw(st.integers(0, 30)) if draw(SELDOM) else None,
    )


@st.composite
def cases(draw, model, **fixed):
    """crowded: small pages, few of them, and answers longer than the scheduler expects:
    requests are preempted."""
    crowded = draw(st.booleans())
    max_batch = draw(st.integers(4 if crowded else 1, 8))
    sizes, spares = [16, 1, 2, 4, 8, 64], [0, 1, 2, 5, 10, 30, 100]
    of = {
        "page_size": st.sampled_from(sizes[1:5] if crowded else sizes),
        "max_step_tokens": st.integers(max_batch, 40) | st.sampled_from([100, 512]),
        "spare": st.sampled_from(spares[:5] if crowded else spares),
        "slack": st.sampled_from([memory.SLACK, 0, 3]),
        "prefix_cache": st.booleans(),
        "pipeline": st.booleans(),
        "page_views": st.booleans(),
        "clock": st.integers(0, 1000),
        "poison": SELDOM,
        "guesses": st.sampled_from([0, 0, 1, 2]),
    }
    drawn = {name: draw(s) for name, s in of.items() if name not in fixed}
    longest = draw(st.sampled_from([12, 40] if crowded else [40, 12, LONGEST]))
    several = draw(st.lists(arrivals(longest, crowded), min_size=8, max_size=20))
    if crowded:  # as short an answer as the first is expected of the others
        several[0] = Arrival(0, several[0].prompt, 1)
        several[1] = several[1]._replace(after=7)
    return Case(model, several, max_batch=max_batch, **drawn, **fixed)
