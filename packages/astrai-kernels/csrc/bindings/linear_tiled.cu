// Family "linear": the kernel for any number of rows.

#include "astrai/linear/tiled.cuh"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
#define ASTRAI_INSTANTIATE(T, GROUPS) template __global__ void linear_tiled_kernel<T, GROUPS>(const LinearParams);
ASTRAI_LINEAR_TILED_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_LINEAR_TILED_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE

}  // namespace astrai

#ifndef __CUDACC_RTC__

namespace astrai {

cudaError_t linear_many(LinearParams params, DType dtype, cudaStream_t stream) {
  return linear_tiled(params, dtype, stream);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
