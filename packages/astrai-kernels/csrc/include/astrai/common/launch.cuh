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
///
/// From compute capability 9.0 on, with programmatic stream serialisation: the kernel's blocks may become resident
/// while the kernel before it on the stream still runs, so each must call pdl_wait() (common/pdl.cuh) before it reads
/// what an earlier kernel wrote and before its first store.
template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream,
                   Params... arguments) {
  int device = 0;
  int major = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = major >= 9 ? 1 : 0;
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
