// Tickets: how the block that finishes last finds out that it does.
#pragma once

namespace astrai {

/// Add one to a counter, ordering everything before it in this thread's causality before everything behind it.
__device__ __forceinline__ int take_ticket(int* counter) {
  int ticket;
  asm volatile("atom.add.acq_rel.gpu.s32 %0, [%1], 1;" : "=r"(ticket) : "l"(counter) : "memory");
  return ticket;
}

}  // namespace astrai
