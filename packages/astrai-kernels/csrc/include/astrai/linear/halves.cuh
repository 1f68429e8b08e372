// RMSNorm in two halves, shared out between the product that completes a stream and the product that reads its norm.
//
// rms_norm(x) * weight = (x * weight) * scale, where scale is a row's own. The product that writes x also writes x * weight
// and sums of squares, each over kHalfWidth features; the next one takes x * weight for its input and multiplies its own sums
// with the scale, before they are rounded. So the norm has no launch, and the row no third rounding: the result differs from
// that of rms_norm and a product by rounding, and it is for bfloat16, whose range is that of fp32.
//
// Deterministic as well: squares are added in an order that depends on the number of features alone.
#pragma once

#include "astrai/fused/norm_octet.cuh"
#include "astrai/linear/fragments.cuh"

namespace astrai {

template <typename T>
constexpr bool kHasHalves = false;
template <>
constexpr bool kHasHalves<bfloat16> = true;

__device__ __forceinline__ float sum_of(const float4& part) {
  return __fadd_rn(__fadd_rn(part.x, part.y), __fadd_rn(part.z, part.w));
}
__device__ __forceinline__ const float4* squares_of(const LinearParams& params, int row) {
  return reinterpret_cast<const float4*>(params.squares + static_cast<int64_t>(row) * (params.depth / kHalfWidth));
}

/// Find the scale of every row, by kThreads threads numbered from 0, in whole warps. The caller has a barrier behind it.
template <int kThreads>
__device__ __forceinline__ void find_scales(const LinearParams& params, float* scales, int thread) {
  constexpr int kTeam = 4;     // lanes of a row
  constexpr int kAtOnce = 8;   // loads of a lane under way together
  constexpr int kRowsAtOnce = kThreads / kTeam;
  const int words = params.depth / (kHalfWidth * 4);  // of four sums
  for (int first = 0; first < params.rows; first += kRowsAtOnce) {
    const int row = first + thread / kTeam;
    float total = 0.0f;
    for (int begin = thread % kTeam; begin < words; begin += kTeam * kAtOnce) {
      float4 part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int word = begin + i * kTeam;
        part[i] = row < params.rows && word < words ? squares_of(params, row)[word] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) total = __fadd_rn(total, sum_of(part[i]));
    }
    // The butterfly of lanes_sum, whose loop above all lanes of a warp leave together: `words` is the same for all.
    total = lanes_sum<kTeam>(total);
    if (thread % kTeam == 0 && row < params.rows) scales[row] = inverse_rms(total, params.depth, params.norm_eps);
  }
}

/// The same by a warp a row, in two parts, so that what is between hides the load: the first 128 sums of a row ...
__device__ __forceinline__ float4 load_squares(const LinearParams& params, int row, int lane) {
  const bool wanted = row < params.rows && lane < params.depth / (kHalfWidth * 4);
  return wanted ? squares_of(params, row)[lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}
/// ... and the others, which few models have, and the scale. The caller has a barrier behind it.
__device__ __forceinline__ void store_scale(const LinearParams& params, float* scales, int row, int lane,
                                            const float4& first) {
  if (row >= params.rows) return;
  float total = sum_of(first);
  for (int i = lane + 32; i < params.depth / (kHalfWidth * 4); i += 32) {
    total = __fadd_rn(total, sum_of(squares_of(params, row)[i]));
  }
  total = lanes_sum<32>(total);
  if (lane == 0) scales[row] = inverse_rms(total, params.depth, params.norm_eps);
}

/// Add up what four neighbouring lanes have of one row's kHalfWidth features, and store it. They all call it.
__device__ __forceinline__ void store_squares(const LinearParams& params, int row, int feature, float squares, bool wanted) {
  const uint32_t team = 0xfu << (threadIdx.x % 32 / 4 * 4);
  squares = __fadd_rn(squares, __shfl_xor_sync(team, squares, 1));
  squares = __fadd_rn(squares, __shfl_xor_sync(team, squares, 2));
  if (wanted && threadIdx.x % 4 == 0) {
    params.next_squares[static_cast<int64_t>(row) * (params.features / kHalfWidth) + feature / kHalfWidth] = squares;
  }
}

/// Whether this product reads, or completes, a row for a norm in halves.
template <typename T>
__device__ __forceinline__ bool scales_rows(const LinearParams& params) {
  return kHasHalves<T> && params.squares != nullptr;
}
template <typename T>
__device__ __forceinline__ bool weighs_rows(const LinearParams& params) {
  return kHasHalves<T> && params.next_norm != nullptr;
}

__device__ __forceinline__ void scale_quad(float (&sum)[kLinearQuad], float scale) {
#pragma unroll
  for (int i = 0; i < kLinearQuad; ++i) sum[i] = __fmul_rn(sum[i], scale);
}

/// Weights of the next norm for four features, which are all there.
__device__ __forceinline__ Quad load_next_norm(const LinearParams& params, int feature) {
  return load_quad<true>(static_cast<const uint16_t*>(params.next_norm) + feature, kLinearQuad, true);
}

/// Store four outputs times their weights; returns the sum of their squares.
template <typename T>
__device__ __forceinline__ float store_weighed(const LinearParams& params, int row, int feature, const Quad& output,
                                               const Quad& weight) {
  float value[kLinearQuad];
  float factor[kLinearQuad];
  unpack(output, value, T());
  unpack(weight, factor, T());
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kLinearQuad; ++i) {
    squares = fmaf(value[i], value[i], squares);
    value[i] = __fmul_rn(value[i], factor[i]);
  }
  const Quad result = pack(value, T());
  uint16_t* target = static_cast<uint16_t*>(params.next_x) + static_cast<int64_t>(row) * params.features + feature;
  *reinterpret_cast<uint2*>(target) = make_uint2(result.word[0], result.word[1]);
  return squares;
}

}  // namespace astrai
