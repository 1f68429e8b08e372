// Family "attention": prefill for head_dim 96 and 128.

#include "prefill.h"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, float16, 96)
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, bfloat16, 96)
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, float16, 128)
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, bfloat16, 128)

#ifndef __CUDACC_RTC__

cudaError_t prefill_96(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras, cudaStream_t stream) {
  return prefill_dtype<96>(params, dtype, n_tokens, extras, stream);
}

cudaError_t prefill_128(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras, cudaStream_t stream) {
  return prefill_dtype<128>(params, dtype, n_tokens, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
