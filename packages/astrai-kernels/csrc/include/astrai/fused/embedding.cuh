// Rows of a table by their ids, and half of the norm that reads them, if wanted (linear/halves.cuh).
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/fused/params.h"
#include "astrai/linear/params.h"

namespace astrai {

constexpr int kEmbeddingThreads = 256;
/// Octets of a thread where there are enough: that many ids, and then rows, are in flight.
constexpr int kEmbeddingOctets = 4;

/// Store a token's features from `begin` on, times their weights, and the sum of squares of 16, in the order of halves.cuh.
/// A pair of neighbouring lanes, which both call it, has those 16.
__device__ __forceinline__ void begin_norm(const EmbeddingParams& params, int64_t token, int begin,
                                           const Octet<bfloat16>& octet, const Octet<bfloat16>& weight, bool wanted) {
  float value[kOctet];
  unpack(octet, value);
  float pair[kOctet / 2];
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    pair[i] = __fmaf_rn(value[2 * i + 1], value[2 * i + 1], __fmul_rn(value[2 * i], value[2 * i]));
    pair[i] = __fadd_rn(pair[i], __shfl_xor_sync(0xffffffffu, pair[i], 1));
  }
  if (!wanted) return;
  store_octet<true>(static_cast<bfloat16*>(params.next_x) + token * params.hidden + begin, multiply(octet, weight), kOctet);
  if (begin % kHalfWidth == 0) {
    params.next_squares[token * (params.hidden / kHalfWidth) + begin / kHalfWidth] =
        __fadd_rn(__fadd_rn(pair[0], pair[1]), __fadd_rn(pair[2], pair[3]));
  }
}

template <typename T, bool kAligned>
constexpr bool kBeginsNorm = false;
template <>
constexpr bool kBeginsNorm<bfloat16, true> = true;

/// kAligned as in load_octet, for every row of both tensors.
template <typename T, int kOctets, bool kAligned>
__global__ void __launch_bounds__(kEmbeddingThreads) embedding_kernel(const EmbeddingParams params,
                                                                     const uint32_t row_octets, const uint32_t total) {
  pdl_wait();
  pdl_release();
  int64_t id[kOctets];
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    const uint32_t index = (blockIdx.x * kOctets + j) * kEmbeddingThreads + threadIdx.x;
    const int64_t token = index / row_octets;
    id[j] = -1;
    if (index < total) {
      id[j] = params.ids_are_64_bit ? static_cast<const int64_t*>(params.ids)[token * params.id_stride]
                                    : static_cast<const int32_t*>(params.ids)[token * params.id_stride];
    }
  }
  Octet<T> octet[kOctets];
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    const uint32_t index = (blockIdx.x * kOctets + j) * kEmbeddingThreads + threadIdx.x;
    const int begin = static_cast<int>(index % row_octets) * kOctet;
    if (id[j] >= 0 && id[j] < params.vocab) {
      octet[j] = load_octet<kAligned, true>(static_cast<const T*>(params.table) + id[j] * params.table_stride + begin,
                                            params.hidden - begin);
    } else {
#pragma unroll
      for (int i = 0; i < Octet<T>::kWords; ++i) octet[j].word[i] = sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu;  // NaN
    }
  }
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    const uint32_t index = (blockIdx.x * kOctets + j) * kEmbeddingThreads + threadIdx.x;
    const int64_t token = index / row_octets;
    const int begin = static_cast<int>(index % row_octets) * kOctet;
    if (index < total) {
      store_octet<kAligned>(static_cast<T*>(params.out) + token * params.out_stride + begin, octet[j],
                            params.hidden - begin);
    }
    if constexpr (kBeginsNorm<T, kAligned>) {
      if (params.next_norm != nullptr) {
        const auto* weights = static_cast<const T*>(params.next_norm);
        begin_norm(params, token, begin, octet[j], load_octet<true, true>(weights + begin, kOctet), index < total);
      }
    }
  }
}

// Every instance there is, as CASE(T, kOctets, kAligned): the dispatcher below and bindings/elementwise.cu expand it.
#define ASTRAI_EMBEDDING_CASES(CASE, T) \
  CASE(T, 1, true)                      \
  CASE(T, kEmbeddingOctets, true)       \
  CASE(T, 1, false)

#ifndef __CUDACC_RTC__

template <typename T>
cudaError_t launch_embedding(const EmbeddingParams& params, cudaStream_t stream) {
  const int64_t elements = static_cast<int64_t>(16 / sizeof(T));
  const bool aligned = params.hidden % kOctet == 0 && is_aligned(params.table, 16) && is_aligned(params.out, 16) &&
                       (params.vocab <= 1 || params.table_stride % elements == 0) &&
                       (params.tokens <= 1 || params.out_stride % elements == 0);
  const int64_t row_octets = (static_cast<int64_t>(params.hidden) + kOctet - 1) / kOctet;
  // Counted in 32 bits, with room for the last block's excess. The tokens first: the product must not overflow.
  if (params.tokens > 0x7fffffff || params.tokens * row_octets > 0xffff0000LL) return cudaErrorInvalidValue;
  const int64_t total = params.tokens * row_octets;
  int multiprocessors = 0;
  const cudaError_t status = multiprocessor_count(&multiprocessors);
  if (status != cudaSuccess) return status;
  const bool many = total >= static_cast<int64_t>(multiprocessors) * 1024 * kEmbeddingOctets;
  const int octets = aligned && many ? kEmbeddingOctets : 1;
  const int64_t per_block = static_cast<int64_t>(kEmbeddingThreads) * octets;
  const dim3 grid(static_cast<unsigned int>((total + per_block - 1) / per_block));
#define ASTRAI_CASE(T_, OCTETS, ALIGNED)                                                                 \
  if (octets == OCTETS && aligned == ALIGNED) {                                                          \
    return launch(embedding_kernel<T_, OCTETS, ALIGNED>, grid, dim3(kEmbeddingThreads), 0, stream, params, \
                  static_cast<uint32_t>(row_octets), static_cast<uint32_t>(total));                      \
  }
  ASTRAI_EMBEDDING_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

/// Launch on `stream` of the current device. `params` must be valid (bindings/elementwise.cu checks them).
inline cudaError_t embedding(const EmbeddingParams& params, DType dtype, cudaStream_t stream) {
  if (params.tokens == 0) return cudaSuccess;
  switch (dtype) {
    case DType::kFloat32:
      return launch_embedding<float>(params, stream);
    case DType::kFloat16:
      return launch_embedding<float16>(params, stream);
    case DType::kBFloat16:
      return launch_embedding<bfloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
