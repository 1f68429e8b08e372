// Which adapter each row of a tile has, and the adapters that a tile needs, in rising order.
#pragma once

#include "astrai/common/types.cuh"
#include "astrai/lora/params.h"

namespace astrai {

/// The adapter of a row: -1 for none, `count` for an index that does not exist.
__device__ __forceinline__ int adapter_of(const LoraRows& rows, int row) {
  const int64_t id = rows.are_64_bit ? static_cast<const int64_t*>(rows.ids)[row * rows.stride]
                                     : static_cast<const int32_t*>(rows.ids)[row * rows.stride];
  return id < 0 ? -1 : static_cast<int>(min(id, static_cast<int64_t>(rows.count)));
}

/// The lowest adapter above `last` that a row of the tile has, or `count`. Every thread of the block gets the same.
///
/// A tile takes as many passes as it has adapters; a row's result comes from one of them, whatever the others are.
template <int kRows>
__device__ __forceinline__ int next_adapter(const int (&ids)[kRows], int last, int count) {
  int next = count;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (ids[i] > last) next = min(next, ids[i]);
  }
  return next;
}

/// What a row gets whose adapter does not exist.
__device__ __forceinline__ float lora_nan() { return __uint_as_float(0x7fffffffu); }

}  // namespace astrai
