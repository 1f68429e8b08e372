// Family "attention": decode for head_dim 128.

#include "decode.h"

namespace astrai {

ASTRAI_INSTANTIATE_DECODE(128, 1)
ASTRAI_INSTANTIATE_DECODE(128, 2)
ASTRAI_INSTANTIATE_FRESH(128)

#ifndef __CUDACC_RTC__

cudaError_t decode_128(const AttentionParams& params, DType dtype, int64_t max_items, bool extras, cudaStream_t stream) {
  return decode_is_wide<128>(params) ? decode_dtype<128, 2>(params, dtype, max_items, extras, stream)
                                    : decode_dtype<128, 1>(params, dtype, max_items, extras, stream);
}

cudaError_t decode_fresh_128(const FreshAttentionParams& params, DType dtype, int64_t max_items, cudaStream_t stream) {
  return decode_fresh<128>(params, dtype, max_items, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
