// The parts that cached_attention leaves when it splits the keys become one
// (flash-decoding, Dao et al. 2023).
//
// Defined: SINKS.
// Template: T: type of the output.
// Inputs: parts float [A, splits, D] and softmax float [A, splits, 2], the largest score
//   and the sum of weights, A: all queries; heads int32 [2]: H, and how many neighbours
//   among the A have the same head; sinks float [H].
// Output: out T [A, D]. Grid: (D, A, 1) threads, any threadgroup.

const int d = thread_position_in_grid.x;
const size_t at = thread_position_in_grid.y;
const int splits = parts_shape[1];
const int dim = parts_shape[2];
float top = Limits<float>::finite_min;
for (int s = 0; s < splits; ++s) {
  top = max(top, softmax[(at * splits + s) * 2]);
}
float total = 0.0f;
#if SINKS
const float sink = sinks[at / heads[1] % heads[0]];
top = max(top, sink);
total = fast::exp(sink - top);
#endif
float sum = 0.0f;
for (int s = 0; s < splits; ++s) {
  const float fade = fast::exp(softmax[(at * splits + s) * 2] - top);
  total += fade * softmax[(at * splits + s) * 2 + 1];
  sum += fade * parts[(at * splits + s) * dim + d];
}
out[at * dim + d] = static_cast<T>(total > 0.0f ? sum / total : 0.0f);
