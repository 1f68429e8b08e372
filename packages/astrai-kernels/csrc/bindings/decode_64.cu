// Family "attention": decode for head_dim 64.

#include "decode.h"

namespace astrai {

ASTRAI_INSTANTIATE_DECODE(64, 1)
ASTRAI_INSTANTIATE_DECODE(64, 2)
ASTRAI_INSTANTIATE_FRESH(64)

#ifndef __CUDACC_RTC__

cudaError_t decode_64(const AttentionParams& params, DType dtype, int64_t max_items, bool extras, cudaStream_t stream) {
  return decode_is_wide<64>(params) ? decode_dtype<64, 2>(params, dtype, max_items, extras, stream)
                                    : decode_dtype<64, 1>(params, dtype, max_items, extras, stream);
}

cudaError_t decode_fresh_64(const FreshAttentionParams& params, DType dtype, int64_t max_items, cudaStream_t stream) {
  return decode_fresh<64>(params, dtype, max_items, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
