"""Attention over pages: the kernel and its reference against float64."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from emulator_tools import needs_emulator
from kernel_cases import (
    OWN_SCALE,
    TOLERANCE,
    Case,
    double,
    largest_error,
    needs_kernels,
    no_canaries,  # noqa: F401
    on_metal,  # noqa: F401
    paged,
    pairs,
    pairwise,
)
from metal_emulator import recording

from tiny_llm.kernels import cached, paged_attention
from tiny_llm.kernels.paged import paged_reference

CONTEXTS = {
    "tiny": (17, 1, 16, 2, 15),
    "empty": (100, 0, 33, 40, 7),  # the second without tokens, the fourth without rows
    "middle": (257, 64, 1),
    "long": (4000, 3),
}
OPTIONS = {
    "dtype": ("float32", "float16", "bfloat16"),
    "dim": (32, 64, 80, 96, 128, 192, 256),
    "packing": ((0, 0), (8, 32), (8, 64), (4, 32), (4, 64)),
    "page": (16, 32, 64, 128),
    "group": (1, 3, 4, 8),
    "contexts": tuple(CONTEXTS),
    "most_rows": (1, 2, 3, 4, 5, 6, 7, 8),
    "window": ((None, False), (1, False), (20, False), (20, True), (300, True)),
    "softcap": (None, 2.0),
    "sinks": (False, True),
    "scale": (None, OWN_SCALE),
    "splits": (1, 2, 4, 8, 16, None),
    "view": (False, True),
}


def allowed(choice):
    """Groups divide rows; long contexts meet few queries, as the checker takes long."""
    group_size = choice.get("packing", (0, 0))[1]
    few = choice.get("group", 1) <= 4 and choice.get("most_rows", 1) <= 4
    divided = not group_size or choice.get("dim", 64) % group_size == 0
    return divided and (few or choice.get("contexts") != "long")


def case_of(choice):
    """most_rows new tokens in the first sequence; others have from 1 to as many."""
    choice = dict(choice)
    name, most = choice.pop("contexts"), choice.pop("most_rows")
    contexts = CONTEXTS[name]
    rows = [
        min(n, (most, 1, most, (most + 1) // 2)[i % 4]) for i, n in enumerate(contexts)
    ]
    if name == "empty":
        rows[3] = 0
    window, dropped = choice.pop("window")
    return Case(
        contexts=contexts,
        rows=tuple(rows),
        kv_heads=1 if name == "long" or choice["group"] == 8 else 2,
        window=window,
        dropped=dropped,
        **choice,
    )


def name_of(choice):
    words = [choice["dtype"], f"D{choice['dim']}"]
    words += ["int{}x{}".format(*choice["packing"])] if choice["packing"][0] else []
    words += [f"page{choice['page']}", f"gqa{choice['group']}", choice["contexts"]]
    words += [f"rows{choice['most_rows']}", f"splits{choice['splits']}"]
    window, dropped = choice["window"]
    words += [f"window{window}"] * (window is not None) + ["dropped"] * dropped
    words += [name for name in ("softcap", "sinks", "scale", "view") if choice[name]]
    return "-".join(words)


CHOICES = pairwise(OPTIONS, allowed)
every_case = pytest.mark.parametrize(
    "case", [case_of(c) for c in CHOICES], ids=[name_of(c) for c in CHOICES]
)


def test_any_two_values_of_two_options_meet():
    wanted = set(pairs(OPTIONS, allowed))
    met = {
        pair
        for choice in CHOICES
        for pair in pairs({name: [choice[name]] for name in OPTIONS}, allowed)
    }
    assert met == wanted
    assert all(max(case_of(c).rows) == c["most_rows"] for c in CHOICES)


@needs_kernels
@every_case
@pytest.mark.usefixtures("on_metal")
def test_the_kernel_is_attention(case):
    problem = paged(case)
    assert largest_error(problem, problem.attend()) <= TOLERANCE[case.dtype]


@every_case
def test_the_reference_is_attention(case):
    problem = paged(replace(case, dtype="float32"))
    assert largest_error(problem, problem.reference()) <= TOLERANCE["float32"]


FURTHER = {
    "eight requests": Case(contexts=(5, 31, 32, 33, 1, 64, 90, 2), rows=(1,) * 8),
    "no request but one": Case(contexts=(0, 0, 50), rows=(0, 0, 2)),
    "one request": Case(contexts=(300,), rows=(8,)),
    "more splits than keys": Case(contexts=(3, 1), rows=(2, 1), splits=16, sinks=True),
    "one query head, split": Case(
        contexts=(9, 5), rows=(1, 0), kv_heads=1, group=1, splits=2, sinks=True
    ),
    "a window of all": Case(window=100),
    "a window beyond what a counter holds": Case(window=1 << 40),
    "a window ends a page": Case(window=16, contexts=(32, 48), rows=(1, 1), page=16),
    "scores that differ much": Case(scale=3.0, contexts=(257, 40), rows=(8, 3)),
    "sinks above all scores": Case(scale=0.01, sinks=True, splits=4),
    "sinks far from the scores": Case(sinks=True, sink=200.0, rows=(2, 1, 3, 1)),
    "sinks far from the scores, split": Case(sinks=True, sink=200.0, splits=4),
    "scores of -300": Case(lift=-300.0, rows=(2, 1, 3, 1)),
    "scores and sinks of -300, split": Case(lift=-300.0, sinks=True, splits=4),
    "scores of 300": Case(lift=300.0, rows=(2, 1, 3, 1), splits=2),
    "keys not seen score higher by 100": Case(rise=100.0, rows=(8, 1, 3, 5)),
    "keys not seen score higher by 100, split": Case(
        rise=100.0, rows=(8, 1, 3, 5), splits=4
    ),
    "five KV heads": Case(kv_heads=5, group=1, view=True),
    "twelve query heads of a KV head": Case(group=12, kv_heads=1, rows=(8, 1, 5, 2)),
    "numbers of 16 a head": Case(dim=16),
    "numbers of 240 a head": Case(dim=240, group=8, rows=(8, 1, 5, 2)),
}


@needs_kernels
@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.usefixtures("on_metal", "no_canaries")
def test_the_kernel_is_attention_also_here(name):
    problem = paged(FURTHER[name])
    tolerance = TOLERANCE["float32"]
    assert largest_error(problem, problem.attend()) <= tolerance
    assert largest_error(problem, problem.reference()) <= tolerance


@needs_kernels
@pytest.mark.parametrize("page", [1, 2, 7, 8, 100])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.usefixtures("on_metal")
def test_pages_of_any_size_pass_the_canary_too(page, rows):
    problem = paged(Case(page=page, contexts=(40, 1, 8, 20), rows=(rows, 1, rows, 0)))
    assert largest_error(problem, problem.attend()) <= TOLERANCE["float32"]


@needs_kernels
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.usefixtures("on_metal")
def test_a_pool_of_few_packed_slots_is_read(slots):
    """Fewer than 8 scales: MLX passes them in another way."""
    rows = mx.random.normal((2, slots, 64), key=mx.random.key(0))
    pages = mx.quantize(rows, group_size=64, bits=8)
    table = mx.zeros((2, 4), dtype=mx.int32)
    sequences = mx.array([[slots, 0, 1, 0], [0, 0, 0, 0]], dtype=mx.int32)
    q = mx.random.normal((1, 1, 1, 64), key=mx.random.key(1))
    options = {"page_size": slots, "scale": 0.125, "bits": 8, "group_size": 64}
    found = paged_attention(q, pages, table, sequences, most_rows=1, **options)
    expected = paged_reference(q, pages, table, sequences, **options)
    assert mx.abs(found - expected).max() < 1e-5


@needs_kernels
@pytest.mark.parametrize("packing", [(0, 0), (8, 32), (4, 64)], ids=str)
@pytest.mark.usefixtures("on_metal")
def test_every_number_of_splits_gives_the_same(packing):
    case = Case(contexts=(300, 17, 9), rows=(3, 1, 0), packing=packing, sinks=True)
    problem = paged(case)
    for splits in (1, 2, 3, 7, 16):
        found = problem.attend(splits=splits)
        assert largest_error(problem, found) <= TOLERANCE["float32"], splits


@needs_emulator
@pytest.mark.parametrize("splits", [2, 3, 8, 16])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.usefixtures("on_metal", "no_canaries")
def test_splits_share_the_keys_alike(splits, window):
    """Keys whose scores are all 0 weigh 1 each: a split's sum of weights is a count."""
    problem = paged(Case(contexts=(300, 17, 60), rows=(1, 1, 1), window=window))
    nothing = problem._replace(q=mx.zeros_like(problem.q))
    with recording() as runs:
        nothing.attend(splits=splits)
    shape = (3, problem.case.heads, splits, 2)
    totals = runs[0][1].outputs[1].reshape(shape)[..., 1]
    for s in range(3):
        seen = len(problem.case.seen(s))
        counts = totals[problem.sequences[s, 1].item()]
        assert (counts.sum(axis=1) == seen).all()
        assert counts.max() == -(-seen // splits)


@needs_kernels
@pytest.mark.usefixtures("on_metal")
def test_long_contexts_are_split_by_the_rule():
    case = Case(contexts=(4000, 900), rows=(1, 1), kv_heads=1, splits=None)
    problem = paged(case)
    width = problem.table.shape[1] * case.page
    assert cached.splits_for(2, width) > 1
    assert largest_error(problem, problem.attend()) <= TOLERANCE["float32"]


@needs_kernels
@pytest.mark.usefixtures("on_metal")
def test_a_token_is_attended_the_same_alone_or_with_others():
    """One that is verified among drafts sees what it would see when decoded."""
    problem = paged(Case(contexts=(100, 60), rows=(8, 1)))
    together = np.array(problem.attend())
    first = problem.sequences[0, 1].item()
    for row in (0, 3, 7):
        tokens = 100 - 7 + row
        alone = problem._replace(
            case=replace(problem.case, rows=(1, 1)),
            q=problem.q[first + row :][:1],
            sequences=mx.array([[tokens, 0, 1, 0], [0, 0, 0, 0]], dtype=mx.int32),
        )
        np.testing.assert_allclose(
            np.array(alone.attend())[0], together[first + row], atol=1e-6
        )


@needs_kernels
@pytest.mark.usefixtures("on_metal")
def test_rows_of_no_sequence_change_nothing(monkeypatch):
    """As a step of fixed shape has them: their outcome is anything."""
    problem = paged(Case(contexts=(40, 7), rows=(2, 1)))
    more = mx.concatenate([problem.q, mx.full((3, *problem.q.shape[1:]), mx.nan)])
    # (the checker would report that nothing is written there)
    monkeypatch.setenv("TINY_LLM_EMULATOR_MODE", "fast")
    found = problem._replace(q=more).attend()
    assert largest_error(problem._replace(q=more[:3]), found[:3]) <= 1e-5


@needs_kernels
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.usefixtures("on_metal")
def test_only_metal_runs_where_metal_is_asked_for(splits, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the reference ran")

    monkeypatch.setattr("tiny_llm.kernels.paged.paged_reference", refuse)
    problem = paged(Case(splits=splits))
    assert np.isfinite(double(problem.attend())).all()
