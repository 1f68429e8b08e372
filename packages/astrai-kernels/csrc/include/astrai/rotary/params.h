// Arguments of the rotary kernel: plain C++, filled by the bindings and passed to the kernel as they are.
#pragma once

#include "astrai/common/dtype.h"

namespace astrai {

/// q or k: element (token, head, d) is at token * token_stride + head * head_stride + d.
struct RotaryTensor {
  const void* in;
  void* out;  // `in` itself with the same strides, or memory that overlaps no input
  int64_t in_token_stride;
  int64_t in_head_stride;
  int64_t out_token_stride;
  int64_t out_head_stride;
  int heads;  // 0: absent
};

struct RotaryParams {
  RotaryTensor q;
  RotaryTensor k;
  const float* cos;  // [max_pos, rotary_dim / 2]
  const float* sin;
  int64_t cos_stride;
  int64_t sin_stride;
  int64_t max_pos;
  const void* position_ids;  // [tokens], int32 or int64
  int64_t position_stride;
  bool positions_are_64_bit;
  int64_t tokens;
  int head_dim;
  int rotary_dim;
};

}  // namespace astrai
