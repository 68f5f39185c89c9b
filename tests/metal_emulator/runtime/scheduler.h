// Runs the grid, thread by thread on fibers: which thread goes on, and when barriers
// and SIMD functions let it.
#pragma once
#include <random>

#include "shim_calls.h"

static std::vector<void*> kernel_buffers;

extern "C" void metal_emulator_call(void** buffers, const EmulatorIds* ids);

static void thread_main() {
  // Copies on this thread's stack, where accesses are not checked.
  const EmulatorIds ids = current->ids;
  void* buffers[kMaxBuffers];
  std::copy(kernel_buffers.begin(), kernel_buffers.end(), buffers);
  metal_emulator_call(buffers, &ids);
  current->state = State::kDone;
  metal_emulator_switch(&current->sp, scheduler_sp);
  abort();
}

static void start_group(int n) {
  group_start = ++threadgroup_epoch;
  ++device_epoch;
  ++group_id;
  for (Region& r : regions)
    if (r.kind == Kind::kThreadgroup) memset(r.lo, 0xff, r.size());
  for (SimdGroup& s : simds) {
    s.threadgroup_epoch = s.device_epoch = 0;
    s.next_segment();
  }
  for (int i = 0; i < n; i++) {
    Thread& t = threads[i];
    t.state = State::kReady;
    t.turn = 0;
    t.sp = fresh_stack(t.stack + kStackBytes, thread_main);
  }
}

static void run_ready(const std::vector<int>& order) {
  for (int i : order) {
    if (threads[i].state != State::kReady) continue;
    current = &threads[i];
    current_index = i;
    metal_emulator_switch(&scheduler_sp, threads[i].sp);
  }
  current = nullptr;
}

static void stop_group(const char* kind, int at, const std::string& message) {
  current = &threads[at];
  current_index = at;
  report(kind, current->site, 0, message);
  current = nullptr;
  fatal = true;
}

static bool same_place(const Thread& a, const Thread& b) {
  return a.site == b.site && a.flags == b.flags;
}

// Lets the lanes of one SIMD group go on that wait at a SIMD operation.
static bool release_simdgroup(int first, int last) {
  SimdGroup& simd = simds[first / kLanes];
  uint32_t mask = 0;
  int leader = -1;
  bool mixed = false, others = false;
  for (int i = first; i < last; i++) {
    if (threads[i].state == State::kAtBarrier) others = true;
    if (threads[i].state != State::kAtSimdOp) continue;
    mask |= 1u << (i - first);
    if (leader < 0) leader = i;
    mixed = mixed || !same_place(threads[i], threads[leader]);
  }
  if (leader < 0) return false;
  if (mixed || others) {
    stop_group("simd-divergence", leader,
               mixed ? "lanes of one SIMD group wait at different SIMD operations"
                     : "some lanes wait at a SIMD operation, others at a barrier");
    return false;
  }
  const int flags = threads[leader].flags;
  if (flags & kThreadgroup) simd.threadgroup_epoch++;
  if (flags & kDevice) simd.device_epoch++;
  simd.mask[(threads[leader].turn + 3) & 3] = mask;
  simd.next_segment();
  for (int i = first; i < last; i++)
    if (threads[i].state == State::kAtSimdOp) threads[i].state = State::kReady;
  return true;
}

// All threads must wait at one and the same threadgroup barrier.
static void release_threadgroup(int n, int done) {
  int leader = -1, waiting = 0;
  bool mixed = false;
  for (int i = 0; i < n; i++) {
    if (threads[i].state != State::kAtBarrier) continue;
    waiting++;
    if (leader < 0) leader = i;
    mixed = mixed || threads[i].site != threads[leader].site;
  }
  if (waiting != n || mixed) {
    stop_group("barrier-divergence", leader,
               mixed ? "threads wait at different threadgroup barriers"
                     : format("%d of %d threads reach the barrier, %d have returned",
                              waiting, n, done));
    return;
  }
  if (threads[leader].flags & kThreadgroup) threadgroup_epoch++;
  if (threads[leader].flags & kDevice) device_epoch++;
  for (int i = 0; i < n; i++) threads[i].state = State::kReady;
  for (SimdGroup& s : simds) s.next_segment();
}

enum Order { kForward, kReversed, kShuffled };

static void run_group(int n, Order how, std::mt19937& random) {
  std::vector<int> order(n);
  for (int i = 0; i < n; i++) order[i] = how == kReversed ? n - 1 - i : i;
  start_group(n);
  while (!fatal) {
    if (how == kShuffled) std::shuffle(order.begin(), order.end(), random);
    run_ready(order);
    bool released = false;
    for (int first = 0; first < n && !fatal; first += kLanes)
      released |= release_simdgroup(first, std::min(n, first + kLanes));
    if (released || fatal) continue;
    int done = 0;
    for (int i = 0; i < n; i++) done += threads[i].state == State::kDone;
    if (done == n) return;
    release_threadgroup(n, done);
  }
}

// One dispatch: the grid and the threadgroup, in threads, and the order.
struct Dispatch {
  unsigned grid[3], group[3];
  Order order;
  unsigned seed;
};

static unsigned product(const unsigned* v) { return v[0] * v[1] * v[2]; }
static void unflatten(unsigned i, const unsigned* extent, unsigned* out) {
  out[0] = i % extent[0];
  out[1] = i / extent[0] % extent[1];
  out[2] = i / extent[0] / extent[1];
}

// Fills in the ids of a group's threads; returns how many there are.
static int place_group(const Dispatch& d, const unsigned* groups, unsigned number) {
  unsigned at[3], size[3];
  unflatten(number, groups, at);
  for (int i = 0; i < 3; i++)
    size[i] = std::min(d.group[i], d.grid[i] - at[i] * d.group[i]);
  const unsigned n = product(size);
  for (unsigned k = 0; k < n; k++) {
    EmulatorIds& ids = threads[k].ids;
    unflatten(k, size, ids.position_in_group);
    for (int i = 0; i < 3; i++) {
      ids.position_in_grid[i] = at[i] * d.group[i] + ids.position_in_group[i];
      ids.group_in_grid[i] = at[i];
      ids.group_size[i] = size[i];
      ids.dispatched_group_size[i] = d.group[i];
      ids.grid_size[i] = d.grid[i];
      ids.groups[i] = groups[i];
    }
    ids.index = k;
    ids.lane = k % kLanes;
    ids.simd = k / kLanes;
    ids.simds = (n + kLanes - 1) / kLanes;
  }
  return n;
}

static void run_grid(const Dispatch& d) {
  const Order how = d.order;
  unsigned groups[3];
  for (int i = 0; i < 3; i++) groups[i] = (d.grid[i] + d.group[i] - 1) / d.group[i];
  std::mt19937 random(d.seed);
  std::vector<unsigned> order(product(groups));
  for (unsigned i = 0; i < order.size(); i++) order[i] = i;
  if (how == kReversed) std::reverse(order.begin(), order.end());
  if (how == kShuffled) std::shuffle(order.begin(), order.end(), random);
  for (unsigned number : order) {
    run_group(place_group(d, groups, number), how, random);
    if (fatal) return;
  }
}
