// Races and reads of unset memory, from the epochs of each byte's last accesses.
#pragma once
#include "reports.h"

// The epochs an access is made in.
struct Now {
  bool local;  // threadgroup memory
  uint32_t epoch, simd_epoch;
  uint16_t thread;
};
static Now now_for(const Region& r) {
  bool local = r.kind == Kind::kThreadgroup;
  const SimdGroup& s = simds[current_index / kLanes];
  return {local, local ? threadgroup_epoch : device_epoch,
          local ? s.threadgroup_epoch : s.device_epoch, uint16_t(current_index)};
}

// Is an earlier access, made in those epochs, not ordered before this one?
static bool concurrent(const Now& now, uint32_t epoch, uint32_t simd_epoch,
                       uint16_t thread, uint32_t group) {
  if (!now.local && group != group_id) return true;
  if (thread == now.thread || epoch != now.epoch) return false;
  return thread / kLanes != now.thread / kLanes || simd_epoch == now.simd_epoch;
}

static void conflict(const Region& r, long byte, bool write, const char* with,
                     uint16_t thread, uint32_t group, uint32_t pc, uint32_t other_pc) {
  report("race", pc, other_pc,
         format("%s of %s byte %ld conflicts with %s by thread %d of group #%u "
                "with no barrier between",
                write ? "write" : "read", r.name.c_str(), byte, with, thread, group));
}

static bool was_written(const Now& now, const Cell& c) {
  return now.local ? c.write_epoch >= group_start : c.write_epoch != 0;
}
static bool was_read(const Now& now, const Cell& c) {
  return now.local ? c.read_epoch >= group_start : c.read_epoch != 0;
}

static void check_against_write(const Now& now, const Region& r, const Cell& c,
                                long byte, bool write, bool atomic, uint32_t pc) {
  if (!was_written(now, c) || ((c.flags & kWriteAtomic) && atomic)) return;
  if (concurrent(now, c.write_epoch, c.write_simd_epoch, c.write_thread, c.write_group))
    conflict(r, byte, write, "write", c.write_thread, c.write_group, pc, c.write_pc);
}

static void check_against_reads(const Now& now, const Region& r, const Cell& c,
                                long byte, bool atomic, uint32_t pc) {
  if (!was_read(now, c) || ((c.flags & kReadAtomic) && atomic)) return;
  bool same_epoch =
      c.read_epoch == now.epoch && (now.local || c.read_group == group_id);
  bool same_simd = c.read_thread / kLanes == now.thread / kLanes;
  bool many_lanes =
      (c.flags & kReadByManyLanes) && same_simd && c.read_simd_epoch == now.simd_epoch;
  bool bad =
      concurrent(now, c.read_epoch, c.read_simd_epoch, c.read_thread, c.read_group) ||
      (same_epoch && ((c.flags & kReadByManySimds) || many_lanes)) ||
      (!now.local && (c.flags & kReadByManyGroups));
  if (bad) conflict(r, byte, true, "read", c.read_thread, c.read_group, pc, c.read_pc);
}

static void note_write(const Now& now, Cell& c, bool atomic, uint32_t pc) {
  c.write_epoch = now.epoch;
  c.write_simd_epoch = now.simd_epoch;
  c.write_pc = pc;
  c.write_thread = now.thread;
  c.write_group = group_id;
  c.flags = (c.flags & ~kWriteAtomic) | (atomic ? kWriteAtomic : 0);
}

static void note_read(const Now& now, Cell& c, bool atomic, uint32_t pc) {
  if (c.read_epoch && c.read_group != group_id) c.flags |= kReadByManyGroups;
  if (c.read_epoch == now.epoch && c.read_group == group_id) {
    if (c.read_thread / kLanes != now.thread / kLanes) c.flags |= kReadByManySimds;
    else if (c.read_simd_epoch != now.simd_epoch) c.flags &= ~kReadByManyLanes;
    else if (c.read_thread != now.thread) c.flags |= kReadByManyLanes;
  } else {
    c.flags &= ~(kReadByManySimds | kReadByManyLanes);
  }
  c.read_epoch = now.epoch;
  c.read_simd_epoch = now.simd_epoch;
  c.read_pc = pc;
  c.read_thread = now.thread;
  c.read_group = group_id;
  c.flags = (c.flags & ~kReadAtomic) | (atomic ? kReadAtomic : 0);
}

static void check_bytes(Region& r, char* a, size_t n, bool write, bool atomic,
                        uint32_t pc) {
  const Now now = now_for(r);
  for (long byte = a - r.lo; byte < a - r.lo + long(n); byte++) {
    Cell& c = r.cells[byte];
    check_against_write(now, r, c, byte, write, atomic, pc);
    if (write) {
      check_against_reads(now, r, c, byte, atomic, pc);
      note_write(now, c, atomic, pc);
    } else {
      if (!was_written(now, c) && !r.initialised)
        report("uninitialised-read", pc, 0,
               format("%s byte %ld", r.name.c_str(), byte));
      note_read(now, c, atomic, pc);
    }
  }
}
