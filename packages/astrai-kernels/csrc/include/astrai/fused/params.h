// Arguments of the fused ops: plain C++, filled by the bindings and passed to the kernels as they are.
#pragma once

#include "astrai/common/dtype.h"

namespace astrai {

/// Rows of a tensor: row r starts at data + (r / inner) * outer_stride + (r % inner) * inner_stride (elements).
template <typename Pointer>
struct RowView {
  Pointer data;
  int64_t outer_stride;
  int64_t inner_stride;
};

struct RmsNormParams {
  RowView<const void*> x;
  RowView<const void*> residual;  // read by the add variant only
  RowView<void*> out;             // may be x or residual itself
  RowView<void*> residual_out;    // written by the add variant only; may be x or residual itself
  const void* weight;             // [hidden]; nothing may write it meanwhile
  int64_t rows;
  int64_t inner;  // rows per outer index, at least 1
  int hidden;
  float eps;
};

}  // namespace astrai
