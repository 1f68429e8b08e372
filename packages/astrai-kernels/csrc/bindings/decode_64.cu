// Family "attention": decode for head_dim 64.

#include "decode.h"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, float16, 64)
ASTRAI_DECODE_WIDE_CASES(ASTRAI_INSTANTIATE_DECODE, float16, 64)
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, bfloat16, 64)
ASTRAI_DECODE_WIDE_CASES(ASTRAI_INSTANTIATE_DECODE, bfloat16, 64)

#ifndef __CUDACC_RTC__

cudaError_t decode_64(const AttentionParams& params, DType dtype, int64_t max_items, bool extras, cudaStream_t stream) {
  return decode_dtype<64>(params, dtype, max_items, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
