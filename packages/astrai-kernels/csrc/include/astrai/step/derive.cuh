// What follows from the parameters of a step, and how its memory is laid out. Empty under NVRTC.
#pragma once

#include "astrai/linear/derive.cuh"
#include "astrai/step/shared.cuh"

#ifndef __CUDACC_RTC__

namespace astrai {

/// Parts of attention, in bytes for all rows, up to which every block that needs them reads them all: above, the blocks
/// together read more from L2 than the ticket costs that is saved.
constexpr int kLateBytes = 65536;

inline StepProduct step_product(int features, int depth, bool is_gated) {
  StepProduct product = {};
  product.features = features;
  product.depth = depth;
  product.steps = depth / kLinearStep;
  product.slices = linear_slices(depth);
  while (1 << product.slice_bits < product.slices) ++product.slice_bits;
  product.slice_steps = (product.steps + product.slices - 1) / product.slices;
  const int outputs = is_gated ? 8 : 16;
  product.tiles = (features + outputs - 1) / outputs;
  const int groups = kStepWarps / product.slices;
  product.units = (product.tiles + groups - 1) / groups;
  return product;
}

inline void derive(StepParams& p) {
  const int heads = p.n_heads + 2 * p.n_kv_heads;
  p.product[0] = step_product(heads * p.head_dim, p.hidden, false);
  p.product[1] = step_product(p.hidden, p.n_heads * p.head_dim, false);
  p.product[2] = step_product(p.intermediate, p.hidden, true);
  p.product[3] = step_product(p.hidden, p.intermediate, false);
  p.product[4] = step_product(p.head == nullptr ? 0 : p.head_features, p.hidden, false);
  p.group = p.n_heads > p.n_kv_heads ? p.n_heads / p.n_kv_heads : 1;
  p.group_inverse = (65536 + p.group - 1) / p.group;  // exact: head times its error stays below 65536
  const RmsNormShape shape = rms_norm_shape(p.hidden);
  p.norm_threads = shape.team ? 32 : shape.threads;  // idle lanes add zeros to the tree of a team
  if (p.late_bytes == 0) p.late_bytes = kLateBytes;
}

/// Shared memory that a kernel leaves alone: a launch with 231,808 bytes in all was refused by an H200 that says it has 232,448
/// for a block, one with 220,544 was not. The system keeps 1,024 for each block.
constexpr int kSystemBytes = 1024;

/// A layer's weights, in bytes a multiprocessor, up to which queues of kShortStages are better: what bounds such a layer is
/// its chain of waits, and the copies of longer queues are in the way of its other loads. On an H200, one row: 649 us against
/// 659 with all that fits for qwen06 (240 KB), 915 against 878 for the preset (570 KB).
constexpr int kShortLayerBytes = 384 << 10;
constexpr int kShortStages = 8;

/// Choose the length of the queues, by what `device` has room for beside StepShared, of `fixed` bytes. Returns how many bytes
/// of shared memory the kernel needs, or 0 if it cannot run.
inline int fit_step(StepParams& p, const LinearDevice& device, int fixed) {
  if (device.major != 9) return 0;
  int widest = p.hidden;
  for (const StepProduct& product : p.product) widest = product.depth > widest ? product.depth : widest;
  const int input = p.rows * widest * 2;
  const int results = kStepWarps * kStepHeads * (p.head_dim + kOutPad) * 4;
  p.scratch_bytes = input > results ? input : results;
  const int queues = step_layout(fixed, p.n_layers, p.hidden, p.scratch_bytes).queues;
  constexpr int kRowOfStages = kStepWarps * kStageBytes;  // a stage for each warp
  int fits = (device.shared_bytes - kSystemBytes - queues) / kRowOfStages;
  if (fits > kMostStages) fits = kMostStages;
  if (fits < kLeastStages) return 0;
  int64_t layer_stages = 0;
  for (int i = 0; i < kStepProducts - 1; ++i) layer_stages += static_cast<int64_t>(p.product[i].tiles) * p.product[i].steps;
  const bool is_short = layer_stages * kStageBytes <= static_cast<int64_t>(kShortLayerBytes) * device.multiprocessors;
  const int wanted = p.depth >= kLeastStages ? p.depth : is_short ? kShortStages : kMostStages;
  p.depth = wanted < fits ? wanted : fits;
  return queues + p.depth * kRowOfStages;
}

/// Lay the scratch out from `base` on, a device of `blocks` multiprocessors; returns its bytes.
inline int64_t place_workspace(StepParams& p, int blocks, char* base) {
  int64_t offset = 0;
  const auto take = [&](int64_t bytes) {
    char* const place = base + offset;
    offset += (bytes + 127) / 128 * 128;
    return place;
  };
  const int64_t rows = kStepRows;
  const int64_t units = blocks > kStepRows * p.n_kv_heads ? blocks : kStepRows * p.n_kv_heads;
  StepWorkspace& memory = p.workspace;
  memory.barrier = reinterpret_cast<uint32_t*>(take(128));
  memory.tickets = reinterpret_cast<int32_t*>(take(rows * p.n_kv_heads * 4));
  memory.after_o = take(rows * p.hidden * 2);
  memory.after_down = take(2 * rows * p.hidden * 2);
  memory.qkv = take(rows * (p.n_heads + 2 * p.n_kv_heads) * p.head_dim * 2);
  memory.attended = take(rows * p.n_heads * p.head_dim * 2);
  memory.activated = take(rows * p.intermediate * 2);
  memory.part_out = reinterpret_cast<float*>(take(units * kStepHeads * p.head_dim * 4));
  memory.part_ml = reinterpret_cast<float*>(take(units * kStepHeads * 2 * 4));
  return offset;
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
