// Family "attention": prefill for head_dim 192 and 256.

#include "prefill.h"

namespace astrai {

ASTRAI_INSTANTIATE_PREFILL(192)
ASTRAI_INSTANTIATE_PREFILL(256)

#ifndef __CUDACC_RTC__

cudaError_t prefill_192(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras,
                        cudaStream_t stream) {
  return prefill_dtype<192>(params, dtype, n_tokens, extras, stream);
}

cudaError_t prefill_256(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras,
                        cudaStream_t stream) {
  return prefill_dtype<256>(params, dtype, n_tokens, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
