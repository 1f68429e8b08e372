// Dispatch of decode attention over its instances: one translation unit per group of head sizes includes this.
#pragma once

#include "astrai/attention/decode.cuh"

#ifndef __CUDACC_RTC__

namespace astrai {

template <typename T, int kDim, int kTiles>
cudaError_t decode_case(const AttentionParams& params, int64_t max_items, bool extras, cudaStream_t stream) {
#define ASTRAI_CASE(T_, KV, DIM, TILES, EXTRAS) \
  if (extras == EXTRAS) return launch_decode<T_, KV, DIM, TILES, EXTRAS>(params, max_items, stream);
  ASTRAI_DECODE_CASES(ASTRAI_CASE, T, kDim, kTiles)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

template <int kDim, int kTiles>
cudaError_t decode_dtype(const AttentionParams& params, DType dtype, int64_t max_items, bool extras,
                         cudaStream_t stream) {
  if (params.k_scale) return launch_decode<float16, NarrowKV, kDim, kTiles, true>(params, max_items, stream);
  return dtype == DType::kFloat16 ? decode_case<float16, kDim, kTiles>(params, max_items, extras, stream)
                                  : decode_case<bfloat16, kDim, kTiles>(params, max_items, extras, stream);
}

template <int kDim>
bool decode_is_wide(const AttentionParams& params) {
  return decode_row_tiles(kDim, params.n_heads / params.n_kv_heads * params.q_len) == 2;
}

// Defined in decode_*.cu.
cudaError_t decode_64(const AttentionParams&, DType, int64_t max_items, bool extras, cudaStream_t);
cudaError_t decode_80_96(const AttentionParams&, DType, int64_t max_items, bool extras, cudaStream_t);
cudaError_t decode_128(const AttentionParams&, DType, int64_t max_items, bool extras, cudaStream_t);
cudaError_t decode_192(const AttentionParams&, DType, int64_t max_items, bool extras, cudaStream_t);
cudaError_t decode_256(const AttentionParams&, DType, int64_t max_items, bool extras, cudaStream_t);
cudaError_t decode_fresh_64(const FreshAttentionParams&, DType, int64_t max_items, cudaStream_t);
cudaError_t decode_fresh_128(const FreshAttentionParams&, DType, int64_t max_items, cudaStream_t);

template <int kDim>
cudaError_t decode_fresh(const FreshAttentionParams& params, DType dtype, int64_t max_items, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? launch_decode<float16, FreshKV, kDim, 1, false>(params, max_items, stream)
                                  : launch_decode<bfloat16, FreshKV, kDim, 1, false>(params, max_items, stream);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__

// Instantiated by name, so that NVRTC, which compiles no launch code, compiles every kernel.
#define ASTRAI_INSTANTIATE_DECODE_KERNEL(T, KV, DIM, TILES, EXTRAS) \
  template __global__ void decode_kernel<T, KV, DIM, TILES, EXTRAS>(const KV::Params);
#define ASTRAI_INSTANTIATE_DECODE(DIM, TILES)                                  \
  ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE_KERNEL, float16, DIM, TILES)   \
  ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE_KERNEL, bfloat16, DIM, TILES)  \
  ASTRAI_INSTANTIATE_DECODE_KERNEL(float16, NarrowKV, DIM, TILES, true)
#define ASTRAI_INSTANTIATE_FRESH(DIM)                            \
  ASTRAI_INSTANTIATE_DECODE_KERNEL(float16, FreshKV, DIM, 1, false) \
  ASTRAI_INSTANTIATE_DECODE_KERNEL(bfloat16, FreshKV, DIM, 1, false)
