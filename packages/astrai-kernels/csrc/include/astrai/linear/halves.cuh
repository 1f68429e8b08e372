// RMSNorm in two halves, shared out between the product that completes a stream and the product that reads its norm.
//
// rms_norm(x) * weight = (x * weight) * scale, where scale is a row's own. The product that writes x also writes x * weight
// and sums of squares, each over kHalfWidth features; the next one takes x * weight for its input and multiplies its own sums
// with the scale, before they are rounded. So the norm has no launch, and the row no third rounding: the result differs from
// that of rms_norm and a product by rounding, and it is for bfloat16, whose range is that of fp32.
//
// Deterministic as well: squares are added in an order that depends on the number of features alone, whatever kernel does it.
// Of 16 features first the squares of neighbours, pair j those of 2j and 2j + 1, then ((0 + 4) + (1 + 5)) + ((2 + 6) + (3 + 7)):
// the layouts that kernels have of a row meet there. Of a row's sums, four are a word, added as pairs; 32 lanes take words in
// turn, each in rising order, and are added by the butterfly of lanes_sum<32>.
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
  static_assert(kTeam * kAtOnce == 32, "the order of additions");
  constexpr int kRowsAtOnce = kThreads / kTeam;
  const int words = params.depth / (kHalfWidth * 4);  // of four sums
  for (int first = 0; first < params.rows; first += kRowsAtOnce) {
    const int row = first + thread / kTeam;
    float sums[kAtOnce] = {};  // of lanes thread % kTeam + i * kTeam of the 32
    for (int begin = thread % kTeam; begin < words; begin += kTeam * kAtOnce) {
      float4 part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int word = begin + i * kTeam;
        part[i] = row < params.rows && word < words ? squares_of(params, row)[word] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sums[i] = __fadd_rn(sums[i], sum_of(part[i]));
    }
#pragma unroll
    for (int apart = kAtOnce / 2; apart > 0; apart /= 2) {
#pragma unroll
      for (int i = 0; i < apart; ++i) sums[i] = __fadd_rn(sums[i], sums[i + apart]);
    }
    const float total = lanes_sum<kTeam>(sums[0]);
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
#pragma unroll 1
  for (int i = lane + 32; i < params.depth / (kHalfWidth * 4); i += 32) {
    total = __fadd_rn(total, sum_of(squares_of(params, row)[i]));
  }
  total = lanes_sum<32>(total);
  if (lane == 0) scales[row] = inverse_rms(total, params.depth, params.norm_eps);
}

/// The same between other work: a warp finds the scales of kRows rows, those of two in each round of 2,048 features, whose
/// loads are under way since the round before. The caller has a barrier between the rounds and whoever reads the scales.
template <int kRows>
struct ScaleRounds {
  static constexpr int kTeam = 16;  // lanes of a row
  float4 part[2];                   // words `begin` + lane and 16 behind, of this round
  float sums[2];                    // of those lanes of the 32
  int row;                          // of this lane's team
  int begin;
  int left;  // rows of a team

  __device__ __forceinline__ void fetch(const LinearParams& params, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int word = begin + lane % kTeam + i * kTeam;
      const bool wanted = row < params.rows && word < params.depth / (kHalfWidth * 4);
      part[i] = wanted ? squares_of(params, row)[word] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  __device__ __forceinline__ void start(const LinearParams& params, int first_row, int lane) {
    sums[0] = sums[1] = 0.0f;
    row = first_row + lane / kTeam;
    begin = 0;
    left = kRows / 2;
    fetch(params, lane);
  }
  /// `scales`: of kRows rows.
  __device__ __forceinline__ void advance(const LinearParams& params, float* scales, int lane) {
    if (left == 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i] = __fadd_rn(sums[i], sum_of(part[i]));
    begin += 2 * kTeam;
    if (begin >= params.depth / (kHalfWidth * 4)) {
      const float total = lanes_sum<kTeam>(__fadd_rn(sums[0], sums[1]));
      if (lane % kTeam == 0) scales[kRows - 2 * left + lane / kTeam] = inverse_rms(total, params.depth, params.norm_eps);
      sums[0] = sums[1] = 0.0f;
      row += 2;
      begin = 0;
      if (--left == 0) return;
    }
    fetch(params, lane);
  }
};

__device__ __forceinline__ float* next_squares_of(const LinearParams& params, int row, int feature) {
  return params.next_squares + static_cast<int64_t>(row) * (params.features / kHalfWidth) + feature / kHalfWidth;
}

/// Add up what four neighbouring lanes have of one row's kHalfWidth features, and store it. They all call it. Here a lane has
/// features 2q, 2q + 1, 2q + 8 and 2q + 9, q = lane % 4, and the sum of its two pairs ...
__device__ __forceinline__ void store_squares(const LinearParams& params, int row, int feature, float squares, bool wanted) {
  const uint32_t team = 0xfu << (threadIdx.x % 32 / 4 * 4);
  squares = __fadd_rn(squares, __shfl_xor_sync(team, squares, 1));
  squares = __fadd_rn(squares, __shfl_xor_sync(team, squares, 2));
  if (wanted && threadIdx.x % 4 == 0) *next_squares_of(params, row, feature) = squares;
}
/// ... and here features 4q to 4q + 3, and each pair's: lanes q and q + 2 have pairs to be added first.
__device__ __forceinline__ void store_squares(const LinearParams& params, int row, int feature, float2 squares, bool wanted) {
  const uint32_t team = 0xfu << (threadIdx.x % 32 / 4 * 4);
  squares.x = __fadd_rn(squares.x, __shfl_xor_sync(team, squares.x, 2));
  squares.y = __fadd_rn(squares.y, __shfl_xor_sync(team, squares.y, 2));
  float total = __fadd_rn(squares.x, squares.y);
  total = __fadd_rn(total, __shfl_xor_sync(team, total, 1));
  if (wanted && threadIdx.x % 4 == 0) *next_squares_of(params, row, feature) = total;
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

/// Outputs times their weights; `squares`: of each pair.
template <typename T>
__device__ __forceinline__ Quad weigh(const Quad& output, const Quad& weight, float2& squares) {
  float value[kLinearQuad];
  float factor[kLinearQuad];
  unpack(output, value, T());
  unpack(weight, factor, T());
  squares.x = __fmaf_rn(value[1], value[1], __fmul_rn(value[0], value[0]));
  squares.y = __fmaf_rn(value[3], value[3], __fmul_rn(value[2], value[2]));
#pragma unroll
  for (int i = 0; i < kLinearQuad; ++i) value[i] = __fmul_rn(value[i], factor[i]);
  return pack(value, T());
}

__device__ __forceinline__ uint16_t* weighed_at(const LinearParams& params, int row, int feature) {
  return static_cast<uint16_t*>(params.next_x) + static_cast<int64_t>(row) * params.features + feature;
}

/// Store four outputs times their weights; returns the squares of each pair.
template <typename T>
__device__ __forceinline__ float2 store_weighed(const LinearParams& params, int row, int feature, const Quad& output,
                                                const Quad& weight) {
  float2 squares;
  const Quad result = weigh<T>(output, weight, squares);
  *reinterpret_cast<uint2*>(weighed_at(params, row, feature)) = make_uint2(result.word[0], result.word[1]);
  return squares;
}

}  // namespace astrai
