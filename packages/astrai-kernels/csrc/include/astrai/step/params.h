// Arguments of a whole decode step in one kernel: plain C++, filled by the bindings and passed to the kernel as they are.
// Strides count elements. See step/step.cuh.
#pragma once

#include "astrai/common/dtype.h"

namespace astrai {

constexpr int kStepRows = 8;        // most query rows, one a request
constexpr int kStepHeads = 8;       // most query heads of a kv head
constexpr int kStepProducts = 5;    // qkv, o, gate and up, down, head
constexpr int kMostStages = 12;     // of a warp's queue
constexpr int kLeastStages = 3;

struct TensorMap;  // common/bulk.cuh

/// What differs from layer to layer; a table of these lies in device memory.
struct alignas(16) StepLayer {
  const void* input_norm;  // [hidden]
  const void* qkv;         // [(n_heads + 2 n_kv_heads) * head_dim, hidden]
  const void* qkv_bias;    // null: none
  const void* q_norm;      // [head_dim]; null: q and k are not normed
  const void* k_norm;
  const void* o;       // [hidden, n_heads * head_dim]
  const void* o_bias;  // null: none
  const void* post_norm;
  const void* gate_up;  // [2 * intermediate, hidden]
  const void* down;     // [hidden, intermediate]
  void* k_buffer;       // [pool_size, n_kv_heads, head_dim]
  void* v_buffer;
};

/// One projection, in the terms of linear's reduction contract (linear/derive.cuh).
struct StepProduct {
  int features;  // outputs; with swiglu the weight has twice as many rows
  int depth;     // a multiple of 64
  int steps;     // of 64 k
  int slices;      // 1, 2, 4 or 8: 1 << slice_bits
  int slice_bits;
  int slice_steps;
  int tiles;  // of 16 weight rows
  int units;  // what a thread block takes at a time: as many tiles as its warps make up
};

/// Scratch of a step, in one piece of device memory that is zero before the first step and left as every step needs it.
struct StepWorkspace {
  uint32_t* barrier;  // arrivals of all barriers of the step, and thread blocks that have ended; zero between steps
  int32_t* tickets;   // [kStepRows, n_kv_heads], zero between uses
  void* after_o;      // [rows, hidden]: the residual stream behind attention
  void* after_down;   // [2, rows, hidden]: behind a layer, even layers and odd ones
  void* qkv;          // [rows, (n_heads + 2 n_kv_heads) * head_dim]
  void* attended;     // [rows, n_heads * head_dim]
  void* activated;    // [rows, intermediate]
  float* part_out;    // [parts, kStepHeads, head_dim]: of each chunk and kv head
  float* part_ml;     // [parts, kStepHeads, 2]: maximum (log2 domain) and sum
};

struct StepParams {
  const StepLayer* layers;  // [n_layers] in device memory
  const TensorMap* maps;    // [4 n_layers + 1] in device memory: qkv, o, gate_up and down of each layer, and the head
  int n_layers;
  int rows;
  int hidden;
  int intermediate;
  int n_heads;
  int n_kv_heads;
  int head_dim;
  float eps;
  float scale;  // of the scores

  const int64_t* ids;        // [rows]; outside [0, vocab): the row is NaN
  const void* embedding;     // [vocab, hidden]
  const void* final_norm;    // [hidden]
  const void* head;          // [head_features, hidden], or null: no logits
  void* logits;              // [rows, head_features]
  int64_t logits_stride;
  void* last_hidden;  // [rows, hidden], after the final norm; null: not wanted
  int vocab;
  int head_features;

  const int64_t* position_ids;   // [rows]
  const int64_t* out_cache_loc;  // [rows]; outside [0, pool_size): k and v are not written
  const int32_t* seq_lens;       // [rows], at least 1: keys with the row's own, which is the last
  const int64_t* req_indices;    // [rows] rows of req_to_token; null: row = request
  const int32_t* req_to_token;   // [requests, table_stride]: slot of each position
  int64_t table_stride;
  const float* cos;  // [max_pos, head_dim / 2]
  const float* sin;
  int64_t cos_stride;
  int64_t sin_stride;
  int64_t max_pos;
  int64_t pool_size;
  int64_t k_slot_stride, k_head_stride;
  int64_t v_slot_stride, v_head_stride;

  int64_t* trace;  // [blocks, 5 n_layers, kStepMarks] cycles (trace.cuh), read by the instances that trace

  // Derived (step/derive.cuh).
  StepProduct product[kStepProducts];
  StepWorkspace workspace;
  int group;          // query heads of a kv head
  int group_inverse;  // head * group_inverse >> 16 is its kv head
  int norm_threads;   // threads over which rms_norm spreads a row
  int depth;          // stages of a warp's queue; filled in before: no more than that
  int scratch_bytes;  // shared memory for a product's input, or for attention
  int late_bytes;     // parts of attention up to which those who need the result merge them themselves
};

}  // namespace astrai
