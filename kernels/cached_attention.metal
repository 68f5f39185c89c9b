// Attention of a few new tokens per sequence over what the cache holds: pages, or dense
// rows; numbers, or codes of MLX's affine groups.
//
// Defined: KV_BITS (0: numbers; 8, 4: codes), PAGED, SPLIT (whether the keys of a
//   sequence are spread over several threadgroups), SINKS.
// Template: T: type of q, of numbers, scales and biases; D: head dimension; LANES and
//   PIECE: see attend.h; Q: queries of a threadgroup; SIMDS: its SIMD groups; GROUP:
//   numbers of a scale; PAGE: tokens of a page.
// Inputs (the last axis of q, numbers, words, scales and biases without gaps, all other
//   axes with any strides):
//   PAGED: q [N, H, 1, D] T; pages T [2 Hkv, slots, D], or words uint32
//     [2 Hkv, slots, D KV_BITS / 32] with scales and biases T [2 Hkv, slots, D / GROUP]:
//     the heads of the keys, then those of the values; page p is the slots PAGE p and on.
//     table int32 [S, width]: page numbers. sequences int32 [S, 4]: tokens, the new ones
//     included; first row of q; rows (0: none); pages given back before the table's first.
//   Else: q [S, H, rows, D] T; k_words, k_scales, k_biases, v_words, v_scales, v_biases
//     [S, Hkv, tokens, ...] as above.
//   settings float [2]: scale, softcap (0: none).
//   numbers int32: window (0: none), chunks, splits, Hkv; not PAGED: tokens, rows too.
//   sinks float [H]: one more score each, of a key without a value.
// Outputs: SPLIT: parts float [rows of q, H, splits, D] and softmax float
//   [rows of q, H, splits, 2]: the largest score and the sum of weights; else out T, q's
//   shape. Rows of q: n-th row of head h is at (n H + h); not PAGED: sequence s, row r,
//   head h at (s H + h) rows + r.
// Grid: (32 SIMDS, Hkv chunks, S splits) threads; threadgroup: (32 SIMDS, 1, 1).
// Each key is read by one lane group and meets all Q queries there.

threadgroup float tops[SIMDS * Q];
threadgroup float totals[SIMDS * Q];
threadgroup float outs[SIMDS * D];

constexpr int E = D / LANES;
constexpr int KEYS = 32 / LANES;  // at a time, in a SIMD group
const int window = numbers[0];
const int chunks = numbers[1];
const int splits = numbers[2];
const int kv_heads = numbers[3];
const float scale = settings[0];
const float softcap = settings[1];
const int simd = simdgroup_index_in_threadgroup;
const int lane = int(thread_index_in_simdgroup) % LANES;
const int lane_group = int(thread_index_in_simdgroup) / LANES;
const int kv_head = int(threadgroup_position_in_grid.y) / chunks;
const int chunk = int(threadgroup_position_in_grid.y) % chunks;
const int sequence = int(threadgroup_position_in_grid.z) / splits;
const int split = int(threadgroup_position_in_grid.z) % splits;
const int heads = q_shape[1];
const int group = heads / kv_heads;
#if PAGED
const size_t entry = sequence * sequences_strides[0];
const int context = sequences[entry];
const int first_row = sequences[entry + sequences_strides[1]];
const int rows = sequences[entry + 2 * sequences_strides[1]];
const int dropped = sequences[entry + 3 * sequences_strides[1]];
#else
const int context = numbers[4];
const int rows = numbers[5];
#endif

// Query n of the KV head's: row n / group, head n % group; this chunk has Q of them.
const int begin = chunk * Q;
const int count = min(Q, rows * group - begin);
if (count <= 0) {
  return;  // (the whole threadgroup)
}
float query[Q * E];
float sums[Q * E];
float top[Q];
float total[Q];
for (int n = 0; n < Q; ++n) {
  top[n] = Limits<float>::finite_min;
  total[n] = 0.0f;
  for (int i = 0; i < E; ++i) {
    query[n * E + i] = 0.0f;
    sums[n * E + i] = 0.0f;
  }
}
for (int n = 0; n < count; ++n) {
  const int row = (begin + n) / group;
  const int head = kv_head * group + (begin + n) % group;
#if PAGED
  const size_t at = (first_row + row) * q_strides[0] + head * q_strides[1];
#else
  const size_t at =
      sequence * q_strides[0] + head * q_strides[1] + row * q_strides[2];
#endif
  for (int i = 0; i < E; ++i) {
    const int d = place<LANES, PIECE>(lane, i);
    query[n * E + i] = scale * static_cast<float>(q[at + d]);
  }
}

// What the chunk's rows see: up to the newest's own position.
const int oldest_row = context - rows + begin / group;
const int newest = context - rows + (begin + count - 1) / group;
const int from = window > 0 ? max(0, oldest_row - window + 1) : 0;
const int each = (newest + splits - from) / splits;  // ceil((newest + 1 - from) / splits)
const int start = from + split * each;
const int stop = min(start + each, newest + 1);

float key[E];
float value[E];
for (int base = start + simd * KEYS; base < stop; base += SIMDS * KEYS) {
  const int mine = base + lane_group;
  const int t = min(mine, stop - 1);
#if PAGED
  const int page = table[sequence * table_strides[0] + (t / PAGE - dropped) * table_strides[1]];
  const size_t slot = size_t(page) * PAGE + t % PAGE;
#if KV_BITS
  load_packed<T, KV_BITS, GROUP, LANES, E, PIECE>(
      words + kv_head * words_strides[0] + slot * words_strides[1],
      scales + kv_head * scales_strides[0] + slot * scales_strides[1],
      biases + kv_head * biases_strides[0] + slot * biases_strides[1],
      lane,
      key);
  const int value_head = kv_heads + kv_head;
  load_packed<T, KV_BITS, GROUP, LANES, E, PIECE>(
      words + value_head * words_strides[0] + slot * words_strides[1],
      scales + value_head * scales_strides[0] + slot * scales_strides[1],
      biases + value_head * biases_strides[0] + slot * biases_strides[1],
      lane,
      value);
#else
  const device T* keys = pages + kv_head * pages_strides[0] + slot * pages_strides[1];
  load_numbers<T, LANES, E, PIECE>(keys, lane, key);
  load_numbers<T, LANES, E, PIECE>(keys + kv_heads * pages_strides[0], lane, value);
#endif
#else
  load_packed<T, KV_BITS, GROUP, LANES, E, PIECE>(
      k_words + sequence * k_words_strides[0] + kv_head * k_words_strides[1] +
          t * k_words_strides[2],
      k_scales + sequence * k_scales_strides[0] + kv_head * k_scales_strides[1] +
          t * k_scales_strides[2],
      k_biases + sequence * k_biases_strides[0] + kv_head * k_biases_strides[1] +
          t * k_biases_strides[2],
      lane,
      key);
  load_packed<T, KV_BITS, GROUP, LANES, E, PIECE>(
      v_words + sequence * v_words_strides[0] + kv_head * v_words_strides[1] +
          t * v_words_strides[2],
      v_scales + sequence * v_scales_strides[0] + kv_head * v_scales_strides[1] +
          t * v_scales_strides[2],
      v_biases + sequence * v_biases_strides[0] + kv_head * v_biases_strides[1] +
          t * v_biases_strides[2],
      lane,
      value);
#endif
  for (int n = 0; n < Q; ++n) {
    const int position = context - rows + (begin + n) / group;
    const bool seen = mine < stop && n < count && t <= position &&
        (window <= 0 || t > position - window);
    meet<E, LANES>(
        query + n * E, key, value, seen, softcap, sums + n * E, top[n], total[n]);
  }
}
for (int n = 0; n < Q; ++n) {
  join_lane_groups<E, LANES>(sums + n * E, top[n], total[n]);
}

// The SIMD groups become one, a query at a time.
if (thread_index_in_simdgroup == 0) {
  for (int n = 0; n < Q; ++n) {
    tops[simd * Q + n] = top[n];
    totals[simd * Q + n] = total[n];
  }
}
for (int n = 0; n < count; ++n) {
  if (lane_group == 0) {
    for (int i = 0; i < E; ++i) {
      outs[simd * D + place<LANES, PIECE>(lane, i)] = sums[n * E + i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float all_top = Limits<float>::finite_min;
  for (int s = 0; s < SIMDS; ++s) {
    all_top = max(all_top, tops[s * Q + n]);
  }
  float all_total = 0.0f;
  for (int s = 0; s < SIMDS; ++s) {
    all_total += totals[s * Q + n] * fast::exp(tops[s * Q + n] - all_top);
  }
  const int row = (begin + n) / group;
  const int head = kv_head * group + (begin + n) % group;
#if PAGED
  const size_t at = size_t(first_row + row) * heads + head;
#else
  const size_t at = (size_t(sequence) * heads + head) * rows + row;
#endif
#if SINKS && !SPLIT
  const float higher = max(all_top, sinks[head]);
  all_total = all_total * fast::exp(all_top - higher) + fast::exp(sinks[head] - higher);
  all_top = higher;
#endif
  for (int d = thread_index_in_threadgroup; d < D; d += 32 * SIMDS) {
    float sum = 0.0f;
    for (int s = 0; s < SIMDS; ++s) {
      sum += outs[s * D + d] * fast::exp(tops[s * Q + n] - all_top);
    }
#if SPLIT
    parts[(at * splits + split) * D + d] = sum;
#else
    out[at * D + d] = static_cast<T>(all_total > 0.0f ? sum / all_total : 0.0f);
#endif
  }
#if SPLIT
  if (thread_index_in_threadgroup == 0) {
    softmax[(at * splits + split) * 2] = all_top;
    softmax[(at * splits + split) * 2 + 1] = all_total;
  }
#endif
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
