// The kernel's memory: buffers, threadgroup variables and the threads' stacks.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include "scheduler.h"

// In the compiled kernel.
struct ThreadgroupVariable {
  char* address;
  const char* name;
  size_t bytes;
};
extern "C" {
extern ThreadgroupVariable metal_emulator_threadgroup_variables[];
extern int metal_emulator_threadgroup_count;
}

constexpr size_t kSpan = size_t(64) << 30;
static std::vector<char*> spans;

static char* reserve(size_t bytes) {
  void* m = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  return m == MAP_FAILED ? nullptr : static_cast<char*>(m);
}

// In whole pages, at least one.
static long room_for(long bytes) {
  const long page = sysconf(_SC_PAGESIZE);
  return std::max((bytes + page - 1) / page * page, page);
}

// Memory for a buffer that ends (to 16 bytes) at an unmapped page and has 32 GiB
// of unmapped addresses on either side. It is the file's, copied on write, from the
// offset (a page's) on; or unset, without a file.
static char* map_buffer(long bytes, int file, long offset, bool read_only) {
  const long room = room_for(bytes);
  char* base = reserve(kSpan);
  if (!base) return nullptr;
  spans.push_back(base);
  base += kSpan / 2;
  const int access = read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  const int how = MAP_FIXED | MAP_PRIVATE | (file < 0 ? MAP_ANONYMOUS : 0);
  if (mmap(base, room, access, how, file, offset) == MAP_FAILED) return nullptr;
  if (file < 0) memset(base, 0xff, room);
  return base + ((room - bytes) & ~15L);
}

static void add_region(char* lo, long bytes, Kind kind, const char* name,
                       bool initialised) {
  Region r{lo, lo + bytes, kind, name, initialised};
  if (checking && kind != Kind::kInput) r.cells.resize(bytes);
  if (checking && kind != Kind::kThreadgroup) r.traffic.touched.resize(bytes);
  regions.push_back(std::move(r));
}

static void add_threadgroup_variables() {
  for (int i = 0; i < metal_emulator_threadgroup_count; i++) {
    const ThreadgroupVariable& v = metal_emulator_threadgroup_variables[i];
    add_region(v.address, v.bytes, Kind::kThreadgroup, v.name, false);
  }
}

// All but the stacks, which the next job uses too.
static void release_memory() {
  for (char* span : spans) munmap(span, kSpan);
  spans.clear();
  regions.clear();
  kernel_buffers.clear();
}

// At least so many threads. Each stack lies above an unmapped page.
static bool make_threads(unsigned n) {
  const size_t page = sysconf(_SC_PAGESIZE), each = page + kStackBytes;
  if (n <= threads.size()) return true;
  const size_t more = n - threads.size();
  char* base = reserve(more * each);
  for (size_t i = 0; base && i < more; i++, base += each) {
    if (mprotect(base + page, kStackBytes, PROT_READ | PROT_WRITE)) return false;
    threads.push_back({});
    threads.back().stack = base + page;
  }
  return base;
}

static void report_unwritten() {
  for (const Region& r : regions) {
    if (r.kind != Kind::kOutput || r.initialised) continue;
    const long missing =
        std::count_if(r.cells.begin(), r.cells.end(),
                      [](const Cell& c) { return c.write_epoch == 0; });
    if (missing)
      report("unwritten-output", 0, 0,
             format("%ld of %ld bytes of %s never written", missing, r.size(),
                    r.name.c_str()));
  }
}
