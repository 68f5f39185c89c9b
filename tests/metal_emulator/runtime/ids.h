// What one thread knows about itself; shared by the kernel and the runtime.
#pragma once
struct EmulatorIds {
  unsigned position_in_grid[3];
  unsigned position_in_group[3];
  unsigned group_in_grid[3];
  unsigned group_size[3];  // smaller at the ragged edge of the grid
  unsigned dispatched_group_size[3];
  unsigned grid_size[3];
  unsigned groups[3];
  unsigned index, lane, simd, simds;
};
