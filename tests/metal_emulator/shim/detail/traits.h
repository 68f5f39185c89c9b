// Type traits, numeric limits, vectors and as_type.
#pragma once

namespace metal_emulator {
// Element type and width of a scalar (width 1) or vector type.
template <class T>
struct vec_traits {
  using element = T;
  static constexpr __constant int size = 1;
};
template <class E, int N>
struct vec_traits<E __attribute__((ext_vector_type(N)))> {
  using element = E;
  static constexpr __constant int size = N;
};

// T(args...) of MSL for a vector type T: splat, list of elements or conversion.
template <class T>
struct construct {
  static T make() { return T{}; }
  template <class A>
  static T make(A a) {
    if constexpr (vec_traits<A>::size > 1) return __builtin_convertvector(a, T);
    else return (T)(a);
  }
  template <class A, class B, class... Rest>
  static T make(A a, B b, Rest... rest) { return T{a, b, rest...}; }
};

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, from);
}

// A value Metal leaves undefined.
template <class T>
T poison() {
  T r;
  __builtin_memset(&r, 0xff, sizeof r);
  return r;
}
}  // namespace metal_emulator

#define as_type metal_emulator::bit_cast

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class U> struct conditional { using type = T; };
template <class T, class U> struct conditional<false, T, U> { using type = U; };
template <bool B, class T, class U>
using conditional_t = typename conditional<B, T, U>::type;

#define EMULATOR_TRAIT static constexpr __constant bool
template <class T, class U> EMULATOR_TRAIT is_same_v = false;
template <class T> EMULATOR_TRAIT is_same_v<T, T> = true;
template <class T, class U> EMULATOR_TRAIT is_convertible_v = __is_convertible_to(T, U);
template <class T> EMULATOR_TRAIT is_floating_point_v =
    is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T> EMULATOR_TRAIT is_integral_v = __is_integral(T);
template <class T> EMULATOR_TRAIT is_unsigned_v = __is_unsigned(T);
template <class T> EMULATOR_TRAIT is_signed_v = __is_signed(T);
template <class T> EMULATOR_TRAIT is_arithmetic_v =
    is_integral_v<T> || is_floating_point_v<T>;
template <class T, class U> struct is_same { EMULATOR_TRAIT value = is_same_v<T, U>; };

template <class T> struct remove_cv { using type = T; };
template <class T> struct remove_cv<const T> { using type = T; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;

template <class T, size_t N>
struct array {
  T e[N];
  constexpr T operator[](size_t i) const { return e[i]; }
};

template <class T> struct numeric_limits;

#define EMULATOR_INT_LIMITS(T, MAX, MIN)        \
  template <> struct numeric_limits<T> {        \
    static constexpr T max() { return MAX; }    \
    static constexpr T min() { return MIN; }    \
    static constexpr T lowest() { return MIN; } \
  };
EMULATOR_INT_LIMITS(bool, true, false)
EMULATOR_INT_LIMITS(char, 127, -128)
EMULATOR_INT_LIMITS(signed char, 127, -128)
EMULATOR_INT_LIMITS(uchar, 255, 0)
EMULATOR_INT_LIMITS(short, 32767, -32768)
EMULATOR_INT_LIMITS(ushort, 65535, 0)
EMULATOR_INT_LIMITS(int, 2147483647, -2147483647 - 1)
EMULATOR_INT_LIMITS(uint, 4294967295u, 0)
EMULATOR_INT_LIMITS(long, 9223372036854775807l, -9223372036854775807l - 1)
EMULATOR_INT_LIMITS(ulong, 18446744073709551615ul, 0)

#define EMULATOR_FLOAT_LIMITS(T, MAX, MIN, EPS)                      \
  template <> struct numeric_limits<T> {                             \
    static constexpr T max() { return (T)MAX; }                      \
    static constexpr T min() { return (T)MIN; }                      \
    static constexpr T lowest() { return -(T)MAX; }                  \
    static constexpr T epsilon() { return (T)EPS; }                  \
    static constexpr T infinity() { return (T)__builtin_inff(); }    \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
  };
EMULATOR_FLOAT_LIMITS(float, 3.402823466e38f, 1.175494351e-38f, 1.192092896e-7f)
EMULATOR_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-5f, 9.765625e-4f)
EMULATOR_FLOAT_LIMITS(bfloat, 3.38953139e38f, 1.175494351e-38f, 7.8125e-3f)
}  // namespace metal
