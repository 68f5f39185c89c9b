"""The kernels with one mistake each: every mistake is found.

By the emulator's checker, or else by comparing with float64 (the float32 numbers are
then wrong by ten times what is allowed). The canaries are not asked.
"""

from importlib.resources import files
from typing import NamedTuple

import metal_emulator
import mlx.core as mx
import numpy as np
import pytest
from emulator_tools import needs_emulator
from kernel_cases import (
    TOLERANCE,
    Case,
    dense,
    largest_error,
    no_canaries,  # noqa: F401
    on_metal,  # noqa: F401
    paged,
)
from metal_emulator import CheckFailed

from tiny_llm import kernels

pytestmark = [needs_emulator, pytest.mark.usefixtures("on_metal", "no_canaries")]

CASES = {
    "plain": Case(contexts=(100, 33, 17, 1)),
    "rows": Case(contexts=(100, 33, 17), rows=(3, 8, 1)),
    "chunks": Case(contexts=(60, 33), rows=(8, 5), group=8),
    "window": Case(window=20, dropped=True),
    "rows of a window": Case(contexts=(100, 33, 17), rows=(3, 8, 1), window=20),
    "sinks": Case(sinks=True),
    "split": Case(splits=4, sinks=True),
    "softcap": Case(softcap=2.0),
    "view": Case(view=True),
    "int8": Case(packing=(8, 32)),
    "int4": Case(packing=(4, 32)),
    "halves": Case(packing=(4, 32), dim=96),  # (a lane reads half a word at once)
    "int8 view": Case(packing=(8, 32), view=True),
    "low": Case(lift=-300.0, contexts=(100, 33), rows=(1, 2)),
    "low, split": Case(
        lift=-300.0, contexts=(100, 33), rows=(1, 2), splits=2, sinks=True
    ),
    "rising": Case(rise=100.0, contexts=(100, 33), rows=(3, 8)),
    "far sinks": Case(sinks=True, sink=200.0, contexts=(40, 9), rows=(1, 2)),
    "far sinks, split": Case(
        sinks=True, sink=200.0, contexts=(40, 9), rows=(1, 2), splits=2
    ),
    "dense": Case(packing=(8, 32), contexts=(40, 40), rows=(3, 3)),
    "dense view": Case(packing=(8, 32), contexts=(40, 40), rows=(3, 3), view=True),
    "dense, split": Case(
        packing=(8, 32), contexts=(40, 40), rows=(3, 3), splits=2, sinks=True
    ),
}
WRONG = "wrong numbers"
RACE, UNSET, OUTSIDE = "race", "uninitialised-read", "out-of-bounds"
NAN = "fast-math-nonfinite"


class Mistake(NamedTuple):
    """In a file, `text`, which is there `times`, becomes `other`.

    case: the problem in which it is found; found: how.
    """

    case: str
    text: str
    other: str
    found: str = WRONG
    times: int = 1


BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
HEAD = "const int head = kv_head * group + (begin + n) % group;"
SCALES = "[piece * PIECE / GROUP]"

ATTEND = {
    "half a word for the other": Mistake(
        "halves", "halves[piece]", "halves[piece ^ 1]"
    ),
    "the bias forgotten": Mistake("int8", "float>(code) + bias", "float>(code)"),
    "the scale of the next group": Mistake(
        "int4", f"scales{SCALES}", f"scales{SCALES[:-1]} ^ 1]"
    ),
    "the bias of the next group": Mistake(
        "int8", f"biases{SCALES}", f"biases{SCALES[:-1]} ^ 1]"
    ),
    "the first code highest": Mistake(
        "int8", "codes >> (BITS * i)", "codes >> (BITS * (PIECE - 1 - i))"
    ),
    "words dealt in blocks": Mistake(
        "halves", "piece = w * LANES + lane", "piece = lane * (E / PIECE) + w"
    ),
    "not all lanes' products": Mistake(
        "plain", "step > 0; step /= 2", "step > 1; step /= 2"
    ),
    "a key that is not seen weighs": Mistake(
        "rows", "seen ? fast::exp(score - higher) : 0.0f", "fast::exp(score - higher)"
    ),
    "the cap is not multiplied": Mistake(
        "softcap", "softcap * precise::tanh", "precise::tanh"
    ),
    "older weights do not fade": Mistake(
        "plain", "total * fade + weight;", "total + weight;"
    ),
    "older values do not fade": Mistake(
        "plain", "out[i] * fade + weight", "out[i] + weight"
    ),
    "sums in half precision": Mistake(
        "plain",
        "out[i] = out[i] * fade + weight * value[i];",
        "out[i] = float(half(out[i] * fade + weight * value[i]));",
    ),
    "an unseen score is among the largest": Mistake(
        "rising", "score = seen ? score : top;", ""
    ),
    "a lane group's keys lost": Mistake(
        "plain", "step = LANES; step", "step = 2 * LANES; step"
    ),
    "lane groups joined by the wrong weight": Mistake(
        "plain", "other_out * other_fade", "other_out * fade"
    ),
}

CACHED = {
    "no barrier before the sum": Mistake(
        "plain", f"{BARRIER}  float all", "  float all", RACE
    ),
    "no barrier before the next query": Mistake(
        "plain", f"#endif\n{BARRIER}", "#endif\n", RACE
    ),
    "barriers of a SIMD group": Mistake(
        "plain", "threadgroup_barrier(", "simdgroup_barrier(", RACE, times=2
    ),
    "barriers of device memory": Mistake(
        "plain", "mem_flags::mem_threadgroup", "mem_flags::mem_device", RACE, times=2
    ),
    "one SIMD group's largest scores": Mistake(
        "plain",
        "    tops[simd * Q + n] = top[n];",
        "    if (simd == 0) tops[n] = top[n];",
        UNSET,
    ),
    "largest scores begin at -inf": Mistake(
        "plain", "top[n] = Limits<float>::finite_min", "top[n] = -INFINITY", NAN
    ),
    "largest scores begin at 0": Mistake(
        "low", "top[n] = Limits<float>::finite_min", "top[n] = 0.0f"
    ),
    "the largest of SIMD groups begins at 0": Mistake(
        "low", "all_top = Limits<float>::finite_min", "all_top = 0.0f"
    ),
    "the sink is the largest score": Mistake(
        "far sinks", "higher = max(all_top, sinks[head])", "higher = sinks[head]"
    ),
    "the next page": Mistake(
        "plain", "t / PAGE - dropped", "(t + 1) / PAGE - dropped", NAN
    ),
    "the same page for all": Mistake(
        "plain", "t / PAGE - dropped", "0 * (t / PAGE - dropped)"
    ),
    "the table's next row": Mistake(
        "plain", "table[sequence *", "table[(sequence ^ 1) *", OUTSIDE
    ),
    "a smaller page": Mistake(
        "plain", "size_t(page) * PAGE +", "size_t(page) * (PAGE - 1) +", NAN
    ),
    "the stride of heads for slots": Mistake(
        "plain", "slot * pages_strides[1]", "slot * pages_strides[0]", OUTSIDE
    ),
    "the stride of slots for heads": Mistake(
        "plain",
        "kv_head * pages_strides[0] + slot",
        "kv_head * pages_strides[1] + slot",
        NAN,
    ),
    "q's rows without gaps": Mistake(
        "view", "row) * q_strides[0]", "row) * (heads * D)", NAN
    ),
    "rows of the table without gaps": Mistake(
        "view", "sequence * table_strides[0]", "sequence * table_shape[1]", OUTSIDE
    ),
    "rows of the sequences without gaps": Mistake(
        "view", "sequence * sequences_strides[0]", "sequence * 4", RACE
    ),
    "pages' slots without gaps": Mistake(
        "view", "slot * pages_strides[1]", "slot * D", NAN
    ),
    "pages' heads without gaps": Mistake(
        "view",
        "kv_head * pages_strides[0] + slot",
        "kv_head * (pages_shape[1] * pages_strides[1]) + slot",
        NAN,
    ),
    "biases' slots by the scales' stride": Mistake(
        "int8 view",
        "slot * biases_strides[1]",
        "slot * scales_strides[1]",
        NAN,
        times=2,
    ),
    "biases' heads by the scales' stride": Mistake(
        "int8 view",
        "value_head * biases_strides[0]",
        "value_head * scales_strides[0]",
    ),
    "scales by the words' stride": Mistake(
        "int4", "slot * scales_strides[1]", "slot * words_strides[1]", OUTSIDE, times=2
    ),
    "a window too short": Mistake(
        "window", "oldest_row - window + 1", "oldest_row - window + 2"
    ),
    "a window too long": Mistake(
        "window", "oldest_row - window + 1", "oldest_row - window", OUTSIDE
    ),
    "later rows see a key too many": Mistake(
        "rows of a window", "t > position - window", "t >= position - window"
    ),
    "later rows see the oldest row's window": Mistake(
        "rows of a window", "(window <= 0 || t > position - window)", "true"
    ),
    "without the newest key": Mistake("plain", "each, newest + 1)", "each, newest)"),
    "the tail unmasked": Mistake("plain", "seen = mine < stop && n", "seen = n"),
    "new rows see each other": Mistake("rows", "t <= position &&", "true &&"),
    "no sinks": Mistake("sinks", "#if SINKS && !SPLIT", "#if 0"),
    "a sink for a KV head": Mistake("sinks", "sinks[head]", "sinks[kv_head]", times=2),
    "sinks twice": Mistake(
        "sinks", "+ fast::exp(sinks[head]", "+ 2.0f * fast::exp(sinks[head]"
    ),
    "query heads dealt in turn": Mistake(
        "plain",
        HEAD,
        "const int head = (begin + n) % group * kv_heads + kv_head;",
        times=2,
    ),
    "values from the keys": Mistake(
        "plain", "keys + kv_heads * pages_strides[0]", "keys"
    ),
    "packed values from the keys": Mistake(
        "int8", "value_head = kv_heads + kv_head", "value_head = kv_head"
    ),
    "pages given back are counted": Mistake(
        "window", "t / PAGE - dropped", "t / PAGE + 0 * dropped", OUTSIDE
    ),
    "a split skips a key": Mistake(
        "split", "(newest + splits - from)", "(newest + 1 - from)"
    ),
    "splits overlap": Mistake(
        "split", "from + split * each", "from + split * (each - 1)"
    ),
    "SIMD groups overlap": Mistake("plain", "base += SIMDS * KEYS", "base += KEYS"),
    "SIMD groups leave gaps": Mistake(
        "plain", "start + simd * KEYS", "start + simd * 2 * KEYS"
    ),
    "rows of a later chunk are the first's": Mistake(
        "chunks", "row = (begin + n) / group", "row = n / group", RACE, times=2
    ),
    "positions of a later chunk are the first's": Mistake(
        "chunks",
        "position = context - rows + (begin + n)",
        "position = context - rows + n",
    ),
    "a chunk ends with its first row": Mistake(
        "chunks", "(begin + count - 1) / group", "begin / group"
    ),
    "rows before heads in the output": Mistake(
        "dense", "* heads + head) * rows + row", "* rows + row) * heads + head"
    ),
    "scales by the words' stride, dense": Mistake(
        "dense", "t * k_scales_strides[2]", "t * k_words_strides[2]", OUTSIDE
    ),
    **{
        f"{one} by the stride of {other}, axis {axis}": Mistake(
            "dense view",
            f"* {one}_strides[{axis}]",
            f"* {other}_strides[{axis}]",
            found,
        )
        for one, other, axis, found in (
            ("k_biases", "k_scales", 0, NAN),
            ("k_biases", "k_scales", 1, NAN),
            ("k_biases", "k_scales", 2, NAN),
            ("v_biases", "v_scales", 2, WRONG),
            ("v_words", "k_words", 1, WRONG),
            ("v_scales", "k_scales", 2, WRONG),
        )
    },
    "the first request's cache": Mistake("dense", "sequence * v_words_strides[0]", "0"),
    "parts of one split only": Mistake(
        "split", "parts[(at * splits + split) * D", "parts[(at * splits) * D", RACE
    ),
}

MERGE = {
    "sums of weights do not fade": Mistake("split", "total += fade *", "total +="),
    "values do not fade": Mistake("split", "sum += fade *", "sum +="),
    "a split lost": Mistake(
        "split", "int s = 0; s < splits", "int s = 1; s < splits", times=2
    ),
    "no sinks in the merge": Mistake("split", "#if SINKS", "#if 0"),
    "the largest of splits begins at 0": Mistake(
        "low, split", "top = Limits<float>::finite_min", "top = 0.0f"
    ),
    "the sink is the largest score in the merge": Mistake(
        "far sinks, split", "top = max(top, sink)", "top = sink"
    ),
    "sinks twice in the merge": Mistake(
        "split", "total = fast::exp", "total = 2.0f * fast::exp"
    ),
    "sinks without their rows": Mistake(
        "dense, split", "at / heads[1] % heads[0]", "at % heads[0]"
    ),
}

PACK = {
    "v by the strides of k": Mistake("packed", "* v_strides[", "* k_strides[", times=2),
    "groups of no step": Mistake(
        "packed", "scale = steps == 0.0f ? scale : edge / steps", "scale = edge / steps"
    ),
    "values packed from keys": Mistake(
        "packed", "v[row * v_strides", "k[row * k_strides", OUTSIDE
    ),
    "the smallest of a lane": Mistake("packed", "least = simd_min(least);", ""),
    "codes cut off, not rounded": Mistake(
        "packed", "min(round((x[i] - bias) / scale)", "min(((x[i] - bias) / scale)"
    ),
    "neighbours' codes over each other": Mistake(
        "packed", "<< (BITS * PER * step)", "<< (BITS * step)"
    ),
    "scales of one group only": Mistake(
        "packed", "scales[at * (D / GROUP) + piece]", "scales[at * (D / GROUP)]", RACE
    ),
    "heads after rows": Mistake(
        "packed", "size_t(head) * rows + row", "size_t(row) * 2 * kv_heads + head"
    ),
}

ROWS = {
    "v's rows by the stride of k": Mistake(
        "laid out", "row * v_strides", "row * k_strides"
    ),
    "v's heads by the stride of k": Mistake(
        "laid out", "kv_heads) * v_strides", "kv_heads) * k_strides"
    ),
    "values from the keys": Mistake("laid out", "= v[row", "= k[row", OUTSIDE),
    "heads after rows": Mistake(
        "laid out",
        "size_t(head) * k_shape[0] + row",
        "size_t(row) * 2 * kv_heads + head",
    ),
}

FILES = {
    "attend.h": ATTEND,
    "cached_attention.metal": CACHED,
    "merge_splits.metal": MERGE,
    "quantize_kv.metal": PACK,
    "kv_rows.metal": ROWS,
}


def text_of(file):
    return (files("tiny_llm.kernels") / file).read_text(encoding="utf-8")


def new_rows():
    """k and v [5, 3, 1, 128]; the second head's steps are too small for codes.

    v lies between NaN: its strides are not those of k.
    """
    random = np.random.default_rng(0)
    rows = random.standard_normal((2, 5, 3, 1, 128)).astype(np.float32)
    rows[:, :, 1] *= 1e-8
    wide = np.full((5, 4, 1, 130), np.nan, np.float32)
    wide[:, 1:, :, 1:-1] = rows[1]
    return mx.array(rows[0]), mx.array(wide)[:, 1:, :, 1:-1]


def outcome_of(case):
    """What the checker or the comparison finds: "" if nothing is wrong."""
    try:
        if case in ("packed", "laid out"):
            k, v = new_rows()
            rows = mx.concatenate([k, v], axis=1).squeeze(2).swapaxes(0, 1)
            if case == "laid out":
                return "" if mx.array_equal(kernels.kv_rows(k, v), rows) else WRONG
            packed = kernels.quantize_kv(k, v, 64, 4)
            expected = kernels.quantize_rows(rows, 64, 4)
            pairs = zip(packed, expected, strict=True)
            return "" if all(mx.array_equal(a, b) for a, b in pairs) else WRONG
        problem = dense(CASES[case]) if "dense" in case else paged(CASES[case])
        error = largest_error(problem, problem.attend())
    except CheckFailed as failed:
        return str(failed)
    if error <= TOLERANCE["float32"]:
        return ""
    assert not error <= 10 * TOLERANCE["float32"]  # (or NaN) else it's hard to see
    return WRONG


@pytest.mark.parametrize("case", [*CASES, "packed", "laid out"])
def test_without_a_mistake_nothing_is_found(case):
    assert outcome_of(case) == ""


@pytest.mark.parametrize(
    ("file", "name"), [(file, name) for file in FILES for name in FILES[file]]
)
def test_mistake(file, name, monkeypatch):
    mistake = FILES[file][name]
    good = text_of(file)
    assert good.count(mistake.text) == mistake.times
    bad = good.replace(mistake.text, mistake.other)
    built = []

    def build(name, input_names, output_names, source, header="", **options):
        built.append(good in source or good in header)
        return metal_emulator.metal_kernel(
            name,
            input_names,
            output_names,
            source.replace(good, bad),
            header.replace(good, bad),
            **options,
        )

    monkeypatch.setattr(mx.fast, "metal_kernel", build)
    found = outcome_of(mistake.case)
    assert any(built)
    kinds = {line.split(":")[0] for line in found.splitlines()}
    assert mistake.found in kinds, found or "nothing was found"
