// What both kernels of qkv_norm_rope_write share.
#pragma once

#include "astrai/common/fp8.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/params.h"

namespace astrai {

constexpr int kQkvThreads = 128;
/// Heads of one token that a team takes when there are enough: they share one read of the tables and of the weights.
constexpr int kQkvHeads = 4;

/// Largest of `kLanes` neighbouring lanes, on each of them; NaN loses. All 32 lanes of the warp must call it.
template <int kLanes>
__device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

__device__ __forceinline__ int64_t load_index(const void* source, int64_t element, bool is_64_bit) {
  return is_64_bit ? static_cast<const int64_t*>(source)[element] : static_cast<const int32_t*>(source)[element];
}

/// Scale of a head in an e4m3 pool, and its inverse, from the largest magnitude.
struct HeadScale {
  float scale;
  float inverse;
};

__device__ __forceinline__ HeadScale head_scale(float largest) {
  const float scale = __fdiv_rn(largest, kE4m3Largest);
  return {scale, scale > 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f};
}

/// A k or v head's place in its pool, in elements; `row` counts kv heads.
__device__ __forceinline__ int64_t pool_offset(const QkvParams& params, bool is_v, int64_t slot, int row) {
  return slot * (is_v ? params.v_slot_stride : params.k_slot_stride) +
         row * (is_v ? params.v_head_stride : params.k_head_stride);
}

__device__ __forceinline__ void store_head_scale(const QkvParams& params, bool is_v, int64_t slot, int row, float scale) {
  float* scales = is_v ? params.v_scale : params.k_scale;
  scales[slot * (is_v ? params.v_scale_stride : params.k_scale_stride) + row] = scale;
}

}  // namespace astrai
