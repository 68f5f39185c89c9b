"""Small kernels: what is accepted, what is reported and what is refused."""

import mlx.core as mx
import numpy as np
import pytest
from emulator_tools import needs_emulator
from metal_emulator import CompileError, Kernel, Result

pytestmark = needs_emulator

IDS = "uint i = thread_position_in_grid.x; uint l = thread_index_in_threadgroup; "
SHARE = IDS + "threadgroup float s[64]; s[l] = inp[i]; "
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup); "
LOOP = "threadgroup float s[64]; float a = 0; for (int j = 0; j < 3; ++j) { "

ACCEPTED = {
    "lanes share, simdgroup_barrier": SHARE
    + "simdgroup_barrier(mem_flags::mem_threadgroup); out[i] = s[l ^ 1];",
    "loop with two barriers": IDS
    + f"{LOOP}s[l] = inp[i] * j; {BARRIER}a += s[63 - l]; {BARRIER}}} out[i] = a;",
    "float4(half4)": IDS + "half4 h = half4(1.0h); float4 f = float4(h); out[i] = f.x;",
    "vec<T, N>(...)": IDS + "out[i] = (vec<float, 2>(1.0f, 2.0f)).y;",
    "Limits and ceildiv": IDS
    + "out[i] = Limits<float>::max + ceildiv(int(i), 2) + Limits<int>::finite_min;",
    "bool and uint reductions": IDS
    + "out[i] = float(simd_any(l == 3)) + float(simd_or(1u << (l % 32)));",
    "ballot": IDS + "out[i] = float(popcount(uint(ulong(simd_ballot(l % 2 == 0)))));",
}

REPORTED = {
    "lanes share, no barrier": (SHARE + "out[i] = s[l ^ 1];", "race"),
    "simd_sum is no barrier": (
        SHARE + "float z = simd_sum(inp[i]); out[i] = s[l ^ 1] + z;",
        "race",
    ),
    "write after read": (
        IDS + f"{LOOP}s[l] = inp[i] * j; {BARRIER}a += s[63 - l]; }} out[i] = a;",
        "race",
    ),
    "SIMD function in half the lanes": (
        IDS + f"float a = inp[i]; if (l % 32 < 16) a = simd_sum(a); {BARRIER}"
        "out[i] = a;",
        "simd-divergence",
    ),
    "shuffle from a lane that returned": (
        IDS + "if (l == 5) return; out[i] = simd_shuffle(inp[i], 5);",
        "inactive-lane",
    ),
    "output read before written": (IDS + "out[i] += inp[i];", "uninitialised-read"),
    "other groups write the same": (IDS + "out[l % 32] = inp[i];", "race"),
    "index past a threadgroup array": (
        SHARE + BARRIER + "out[i] = s[l + inp_shape[0]];",
        "array-index",
    ),
    "read past a threadgroup array": (
        SHARE + BARRIER + "threadgroup float* p = s; out[i] = p[l + inp_shape[0]];",
        "out-of-bounds",
    ),
    "read before a threadgroup array": (
        SHARE + BARRIER + "threadgroup float* p = s; out[i] = p[int(l) - 3];",
        "out-of-bounds",
    ),
    "pointer past a local array": (
        IDS + "float a[4] = {1, 2, 3, 4}; thread float* p = a; "
        "out[i] = p[int(inp[i]) % 8];",
        "out-of-bounds",
    ),
    "variables larger than the stack": (
        IDS + "float a[50000]; for (int j = 0; j < 50000; ++j) a[j] = inp[j % 64]; "
        "out[i] = a[uint(inp[i])];",
        "stack-overflow",
    ),
    "signed overflow": (IDS + "int z = int(i) * 100000000; out[i] = z;", "signed-"),
    "float to char out of range": (
        IDS + "int8_t z = int8_t(inp[i] * 10.0f); out[i] = z;",
        "float-cast-overflow",
    ),
    "misaligned vector": (
        IDS + "float4 f = *(const device float4*)(inp + i % 8); out[i] = f.x;",
        "misaligned",
    ),
    "barrier in a divergent loop": (
        IDS + f"for (uint j = 0; j < l; ++j) {BARRIER} out[i] = 1;",
        "barrier-divergence",
    ),
}

# name: (body, header, part of the message)
REFUSED = {
    "cast between address spaces": (
        "threadgroup float* p = (threadgroup float*)inp; out[0] = p[0];",
        "",
        "error",
    ),
    "half4 to float4": (
        "half4 h = half4(1.0h); float4 f = h; out[0] = f.x;",
        "",
        "error",
    ),
    "global without constant": (
        "out[0] = K;",
        "constexpr float K = 2.0f;\n",
        "must reside in constant address space",
    ),
    "array at program scope": (
        "out[0] = 1;",
        "int table[4];\n",
        "must reside in constant",
    ),
    "static member": (
        "out[0] = S::n;",
        "struct S { static constexpr int n = 3; };\n",
        "error",
    ),
    "static local": ("static int c = 0; out[0] = c;", "", "error"),
    "simd_sum(long)": ("long z = simd_sum(1l); out[0] = z;", "", "no simd_sum for 64"),
    "max(half, float)": ("half h = 1.0h; out[0] = max(h, inp[0]);", "", "ambiguous"),
    "max(uint, int)": ("out[0] = max(1u, 3);", "", "ambiguous"),
    "variable-length array": (
        "float z[inp_shape[0]]; z[0] = 1; out[0] = z[0];",
        "",
        "error",
    ),
    "device variable": ("device float z; out[0] = 1;", "", "error"),
    "threadgroup initialiser": (
        "threadgroup float z[2] = {0, 0}; out[0] = z[0];",
        "",
        "error",
    ),
    "threadgroup variable in a helper": (
        "out[0] = f(inp[0]);",
        "inline float f(float x) { threadgroup float t[4]; t[0] = x; return t[0]; }\n",
        "error",
    ),
    "uninitialised local": (
        "float a; if (inp[0] > 3) a = 1; out[0] = a;",
        "",
        "uninitialized",
    ),
    "helper pointer without address space": (
        "out[0] = 1;",
        "inline float get(const float* p) { return p[0]; }\n",
        "get: 'p' is a pointer",
    ),
    "member pointer without address space": (
        "out[0] = 1;",
        "struct S { float* p; };\n",
        "'p' is a pointer",
    ),
    "template pointer without address space": (
        SHARE + BARRIER + "out[i] = get(s, l);",
        "template <typename T> inline T get(T* p, uint i) { return p[i]; }\n",
        "get: 'p' is a pointer",
    ),
    "implicit bfloat": (
        "bfloat b = inp[0]; out[0] = float(b);",
        "",
        "loses floating-point precision",
    ),
    "atomic max of float": (
        "threadgroup atomic<float> a; "
        "atomic_fetch_max_explicit(&a, 1.0f, memory_order_relaxed); out[0] = 1;",
        "",
        "MSL float atomics",
    ),
}


def run(source: str, header: str = "") -> Result:
    kernel = Kernel("small", ["inp"], ["out"], source, header)
    x = np.arange(64, dtype=np.float32)
    return kernel.run([x], [(64,)], [mx.float32], (64, 1, 1), (64, 1, 1))


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    assert not run(ACCEPTED[name]).reports


@pytest.mark.parametrize("name", REPORTED)
def test_reported(name: str) -> None:
    source, expected = REPORTED[name]
    result = run(source)
    assert any(kind.startswith(expected) for kind in result.kinds), result.reports


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, header, message = REFUSED[name]
    with pytest.raises(CompileError) as error:
        run(body, header)
    assert message in str(error.value)


HEADER = """
constant constexpr float lut[4] = {1.0f, 2.0f, 3.0f, 4.0f};
struct Softmax {
    float m;
    float l;
    void add(float s) {
        float n = max(m, s);
        l = l * fast::exp(m - n) + fast::exp(s - n);
        m = n;
    }
};
namespace scale {
constant float one = 1.0f;
}
template <typename T>
inline float dot4(const device T* p, const threadgroup float4* w, int i) {
    const float4 x = float4(*(const device vec<T, 4>*)(p + i * 4));
    return dot(x, w[i]) * scale::one;
}
"""
BODY = """
    threadgroup float4 w[32];
    uint lid = thread_index_in_threadgroup;
    w[lid] = float4(lut[lid % 4]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float s = dot4<T>(a, w, lid);
    char4 c = *(const device char4*)(b + lid * 4);
    float4 f = float4(c) * 0.5f;
    half4 h = half4(f);
    f += float4(h.xyzw);
    s += f.x + f.y + f.z + f.w + float(as_type<half2>(uint(0x3c003c00)).x);
    Softmax acc{Limits<float>::finite_min, 0.0f};
    acc.add(s);
    acc.add(1.0f);
    out[lid] = simd_broadcast(simd_max(s), 0) + simd_shuffle_xor(s, ushort(1))
        + simd_prefix_inclusive_sum(s) + clamp(s, 0.0f, 1.0f) + acc.l;
"""


def test_header_vectors_and_simd_functions() -> None:
    random = np.random.default_rng(0)
    a = random.standard_normal(128).astype(np.float16)
    b = random.integers(-127, 128, 128).astype(np.int8)
    kernel = Kernel("mixed", ["a", "b"], ["out"], BODY, HEADER)
    template = [("T", mx.float16)]
    grid = ((32, 1, 1), (32, 1, 1))
    result = kernel.run([a, b], [(32,)], [mx.float32], *grid, template)
    assert not result.reports
    weights = (np.arange(32) % 4 + 1)[:, None]
    s = (a.astype(float).reshape(32, 4) * weights).sum(1)
    s += b.astype(float).reshape(32, 4).sum(1) + 1
    top = np.maximum(s, 1)
    expected = s.max() + s.reshape(-1, 2)[:, ::-1].ravel() + np.cumsum(s)
    expected += np.clip(s, 0, 1) + np.exp(s - top) + np.exp(1 - top)
    np.testing.assert_allclose(result.outputs[0], expected, rtol=1e-4, atol=1e-3)
