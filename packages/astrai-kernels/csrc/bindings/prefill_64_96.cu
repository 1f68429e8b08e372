// Family "attention": prefill for head_dim 64, 80 and 96.

#include "prefill.h"

namespace astrai {

ASTRAI_INSTANTIATE_PREFILL(64)
ASTRAI_INSTANTIATE_PREFILL(96)

#ifndef __CUDACC_RTC__

cudaError_t prefill_64(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras, cudaStream_t stream) {
  return prefill_dtype<64>(params, dtype, n_tokens, extras, stream);
}

cudaError_t prefill_80_96(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras,
                          cudaStream_t stream) {
  return prefill_dtype<96>(params, dtype, n_tokens, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
