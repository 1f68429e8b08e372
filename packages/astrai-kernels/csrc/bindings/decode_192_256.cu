// Family "attention": decode for head_dim 192 and 256.

#include "decode.h"

namespace astrai {

ASTRAI_INSTANTIATE_DECODE(192, 1)
ASTRAI_INSTANTIATE_DECODE(256, 1)

#ifndef __CUDACC_RTC__

cudaError_t decode_192(const AttentionParams& params, DType dtype, int64_t max_items, bool extras,
                       cudaStream_t stream) {
  return decode_dtype<192, 1>(params, dtype, max_items, extras, stream);
}

cudaError_t decode_256(const AttentionParams& params, DType dtype, int64_t max_items, bool extras,
                       cudaStream_t stream) {
  return decode_dtype<256, 1>(params, dtype, max_items, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
