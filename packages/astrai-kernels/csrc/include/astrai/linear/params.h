// Arguments of linear: plain C++, filled by the bindings and passed to the kernels as they are.
#pragma once

#include "astrai/common/dtype.h"

namespace astrai {

constexpr int kContractRows = 64;    // for up to these, the wide kernel can obey the reduction contract
constexpr int kLinearFewRows = 128;  // for up to these, kernels that stream the weight past all rows
constexpr int kNarrowRows = 16;  // for up to these there is the narrow kernel
constexpr int kStreamLeastRows = 17;  // from these on there is linear/stream.cuh, on compute capability 9.0
constexpr int kLinearMostSlices = 8;
constexpr int kHalfWidth = 16;     // features of a row that one sum of squares is of
constexpr int kHalfMultiple = 64;  // of features, where their squares are summed
constexpr int kLinearQuad = 4;   // output features that a thread of the streaming kernels finishes together
constexpr int kLinearStep = 64;  // k that one pipeline stage holds: 128 bytes of a row

/// out[rows, features] = x[rows, depth] @ weight[features, depth]^T and an epilogue; 16-bit types. Strides in elements.
struct LinearParams {
  const void* x;  // rows start at 16-byte boundaries
  int64_t x_stride;
  const void* weight;  // [features, depth], or [2 * features, depth] with swiglu: gate rows, then up rows
  int64_t weight_stride;
  const void* bias;      // [features] or null
  const void* residual;  // [rows, features] or null; may be `out` itself
  int64_t residual_stride;
  void* out;
  int64_t out_stride;
  const void* norm_weight;  // [depth] or null: x is RMS-normalised first (narrow kernel only, up to 8 rows)
  float norm_eps;       // of either norm
  // A norm in halves (halves.cuh), or null: x is already times the norm's weight, and these are the rows' sums of squares.
  const float* squares;  // [rows, depth / kHalfWidth]
  // The first half of the next norm, or null: what goes into `out` also times that norm's weight, and its sums of squares.
  const void* next_norm;  // [features]
  void* next_x;           // [rows, features]
  float* next_squares;    // [rows, features / kHalfWidth]
  int rows;
  int features;
  int depth;  // a multiple of 8
  bool swiglu;
  bool fixed_order;  // obey the reduction contract; up to kNarrowRows rows do so anyway

  // Derived (derive.cuh).
  bool quads_aligned;  // every fourth element of bias, residual and out starts at an 8-byte boundary
  bool pairs_aligned;  // every second element of residual and out starts at a 4-byte boundary
  int slices;          // parts that K is cut into: 1, 2, 4 or 8
  int slice_steps;     // steps of 64 k in each but the last
  int cluster;         // wide kernel: blocks of a cluster, a divisor of `slices`
  int norm_threads;    // threads over which rms_norm spreads a row of `depth`
  int prefetch_steps;  // narrow kernel: steps after its queue that each warp fetches into L2 before it waits
  bool release_early;  // let the next kernel start before this one waits; see common/pdl.cuh
};

}  // namespace astrai
