// Descriptors for the copy engine, through the driver's own entry point: nothing is linked against libcuda. Not for NVRTC.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>

#include "astrai/common/bulk.cuh"
#include "astrai/common/dtype.h"

namespace astrai {

/// A tensor of 16-bit elements whose boxes arrive as rows of 128 bytes with the 128-byte swizzle (fragments.cuh).
///
/// shape: from the innermost dimension on; strides: bytes between neighbours of the second dimension and those above,
/// multiples of 16. The innermost extent of a box is 64 elements.
template <int kRank>
cudaError_t encode_map(TensorMap* map, DType dtype, const void* data, const uint64_t (&shape)[kRank],
                       const uint64_t (&strides)[kRank - 1], const uint32_t (&box)[kRank]) {
  static_assert(kRank <= 5, "the engine knows five dimensions");
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)
               : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const uint32_t steps[5] = {1, 1, 1, 1, 1};  // none may be 0
  CUtensorMap made;
  const CUresult result = encode(
      &made, dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, kRank,
      const_cast<void*>(data), reinterpret_cast<const cuuint64_t*>(shape), reinterpret_cast<const cuuint64_t*>(strides),
      box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  static_assert(sizeof made == sizeof *map, "the driver's descriptor has 128 bytes");
  std::memcpy(map, &made, sizeof made);
  return cudaSuccess;
}

}  // namespace astrai
