// The arithmetic of a rotation, shared by every kernel that rotates, so that all of them give the same bits.
#pragma once

#include "astrai/common/types.cuh"

namespace astrai {

/// Bits of a quiet NaN: what a position outside the table yields, since a kernel can neither raise nor guess.
constexpr uint32_t kNotANumber = 0x7fffffffu;

/// One element of a rotated pair: own * cos + partner * signed_sin, where the sine is negative for the pair's first one.
///
/// fmaf and __fmul_rn are spelled out: contraction left to the compiler could differ between instances and kernels.
__device__ __forceinline__ float turn(float own, float partner, float cos, float signed_sin) {
  return fmaf(own, cos, __fmul_rn(partner, signed_sin));
}

}  // namespace astrai
