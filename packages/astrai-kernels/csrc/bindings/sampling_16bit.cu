// Family "sampling": the kernels over logits of 16 bits; sampling.cu checks and dispatches.

#include "astrai/sampling/sampling.cuh"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
template __global__ void sampling_kernel<float16, true>(const SamplingParams);
template __global__ void sampling_kernel<float16, false>(const SamplingParams);
template __global__ void sampling_kernel<bfloat16, true>(const SamplingParams);
template __global__ void sampling_kernel<bfloat16, false>(const SamplingParams);

#ifndef __CUDACC_RTC__

cudaError_t sampling_16bit(const SamplingParams& params, DType dtype, cudaStream_t stream) {
  return dtype == DType::kFloat16 ? launch_sampling<float16>(params, stream) : launch_sampling<bfloat16>(params, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
