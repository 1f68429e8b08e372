// Family "fused": RMSNorm with and without the residual add.

#include "astrai/fused/rms_norm.cuh"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
#define ASTRAI_INSTANTIATE(T, TEAM, OCTETS, ADD, ALIGNED) \
  template __global__ void rms_norm_kernel<T, TEAM, OCTETS, ADD, ALIGNED>(const RmsNormParams, const bool);
ASTRAI_RMS_NORM_CASES(ASTRAI_INSTANTIATE, float, false)
ASTRAI_RMS_NORM_CASES(ASTRAI_INSTANTIATE, float, true)
ASTRAI_RMS_NORM_CASES(ASTRAI_INSTANTIATE, float16, false)
ASTRAI_RMS_NORM_CASES(ASTRAI_INSTANTIATE, float16, true)
ASTRAI_RMS_NORM_CASES(ASTRAI_INSTANTIATE, bfloat16, false)
ASTRAI_RMS_NORM_CASES(ASTRAI_INSTANTIATE, bfloat16, true)
#undef ASTRAI_INSTANTIATE

#define ASTRAI_INSTANTIATE(T, TEAM, WARPS, DEPTH, ROWS, ADD) \
  template __global__ void rms_norm_bulk_kernel<T, TEAM, WARPS, DEPTH, ROWS, ADD>(const RmsNormParams, const int);
ASTRAI_RMS_NORM_BULK_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_RMS_NORM_BULK_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE

}  // namespace astrai

#ifndef __CUDACC_RTC__

#include "guard.h"
#include "ops.h"

namespace astrai {

void launch_rms_norm(const RmsNormParams& params, int dtype, bool with_add, bool overlap, int device,
                     std::uintptr_t stream) {
  const char* what = with_add ? "add_rms_norm" : "rms_norm";
  require(dtype >= 0 && dtype <= 2, what, "dtype must be 0 (float32), 1 (float16) or 2 (bfloat16)");
  require(params.rows >= 0, what, "rows must not be negative");
  require(params.inner >= 1, what, "inner must be at least 1");
  require(params.hidden >= 1 && params.hidden <= (1 << 30), what, "hidden must lie between 1 and 2^30");
  require(params.eps >= 0.0f, what, "eps must not be negative");
  if (params.rows == 0) return;
  const std::size_t bytes = dtype == 0 ? 4 : 2;
  require(params.x.data && params.weight && params.out.data, what, "x, weight and out must not be null");
  require(!with_add || (params.residual.data && params.residual_out.data), what,
          "residual and residual_out must not be null");
  require(is_aligned(params.x.data, bytes) && is_aligned(params.weight, bytes) &&
              is_aligned(params.out.data, bytes) && is_aligned(params.residual.data, bytes) &&
              is_aligned(params.residual_out.data, bytes),
          what, "every pointer must be a multiple of the element size");
  const DeviceGuard guard(device, what);
  check(rms_norm(params, static_cast<DType>(dtype), with_add, reinterpret_cast<cudaStream_t>(stream), overlap), what);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
