// Host runtime of one compiled kernel: runs the grid thread by thread on fibers,
// with barriers and SIMD-group rendezvous, and answers the compiler's callbacks.
//
//   run                           runs jobs, one for each line of its input
//   run --threadgroup-bytes       prints the size of all threadgroup variables
//
// The line: "JOB RESULTS check|fast ORDER SEED SECONDS". The answer: a new line; but if
// the job has reports or breaks off, the process ends instead (status 2, or another).
// A process checks one job, or runs any number in mode fast.
// JOB: a line "grid (3) threadgroup (3) number of buffers"; a line "name bytes
// is-output is-filled" for each buffer; from the next page on, in whole pages, the
// bytes of each filled one. RESULTS: a line "results", one for each report and each
// buffer's traffic, a line "output", the outputs' bytes. SECONDS: of processor time,
// then the process dies.
#include <sys/time.h>

#include "faults.h"
#include "memory.h"
#include "sanitizers.h"
#include "scheduler.h"

static std::string line_of(FILE* f) {
  char text[512];
  return fgets(text, sizeof text, f) ? text : "";
}

static bool read_buffers(FILE* job, int count) {
  struct Entry {
    char name[128];
    long bytes;
    int output, fill;
  };
  if (count > kMaxBuffers) return false;
  std::vector<Entry> entries(count);
  for (Entry& e : entries)
    if (sscanf(line_of(job).c_str(), "%127s %ld %d %d", e.name, &e.bytes, &e.output,
               &e.fill) != 4)
      return false;
  const long page = sysconf(_SC_PAGESIZE);
  long offset = (ftell(job) + page - 1) / page * page;
  for (const Entry& e : entries) {
    char* p = map_buffer(e.bytes, e.fill ? fileno(job) : -1, offset, !e.output);
    if (!p) return false;
    if (e.fill) offset += room_for(e.bytes);
    add_region(p, e.bytes, e.output ? Kind::kOutput : Kind::kInput, e.name, e.fill);
    kernel_buffers.push_back(p);
  }
  return true;
}

static bool read_job(FILE* job, Dispatch& d) {
  unsigned *g = d.grid, *t = d.group;
  int buffers;
  if (!job || sscanf(line_of(job).c_str(), "%u %u %u %u %u %u %d", g, g + 1, g + 2, t,
                     t + 1, t + 2, &buffers) != 7)
    return false;
  for (int i = 0; i < 3; i++) t[i] = std::min(t[i], g[i]);  // as MLX does
  add_threadgroup_variables();
  return read_buffers(job, buffers) && make_threads(product(t));
}

static void limit_time(double seconds) {
  itimerval timer{};
  timer.it_value.tv_sec = long(seconds);
  timer.it_value.tv_usec = long((seconds - double(long(seconds))) * 1e6);
  setitimer(ITIMER_PROF, &timer, nullptr);  // SIGPROF ends the process
}

static int print_threadgroup_bytes() {
  size_t sum = 0;
  for (int i = 0; i < metal_emulator_threadgroup_count; i++)
    sum += metal_emulator_threadgroup_variables[i].bytes;
  printf("%zu\n", sum);
  return 0;
}

// The exit status: 0, or 2 with reports.
static int run_job(const char* job, const char* results_path, Dispatch dispatch,
                   double seconds) {
  limit_time(seconds);
  results = fopen(results_path, "w");
  FILE* in = fopen(job, "rb");
  if (!in || !results) return 9;
  fputs("results\n", results);
  if (!read_job(in, dispatch)) return 9;
  fclose(in);

  run_grid(dispatch);

  if (checking && !fatal) report_unwritten();
  if (checking) write_traffic(results);
  fputs("output\n", results);
  for (const Region& r : regions)
    if (r.kind == Kind::kOutput) fwrite(r.lo, 1, r.size(), results);
  if (fclose(results)) return 9;
  limit_time(0);
  release_memory();
  return reports ? 2 : 0;
}

int main(int argc, char**) {
  if (argc != 1) return print_threadgroup_bytes();
  catch_faults();
  char line[512], job[128], results_path[128], mode[8];
  while (fgets(line, sizeof line, stdin)) {
    Dispatch dispatch;
    double seconds;
    int order;
    if (sscanf(line, "%127s %127s %7s %d %u %lf", job, results_path, mode, &order,
               &dispatch.seed, &seconds) != 6)
      return 9;
    dispatch.order = Order(order);
    checking = mode == std::string("check");
    if (int status = run_job(job, results_path, dispatch, seconds)) return status;
    putchar('\n');
    fflush(stdout);
  }
  return 0;
}
