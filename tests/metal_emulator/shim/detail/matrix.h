// simdgroup_matrix, 8x8 only. Each lane holds two neighbours of one row.
#pragma once

EMULATOR_INLINE_PUSH
namespace metal_emulator {
inline int row_of(int lane) { return (lane >> 2 & 4) | (lane >> 1 & 3); }
inline int col_of(int lane) { return (lane >> 1 & 4) | (lane & 1) << 1; }
inline int lane_of(int row, int col) {
  return (row & 4) << 2 | (col & 4) << 1 | (row & 3) << 1 | (col >> 1 & 1);
}
}  // namespace metal_emulator

namespace metal {
template <class T, int R = 8, int C = 8>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "only 8x8");
  vec<T, 2> e;
  simdgroup_matrix() { e = metal_emulator::poison<vec<T, 2>>(); }
  // A diagonal matrix, as in MSL.
  simdgroup_matrix(T v) {
    const int lane = metal_emulator_lane();
    const int row = metal_emulator::row_of(lane), col = metal_emulator::col_of(lane);
    for (int k = 0; k < 2; k++) e[k] = row == col + k ? v : (T)0;
  }
  __private vec<T, 2>& thread_elements() { return e; }
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;

template <class T, int R, int C>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.e = vec<T, 2>(v);
  return m;
}

// Element k of this lane; transposed if so asked.
#define EMULATOR_MATRIX_INDEX                                        \
  ulong row = metal_emulator::row_of(l.lane);                        \
  ulong col = metal_emulator::col_of(l.lane) + k;                    \
  ulong i = transpose ? (col + origin[1]) * stride + row + origin[0] \
                      : (row + origin[1]) * stride + col + origin[0];
#define EMULATOR_MATRIX_MEMORY(SPACE)                                         \
  template <class T>                                                          \
  void simdgroup_load(__private simdgroup_matrix<T, 8, 8>& m,                 \
                      const SPACE T* p, ulong stride = 8,                     \
                      ulong2 origin = ulong2{0, 0}, bool transpose = false) { \
    auto l = metal_emulator::exchange(0);                                     \
    for (int k = 0; k < 2; k++) { EMULATOR_MATRIX_INDEX m.e[k] = p[i]; }      \
  }                                                                           \
  template <class T>                                                          \
  void simdgroup_store(simdgroup_matrix<T, 8, 8> m, SPACE T* p,               \
                       ulong stride = 8, ulong2 origin = ulong2{0, 0},        \
                       bool transpose = false) {                              \
    auto l = metal_emulator::exchange(0);                                     \
    for (int k = 0; k < 2; k++) { EMULATOR_MATRIX_INDEX p[i] = m.e[k]; }      \
  }
EMULATOR_MATRIX_MEMORY(__global)
EMULATOR_MATRIX_MEMORY(__local)

template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8, 8>& d,
                                   simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b,
                                   simdgroup_matrix<C, 8, 8> c) {
  auto la = metal_emulator::exchange(a.e);
  auto lb = metal_emulator::exchange(b.e);
  int row = metal_emulator::row_of(la.lane);
  for (int k = 0; k < 2; k++) {
    int col = metal_emulator::col_of(la.lane) + k;
    float s = (float)c.e[k];
    for (int i = 0; i < 8; i++)
      s += (float)la.at(metal_emulator::lane_of(row, i))[i & 1] *
          (float)lb.at(metal_emulator::lane_of(i, col))[col & 1];
    d.e[k] = (D)s;
  }
}
template <class D, class A, class B>
void simdgroup_multiply(__private simdgroup_matrix<D, 8, 8>& d,
                        simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>((D)0));
}
}  // namespace metal
EMULATOR_INLINE_POP
