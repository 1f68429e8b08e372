// Arguments of the LoRA kernels: plain C++, filled by the bindings and passed to the kernels as they are.
#pragma once

#include "astrai/common/dtype.h"

namespace astrai {

constexpr int kLoraMostRank = 64;

/// The adapter of each row: an index below `count`; negative for none. Any other index makes the row NaN.
struct LoraRows {
  const void* ids;
  int64_t stride;
  bool are_64_bit;
  int count;
};

/// out[row] = x[row] @ a[id of row]^T in fp32, zeros for a row without an adapter. Strides in elements.
struct LoraShrinkParams {
  const void* x;  // [rows, depth]; rows start at 16-byte boundaries
  int64_t x_stride;
  const void* a;  // [adapters, rank, depth], likewise
  int64_t a_stride;
  int64_t a_row_stride;
  LoraRows adapters;
  float* out;  // [rows, rank]
  int64_t out_stride;
  int rows;
  int rank;   // a multiple of 8 up to kLoraMostRank
  int depth;  // a multiple of 8
};

/// out[row] = base[row] + scaling[id of row] * (b[id of row] @ hidden[row]); base[row] for a row without an adapter.
struct LoraExpandParams {
  const void* base;  // [rows, features]; may be `out` itself
  int64_t base_stride;
  const float* hidden;  // [rows, rank], what shrink wrote
  int64_t hidden_stride;
  const void* b;  // [adapters, features, rank]; rows start at 16-byte boundaries
  int64_t b_stride;
  int64_t b_row_stride;
  LoraRows adapters;
  const float* scaling;  // [adapters]
  void* out;
  int64_t out_stride;
  int rows;
  int rank;
  int features;
  bool pairs_aligned;  // derived: every second element of base and out starts at a 4-byte boundary
};

}  // namespace astrai
