// linear: out = x @ weight^T and an epilogue, for 1 to 128 rows of 16-bit types, fp32 accumulation.
//
// Reduction contract: an output is the sum, from left to right, of `slices` partial sums; a partial sum runs over its
// slice of K in rising chunks of 32 k, two mma.m16n8k16 each. `slices` and their bounds follow from the weight's shape
// alone (linear_slices), so that a row's bits depend on that row and the weight, whatever kernel the number of rows picks.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/linear/narrow.cuh"
#include "astrai/linear/wide.cuh"

// Every instance there is, most wanted first: the dispatcher takes the first whose rows and shared memory suffice.
// CASE(T, kTiles, kWarps, kStages, kNorm); two tiles are for swiglu. The 2-stage ones are for multiprocessors with 99 KB.
#define ASTRAI_LINEAR_NARROW_CASES(CASE, T) \
  CASE(T, 1, 8, 4, false)                   \
  CASE(T, 1, 8, 2, false)                   \
  CASE(T, 2, 8, 3, false)                   \
  CASE(T, 2, 8, 2, false)                   \
  CASE(T, 1, 8, 4, true)                    \
  CASE(T, 1, 8, 2, true)                    \
  CASE(T, 2, 8, 3, true)                    \
  CASE(T, 2, 8, 2, true)

// CASE(T, kRowTiles, kWarpsDown, kWarpsAcross, kTiles, kStages, blocks a multiprocessor)
#define ASTRAI_LINEAR_WIDE_CASES(CASE, T) \
  CASE(T, 2, 4, 1, 1, 6, 3)               \
  CASE(T, 4, 4, 1, 1, 6, 2)               \
  CASE(T, 8, 4, 2, 1, 5, 2)               \
  CASE(T, 16, 4, 2, 2, 4, 1)              \
  CASE(T, 16, 4, 2, 1, 2, 1)

#ifndef __CUDACC_RTC__

namespace astrai {

constexpr int kLinearMostNormBytes = 65536;  // of x, where it is normalised first: each block keeps all of it

/// Parts that K is cut into. A function of the weight's shape alone: it fixes the order of additions.
///
/// The narrow kernel gives each slice of each 16 output features to a warp: as many slices as make 800 warps or more,
/// which is what keeps enough loads in flight on 132 multiprocessors. No slice is empty.
inline int linear_slices(int features, int depth) {
  const int64_t tiles = (static_cast<int64_t>(features) + 15) / 16;
  const int64_t steps = (static_cast<int64_t>(depth) + kLinearStep - 1) / kLinearStep;
  int slices = 1;
  for (int more = 2; more <= kLinearMostSlices && tiles * slices < 800; more *= 2) {
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
  params.slices = linear_slices(params.features, params.depth);
  params.slice_steps = (steps + params.slices - 1) / params.slices;
  params.cluster = 1;
  params.quads_aligned = is_aligned(params.out, 8) && params.out_stride % kLinearQuad == 0 &&
                         is_aligned(params.bias, 8) && is_aligned(params.residual, 8) &&
                         (params.residual == nullptr || params.residual_stride % kLinearQuad == 0);
  const RmsNormShape shape = rms_norm_shape(params.depth);
  params.norm_threads = shape.team ? 32 : shape.threads;  // idle lanes add zeros to the tree of a team
}

template <int kTiles, int kWarps, int kStages>
int narrow_shared_bytes(const LinearParams& params) {
  const NarrowLayout layout = narrow_layout<kTiles>(params.rows, params.depth, params.norm_weight != nullptr);
  return kWarps * (kStages * layout.stage + 2 * layout.merge) + layout.normed;
}

/// `per_multiprocessor`: most blocks for each; they share the tiles out among themselves.
template <typename T, int kTiles, int kWarps, int kStages, bool kNorm>
cudaError_t launch_linear_narrow(const LinearParams& params, const LinearDevice& device, int per_multiprocessor,
                                 cudaStream_t stream) {
  const auto kernel = linear_narrow_kernel<T, kTiles, kWarps, kStages, kNorm>;
  const int bytes = narrow_shared_bytes<kTiles, kWarps, kStages>(params);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  const int outputs = (params.swiglu ? 8 : 16) * kTiles * (kWarps / params.slices);
  const int units = (params.features + outputs - 1) / outputs;
  const int most = device.multiprocessors * per_multiprocessor;
  const dim3 grid(static_cast<unsigned int>(units < most ? units : most));
  return launch(kernel, grid, dim3(kWarps * 32), static_cast<std::size_t>(bytes), stream, params);
}

/// `in_clusters`: slices become blocks of a cluster, where the device has them.
template <typename T, int kRowTiles, int kWarpsDown, int kWarpsAcross, int kTiles, int kStages>
cudaError_t launch_linear_wide(LinearParams params, const LinearDevice& device, int per_multiprocessor,
                               bool in_clusters, cudaStream_t stream) {
  using Shape = WideShape<kRowTiles, kWarpsDown, kWarpsAcross, kTiles, kStages>;
  const auto kernel = linear_wide_kernel<T, kRowTiles, kWarpsDown, kWarpsAcross, kTiles, kStages>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (status != cudaSuccess) return status;
  params.cluster = in_clusters && device.major >= 9 ? params.slices : 1;
  const int outputs = params.swiglu ? Shape::kWidth / 2 : Shape::kWidth;
  const int tiles = (params.features + outputs - 1) / outputs;
  const int most = device.multiprocessors * per_multiprocessor / params.cluster;
  const int clusters = most < 1 ? 1 : tiles < most ? tiles : most;

  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (device.major >= 9) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (params.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned int>(params.cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(clusters * params.cluster));
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = static_cast<unsigned int>(count);
  return cudaLaunchKernelEx(&config, kernel, static_cast<const LinearParams>(params));
}

template <typename T>
cudaError_t launch_linear(const LinearParams& params, cudaStream_t stream) {
  LinearDevice device = {};
  const cudaError_t status = linear_device(&device);
  if (status != cudaSuccess) return status;
  const int tiles = params.swiglu ? 2 : 1;
  const bool with_norm = params.norm_weight != nullptr;
  // A block's static shared memory and what the system reserves count too.
  const int shared_bytes = device.shared_bytes - 2048;
#define ASTRAI_CASE(T_, TILES, WARPS, STAGES, NORM)                                                  \
  if (params.rows <= kNarrowRows && tiles == TILES && with_norm == NORM &&                           \
      narrow_shared_bytes<TILES, WARPS, STAGES>(params) <= shared_bytes) {                           \
    return launch_linear_narrow<T_, TILES, WARPS, STAGES, NORM>(params, device, 2, stream);          \
  }
  ASTRAI_LINEAR_NARROW_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  if (with_norm) return cudaErrorInvalidValue;
#define ASTRAI_CASE(T_, ROW_TILES, DOWN, ACROSS, TILES, STAGES, BLOCKS)                                           \
  if (params.rows <= 8 * ROW_TILES && WideShape<ROW_TILES, DOWN, ACROSS, TILES, STAGES>::kSharedBytes <= shared_bytes) { \
    return launch_linear_wide<T_, ROW_TILES, DOWN, ACROSS, TILES, STAGES>(params, device, BLOCKS, true, stream);  \
  }
  ASTRAI_LINEAR_WIDE_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

/// Launch on `stream` of the current device. `params` must be valid (bindings/linear.cu checks them), the derived members
/// excepted; rows may be 0.
inline cudaError_t linear(LinearParams params, DType dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.features == 0) return cudaSuccess;
  derive(params);
  switch (dtype) {
    case DType::kFloat16:
      return launch_linear<float16>(params, stream);
    case DType::kBFloat16:
      return launch_linear<bfloat16>(params, stream);
    case DType::kFloat32:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
