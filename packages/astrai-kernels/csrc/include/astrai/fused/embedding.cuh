// Rows of a table by their ids.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/params.h"

namespace astrai {

constexpr int kEmbeddingThreads = 256;

/// One octet a thread; kAligned as in load_octet, for every row of both tensors.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kEmbeddingThreads) embedding_kernel(const EmbeddingParams params,
                                                                     const uint32_t row_octets, const uint32_t total) {
  pdl_wait();
  pdl_release();
  const uint32_t index = blockIdx.x * kEmbeddingThreads + threadIdx.x;
  if (index >= total) return;
  const uint32_t line = index / row_octets;
  const int begin = static_cast<int>(index - line * row_octets) * kOctet;
  const int count = params.hidden - begin;
  const int64_t token = line;
  const int64_t id = params.ids_are_64_bit ? static_cast<const int64_t*>(params.ids)[token * params.id_stride]
                                           : static_cast<const int32_t*>(params.ids)[token * params.id_stride];
  Octet<T> octet;
  if (id >= 0 && id < params.vocab) {
    octet = load_octet<kAligned, true>(static_cast<const T*>(params.table) + id * params.table_stride + begin, count);
  } else {
#pragma unroll
    for (int i = 0; i < Octet<T>::kWords; ++i) octet.word[i] = sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu;  // NaN
  }
  store_octet<kAligned>(static_cast<T*>(params.out) + token * params.out_stride + begin, octet, count);
}

// Every instance there is, as CASE(T, kAligned): the dispatcher below and bindings/elementwise.cu expand it.
#define ASTRAI_EMBEDDING_CASES(CASE, T) \
  CASE(T, true)                         \
  CASE(T, false)

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
  const dim3 grid(static_cast<unsigned int>((total + kEmbeddingThreads - 1) / kEmbeddingThreads));
#define ASTRAI_CASE(T_, ALIGNED)                                                                         \
  if (aligned == ALIGNED) {                                                                              \
    return launch(embedding_kernel<T_, ALIGNED>, grid, dim3(kEmbeddingThreads), 0, stream, params,       \
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
