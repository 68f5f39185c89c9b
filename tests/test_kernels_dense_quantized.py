"""Attention over a quantised dense cache: kernel and reference against float64."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import (
    OWN_SCALE,
    TOLERANCE,
    Case,
    dense,
    largest_error,
    needs_kernels,
    no_canaries,  # noqa: F401
    on_metal,  # noqa: F401
    pairs,
    pairwise,
)

from tiny_llm import kernels

OPTIONS = {
    "dtype": ("float32", "float16", "bfloat16"),
    "dim": (32, 64, 96, 128, 192, 256),
    "packing": ((8, 32), (8, 64), (4, 32), (4, 64)),
    "group": (1, 3, 4, 8),
    "batch": (1, 2),
    "context": (8, 33, 257, 4000),
    "length": (1, 2, 3, 5, 8),  # (rows are rounded up to 1, 2, 4 and 8)
    "window": (None, 1, 20, 300),
    "softcap": (None, 2.0),
    "sinks": (False, True),
    "scale": (None, OWN_SCALE),
    "splits": (1, 2, 4, 8, 16, None),
    "view": (False, True),
}


def allowed(choice):
    """Groups divide rows; long contexts meet few queries, as the checker takes long."""
    few = choice.get("group", 1) <= 4 and choice.get("length", 1) <= 4
    few = few and choice.get("batch", 1) == 1
    divided = choice.get("dim", 64) % choice.get("packing", (8, 32))[1] == 0
    return divided and (few or choice.get("context") != 4000)


def case_of(choice):
    choice = dict(choice)
    batch, context, length = (choice.pop(n) for n in ("batch", "context", "length"))
    return Case(
        contexts=(context,) * batch,
        rows=(length,) * batch,
        kv_heads=1 if context == 4000 or choice["group"] == 8 else 2,
        **choice,
    )


def name_of(choice):
    words = [choice["dtype"], f"D{choice['dim']}"]
    words += ["int{}x{}".format(*choice["packing"]), f"gqa{choice['group']}"]
    words += [f"{name}{choice[name]}" for name in ("batch", "context", "length")]
    words += [f"splits{choice['splits']}"]
    words += [f"window{choice['window']}"] if choice["window"] else []
    words += [name for name in ("softcap", "sinks", "scale", "view") if choice[name]]
    return "-".join(words)


CHOICES = pairwise(OPTIONS, allowed)
every_case = pytest.mark.parametrize(
    "case", [case_of(c) for c in CHOICES], ids=[name_of(c) for c in CHOICES]
)


def test_any_two_values_of_two_options_meet():
    met = {
        pair
        for choice in CHOICES
        for pair in pairs({name: [choice[name]] for name in OPTIONS}, allowed)
    }
    assert met == set(pairs(OPTIONS, allowed))


@needs_kernels
@every_case
@pytest.mark.usefixtures("on_metal", "no_canaries")
def test_the_kernel_is_attention(case):
    problem = dense(case)
    assert largest_error(problem, problem.attend()) <= TOLERANCE[case.dtype]


@every_case
def test_the_reference_is_attention(case):
    problem = dense(replace(case, dtype="float32"))
    assert largest_error(problem, problem.reference()) <= TOLERANCE["float32"]


@needs_kernels
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("context", [1, 2, 3, 7])
@pytest.mark.usefixtures("on_metal")
def test_a_cache_of_few_tokens_is_attended(context, splits):
    """Fewer than 8 scales would reach the kernel in another address space."""
    problem = dense(
        Case(
            packing=(8, 64),
            contexts=(context,),
            rows=(1,),
            kv_heads=1,
            group=2,
            splits=splits,
            sinks=True,
        )
    )
    assert largest_error(problem, problem.attend()) <= TOLERANCE["float32"]


@needs_kernels
@pytest.mark.usefixtures("on_metal")
def test_every_number_of_splits_gives_the_same():
    case = Case(packing=(4, 32), contexts=(100, 100), rows=(3, 3), sinks=True)
    problem = dense(case)
    for splits in (1, 2, 3, 8, 16):
        found = problem.attend(splits=splits)
        assert largest_error(problem, found) <= TOLERANCE["float32"], splits


@pytest.mark.parametrize("length", [9, 40])
def test_more_than_eight_new_tokens_go_to_the_reference(length, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a kernel was asked for")

    monkeypatch.setenv("TINY_LLM_KERNELS", "metal")
    monkeypatch.setattr("tiny_llm.kernels.dense_quantized.runs_on_metal", refuse)
    case = Case(packing=(8, 32), contexts=(50, 50), rows=(length, length), window=30)
    problem = dense(case)
    found = problem.attend()
    np.testing.assert_array_equal(np.array(found), np.array(problem.reference()))
    assert largest_error(problem, found) <= TOLERANCE["float32"]


@pytest.mark.parametrize("setting", ["reference", "metal"])
def test_other_types_and_widths_go_to_the_reference(setting, monkeypatch):
    """Queries of float32 over float16; values twice as wide as keys, and half."""
    monkeypatch.setenv("TINY_LLM_KERNELS", setting)
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda *_, **__: None)
    halves = dense(Case("float16", packing=(8, 32), contexts=(40, 40), rows=(3, 3)))
    other = halves._replace(q=halves.q.astype(mx.float32))
    assert other.attend().dtype == mx.float32
    assert largest_error(other, other.attend()) <= TOLERANCE["float16"]
    assert mx.array_equal(other.attend(), other.reference())

    problem = dense(Case(packing=(8, 32), contexts=(40, 40), rows=(3, 3)))
    wide = kernels.PackedRows(*(mx.concatenate([x, x], axis=-1) for x in problem.v))
    half = kernels.PackedRows(*(x[..., : x.shape[-1] // 2] for x in problem.v))
    for v, expected in (
        (wide, np.concatenate([problem.expected] * 2, axis=-1)),
        (half, problem.expected[..., :32]),
    ):
        changed = problem._replace(v=v)
        found = np.array(changed.attend())
        np.testing.assert_array_equal(found, np.array(changed.reference()))
        np.testing.assert_allclose(found, expected, atol=1e-5)


@needs_kernels
@pytest.mark.usefixtures("on_metal")
def test_keys_and_values_may_lie_in_buffers_of_their_own():
    """With other strides for each, and heads between the tokens."""
    problem = dense(Case(packing=(8, 32), contexts=(40, 40), rows=(2, 2)))
    k = [mx.contiguous(part) for part in problem.k]
    v = [mx.contiguous(part.swapaxes(1, 2)).swapaxes(1, 2) for part in problem.v]
    other = problem._replace(k=kernels.PackedRows(*k), v=kernels.PackedRows(*v))
    assert largest_error(other, other.attend()) <= TOLERANCE["float32"]
