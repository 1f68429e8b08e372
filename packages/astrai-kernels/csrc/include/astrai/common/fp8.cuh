// fp8 in the e4m3 format (1 sign, 4 exponent, 3 mantissa bits; largest finite 448; no infinity), without CUDA's headers.
#pragma once

#include "astrai/common/types.cuh"

namespace astrai {

constexpr float kE4m3Largest = 448.0f;

/// Round to nearest even, saturating to +-448; NaN stays NaN (0x7f).
__device__ __forceinline__ uint32_t e4m3_from_float(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  if (magnitude >= 0x43e80000u) return sign | 0x7eu;  // 464, half way between 448 and the 480 that does not exist
  // Below 2^-6 the unit is 2^-9; eight such units carry into the smallest normal number by themselves.
  if (magnitude < 0x3c800000u) return sign | static_cast<uint32_t>(__float2int_rn(__uint_as_float(magnitude) * 512.0f));
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return sign | ((rounded >> 20) - (120u << 3));  // exponent bias 127 becomes 7
}

__device__ __forceinline__ float float_from_e4m3(uint32_t byte) {
  const uint32_t magnitude = byte & 0x7fu;
  if (magnitude == 0x7fu) return __uint_as_float(0x7fffffffu);
  // As a float with e4m3's exponent bias, subnormal numbers too; 2^120 is the difference of the biases.
  const float value = __uint_as_float(magnitude << 20) * 1.329227995784916e36f;
  return byte & 0x80u ? -value : value;
}

/// Two values as two e4m3 bytes, the first in the low one.
__device__ __forceinline__ uint32_t e4m3x2_from_floats(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(second), "f"(first));
  return packed;
#else
  return e4m3_from_float(first) | (e4m3_from_float(second) << 8);
#endif
}

/// Store the first `count` (at most 8) values as e4m3; kAligned: `target` is 8-byte aligned and `count` is 8.
template <bool kAligned>
__device__ __forceinline__ void store_e4m3(uint8_t* target, const float (&value)[kOctet], int count) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint2*>(target) =
        make_uint2(e4m3x2_from_floats(value[0], value[1]) | (e4m3x2_from_floats(value[2], value[3]) << 16),
                   e4m3x2_from_floats(value[4], value[5]) | (e4m3x2_from_floats(value[6], value[7]) << 16));
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i < count) target[i] = static_cast<uint8_t>(e4m3x2_from_floats(value[i], 0.0f));
    }
  }
}

}  // namespace astrai
