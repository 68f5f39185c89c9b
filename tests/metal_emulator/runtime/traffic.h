// The traffic counters.
#pragma once
#include "state.h"

// A small dense number for each load instruction.
static uint32_t site_number(uint32_t pc) {
  constexpr uint32_t kSlots = 1 << 14;
  static uint32_t pcs[kSlots], numbers[kSlots], used = 0;
  for (uint32_t i = pc * 2654435761u >> 18;; i = (i + 1) % kSlots) {
    if (pcs[i] == pc) return numbers[i];
    if (pcs[i]) continue;
    if (used == kSlots / 2) return 0;
    pcs[i] = pc;
    return numbers[i] = ++used;
  }
}

// How often this thread has loaded at this site since the last rendezvous: lanes
// with the same site and ordinal are taken to execute one SIMD instruction.
static uint32_t load_ordinal(uint32_t site, uint32_t segment) {
  std::vector<SiteCount>& at = current->loads_at;
  if (site >= at.size()) at.resize(site + 1);
  if (at[site].segment != segment) at[site] = {segment, 0};
  return at[site].count++;
}

static uint64_t load_key(uint64_t site, uint64_t ordinal, uint64_t address) {
  uint64_t h = (site << 32 ^ ordinal) * 0x9e3779b97f4a7c15u ^ address;
  h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
  return h ^ h >> 32;
}

static void count_access(Region& r, char* a, size_t n, bool write, uint32_t pc) {
  memset(&r.traffic.touched[a - r.lo], 1, n);
  if (write) {
    r.traffic.stored += n;
    return;
  }
  SimdGroup& simd = simds[current_index / kLanes];
  uint32_t site = site_number(pc);
  uint32_t ordinal = load_ordinal(site, simd.segment);
  r.traffic.loaded += n;
  if (simd.loads.insert(load_key(site, ordinal, uintptr_t(a)))) r.traffic.merged += n;
}

static void write_traffic(FILE* f) {
  for (const Region& r : regions) {
    if (r.kind == Kind::kThreadgroup) continue;
    const Traffic& t = r.traffic;
    const long distinct = std::count(t.touched.begin(), t.touched.end(), 1);
    fprintf(f, "traffic|%s|%ld|%lu|%lu|%lu|%ld\n", r.name.c_str(), r.size(),
            (unsigned long)t.loaded, (unsigned long)t.merged, (unsigned long)t.stored,
            distinct);
  }
}
