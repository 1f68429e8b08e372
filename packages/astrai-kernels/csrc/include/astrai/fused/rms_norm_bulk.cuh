// RMSNorm of many rows of a 16-bit type: a row stays within one warp, so that there is no barrier, and each lane has 8 (or
// 16) loads of 16 bytes in flight, from several rows where rows are short.
//
// The tree is that of rms_norm.cuh, where thread t of a block adds its octets and block_sum() adds lanes and then warps:
// here lane l does what thread 32 v + l does there, for each v, and the sums of the 32 lanes are added as the warps' are.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/reduce.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/fused/params.h"

namespace astrai {

constexpr int kBulkThreads = 128;

/// The butterfly of block_sum() over the sums of up to 8 warps; adding the zeros of absent warps changes nothing.
template <int kWarps>
__device__ __forceinline__ float warps_sum(const float (&total)[kWarps]) {
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = i < kWarps ? total[i < kWarps ? i : 0] : 0.0f;
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < offset; ++i) sum[i] = __fadd_rn(sum[i], sum[i + offset]);
  }
  return sum[0];
}

/// Blocks a multiprocessor must hold: what bounds the registers of each instance.
__host__ __device__ constexpr int bulk_blocks(bool add, int octets) {
  return octets > 8 || (add && octets > 4) ? 4 : octets > 4 ? 5 : 6;
}

/// kTeam: lanes of a row; 32 unless kWarps is 1. kWarps: warps that a block would have for the row (rms_norm_shape), or
/// more if kDepth is 1. kDepth: octets that each of its threads would add. kRows: rows of a team.
template <typename T, int kTeam, int kWarps, int kDepth, int kRows, bool kAdd>
__global__ void __launch_bounds__(kBulkThreads, bulk_blocks(kAdd, kWarps * kDepth))
    rms_norm_bulk_kernel(const RmsNormParams params, const int threads) {
  static_assert(kTeam == 32 || kWarps * kDepth == 1, "a team within a warp holds one octet of a row per lane");
  constexpr int kOctets = kWarps * kDepth;
  const int rank = static_cast<int>(threadIdx.x) % kTeam;
  const int64_t team = static_cast<int64_t>(blockIdx.x) * (kBulkThreads / kTeam) + threadIdx.x / kTeam;
  const T* weight = static_cast<const T*>(params.weight);
  // Element at which octet (v, d) begins, at least `hidden` if the row has no such octet.
  const auto begin_of = [&](int v, int d) { return (d * threads + v * 32 + rank) * kOctet; };
  // The weight is fetched beside the rows, or, where registers do not hold it, half of it at a time.
  constexpr bool kHoldWeight = kDepth == 1;
  Octet<T> factor[kWarps];
  const auto load_factor = [&](int d) {
#pragma unroll
    for (int v = 0; v < kWarps; ++v) {
      const int begin = begin_of(v, d);
      if (begin < params.hidden) factor[v] = load_octet<true, true>(weight + begin, kOctet);
    }
  };
  if constexpr (kHoldWeight) load_factor(0);
  pdl_wait();
  pdl_release();

  Octet<T> value[kRows][kOctets];
  Octet<T> residual[kAdd ? kRows : 1][kAdd ? kOctets : 1];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = team * kRows + r;
    const int hidden = row < params.rows ? params.hidden : 0;  // a team without a row has nothing to load or store
    const int64_t outer = params.inner == 1 ? row : row / params.inner;
    const int64_t inner = params.inner == 1 ? 0 : row - outer * params.inner;
    const T* x = row_source<T>(params.x, outer, inner);
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      const int begin = begin_of(i % kWarps, i / kWarps);
      if (begin < hidden) value[r][i] = load_octet<true, false>(x + begin, kOctet);
    }
    if constexpr (kAdd) {
      const T* other = row_source<T>(params.residual, outer, inner);
#pragma unroll
      for (int i = 0; i < kOctets; ++i) {
        const int begin = begin_of(i % kWarps, i / kWarps);
        if (begin < hidden) residual[r][i] = load_octet<true, false>(other + begin, kOctet);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = team * kRows + r;
    const int hidden = row < params.rows ? params.hidden : 0;
    const int64_t outer = params.inner == 1 ? row : row / params.inner;
    const int64_t inner = params.inner == 1 ? 0 : row - outer * params.inner;
    if constexpr (kAdd) {
      T* residual_out = row_target<T>(params.residual_out, outer, inner);
#pragma unroll
      for (int i = 0; i < kOctets; ++i) {
        const int begin = begin_of(i % kWarps, i / kWarps);
        if (begin < hidden) {
          value[r][i] = add(value[r][i], residual[r][i]);
          store_octet<true>(residual_out + begin, value[r][i], kOctet);
        }
      }
    }
    float total[kWarps];
#pragma unroll
    for (int v = 0; v < kWarps; ++v) {
      total[v] = 0.0f;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (begin_of(v, d) < hidden) total[v] = sum_of_squares(value[r][d * kWarps + v], total[v]);
      }
      total[v] = lanes_sum<kTeam>(total[v]);
    }
    const float sum = kWarps == 1 ? total[0] : warps_sum<kWarps>(total);
    const float scale = inverse_rms(sum, params.hidden, params.eps);
    T* out = row_target<T>(params.out, outer, inner);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if constexpr (!kHoldWeight) load_factor(d);
#pragma unroll
      for (int v = 0; v < kWarps; ++v) {
        const int begin = begin_of(v, d);
        if (begin < hidden) {
          store_octet<true>(out + begin, scale_and_weigh(value[r][d * kWarps + v], scale, factor[v]), kOctet);
        }
      }
    }
  }
}

// Every instance there is, as CASE(T, kTeam, kWarps, kDepth, kRows, kAdd): the dispatcher below and bindings/fused.cu
// expand it. Rows past 2048 elements with a residual do not fit the registers.
#define ASTRAI_RMS_NORM_BULK_CASES(CASE, T) \
  CASE(T, 8, 1, 1, 8, false)                \
  CASE(T, 16, 1, 1, 8, false)               \
  CASE(T, 32, 1, 1, 8, false)               \
  CASE(T, 32, 2, 1, 4, false)               \
  CASE(T, 32, 4, 1, 2, false)               \
  CASE(T, 32, 6, 1, 1, false)               \
  CASE(T, 32, 8, 1, 1, false)               \
  CASE(T, 32, 8, 2, 1, false)               \
  CASE(T, 8, 1, 1, 4, true)                 \
  CASE(T, 16, 1, 1, 4, true)                \
  CASE(T, 32, 1, 1, 4, true)                \
  CASE(T, 32, 2, 1, 2, true)                \
  CASE(T, 32, 4, 1, 1, true)                \
  CASE(T, 32, 6, 1, 1, true)                \
  CASE(T, 32, 8, 1, 1, true)

#ifndef __CUDACC_RTC__

/// How the kernel above takes rows of `hidden` elements; team 0: not at all.
struct BulkShape {
  int team;
  int warps;
  int depth;
  int rows;
};

constexpr BulkShape bulk_shape(int hidden, bool add) {
  const RmsNormShape block = rms_norm_shape(hidden);
  const int operands = add ? 2 : 1;
  if (block.team) return {block.team, 1, 1, 8 / operands};
  const int warps = block.threads / 32;
  if (block.octets == 1 && warps <= 8) {
    if (warps > 4) return {32, warps <= 6 ? 6 : 8, 1, 1};
    return warps <= 2 ? BulkShape{32, 2, 1, 4 / operands} : BulkShape{32, 4, 1, 2 / operands};
  }
  // Exactly 8: with fewer warps, their octets of depth 1 would follow at once and be taken for octets of absent warps.
  if (block.octets == 2 && warps == 8 && !add) return {32, 8, 2, 1};
  return {0, 0, 0, 0};
}

template <typename T, bool kAdd>
cudaError_t launch_rms_norm_bulk(const RmsNormParams& params, const BulkShape& shape, cudaStream_t stream) {
  const int64_t rows_per_block = static_cast<int64_t>(kBulkThreads / shape.team) * shape.rows;
  const int64_t blocks = (params.rows + rows_per_block - 1) / rows_per_block;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned int>(blocks));
  const int threads = rms_norm_shape(params.hidden).threads;
#define ASTRAI_CASE(T_, TEAM, WARPS, DEPTH, ROWS, ADD)                                                              \
  if (kAdd == ADD && shape.team == TEAM && shape.warps == WARPS && shape.depth == DEPTH && shape.rows == ROWS) {    \
    return launch(rms_norm_bulk_kernel<T_, TEAM, WARPS, DEPTH, ROWS, ADD>, grid, dim3(kBulkThreads), 0, stream,     \
                  params, threads);                                                                                 \
  }
  ASTRAI_RMS_NORM_BULK_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
