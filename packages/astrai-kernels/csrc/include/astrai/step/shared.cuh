// The shared memory of a block of the step kernel.
#pragma once

#include "astrai/common/bulk.cuh"
#include "astrai/linear/fragments.cuh"
#include "astrai/step/sync.cuh"

namespace astrai {

constexpr int kSumsPitch = 20;                     // floats of a row of sums; stores and vector loads have no conflicts
constexpr int kSums = kStepRows * kSumsPitch;      // of one warp
constexpr int kHeadRows = kStepHeads + 2;          // the query heads of a kv head, its new key, its new value
constexpr int kOutPad = 4;                         // floats between rows of attention's result
constexpr int kStageBytes = 16 * kStepBytes;       // of a queue: 16 weight rows, 64 k
constexpr int kSwizzleBytes = 1024;                // what the copy engine permutes starts at multiples of it

/// How the keys of a step are cut into chunks; the same in all blocks and layers.
struct StepPlan {
  int len[kStepRows];        // keys of each row
  int request[kStepRows];    // its row of req_to_token
  int first[kStepRows + 1];  // first chunk of each row
  int chunk_len;
  int units;  // chunks times kv heads
  bool late;  // parts are merged by whoever needs them, and not by the block that ends last
};

template <int kDim>
struct StepShared {
  uint64_t full[kStepWarps][kMostStages];   // barriers: a stage has come
  uint64_t empty[kStepWarps][kMostStages];  // it has been read
  float sums[2][kStepWarps][kSums];
  alignas(16) float squares[kStepRows][32];
  float angles[kStepRows][kDim];               // cosines of a row's position, then sines
  uint4 heads[kHeadRows][kDim / kOctet];       // as attention multiplies them
  uint4 head_norms[2][kDim / kOctet];          // weights of the norms of q and k
  float ml[kStepWarps][kStepHeads][2];         // of each warp's keys
  int2 first_slots[kStepWorkers];              // of each thread's first keys; see AttendWarp
  StepPlan plan;
  int is_last;  // this block merges
};

__host__ __device__ constexpr int step_pad(int bytes, int unit = 128) { return (bytes + unit - 1) / unit * unit; }

/// Shared memory, all of it dynamic: StepShared, the table of layers, the weight of the coming norm, scratch, and the queues.
struct StepLayout {
  int layers, norm_weight, scratch, queues;  // offsets in bytes
};

__host__ __device__ constexpr StepLayout step_layout(int fixed_bytes, int n_layers, int hidden, int scratch_bytes) {
  const int layers = step_pad(fixed_bytes);
  const int norm_weight = layers + step_pad(n_layers * static_cast<int>(sizeof(StepLayer)));
  const int scratch = norm_weight + step_pad(hidden * 2);
  return {layers, norm_weight, scratch, step_pad(scratch + scratch_bytes, kSwizzleBytes)};
}

/// Floats between the results of two warps in scratch.
template <int kDim>
__host__ __device__ constexpr int out_floats() {
  return kStepHeads * (kDim + kOutPad);
}

}  // namespace astrai
