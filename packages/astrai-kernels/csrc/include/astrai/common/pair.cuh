// Two neighbouring elements of a 16-bit type in one word.
#pragma once

#include "astrai/common/types.cuh"

namespace astrai {

/// Load the first `count` (at most 2) elements; the others are zero. aligned: `source` is 4-byte aligned.
__device__ __forceinline__ uint32_t load_pair(const uint16_t* source, int count, bool aligned) {
  if (aligned && count >= 2) return *reinterpret_cast<const uint32_t*>(source);
  uint32_t pair = count > 0 ? source[0] : 0u;
  if (count > 1) pair |= static_cast<uint32_t>(source[1]) << 16;
  return pair;
}

/// Store the first `count` (at most 2) elements; aligned: `target` is 4-byte aligned.
__device__ __forceinline__ void store_pair(uint16_t* target, uint32_t pair, int count, bool aligned) {
  if (aligned && count >= 2) {
    *reinterpret_cast<uint32_t*>(target) = pair;
    return;
  }
  if (count > 0) target[0] = static_cast<uint16_t>(pair);
  if (count > 1) target[1] = static_cast<uint16_t>(pair >> 16);
}

}  // namespace astrai
