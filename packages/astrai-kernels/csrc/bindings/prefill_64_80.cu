// Family "attention": prefill for head_dim 64 and 80.

#include "prefill.h"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, float16, 64)
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, bfloat16, 64)
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, float16, 80)
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, bfloat16, 80)

#ifndef __CUDACC_RTC__

cudaError_t prefill_64(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras, cudaStream_t stream) {
  return prefill_dtype<64>(params, dtype, n_tokens, extras, stream);
}

cudaError_t prefill_80(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras, cudaStream_t stream) {
  return prefill_dtype<80>(params, dtype, n_tokens, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
