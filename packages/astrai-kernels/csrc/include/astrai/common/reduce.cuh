// Sums with a fixed tree: the order of additions depends on the number of threads alone.
#pragma once

#include "astrai/common/types.cuh"

namespace astrai {

/// Sum over `kLanes` neighbouring lanes (a power of two up to 32); every lane gets the same bits.
///
/// The butterfly adds the same two operands on both partners and fp32 addition commutes, so no broadcast is needed.
/// All 32 lanes of the warp must call it.
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

/// Sum over a block of whole warps; every thread gets the same bits.
///
/// `scratch` holds 32 floats in shared memory. One barrier: a caller in a loop must alternate between two scratch
/// arrays, since a slow warp may still read this one when a fast warp has moved on to the next call.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  const int lane = threadIdx.x % 32;
  value = lanes_sum<32>(value);
  if (lane == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  return lanes_sum<32>(lane < static_cast<int>(blockDim.x / 32) ? scratch[lane] : 0.0f);
}

}  // namespace astrai
