// linear: out = x @ weight^T and an epilogue, for 1 to 128 rows of 16-bit types, fp32 accumulation.
//
// Reduction contract: an output is the sum, from left to right, of `slices` partial sums; a partial sum runs over its
// slice of K in rising chunks of 16 k, one mma.m16n8k16 each. `slices` and their bounds follow from the weight's shape
// alone (linear_slices), so that a row's bits depend on that row and the weight, whatever kernel the number of rows picks.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/linear/narrow.cuh"
#include "astrai/linear/wide.cuh"

// Every instance there is, most wanted first: the dispatcher takes the first that may have the rows, whose conditions
// hold, and whose shared memory the device has.
//
// CASE(T, kTiles, kRowTiles, kWarps, kStages, kNorm, most slice steps, least slices); see narrow_suits. Where a warp has
// few steps, a shorter queue leaves room for more kernels.
#define ASTRAI_LINEAR_NARROW_CASES(CASE, T) \
  CASE(T, 1, 1, 8, 3, false, 3, 1)          \
  CASE(T, 1, 1, 8, 4, false, kAnySteps, 1)  \
  CASE(T, 1, 1, 8, 2, false, kAnySteps, 1)  \
  CASE(T, 1, 1, 8, 4, true, kAnySteps, 1)   \
  CASE(T, 1, 1, 8, 2, true, kAnySteps, 1)   \
  CASE(T, 1, 2, 8, 3, false, kAnySteps, 2)  \
  CASE(T, 1, 4, 8, 2, false, kAnySteps, 8)

// CASE(T, kRowTiles, kWarpsDown, kWarpsAcross, kTiles, kStages, kSumRows, kGroups, blocks a multiprocessor, least tiles)
#define ASTRAI_LINEAR_WIDE_CASES(CASE, T)         \
  CASE(T, 2, 4, 1, 1, 6, 16, false, 3, 1)         \
  CASE(T, 4, 4, 1, 1, 6, 32, false, 2, 1)         \
  CASE(T, 8, 4, 2, 2, 6, 64, false, 1, 96)        \
  CASE(T, 8, 4, 2, 1, 4, 64, false, 2, 1)         \
  CASE(T, 16, 4, 2, 4, 4, 16, false, 1, 200)      \
  CASE(T, 16, 4, 2, 2, 5, 32, false, 1, 96)       \
  CASE(T, 16, 4, 2, 1, 3, 128, false, 2, 1)       \
  CASE(T, 16, 4, 2, 1, 2, 128, false, 1, 1)

#ifndef __CUDACC_RTC__

namespace astrai {

constexpr int kLinearMostNormBytes = 65536;  // of x, where it is normalised first: each block keeps all of it
constexpr int kAnySteps = 1 << 30;

/// Parts that K is cut into. A function of the weight's shape alone: it fixes the order of additions.
///
/// The narrow kernel gives each slice of each 16 rows of the weight to a warp: as many slices as make 768 warps or more
/// (six for each of 128 multiprocessors), which is what keeps enough loads in flight. No slice is empty.
inline int linear_slices(int weight_rows, int depth) {
  const int64_t tiles = (static_cast<int64_t>(weight_rows) + 15) / 16;
  const int64_t steps = (static_cast<int64_t>(depth) + kLinearStep - 1) / kLinearStep;
  int slices = 1;
  for (int more = 2; more <= kLinearMostSlices && tiles * slices < 768; more *= 2) {
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
  params.slices = linear_slices(params.swiglu ? 2 * params.features : params.features, params.depth);
  params.slice_steps = (steps + params.slices - 1) / params.slices;
  params.cluster = 1;
  params.prefetch_steps = 4;
  params.release_early = true;
  params.quads_aligned = is_aligned(params.out, 8) && params.out_stride % kLinearQuad == 0 &&
                         is_aligned(params.bias, 8) && is_aligned(params.residual, 8) &&
                         (params.residual == nullptr || params.residual_stride % kLinearQuad == 0);
  const RmsNormShape shape = rms_norm_shape(params.depth);
  params.norm_threads = shape.team ? 32 : shape.threads;  // idle lanes add zeros to the tree of a team
}

/// Tiles of `width` weight rows.
inline int linear_tiles(const LinearParams& params, int width) {
  const int outputs = params.swiglu ? width / 2 : width;
  return (params.features + outputs - 1) / outputs;
}

/// `is_single`: there are as many blocks as they have work to share out.
template <int kTiles, int kRowTiles, int kWarps, int kStages>
int narrow_shared_bytes(const LinearParams& params, bool is_single) {
  const NarrowLayout layout = narrow_layout<kTiles, kRowTiles>(params.rows, params.depth, params.norm_weight != nullptr);
  const int merges = is_single ? 0 : narrow_merges(kRowTiles);
  return kWarps * (kStages * layout.stage + merges * layout.merge) + layout.normed;
}

/// `per_multiprocessor`: most blocks for each; they share the tiles out among themselves.
template <typename T, int kTiles, int kRowTiles, int kWarps, int kStages, bool kNorm>
cudaError_t launch_linear_narrow(const LinearParams& params, const LinearDevice& device, int per_multiprocessor,
                                 cudaStream_t stream) {
  const auto kernel = linear_narrow_kernel<T, kTiles, kRowTiles, kWarps, kStages, kNorm>;
  const int groups = kWarps / params.slices;
  const int units = (linear_tiles(params, 16 * kTiles) + groups - 1) / groups;
  const int most = device.multiprocessors * per_multiprocessor;
  const int bytes = narrow_shared_bytes<kTiles, kRowTiles, kWarps, kStages>(params, units <= most);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned int>(units < most ? units : most));
  return launch(kernel, grid, dim3(kWarps * 32), static_cast<std::size_t>(bytes), stream, params);
}

/// Blocks that share a tile's slices: as many as give a multiprocessor one and a half blocks or fewer.
///
/// `most` limits them; where their shared memory does not suffice for the slices of each, there are more after all.
template <typename Shape>
int wide_cluster(const LinearParams& params, const LinearDevice& device, int most) {
  if (device.major < 9) return 1;
  const int tiles = linear_tiles(params, Shape::kWidth);
  int cluster = 1;
  while (cluster < params.slices &&
         ((2 * cluster <= most && 4 * cluster * tiles <= 3 * device.multiprocessors) ||
          Shape::shared_bytes(params.slices, cluster) > device.shared_bytes - 2048)) {
    cluster *= 2;
  }
  return cluster;
}

/// `most_blocks`: of a cluster, where the device has them.
template <typename T, int kRowTiles, int kWarpsDown, int kWarpsAcross, int kTiles, int kStages, int kSumRows, bool kGroups>
cudaError_t launch_linear_wide(LinearParams params, const LinearDevice& device, int per_multiprocessor,
                               int most_blocks, cudaStream_t stream) {
  using Shape = WideShape<kRowTiles, kWarpsDown, kWarpsAcross, kTiles, kStages, kSumRows>;
  const auto kernel = linear_wide_kernel<T, kRowTiles, kWarpsDown, kWarpsAcross, kTiles, kStages, kSumRows, kGroups>;
  params.cluster = wide_cluster<Shape>(params, device, most_blocks);
  const int bytes = Shape::shared_bytes(params.slices, params.cluster);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  const int tiles = linear_tiles(params, Shape::kWidth);
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
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = static_cast<unsigned int>(count);
  return cudaLaunchKernelEx(&config, kernel, static_cast<const LinearParams>(params));
}

/// An instance can run these parameters. A block's static shared memory and what the system reserves count too.
template <int kTiles, int kRowTiles, int kWarps, int kStages, bool kNorm>
bool narrow_suits(const LinearParams& params, const LinearDevice& device) {
  return params.rows <= 8 * kRowTiles && kNorm == (params.norm_weight != nullptr) && params.slices <= kWarps &&
         narrow_shared_bytes<kTiles, kRowTiles, kWarps, kStages>(params, false) <= device.shared_bytes - 2048;
}

template <typename Shape>
bool wide_suits(const LinearParams& params, const LinearDevice& device) {
  return params.rows <= Shape::kRows && params.norm_weight == nullptr && (!Shape::kOneSlice || params.slices == 1) &&
         Shape::shared_bytes(params.slices, wide_cluster<Shape>(params, device, 1)) <= device.shared_bytes - 2048;
}

template <typename T>
cudaError_t launch_linear(const LinearParams& params, cudaStream_t stream) {
  LinearDevice device = {};
  const cudaError_t status = linear_device(&device);
  if (status != cudaSuccess) return status;
#define ASTRAI_CASE(T_, TILES, ROW_TILES, WARPS, STAGES, NORM, MOST_STEPS, LEAST_SLICES)                   \
  if (params.slice_steps <= MOST_STEPS && (params.rows <= 8 || params.slices >= LEAST_SLICES) &&           \
      narrow_suits<TILES, ROW_TILES, WARPS, STAGES, NORM>(params, device)) {                               \
    return launch_linear_narrow<T_, TILES, ROW_TILES, WARPS, STAGES, NORM>(params, device, 2, stream);     \
  }
  ASTRAI_LINEAR_NARROW_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
#define ASTRAI_CASE(T_, ROW_TILES, DOWN, ACROSS, TILES, STAGES, SUM_ROWS, GROUPS, BLOCKS, LEAST_TILES)     \
  if (linear_tiles(params, 16 * TILES * DOWN) >= LEAST_TILES &&                                            \
      wide_suits<WideShape<ROW_TILES, DOWN, ACROSS, TILES, STAGES, SUM_ROWS>>(params, device)) {           \
    return launch_linear_wide<T_, ROW_TILES, DOWN, ACROSS, TILES, STAGES, SUM_ROWS, GROUPS>(               \
        params, device, BLOCKS, kLinearMostSlices, stream);                                                \
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
