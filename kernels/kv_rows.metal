// New keys and values laid out as the pages of the cache hold them.
//
// Template: T: type of the numbers; D: head dimension.
// Inputs: k, v T [N, Hkv, 1, D], the last axis without gaps, the others with any strides.
// Output: rows T [2 Hkv, N, D]: the heads of the keys, then those of the values.
// Grid: (D, 2 Hkv, N) threads, any threadgroup.

const int d = thread_position_in_grid.x;
const int head = thread_position_in_grid.y;
const int row = thread_position_in_grid.z;
const int kv_heads = k_shape[1];
const size_t to = (size_t(head) * k_shape[0] + row) * D + d;
if (head < kv_heads) {
  rows[to] = k[row * k_strides[0] + head * k_strides[1] + d];
} else {
  rows[to] = v[row * v_strides[0] + (head - kv_heads) * v_strides[1] + d];
}
