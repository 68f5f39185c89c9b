// Switching between the stacks of emulated threads. x86-64 is tested; aarch64
// is written from the ABI and has only been assembled.
#pragma once
#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>

// Saves the callee-saved registers, stores the stack pointer in *from and
// resumes `to`.
extern "C" void metal_emulator_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.globl metal_emulator_switch
metal_emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
static void* fresh_stack(char* top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(top - 64);
  *--sp = nullptr;  // entry's return address
  *--sp = reinterpret_cast<void*>(entry);
  sp -= 6;
  memset(sp, 0, 6 * sizeof *sp);
  return sp;
}
static uintptr_t fault_pc(void* context) {
  return static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
}

#elif defined(__aarch64__)
asm(R"(
.globl metal_emulator_switch
metal_emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
static void* fresh_stack(char* top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(top - 64 - 160);
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<void*>(entry);  // x30
  return sp;
}
static uintptr_t fault_pc(void* context) {
  return static_cast<ucontext_t*>(context)->uc_mcontext.pc;
}
#else
#error "metal_emulator runs on x86-64 and aarch64 Linux only"
#endif
