// New keys and values, packed in MLX's affine groups: the same codes, scales and biases
// as mx.quantize gives for each row, laid out as the pages of the cache are.
//
// Template: T: type of the numbers; D: head dimension; BITS: 8 or 4; GROUP: numbers of a
//   scale, 32 or 64.
// Inputs: k, v T [N, Hkv, 1, D], the last axis without gaps.
// Outputs: words uint32 [2 Hkv, N, D BITS / 32]; scales and biases T
//   [2 Hkv, N, D / GROUP]: the heads of the keys, then those of the values.
// Grid: (32 D / GROUP, 2 Hkv, N) threads; threadgroup: (32 D / GROUP, 1, 1): a SIMD group
// packs one group of numbers, PER of them in each lane.

constexpr int PER = GROUP / 32;
constexpr float MOST = (1 << BITS) - 1;
const int kv_heads = k_shape[1];
const int head = threadgroup_position_in_grid.y;
const int row = threadgroup_position_in_grid.z;
const int rows = k_shape[0];
const int lane = thread_index_in_simdgroup;
const int piece = simdgroup_index_in_threadgroup;  // of the row
float x[PER];
float least = Limits<T>::max;
float most = 0.0f;
for (int i = 0; i < PER; ++i) {
  const int d = piece * GROUP + lane * PER + i;
  if (head < kv_heads) {
    x[i] = static_cast<float>(k[row * k_strides[0] + head * k_strides[1] + d]);
  } else {
    x[i] = static_cast<float>(
        v[row * v_strides[0] + (head - kv_heads) * v_strides[1] + d]);
  }
  least = min(least, x[i]);
  most = max(most, x[i]);
}
least = simd_min(least);
most = simd_max(most);

// The end that is further from 0 gets a code exactly, and 0 too.
const bool low = abs(least) > abs(most);
const float edge = low ? least : most;
float scale = max((most - least) / MOST, 1e-7f);
scale = low ? scale : -scale;
const float steps = round(edge / scale);
scale = steps == 0.0f ? scale : edge / steps;
const float bias = steps == 0.0f ? 0.0f : edge;

const size_t at = size_t(head) * rows + row;
if (lane == 0) {
  scales[at * (D / GROUP) + piece] = static_cast<T>(scale);
  biases[at * (D / GROUP) + piece] = static_cast<T>(bias);
}
uint32_t codes = 0;  // of this lane
for (int i = 0; i < PER; ++i) {
  const uint32_t code = static_cast<uint32_t>(min(round((x[i] - bias) / scale), MOST));
  codes |= code << (BITS * i);
}
// Neighbouring lanes join their codes until a word is full; the first of them holds it.
constexpr int LANES = 32 / (BITS * PER);  // of a word
for (ushort step = 1; step < LANES; step *= 2) {
  codes |= simd_shuffle_xor(codes, step) << (BITS * PER * step);
}
if (lane % LANES == 0) {
  words[at * (D * BITS / 32) + piece * (GROUP * BITS / 32) + lane / LANES] = codes;
}
