"""Drives the engine through a schedule; each request's run alone to compare with."""

import random
from collections import Counter
from contextlib import ExitStack
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np
from engine_cases import CLOSE, Arrival, Case, any_model
from guesses import Guesses

from tiny_llm import Engine, SamplingParams, memory, stream_generate
from tiny_llm.cache import table as table_module
from tiny_llm.engine import core as core_module
from tiny_llm.memory import page_count
from tiny_llm.sampling.filters import Filters
from tiny_llm.sampling.random_numbers import uniform
from tiny_llm.sampling.select import select

# Noise added to the log-probabilities of a sampled row; a choice that it changes is as
# undecided as one of two logits that are close.
NOISE = np.random.default_rng(0).uniform(-CLOSE, CLOSE, (8, 400)).astype(np.float32)


class Alone(NamedTuple):
    """decided: how many tokens come before the first choice that is a near tie.
    logprobs: of the tokens, where known."""

    tokens: list
    decided: int
    logprobs: list | None = None


# A request alone.


@lru_cache(maxsize=4096)
def alone(name, prompt, n, sampling=None):
    """What stream_generate makes of a prompt, with a fresh cache."""
    model = any_model(name)
    if sampling is not None:
        return _sampled_alone(model, prompt, n, sampling)
    tokens = list(stream_generate(model, prompt, max_new_tokens=n))
    ids = mx.array([[*prompt, *tokens[:-1]]])
    logits = model(ids, logits_to_keep=n)[0]
    best = mx.sort(logits, axis=-1)[:, -2:]
    close = np.array(best[:, 1] - best[:, 0]) <= CLOSE
    logprobs = best[:, 1] - mx.logsumexp(logits, axis=-1)
    return Alone(tokens, _before(close), logprobs.tolist())


def _sampled_alone(model, prompt, n, sampling):
    options = sampling._asdict()
    seed = options.pop("seed")
    close = []

    def choose(logprobs):
        number = uniform(seed, len(close))
        several = mx.concatenate(
            [logprobs, logprobs + mx.array(NOISE[:, : logprobs.shape[1]])]
        )
        count = several.shape[0]
        found = select(
            several, [Filters(**options)] * count, mx.array([number] * count)
        )
        close.append((found.tokens != found.tokens[0]).any().item())
        return found.tokens[:1]

    tokens = list(stream_generate(model, prompt, max_new_tokens=n, sampler=choose))
    return Alone(tokens, _before(close[:n]))


def alone_for(case, arrival):
    """What a request of a case is to give."""
    _, prompt, answer, sampling, _, _ = arrival
    if case.kv_bits is None:
        return alone(case.model, prompt, answer, sampling)
    size = (case.page_size, case.max_batch, case.max_step_tokens, case.slack)
    packing = (case.kv_bits, case.margin)
    return packed_alone(case.model, prompt, answer, sampling, size, packing)


@lru_cache(maxsize=4096)
def packed_alone(name, prompt, n, sampling, size, packing):
    """What an engine with the same packed pages makes of a prompt that comes alone."""
    page_size, max_batch, max_step_tokens, slack = size
    bits, margin = packing
    case = Case(name, [], page_size, max_batch, max_step_tokens, slack=slack)
    close = []

    def choose(logprobs):
        second, best = mx.sort(logprobs[0])[-2:].tolist()
        close.append(best - second <= margin)
        return mx.argmax(logprobs, axis=-1)

    arrival = Arrival(0, prompt, n, sampling)
    own = params(arrival, **({"sampler": choose} if sampling is None else {}))
    changes = {"kv_bits": bits, "prefix_cache": False}
    with at(0), new_engine(case, [arrival], 0, **changes) as engine:
        tokens = engine.submit(prompt, own).result().token_ids
    # (how close the choices of a sampled one were is not known)
    return Alone(tokens, _before(close) if sampling is None else 0)


def _before(close):
    """How many come before the first True."""
    return int(np.argmax([*close, True]))


# The engine.


class Clock:
    """Steps seem to take 0.1 to 500 ms: prompts are cut in all possible ways, and the
    same ones each time."""

    def __init__(self, seed):
        self.random, self.now = random.Random(seed), 0.0

    def perf_counter(self):
        self.now += 10 ** self.random.uniform(-4, -0.3)
        return self.now


def pages_for(model, tokens, page_size, max_append):
    """The fewest pages in which a request of so many tokens fits if it is alone."""
    return max(
        page_count(tokens, page_size, window, max_append)
        for window in model.config.windows
    )


def memory_for(model, pages, page_size, max_batch, max_append, bits=None):
    """Bytes of a pool of so many pages."""
    total = 0
    for window in model.config.windows:
        most = page_count(1 << 60, page_size, window, max_append) * max_batch
        total += pages if window is None else min(pages, most)
    return total * page_size * model.config.kv_shape(4).row_bytes(bits)


def poison(pool):
    """NaN into the pages that nobody holds and nobody could find."""
    for layer, group in enumerate(pool.group_of):
        allocator = pool.allocators[group]
        pool.back(group, allocator.count - 1)
        free = [
            page not in allocator.findable and not held
            for page, held in enumerate(allocator.references)
        ]
        mask = mx.repeat(mx.array(free), pool.page_size)[None, :, None]
        pool.rows[layer] = tuple(
            mx.where(
                mask,
                mx.array(0xFFFFFFFF if a.dtype == mx.uint32 else np.nan).astype(
                    a.dtype
                ),
                a,
            )
            for a in pool.rows[layer]
        )


def params(arrival, **changes):
    options = {"max_tokens": arrival.answer, "stop_token_ids": changes.pop("stops", ())}
    options["logprobs"] = arrival.sampling is None
    if arrival.sampling is not None:
        options |= arrival.sampling._asdict()
    return SamplingParams(**options, **changes)


def compare(result, arrival, expected, stops):
    """Holds a result to its run alone; returns how many tokens could be compared."""
    tokens, decided, logprobs = expected
    ends = [i + 1 for i, token in enumerate(tokens) if token in stops]
    wanted = tokens[: ends[0]] if ends else tokens
    found = result.token_ids
    if result.finish_reason == "cancelled":
        assert arrival.cancel_after is not None
        wanted = wanted[: len(found)]
    elif decided >= len(wanted):
        assert result.finish_reason == ("stop" if ends else "length"), result.error
        assert len(found) == len(wanted)
    assert result.error is None
    count = min(decided, len(wanted))
    assert found[:count] == wanted[:count]
    if logprobs is not None and found:
        differences = np.array(result.logprobs[:count]) - logprobs[: len(found)][:count]
        assert np.abs(differences).max(initial=0) < 1e-3
    return count


def at(clock):
    """A context in which an engine's steps take as long as a Clock says."""
    fake = SimpleNamespace(perf_counter=Clock(clock).perf_counter)
    return mock.patch.object(core_module, "time", fake)


def drive(case):
    """Runs a case; returns a Counter of what it came to see."""
    with ExitStack() as stack:
        for module in (memory, table_module):
            stack.enter_context(mock.patch.object(module, "SLACK", case.slack))
        expected = [alone_for(case, arrival) for arrival in case.arrivals]
        stack.enter_context(at(case.clock))
        return _drive(case, expected)


def new_engine(case, arrivals, spare, known=(), **changes):
    """An engine with so many pages more than the largest request needs.

    known: sequences, for the case's guesses.
    """
    case = case._replace(**changes)
    model = any_model(case.model)
    most = max(len(a.prompt) + a.answer - 1 for a in arrivals)
    pages = pages_for(model, most, case.page_size, case.max_step_tokens) + spare
    size = (case.page_size, case.max_batch, case.max_step_tokens, case.kv_bits)
    options = {
        "kv_memory": memory_for(model, pages, *size) + spare % 3,
        "page_size": case.page_size,
        "max_batch": case.max_batch,
        "max_step_tokens": case.max_step_tokens,
        "prefix_cache": case.prefix_cache,
        "pipeline": case.pipeline,
        "page_views": case.page_views,
        "kv_bits": case.kv_bits,
    }
    most = case.slack - 1 if any(model.config.windows) else 15
    if case.guesses and known and most > 0:
        options["speculation"] = Guesses(
            case.guesses, known, model.config.vocab_size, min(most, 15)
        )
    engine = Engine(model, **options)
    assert engine.pool.most_bytes <= options["kv_memory"]
    return engine


def _drive(case, expected):
    stops = [
        () if a.stop_at is None else (e.tokens[a.stop_at],)
        for a, e in zip(case.arrivals, expected, strict=True)
    ]
    due, at = [], 0
    for arrival in case.arrivals:
        at += arrival.after
        due.append(at)
    handles, tally = [], Counter()
    rows = sum(len(a.prompt) // 8 + a.answer + 3 for a in case.arrivals)
    known = [
        (*a.prompt, *e.tokens) for a, e in zip(case.arrivals, expected, strict=True)
    ]
    with new_engine(case, case.arrivals, case.spare, known) as engine:
        bound = engine.pool.most_bytes
        for step in range(at + 30 + 20 * rows):
            while len(handles) < len(due) and due[len(handles)] <= step:
                place = len(handles)
                own = params(case.arrivals[place], stops=stops[place])
                handles.append(engine.submit(case.arrivals[place].prompt, own))
            for handle, start, arrival in zip(
                handles, due, case.arrivals, strict=False
            ):
                if arrival.cancel_after == step - start:
                    handle.cancel()
            if case.poison:
                poison(engine.pool)
            busy = engine.step()
            engine.check_integrity()
            assert engine.pool.nbytes <= bound  # (the former is that of the arrays now)
            if not busy and len(handles) == len(due):
                break
        else:
            raise AssertionError(f"no end after {step + 1} steps")
        assert engine.stats.pages_in_use == 0
        assert engine.stats.running == engine.stats.waiting == 0
        results = [handle.result() for handle in handles]
        tally["preemptions"] += engine.stats.preemptions
        tally["steps"] += engine.stats.steps
        if engine.speculation is not None:
            tally["drafted"] += engine.speculation.counts.drafted
            tally["accepted"] += engine.speculation.counts.accepted
    for result, *own in zip(results, case.arrivals, expected, stops, strict=True):
        tally["requests"] += 1
        tally["tokens"] += len(result.token_ids)
        tally["compared"] += compare(result, *own)
        tally["cached"] += result.cached_tokens > 0
        tally["sampled"] += own[0].sampling is not None
        tally[result.finish_reason] += 1
    return tally
