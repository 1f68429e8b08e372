// Family "attention": prefill for head_dim 192 and 256.

#include "prefill.h"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, float16, 192)
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, bfloat16, 192)
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, float16, 256)
ASTRAI_PREFILL_CASES(ASTRAI_INSTANTIATE_PREFILL, bfloat16, 256)

#ifndef __CUDACC_RTC__

cudaError_t prefill_192(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras, cudaStream_t stream) {
  return prefill_dtype<192>(params, dtype, n_tokens, extras, stream);
}

cudaError_t prefill_256(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras, cudaStream_t stream) {
  return prefill_dtype<256>(params, dtype, n_tokens, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
