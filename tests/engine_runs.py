"""Requests of an engine, and what each of them must come to: its run alone."""

from functools import cache

import mlx.core as mx
import numpy as np
from oracle import model

from tiny_llm import Engine, stream_generate

GAP = 1e-3  # between the two best logits; closer ones prove nothing


def alone(variant, ids, n):
    """The greedy tokens of a prompt with nobody beside it."""
    tokens = _alone(variant, tuple(ids), n)
    assert tokens is not None, "no test of equality: the two best are too close"
    return list(tokens)


@cache
def _alone(variant, ids, n):
    m = model(variant)
    tokens = list(stream_generate(m, ids, max_new_tokens=n))
    sequence = mx.array([[*ids, *tokens[:-1]]])
    best = mx.sort(m(sequence, logits_to_keep=n)[0], axis=-1)[:, -2:]
    return None if mx.min(best[:, 1] - best[:, 0]).item() < GAP else tokens


def prompts(variant, lengths, answer, seed=0):
    """Random prompts of these lengths, whose first `answer` tokens are beyond doubt."""
    draw = np.random.default_rng(seed)
    vocabulary = model(variant).config.vocab_size
    found = []
    for length in lengths:
        while True:
            ids = tuple(draw.integers(4, vocabulary, length).tolist())
            if _alone(variant, ids, answer) is not None:
                break
        found.append(list(ids))
    return found


def engine_of(m, tokenizer=None, **options):
    """A small engine: 4 requests at a time, pages of 16 tokens, room for 512."""
    m = model(m) if isinstance(m, str) else m
    options = {"max_batch": 4, "page_size": 16, **options}
    if "pages" in options:
        pages = options.pop("pages")
        page = m.config.kv_shape(4).row_bytes() * len(m.layers) * options["page_size"]
        options["kv_memory"] = pages * page
    else:
        options.setdefault("kv_memory", 1 << 20)
    return Engine(m, tokenizer, **options)


def finish(engine):
    """All steps, the books checked after each; at the end no page is in use."""
    while engine.step():
        engine.check_integrity()
    engine.check_integrity()
    assert engine.stats.pages_in_use == 0
    assert (engine.stats.running, engine.stats.waiting) == (0, 0)


class Wrapped:
    """A model with a call of its own."""

    def __init__(self, m, call):
        self._model, self._call = m, call

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, input_ids, **arguments):
        return self._call(self._model, input_ids, **arguments)
