// Atomics. One host thread runs everything, so only the checker needs telling.
#pragma once

namespace metal_emulator {
enum { atomic_read = 1, atomic_write = 2 };
template <class T>
struct atomic_cell {
  static_assert(metal::is_same_v<T, int> || metal::is_same_v<T, uint> ||
                    metal::is_same_v<T, float> || metal::is_same_v<T, bool>,
                "MSL atomics: int, uint, bool, float only");
  T v;
};
}  // namespace metal_emulator

namespace metal {
enum memory_order { memory_order_relaxed };
template <class T> using atomic = metal_emulator::atomic_cell<T>;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

#define EMULATOR_TELL(T, access) \
  metal_emulator_atomic((__private void*)(ulong)p, sizeof(T), access)
#define EMULATOR_RMW(SPACE, f, float_ok, expr)                                    \
  template <class T> EMULATOR_UNCHECKED                                           \
  T atomic_##f##_explicit(volatile SPACE atomic<T>* p, T b, memory_order) {       \
    static_assert(!is_same_v<T, float> || (float_ok),                             \
                  "MSL float atomics: device memory, and only load, "             \
                  "store, exchange, fetch_add, fetch_sub");                       \
    EMULATOR_TELL(T, metal_emulator::atomic_read | metal_emulator::atomic_write); \
    T a = p->v;                                                                   \
    p->v = (expr);                                                                \
    return a;                                                                     \
  }
#define EMULATOR_ATOMICS(SPACE, float_ok)                                         \
  EMULATOR_RMW(SPACE, fetch_add, float_ok, a + b)                                 \
  EMULATOR_RMW(SPACE, fetch_sub, float_ok, a - b)                                 \
  EMULATOR_RMW(SPACE, exchange, float_ok, b)                                      \
  EMULATOR_RMW(SPACE, fetch_max, false, a > b ? a : b)                            \
  EMULATOR_RMW(SPACE, fetch_min, false, a < b ? a : b)                            \
  EMULATOR_RMW(SPACE, fetch_or, false, a | b)                                     \
  EMULATOR_RMW(SPACE, fetch_and, false, a& b)                                     \
  template <class T> EMULATOR_UNCHECKED                                           \
  T atomic_load_explicit(const volatile SPACE atomic<T>* p, memory_order) {       \
    EMULATOR_TELL(T, metal_emulator::atomic_read);                                \
    return p->v;                                                                  \
  }                                                                               \
  template <class T> EMULATOR_UNCHECKED                                           \
  void atomic_store_explicit(volatile SPACE atomic<T>* p, T b, memory_order) {    \
    EMULATOR_TELL(T, metal_emulator::atomic_write);                               \
    p->v = b;                                                                     \
  }                                                                               \
  template <class T> EMULATOR_UNCHECKED                                           \
  bool atomic_compare_exchange_weak_explicit(                                     \
      volatile SPACE atomic<T>* p, __private T* expected, T b,                    \
      memory_order, memory_order) {                                               \
    EMULATOR_TELL(T, metal_emulator::atomic_read | metal_emulator::atomic_write); \
    if (p->v == *expected) {                                                      \
      p->v = b;                                                                   \
      return true;                                                                \
    }                                                                             \
    *expected = p->v;                                                             \
    return false;                                                                 \
  }
EMULATOR_ATOMICS(__global, true)
EMULATOR_ATOMICS(__local, false)
}  // namespace metal
