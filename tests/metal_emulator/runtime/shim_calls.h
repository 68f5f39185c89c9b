// The runtime's side of the shim's barriers, SIMD functions and atomics.
#pragma once
#include "accesses.h"
#include "fiber.h"

static void* scheduler_sp;

// The caller's address: executables are linked below 4 GiB (-no-pie).
#define CALLER() (uint32_t(uintptr_t(__builtin_return_address(0))))

static void wait_at(State state, uint32_t site) {
  current->state = state;
  current->site = site;
  metal_emulator_switch(&current->sp, scheduler_sp);
}
static int next_turn() {
  int turn = current->turn;
  current->turn = (turn + 1) & 3;
  return turn;
}

extern "C" {
__attribute__((noinline)) void metal_emulator_barrier(int flags) {
  current->flags = flags;
  wait_at(State::kAtBarrier, CALLER());
}
__attribute__((noinline)) void metal_emulator_simd_barrier(int flags) {
  next_turn();
  current->flags = flags | kSimdOnly;
  wait_at(State::kAtSimdOp, CALLER());
}
__attribute__((noinline)) char* metal_emulator_exchange(const void* value, int bytes,
                                                        uint32_t* mask, int* lane) {
  SimdGroup& simd = simds[current_index / kLanes];
  const int turn = next_turn();
  *lane = current_index % kLanes;
  memcpy(simd.slot[turn][*lane], value, bytes);
  current->flags = 0;
  wait_at(State::kAtSimdOp, CALLER());
  *mask = simd.mask[turn];
  return simd.slot[turn][0];
}
int metal_emulator_lane() { return current_index % kLanes; }
void metal_emulator_bad_lane(int lane) {
  report("inactive-lane", CALLER(), 0,
         format("a shuffle reads lane %d, which is not active", lane));
}
void metal_emulator_nonfinite(float x) {
  report("fast-math-nonfinite", CALLER(), 0,
         format("fast:: function of %g is undefined", double(x)));
}
void metal_emulator_atomic(void* p, int bytes, int kinds) {
  uint32_t pc = CALLER();
  if (kinds & 1) access(static_cast<char*>(p), bytes, false, pc, true);
  if (kinds & 2) access(static_cast<char*>(p), bytes, true, pc, true);
}
}  // extern "C"
