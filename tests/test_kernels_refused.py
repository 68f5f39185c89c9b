"""Arguments that the kernels' operations refuse, each with a message that says why."""

import mlx.core as mx
import pytest
from kernel_cases import Case, dense, paged

from tiny_llm import kernels
from tiny_llm.errors import ParameterError
from tiny_llm.kernels import metal

PAGED = Case(contexts=(20, 3), rows=(1, 1))
DENSE = Case(contexts=(20, 20), rows=(1, 1), packing=(8, 32))


def no_kernel(*_, **__):
    raise AssertionError("a kernel was built")


def changed(problem, **other):
    return lambda: problem._replace(**other).attend()


def paged_errors():
    good = paged(PAGED)
    packed = paged(Case(contexts=(20, 3), rows=(1, 1), packing=(8, 32)))
    q, (pages,), table, sequences = good[1:5]
    words, scales, biases = packed.pages
    half = mx.float16
    return {
        "bits without a group size": (lambda: good.attend(bits=8), "group_size None"),
        "bits with numbers": (lambda: good.attend(bits=8, group_size=32), "1 arrays"),
        "words without bits": (
            lambda: packed.attend(bits=None, group_size=None), "with 3 arrays"
        ),
        "too few arrays": (changed(packed, pages=(words, scales)), "with 2 arrays"),
        "bits that there are not": (lambda: packed.attend(bits=3), "3 bits"),
        "groups of 16": (lambda: packed.attend(group_size=16), "groups of 16"),
        "groups that do not divide": (lambda: packed.attend(group_size=48), "48"),
        "groups of nothing": (lambda: packed.attend(group_size=0), "group"),
        "q of three axes": (changed(good, q=q[:, :, 0]), r"\[N, H, 1, D\]"),
        "q of two tokens": (changed(good, q=q.swapaxes(0, 2)), r"\[N, H, 1, D\]"),
        "pages of one axis": (changed(good, pages=(pages[0, 0],)), "pages"),
        "pages of another width": (changed(good, pages=(pages[..., :32],)), "expected"),
        "pages of whole numbers": (
            changed(good, pages=(pages.astype(mx.int32),)), "a float type"
        ),
        "scales of another type": (
            changed(packed, pages=(words, scales.astype(half), biases)), "expected"
        ),
        "words of another type": (
            changed(packed, pages=(words.astype(mx.int32), scales, biases)), "expected"
        ),
        "biases of other slots": (
            changed(packed, pages=(words, scales, biases[:, :16])), "expected"
        ),
        "keys without values": (changed(good, pages=(pages[:3],)), "6 query heads"),
        "no KV heads": (changed(good, pages=(pages[:0],)), "6 query heads"),
        "heads that do not divide": (changed(good, q=q[:, :5]), "5 query heads"),
        "a table of floats": (changed(good, table=table.astype(mx.float32)), "table"),
        "a narrow table": (changed(good, table=table[:, :3]), "table"),
        "a flat table": (changed(good, table=table.flatten()), "table"),
        "other sequences": (changed(good, table=mx.repeat(table, 2, 0)), "sequences"),
        "one sequence": (
            changed(good, table=table[:1], sequences=sequences[:1]), "table"
        ),
        "sequences of floats": (
            changed(good, sequences=sequences.astype(mx.float32)), "sequences"
        ),
        "sequences of three": (changed(good, sequences=sequences[:, :3]), "sequences"),
        "sequences of five": (
            changed(good, sequences=mx.pad(sequences, [(0, 0), (0, 1)])), "sequences"
        ),
        "sinks of KV heads": (changed(good, sinks=mx.zeros(2)), "sinks"),
        "a window of none": (lambda: good.attend(window=0), "window"),
        "a cap of none": (lambda: good.attend(softcap=0.0), "softcap"),
        "an endless cap": (lambda: good.attend(softcap=float("inf")), "finite"),
        "no splits": (lambda: good.attend(splits=0), "splits"),
        "too many splits": (lambda: good.attend(splits=17), "splits"),
        "no rows": (changed(good, case=Case(rows=(0, 0))), "most_rows is 0"),
        "nine rows": (changed(good, case=Case(rows=(9, 1))), "most_rows is 9"),
        "pages that do not fill the pool": (
            changed(good, case=Case(page=48, rows=(1, 1))), "48"
        ),
        "pages of no tokens": (changed(good, case=Case(page=0, rows=(1, 1))), "0"),
    }  # fmt: skip


def dense_errors():
    good = dense(DENSE)
    q, k, v = good[1:4]
    half = mx.float16
    return {
        "q of three axes": (changed(good, q=q[0]), r"\[B, H, L, D\]"),
        "heads that do not divide": (changed(good, q=q[:, :5]), "queries"),
        "more new tokens than all": (
            changed(good, q=mx.repeat(q, 21, axis=2)), "over 20 tokens"
        ),
        "another batch": (changed(good, q=q[:1]), "expected"),
        "fewer values": (
            changed(good, v=kernels.PackedRows(*(x[:, :, :19] for x in v))), "expected"
        ),
        "words of another type": (
            changed(good, k=k._replace(words=k.words.astype(mx.int32))), "expected"
        ),
        "scales of another type": (
            changed(good, v=v._replace(scales=v.scales.astype(half))), "expected"
        ),
        "biases of other groups": (
            changed(good, k=k._replace(biases=k.biases[..., :1])), "expected"
        ),
        "other bits": (lambda: good.attend(bits=4), "expected"),
        "bits of nothing": (lambda: good.attend(bits=0), "0 bits"),
        "values of no width": (
            changed(good, v=kernels.PackedRows(*(x[0, 0, 0, 0] for x in v))), "expected"
        ),
        "other groups": (lambda: good.attend(group_size=64), "expected"),
        "groups of nothing": (lambda: good.attend(group_size=0), "group"),
        "words of three axes": (changed(good, k=k._replace(words=k.words[0])), "words"),
        "no KV heads": (
            changed(good, k=kernels.PackedRows(*(x[:, :0] for x in k))), "queries"
        ),
        "sinks of KV heads": (changed(good, sinks=mx.zeros(2)), "sinks"),
        "a window of none": (lambda: good.attend(window=0), "window"),
        "a cap of none": (lambda: good.attend(softcap=0.0), "softcap"),
        "an endless cap": (lambda: good.attend(softcap=float("inf")), "finite"),
        "no splits": (lambda: good.attend(splits=0), "splits"),
        "too many splits": (lambda: good.attend(splits=17), "splits"),
    }  # fmt: skip


def pack_errors():
    k = mx.zeros((3, 2, 1, 64))
    return {
        "other shapes": (lambda: kernels.quantize_kv(k, k[:2], 32, 8), "both must be"),
        "other types": (
            lambda: kernels.quantize_kv(k, k.astype(mx.float16), 32, 8), "both must be"
        ),
        "three axes": (
            lambda: kernels.quantize_kv(k[:, :, 0], k[:, :, 0], 32, 8), "both must be"
        ),
        "two tokens": (
            lambda: kernels.quantize_kv(*(mx.repeat(k, 2, 2),) * 2, 32, 8),
            "both must be",
        ),
        "3 bits": (lambda: kernels.quantize_kv(k, k, 32, 3), "3 bits"),
        "groups of 128": (lambda: kernels.quantize_kv(k, k, 128, 8), "groups of 128"),
        "groups of nothing": (lambda: kernels.quantize_kv(k, k, 0, 8), "groups of 0"),
        "groups that do not divide": (
            lambda: kernels.quantize_kv(k[..., :32], k[..., :32], 64, 8), "rows of 32"
        ),
    }  # fmt: skip


ERRORS = {"paged": paged_errors, "dense": dense_errors, "pack": pack_errors}


@pytest.mark.parametrize("setting", ["reference", "metal"])
@pytest.mark.parametrize(
    ("operation", "name"),
    [(operation, name) for operation, errors in ERRORS.items() for name in errors()],
)
def test_wrong_arguments_are_refused(operation, name, setting, monkeypatch):
    """On every device, before anything runs."""
    monkeypatch.setattr(mx.fast, "metal_kernel", no_kernel)
    monkeypatch.setenv(metal.VARIABLE, setting)
    call, message = ERRORS[operation]()[name]
    with pytest.raises(ParameterError, match=message):
        call()
