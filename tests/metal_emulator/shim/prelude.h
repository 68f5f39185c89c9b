// The names MLX puts in front of every custom kernel, as far as kernels use
// them. Our own text: the meaning follows MLX's utils.h, the wording does not.
#pragma once
#include <metal_stdlib>
using namespace metal;

typedef half float16_t;
typedef bfloat bfloat16_t;

#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")

namespace metal_emulator {
// The greatest value: infinity where the type has one.
template <typename T>
constexpr T greatest() {
  if constexpr (is_floating_point_v<T>) return numeric_limits<T>::infinity();
  else return numeric_limits<T>::max();
}
template <typename T>
constexpr T least() {
  if constexpr (is_floating_point_v<T>) return -numeric_limits<T>::infinity();
  else return numeric_limits<T>::lowest();
}
}  // namespace metal_emulator

template <typename T>
struct Limits {
  static constexpr constant T max = metal_emulator::greatest<T>();
  static constexpr constant T min = metal_emulator::least<T>();
  static constexpr constant T finite_max = numeric_limits<T>::max();
  static constexpr constant T finite_min = numeric_limits<T>::lowest();
};

// Offset, in elements, of the elem-th element of a strided array.
template <typename Index = int64_t>
inline Index elem_to_loc(Index elem, constant const int* shape,
                         constant const int64_t* strides, int ndim) {
  Index offset = 0;
  for (int axis = ndim; axis-- > 0;) {
    const Index extent = shape[axis];
    offset += elem % extent * Index(strides[axis]);
    elem = elem / extent;
  }
  return offset;
}

template <typename T, typename U>
inline T ceildiv(T n, U d) { return (n + d - 1) / d; }

inline float log1p(float x) { return ::log1pf(x); }
inline bfloat log1p(bfloat x) { return bfloat(::log1pf(float(x))); }

template <typename To, typename From>
inline To cast_to(From x) {
  if constexpr (is_same_v<To, bool>) return x != From(0);
  else return static_cast<To>(x);
}

struct complex64_t {
  float real;
  float imag;
};
inline complex64_t operator+(complex64_t a, complex64_t b) {
  return complex64_t{a.real + b.real, a.imag + b.imag};
}
inline complex64_t operator-(complex64_t a, complex64_t b) {
  return complex64_t{a.real - b.real, a.imag - b.imag};
}
inline complex64_t operator*(complex64_t a, complex64_t b) {
  return complex64_t{a.real * b.real - a.imag * b.imag,
                     a.real * b.imag + a.imag * b.real};
}
