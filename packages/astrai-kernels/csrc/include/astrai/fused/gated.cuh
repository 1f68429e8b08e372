// Gated activations over rows [gates, values] of a fused projection: out = round(round(act(gate)) * value).
//
// SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202) with the roundings of Hugging Face's MLPs; fp32 in between.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/fused/params.h"

namespace astrai {

constexpr int kGatedThreads = 256;
/// Octets of a thread where there are enough: that many loads of each operand are in flight.
constexpr int kGatedOctets = 2;

/// x * sigmoid(y). Past y = -88 the exponential is infinite and the quotient zero, which is the limit.
__device__ __forceinline__ float times_sigmoid(float x, float y) { return __fdividef(x, 1.0f + expf(-y)); }

template <Activation kKind>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kKind == Activation::kSilu) return times_sigmoid(x, x);
  if constexpr (kKind == Activation::kGelu) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  // (1 + tanh(t)) / 2 is sigmoid(2 t), here with t = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks & Gimpel 2016).
  return times_sigmoid(x, 1.5957691216057308f * fmaf(0.044715f * x * x, x, x));
}

template <typename T, Activation kKind, int kOctets, bool kAligned>
__global__ void __launch_bounds__(kGatedThreads) gated_kernel(const GatedParams params, const uint32_t row_octets,
                                                             const uint32_t total) {
  pdl_wait();
  pdl_release();
  const T* source[kOctets];
  T* target[kOctets];
  int count[kOctets];
  Octet<T> gate[kOctets];
  Octet<T> value[kOctets];
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    const uint32_t index = (blockIdx.x * kOctets + j) * kGatedThreads + threadIdx.x;
    count[j] = 0;
    if (index < total) {
      const uint32_t line = index / row_octets;
      const int begin = static_cast<int>(index - line * row_octets) * kOctet;
      const int64_t row = line;
      const int64_t outer = params.inner == 1 ? row : row / params.inner;
      const int64_t inner = params.inner == 1 ? 0 : row - outer * params.inner;
      count[j] = params.width - begin;
      source[j] = row_source<T>(params.x, outer, inner) + begin;
      target[j] = row_target<T>(params.out, outer, inner) + begin;
      gate[j] = load_octet<kAligned, true>(source[j], count[j]);
      value[j] = load_octet<kAligned, true>(source[j] + params.width, count[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    if (count[j] <= 0) continue;
    float act[kOctet];
    unpack(gate[j], act);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) act[i] = activate<kKind>(act[i]);
    pack(act, gate[j]);
    store_octet<kAligned>(target[j], multiply(gate[j], value[j]), count[j]);
  }
}

// Every instance there is, as CASE(T, kKind, kOctets, kAligned): the dispatcher below and bindings/elementwise.cu expand it.
#define ASTRAI_GATED_KIND_CASES(CASE, T, KIND) \
  CASE(T, KIND, 1, true)                       \
  CASE(T, KIND, kGatedOctets, true)            \
  CASE(T, KIND, 1, false)
#define ASTRAI_GATED_CASES(CASE, T)                           \
  ASTRAI_GATED_KIND_CASES(CASE, T, Activation::kSilu)         \
  ASTRAI_GATED_KIND_CASES(CASE, T, Activation::kGeluTanh)     \
  ASTRAI_GATED_KIND_CASES(CASE, T, Activation::kGelu)

#ifndef __CUDACC_RTC__

template <typename Pointer>
bool gated_rows_are_aligned(const RowView<Pointer>& view, const GatedParams& params, std::size_t element_bytes) {
  const int64_t elements = static_cast<int64_t>(16 / element_bytes);
  return is_aligned(view.data, 16) && (params.rows <= params.inner || view.outer_stride % elements == 0) &&
         (params.inner == 1 || view.inner_stride % elements == 0);
}

template <typename T>
cudaError_t launch_gated(const GatedParams& params, Activation kind, cudaStream_t stream) {
  const bool aligned = params.width % kOctet == 0 && gated_rows_are_aligned(params.x, params, sizeof(T)) &&
                       gated_rows_are_aligned(params.out, params, sizeof(T));
  int multiprocessors = 0;
  const cudaError_t status = multiprocessor_count(&multiprocessors);
  if (status != cudaSuccess) return status;
  const int64_t row_octets = (static_cast<int64_t>(params.width) + kOctet - 1) / kOctet;
  // Counted in 32 bits, with room for the last block's excess. The rows first: the product must not overflow.
  if (params.rows > 0x7fffffff || params.rows * row_octets > 0xffff0000LL) return cudaErrorInvalidValue;
  const int64_t total = params.rows * row_octets;
  const bool many = total >= static_cast<int64_t>(multiprocessors) * 2048 * kGatedOctets;
  const int octets = aligned && many ? kGatedOctets : 1;
  const int64_t per_block = static_cast<int64_t>(kGatedThreads) * octets;
  const dim3 grid(static_cast<unsigned int>((total + per_block - 1) / per_block));
#define ASTRAI_CASE(T_, KIND, OCTETS, ALIGNED)                                                                 \
  if (kind == KIND && octets == OCTETS && aligned == ALIGNED) {                                                \
    return launch(gated_kernel<T_, KIND, OCTETS, ALIGNED>, grid, dim3(kGatedThreads), 0, stream, params,       \
                  static_cast<uint32_t>(row_octets), static_cast<uint32_t>(total));                            \
  }
  ASTRAI_GATED_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

/// Launch on `stream` of the current device. `params` must be valid (bindings/elementwise.cu checks them); rows may be 0.
inline cudaError_t gated_activation(const GatedParams& params, DType dtype, Activation kind, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  switch (dtype) {
    case DType::kFloat32:
      return launch_gated<float>(params, kind, stream);
    case DType::kFloat16:
      return launch_gated<float16>(params, kind, stream);
    case DType::kBFloat16:
      return launch_gated<bfloat16>(params, kind, stream);
  }
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
