// Signals: what the unmapped pages around buffers and stacks catch.
#pragma once
#include "fiber.h"
#include "reports.h"

// A return address is what report() expects: one past the instruction.
static uint32_t faulting_pc(void* context) { return fault_pc(context) + 1; }

static void on_fault(int, siginfo_t* info, void* context) {
  const char* a = static_cast<char*>(info->si_addr);
  if (current && a < current->stack && a >= current->stack - kStackBytes) {
    report("stack-overflow", faulting_pc(context), 0,
           format("a thread's variables take more than %zu bytes", kStackBytes));
    stop(4);
  }
  const Region* r = nearest_region(a);
  report("segv", faulting_pc(context), 0,
         r && r->distance(a) < (32L << 30)
             ? format("fault at byte %ld of %s (size %ld)", long(a - r->lo),
                      r->name.c_str(), r->size())
             : format("fault at %p", (void*)a));
  stop(4);
}
// -fsanitize=local-bounds has the kernel execute an illegal instruction.
static void on_trap(int, siginfo_t*, void* context) {
  report("out-of-bounds", faulting_pc(context), 0,
         "access outside an array in thread or threadgroup memory");
  stop(4);
}
static void handle(int signal, void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action{};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(signal, &action, nullptr);
}
static void catch_faults() {
  stack_t stack{};
  stack.ss_size = 1 << 16;
  stack.ss_sp = malloc(stack.ss_size);
  sigaltstack(&stack, nullptr);
  handle(SIGSEGV, on_fault);
  handle(SIGBUS, on_fault);
  handle(SIGILL, on_trap);
  handle(SIGTRAP, on_trap);
}
