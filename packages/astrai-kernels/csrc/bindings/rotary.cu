// Family "rotary".

#include "astrai/rotary/rotary.cuh"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
#define ASTRAI_INSTANTIATE(T, INTERLEAVED, ALIGNED, HEADS) \
  template __global__ void rotary_kernel<T, INTERLEAVED, ALIGNED, HEADS>(const RotaryParams, const RotaryTiling);
ASTRAI_ROTARY_CASES(ASTRAI_INSTANTIATE, float)
ASTRAI_ROTARY_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_ROTARY_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE

}  // namespace astrai

#ifndef __CUDACC_RTC__

#include "guard.h"
#include "ops.h"

namespace astrai {

void launch_rotary(const RotaryParams& params, int dtype, bool interleaved, int device, std::uintptr_t stream) {
  const char* what = "rotary";
  require(dtype >= 0 && dtype <= 2, what, "dtype must be 0 (float32), 1 (float16) or 2 (bfloat16)");
  require(params.tokens >= 0, what, "tokens must not be negative");
  require(params.q.heads >= 0 && params.k.heads >= 0 && params.q.heads <= (1 << 20) && params.k.heads <= (1 << 20),
          what, "heads must lie between 0 and 2^20");
  require(params.head_dim >= 2 && params.head_dim <= (1 << 16), what, "head_dim must lie between 2 and 2^16");
  require(params.rotary_dim >= 2 && params.rotary_dim % 2 == 0 && params.rotary_dim <= params.head_dim, what,
          "rotary_dim must be even and lie between 2 and head_dim");
  require(params.max_pos >= 1, what, "max_pos must be at least 1");
  if (params.tokens == 0 || params.q.heads + params.k.heads == 0) return;
  require(params.cos && params.sin && params.position_ids, what, "cos, sin and position_ids must not be null");
  const std::size_t bytes = dtype == 0 ? 4 : 2;
  for (const RotaryTensor* tensor : {&params.q, &params.k}) {
    require(tensor->heads == 0 || (tensor->in && tensor->out), what, "q, k and their outputs must not be null");
    require(is_aligned(tensor->in, bytes) && is_aligned(tensor->out, bytes), what,
            "every pointer must be a multiple of the element size");
  }
  require(is_aligned(params.cos, 4) && is_aligned(params.sin, 4) &&
              is_aligned(params.position_ids, params.positions_are_64_bit ? 8 : 4),
          what, "every pointer must be a multiple of the element size");
  const DeviceGuard guard(device, what);
  check(rotary(params, static_cast<DType>(dtype), interleaved, reinterpret_cast<cudaStream_t>(stream)), what);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
