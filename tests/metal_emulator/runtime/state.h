// What the parts of the runtime share: threads, SIMD groups and memory. One host
// thread runs everything, so nothing is locked.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ids.h"

constexpr int kLanes = 32;
constexpr int kMaxSimds = 32;  // 1,024 threads
constexpr size_t kStackBytes = 128 << 10;
constexpr int kMaxBuffers = 128;

enum MemFlags { kDevice = 1, kThreadgroup = 2, kSimdOnly = 0x100 };
enum class State : uint8_t { kReady, kAtBarrier, kAtSimdOp, kDone };

struct SiteCount {
  uint32_t segment = 0, count = 0;
};
struct Thread {
  void* sp;
  char* stack;
  State state;
  uint32_t site;  // where it waits
  int flags;      // MemFlags of the barrier it waits at
  int turn;       // which exchange slot is next
  EmulatorIds ids;
  std::vector<SiteCount> loads_at;  // traffic: loads by site, this segment
};

// A set of 64-bit keys that is cheap to clear.
class KeySet {
 public:
  bool insert(uint64_t key) {  // false: it was there
    if (2 * ++used_ > slots_.size()) grow();
    return place(key);
  }
  void clear() {
    ++generation_;
    used_ = 0;
  }

 private:
  struct Slot {
    uint64_t key = 0;
    uint32_t generation = 0;
  };
  bool place(uint64_t key) {
    size_t mask = slots_.size() - 1;
    for (size_t i = key & mask;; i = (i + 1) & mask) {
      Slot& s = slots_[i];
      if (s.generation != generation_) {
        s = {key, generation_};
        return true;
      }
      if (s.key == key) {
        --used_;
        return false;
      }
    }
  }
  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    for (const Slot& s : old)
      if (s.generation == generation_) place(s.key);
  }
  std::vector<Slot> slots_ = std::vector<Slot>(64);
  size_t used_ = 0;
  uint32_t generation_ = 1;
};

struct SimdGroup {
  // Raised by simdgroup_barrier with the flag in question.
  uint32_t threadgroup_epoch = 0, device_epoch = 0;
  // Traffic: a segment is what lies between two rendezvous of the lanes.
  uint32_t segment = 1;
  KeySet loads;
  // Exchange slots; three may be in use at once, see simd_shuffle_and_fill_up.
  uint32_t mask[4];
  alignas(64) char slot[4][kLanes][64];

  void next_segment() {
    ++segment;
    loads.clear();
  }
};

// Shadow of one byte: its last write and its last read.
struct Cell {
  uint32_t write_epoch, write_simd_epoch, write_pc, write_group;
  uint32_t read_epoch, read_simd_epoch, read_pc, read_group;
  uint16_t write_thread, read_thread;
  uint8_t flags;
};
enum CellFlags {
  kReadByManySimds = 1,  // in this epoch
  kReadByManyLanes = 2,  // of one SIMD group, in this SIMD epoch
  kWriteAtomic = 4,
  kReadAtomic = 8,
  kReadByManyGroups = 16,
};

struct Traffic {
  uint64_t loaded = 0, merged = 0, stored = 0;
  std::vector<uint8_t> touched;  // 1 for each byte loaded or stored
};

enum class Kind { kInput, kOutput, kThreadgroup };
struct Region {
  char *lo, *hi;
  Kind kind;
  std::string name;
  bool initialised = false;
  std::vector<Cell> cells = {};
  Traffic traffic = {};

  bool holds(const char* a) const { return a >= lo && a < hi; }
  long size() const { return hi - lo; }
  long distance(const char* a) const { return a < lo ? lo - a : a < hi ? 0 : a - hi; }
};

static bool checking = true;  // or only running, in mode "fast"
static std::vector<Thread> threads;
static SimdGroup simds[kMaxSimds];
static std::vector<Region> regions;
static Thread* current = nullptr;
static int current_index = 0;
// Epochs are raised by threadgroup_barrier with the flag in question and at the
// start of each threadgroup.
static uint32_t threadgroup_epoch = 1, device_epoch = 1, group_start = 1, group_id = 0;

static Region* nearest_region(const char* a) {
  Region* best = nullptr;
  for (Region& r : regions)
    if (!best || r.distance(a) < best->distance(a)) best = &r;
  return best;
}
