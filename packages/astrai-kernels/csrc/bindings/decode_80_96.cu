// Family "attention": decode for head_dim 80 and 96.

#include "decode.h"

namespace astrai {

ASTRAI_INSTANTIATE_DECODE(96, 1)

#ifndef __CUDACC_RTC__

cudaError_t decode_80_96(const AttentionParams& params, DType dtype, int64_t max_items, bool extras,
                         cudaStream_t stream) {
  return decode_dtype<96, 1>(params, dtype, max_items, extras, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
