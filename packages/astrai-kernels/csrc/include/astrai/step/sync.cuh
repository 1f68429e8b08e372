// How the threads of a step wait for one another: named barriers within a thread block, one counter across the grid.
//
// Ten warps: eight compute, the ninth ("keeper") speaks for the block at the barriers of the grid, the tenth ("feeder") asks
// for the weights (stream.cuh); two are idle. The keeper alone fences: a fence may wait for whatever its warp has under way.
//
// Across the grid: the workers' stores happen before the barrier kArrived, that before the keeper's release, that before
// another keeper's acquire, and that before its workers' loads behind kReleased. Those loads go to L2 all the same
// (ld.global.cg): what a block reads of another's results must not come from a line of L1 that is older.
//
// Progress: the launch is cooperative, so all blocks are resident; none waits for anything but arrivals that come before
// any wait of the arriving block for the same barrier. The counter only rises within a launch (arrivals of barrier i end
// at (i + 1) * blocks). Whoever ends last sets it back to zero: nobody looks at it any more, since each block counts itself
// out behind its last wait.
#pragma once

#include "astrai/common/ticket.cuh"
#include "astrai/step/params.h"

namespace astrai {

constexpr int kStepWarps = 8;
constexpr int kStepWorkers = 32 * kStepWarps;
constexpr int kStepMeeting = kStepWorkers + 32;  // workers and keeper
constexpr int kStepThreads = kStepWorkers + 128;  // registers are handed from warpgroup to warpgroup; two warps are idle

constexpr int kWorkerRegisters = 216;  // 168 each at the start
constexpr int kOtherRegisters = 72;

/// All warps of a warpgroup: give registers back, or take what others gave.
template <int kRegisters, bool kTakes>
__device__ __forceinline__ void set_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // no instruction of 9.0 without the a
  if (kTakes) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
#endif
}

enum StepBarrier : int { kWorkers = 1, kArrived = 2, kReleased = 3 };

/// Wait until `threads` threads have come to the barrier, by this function or the next.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Come to the barrier and go on; what this thread stored before is seen by those who wait there.
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void workers_sync() { barrier_sync(kWorkers, kStepWorkers); }

/// Worker: what this block had to do before the grid's next barrier (or a ticket) is done.
__device__ __forceinline__ void hand_over() { barrier_arrive(kArrived, kStepMeeting); }

/// Worker: wait until the keeper is back.
__device__ __forceinline__ void await_keeper() { barrier_sync(kReleased, kStepMeeting); }

/// Keeper: wait for the workers; let them go on.
__device__ __forceinline__ void await_workers() { barrier_sync(kArrived, kStepMeeting); }
__device__ __forceinline__ void release_workers() { barrier_arrive(kReleased, kStepMeeting); }

/// Count an arrival; everything that happened before it is seen by those who read the count by load_arrivals.
__device__ __forceinline__ void count_arrival(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ uint32_t load_arrivals(const uint32_t* counter) {
  uint32_t count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

/// Keeper, all lanes: meet the keepers of all `blocks` blocks; `arrivals` counts up from barrier to barrier.
__device__ __forceinline__ void grid_barrier(uint32_t* counter, uint32_t blocks, uint32_t& arrivals) {
  arrivals += blocks;
  if (threadIdx.x % 32 == 0) {
    count_arrival(counter);
    while (load_arrivals(counter) < arrivals) {
    }
  }
  __syncwarp();
}

/// Keeper, one lane, behind the last barrier: the last block leaves the counters as it found them.
__device__ __forceinline__ void leave_grid(uint32_t* counter, int blocks) {
  if (take_ticket(reinterpret_cast<int*>(counter) + 1) == blocks - 1) counter[0] = counter[1] = 0;
}

}  // namespace astrai
