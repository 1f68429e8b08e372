// The planner: one thread block that cuts the requests' keys into chunks, once a step, from lengths it reads on the device.
//
// Grid and workspace of the attention kernels come from capacity, so a captured graph replays for any lengths; what
// changes is the plan. Work is `units` thread blocks per chunk, `workers` run at once, and a block takes every
// workers-th unit: the planner tries chunk lengths and keeps the one whose rounds are estimated to end first.
#pragma once

#include "astrai/attention/params.h"
#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"

namespace astrai {

constexpr int kPlanThreads = 1024;
constexpr int kCandidates = 32;
constexpr int kChunkAlign = 64;  // keys; chunks of a request begin at multiples
/// Cost of a unit besides its keys, and of merging one more chunk of a request, in keys' worth of time. Fitted on an H200.
constexpr float kUnitCost = 192.0f;
constexpr float kMergeCost = 8.0f;

/// Candidate lengths rise by about a fifth: 64, 80, 96, 112, 128, 160, ... The last one never splits.
__device__ __forceinline__ int candidate_len(int index) {
  return index == kCandidates - 1 ? 0x40000000 : (16 << (index / 4)) * (4 + index % 4);
}

/// Keys that some query row of the request sees: [low, len).
__device__ __forceinline__ int first_key(const AttentionPlanParams& p, int len) {
  const int low = p.window ? len - p.q_len + 1 - p.window : 0;
  return low > 0 ? low : 0;
}

/// How many chunks of at most `limit` keys, and how long each is. With fixed lengths, chunks begin at their multiples.
struct Cut {
  int count, len, begin;
};
__device__ __forceinline__ Cut cut(const AttentionPlanParams& p, int len, int limit) {
  int low = first_key(p, len);
  if (p.fixed_len) {
    low = low / p.fixed_len * p.fixed_len;
    return {max((len - low + p.fixed_len - 1) / p.fixed_len, 1), p.fixed_len, low};
  }
  const int keys = max(len - low, 1);
  const int wanted = (keys - 1) / limit + 1;
  const int each = ((keys - 1) / wanted / kChunkAlign + 1) * kChunkAlign;
  return {(keys - 1) / each + 1, each, low};
}

__device__ __forceinline__ int warp_sum(int value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}
__device__ __forceinline__ int warp_max(int value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

/// The attention kernels read the plan before they wait, so nobody is let in before it is written. With `overlap`, the
/// caller's word that lengths and rows are older than the kernel ahead, which has waited before it let this one in, the
/// planner works beside that kernel and waits for it at the end, for those behind; what it wrote is then past its caches.
__global__ void __launch_bounds__(kPlanThreads, 1) plan_kernel(const AttentionPlanParams p) {
  __shared__ float cost[kCandidates];
  __shared__ int totals[kCandidates + 1];
  __shared__ int chosen;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  if (!p.overlap) pdl_wait();

  if (p.fixed_len == 0) {
    // One candidate a warp.
    const int limit = candidate_len(warp);
    int chunks = 0;
    int longest = 0;
    int most = 0;
    for (int i = lane; i < p.batch; i += 32) {
      const Cut c = cut(p, p.seq_lens[i], limit);
      chunks += c.count;
      longest = max(longest, min(c.len, p.seq_lens[i]));
      most = max(most, c.count);
    }
    chunks = warp_sum(chunks);
    longest = warp_max(longest);
    most = warp_max(most);
    if (lane == 0) {
      const float rounds = ceilf(static_cast<float>(chunks) * static_cast<float>(p.units) / static_cast<float>(p.workers));
      const bool fits = chunks <= p.max_chunks;
      cost[warp] = fits ? rounds * (static_cast<float>(longest) + kUnitCost) +
                              static_cast<float>(most - 1) * kMergeCost
                        : 3e38f;
    }
    __syncthreads();
    if (warp == 0) {
      float best = cost[lane];
      int index = lane;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, best, offset);
        const int other_index = __shfl_xor_sync(0xffffffffu, index, offset);
        if (other < best || (other == best && other_index > index)) {
          best = other;
          index = other_index;
        }
      }
      if (lane == 0) chosen = candidate_len(index);
    }
    __syncthreads();
  }
  const int limit = p.fixed_len ? p.fixed_len : chosen;

  // Chunks in the order of the requests: a running sum over batches of 1,024.
  int base = 0;
  for (int first = 0; first < p.batch; first += kPlanThreads) {
    const int i = first + thread;
    const int len = i < p.batch ? p.seq_lens[i] : 0;
    const Cut c = i < p.batch ? cut(p, len, limit) : Cut{0, 0, 0};
    int inclusive = c.count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, inclusive, offset);
      if (lane >= offset) inclusive += below;
    }
    if (lane == 31) totals[warp] = inclusive;
    __syncthreads();
    if (warp == 0) {
      const int own = totals[lane];
      int sum = own;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += below;
      }
      totals[lane] = sum - own;
      if (lane == 31) totals[32] = sum;
    }
    __syncthreads();
    const int start = base + totals[warp] + inclusive - c.count;
    base += totals[32];
    for (int j = 0; j < c.count && start + j < p.max_chunks; ++j) {
      AttentionChunk chunk = {};
      chunk.request = i;
      chunk.table_row = p.req_indices ? static_cast<int>(p.req_indices[i]) : i;
      chunk.begin = c.begin + j * c.len;
      chunk.end = min(len, chunk.begin + c.len);
      chunk.seq_len = len;
      chunk.first = start;
      chunk.count = c.count;
      p.chunks[start + j] = chunk;
    }
    __syncthreads();  // `totals` is free again
  }
  if (thread == 0) {
    p.plan->n_chunks = base <= p.max_chunks ? base : -1;
    p.plan->chunk_len = limit;
  }
  if (p.overlap) {
    __threadfence();
    pdl_wait();
  }
}

#ifndef __CUDACC_RTC__

inline cudaError_t plan(const AttentionPlanParams& params, cudaStream_t stream) {
  return launch(plan_kernel, dim3(1), dim3(kPlanThreads), 0, stream, params);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
