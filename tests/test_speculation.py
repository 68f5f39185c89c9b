"""Speculation changes how many passes are made, never which tokens come."""

from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import VARIANTS, goldens, model, naive_greedy, random_model, smollm2_cases

import tiny_llm
from tiny_llm import make_sampler, stream_generate
from tiny_llm.errors import OutOfPagesError, ParameterError
from tiny_llm.speculation import (
    Drafter,
    DraftLength,
    DraftModel,
    PromptLookup,
    Speculation,
)

PROMPT = 1  # of the goldens: 17 tokens


class Scripted(Speculation):
    """Guesses what a function of (tokens, most) says."""

    def __init__(self, guess, max_draft=63):
        super().__init__(max_draft)
        self.guess = guess

    def drafter(self, vocabulary):
        return ScriptedDrafter(self.guess)


class ScriptedDrafter(Drafter):
    def __init__(self, guess):
        self.guess = guess

    def look(self, tokens):
        return 0

    def propose(self, tokens, most):
        return self.guess(tokens, most)


def knowing(right, lies=()):
    """Guesses that are right but at some places of the sequence."""

    def guess(tokens, most):
        draft = right[len(tokens) : len(tokens) + most]
        return [
            token + 1 if len(tokens) + n in lies else token
            for n, token in enumerate(draft)
        ]

    return guess


@contextmanager
def always():
    """Whatever was right before, as many tokens are guessed as may be."""
    with mock.patch.object(
        DraftLength, "choose", lambda self, level, most, beside=0: most
    ):
        yield


def ways(m, golden):
    right = [*golden.ids, *golden.greedy]
    return {
        "lookup": PromptLookup(min_ngram=1, max_ngram=3),
        "itself": DraftModel(m, max_draft=5),
        "right": Scripted(knowing(right), max_draft=7),
        "sometimes": Scripted(knowing(right, lies=range(0, 200, 3))),
        "wrong": Scripted(knowing(right, lies=range(200)), max_draft=3),
        "random": Scripted(lambda tokens, most: [len(tokens) * 7919 % 300] * most, 9),
    }


KINDS = {
    "own": None,
    "dense": ("dense", {}),
    "rotating": ("rotating", {}),
    "paged": ("paged", {"tokens": 256, "page_size": 4}),
    "wide pages": ("paged", {"tokens": 256, "page_size": 64}),
}


def new_cache(m, kind):
    if KINDS[kind] is None:
        return None
    name, options = KINDS[kind]
    if name == "rotating" and not any(m.config.windows):
        options = {"window": 256}  # (more than there are tokens)
    return m.create_kv_cache(name, **options)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_guess_gives_the_tokens_of_the_reference(variant, kind):
    m = model(variant)
    for golden in goldens(variant):
        for name, speculation in ways(m, golden).items():
            cache = new_cache(m, kind)
            with always():
                tokens = stream_generate(
                    m,
                    golden.ids,
                    max_new_tokens=24,
                    cache=cache,
                    speculation=speculation,
                )
                assert list(tokens) == golden.greedy, name
            assert speculation.counts.passes or name == "lookup"
            if cache is not None:
                held = len(golden.ids) + 24
                assert [entry.offset for entry in cache] == [held] * len(cache)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_adaptive_number_gives_the_tokens_of_the_reference(variant):
    m = model(variant)
    for golden in goldens(variant):
        for name, speculation in ways(m, golden).items():
            tokens = stream_generate(
                m, golden.ids, max_new_tokens=24, speculation=speculation
            )
            assert list(tokens) == golden.greedy, name


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["quantized", "rotating", "paged"])
def test_packed_caches_give_what_they_give_without_speculation(kind, bits):
    m, golden = model("qwen3"), goldens("qwen3")[PROMPT]
    options = {"bits": bits, "group_size": 32}
    if kind == "paged":
        options |= {"tokens": 256, "page_size": 16}
    if kind == "rotating":
        options |= {"window": 64}
    plain = list(
        stream_generate(
            m, golden.ids, max_new_tokens=24, cache=m.create_kv_cache(kind, **options)
        )
    )
    right = [*golden.ids, *plain]
    for lies in ((), range(0, 99, 4), range(99)):
        with always():
            tokens = stream_generate(
                m,
                golden.ids,
                max_new_tokens=24,
                cache=m.create_kv_cache(kind, **options),
                speculation=Scripted(knowing(right, lies), max_draft=6),
            )
            assert list(tokens) == plain


@pytest.mark.parametrize("variant", ["llama_tied", "mistral_swa", "qwen3"])
def test_a_model_that_drafts_for_itself_is_always_right(variant):
    m, golden = model(variant), goldens(variant)[PROMPT]
    expected = list(stream_generate(m, golden.ids, max_new_tokens=200))
    speculation = DraftModel(m, max_draft=4)
    with always():
        tokens = stream_generate(
            m, golden.ids, max_new_tokens=200, speculation=speculation
        )
        assert list(tokens) == expected
    counts = speculation.counts
    assert counts.acceptance == 1.0
    assert counts.drafted == counts.accepted
    assert counts.passes + counts.drafted >= 195  # (all but the first and the last)


@pytest.mark.parametrize(
    ("variant", "kind", "options"),
    [
        ("mistral_swa", None, {}),
        ("mistral_swa", "rotating", {}),
        ("mistral_swa", "paged", {"tokens": 640, "page_size": 4}),
        ("llama_tied", "rotating", {"window": 32, "keep": 4}),
    ],
)
def test_guesses_are_taken_back_where_a_window_moves_on(variant, kind, options):
    # (a rotating buffer of 512 tokens is full, and pages are given back)
    m = random_model(variant, max_position_embeddings=1024)
    ids = np.random.default_rng(5).integers(0, 320, 450).tolist()

    def run(speculation=None):
        cache = m.create_kv_cache(kind, **options) if kind else None
        return list(
            stream_generate(
                m,
                ids,
                max_new_tokens=120,
                prefill_chunk=64,
                cache=cache,
                speculation=speculation,
            )
        )

    expected = run()
    for lies in (range(0, 9999, 5), range(9999)):
        guess = knowing([*ids, *expected], lies)
        with always():
            assert run(Scripted(guess, max_draft=20)) == expected


@pytest.mark.parametrize("limit", range(13))
@pytest.mark.parametrize("name", ["right", "sometimes", "itself"])
def test_there_are_never_more_tokens_than_asked_for(limit, name):
    m, golden = model("qwen3"), goldens("qwen3")[PROMPT]
    cache = m.create_kv_cache()
    with always():
        tokens = stream_generate(
            m,
            golden.ids,
            max_new_tokens=limit,
            cache=cache,
            speculation=ways(m, golden)[name],
        )
        assert list(tokens) == golden.greedy[:limit]
    assert cache[0].offset == len(golden.ids) + limit


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("name", ["right", "sometimes", "itself", "wrong"])
@pytest.mark.parametrize("sampled", [False, True])
def test_an_eos_id_among_guesses_ends_the_stream_there(place, name, sampled):
    m, golden = model("qwen3"), goldens("qwen3")[PROMPT]
    eos = golden.greedy[place]
    expected = golden.greedy[: golden.greedy.index(eos) + 1]
    cache = m.create_kv_cache()
    with always():
        tokens = stream_generate(
            m,
            golden.ids,
            eos_token_ids=[eos],
            cache=cache,
            speculation=ways(m, golden)[name],
            sampler=(lambda p: mx.argmax(p, axis=-1)) if sampled else None,
        )
        seen = [next(tokens) for _ in expected]
        # ... and when the EOS id comes, all is settled already
        assert [e.offset for e in cache] == [len(golden.ids) + len(expected)] * 2
        assert list(tokens) == []
    assert seen == expected


class Recorder:
    """A sampler and a processor that keep what they were given."""

    def __init__(self, choose):
        self.choose, self.inputs, self.histories = choose, [], []

    def processor(self, tokens, logits):
        self.histories.append(tokens.tolist())
        ids = tokens[-5:]  # as a repetition penalty
        logits[:, ids] = logits[:, ids] - 3.0
        return logits

    def sampler(self, logprobs):
        self.inputs.append(np.array(logprobs))
        return self.choose(logprobs)


@pytest.mark.parametrize("name", ["right", "sometimes", "wrong", "random", "lookup"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_processors_and_samplers_see_what_they_see_without_speculation(name, seed):
    m, golden = model("llama_tied"), goldens("llama_tied")[PROMPT]

    def run(speculation):
        sampler = make_sampler(0.0 if seed is None else 1.0, seed=seed)
        seen = Recorder(sampler)
        with always():
            tokens = stream_generate(
                m,
                golden.ids,
                max_new_tokens=20,
                logits_processors=[seen.processor],
                sampler=seen.sampler,
                speculation=speculation,
            )
            return list(tokens), seen

    expected, plain = run(None)
    if name == "random":
        speculation = ways(m, golden)["random"]
    elif name == "lookup":
        speculation = PromptLookup(min_ngram=1)
    else:
        lies = {"right": (), "sometimes": range(0, 99, 3), "wrong": range(99)}[name]
        right = [*golden.ids, *expected]
        speculation = Scripted(knowing(right, lies), max_draft=6)
    tokens, seen = run(speculation)
    assert tokens == expected
    assert seen.histories == plain.histories
    assert plain.histories == [
        [*golden.ids, *expected[:count]] for count in range(len(expected))
    ]
    assert len(seen.inputs) == len(plain.inputs) == 20
    for a, b in zip(seen.inputs, plain.inputs, strict=True):
        assert np.abs(a - b).max() < 1e-3
    if name == "right":
        assert speculation.counts.acceptance == 1.0


def test_processors_are_applied_in_order_before_the_sampler_and_to_argmax():
    m, golden = model("qwen2"), goldens("qwen2")[PROMPT]

    def only(*ids):
        return lambda tokens, logits: mx.where(
            (mx.arange(384) == mx.array(ids)[:, None]).any(axis=0), logits, -mx.inf
        )

    for sampler in (None, make_sampler(1.0, seed=1)):
        tokens = stream_generate(
            m,
            golden.ids,
            max_new_tokens=5,
            logits_processors=[only(5, 6, 7), only(6, 9)],
            sampler=sampler,
        )
        assert list(tokens) == [6] * 5
    assert list(
        stream_generate(m, golden.ids, max_new_tokens=24, logits_processors=[])
    ) == (golden.greedy)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None"),
        (mx.zeros((384,)), r"returned .*float32 \(384,\); logits \(1, 384\)"),
        (mx.zeros((1, 383)), r"\(1, 383\)"),
        (mx.zeros((1, 384), dtype=mx.int32), "int32"),
    ],
)
@pytest.mark.parametrize("calls_before", [0, 3])
@pytest.mark.parametrize("speculating", [False, True])
def test_a_processor_that_returns_no_logits_is_named(
    returned, words, calls_before, speculating
):
    m, golden = model("qwen2"), goldens("qwen2")[PROMPT]
    cache, calls, seen = m.create_kv_cache(), [], []

    def processor(tokens, logits):
        calls.append(1)
        return returned if len(calls) > calls_before else logits

    speculation = ways(m, golden)["right"] if speculating else None
    with always():
        stream = stream_generate(
            m,
            golden.ids,
            logits_processors=[lambda tokens, logits: logits, processor],
            cache=cache,
            speculation=speculation,
        )
        with pytest.raises(ParameterError, match=words) as caught:
            seen.extend(stream)
    assert "logits_processors[1]" in str(caught.value)
    assert seen == golden.greedy[: len(seen)]
    assert len(seen) >= calls_before - 1
    assert [e.offset for e in cache] == [len(golden.ids) + len(seen)] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculation": "lookup"}, "speculation is 'lookup'; PromptLookup"),
        ({"speculation": PromptLookup}, "speculation is <class"),
        ({"logits_processors": 5}, "logits_processors is 5"),
        ({"logits_processors": print}, "logits_processors is <built-in"),
        ({"logits_processors": [print, None]}, "a list of functions"),
        (
            {"speculation": DraftModel(model("mistral_swa"))},
            "draft model has 320 token ids and the model 384",
        ),
    ],
)
def test_bad_arguments_fail_at_the_call(options, words):
    m = model("llama_tied")
    cache = m.create_kv_cache()
    with pytest.raises(ParameterError, match=words):
        stream_generate(m, [1, 2, 3], cache=cache, **options)
    assert cache[0].offset == 0


def test_a_draft_model_must_be_a_model():
    with pytest.raises(ParameterError, match=r"'smollm2'; a model of load_model"):
        DraftModel("smollm2")


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("how", ["close", "forget"])
@pytest.mark.parametrize("kind", ["dense", "rotating", "paged"])
@pytest.mark.parametrize("name", ["right", "sometimes", "wrong"])
def test_a_stream_that_is_left_leaves_the_cache_with_what_was_yielded(
    stop_after, how, kind, name
):
    m, golden = model("mistral_swa"), goldens("mistral_swa")[PROMPT]
    cache = new_cache(m, kind)
    with always():
        tokens = stream_generate(
            m, golden.ids, cache=cache, speculation=ways(m, golden)[name]
        )
        seen = [next(tokens) for _ in range(stop_after)]
        if how == "close":
            tokens.close()
        else:
            del tokens
    held = [*golden.ids, *seen]
    assert [entry.offset for entry in cache] == [len(held)] * len(cache)
    more = stream_generate(m, [5, 6], max_new_tokens=4, cache=cache)
    assert list(more) == naive_greedy(m, [*held, 5, 6], 4)


@pytest.mark.parametrize("wanted", range(1, 9))
def test_a_pool_without_room_for_guesses_has_room_for_plain_tokens(wanted):
    # 12 tokens of prompt and 4 new ones fill the pool: the fifth has come, unstored
    m = model("llama_tied")
    expected = naive_greedy(m, [1] * 12, 5)
    for lies in ((), range(0, 40, 2)):
        cache = m.create_kv_cache("paged", tokens=16, page_size=16)
        right = [1] * 12 + expected + [0] * 9
        seen = []
        with always():
            stream = stream_generate(
                m,
                [1] * 12,
                max_new_tokens=wanted,
                cache=cache,
                speculation=Scripted(knowing(right, lies)),
            )
            if wanted > 5:
                with pytest.raises(OutOfPagesError, match="1 more pages"):
                    seen.extend(stream)
            else:
                seen.extend(stream)
        assert seen == expected[:wanted]
        assert cache[0].offset == 12 + min(wanted, 4)


@pytest.mark.parametrize("name", ["itself", "zeros"])
def test_guesses_end_where_the_context_does(name):
    m = model("llama_tied")
    expected = list(stream_generate(m, [1] * 500, max_new_tokens=50))
    assert len(expected) == 13
    speculation = Scripted(lambda tokens, most: [0] * most)
    if name == "itself":
        speculation = DraftModel(m)
    cache = m.create_kv_cache()
    with always():
        tokens = stream_generate(
            m, [1] * 500, max_new_tokens=50, cache=cache, speculation=speculation
        )
        assert list(tokens) == expected
    assert cache[0].offset == 512


@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_failing_sampler_leaves_the_cache_with_what_was_yielded(call):
    m, golden = model("qwen2"), goldens("qwen2")[PROMPT]
    cache, calls, seen = m.create_kv_cache(), [], []

    def sampler(logprobs):
        calls.append(1)
        if len(calls) == call + 1:
            raise RuntimeError("no more")
        return mx.argmax(logprobs, axis=-1)

    with always():
        stream = stream_generate(
            m,
            golden.ids,
            sampler=sampler,
            cache=cache,
            speculation=ways(m, golden)["right"],
        )
        with pytest.raises(RuntimeError, match="no more"):
            seen.extend(stream)
    assert seen == golden.greedy[: len(seen)]
    assert call - 1 <= len(seen) <= call
    assert [entry.offset for entry in cache] == [len(golden.ids) + len(seen)] * 2


def test_a_sampler_that_chooses_no_token_is_named():
    m, golden = model("qwen2"), goldens("qwen2")[PROMPT]
    cache, calls, seen = m.create_kv_cache(), [], []

    def sampler(logprobs):
        calls.append(1)
        return mx.array([999]) if len(calls) == 4 else mx.argmax(logprobs, axis=-1)

    with always():
        stream = stream_generate(
            m,
            golden.ids,
            sampler=sampler,
            cache=cache,
            speculation=ways(m, golden)["right"],
        )
        with pytest.raises(ParameterError, match=r"token id 999.*vocabulary of 384"):
            seen.extend(stream)
    assert seen == golden.greedy[:3]
    assert cache[0].offset == len(golden.ids) + 3


@pytest.mark.parametrize("calls_before", [1, 2, 3])
def test_an_interrupt_between_two_layers_leaves_the_cache_consistent(
    calls_before, monkeypatch
):
    m, golden = model("qwen3"), goldens("qwen3")[PROMPT]
    cache, calls, seen = m.create_kv_cache(), [], []
    block = type(m.layers[1])
    call = block.__call__

    def interrupted(self, *args):
        if self is m.layers[1]:
            calls.append(1)
            if len(calls) == calls_before + 1:
                raise KeyboardInterrupt
        return call(self, *args)

    with monkeypatch.context() as patch, always():
        patch.setattr(block, "__call__", interrupted)
        stream = stream_generate(
            m, golden.ids, cache=cache, speculation=ways(m, golden)["right"]
        )
        with pytest.raises(KeyboardInterrupt):
            seen.extend(stream)
    held = [*golden.ids, *seen]
    assert [entry.offset for entry in cache] == [len(held)] * 2
    after = list(stream_generate(m, [9], max_new_tokens=5, cache=cache))
    assert after == naive_greedy(m, [*held, 9], 5)


def test_a_draft_model_that_was_interrupted_goes_on():
    m, golden = model("qwen3"), goldens("qwen3")[PROMPT]
    drafter = DraftModel(m).drafter(320)
    assert drafter.propose(golden.ids, 5) == golden.greedy[:5]
    with (
        mock.patch.object(drafter, "_step", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        drafter.propose([*golden.ids, *golden.greedy[:2]], 5)
    longer = [*golden.ids, *golden.greedy[:3]]
    assert drafter.propose(longer, 5) == golden.greedy[3:8]


@pytest.mark.parametrize("variant", ["qwen3", "mistral_swa"])
def test_a_draft_model_follows_whatever_the_tokens_become(variant):
    m = model(variant)
    drafter, draw = DraftModel(m).drafter(m.config.vocab_size), np.random.default_rng(3)
    tokens = draw.integers(0, 300, 30).tolist()
    for turn in range(30):
        most = int(draw.integers(1, 9))
        fresh = DraftModel(m).drafter(m.config.vocab_size)
        draft = drafter.propose(tokens, most)
        assert draft == fresh.propose(tokens, most)
        assert drafter.propose(tokens, most) == draft  # (asked once more)
        assert len(draft) == most
        tokens += draft[: int(draw.integers(0, most + 1))]
        tokens += draw.integers(0, 300, int(draw.integers(1, 4))).tolist()
        if turn % 10 == 9:  # another text
            tokens = [*tokens[:10], *draw.integers(0, 300, 20).tolist()]


def test_a_draft_model_drafts_within_its_own_context():
    m, golden = model("qwen3"), goldens("qwen3")[PROMPT]
    small = random_model("qwen3", max_position_embeddings=24)
    drafter = DraftModel(small).drafter(320)
    drafts = [drafter.propose([1] * length, 6) for length in (17, 20, 24, 25)]
    assert [len(draft) for draft in drafts] == [6, 5, 1, 0]
    looks = [drafter.look([1] * length) for length in (24, 25)]
    assert looks == [0, None]
    with always():
        tokens = stream_generate(
            m, golden.ids, max_new_tokens=24, speculation=DraftModel(small)
        )
        assert list(tokens) == golden.greedy


class Passes:
    """Counts the rows of a model's passes, and who was yielded meanwhile."""

    def __init__(self, m):
        self.model, self.config, self.events = m, m.config, []

    def create_kv_cache(self, *args, **options):
        return self.model.create_kv_cache(*args, **options)

    def __call__(self, ids, **options):
        self.events.append(ids.shape[1])
        return self.model(ids, **options)


@pytest.mark.parametrize(
    "speculation", [None, PromptLookup(min_ngram=40, max_ngram=40)]
)
def test_without_a_match_the_steps_are_plain_and_one_ahead(speculation):
    m, golden = Passes(model("qwen3")), goldens("qwen3")[PROMPT]
    for _ in stream_generate(
        m,
        golden.ids,
        max_new_tokens=5,
        cache=m.create_kv_cache(),
        speculation=speculation,
    ):
        m.events.append("yield")
    assert m.events == [17, *[1, "yield"] * 5]


def test_right_guesses_save_passes():
    m, golden = Passes(model("qwen3")), goldens("qwen3")[PROMPT]
    right = Scripted(knowing([*golden.ids, *golden.greedy]), max_draft=4)
    with always():
        list(stream_generate(m, golden.ids, max_new_tokens=24, speculation=right))
    # the first step is plain, then five tokens come at a time
    assert m.events == [17, 1, 5, 5, 5, 5, 2]
    assert right.counts.acceptance == 1.0


# --- any guesses

DRAFTS = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(-2, 400), max_size=5)),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["qwen3", "mistral_swa", "llama_tied"]),
    st.sampled_from(["dense", "rotating", "paged", "wide pages"]),
    st.integers(0, 2),
    st.integers(0, 24),
    st.integers(1, 30),
    DRAFTS,
    st.booleans(),
)
def test_no_guesses_change_tokens_or_cache(
    variant, kind, prompt, limit, stop_after, drafts, sampled
):
    m, golden = model(variant), goldens(variant)[prompt]
    right, script = [*golden.ids, *golden.greedy], iter(drafts)

    def guess(tokens, most):
        """Some right tokens, and then whatever."""
        some, others = next(script, (0, []))
        return (right[len(tokens) : len(tokens) + some] + others)[:most]

    cache, seen = new_cache(m, kind), []
    with always():
        stream = stream_generate(
            m,
            golden.ids,
            max_new_tokens=limit,
            cache=cache,
            speculation=Scripted(guess),
            sampler=(lambda p: mx.argmax(p, axis=-1)) if sampled else None,
        )
        for token in stream:
            seen.append(token)
            if len(seen) == stop_after:
                break
        stream.close()
    assert seen == golden.greedy[: min(limit, stop_after)]
    held = len(golden.ids) + len(seen)
    assert [entry.offset for entry in cache] == [held] * len(cache)
    left = golden.greedy[len(seen) :]
    if left:  # it goes on as if nothing had been guessed
        last = stream_generate(m, left[:1], max_new_tokens=len(left) - 1, cache=cache)
        assert list(last) == left[1:]


# --- the distribution


class Chain:
    """A model whose next token depends on the last one alone, and its cache."""

    def __init__(self, probs):
        self.logits = mx.array(np.log(probs), dtype=mx.float32)
        self.config = SimpleNamespace(
            vocab_size=len(probs), layers=1, context_length=1 << 30, windows=(None,)
        )

    def create_kv_cache(self, kind, reserve=0):
        return [Counter()]

    def __call__(self, ids, offset, cache, logits_to_keep):
        cache[0].offset += ids.shape[1]
        return self.logits[ids[:, ids.shape[1] - logits_to_keep :]]


class Counter:
    offset = 0
    state = ()

    def check_rewind(self, n):
        assert 0 <= n <= self.offset

    def rewind(self, n):
        self.offset -= n


SIZE, DRAWS = 6, 20_000
PROBS = np.random.default_rng(0).dirichlet(np.ones(SIZE), SIZE)


def drawn(seed):
    """A quick sampler."""
    random = np.random.default_rng(seed).random

    def sampler(logprobs):
        sums = np.cumsum(np.exp(np.array(logprobs[0], np.float64)))
        return mx.array([int(np.searchsorted(sums, random() * sums[-1]))])

    return sampler


def transitions(sampler, speculation, draws=DRAWS):
    with always():
        stream = stream_generate(
            Chain(PROBS),
            [0],
            max_new_tokens=draws,
            sampler=sampler,
            speculation=speculation,
        )
        tokens = [0, *stream]
    counts = np.zeros((SIZE, SIZE))
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    return tokens, counts


@cache
def plain_transitions():
    return transitions(drawn(8), None)[1]


def p_value(chi2, freedom):
    """Of a chi-square statistic (Wilson and Hilferty 1931)."""
    from math import erfc, sqrt

    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / sqrt(
        2 / (9 * freedom)
    )
    return erfc(z / sqrt(2)) / 2


def likeliest(tokens, most):
    draft = [int(PROBS[tokens[-1]].argmax())]
    while len(draft) < most:
        draft.append(int(PROBS[draft[-1]].argmax()))
    return draft


@pytest.mark.parametrize("name", ["likeliest", "lookup"])
def test_the_distribution_is_that_of_plain_sampling(name):
    speculation = {
        "likeliest": Scripted(likeliest, max_draft=3),
        "lookup": PromptLookup(max_draft=3),
    }[name]
    _, found = transitions(drawn(7), speculation)
    assert 0 < speculation.counts.accepted < speculation.counts.drafted
    # against the exact probabilities, ...
    expected = found.sum(axis=1, keepdims=True) * PROBS
    chi2 = ((found - expected) ** 2 / expected).sum()
    assert p_value(chi2, SIZE * (SIZE - 1)) > 0.001
    # ... and against other draws without speculation
    plain = plain_transitions()
    rows = [table.sum(axis=1, keepdims=True) for table in (found, plain)]
    scale = np.sqrt(rows[1] / rows[0])
    seen = (found + plain) > 0
    terms = (scale * found - plain / scale) ** 2 / np.maximum(found + plain, 1)
    assert p_value(terms[seen].sum(), SIZE * (SIZE - 1)) > 0.001


def test_the_chi_square_test_finds_a_distribution_that_is_a_little_off():
    counts = np.random.default_rng(1).multinomial(
        DRAWS // SIZE, 0.95 * PROBS[0] + 0.05 / SIZE, SIZE
    )
    expected = DRAWS // SIZE * PROBS[0]
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert p_value(chi2, SIZE * (SIZE - 1)) < 0.001


def test_with_a_seed_the_draws_are_the_same():
    plain, _ = transitions(make_sampler(1.0, seed=3), None, 300)
    for speculation in (Scripted(likeliest, max_draft=5), PromptLookup()):
        sampler = make_sampler(1.0, seed=3)
        assert transitions(sampler, speculation, 300)[0] == plain


# --- the default model


@pytest.mark.smollm2
@pytest.mark.parametrize("name", ["lookup", "sometimes"])
@pytest.mark.parametrize("case", smollm2_cases()[:2], ids=lambda case: case["name"])
def test_greedy_tokens_of_the_default_model_equal_the_reference(
    smollm2_gguf, case, name
):
    m = smollm2(smollm2_gguf)
    right = [*case["ids"], *case["greedy"]]
    speculation = PromptLookup()
    if name == "sometimes":
        speculation = Scripted(knowing(right, range(0, 9999, 5)), max_draft=9)
    with always() if name == "sometimes" else nullcontext():
        tokens = stream_generate(
            m, case["ids"], max_new_tokens=64, speculation=speculation
        )
        assert list(tokens) == case["greedy"]


@cache
def smollm2(path):
    return tiny_llm.load_model(path)
