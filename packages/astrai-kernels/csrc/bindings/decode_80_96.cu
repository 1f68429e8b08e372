// Family "attention": decode for head_dim 80 and 96.

#include "decode.h"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, float16, 80)
ASTRAI_DECODE_WIDE_CASES(ASTRAI_INSTANTIATE_DECODE, float16, 80)
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, bfloat16, 80)
ASTRAI_DECODE_WIDE_CASES(ASTRAI_INSTANTIATE_DECODE, bfloat16, 80)
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, float16, 96)
ASTRAI_DECODE_WIDE_CASES(ASTRAI_INSTANTIATE_DECODE, float16, 96)
ASTRAI_DECODE_CASES(ASTRAI_INSTANTIATE_DECODE, bfloat16, 96)
ASTRAI_DECODE_WIDE_CASES(ASTRAI_INSTANTIATE_DECODE, bfloat16, 96)

#ifndef __CUDACC_RTC__

cudaError_t decode_80(const AttentionParams& params, DType dtype, int64_t max_items, bool extras, cudaStream_t stream) {
  return decode_dtype<80>(params, dtype, max_items, extras, stream);
}

cudaError_t decode_96(const AttentionParams& params, DType dtype, int64_t max_items, bool extras, cudaStream_t stream) {
  return decode_dtype<96>(params, dtype, max_items, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
