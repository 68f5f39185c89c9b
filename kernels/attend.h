// What the attention kernels share: how the numbers of a row are dealt to lanes, and the
// softmax of several queries over the keys of one KV head, one key after the other.
//
// A SIMD group is cut into lane groups of LANES lanes. A lane group takes a key at a
// time; each of its lanes holds E = D / LANES numbers of the key and the value, of each
// of Q queries, and of what these have gathered so far.

// The place in a row [D] of a lane's number i. Lanes take pieces of PIECE numbers in
// turn, so that what they load together lies side by side; PIECE divides E.
template <int LANES, int PIECE>
inline int place(int lane, int i) {
  return (i / PIECE * LANES + lane) * PIECE + i % PIECE;
}

// A lane's E numbers of a row of numbers.
template <typename T, int LANES, int E, int PIECE>
inline void load_numbers(const device T* row, int lane, thread float* x) {
  for (int i = 0; i < E; ++i) {
    x[i] = static_cast<float>(row[place<LANES, PIECE>(lane, i)]);
  }
}

// The same of a packed row: codes of BITS bits in words, the first code lowest, and a
// scale and a bias for GROUP numbers each: number = scale * code + bias. A piece is a
// word, or the half of one (Metal is little-endian), and never in two groups.
template <typename T, int BITS, int GROUP, int LANES, int E, int PIECE>
inline void load_packed(
    const device uint32_t* words,
    const device T* scales,
    const device T* biases,
    int lane,
    thread float* x) {
  constexpr uint32_t MASK = (1u << BITS) - 1u;
  for (int w = 0; w < E / PIECE; ++w) {
    const int piece = w * LANES + lane;
    uint32_t codes = 0;
    if (PIECE * BITS == 32) {
      codes = words[piece];
    } else {
      const device uint16_t* halves = (const device uint16_t*)words;
      codes = static_cast<uint32_t>(halves[piece]);
    }
    const float scale = static_cast<float>(scales[piece * PIECE / GROUP]);
    const float bias = static_cast<float>(biases[piece * PIECE / GROUP]);
    for (int i = 0; i < PIECE; ++i) {
      const uint32_t code = (codes >> (BITS * i)) & MASK;
      x[w * PIECE + i] = scale * static_cast<float>(code) + bias;
    }
  }
}

// One query [E] meets a key and its value; all lanes of the SIMD group take part.
// seen: whether it sees this lane group's key. Changed: out [E], the sum of
// weight * value; top, the largest score, finite_min before the first key; total, the
// sum of the weights.
template <int E, int LANES>
inline void meet(
    const thread float* query,
    const thread float* key,
    const thread float* value,
    bool seen,
    float softcap,
    thread float* out,
    thread float& top,
    thread float& total) {
  float score = 0.0f;
  for (int i = 0; i < E; ++i) {
    score += query[i] * key[i];
  }
  for (ushort step = LANES / 2; step > 0; step /= 2) {
    score += simd_shuffle_xor(score, step);
  }
  if (softcap > 0.0f) {
    score = softcap * precise::tanh(score / softcap);
  }
  score = seen ? score : top;
  const float higher = max(top, score);
  const float fade = fast::exp(top - higher);
  const float weight = seen ? fast::exp(score - higher) : 0.0f;
  top = higher;
  total = total * fade + weight;
  for (int i = 0; i < E; ++i) {
    out[i] = out[i] * fade + weight * value[i];
  }
}

// The lane groups of a SIMD group become one: all of them hold the sum.
template <int E, int LANES>
inline void join_lane_groups(
    thread float* out, thread float& top, thread float& total) {
  for (ushort step = LANES; step < 32; step *= 2) {
    const float other = simd_shuffle_xor(top, step);
    const float other_total = simd_shuffle_xor(total, step);
    const float higher = max(top, other);
    const float fade = fast::exp(top - higher);
    const float other_fade = fast::exp(other - higher);
    top = higher;
    total = total * fade + other_total * other_fade;
    for (int i = 0; i < E; ++i) {
      const float other_out = simd_shuffle_xor(out[i], step);
      out[i] = out[i] * fade + other_out * other_fade;
    }
  }
}
