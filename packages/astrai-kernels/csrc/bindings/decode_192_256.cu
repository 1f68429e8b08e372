// Family "attention": decode for head_dim 192 and 256.

#include "decode.h"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, float16, 192)
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, bfloat16, 192)
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, float16, 256)
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, bfloat16, 256)

#ifndef __CUDACC_RTC__

cudaError_t decode_192(const AttentionParams& params, DType dtype, int64_t max_items, bool extras, cudaStream_t stream) {
  return decode_dtype<192>(params, dtype, max_items, extras, stream);
}

cudaError_t decode_256(const AttentionParams& params, DType dtype, int64_t max_items, bool extras, cudaStream_t stream) {
  return decode_dtype<256>(params, dtype, max_items, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
