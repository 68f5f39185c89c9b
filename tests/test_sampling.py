import json

import mlx.core as mx
import numpy as np
import pytest
from oracle import DATA

from tiny_llm import make_sampler
from tiny_llm.errors import ParameterError
from tiny_llm.sampling import filter_logprobs

OURS = {"temperature", "top_k", "top_p", "min_p"}


def reference_cases():
    """The reference results that use only what make_sampler has."""
    for case in json.loads((DATA / "sampler.json").read_text())["cases"]:
        for number, result in enumerate(case["results"]):
            on = {k for k, v in result["params"].items() if v is not None}
            if on <= OURS and result["valid"] and on:
                yield pytest.param(case, result, id=f"{case['idx']}-{number}")


@pytest.mark.parametrize(("case", "result"), list(reference_cases()))
def test_kept_tokens_and_probabilities_equal_transformers(case, result):
    logits = mx.array([[float(v) for v in case["logits"]]])
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    params = {k: v for k, v in result["params"].items() if v is not None}
    kept = filter_logprobs(logprobs, **params)
    probs = np.array(mx.softmax(kept, axis=-1)[0])
    support = np.flatnonzero(np.isfinite(np.array(kept[0])))
    expected = result["kept"]
    if expected == "all":
        expected = list(range(len(probs)))
    if result["fragile"]:  # ties at the cut: the same number, or one off
        assert abs(len(support) - len(expected)) <= 1
        return
    if result["probs"] is None:
        assert support.tolist() == expected
        return
    assert support.tolist() == sorted(expected)
    # the reference scales the logits themselves: it rounds more where they are large
    scaled = np.abs(np.array(logits)).max(
        where=np.isfinite(np.array(logits)), initial=0
    )
    rel = 1e-5 + 2e-7 * float(scaled) / params.get("temperature", 1.0)
    for i, p in zip(expected, result["probs"], strict=True):
        if p is not None:
            assert probs[i] == pytest.approx(p, rel=rel, abs=1e-7)


def logprobs(*rows):
    x = mx.array(rows, dtype=mx.float32)
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def test_temperature_zero_is_greedy_and_takes_the_lowest_of_equals():
    for temperature in (0, 0.0, 1e-9):
        ids = make_sampler(temperature)(logprobs([1, 3, 3], [2, 1, 0]))
        assert ids.tolist() == [1, 0]


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others():
    flat = logprobs([0.0] * 1000)

    def draw(seed):
        sampler = make_sampler(1.0, seed=seed)
        return [sampler(flat).item() for _ in range(8)]

    assert draw(0) == draw(0)  # seed 0 is a seed
    assert draw(42) == draw(42)
    assert draw(42) != draw(43)
    assert draw((1 << 64) - 1) == draw((1 << 64) - 1)
    assert len(set(draw(42))) > 1
    assert draw(None) != draw(None)


def test_draws_follow_the_probabilities():
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    sampler = make_sampler(1.0, seed=1)
    rows = mx.broadcast_to(mx.log(mx.array(probs))[None], (20000, 4))
    counts = np.bincount(np.array(sampler(rows)), minlength=4)
    chi2 = ((counts - 20000 * probs) ** 2 / (20000 * probs)).sum()
    assert chi2 < 16.27  # 3 degrees of freedom, p = 0.001


def test_top_k_one_with_top_p_leaves_a_token():
    ids = make_sampler(1.0, top_k=1, top_p=0.8, seed=3)(logprobs([0, 5, 1], [9, 5, 1]))
    assert ids.tolist() == [1, 0]


def test_numpy_integers_are_whole_numbers():
    sampler = make_sampler(1.0, top_k=np.int64(1), seed=np.int64(5))
    assert sampler(logprobs([0, 5, 1])).tolist() == [1]


@pytest.mark.parametrize("top_k", [0, -1, 3, 100])
def test_top_k_off_or_beyond_the_vocabulary_keeps_all(top_k):
    kept = filter_logprobs(logprobs([1.0, 2.0, 3.0]), top_k=top_k)
    assert mx.isfinite(kept).all()


def test_top_p_zero_keeps_the_likeliest_only():
    kept = np.array(filter_logprobs(logprobs([1.0, 2.0, 1.5]), top_p=0.0))[0]
    assert np.isfinite(kept).tolist() == [False, True, False]


def test_minus_infinity_is_never_drawn():
    sampler = make_sampler(5.0, top_p=0.99, min_p=0.01, seed=0)
    rows = mx.broadcast_to(logprobs([-mx.inf, 0.0, -mx.inf, 0.0]), (500, 4))
    assert set(sampler(rows).tolist()) == {1, 3}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": True}, "seed"),
        ({"temperature": "x"}, "temperature"),
        ({"top_p": None}, "top_p"),
    ],
)
def test_values_that_cannot_be_used_are_refused(bad, words):
    with pytest.raises(ParameterError, match=words):
        make_sampler(**bad)
