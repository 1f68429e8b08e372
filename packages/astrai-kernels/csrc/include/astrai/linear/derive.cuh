// What follows from the parameters of linear, and what its launches must know of a device. Empty under NVRTC.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/linear/params.h"

#ifndef __CUDACC_RTC__

namespace astrai {

/// Parts that K is cut into. A function of the weight's shape alone: it fixes the order of additions.
///
/// The narrow kernel gives each slice of each 16 rows of the weight to a warp. Many short slices share the weight out
/// evenly: on an H200 eight took 0.7-0.97 of one slice's time even for a language model's head of 6,250 tiles. A slice
/// of fewer than three steps costs more than it brings. No slice is empty.
inline int linear_slices(int depth) {
  const int64_t steps = (static_cast<int64_t>(depth) + kLinearStep - 1) / kLinearStep;
  int slices = 1;
  for (int more = 2; more <= kLinearMostSlices && steps >= 3 * more; more *= 2) {
    const int64_t slice_steps = (steps + more - 1) / more;
    if (slice_steps * (more - 1) >= steps) break;
    slices = more;
  }
  return slices;
}

/// What a launch must know of the current device.
struct LinearDevice {
  int multiprocessors;
  int shared_bytes;  // most that a block can have
  int major;
};

inline cudaError_t linear_device(LinearDevice* found) {
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&found->multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&found->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(&found->major, cudaDevAttrComputeCapabilityMajor, device);
}

/// Fill what follows from the other parameters.
inline void derive(LinearParams& params) {
  const int steps = (params.depth + kLinearStep - 1) / kLinearStep;
  params.slices = linear_slices(params.depth);
  params.slice_steps = (steps + params.slices - 1) / params.slices;
  params.cluster = 1;
  params.prefetch_steps = 4;
  params.release_early = true;
  params.quads_aligned = is_aligned(params.out, 8) && params.out_stride % kLinearQuad == 0 &&
                         is_aligned(params.bias, 8) && is_aligned(params.residual, 8) &&
                         (params.residual == nullptr || params.residual_stride % kLinearQuad == 0);
  params.pairs_aligned = is_aligned(params.out, 4) && params.out_stride % 2 == 0 && is_aligned(params.residual, 4) &&
                         (params.residual == nullptr || params.residual_stride % 2 == 0);
  const RmsNormShape shape = rms_norm_shape(params.depth);
  params.norm_threads = shape.team ? 32 : shape.threads;  // idle lanes add zeros to the tree of a team
}

/// Tiles of `width` weight rows.
inline int linear_tiles(const LinearParams& params, int width) {
  const int outputs = params.swiglu ? width / 2 : width;
  return (params.features + outputs - 1) / outputs;
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
