// What the kernels of qkv_norm_rope_write, and decode attention that does its work, share.
#pragma once

#include "astrai/common/fp8.cuh"
#include "astrai/common/launch.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/params.h"
#include "astrai/rotary/turn.cuh"

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

/// What turns one octet of a head: for element i, the cosine and the sine with the sign that turn() wants.
struct OctetAngles {
  float cos[kOctet];
  float sin[kOctet];
};

/// Angles of the octet that starts at `begin`; elements from rotary_dim on get an angle of zero and are not to be used.
template <bool kAligned>
__device__ __forceinline__ OctetAngles load_angles(const QkvParams& params, int64_t position, int begin) {
  OctetAngles angles;
  const int half = params.rotary_dim / 2;
  if (position < 0 || position >= params.max_pos) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) angles.cos[i] = angles.sin[i] = __uint_as_float(kNotANumber);
    return angles;
  }
  const float* cos = params.cos + position * params.cos_stride;
  const float* sin = params.sin + position * params.sin_stride;
  if constexpr (kAligned) {
    if (params.interleaved) {
      const uint4 c = load_readonly(reinterpret_cast<const uint4*>(cos + begin / 2));
      const uint4 s = load_readonly(reinterpret_cast<const uint4*>(sin + begin / 2));
      const uint32_t c_word[4] = {c.x, c.y, c.z, c.w};
      const uint32_t s_word[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        angles.cos[i] = __uint_as_float(c_word[i / 2]);
        angles.sin[i] = i % 2 ? __uint_as_float(s_word[i / 2]) : -__uint_as_float(s_word[i / 2]);
      }
    } else {
      const int pair = begin < half ? begin : begin - half;
      unpack(load_octet<true, true>(cos + pair, kOctet), angles.cos);
      unpack(load_octet<true, true>(sin + pair, kOctet), angles.sin);
      if (begin < half) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) angles.sin[i] = -angles.sin[i];
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const int d = begin + i;
      angles.cos[i] = 1.0f;
      angles.sin[i] = 0.0f;
      if (d < params.rotary_dim) {
        const int pair = params.interleaved ? d / 2 : d < half ? d : d - half;
        const bool is_first = params.interleaved ? d % 2 == 0 : d < half;
        const float s = __uint_as_float(load_readonly(reinterpret_cast<const uint32_t*>(sin + pair)));
        angles.cos[i] = __uint_as_float(load_readonly(reinterpret_cast<const uint32_t*>(cos + pair)));
        angles.sin[i] = is_first ? -s : s;
      }
    }
  }
  return angles;
}

/// The octet whose element i is turned with element i of `value`, of whole heads of an octet a lane; `rank`: lane of the
/// head. In halves, octets of the two lie rotary_dim / 16 lanes apart, and a lane without a partner reads its own: all 32
/// lanes of the warp must call it. kAligned layouts alone.
template <typename T>
__device__ __forceinline__ void find_partner(const QkvParams& params, const Octet<T>& value, int rank,
                                             float (&partner)[kOctet]) {
  if (params.interleaved) {
    float own[kOctet];
    unpack(value, own);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) partner[i] = own[i ^ 1];
  } else {
    const int apart = params.rotary_dim / (2 * kOctet);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int from = rank * kOctet >= params.rotary_dim ? lane : rank < apart ? lane + apart : lane - apart;
    Octet<T> other;
#pragma unroll
    for (int i = 0; i < Octet<T>::kWords; ++i) other.word[i] = __shfl_sync(0xffffffffu, value.word[i], from);
    unpack(other, partner);
  }
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

#ifndef __CUDACC_RTC__

/// Whether every octet starts at a 16-byte boundary and is whole, and so is each half of the rotated part.
inline bool qkv_is_aligned(const QkvParams& params, std::size_t bytes) {
  const int64_t elements = static_cast<int64_t>(16 / bytes);
  const bool wide = params.k_scale == nullptr;
  // A pool's octets are stored as 16 bytes, or as 8 bytes of e4m3.
  const std::size_t pool_alignment = wide ? 16 : 8;
  const int64_t pool_elements = wide ? elements : 8;
  const bool tables = params.cos == nullptr || (is_aligned(params.cos, 16) && is_aligned(params.sin, 16) &&
                                                params.cos_stride % 4 == 0 && params.sin_stride % 4 == 0 &&
                                                params.rotary_dim % (params.interleaved ? kOctet : 2 * kOctet) == 0);
  return tables && params.head_dim % kOctet == 0 && is_aligned(params.qkv, 16) && is_aligned(params.q, 16) &&
         is_aligned(params.q_norm, 16) && is_aligned(params.k_norm, 16) &&
         is_aligned(params.k_buffer, pool_alignment) && is_aligned(params.v_buffer, pool_alignment) &&
         (params.tokens <= 1 || (params.qkv_stride % elements == 0 && params.q_token_stride % elements == 0)) &&
         params.q_head_stride % elements == 0 && params.k_slot_stride % pool_elements == 0 &&
         params.k_head_stride % pool_elements == 0 && params.v_slot_stride % pool_elements == 0 &&
         params.v_head_stride % pool_elements == 0;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
