// What clang's -fsanitize=thread and parts of -fsanitize=undefined call.
#pragma once
#include "accesses.h"
#include "shim_calls.h"

extern "C" {
#define ON_READ(name, n) \
  void name(void* p) { access(static_cast<char*>(p), n, false, CALLER()); }
#define ON_WRITE(name, n) \
  void name(void* p) { access(static_cast<char*>(p), n, true, CALLER()); }
#define ON_BOTH(name, n)                               \
  void name(void* p) {                                 \
    access(static_cast<char*>(p), n, false, CALLER()); \
    access(static_cast<char*>(p), n, true, CALLER());  \
  }
#define ON_SIZE(n)                       \
  ON_READ(__tsan_read##n, n)             \
  ON_READ(__tsan_unaligned_read##n, n)   \
  ON_WRITE(__tsan_write##n, n)           \
  ON_WRITE(__tsan_unaligned_write##n, n) \
  ON_BOTH(__tsan_read_write##n, n)       \
  ON_BOTH(__tsan_unaligned_read_write##n, n)
ON_SIZE(1)
ON_SIZE(2)
ON_SIZE(4)
ON_SIZE(8)
ON_SIZE(16)
void __tsan_read_range(void* p, long n) {
  access(static_cast<char*>(p), n, false, CALLER());
}
void __tsan_write_range(void* p, long n) {
  access(static_cast<char*>(p), n, true, CALLER());
}
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  access(static_cast<char*>(const_cast<void*>(from)), n, false, CALLER());
  access(static_cast<char*>(to), n, true, CALLER());
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  access(static_cast<char*>(const_cast<void*>(from)), n, false, CALLER());
  access(static_cast<char*>(to), n, true, CALLER());
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int c, size_t n) {
  access(static_cast<char*>(to), n, true, CALLER());
  return memset(to, c, n);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

// ----------------------------------------- -fsanitize=undefined-family callbacks
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
static std::string where(const SourceLocation* l) {
  return format("%s:%u:%u", l->file ? l->file : "?", l->line, l->column);
}
void __ubsan_handle_out_of_bounds(SourceLocation* l, uint64_t i) {
  report("array-index", CALLER(), 0, where(l) + format(" index %ld", long(i)));
}
void __ubsan_handle_type_mismatch_v1(SourceLocation* l, uint64_t p) {
  report("misaligned", CALLER(), 0, where(l) + format(" address %lx", long(p)));
}
#define ON_UB(name, kind)                                      \
  void __ubsan_handle_##name(SourceLocation* l, uint64_t...) { \
    report(kind, CALLER(), 0, where(l));                       \
  }
ON_UB(shift_out_of_bounds, "shift")
ON_UB(divrem_overflow, "div-by-zero")
ON_UB(add_overflow, "signed-overflow")
ON_UB(sub_overflow, "signed-overflow")
ON_UB(mul_overflow, "signed-overflow")
ON_UB(negate_overflow, "signed-overflow")
ON_UB(float_cast_overflow, "float-cast-overflow")
}  // extern "C"
