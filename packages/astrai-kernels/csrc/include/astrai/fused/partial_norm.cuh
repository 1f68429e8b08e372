// RMSNorm behind a residual add whose other operand is a product in slices of K, not yet summed:
//
//   x      = round(((part_0 + part_1) + part_2) + ...)     in fp32, in rising order
//   sum    = round(x + residual)                           stored as the new residual
//   normed = round(round(sum / sqrt(mean(sum^2) + eps)) * weight)
//
// A product of few rows and a deep K fills the device only if K is cut, and then somebody must add the slices: here it is
// the norm that follows anyway, so that no launch does it alone. The sum and its norm have the bits of rms_norm.cuh.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/reduce.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/fused/params.h"

namespace astrai {

constexpr int kPartialNormMaxHidden = 8192;
/// Threads of a block: those of rms_norm_shape, or one warp where a team within a warp would do; the lanes without an
/// octet add zeros, which changes no bit.
__host__ __device__ constexpr int partial_norm_threads(int hidden) {
  const RmsNormShape shape = rms_norm_shape(hidden);
  return shape.team ? 32 : shape.threads;
}

/// One row per block: its loads of all slices are in flight together. Few rows, so a block never takes a second one.
/// kOctets: octets of the row that each thread holds (rms_norm_shape).
template <typename T, int kOctets, int kSlices>
__global__ void __launch_bounds__(kOctets == 1 ? 256 : 512) partial_norm_kernel(const PartialNormParams params) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const auto begin_of = [&](int j) { return (j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kOctet; };
  const T* weight_row = static_cast<const T*>(params.weight);
  const T* residual_row = static_cast<const T*>(params.residual) + row * params.residual_stride;
  Octet<T> weight[kOctets];
  Octet<T> residual[kOctets];
  const auto load_residual = [&] {
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      if (begin_of(j) < params.hidden) residual[j] = load_octet<true, false>(residual_row + begin_of(j), kOctet);
    }
  };
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    if (begin_of(j) < params.hidden) weight[j] = load_octet<true, true>(weight_row + begin_of(j), kOctet);
  }
  if (params.overlap) load_residual();

  pdl_wait();
  pdl_release();

  if (!params.overlap) load_residual();
  Octet<float> part[kOctets][kSlices];
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const float* source = params.parts + s * params.slice_stride + row * params.row_stride + begin_of(j);
      if (begin_of(j) < params.hidden) part[j][s] = load_octet<true, false>(source, kOctet);
    }
  }
  Octet<T> value[kOctets];
  float total = 0.0f;
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    if (begin_of(j) < params.hidden) {
      float sum[kOctet];
      unpack(part[j][0], sum);
#pragma unroll
      for (int s = 1; s < kSlices; ++s) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) sum[i] = __fadd_rn(sum[i], __uint_as_float(part[j][s].word[i]));
      }
      pack(sum, value[j]);
      value[j] = add(value[j], residual[j]);
      T* target = static_cast<T*>(params.residual_out) + row * params.residual_out_stride;
      store_octet<true>(target + begin_of(j), value[j], kOctet);
      total = sum_of_squares(value[j], total);
    }
  }
  const float scale = inverse_rms(block_sum(total, scratch), params.hidden, params.eps);
  T* out = static_cast<T*>(params.out) + row * params.out_stride;
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    if (begin_of(j) < params.hidden) {
      store_octet<true>(out + begin_of(j), scale_and_weigh(value[j], scale, weight[j]), kOctet);
    }
  }
}

// Every instance there is, as CASE(T, kOctets, kSlices): the dispatcher below and bindings/fused.cu expand it.
#define ASTRAI_PARTIAL_NORM_CASES(CASE, T) \
  CASE(T, 1, 2)                            \
  CASE(T, 1, 4)                            \
  CASE(T, 2, 2)                            \
  CASE(T, 2, 4)

#ifndef __CUDACC_RTC__

template <typename T>
cudaError_t launch_partial_norm(const PartialNormParams& params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned int>(params.rows));
  const dim3 block(static_cast<unsigned int>(partial_norm_threads(params.hidden)));
  const int octets = rms_norm_shape(params.hidden).octets;
#define ASTRAI_CASE(T_, OCTETS, SLICES)                                                             \
  if (octets == OCTETS && params.slices == SLICES) {                                                \
    return launch(partial_norm_kernel<T_, OCTETS, SLICES>, grid, block, 0, stream, params);         \
  }
  ASTRAI_PARTIAL_NORM_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

/// Launch on `stream` of the current device, for fp16 and bf16. `params` must be valid (bindings/fused.cu checks them); rows
/// may be 0.
inline cudaError_t add_rms_norm_partials(const PartialNormParams& params, DType dtype, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  return dtype == DType::kFloat16 ? launch_partial_norm<float16>(params, stream)
                                  : launch_partial_norm<bfloat16>(params, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
