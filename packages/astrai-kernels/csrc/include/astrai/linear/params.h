// Arguments of linear: plain C++, filled by the bindings and passed to the kernels as they are.
#pragma once

#include "astrai/common/dtype.h"

namespace astrai {

constexpr int kLinearMostRows = 128;
constexpr int kLinearMostSlices = 8;
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
  float norm_eps;
  int rows;
  int features;
  int depth;  // a multiple of 8
  bool swiglu;

  // Derived by linear() (linear.cuh).
  bool quads_aligned;  // every fourth element of bias, residual and out starts at an 8-byte boundary
  int slices;          // parts that K is cut into: 1, 2, 4 or 8
  int slice_steps;     // steps of 64 k in each but the last
  int cluster;         // wide kernel: blocks of a cluster, a divisor of `slices`
  int norm_threads;    // threads over which rms_norm spreads a row of `depth`
  int prefetch_steps;  // narrow kernel: steps after its queue that each warp fetches into L2 before it waits
  bool release_early;  // let the next kernel start before this one waits; see common/pdl.cuh
};

}  // namespace astrai
