// Family "attention": decode for head_dim 128.

#include "decode.h"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, float16, 128)
ASTRAI_DECODE_WIDE_CASES(ASTRAI_INSTANTIATE_DECODE, float16, 128)
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, bfloat16, 128)
ASTRAI_DECODE_WIDE_CASES(ASTRAI_INSTANTIATE_DECODE, bfloat16, 128)

#ifndef __CUDACC_RTC__

cudaError_t decode_128(const AttentionParams& params, DType dtype, int64_t max_items, bool extras, cudaStream_t stream) {
  return decode_dtype<128>(params, dtype, max_items, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
