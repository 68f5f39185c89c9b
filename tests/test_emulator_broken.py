"""The paged kernel with one mistake each: every mistake is found.

Most are found by the checker; a few show only in the numbers.
"""

import pytest
from emulator_sources import PAGED_FLOAT, Problem, run_paged
from emulator_tools import needs_emulator
from metal_emulator import CompileError

pytestmark = needs_emulator

BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
PAGE_INDEX = "const int page = table[t / PAGE];"
WRONG_NUMBERS = "wrong numbers"

# name: (text, replacement, expected kind of report)
MISTAKES = {
    "no barrier": (BARRIER, "", "race"),
    "no barrier (uninitialised)": (BARRIER, "", "uninitialised-read"),
    "mem_none": ("mem_flags::mem_threadgroup", "mem_flags::mem_none", "race"),
    "mem_device": ("mem_flags::mem_threadgroup", "mem_flags::mem_device", "race"),
    "simdgroup_barrier": ("threadgroup_barrier(mem", "simdgroup_barrier(mem", "race"),
    "barrier in a branch": (
        BARRIER,
        f"    if (simd != 1) {{ {BARRIER} }}\n",
        "barrier-divergence",
    ),
    "return before the barrier": (
        "    float query[PER_LANE];",
        "    if (simd >= context) return;\n    float query[PER_LANE];",
        "barrier-divergence",
    ),
    "simd_sum in a branch": (
        "score = simd_sum(score);",
        "score = lane < 16 ? simd_sum(score) : simd_sum(2 * score);",
        "simd-divergence",
    ),
    "table index off by one": ("t / PAGE]", "(t + 1) / PAGE]", "out-of-bounds"),
    "wild page": (PAGE_INDEX, PAGE_INDEX.replace(";", " + 1000;"), "out-of-bounds"),
    "negative page": (PAGE_INDEX, PAGE_INDEX.replace(";", " - 1000;"), "out-of-bounds"),
    "page off by one": (PAGE_INDEX, PAGE_INDEX.replace(";", " + 1;"), WRONG_NUMBERS),
    "loop to t <= context": ("t < context;", "t <= context;", WRONG_NUMBERS),
    "stride without heads": ("* kv_heads * D;", "* D;", WRONG_NUMBERS),
    "stride with query heads": (
        "size_t(PAGE) * kv_heads * D",
        "size_t(PAGE) * q_heads * D",
        "out-of-bounds",
    ),
    "query head for KV head": ("head / (q_heads / kv_heads)", "head", WRONG_NUMBERS),
    "small threadgroup array": (
        "shared_out[SIMDS * D]",
        "shared_out[SIMDS * D - 8]",
        "out-of-bounds",
    ),
    "local array overrun": (
        "i < PER_LANE; ++i) score +=",
        "i <= PER_LANE; ++i) score +=",
        "array-index",
    ),
    "threadgroup array not filled": (
        "        shared_sum[simd] = row_sum;\n",
        "",
        "uninitialised-read",
    ),
    "two SIMD groups write the output": (
        "int d = thread_index_in_threadgroup; d < D; d += 32 * SIMDS",
        "int d = lane; d < D; d += 32",
        "race",
    ),
    "output partly unwritten": (
        "d < D; d += 32",
        "d < D - 4; d += 32",
        "unwritten-output",
    ),
    "output not divided": ("sum / all_sum", "sum", WRONG_NUMBERS),
    "shuffle past the last lane": (
        "score = simd_sum(score);",
        "for (int k = 16; k > 0; k /= 2) score += simd_shuffle_down(score, k);",
        WRONG_NUMBERS,
    ),
    "-INFINITY into fast::exp": (
        "float row_max = Limits<float>::finite_min;",
        "float row_max = -INFINITY;",
        "fast-math-nonfinite",
    ),
}

# name: (text, replacement, part of the message)
COMPILE_ERRORS = {
    "pointer without address space": (
        "const device T* q",
        "const T* q",
        "pointer without address space",
    ),
    "wrong address space": (
        "const device T* q",
        "const threadgroup T* q",
        "cannot initialize a variable of type 'const __local",
    ),
    "double": ("float row_sum = 0.0f", "double row_sum = 0.0f", "no double in MSL"),
    "write to an input": (
        "    float row_sum",
        "    context_lens[0] = 1;\n    float row_sum",
        "read-only variable",
    ),
    "threadgroup array in a block": (
        "    if (lane == 0) {\n",
        "    if (lane == 0) {\n        threadgroup float z[4]; z[0] = row_max;\n",
        "outermost scope of a kernel",
    ),
    "std::": ("max(row_max, score)", "std::max(row_max, score)", "no C++ standard"),
    "max(float, int)": ("max(row_max, score)", "max(row_max, 0)", "'max' is ambiguous"),
    "too much threadgroup memory": (
        "shared_out[SIMDS * D]",
        "shared_out[SIMDS * D * 64]",
        "of at most 32768",
    ),
    "a small input is constant": (
        "    float row_sum",
        "    const device int* p = context_lens;\n    float row_sum",
        "const __constant int32_t *",
    ),
    "lambda": (
        "    float row_sum",
        "    auto f = [&](int i) { return i; };\n    float row_sum",
        "lambda",
    ),
    "local pointer without address space": (
        "    float row_sum",
        "    float* p = query;\n    p[0] += 0.0f;\n    float row_sum",
        "'p' is a pointer or reference with no address space",
    ),
}


def _with_mistake(text: str, replacement: str) -> str:
    assert text in PAGED_FLOAT
    return PAGED_FLOAT.replace(text, replacement)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str, problem: Problem) -> None:
    text, replacement, expected = MISTAKES[name]
    result = run_paged(problem, _with_mistake(text, replacement))
    if expected == WRONG_NUMBERS:
        assert problem.error(result) > 0.01
    else:
        assert expected in result.kinds, result.reports


@pytest.mark.parametrize("name", COMPILE_ERRORS)
def test_compile_error(name: str, problem: Problem) -> None:
    text, replacement, message = COMPILE_ERRORS[name]
    with pytest.raises(CompileError) as error:
        run_paged(problem, _with_mistake(text, replacement))
    assert message in str(error.value)


def test_report_names_the_line(problem: Problem) -> None:
    result = run_paged(problem, _with_mistake(BARRIER, ""))
    lines = _with_mistake(BARRIER, "").split("\n")
    use = next(i for i, line in enumerate(lines, 1) if "max(all_max" in line)
    report = next(r for r in result.reports if r.startswith("uninitialised-read"))
    assert report.startswith(f"uninitialised-read: body:{use}: group(0,0,0) thread")
    assert "shared_max byte" in report
