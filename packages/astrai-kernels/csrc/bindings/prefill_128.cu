// Family "attention": prefill for head_dim 128.

#include "prefill.h"

namespace astrai {

ASTRAI_INSTANTIATE_PREFILL(128)

#ifndef __CUDACC_RTC__

cudaError_t prefill_128(const AttentionParams& params, DType dtype, int64_t n_tokens, bool extras,
                        cudaStream_t stream) {
  return prefill_dtype<128>(params, dtype, n_tokens, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
