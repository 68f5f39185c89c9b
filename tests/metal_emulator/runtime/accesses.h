// Every load and store of the kernel: bounds, then traffic and races.
#pragma once
#include "races.h"
#include "reports.h"
#include "traffic.h"

extern "C" char __executable_start, __bss_start;

// Tables in the constant address space; threadgroup variables are in .bss.
static bool is_constant_data(const char* a) {
  return a >= &__executable_start && a < &__bss_start;
}

static Region* find_region(const char* a) {
  static size_t last = 0;
  if (last < regions.size() && regions[last].holds(a)) return &regions[last];
  for (size_t i = 0; i < regions.size(); i++)
    if (regions[i].holds(a)) return &regions[last = i];
  return nullptr;
}

static void out_of_bounds(const char* a, size_t n, bool write, uint32_t pc) {
  const char* what = write ? "write" : "read";
  const Region* r = nearest_region(a);
  if (!r) {
    report("out-of-bounds", pc, 0, format("%s of %zu bytes at %p", what, n, (void*)a));
    stop(3);
  }
  report("out-of-bounds", pc, 0,
         format("%s of %zu bytes at byte %ld of %s (size %ld)", what, n,
                long(a - r->lo), r->name.c_str(), r->size()));
  if (r->distance(a) > 4096) {  // it would leave the red zone and fault
    report("fatal", pc, 0, "stopped: wild access");
    stop(3);
  }
}

// Called for every load and store that the compiler did not remove.
static void access(char* a, size_t n, bool write, uint32_t pc, bool atomic = false) {
  if (!checking || !current) return;
  if (a >= current->stack && a < current->stack + kStackBytes) return;
  Region* r = find_region(a);
  if (!r || a + n > r->hi) {
    if (!r && !write && is_constant_data(a)) return;
    return out_of_bounds(a, n, write, pc);
  }
  if (r->kind == Kind::kInput && write) return report("write-to-input", pc, 0, r->name);
  if (r->kind != Kind::kThreadgroup) count_access(*r, a, n, write, pc);
  if (r->kind != Kind::kInput) check_bytes(*r, a, n, write, atomic, pc);
}
