// How the keys of a step are shared out: (chunk of a row's keys, kv head) is a unit, and there are about as many units as
// thread blocks. Lengths are read on the device, so a captured step replays for any.
#pragma once

#include "astrai/step/shared.cuh"

namespace astrai {

constexpr int kStepGranule = 16;                              // keys of a tensor-core step
constexpr int kChunkKeys = kStepWarps * kStepGranule;         // chunks are multiples of it: one granule a warp

/// One thread. Chunks are as long as it takes for their units not to outnumber the blocks, if rows alone do not.
__device__ __forceinline__ void plan_step(const StepParams& p, StepPlan& plan) {
  int total = 0;
  int longest = 1;
#pragma unroll 1
  for (int row = 0; row < p.rows; ++row) {
    plan.len[row] = max(p.seq_lens[row], 1);
    plan.request[row] = p.req_indices == nullptr ? row : static_cast<int>(p.req_indices[row]);
    total += (plan.len[row] + kChunkKeys - 1) / kChunkKeys;
    longest = max(longest, plan.len[row]);
  }
  const int most = max(p.rows, static_cast<int>(gridDim.x) / p.n_kv_heads);
  const auto count = [&](int row, int pieces) {
    const int len = pieces * kChunkKeys;
    return (plan.len[row] + len - 1) / len;
  };
  int pieces = max(1, total / most);
  int chunks = 0;
#pragma unroll 1
  while (true) {
    chunks = 0;
  #pragma unroll 1
  for (int row = 0; row < p.rows; ++row) chunks += count(row, pieces);
    if (chunks <= most) break;
    pieces += max(1, pieces / 8);
  }
  plan.chunk_len = pieces * kChunkKeys;
  plan.first[0] = 0;
#pragma unroll 1
  for (int row = 0; row < p.rows; ++row) plan.first[row + 1] = plan.first[row] + count(row, pieces);
  plan.units = chunks * p.n_kv_heads;
  plan.late = chunks * p.n_heads * p.head_dim * 4 <= p.late_bytes;
}

/// One unit: a chunk of a row's keys, and the query heads of a kv head.
struct StepUnit {
  int row, kv_head, begin, end, len;
  int part;   // index of the chunk among all
  int count;  // chunks of the row
  __device__ __forceinline__ StepUnit(const StepPlan& plan, const StepParams& p, int unit) {
    part = unit / p.n_kv_heads;
    kv_head = unit - part * p.n_kv_heads;
    row = 0;
#pragma unroll 1
    while (row + 1 < p.rows && plan.first[row + 1] <= part) ++row;
    count = plan.first[row + 1] - plan.first[row];
    len = plan.len[row];
    begin = (part - plan.first[row]) * plan.chunk_len;
    end = min(begin + plan.chunk_len, len);
  }
  __device__ __forceinline__ bool has_newest() const { return end == len; }
};

/// Whether the block that ends last with a row's chunks merges them.
__device__ __forceinline__ bool takes_ticket(const StepPlan& plan, const StepUnit& unit) {
  return !plan.late && unit.count > 1;
}

}  // namespace astrai
