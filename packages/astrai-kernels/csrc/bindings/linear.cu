// Family "linear": the kernels for few rows; linear_tiled.cu has the one for more.

#include "astrai/linear/linear.cuh"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
#define ASTRAI_INSTANTIATE(T, TILES, ROW_TILES, WARPS, STAGES, NORM, BLOCKS, LEAST_STEPS, MOST_TILES) \
  template __global__ void linear_narrow_kernel<T, TILES, ROW_TILES, WARPS, STAGES, NORM>(const LinearParams);
ASTRAI_LINEAR_NARROW_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_LINEAR_NARROW_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE
#define ASTRAI_INSTANTIATE(T, ROW_TILES, CHUNK, KEEPS)                        \
  template __global__ void linear_narrow_bulk_kernel<T, ROW_TILES, CHUNK, KEEPS>( \
      const LinearParams, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const NarrowBulk);
ASTRAI_LINEAR_NARROW_BULK_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_LINEAR_NARROW_BULK_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE
#define ASTRAI_INSTANTIATE(T, ROW_TILES, DOWN, ACROSS, TILES, STAGES, SUM_ROWS, GROUPS, BLOCKS, LEAST_TILES) \
  template __global__ void linear_wide_kernel<T, ROW_TILES, DOWN, ACROSS, TILES, STAGES, SUM_ROWS, GROUPS>(const LinearParams);
ASTRAI_LINEAR_WIDE_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_LINEAR_WIDE_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE
#define ASTRAI_INSTANTIATE(T, WIDTH, GROUPS, SETS, STAGES, FIXED)                       \
  template __global__ void linear_stream_kernel<T, WIDTH, GROUPS, SETS, STAGES, FIXED>( \
      const LinearParams, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap);
ASTRAI_LINEAR_STREAM_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_LINEAR_STREAM_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE

}  // namespace astrai

#ifndef __CUDACC_RTC__

#include "guard.h"
#include "ops.h"

namespace astrai {

cudaError_t linear_many(LinearParams, DType, cudaStream_t);  // linear_tiled.cu

void launch_linear(const LinearParams& params, int dtype, int device, std::uintptr_t stream) {
  const char* what = "linear";
  require(dtype == 1 || dtype == 2, what, "dtype must be 1 (float16) or 2 (bfloat16)");
  require(params.rows >= 0 && params.rows <= (1 << 28), what, "rows must lie between 0 and 2^28");
  require(params.features >= 0 && params.features <= (1 << 28), what, "features must lie between 0 and 2^28");
  require(params.depth >= kOctet && params.depth % kOctet == 0 && params.depth <= (1 << 28), what,
          "depth must be a multiple of 8 between 8 and 2^28");
  if (params.rows == 0 || params.features == 0) return;
  require(params.x && params.weight && params.out, what, "x, weight and out must not be null");
  require(is_aligned(params.x, 16) && (params.rows == 1 || params.x_stride % kOctet == 0), what,
          "rows of x must start at multiples of 16 bytes");
  require(is_aligned(params.weight, 16) && params.weight_stride % kOctet == 0, what,
          "rows of weight must start at multiples of 16 bytes");
  require(is_aligned(params.out, 2) && is_aligned(params.bias, 2) && is_aligned(params.residual, 2), what,
          "every pointer must be a multiple of the element size");
  require(!params.swiglu || (!params.bias && !params.residual), what, "swiglu takes neither bias nor residual");
  if (params.norm_weight) {
    require(params.rows <= kNormRows && static_cast<int64_t>(params.rows) * params.depth * 2 <= kLinearMostNormBytes,
            what, "norm_weight takes at most 8 rows and 64 KiB of x");
    require(is_aligned(params.norm_weight, 16), what, "norm_weight must start at a multiple of 16 bytes");
    require(params.norm_eps >= 0.0f, what, "norm_eps must not be negative");
  }
  if (params.squares || params.next_norm) {
    require(dtype == 2 && (params.rows <= kLinearFewRows || params.fixed_order) && !params.norm_weight, what,
            "a norm in halves takes bfloat16, more than 128 rows with fixed_order alone, and no norm_weight");
  }
  if (params.squares) {
    require(params.depth % kHalfMultiple == 0 && is_aligned(params.squares, 16), what,
            "squares takes a depth that is a multiple of 64, and must start at a multiple of 16 bytes");
    require(params.norm_eps >= 0.0f, what, "norm_eps must not be negative");
  }
  if (params.next_norm) {
    require(params.features % kHalfMultiple == 0 && !params.swiglu, what,
            "next_norm takes features that are a multiple of 64, without swiglu");
    require(params.next_x && params.next_squares && is_aligned(params.next_norm, 8) && is_aligned(params.next_x, 8) &&
                is_aligned(params.next_squares, 16),
            what, "next_norm wants the halves' memory, at multiples of 16 bytes");
  }
  const DeviceGuard guard(device, what);
  const DType type = static_cast<DType>(dtype);
  const auto queue = reinterpret_cast<cudaStream_t>(stream);
  const cudaError_t few = params.rows <= kLinearFewRows ? linear(params, type, queue) : cudaErrorInvalidValue;
  check(few == cudaErrorInvalidValue ? linear_many(params, type, queue) : few, what);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
