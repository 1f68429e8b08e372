// Dispatch of prefill attention over its instances: one translation unit per group of head sizes includes this.
#pragma once

#include "astrai/attention/prefill.cuh"

#ifndef __CUDACC_RTC__

namespace astrai {

template <typename T, int kDim>
cudaError_t prefill_case(const AttentionParams& params, int64_t n_tokens, bool extras, cudaStream_t stream) {
#define ASTRAI_CASE(T_, KV, DIM, EXTRAS) \
  if (extras == EXTRAS) return launch_prefill<T_, KV, DIM, EXTRAS>(params, n_tokens, stream);
  ASTRAI_PREFILL_CASES(ASTRAI_CASE, T, kDim)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

template <int kDim>
cudaError_t prefill_dtype(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras,
                          cudaStream_t stream) {
  if (params.k_scale) return launch_prefill<float16, NarrowKV, kDim, true>(params, n_tokens, stream);
  return dtype == DType::kFloat16 ? prefill_case<float16, kDim>(params, n_tokens, extras, stream)
                                  : prefill_case<bfloat16, kDim>(params, n_tokens, extras, stream);
}

// Defined in prefill_*.cu.
cudaError_t prefill_64(const AttentionParams&, DType, int64_t n_tokens, bool extras, cudaStream_t);
cudaError_t prefill_80_96(const AttentionParams&, DType, int64_t n_tokens, bool extras, cudaStream_t);
cudaError_t prefill_128(const AttentionParams&, DType, int64_t n_tokens, bool extras, cudaStream_t);
cudaError_t prefill_192(const AttentionParams&, DType, int64_t n_tokens, bool extras, cudaStream_t);
cudaError_t prefill_256(const AttentionParams&, DType, int64_t n_tokens, bool extras, cudaStream_t);

}  // namespace astrai

#endif  // __CUDACC_RTC__

// Instantiated by name, so that NVRTC, which compiles no launch code, compiles every kernel.
#define ASTRAI_INSTANTIATE_PREFILL_KERNEL(T, KV, DIM, EXTRAS) \
  template __global__ void prefill_kernel<T, KV, DIM, EXTRAS>(const AttentionParams);
#define ASTRAI_INSTANTIATE_PREFILL(DIM)                                  \
  ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL_KERNEL, float16, DIM)  \
  ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL_KERNEL, bfloat16, DIM) \
  ASTRAI_INSTANTIATE_PREFILL_KERNEL(float16, NarrowKV, DIM, true)
