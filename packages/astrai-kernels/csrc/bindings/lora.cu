// Family "lora".

#include "astrai/lora/expand.cuh"
#include "astrai/lora/shrink.cuh"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
#define ASTRAI_INSTANTIATE(T, ROW_TILES) \
  template __global__ void lora_shrink_kernel<T, ROW_TILES>(const LoraShrinkParams, const int);
ASTRAI_LORA_SHRINK_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_LORA_SHRINK_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE
template __global__ void lora_expand_kernel<float16>(const LoraExpandParams, const int);
template __global__ void lora_expand_kernel<bfloat16>(const LoraExpandParams, const int);

}  // namespace astrai

#ifndef __CUDACC_RTC__

#include "guard.h"
#include "ops.h"

namespace astrai {

namespace {

void check_rows(const LoraRows& adapters, int dtype, int rows, int rank, const char* what) {
  require(dtype == 1 || dtype == 2, what, "dtype must be 1 (float16) or 2 (bfloat16)");
  require(rows >= 0 && rows <= (1 << 28), what, "rows must lie between 0 and 2^28");
  require(rank >= kOctet && rank <= kLoraMostRank && rank % kOctet == 0, what, "rank must be a multiple of 8 up to 64");
  require(adapters.count >= 0 && adapters.count <= (1 << 20), what, "adapters must lie between 0 and 2^20");
  require(rows == 0 || adapters.ids, what, "adapter_ids must not be null");
  require(is_aligned(adapters.ids, adapters.are_64_bit ? 8 : 4), what, "adapter_ids must be aligned to its type");
}

}  // namespace

void launch_lora_shrink(const LoraShrinkParams& params, int dtype, int device, std::uintptr_t stream) {
  const char* what = "lora_shrink";
  check_rows(params.adapters, dtype, params.rows, params.rank, what);
  require(params.depth >= kOctet && params.depth % kOctet == 0 && params.depth <= (1 << 28), what,
          "depth must be a multiple of 8 between 8 and 2^28");
  if (params.rows == 0) return;
  require(params.x && params.out && (params.a || params.adapters.count == 0), what, "x, a and out must not be null");
  require(is_aligned(params.x, 16) && (params.rows == 1 || params.x_stride % kOctet == 0), what,
          "rows of x must start at multiples of 16 bytes");
  require(is_aligned(params.a, 16) && params.a_stride % kOctet == 0 && params.a_row_stride % kOctet == 0, what,
          "rows of a must start at multiples of 16 bytes");
  require(is_aligned(params.out, 4), what, "out must be a multiple of the element size");
  const DeviceGuard guard(device, what);
  check(lora_shrink(params, static_cast<DType>(dtype), reinterpret_cast<cudaStream_t>(stream)), what);
}

void launch_lora_expand(const LoraExpandParams& params, int dtype, int device, std::uintptr_t stream) {
  const char* what = "lora_expand";
  check_rows(params.adapters, dtype, params.rows, params.rank, what);
  require(params.features >= 0 && params.features <= (1 << 28), what, "features must lie between 0 and 2^28");
  if (params.rows == 0 || params.features == 0) return;
  require(params.base && params.hidden && params.out, what, "base, hidden and out must not be null");
  require((params.b && params.scaling) || params.adapters.count == 0, what, "b and scaling must not be null");
  require(is_aligned(params.b, 16) && params.b_stride % kOctet == 0 && params.b_row_stride % kOctet == 0, what,
          "rows of b must start at multiples of 16 bytes");
  require(is_aligned(params.base, 2) && is_aligned(params.out, 2) && is_aligned(params.hidden, 4) &&
              is_aligned(params.scaling, 4),
          what, "every pointer must be a multiple of the element size");
  const DeviceGuard guard(device, what);
  check(lora_expand(params, static_cast<DType>(dtype), reinterpret_cast<cudaStream_t>(stream)), what);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
