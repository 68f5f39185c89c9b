import json
import math

import mlx.core as mx
import numpy as np
import pytest
from oracle import DATA

from tiny_llm import make_sampler
from tiny_llm.errors import ParameterError
from tiny_llm.sampling import SamplingParams
from tiny_llm.sampling import select as select_module
from tiny_llm.sampling.candidates import log_total
from tiny_llm.sampling.filters import Filters
from tiny_llm.sampling.rows import Row, adjusted, sample_rows
from tiny_llm.sampling.rules import Rules
from tiny_llm.sampling.select import select

CASES = json.loads((DATA / "sampler.json").read_text())["cases"]
VALID = [case for case in CASES if case["results"][0]["valid"]]


def params_of(result, **more):
    """The reference's parameters as ours: XTC always strikes there."""
    given = {k: v for k, v in result["params"].items() if v is not None}
    if "logit_bias" in given:
        given["logit_bias"] = {int(k): v for k, v in given["logit_bias"].items()}
    if "xtc_threshold" in given:
        given["xtc_probability"] = 1.0
    return SamplingParams(**{"temperature": 1.0, "seed": 1, **given, **more})


def distribution(logits, rows, wait, choose=select):
    """The probabilities [R, V] that the rows' tokens are drawn from."""
    last = mx.array([row.tokens[-1] if row.tokens else 0 for row in rows])
    changed = adjusted(logits, rows, last, {})
    found = choose(
        changed,
        [row.rules.filters_at(row.place) for row in rows],
        mx.zeros((len(rows),)),
        wait=wait,
        top=logits.shape[1],
    )
    probs = np.zeros(logits.shape)
    ids, shares = np.array(found.top_ids), np.array(found.top_logprobs)
    places = np.arange(len(rows))[:, None], ids
    np.add.at(probs, places, np.exp(shares.astype(np.float64)))
    return probs


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("case", VALID, ids=lambda case: case["name"])
def test_kept_tokens_and_probabilities_equal_the_reference(case, wait):
    """All settings of a case at once, a row each."""
    results = case["results"]
    assert all(result["valid"] for result in results)
    logits = mx.array([[float(v) for v in case["logits"]]] * len(results))
    rows = [Row(Rules(params_of(r)), 0, case["history"]) for r in results]
    probs = distribution(logits, rows, wait)
    finite = np.array(logits[0])[np.isfinite(np.array(logits[0]))]
    for own, result in zip(probs, results, strict=True):
        support = np.flatnonzero(own)
        expected = result["kept"]
        if expected == "all":
            expected = list(range(len(own)))
        if result["fragile"]:  # ties at the cut: the same number, or one off
            assert abs(len(support) - len(expected)) <= 1, result["params"]
            continue
        given = dict(zip(sorted(expected), [None] * len(expected), strict=True))
        if result["probs"] is not None:
            given = dict(zip(expected, result["probs"], strict=True))
        # (below 1e-26 of the likeliest nothing is ever drawn)
        missing = set(given) - set(support.tolist())
        for i in missing:
            omitted = given[i] is None and result["kept"] == "all"
            assert omitted or given[i] < 1e-20, result["params"]
        assert set(support.tolist()) <= set(given), result["params"]
        # the reference scales the logits themselves: large ones it rounds more
        scaled = float(np.abs(finite).max()) / (
            result["params"].get("temperature") or 1.0
        )
        for i, p in given.items():
            if p is not None:
                assert own[i] == pytest.approx(p, rel=1e-5 + 3e-7 * scaled, abs=1e-7)


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


@pytest.mark.parametrize("name", ["nan_one", "plus_inf_one"])
def test_where_the_reference_has_no_distribution_the_largest_logit_tells(name):
    """NaN and infinity: the engine ends such a request by this number."""
    (case,) = (case for case in CASES if case["name"] == name)
    assert case not in VALID
    logits = mx.array([[float(v) for v in case["logits"]]] * len(case["results"]))
    rows = [Row(Rules(params_of(r)), 0, case["history"]) for r in case["results"]]
    last = mx.array([case["history"][-1]] * len(rows))
    tops = sample_rows(logits, rows, last, wait=True).tops
    assert not mx.isfinite(tops).any()


def support(x, **filters):
    """The ids that are kept of one row of scores."""
    x = np.array(x, np.float32)
    row = Row(Rules(SamplingParams(**{"temperature": 1.0, **filters})), 0)
    return np.flatnonzero(distribution(mx.array(x[None]), [row], True)[0]).tolist()


@pytest.mark.parametrize("top_k", [0, -1, 3, 100])
def test_top_k_off_or_beyond_the_vocabulary_keeps_all(top_k):
    assert support([1.0, 2.0, 3.0], top_k=top_k) == [0, 1, 2]


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.0}, {"typical_p": 0.0}, {"min_p": 1.0}]
)
def test_the_tightest_filters_keep_one_token(filters):
    assert support([1.0, 3.0, 1.5], **filters) == [1]


def test_top_n_sigma_keeps_what_is_within_n_deviations_of_the_largest():
    scores = np.random.default_rng(0).normal(0, 3, 500).astype(np.float32)
    for n in (0.5, 1.0, 2.5):
        expected = np.flatnonzero(scores >= scores.max() - n * scores.std())
        for temperature in (1.0, 2.0):  # does not matter
            found = support(scores, top_n_sigma=n, temperature=temperature)
            assert found == expected.tolist()
    scores[7] = -np.inf  # no score
    finite = np.delete(scores, 7)
    expected = np.flatnonzero(scores >= finite.max() - finite.std())
    assert support(scores, top_n_sigma=1.0) == expected.tolist()


def test_xtc_comes_as_often_as_asked_and_leaves_the_least_of_the_likely():
    x = np.log([0.4, 0.3, 0.2, 0.06, 0.04]).astype(np.float32)
    params = SamplingParams(
        temperature=1.0, xtc_probability=0.3, xtc_threshold=0.1, seed=5
    )
    rows = [Row(Rules(params), place) for place in range(2000)]
    probs = distribution(mx.array(np.tile(x, (2000, 1))), rows, True)
    struck = (probs[:, 0] == 0).sum()
    assert abs(struck / 2000 - 0.3) < 0.04
    for own in probs:
        kept = np.flatnonzero(own).tolist()
        assert kept in ([0, 1, 2, 3, 4], [2, 3, 4])


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


# Large vocabularies: only candidates are looked at, and that must not show.

MIXED = (
    *({"top_k": 1}, {"top_k": 50}, {"top_k": 64}, {"top_k": 300}, {"top_p": 0.3}),
    *({"top_p": 0.95}, {"min_p": 0.05}, {"min_p": 1e-6}, {"typical_p": 0.5}),
    *({"top_n_sigma": 1.0}, {"top_n_sigma": 3.0, "top_p": 0.99}, {}),
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8},
    {"xtc_probability": 1.0, "xtc_threshold": 0.001},
    {"top_k": 500, "top_p": 0.999, "temperature": 3.0},
    {"top_p": 0.9999999},
    {"top_k": 3000, "top_p": 0.3, "temperature": 4.0},
    {"top_k": 200, "top_p": 0.5, "temperature": 2.0},
)


def scores_of(kind, rows, vocabulary=20_011):
    random = np.random.default_rng(7)
    x = random.normal(0, 2.5, (rows, vocabulary)).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    if kind == "bans":
        x[:, random.permutation(vocabulary)[: vocabulary - 100]] = -np.inf
    return mx.array(x)


def all_sorted(*args, **kwargs):
    """select, by looking at everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select_module, "_FEW", 1 << 30)
        return select(*args, **{**kwargs, "wait": False})


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("kind", ["plain", "ties", "bans"])
def test_candidates_are_enough_or_more_are_looked_at(kind, wait):
    x = scores_of(kind, len(MIXED))
    rows = [
        Row(Rules(SamplingParams(**{"temperature": 1.0, "seed": 3, **own})), 0)
        for own in MIXED
    ]
    found = distribution(x, rows, wait)
    expected = distribution(x, rows, wait, all_sorted)
    for own, a, b in zip(MIXED, found, expected, strict=True):
        if kind == "ties" and not wait and 0 < own.get("top_k", 0) <= 64:
            continue  # (of very many that tie with the k-th, 128 stay)
        support_a, support_b = np.flatnonzero(a), np.flatnonzero(b)
        # (the last tokens of a nucleus of thousands are a matter of rounding)
        differing = set(support_a) ^ set(support_b)
        assert len(differing) <= len(support_b) // 200, own
        np.testing.assert_allclose(
            np.delete(a, list(differing)), np.delete(b, list(differing)), rtol=2e-4
        )


def test_what_fills_the_last_block_is_no_candidate():
    x = np.full((1, 20_011), -np.inf, np.float32)
    x[0, [0, 20_010]] = 0.0
    row = Row(Rules(SamplingParams(temperature=1.0, top_k=50, seed=1)), 0)
    probs = distribution(mx.array(x), [row], True)[0]
    assert probs[[0, 20_010]].tolist() == pytest.approx([0.5, 0.5])


def test_sums_of_long_rows_are_exact_to_float32():
    x = np.random.default_rng(3).normal(0, 3, (2, 49_152)).astype(np.float32)
    exact = np.log(np.exp(x.astype(np.float64)).sum(axis=1))
    found = np.array(log_total(mx.array(x)))[:, 0]
    assert np.abs(found - exact).max() < 3e-6


def test_a_row_gets_the_same_token_alone_and_among_others():
    x = scores_of("plain", len(MIXED))
    filters = [
        Filters(
            **{"temperature": 1.0, **{k: v for k, v in own.items() if k[:5] != "xtc_p"}}
        )
        for own in MIXED
    ]
    uniforms = mx.array(np.random.default_rng(1).random(len(MIXED), np.float32))
    for wait in (True, False):
        together = select(x, filters, uniforms, wait=wait).tokens.tolist()
        alone = [
            select(
                x[i : i + 1], filters[i : i + 1], uniforms[i : i + 1], wait=wait
            ).tokens.item()
            for i in range(len(MIXED))
        ]
        assert together == alone


DRAWN = (
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"top_n_sigma": 1.5},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
)


@pytest.mark.parametrize("own", DRAWN, ids=str)
def test_draws_of_every_filter_follow_its_distribution(own):
    """Chi-square over 20,000 draws, as the engine makes them: by seed and place."""
    x = np.random.default_rng(2).normal(0, 2, 60).astype(np.float32)
    rules = Rules(SamplingParams(**{"temperature": 1.0, "seed": 11, **own}))
    count = 20_000
    rows = [Row(rules, place) for place in range(count)]
    logits = mx.broadcast_to(mx.array(x), (count, 60))
    tokens = sample_rows(logits, rows, mx.zeros((count,)), wait=True).tokens
    probs = distribution(mx.array(x[None]), rows[:1], True)[0]
    check_draws(np.bincount(np.array(tokens), minlength=60), probs)


def test_draws_from_many_tokens_follow_their_distribution():
    """In blocks of neighbours; what is forbidden lies in whole blocks, too."""
    x = np.full(1000, -np.inf, np.float32)
    likely = [0, 1, 255, 256, 300, 511, 512, 998, 999]
    x[likely] = np.random.default_rng(4).normal(0, 1, len(likely))
    x[600:700] = -80.0  # nothing, nearly
    rules = Rules(SamplingParams(temperature=1.0, seed=12))
    rows = [Row(rules, place) for place in range(20_000)]
    logits = mx.broadcast_to(mx.array(x), (20_000, 1000))
    tokens = sample_rows(logits, rows, mx.zeros((20_000,)), wait=True).tokens
    weights = np.exp(x.astype(np.float64))
    probs = np.where(np.isin(np.arange(1000), likely), weights, 0)
    check_draws(np.bincount(np.array(tokens), minlength=1000), probs / probs.sum())
    for number in (0.0, 1.0 - 2.0**-24):
        (token,) = select(
            mx.array(x[None]), [Filters()], mx.array([number])
        ).tokens.tolist()
        assert token == (0 if number == 0 else 999)


def check_draws(counts, probs):
    """p > 0.001 that the counts are draws by the probabilities."""
    assert counts[probs == 0].sum() == 0
    expected = probs * counts.sum()
    # (rare tokens together, as the test needs five or so each)
    rare = expected < 5
    pairs = [*zip(counts[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() >= 5:
        pairs.append((counts[rare].sum(), expected[rare].sum()))
    statistic = sum((n - m) ** 2 / m for n, m in pairs)
    degrees = len(pairs) - 1
    # (Wilson and Hilferty 1931)
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit


def test_the_random_numbers_are_uniform_and_independent_of_each_other():
    from tiny_llm.sampling.random_numbers import uniform

    for make in (
        lambda i: uniform(42, i),
        lambda i: uniform(i, 0),
        lambda i: uniform(i, i),
        lambda i: uniform(0, i // 2, i % 2),
    ):
        numbers = np.array([make(i) for i in range(20_000)])
        assert 0 <= numbers.min() <= numbers.max() < 1
        counts = np.bincount((numbers * 50).astype(int), minlength=50)
        check_draws(counts, np.full(50, 0.02))
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.025
