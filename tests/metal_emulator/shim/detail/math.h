// Math for float, half, bfloat and (element by element) vectors of them.
// half and bfloat are computed in float and rounded once.
#pragma once

#define EMULATOR_LIBM(X)                                               \
  X(exp) X(exp2) X(exp10) X(log) X(log2) X(log10) X(sin) X(cos) X(tan) \
  X(asin) X(acos) X(atan) X(sinh) X(cosh) X(tanh) X(asinh) X(acosh)    \
  X(atanh) X(sqrt) X(floor) X(ceil) X(trunc) X(rint) X(round) X(fabs)
#define EMULATOR_DECLARE(name) float name##f(float);
extern "C" {
EMULATOR_LIBM(EMULATOR_DECLARE)
float powf(float, float);
float atan2f(float, float);
float fmodf(float, float);
float fmaf(float, float, float);
float ldexpf(float, int);
float log1pf(float);
}

#define EMULATOR_IF_VECTOR(T) enable_if_t<(metal_emulator::vec_traits<T>::size > 1), T>
#define EMULATOR_ELEMENT(T) typename metal_emulator::vec_traits<T>::element
#define EMULATOR_EACH(T, i) \
  for (int i = 0; i < metal_emulator::vec_traits<T>::size; i++)

// One- and two-argument functions given as an expression of float x (and y).
#define EMULATOR_UNARY(f, expr)                                       \
  inline float f(float x) { return expr; }                            \
  inline half f(half x_) { float x = x_; return (half)(expr); }       \
  inline bfloat f(bfloat x_) { float x = x_; return (bfloat)(expr); } \
  template <class T> EMULATOR_IF_VECTOR(T) f(T x) {                   \
    T r;                                                              \
    EMULATOR_EACH(T, i) r[i] = f((EMULATOR_ELEMENT(T))x[i]);          \
    return r;                                                         \
  }
#define EMULATOR_BINARY(f, expr)                                    \
  inline float f(float x, float y) { return expr; }                 \
  inline half f(half x_, half y_) {                                 \
    float x = x_, y = y_;                                           \
    return (half)(expr);                                            \
  }                                                                 \
  inline bfloat f(bfloat x_, bfloat y_) {                           \
    float x = x_, y = y_;                                           \
    return (bfloat)(expr);                                          \
  }                                                                 \
  template <class T> EMULATOR_IF_VECTOR(T) f(T x, T y) {            \
    T r;                                                            \
    EMULATOR_EACH(T, i)                                             \
    r[i] = f((EMULATOR_ELEMENT(T))x[i], (EMULATOR_ELEMENT(T))y[i]); \
    return r;                                                       \
  }
#define EMULATOR_INTEGER(f, T, expr) inline T f(T x, T y) { return expr; }
#define EMULATOR_INTEGERS(f, expr)                                       \
  EMULATOR_INTEGER(f, char, expr) EMULATOR_INTEGER(f, signed char, expr) \
  EMULATOR_INTEGER(f, uchar, expr) EMULATOR_INTEGER(f, short, expr)      \
  EMULATOR_INTEGER(f, ushort, expr) EMULATOR_INTEGER(f, int, expr)       \
  EMULATOR_INTEGER(f, uint, expr) EMULATOR_INTEGER(f, long, expr)        \
  EMULATOR_INTEGER(f, ulong, expr)

namespace metal {
#define EMULATOR_FROM_LIBM(name) EMULATOR_UNARY(name, ::name##f(x))
EMULATOR_LIBM(EMULATOR_FROM_LIBM)
EMULATOR_UNARY(rsqrt, 1.0f / ::sqrtf(x))
EMULATOR_UNARY(abs, ::fabsf(x))
EMULATOR_UNARY(sinpi, ::sinf(M_PI_F* x))
EMULATOR_UNARY(cospi, ::cosf(M_PI_F* x))
EMULATOR_UNARY(sign, (x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f))
EMULATOR_UNARY(saturate, (x < 0 ? 0.0f : x > 1 ? 1.0f : x))
EMULATOR_UNARY(fract, x - ::floorf(x))

EMULATOR_BINARY(max, (x != x ? y : y != y ? x : x > y ? x : y))
EMULATOR_BINARY(min, (x != x ? y : y != y ? x : x < y ? x : y))
EMULATOR_BINARY(fmax, (x != x ? y : y != y ? x : x > y ? x : y))
EMULATOR_BINARY(fmin, (x != x ? y : y != y ? x : x < y ? x : y))
EMULATOR_BINARY(pow, ::powf(x, y))
EMULATOR_BINARY(powr, ::powf(x, y))
EMULATOR_BINARY(atan2, ::atan2f(x, y))
EMULATOR_BINARY(fmod, ::fmodf(x, y))
EMULATOR_BINARY(divide, x / y)
EMULATOR_INTEGERS(max, (x > y ? x : y))
EMULATOR_INTEGERS(min, (x < y ? x : y))

#define EMULATOR_INTEGER_ABS(T) \
  inline T abs(T x) { return x < 0 ? (T)-x : x; }
EMULATOR_INTEGER_ABS(char)
EMULATOR_INTEGER_ABS(signed char)
EMULATOR_INTEGER_ABS(short)
EMULATOR_INTEGER_ABS(int)
EMULATOR_INTEGER_ABS(long)

inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return (half)::fmaf(a, b, c); }
template <class T>
EMULATOR_IF_VECTOR(T) fma(T a, T b, T c) {
  using E = EMULATOR_ELEMENT(T);
  T r;
  EMULATOR_EACH(T, i) r[i] = fma((E)a[i], (E)b[i], (E)c[i]);
  return r;
}
template <class T> T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
template <class T> T select(T a, T b, bool c) { return c ? b : a; }
template <class T> T mix(T a, T b, T t) { return a + (b - a) * t; }
template <class T>
EMULATOR_ELEMENT(T) dot(T a, T b) {
  EMULATOR_ELEMENT(T) r = 0;
  EMULATOR_EACH(T, i) r += a[i] * b[i];
  return r;
}
template <class T> bool isnan(T x) { return x != x; }
template <class T> bool isinf(T x) { return __builtin_isinf((float)x); }
template <class T> bool isfinite(T x) { return __builtin_isfinite((float)x); }
inline uint popcount(uint x) { return __builtin_popcount(x); }
inline uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
inline uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
inline int mulhi(int a, int b) { return (long)a * b >> 32; }
inline uint mulhi(uint a, uint b) { return (ulong)a * b >> 32; }
inline float ldexp(float x, int e) { return ::ldexpf(x, e); }

// fast:: is undefined for infinities and NaN: the runtime reports those.
#define EMULATOR_FAST(f)                                                     \
  template <class T> T f(T x) {                                              \
    if constexpr (metal_emulator::vec_traits<T>::size == 1)                  \
      if (!__builtin_isfinite((float)x)) metal_emulator_nonfinite((float)x); \
    return metal::f(x);                                                      \
  }
namespace fast {
using namespace metal;
using metal::divide;
using metal::max;
using metal::min;
using metal::pow;
EMULATOR_FAST(exp) EMULATOR_FAST(exp2) EMULATOR_FAST(exp10) EMULATOR_FAST(log)
EMULATOR_FAST(log2) EMULATOR_FAST(log10) EMULATOR_FAST(sqrt) EMULATOR_FAST(rsqrt)
EMULATOR_FAST(sin) EMULATOR_FAST(cos) EMULATOR_FAST(tan) EMULATOR_FAST(tanh)
}  // namespace fast
namespace precise {
using namespace metal;
}
}  // namespace metal
