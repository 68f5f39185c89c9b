import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from tiny_llm.engine.request import Request
from tiny_llm.errors import ParameterError
from tiny_llm.sampling.params import SamplingParams


def test_the_default_is_greedy_and_reports_nothing():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.seed) == (256, 0.0, None)
    assert (params.stop_token_ids, params.logit_bias) == ((), {})
    assert not params.logprobs
    assert not params.ignore_eos


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", True),
        ("top_p", 1.1),
        ("min_p", -1),
        ("seed", -1),
        ("seed", 1 << 64),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2.5]),
        ("ignore_eos", 1),
        ("logprobs", 5),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {-1: 2.0}),
        ("logit_bias", {"a": 2.0}),
        ("logit_bias", {1: "much"}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: -math.inf}),
        ("sampler", "greedy"),
    ],
)
def test_values_that_cannot_be_used_are_refused_by_name(name, value):
    with pytest.raises(ParameterError, match=name.removesuffix("_token_ids")):
        SamplingParams(**{name: value})


def test_numbers_of_numpy_become_plain_ones():
    params = SamplingParams(
        max_tokens=np.int64(3), seed=np.uint32(7), stop_token_ids=np.array([2, 5])
    )
    assert params == SamplingParams(max_tokens=3, seed=7, stop_token_ids=(2, 5))
    assert type(params.max_tokens) is int
    assert type(params.stop_token_ids[0]) is int


def test_params_do_not_change_with_what_they_were_made_of():
    bias = {3: 1}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 5
    assert params.logit_bias == {3: 1.0}
    with pytest.raises(FrozenInstanceError):
        params.max_tokens = 3
    assert replace(params, max_tokens=3).logit_bias == {3: 1.0}
    assert len({params, SamplingParams(logit_bias={3: 1})}) == 1


@pytest.mark.parametrize(
    "beside",
    [{"temperature": 1.0}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}, {"seed": 0}],
)
def test_values_without_effect_beside_a_sampler_are_refused(beside):
    SamplingParams(sampler=max)
    with pytest.raises(ParameterError, match="no effect"):
        SamplingParams(sampler=max, **beside)


def test_a_request_knows_what_is_left_to_compute():
    request = Request(1, [5, 6, 7], SamplingParams(), limit=2)
    assert (request.length, request.remaining, request.most) == (3, 3, 4)
    assert not request.decoding
    request.computed = 2
    assert not request.decoding  # a row of the prompt, not of the answer
    request.computed, request.in_flight = 3, 1
    assert (request.length, request.remaining) == (4, 1)
    assert request.decoding
    assert not request.exhausted
    request.output, request.computed = [9], 4
    assert (request.length, request.remaining) == (5, 1)
    assert request.exhausted
    request.in_flight, request.computed = 0, 0  # preempted
    assert request.remaining == 4
    assert not request.decoding
