"""Kernels for the emulator's own tests, and the paged problems that they solve."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from metal_emulator import DEFAULT_ORDERS, Kernel, Result

EXP = """
    const uint i = thread_position_in_grid.x;
    if (i < uint(inp_shape[0])) {
        const T x = T(inp[i]);
        out[i] = exp(x);
    }
"""

# Paged-attention decode. queries [B, Hq, D]; key_pages, value_pages
# [pages, PAGE, Hkv, D]; block_table [B, max pages]; context_lens [B]; scale scalar.
# One threadgroup of SIMDS SIMD groups for each (query head, sequence); the SIMD
# groups take turns on the positions and merge their softmax states at the end.
PAGED = """
    constexpr int PER_LANE = D / 32;
    const int head = threadgroup_position_in_grid.y;
    const int seq = threadgroup_position_in_grid.z;
    const int lane = thread_index_in_simdgroup;
    const int simd = simdgroup_index_in_threadgroup;
    const int q_heads = queries_shape[1];
    const int kv_heads = key_pages_shape[2];
    const int kv_head = head / (q_heads / kv_heads);
    const int context = context_lens[seq];
    const device int* table = block_table + seq * block_table_shape[1];
    const size_t page_stride = size_t(PAGE) * kv_heads * D;

    threadgroup float shared_max[SIMDS];
    threadgroup float shared_sum[SIMDS];
    threadgroup float shared_out[SIMDS * D];

    float query[PER_LANE];
    float acc[PER_LANE];
    const device T* q = queries + (size_t(seq) * q_heads + head) * D + lane * PER_LANE;
    for (int i = 0; i < PER_LANE; ++i) {
        query[i] = float(q[i]) * scale;
        acc[i] = 0.0f;
    }
    float row_max = Limits<float>::finite_min;
    float row_sum = 0.0f;
    for (int t = simd; t < context; t += SIMDS) {
        const int page = table[t / PAGE];
        const size_t token = size_t(t % PAGE) * kv_heads + kv_head;
        const size_t row = size_t(page) * page_stride + token * D + lane * PER_LANE;
        float score = 0.0f;
        for (int i = 0; i < PER_LANE; ++i) score += query[i] * KEY;
        score = simd_sum(score);
        const float new_max = max(row_max, score);
        const float rescale = fast::exp(row_max - new_max);
        const float weight = fast::exp(score - new_max);
        row_sum = row_sum * rescale + weight;
        for (int i = 0; i < PER_LANE; ++i) acc[i] = acc[i] * rescale + weight * VALUE;
        row_max = new_max;
    }
    if (lane == 0) {
        shared_max[simd] = row_max;
        shared_sum[simd] = row_sum;
    }
    for (int i = 0; i < PER_LANE; ++i) {
        shared_out[simd * D + lane * PER_LANE + i] = acc[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float all_max = Limits<float>::finite_min;
    for (int j = 0; j < SIMDS; ++j) all_max = max(all_max, shared_max[j]);
    float all_sum = 0.0f;
    for (int j = 0; j < SIMDS; ++j) {
        const float rescale = fast::exp(shared_max[j] - all_max);
        all_sum += shared_sum[j] > 0.0f ? shared_sum[j] * rescale : 0.0f;
    }
    for (int d = thread_index_in_threadgroup; d < D; d += 32 * SIMDS) {
        float sum = 0.0f;
        for (int j = 0; j < SIMDS; ++j) {
            const float rescale = fast::exp(shared_max[j] - all_max);
            sum += shared_sum[j] > 0.0f ? shared_out[j * D + d] * rescale : 0.0f;
        }
        const float mean = all_sum > 0.0f ? sum / all_sum : 0.0f;
        out[(size_t(seq) * q_heads + head) * D + d] = T(mean);
    }
"""
PAGED_FLOAT = PAGED.replace("KEY", "float(key_pages[row + i])").replace(
    "VALUE", "float(value_pages[row + i])"
)
# int8 cache with one float scale for each token and head [pages, PAGE, Hkv].
PAGED_INT8 = (
    PAGED.replace("KEY", "(float(key_pages[row + i]) * key_scale)")
    .replace("VALUE", "(float(value_pages[row + i]) * value_scale)")
    .replace(
        "        float score = 0.0f;\n",
        "        const size_t at = size_t(page) * PAGE * kv_heads + token;\n"
        "        const float key_scale = key_scales[at];\n"
        "        const float value_scale = value_scales[at];\n"
        "        float score = 0.0f;\n",
    )
)

# The same, with one threadgroup for each (KV head, sequence): a SIMD group keeps the
# state of all GROUP query heads, so that it loads each key and value once.
PAGED_GROUPED = """
    constexpr int PER_LANE = D / 32;
    const int kv_head = threadgroup_position_in_grid.y;
    const int seq = threadgroup_position_in_grid.z;
    const int lane = thread_index_in_simdgroup;
    const int q_heads = queries_shape[1];
    const int kv_heads = key_pages_shape[2];
    const int context = context_lens[seq];
    const device int* table = block_table + seq * block_table_shape[1];
    const size_t page_stride = size_t(PAGE) * kv_heads * D;
    const int q_head = kv_head * GROUP;
    const size_t first = (size_t(seq) * q_heads + q_head) * D + lane * PER_LANE;

    float query[GROUP][PER_LANE];
    float acc[GROUP][PER_LANE];
    float row_max[GROUP];
    float row_sum[GROUP];
    for (int g = 0; g < GROUP; ++g) {
        row_max[g] = Limits<float>::finite_min;
        row_sum[g] = 0.0f;
        for (int i = 0; i < PER_LANE; ++i) {
            query[g][i] = float(queries[first + g * D + i]) * scale;
            acc[g][i] = 0.0f;
        }
    }
    for (int t = 0; t < context; ++t) {
        const int page = table[t / PAGE];
        const size_t token = size_t(t % PAGE) * kv_heads + kv_head;
        const size_t row = size_t(page) * page_stride + token * D + lane * PER_LANE;
        float key[PER_LANE];
        float value[PER_LANE];
        for (int i = 0; i < PER_LANE; ++i) {
            key[i] = float(key_pages[row + i]);
            value[i] = float(value_pages[row + i]);
        }
        for (int g = 0; g < GROUP; ++g) {
            float score = 0.0f;
            for (int i = 0; i < PER_LANE; ++i) score += query[g][i] * key[i];
            score = simd_sum(score);
            const float new_max = max(row_max[g], score);
            const float rescale = fast::exp(row_max[g] - new_max);
            const float weight = fast::exp(score - new_max);
            row_sum[g] = row_sum[g] * rescale + weight;
            for (int i = 0; i < PER_LANE; ++i) {
                acc[g][i] = acc[g][i] * rescale + weight * value[i];
            }
            row_max[g] = new_max;
        }
    }
    for (int g = 0; g < GROUP; ++g) {
        for (int i = 0; i < PER_LANE; ++i) {
            const float mean = row_sum[g] > 0.0f ? acc[g][i] / row_sum[g] : 0.0f;
            out[first + g * D + i] = T(mean);
        }
    }
"""

# out[M, N] = a[M, K] b[K, N] in half, through threadgroup tiles; one SIMD group for
# each 8x8 tile.
MATMUL = """
    threadgroup half tile_a[64];
    threadgroup half tile_b[64];
    const uint lane = thread_index_in_simdgroup;
    const int r = threadgroup_position_in_grid.y * 8;
    const int c = threadgroup_position_in_grid.x * 8;
    const int K = a_shape[1];
    const int N = b_shape[1];
    simdgroup_matrix<float, 8, 8> acc = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int k = 0; k < K; k += 8) {
        for (uint e = lane; e < 64; e += 32) {
            tile_a[e] = a[(r + e / 8) * K + k + e % 8];
            tile_b[e] = b[(k + e / 8) * N + c + e % 8];
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_matrix<half, 8, 8> A, B, I(1.0h);
        simdgroup_load(A, tile_a, 8);
        simdgroup_load(B, tile_b, 8);
        simdgroup_multiply(B, B, I);
        simdgroup_multiply_accumulate(acc, A, B, acc);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    simdgroup_store(acc, out + r * N + c, N);
"""

PAGE = 16
RAGGED = (1, 16, 17, 100, 257)


@dataclass
class Problem:
    """One decode step. What no sequence uses is NaN (int8: in the scales)."""

    head_dim: int = 64
    dtype: type = np.float32
    int8: bool = False
    lens: tuple[int, ...] = RAGGED
    q_heads: int = 8
    kv_heads: int = 2
    queries: np.ndarray = field(init=False)
    pages: dict[str, np.ndarray] = field(init=False)
    table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(0)
        shape = (len(self.lens), self.q_heads, self.head_dim)
        self.queries = random.standard_normal(shape).astype(self.dtype)
        used = [-(-n // PAGE) for n in self.lens]
        count = sum(used) + 3
        free = list(random.permutation(count))
        self.table = np.full((len(self.lens), max(used)), -1, np.int32)
        live = np.zeros((count, PAGE), bool)
        for seq, (n, pages) in enumerate(zip(self.lens, used, strict=True)):
            self.table[seq, :pages] = [free.pop() for _ in range(pages)]
            for t in range(n):
                live[self.table[seq, t // PAGE], t % PAGE] = True
        self.pages = self._make_pages(random, live)

    def _make_pages(
        self, random: np.random.Generator, live: np.ndarray
    ) -> dict[str, np.ndarray]:
        shape = (*live.shape, self.kv_heads, self.head_dim)
        pages: dict[str, np.ndarray] = {}
        for name in ("key", "value"):
            if self.int8:
                pages[f"{name}_pages"] = random.integers(-127, 128, shape, np.int8)
                scales = random.uniform(0.005, 0.02, shape[:3]).astype(np.float32)
                pages[f"{name}_scales"] = scales
                scales[~live] = np.nan
            else:
                rows = random.standard_normal(shape).astype(self.dtype)
                pages[f"{name}_pages"] = rows
                rows[~live] = np.nan
        return pages

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def minimum_bytes(self) -> int:
        """The bytes of keys (as many again of values) in the live contexts."""
        item = self.pages["key_pages"].itemsize
        return sum(self.lens) * self.kv_heads * self.head_dim * item

    def inputs(self) -> dict[str, np.ndarray | mx.array]:
        return {
            "queries": self.queries,
            **self.pages,
            "block_table": self.table,
            "context_lens": np.array(self.lens, np.int32),
            "scale": mx.array(self.scale, mx.float32),
        }

    def _rows(self, name: str, seq: int) -> np.ndarray:
        n = self.lens[seq]
        pages = self.table[seq, : -(-n // PAGE)]
        rows = self.pages[f"{name}_pages"][pages].astype(np.float64)
        if self.int8:
            rows *= self.pages[f"{name}_scales"][pages][..., None]
        return rows.reshape(-1, self.kv_heads, self.head_dim)[:n]

    def reference(self) -> np.ndarray:
        out = np.zeros(self.queries.shape)
        group = self.q_heads // self.kv_heads
        for seq in range(len(self.lens)):
            keys, values = self._rows("key", seq), self._rows("value", seq)
            for head in range(self.q_heads):
                scores = keys[:, head // group] @ self.queries[seq, head] * self.scale
                weights = np.exp(scores - scores.max())
                out[seq, head] = weights @ values[:, head // group] / weights.sum()
        return out

    def error(self, result: Result) -> float:
        """The greatest error; infinite for a NaN or a missing output."""
        output = result.outputs[0]
        if output is None or np.isnan(output).any():
            return float("inf")
        return float(np.abs(output - self.reference()).max())


def run_paged(
    problem: Problem,
    source: str,
    simds: int = 4,
    mode: str = "check",
    orders: tuple = DEFAULT_ORDERS,
    grouped: bool = False,
) -> Result:
    inputs = problem.inputs()
    kernel = Kernel("paged", list(inputs), ["out"], source)
    dtype = mx.float16 if problem.dtype == np.float16 else mx.float32
    heads = problem.kv_heads if grouped else problem.q_heads
    template = [("T", dtype), ("D", problem.head_dim), ("PAGE", PAGE), ("SIMDS", simds)]
    if grouped:
        template[3] = ("GROUP", problem.q_heads // problem.kv_heads)
    return kernel.run(
        list(inputs.values()),
        output_shapes=[problem.queries.shape],
        output_dtypes=[dtype],
        grid=(32 * simds, heads, len(problem.lens)),
        threadgroup=(32 * simds, 1, 1),
        template=template,
        mode=mode,
        orders=orders,
    )
