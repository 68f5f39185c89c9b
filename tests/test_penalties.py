"""What is done to logits before a token is chosen, against plain Python."""

import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_llm.errors import ParameterError
from tiny_llm.sampling import SamplingParams
from tiny_llm.sampling.dry import dry_penalties
from tiny_llm.sampling.history import TokenCounts
from tiny_llm.sampling.rows import Row, adjusted
from tiny_llm.sampling.rules import Rules

V = 12
tokens = st.lists(st.integers(0, V - 1), min_size=1, max_size=30)


def penalised(logits, context, params):
    """One row by the definitions."""
    window = params.penalty_window or len(context)
    counts = Counter(context[-window:])
    out = np.array(logits, np.float64)
    for token, bias in params.logit_bias.items():
        out[token] += bias
    for token, count in counts.items():
        out[token] -= count * params.frequency_penalty + params.presence_penalty
        factor = params.repetition_penalty
        out[token] = out[token] * factor if out[token] < 0 else out[token] / factor
    return out


PENALTIES = st.builds(
    SamplingParams,
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.3]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    penalty_window=st.sampled_from([None, 1, 2, 5, 100]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-2.0, 1.5])),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(tokens, PENALTIES, st.integers(0, 3)), min_size=1, max_size=5)
)
def test_rows_are_penalised_each_by_its_own_context_and_params(several):
    """Also for guessed tokens, and where the last token is told by the device."""
    random = np.random.default_rng(0)
    logits = random.normal(0, 3, (len(several), V)).astype(np.float32)
    rows, last = [], []
    for context, params, drafted in several:
        drafted = min(drafted, len(context) - 1)
        known = context if drafted else [*context[:-1], 0]  # (not read yet)
        rows.append(Row(Rules(params), 0, known, drafted))
        last.append(context[-1])
    found = np.array(adjusted(mx.array(logits), rows, mx.array(last), {}))
    for own, row, (context, params, _) in zip(found, logits, several, strict=True):
        expected = penalised(row, context, params)
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(tokens, st.lists(st.integers(0, 30), min_size=1, max_size=8), st.data())
def test_counts_follow_a_context_that_grows_and_is_cut(context, lengths, data):
    counts = TokenCounts()
    for length in lengths:
        length = min(length, len(context))
        window = data.draw(st.none() | st.integers(1, 10))
        ids, times = counts.table(context[:length], window)
        wanted = Counter(context[max(0, length - (window or length)) : length])
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == wanted


def plain_dry(context, multiplier, base, allowed, window, breakers):
    """DRY by its definition: every place is compared with the end."""
    context = context[-window:] if window else context
    found = {}
    for place in range(1, len(context)):
        length = 0
        while length < place and context[place - 1 - length] == context[-1 - length]:
            if context[-1 - length] in breakers:
                break
            length += 1
        token = context[place]
        if length >= allowed and token not in breakers:
            penalty = multiplier * base ** (length - allowed)
            found[token] = max(found.get(token, 0), penalty)
    return found


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 4),
    st.none() | st.integers(1, 20),
    st.sets(st.integers(0, 3), max_size=1),
)
def test_dry_is_its_definition(context, allowed, window, breakers):
    found = dry_penalties(
        context,
        multiplier=0.5,
        base=1.7,
        allowed_length=allowed,
        window=window,
        breakers=breakers,
    )
    assert found == pytest.approx(
        plain_dry(context, 0.5, 1.7, allowed, window, breakers)
    )


def test_an_endless_repetition_is_forbidden_not_overflowed():
    found = dry_penalties([1, 2] * 3000, multiplier=1.0, base=4.0, allowed_length=2)
    assert found == {1: 1e4}


def choose(params, context, place, *, end_ids=(), bad_words=()):
    rules = Rules(params, end_ids=end_ids, bad_words=bad_words)
    row = Row(rules, place, context)
    return np.array(adjusted(mx.zeros((1, V)), [row], mx.array(context[-1:]), {}))[0]


def test_bad_words_are_forbidden_where_they_would_be_complete():
    words = [(3,), (4, 5), (4, 4, 6)]

    def forbidden(context):
        found = choose(SamplingParams(), context, 0, bad_words=words)
        return np.flatnonzero(np.isinf(found)).tolist()

    assert forbidden([1, 2]) == [3]
    assert forbidden([1, 4]) == [3, 5]
    assert forbidden([4, 4]) == [3, 5, 6]
    assert forbidden([4]) == [3, 5]


def test_min_tokens_forbids_what_would_end_the_answer():
    params = SamplingParams(min_tokens=2)
    for place, ends in ((0, True), (1, True), (2, False)):
        found = choose(params, [1], place, end_ids=(7, 9))
        assert np.isinf(found).any() == ends
        assert not np.isinf(np.delete(found, [7, 9])).any()


def test_a_bad_word_is_not_made_possible_by_dry():
    params = SamplingParams(dry_multiplier=1.0, dry_allowed_length=1)
    found = choose(params, [3, 3], 0, bad_words=[(3,)])
    assert math.isinf(found[3])


@pytest.mark.parametrize(
    "bad",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"presence_penalty": "much"},
        {"penalty_window": 0},
        {"dry_multiplier": -1},
        {"dry_base": 0.5},
        {"dry_allowed_length": 0},
        {"dry_window": True},
        {"dry_sequence_breakers": "\n"},
        {"dry_sequence_breakers": [""]},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words": [[]]},
        {"bad_words": [[-1]]},
        {"logits_processors": max},
        {"logits_processors": [3]},
        {"min_tokens": -1},
        {"min_tokens": 300},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 1000},
        {"logprobs_mode": "none"},
        {"prompt_logprobs": -1},
        {"n": 0},
        {"n": 2},
        {"temperature": 1.0, "n": 3, "best_of": 2},
        {"temperature": 1.0, "n": 1000},
        {"best_of": 2},
        {"stop": ""},
        {"stop": [""]},
        {"typical_p": 1.5},
        {"top_n_sigma": -1},
        {"xtc_probability": 2},
        {"xtc_threshold": -0.1},
        {"logprobs": True, "logprobs_mode": "processed", "sampler": max},
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_by_name(bad):
    with pytest.raises(ParameterError, match="|".join(bad)):
        SamplingParams(**bad)
