// Reports: lines "report|kind|pc|other pc|message" in the results.
#pragma once
#include <unistd.h>

#include <functional>

#include "state.h"

constexpr int kMaxReports = 50;

static FILE* results;
static int reports = 0;
static bool fatal = false;

template <class... A>
static std::string format(const char* f, A... a) {
  char text[512];
  snprintf(text, sizeof text, f, a...);
  return text;
}

// Each place is reported once for each kind; what has no place, for each message.
static bool is_new(const char* kind, uint32_t pc, uint32_t other_pc,
                   const std::string& message) {
  static std::vector<uint64_t> reported;
  const std::string what = pc ? kind : kind + message;
  const uint64_t key = (uint64_t(pc) << 32 | other_pc) ^ std::hash<std::string>{}(what);
  if (std::find(reported.begin(), reported.end(), key) != reported.end()) return false;
  reported.push_back(key);
  return true;
}

static void report(const char* kind, uint32_t pc, uint32_t other_pc,
                   const std::string& message) {
  if (!is_new(kind, pc, other_pc, message) || ++reports > kMaxReports) return;
  std::string who;
  if (current) {
    const unsigned* g = current->ids.group_in_grid;
    who = format("group(%u,%u,%u) thread %d: ", g[0], g[1], g[2], current_index);
  }
  fprintf(results, "report|%s|%x|%x|%s%s\n", kind, pc, other_pc, who.c_str(),
          message.c_str());
  fflush(results);
}

[[noreturn]] static void stop(int status) {
  fflush(results);
  _exit(status);
}
