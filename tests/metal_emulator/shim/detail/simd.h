// Barriers and SIMD-group functions. Every function is one rendezvous of the
// SIMD group's live lanes: each deposits a value and may read all the others.
#pragma once

// Inlined, so that a barrier or rendezvous is known by the kernel's own line. Not
// so EMULATOR_UNCHECKED functions: inlined, they would be checked.
#define EMULATOR_INLINE_PUSH \
  _Pragma("clang attribute push(__attribute__((always_inline)), apply_to = function)")
#define EMULATOR_INLINE_POP _Pragma("clang attribute pop")

EMULATOR_INLINE_PUSH
namespace metal {
enum class mem_flags {
  mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return (mem_flags)((int)a | (int)b);
}
inline void threadgroup_barrier(mem_flags f) { metal_emulator_barrier((int)f); }
inline void simdgroup_barrier(mem_flags f) { metal_emulator_simd_barrier((int)f); }
}  // namespace metal
EMULATOR_INLINE_POP

namespace metal_emulator {
static constexpr __constant int lanes_per_simd = 32;

// What the lanes deposited; the runtime keeps 64 bytes for each lane.
template <class T>
struct lanes {
  __private char* slots;
  uint mask;
  int lane;

  bool active(int i) const { return mask >> i & 1; }
  int first() const { return __builtin_ctz(mask); }
  EMULATOR_UNCHECKED T raw(int i) const { return *(__private T*)(slots + 64 * i); }
  // The value of lane i; reading a lane that takes no part is reported.
  EMULATOR_UNCHECKED T at(int i) const {
    if (i < 0 || i >= lanes_per_simd || !active(i)) {
      metal_emulator_bad_lane(i);
      i = lane;
    }
    return raw(i);
  }
};
template <class T>
__attribute__((always_inline)) inline lanes<T> exchange(T v) {
  static_assert(sizeof(T) <= 64, "too large for a SIMD-group function");
  lanes<T> r;
  r.slots = metal_emulator_exchange(&v, sizeof(T), &r.mask, &r.lane);
  return r;
}

// Sums of half and bfloat are accumulated in float.
template <class T> struct accumulator { using type = T; };
template <> struct accumulator<half> { using type = float; };
template <> struct accumulator<bfloat> { using type = float; };
}  // namespace metal_emulator

#define EMULATOR_EACH_LANE(l, i)                           \
  for (int i = 0; i < metal_emulator::lanes_per_simd; i++) \
    if (l.active(i))

EMULATOR_INLINE_PUSH
namespace metal {
#define EMULATOR_REDUCE(f, combine)                                        \
  template <class T> T f(T v) {                                            \
    static_assert(sizeof(EMULATOR_ELEMENT(T)) <= 4 && !is_same_v<T, bool>, \
                  "MSL has no " #f " for 64-bit integers or bool");        \
    auto l = metal_emulator::exchange(v);                                  \
    bool first = true;                                                     \
    typename metal_emulator::accumulator<T>::type a = v;                   \
    EMULATOR_EACH_LANE(l, i) {                                             \
      typename metal_emulator::accumulator<T>::type b = l.raw(i);          \
      a = first ? b : (combine);                                           \
      first = false;                                                       \
    }                                                                      \
    return (T)a;                                                           \
  }
EMULATOR_REDUCE(simd_sum, a + b)
EMULATOR_REDUCE(simd_product, a* b)
EMULATOR_REDUCE(simd_and, a& b)
EMULATOR_REDUCE(simd_or, a | b)
EMULATOR_REDUCE(simd_xor, a ^ b)
EMULATOR_REDUCE(simd_max, max(a, b))
EMULATOR_REDUCE(simd_min, min(a, b))

#define EMULATOR_SCAN(f, end, combine, init)            \
  template <class T> T f(T v) {                         \
    auto l = metal_emulator::exchange(v);               \
    T a = init;                                         \
    for (int i = 0; i < (end); i++)                     \
      if (l.active(i)) { T b = l.raw(i); a = combine; } \
    return a;                                           \
  }
EMULATOR_SCAN(simd_prefix_inclusive_sum, l.lane + 1, a + b, T(0))
EMULATOR_SCAN(simd_prefix_exclusive_sum, l.lane, a + b, T(0))
EMULATOR_SCAN(simd_prefix_inclusive_product, l.lane + 1, a* b, T(1))
EMULATOR_SCAN(simd_prefix_exclusive_product, l.lane, a* b, T(1))

template <class T> T simd_shuffle(T v, ushort i) {
  return metal_emulator::exchange(v).at(i);
}
template <class T> T simd_broadcast(T v, ushort i) {
  return metal_emulator::exchange(v).at(i);
}
template <class T> T simd_broadcast_first(T v) {
  auto l = metal_emulator::exchange(v);
  return l.at(l.first());
}
template <class T> T simd_shuffle_xor(T v, ushort m) {
  auto l = metal_emulator::exchange(v);
  return l.at(l.lane ^ m);
}
// Metal leaves the value undefined where the source lane is out of range.
template <class T> T simd_shuffle_down(T v, ushort d) {
  auto l = metal_emulator::exchange(v);
  int i = l.lane + d;
  return i > 31 ? metal_emulator::poison<T>() : l.at(i);
}
template <class T> T simd_shuffle_up(T v, ushort d) {
  auto l = metal_emulator::exchange(v);
  int i = l.lane - d;
  return i < 0 ? metal_emulator::poison<T>() : l.at(i);
}
template <class T> T simd_shuffle_rotate_down(T v, ushort d) {
  auto l = metal_emulator::exchange(v);
  return l.at((l.lane + d) & 31);
}
template <class T> T simd_shuffle_rotate_up(T v, ushort d) {
  auto l = metal_emulator::exchange(v);
  return l.at((l.lane - d) & 31);
}
template <class T> T simd_shuffle_and_fill_up(T v, T fill, ushort d) {
  auto l = metal_emulator::exchange(v);
  auto f = metal_emulator::exchange(fill);
  int i = l.lane - d;
  return i < 0 ? f.at(32 + i) : l.at(i);
}
template <class T> T simd_shuffle_and_fill_down(T v, T fill, ushort d) {
  auto l = metal_emulator::exchange(v);
  auto f = metal_emulator::exchange(fill);
  int i = l.lane + d;
  return i > 31 ? f.at(i - 32) : l.at(i);
}
inline bool simd_all(bool v) {
  auto l = metal_emulator::exchange(v);
  bool r = true;
  EMULATOR_EACH_LANE(l, i) r = r && l.raw(i);
  return r;
}
inline bool simd_any(bool v) {
  auto l = metal_emulator::exchange(v);
  bool r = false;
  EMULATOR_EACH_LANE(l, i) r = r || l.raw(i);
  return r;
}
inline bool simd_is_first() {
  auto l = metal_emulator::exchange(0);
  return l.lane == l.first();
}
struct simd_vote {
  ulong v;
  operator ulong() const { return v; }
};
inline simd_vote simd_ballot(bool v) {
  auto l = metal_emulator::exchange(v);
  ulong r = 0;
  EMULATOR_EACH_LANE(l, i) r |= (ulong)l.raw(i) << i;
  return simd_vote{r};
}
inline simd_vote simd_active_threads_mask() {
  return simd_vote{(ulong)metal_emulator::exchange(0).mask};
}
template <class T> T quad_sum(T v) {
  auto l = metal_emulator::exchange(v);
  T a = 0;
  for (int i = 0; i < 4; i++) a += l.at((l.lane & ~3) + i);
  return a;
}
template <class T> T quad_shuffle_xor(T v, ushort m) {
  auto l = metal_emulator::exchange(v);
  return l.at(l.lane ^ (m & 3));
}
}  // namespace metal
EMULATOR_INLINE_POP
