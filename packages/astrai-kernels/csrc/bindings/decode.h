// Dispatch of decode attention over its instances: one translation unit per group of head sizes includes this.
#pragma once

#include "astrai/attention/decode.cuh"

#ifndef __CUDACC_RTC__

namespace astrai {

template <typename T, int kDim>
cudaError_t decode_case(const AttentionParams& params, int64_t max_items, bool extras, cudaStream_t stream) {
  const int tiles = decode_row_tiles(kDim, params.n_heads / params.n_kv_heads * params.q_len);
  const bool paged = params.req_to_token != nullptr;
#define ASTRAI_CASE(T_, KV, DIM, TILES, EXTRAS)                                  \
  if (tiles == TILES && extras == EXTRAS && paged == KV::kPaged) {               \
    return launch_decode<T_, KV, DIM, TILES, EXTRAS>(params, max_items, stream); \
  }
  ASTRAI_DECODE_CASES(ASTRAI_CASE, T, kDim)
  if constexpr (kDim <= 128) {
    ASTRAI_DECODE_WIDE_CASES(ASTRAI_CASE, T, kDim)
  }
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

template <int kDim>
cudaError_t decode_dtype(const AttentionParams& params, DType dtype, int64_t max_items, bool extras,
                         cudaStream_t stream) {
  return dtype == DType::kFloat16 ? decode_case<float16, kDim>(params, max_items, extras, stream)
                                  : decode_case<bfloat16, kDim>(params, max_items, extras, stream);
}

// Defined in decode_*.cu.
cudaError_t decode_64(const AttentionParams&, DType, int64_t max_items, bool extras, cudaStream_t);
cudaError_t decode_80(const AttentionParams&, DType, int64_t max_items, bool extras, cudaStream_t);
cudaError_t decode_96(const AttentionParams&, DType, int64_t max_items, bool extras, cudaStream_t);
cudaError_t decode_128(const AttentionParams&, DType, int64_t max_items, bool extras, cudaStream_t);
cudaError_t decode_192(const AttentionParams&, DType, int64_t max_items, bool extras, cudaStream_t);
cudaError_t decode_256(const AttentionParams&, DType, int64_t max_items, bool extras, cudaStream_t);

}  // namespace astrai

#endif  // __CUDACC_RTC__

#define ASTRAI_INSTANTIATE_DECODE(T, KV, DIM, TILES, EXTRAS) \
  template __global__ void decode_kernel<T, KV, DIM, TILES, EXTRAS>(const AttentionParams);
