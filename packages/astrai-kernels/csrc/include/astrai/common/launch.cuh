// Host side of a launch. Empty under NVRTC.
#pragma once

#ifndef __CUDACC_RTC__

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#if CUDART_VERSION < 11080
#error "astrai kernels need CUDA 11.8 or later (cudaLaunchKernelEx)"
#endif

namespace astrai {

/// Launch `kernel` on `stream` and return the launch's own status.
///
/// cudaLaunchKernelEx rather than <<<>>>: its result is this launch's, where cudaGetLastError would also report, and
/// clear, an error that somebody else left behind.
template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream, Params... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// Number of multiprocessors of the current device.
inline cudaError_t multiprocessor_count(int* count) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

inline bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
