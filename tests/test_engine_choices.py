"""The engine's answers under every rule: as the rule says, whoever shares the batch."""

import random
import re
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from engine_runs import engine_of, finish, prompts
from guesses import Guesses
from oracle import goldens, model
from test_penalties import penalised

import tiny_llm
from tiny_llm import SamplingParams
from tiny_llm.engine.choices import params_of_choices
from tiny_llm.errors import ParameterError, TinyLLMError
from tiny_llm.sampling import make_logits_processors

VARIANT = "llama_tied"
PIPELINE = pytest.mark.parametrize("pipeline", [False, True])
RULES = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "seed": 0},
    "top_k 1": {"temperature": 1.0, "top_k": 1, "seed": 4},
    "bias": {"logit_bias": {7: 100.0}},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2},
    "window": {"frequency_penalty": 0.8, "penalty_window": 5},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    "bad words": {"bad_words": ((80,), (274, 301), (171, 171))},
    "all": {
        **{"temperature": 1.2, "top_k": 200, "top_p": 0.95, "min_p": 0.001, "seed": 9},
        **{"typical_p": 0.95, "top_n_sigma": 4.0, "xtc_probability": 0.4},
        **{"repetition_penalty": 1.1, "frequency_penalty": 0.1, "dry_multiplier": 0.3},
        **{"logit_bias": {3: 1.0}, "bad_words": ((14,),)},
    },
}


def answers(several, pipeline, **options):
    """The token ids of requests (ids, params) that run together."""
    with engine_of(VARIANT, pipeline=pipeline, **options) as engine:
        handles = [engine.submit(ids, params) for ids, params in several]
        finish(engine)
        for handle in handles:
            assert handle.result().error is None
        return [handle.result().token_ids for handle in handles]


def requests(count=16):
    asked = []
    for name, rule in RULES.items():
        ids = goldens(VARIANT)[len(asked) % 3].ids
        asked.append((ids, SamplingParams(max_tokens=count, **rule)))
        assert name
    return asked


@PIPELINE
def test_every_row_of_a_mixed_batch_is_as_alone(pipeline):
    """Cases 23 to 26: greedy, drawn, penalised, biased and restricted rows together."""
    asked = requests()
    alone = [answers([one], False)[0] for one in asked]
    assert answers(asked, pipeline) == alone
    backwards = answers(asked[::-1], pipeline, prefix_cache=False)
    assert backwards[::-1] == alone
    assert alone[3] == [7] * 16
    assert alone[2] == goldens(VARIANT)[2].greedy[:16]


@PIPELINE
def test_guesses_change_nothing_under_any_rule(pipeline):
    """Rows after a guess have a history of their own: all their tokens must count."""
    asked = requests()
    asked += [(ids, replace(own, frequency_penalty=0.6)) for ids, own in asked]
    alone = answers(asked, False)
    known = [(*ids, *tokens) for (ids, _), tokens in zip(asked, alone, strict=True)]
    for seed in range(4):
        guesses = Guesses(seed, known, 384)
        assert answers(asked, pipeline, speculation=guesses) == alone
        assert guesses.counts.accepted > 50


def test_guesses_change_no_logprobs():
    ids = goldens(VARIANT)[0].ids
    params = SamplingParams(
        **{"max_tokens": 20, "frequency_penalty": 0.7, "temperature": 0.9, "seed": 3},
        **{"logprobs": True, "top_logprobs": 2, "logprobs_mode": "processed"},
    )

    def answer(speculation):
        with engine_of(VARIANT, speculation=speculation) as engine:
            return engine.submit(ids, params).result()

    plain = answer(None)
    guessed = answer(Guesses(1, [(*ids, *plain.token_ids)], 384))
    assert guessed.token_ids == plain.token_ids
    np.testing.assert_allclose(guessed.logprobs, plain.logprobs, atol=1e-3)


def greedy_by_definition(ids, params, count):
    """Token by token, the whole forward each time, penalties in NumPy."""
    ids, chosen = list(ids), []
    for _ in range(count):
        logits = np.array(model(VARIANT)(mx.array([ids]))[0, -1])
        logits = penalised(logits, ids, params)
        best, second = np.sort(logits)[::-1][:2]
        assert best - second > 1e-3, "no test of equality: the two best are too close"
        chosen.append(int(logits.argmax()))
        ids.append(chosen[-1])
    return chosen


@PIPELINE
@pytest.mark.parametrize(
    "rule",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.9, "penalty_window": 3},
        {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": {5: 2.0}},
    ],
    ids=str,
)
def test_penalties_look_at_prompt_and_answer(rule, pipeline):
    params = SamplingParams(max_tokens=20, **rule)
    ids = goldens(VARIANT)[1].ids
    expected = greedy_by_definition(ids, params, 20)
    assert answers([(ids, params)], pipeline) == [expected]
    assert expected != goldens(VARIANT)[1].greedy[:20]


def test_bad_words_and_min_tokens_hold():
    golden = goldens(VARIANT)[0]
    words = ((80,), (301, 14))
    (found,) = answers(
        [(golden.ids, SamplingParams(max_tokens=24, bad_words=words))], False
    )
    assert 80 not in found
    assert not any(pair == (301, 14) for pair in pairwise(found))
    stop = golden.greedy[3]
    params = SamplingParams(max_tokens=24, stop_token_ids=(stop,))
    (found,) = answers([(golden.ids, params)], False)
    assert found == golden.greedy[: golden.greedy.index(stop) + 1]
    (found,) = answers([(golden.ids, replace(params, min_tokens=10))], False)
    assert len(found) >= 10
    assert stop not in found[:10]


# log-probabilities


def logprobs_of(ids):
    logits = np.array(model(VARIANT)(mx.array([ids]))[0], np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


@PIPELINE
def test_logprobs_are_the_models_own_and_the_likeliest_beside_them(pipeline):
    ids = goldens(VARIANT)[1].ids
    params = SamplingParams(
        **{"max_tokens": 12, "temperature": 0.8, "seed": 1, "repetition_penalty": 1.2},
        **{"logprobs": True, "top_logprobs": 5},
    )
    plain = SamplingParams(max_tokens=12, logprobs=True)
    with engine_of(VARIANT, pipeline=pipeline) as engine:
        handles = [engine.submit(ids, own) for own in (params, plain)]
        result, beside = (handle.result() for handle in handles)
    assert beside.top_logprobs is None
    assert len(beside.logprobs) == 12
    rows = logprobs_of([*ids, *result.token_ids])[len(ids) - 1 : -1]
    for row, token, own, top in zip(
        rows, result.token_ids, result.logprobs, result.top_logprobs, strict=True
    ):
        assert own == pytest.approx(row[token], abs=1e-3)
        assert len(top) == 5
        expected = np.sort(row)[::-1][:5]
        assert [value for _, value in top] == pytest.approx(expected, abs=1e-3)
        assert all(row[id] == pytest.approx(value, abs=1e-3) for id, value in top)


def test_processed_logprobs_need_no_filters_and_no_likeliest():
    """Also where best_of asks for them."""
    params = SamplingParams(
        **{"max_tokens": 5, "temperature": 0.8, "seed": 1, "best_of": 3},
        logprobs_mode="processed",
    )
    ids = goldens(VARIANT)[0].ids
    with engine_of(VARIANT) as engine:
        (best,) = engine.submit_choices(ids, params).results()
        single = replace(params, best_of=None, logprobs=True)
        result = engine.submit(ids, single).result()
    assert best.error is None
    assert len(result.logprobs) == 5
    assert max(result.logprobs) <= 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _, logits: logits[:, :-1], r"logits_processors\[1\] returned"),
        (lambda _, logits: logits.astype(mx.int32), r"logits_processors\[1\] returned"),
        (lambda _, logits: logits * mx.nan, "largest logit nan"),
        (lambda _, logits: logits + mx.inf, "largest logit inf"),
        (lambda _, logits: logits - mx.inf, "no token is allowed"),
        (lambda *_: 1 / 0, "division by zero"),
    ],
)
@PIPELINE
def test_a_logits_processor_that_fails_ends_its_own_request_only(
    spoil, message, pipeline
):
    golden = goldens(VARIANT)[1]
    with engine_of(VARIANT, pipeline=pipeline) as engine:
        params = SamplingParams(logits_processors=(lambda _, x: x, spoil))
        bad = engine.submit(golden.ids, params)
        good = engine.submit(golden.ids, SamplingParams(max_tokens=8))
        finish(engine)
        assert re.search(message, str(bad.result().error))
        assert good.result().token_ids == golden.greedy[:8]


def test_processed_logprobs_are_those_of_what_the_token_was_drawn_from():
    ids = goldens(VARIANT)[0].ids
    common = {"max_tokens": 10, "logprobs": True, "logprobs_mode": "processed"}
    drawn = SamplingParams(
        **common, temperature=0.7, top_k=3, seed=2, top_logprobs=5, logit_bias={5: 3.0}
    )
    greedy = SamplingParams(**common, repetition_penalty=1.5, top_logprobs=1)
    with engine_of(VARIANT) as engine:
        handles = [engine.submit(ids, own) for own in (drawn, greedy)]
        first, second = (handle.result() for handle in handles)
    for result, own in ((first, drawn), (second, greedy)):
        context = list(ids)
        for token, value, top in zip(
            result.token_ids, result.logprobs, result.top_logprobs, strict=True
        ):
            logits = np.array(model(VARIANT)(mx.array([context]))[0, -1])
            logits = penalised(logits, context, own) / (own.temperature or 1.0)
            kept = np.argsort(logits)[::-1][: own.top_k or None]
            probs = np.exp(logits[kept] - logits[kept].max())
            shares = dict(zip(kept.tolist(), np.log(probs / probs.sum()), strict=True))
            assert value == pytest.approx(shares[token], abs=2e-3)
            assert len(top) == min(own.top_logprobs, len(kept))  # no more are kept
            for id, share in top:
                assert share == pytest.approx(shares[id], abs=2e-3)
            context.append(token)


@PIPELINE
def test_prompt_logprobs_tell_of_every_token_but_the_first(pipeline):
    """Also of those whose pages could have been found, and beside other requests."""
    ids = prompts(VARIANT, [150], 1)[0]
    expected = logprobs_of(ids)
    params = SamplingParams(max_tokens=3, prompt_logprobs=2)
    with engine_of(VARIANT, pipeline=pipeline, max_step_tokens=40) as engine:
        engine.submit(ids, SamplingParams(max_tokens=2)).result()
        handles = [
            engine.submit(ids, params),
            engine.submit(ids, SamplingParams(max_tokens=9)),
            engine.submit(ids[:1], params),
        ]
        result, beside, short = (handle.result() for handle in handles)
        engine.check_integrity()
    assert (result.cached_tokens, beside.cached_tokens > 0) == (0, True)
    assert short.prompt_logprobs == []
    assert len(result.prompt_logprobs) == len(ids) - 1
    for place, (own, top) in enumerate(result.prompt_logprobs):
        assert own == pytest.approx(expected[place][ids[place + 1]], abs=1e-3)
        best = np.sort(expected[place])[::-1][:2]
        assert [value for _, value in top] == pytest.approx(best, abs=1e-3)


# several answers


@PIPELINE
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("variant", [VARIANT, "mistral_swa"])
def test_several_answers_share_the_prompt_and_are_those_of_their_seeds(
    variant, prefix_cache, pipeline
):
    ids = prompts(variant, [69], 1)[0]
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=5, n=4)
    with engine_of(variant, prefix_cache=False) as engine:
        alone = [
            engine.submit(ids, own).result().token_ids
            for own in params_of_choices(params)
        ]
    assert len({tuple(answer) for answer in alone}) == 4
    with engine_of(variant, prefix_cache=prefix_cache, pipeline=pipeline) as engine:
        results = engine.submit_choices(ids, params).results()
        assert [result.token_ids for result in results] == alone
        # the prompt once, a row of each other answer, and the answers
        assert engine.stats.rows <= 69 + 3 + 4 * 10
        engine.check_integrity()
        assert engine.stats.pages_in_use == 0


def test_answers_of_a_prompt_are_right_in_few_pages_too():
    ids = prompts(VARIANT, [40], 1)[0]
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, n=5)
    with engine_of(VARIANT, prefix_cache=False) as engine:
        alone = [
            engine.submit(ids, own).result().token_ids
            for own in params_of_choices(params)
        ]
    with engine_of(VARIANT, pages=7, prefix_cache=False) as engine:
        # (as short an answer is expected of the others)
        engine.submit(ids, SamplingParams(max_tokens=1)).result()
        results = engine.submit_choices(ids, params).results()
        assert [result.token_ids for result in results] == alone
        assert engine.stats.preemptions > 0
        engine.check_integrity()


def test_best_of_keeps_the_likeliest_answers():
    ids = goldens(VARIANT)[0].ids
    params = SamplingParams(max_tokens=8, temperature=1.3, seed=2, n=2, best_of=6)
    with engine_of(VARIANT) as engine:
        every = [
            engine.submit(ids, replace(own, logprobs=True)).result()
            for own in params_of_choices(params)
        ]
        best = engine.submit_choices(ids, params).results()
        (told,) = engine.generate([ids], params)
    every.sort(key=lambda result: -np.mean(result.logprobs))
    wanted = [result.token_ids for result in every[:2]]
    assert [result.token_ids for result in best] == wanted
    assert [result.logprobs for result in best] == [None, None]
    assert [result.token_ids for result in told.choices] == wanted
    assert told.token_ids == wanted[0]


def test_several_answers_are_asked_for_by_name():
    with engine_of(VARIANT) as engine:
        with pytest.raises(ParameterError, match="submit_choices"):
            engine.submit([1, 2], SamplingParams(temperature=1.0, n=2))
        with pytest.raises(ParameterError, match="SamplingParams are needed"):
            engine.submit_choices([1, 2], {"n": 2})
        choices = engine.submit_choices([1, 2], SamplingParams(temperature=1.0, n=2))
        choices.cancel()
        assert {r.finish_reason for r in choices.results()} == {"cancelled"}
        engine.check_integrity()


# whatever is asked


def random_params(draw):
    """Values that are right, wrong or odd."""
    some = {
        "max_tokens": [1, 3, 5, 0, 2.5],
        "min_tokens": [0, 2, 4, 9],
        "temperature": [0, 1e-9, 0.5, 1, 2.5, 1e4, -1, float("nan")],
        "top_k": [0, -1, 1, 5, 383, 384, 10**9, -2],
        "top_p": [0, 1e-9, 0.5, 0.999999, 1, 1.5],
        "min_p": [0, 0.1, 1, 2],
        "typical_p": [0, 0.2, 0.9999, 1],
        "top_n_sigma": [0, 1e-6, 1, 100],
        "xtc_probability": [0, 0.5, 1],
        "xtc_threshold": [0, 0.01, 0.5, 1],
        "repetition_penalty": [1, 0.001, 1.2, 1000, 0],
        "frequency_penalty": [0, -100, 0.3, 100],
        "presence_penalty": [0, 2.0],
        "penalty_window": [None, 1, 2, 1000],
        "dry_multiplier": [0, 0.5, 100],
        "dry_base": [1, 1.75, 100],
        "dry_allowed_length": [1, 2, 50],
        "seed": [None, 0, 42, (1 << 64) - 1, -1],
        "logit_bias": [{}, {0: -1e6}, {383: 1e6, 5: -3.0}, {384: 1.0}, {1: "x"}],
        "bad_words": [(), ((1,),), ((5, 6), (7,)), ((384,),), ("word",)],
        "stop_token_ids": [(), (1, 2, 3), (400,)],
        "logprobs": [False, True],
        "top_logprobs": [0, 5, 64],
        "logprobs_mode": ["raw", "processed"],
        "prompt_logprobs": [None, 0, 3],
        "ignore_eos": [False, True],
    }
    chosen = draw.sample(sorted(some), draw.randrange(len(some)))
    return {name: draw.choice(some[name]) for name in chosen}


@PIPELINE
def test_a_thousand_random_settings_give_a_valid_answer_or_a_typed_error(pipeline):
    draw, asked, refused = random.Random(pipeline), 500, 0
    with engine_of(VARIANT, pipeline=pipeline) as engine:
        handles = []
        for _ in range(asked):
            ids = draw.choices(range(384), k=draw.randrange(1, 30))
            try:
                params = SamplingParams(**random_params(draw))
                handles.append(engine.submit(ids, params))
            except TinyLLMError:
                refused += 1
        finish(engine)
        engine.check_integrity()
        for handle in handles:
            result = handle.result()
            own = handle.request.params
            assert result.error is None
            assert all(0 <= token < 384 for token in result.token_ids)
            assert 1 <= len(result.token_ids) <= own.max_tokens
            banned = {word[0] for word in own.bad_words if len(word) == 1}
            assert not banned & set(result.token_ids)
            if own.logprobs:
                assert np.isfinite(result.logprobs).all()
    assert len(handles) > 50
    assert refused > 100


@pytest.mark.parametrize(
    "rule",
    [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"dry_multiplier": 0.8, "dry_allowed_length": 1, "penalty_window": 4},
        {"bad_words": ((80,), (274, 301)), "logit_bias": {5: 1.0}},
    ],
    ids=str,
)
def test_logits_processors_do_for_one_stream_what_params_do_in_the_engine(rule):
    ids = goldens(VARIANT)[0].ids
    (expected,) = answers([(ids, SamplingParams(max_tokens=20, **rule))], False)
    found = tiny_llm.stream_generate(
        model(VARIANT),
        ids,
        max_new_tokens=20,
        logits_processors=make_logits_processors(**rule),
    )
    assert list(found) == expected


def test_processors_that_would_do_nothing_are_none():
    assert make_logits_processors() == []
    with pytest.raises(ParameterError, match="bad_words"):
        make_logits_processors(bad_words=["word"])
    (process,) = make_logits_processors(logit_bias={400: 1.0})
    with pytest.raises(ParameterError, match="400"):
        process(mx.array([1]), mx.zeros((1, 384)))
