"""Whatever goes wrong with one request, the others never notice.

What fails only when it is computed ("lazily") runs in processes of its own, a few tests
each: about every tenth such failure, MLX's CPU backend goes on to count an operation as
running, and with more than ten of these it waits for ever.
"""

import os
import re
import subprocess
import sys
from functools import cache
from itertools import count

import mlx.core as mx
import numpy as np
import pytest
from engine_runs import Wrapped, alone, engine_of, finish, prompts
from oracle import DATA, model

import tiny_llm
from tiny_llm import SamplingParams, make_sampler
from tiny_llm.errors import ParameterError, RequestError

VARIANT, ANSWER = "qwen3", 16
PIPELINE = pytest.mark.parametrize("pipeline", [False, True])
VIEWS = pytest.mark.parametrize("views", [True, False])
LENGTHS, OTHERS = (5, 40, 70), (11, 33, 47, 66)


def neighbours(variant=VARIANT):
    return prompts(variant, LENGTHS, ANSWER, seed=1)


@cache
def unseen(variant=VARIANT):
    """A token that no random prompt has, and no answer to those used here."""
    seen = set(range(4, 400))
    several = prompts(variant, LENGTHS, ANSWER, seed=1)
    for seed in range(5, 9):
        several += prompts(variant, OTHERS, ANSWER, seed=seed)
    for ids in several:
        seen.update(alone(variant, ids, ANSWER))
    return min(set(range(4)) - seen)


def sampling(max_tokens=ANSWER, **options):
    return SamplingParams(max_tokens=max_tokens, **options)


def beside(engine, submit_victim, variant=VARIANT):
    """Run a victim between neighbours, which must get what they get alone."""
    first, *rest = neighbours(variant)
    handles = [engine.submit(first, sampling())]
    for _ in range(3):  # it decodes already
        engine.step()
        engine.check_integrity()
    handles.append(engine.submit(rest[0], sampling()))
    victim = submit_victim()
    handles.append(engine.submit(rest[1], sampling()))
    finish(engine)
    for handle, ids in zip(handles, neighbours(variant), strict=True):
        result = handle.result()
        assert result.error is None
        assert result.token_ids == alone(variant, ids, ANSWER)
    return victim.result()


def decode_poison(ids, place):
    """The token at a place of an answer, if nobody else ever sees it."""
    answer = alone(VARIANT, ids, ANSWER)
    token = answer[place]
    others = [t for n in neighbours() for t in (*n, *alone(VARIANT, n, ANSWER))]
    assert token not in [*others, *ids, *answer[:place]]
    return token


def victim_of_decode():
    """A prompt and a place in its answer whose token can be the poison."""
    for seed in count(100):
        (ids,) = prompts(VARIANT, [20], ANSWER, seed=seed)
        for place in range(3, ANSWER - 1):
            try:
                return ids, place, decode_poison(ids, place)
            except AssertionError:
                continue
    raise AssertionError


def poisoned(poison, how):
    """A model that fails for a batch with the poison: at once, late, or lazily."""

    def call(m, input_ids, **arguments):
        if how == "lazily":  # told when it is evaluated
            logits = m(input_ids, **arguments)
            singular = mx.where((input_ids == poison).any(), 0.0, mx.eye(2))
            return logits + mx.linalg.inv(singular, stream=mx.cpu)[0, 1]
        there = poison in input_ids.flatten().tolist()
        if there and how == "before":
            raise RuntimeError("poisoned")
        logits = m(input_ids, **arguments)
        if there:
            raise RuntimeError("poisoned")
        return logits

    return Wrapped(model(VARIANT), call)


LATE = "TINY_LLM_TEST_LATE_FAILURES"
HOW = pytest.mark.parametrize(
    "how", ["lazily"] if LATE in os.environ else ["before", "after"]
)
LATE_TESTS = (
    "test_a_model_that_fails_for_one_prompt_fails_that_request_alone",
    "test_a_model_that_fails_while_one_request_decodes_fails_that_one_alone",
    "test_who_runs_when_another_ones_last_step_fails_is_not_taken_for_it",
    "test_a_bad_sampler_ends_its_request_at_that_token_and_no_other",
    "test_a_seed_gives_the_same_text_beside_one_whose_step_fails_lazily",
)


@pytest.mark.skipif(LATE in os.environ, reason="this is such a process")
@pytest.mark.parametrize("name", LATE_TESTS)
def test_what_fails_lazily_is_told_alike(name):
    command = [sys.executable, "-m", "pytest", __file__, "-k", f"lazily and ({name})"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-rA"],
        env={**os.environ, LATE: "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") >= 2


@PIPELINE
@HOW
@pytest.mark.parametrize("place", [0, 15, 16, 69])
def test_a_model_that_fails_for_one_prompt_fails_that_request_alone(
    pipeline, how, place
):
    if how == "lazily" and place < 69:
        pytest.skip("only the last rows' logits are computed")
    (ids,) = prompts(VARIANT, [70], 1)
    ids[place] = unseen()
    with engine_of(
        poisoned(unseen(), how), pipeline=pipeline, max_step_tokens=32
    ) as engine:
        result = beside(engine, lambda: engine.submit(ids, sampling()))
        assert (result.finish_reason, result.token_ids) == ("error", [])
        assert isinstance(result.error, RequestError)
        assert isinstance(result.error.__cause__, RuntimeError)
        # ... and again, next to requests that find what was stored before
        again = beside(engine, lambda: engine.submit(ids, sampling()))
        assert again.finish_reason == "error"
        assert again.cached_tokens == 0


@PIPELINE
@HOW
def test_a_model_that_fails_while_one_request_decodes_fails_that_one_alone(
    pipeline, how
):
    ids, place, poison = victim_of_decode()
    with engine_of(poisoned(poison, how), pipeline=pipeline) as engine:
        result = beside(engine, lambda: engine.submit(ids, sampling()))
        assert result.finish_reason == "error"
        assert result.token_ids == alone(VARIANT, ids, ANSWER)[: place + 1]
        assert isinstance(result.error, RequestError)


@PIPELINE
@HOW
@pytest.mark.parametrize("limit", range(1, 5))
def test_who_runs_when_another_ones_last_step_fails_is_not_taken_for_it(
    pipeline, how, limit
):
    # the failing step may be told of while the next one, of others only, is under way
    first, second, _ = neighbours()
    with engine_of(poisoned(unseen(), how), pipeline=pipeline) as engine:
        handle = engine.submit(first, sampling())
        for _ in range(limit):
            engine.step()
        victim = engine.submit([5, unseen()], sampling(1))
        finish(engine)
        assert victim.result().finish_reason == "error"
        assert handle.result().token_ids == alone(VARIANT, first, ANSWER)
        assert handle.result().error is None
        assert engine.submit(second, sampling()).result().error is None


def test_a_model_that_always_fails_fails_every_request_but_not_the_engine():
    broken = True

    def call(m, input_ids, **arguments):
        if broken:
            raise RuntimeError("no memory")
        return m(input_ids, **arguments)

    with engine_of(Wrapped(model(VARIANT), call)) as engine:
        handles = [engine.submit(ids, sampling()) for ids in neighbours()]
        finish(engine)
        for handle in handles:
            assert str(handle.result().error).endswith("failed: no memory")
        broken = False
        results = engine.generate(neighbours(), sampling())
    for ids, result in zip(neighbours(), results, strict=True):
        assert result.token_ids == alone(VARIANT, ids, ANSWER)


# NaN


def nan_model(variant, token):
    """A model whose keys, values and logits are NaN from that token on."""
    m = tiny_llm.load_model(DATA / variant)
    assert not m.config.tied
    rows = np.array(m.embed_tokens.weight)
    rows[token] = np.nan
    m.embed_tokens.weight = mx.array(rows)
    return m


@PIPELINE
@VIEWS
@pytest.mark.parametrize(
    ("variant", "place"),
    # (at 69 the windows of two layers see no more than 22 tokens)
    [(VARIANT, 0), (VARIANT, 20), (VARIANT, 69), ("mistral_swa", 60)],
)
def test_nan_of_one_request_is_its_own_also_in_the_pages_it_leaves(
    pipeline, views, variant, place
):
    (ids,) = prompts(variant, [70], 1)
    ids[place] = unseen(variant)
    options = {"pipeline": pipeline, "page_views": views, "max_step_tokens": 32}
    # hardly more pages than are needed, so that all of them go round
    with engine_of(nan_model(variant, unseen(variant)), pages=20, **options) as engine:
        for _ in range(2):
            result = beside(engine, lambda: engine.submit(ids, sampling()), variant)
            assert result.finish_reason == "error"
            assert "not numbers" in str(result.error)
            assert (result.token_ids, result.cached_tokens) == ([], 0)
        for seed in range(5, 9):
            several = prompts(variant, OTHERS, ANSWER, seed=seed)
            results = engine.generate(several, sampling())
            engine.check_integrity()
            for own, result in zip(several, results, strict=True):
                assert result.token_ids == alone(variant, own, ANSWER)


@PIPELINE
@VIEWS
def test_nan_while_decoding_ends_that_request_with_what_it_had(pipeline, views):
    ids, place, poison = victim_of_decode()
    options = {"pipeline": pipeline, "page_views": views}
    with engine_of(nan_model(VARIANT, poison), pages=16, **options) as engine:
        for _ in range(3):
            result = beside(engine, lambda: engine.submit(ids, sampling()))
            assert result.finish_reason == "error"
            assert result.token_ids == alone(VARIANT, ids, ANSWER)[: place + 1]


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_logits_without_a_finite_maximum_are_named(value):
    def call(m, input_ids, **arguments):
        logits = m(input_ids, **arguments)
        return mx.where(mx.arange(logits.shape[-1]) >= 0, value, logits)

    with engine_of(Wrapped(model(VARIANT), call)) as engine:
        result = engine.submit([5, 6], sampling()).result()
        assert str(value) in str(result.error)
        finish(engine)


@PIPELINE
@VIEWS
@HOW
def test_what_was_in_the_pages_before_is_no_matter_also_after_steps_that_fail(
    pipeline, views, how
):
    options = {"pipeline": pipeline, "page_views": views, "max_batch": 8}
    with engine_of(poisoned(unseen(), how), **options) as engine:
        engine.pool.back(0, engine.stats.pages - 1)
        for (rows,) in engine.pool.rows:
            rows[:] = mx.nan
        handles = []
        # (with long answers: much room behind what is read together)
        for ids in prompts(VARIANT, (30, 5, 12, 20), 40, seed=5):
            handles.append((ids, engine.submit(ids, sampling(40))))
            for _ in range(3):
                engine.submit([5, unseen()], sampling(1))
                engine.step()
                engine.check_integrity()
        finish(engine)
        for ids, handle in handles:
            assert handle.result().token_ids == alone(VARIANT, ids, 40)


# samplers


def failing_sampler(bad, at):
    """Greedy, but not from a certain call on."""
    calls = count()

    def sampler(logprobs):
        return bad(logprobs) if next(calls) >= at else mx.argmax(logprobs, axis=-1)

    return sampler


def raises(logprobs):
    raise ZeroDivisionError("my own mistake")


BAD_CHOICES = {
    "raises": (raises, "my own mistake"),
    "shape": (lambda p: mx.argmax(p, axis=-1, keepdims=True), r"uint32 \(1, 1\)"),
    "dtype": (lambda p: mx.array([1.0]), "float32"),
    "scalar": (lambda p: mx.array(3), r"int32 \(\)"),
    "number": (lambda p: 3, "returned 3"),
    "nothing": (lambda p: None, "returned None"),
    "beyond": (lambda p: mx.array([320]), "not in the vocabulary of 320"),
    "negative": (lambda p: mx.array([-1]), "not in the vocabulary"),
    "large": (lambda p: mx.array([1 << 40]), "not in the vocabulary"),
    "unsigned": (lambda p: mx.array([1 << 31], dtype=mx.uint32), "not in the"),
    "lazily": (
        lambda p: (
            mx.argmax(p, axis=-1)
            + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu).sum().astype(mx.int32)
        ),
        "LU factorization",
    ),
}


@PIPELINE
@pytest.mark.parametrize(
    "name", [name for name in BAD_CHOICES if (name == "lazily") == (LATE in os.environ)]
)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_bad_sampler_ends_its_request_at_that_token_and_no_other(pipeline, name, at):
    bad, words = BAD_CHOICES[name]
    (ids,) = prompts(VARIANT, [20], ANSWER)
    with engine_of(VARIANT, pipeline=pipeline) as engine:
        params = sampling(sampler=failing_sampler(bad, at))
        result = beside(engine, lambda: engine.submit(ids, params))
        assert (result.finish_reason, type(result.error)) == ("error", RequestError)
        # (who fails lazily may be told of late, and run again from an earlier token)
        expected = alone(VARIANT, ids, ANSWER)[:at]
        found = result.token_ids
        assert found == (expected[: len(found)] if name == "lazily" else expected)
        # what it computed is right all the same, or not to be found again
        again = engine.submit(ids, sampling()).result()
        assert again.token_ids == alone(VARIANT, ids, ANSWER)
        assert re.search(words, str(result.error))


class Tokenizer:
    """One whose detokenizers fail from a certain call of `add` on, or at the end."""

    def __init__(self, tokenizer, at):
        self._tokenizer, self._at, self.breaks = tokenizer, at, False

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def detokenizer(self):
        if not self.breaks:
            return self._tokenizer.detokenizer()
        own, at, calls = self._tokenizer.detokenizer(), self._at, count()

        class Broken:
            def add(self, token):
                if at is not None and next(calls) >= at:
                    raise UnicodeError("no such character")
                return own.add(token)

            def finish(self):
                if at is None:
                    raise UnicodeError("no such character")
                return own.finish()

        return Broken()


@PIPELINE
@pytest.mark.parametrize("at", [0, 3, None])
def test_a_detokenizer_that_fails_ends_its_request_only(pipeline, at):
    variant = "llama_llama3rope_bias"
    loaded = tiny_llm.load(DATA / variant)
    tokenizer = Tokenizer(loaded.tokenizer, at)
    (ids,) = prompts(variant, [20], ANSWER)
    with engine_of(loaded.model, tokenizer, pipeline=pipeline) as engine:

        def submit():
            tokenizer.breaks = True
            handle = engine.submit(ids, sampling(ignore_eos=True))
            tokenizer.breaks = False
            return handle

        result = beside(engine, submit, variant)
        assert (result.finish_reason, type(result.error)) == ("error", RequestError)
        assert "no such character" in str(result.error)
        expected = alone(variant, ids, ANSWER)
        assert result.token_ids == (expected if at is None else expected[:at])


# every row by its own rules


def seeded(ids, seed, n=ANSWER, **options):
    """What a seed gives without an engine."""
    sampler = make_sampler(options.pop("temperature"), seed=seed, **options)
    return list(
        tiny_llm.stream_generate(model(VARIANT), ids, max_new_tokens=n, sampler=sampler)
    )


HOT = {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.001}


@PIPELINE
@pytest.mark.parametrize("seed", [0, 42, (1 << 64) - 1])
def test_a_seed_gives_the_same_text_whoever_shares_the_batch(pipeline, seed):
    (ids,) = prompts(VARIANT, [20], 1)
    expected = seeded(ids, seed, **HOT)
    assert expected != seeded(ids, seed ^ 1, **HOT)
    own = sampling(seed=seed, **HOT)
    for before in range(3):  # in another row
        with engine_of(VARIANT, pipeline=pipeline) as engine:
            others = [
                engine.submit([9 + i] * 7, sampling(5 + i, seed=s, **HOT))
                for i, s in enumerate([seed, None, 7][:before])
            ]
            result = beside(engine, lambda: engine.submit(ids, own))
            assert result.token_ids == expected
            assert all(handle.result().error is None for handle in others)


@PIPELINE
@pytest.mark.parametrize("pages", [8, 9, 10, 12])
def test_a_seed_gives_the_same_text_after_a_preemption(pipeline, pages):
    several = prompts(VARIANT, [34] * 4, 1)
    with engine_of(VARIANT, pages=pages, pipeline=pipeline) as engine:
        # answers are expected to be short, so that pages run out
        for _ in range(4):
            engine.submit([5], sampling(1))
        finish(engine)
        handles = [
            engine.submit(ids, sampling(40, seed=i, **HOT))
            for i, ids in enumerate(several)
        ]
        finish(engine)
        assert engine.stats.preemptions > 0
        for i, (ids, handle) in enumerate(zip(several, handles, strict=True)):
            assert handle.result().token_ids == seeded(ids, i, 40, **HOT)


if LATE in os.environ:

    @PIPELINE
    @pytest.mark.parametrize("at", [2, 5, 9])
    def test_a_seed_gives_the_same_text_beside_one_whose_step_fails_lazily(
        pipeline, at
    ):
        (ids,) = prompts(VARIANT, [20], 1)
        bad, _ = BAD_CHOICES["lazily"]
        with engine_of(VARIANT, pipeline=pipeline) as engine:
            handle = engine.submit(ids, sampling(seed=5, **HOT))
            engine.submit(ids[:7], sampling(sampler=failing_sampler(bad, at)))
            finish(engine)
            assert handle.result().token_ids == seeded(ids, 5, **HOT)


def test_requests_without_a_seed_differ():
    with engine_of(VARIANT) as engine:
        params = sampling(temperature=2.0)
        results = engine.generate([[5, 6, 7]] * 4, params)
        assert len({tuple(result.token_ids) for result in results}) == 4


@PIPELINE
def test_each_row_has_its_own_sampler_from_the_first_token_on(pipeline):
    several = prompts(VARIANT, [9, 9, 9, 9], ANSWER)
    params = [
        sampling(temperature=1.0, top_k=1),
        sampling(),
        sampling(logit_bias={7: 100.0}),
        sampling(logit_bias={7: -100.0, 11: 100.0}, temperature=1.0, top_p=0.5),
    ]
    with engine_of(VARIANT, pipeline=pipeline) as engine:
        results = engine.generate(several, params)
    greedy = [alone(VARIANT, ids, ANSWER) for ids in several]
    expected = [greedy[0], greedy[1], [7] * ANSWER, [11] * ANSWER]
    assert [result.token_ids for result in results] == expected


@PIPELINE
def test_a_bias_is_added_to_the_logits(pipeline):
    ids, other = prompts(VARIANT, [9, 30], ANSWER)
    bias = dict.fromkeys(alone(VARIANT, ids, ANSWER)[:3], -50.0)
    expected, sequence = [], list(ids)
    for _ in range(ANSWER):
        logits = np.array(model(VARIANT)(mx.array([sequence]), logits_to_keep=1)[0, -1])
        for token, value in bias.items():
            logits[token] += value
        expected.append(int(logits.argmax()))
        sequence.append(expected[-1])
    with engine_of(VARIANT, pipeline=pipeline) as engine:
        handle = engine.submit(other, sampling())
        biased = engine.submit(ids, sampling(logit_bias=bias)).result()
        assert biased.token_ids == expected
        assert handle.result().token_ids == alone(VARIANT, other, ANSWER)


@PIPELINE
def test_greedy_and_sampled_rows_are_as_alone_also_with_infinite_logits(pipeline):
    def call(m, input_ids, **arguments):
        logits = m(input_ids, **arguments)
        return mx.where(mx.arange(logits.shape[-1]) % 3 == 0, -mx.inf, logits)

    several = prompts(VARIANT, [9, 30, 20, 5], 1)
    params = [
        sampling(),
        sampling(seed=3, **HOT),
        sampling(temperature=1.0, seed=1),
        sampling(top_k=1, temperature=1.0, logprobs=True),
    ]
    m = Wrapped(model(VARIANT), call)
    apart = []
    for ids, own in zip(several, params, strict=True):
        with engine_of(m) as engine:
            apart.append(engine.generate([ids], own)[0].token_ids)
    with engine_of(m, pipeline=pipeline) as engine:
        results = engine.generate(several, params)
    assert [result.token_ids for result in results] == apart
    assert all(token % 3 for tokens in apart for token in tokens)
    assert all(np.isfinite(results[3].logprobs))


def test_values_without_effect_are_refused():
    with pytest.raises(ParameterError, match="no effect beside a sampler"):
        sampling(sampler=mx.argmax, seed=3)
