// linear: out = x @ weight^T and an epilogue, for 1 to 128 rows of 16-bit types, fp32 accumulation; tiled.cuh has more.
//
// Reduction contract: an output is the sum, from left to right, of `slices` partial sums; a partial sum runs over its
// slice of K in rising chunks of 16 k, one mma.m16n8k16 each. `slices` and their bounds follow from the weight's shape
// alone (linear_slices), so that a row's bits depend on that row and the weight, whatever kernel the number of rows picks.
// It holds where params.fixed_order asks for it, and always for up to kNarrowRows; elsewhere a block sums all that it has in
// one go. From kStreamLeastRows on stream.cuh is ahead of the wide kernel on compute capability 9.0a, with few exceptions.
#pragma once

#include "astrai/linear/derive.cuh"
#include "astrai/linear/narrow.cuh"
#include "astrai/linear/narrow_bulk_launch.cuh"
#include "astrai/linear/stream_launch.cuh"
#include "astrai/linear/wide.cuh"

// Every instance there is, most wanted first: the dispatcher takes the first that may have the rows, whose conditions
// hold, and whose shared memory the device has.
//
// CASE(T, kTiles, kRowTiles, kWarps, kStages, kNorm, blocks a multiprocessor, least steps of a slice, most tiles). One
// block a multiprocessor, with a long queue, is for what they finish in one go; a slice of few steps has no use for it.
#define ASTRAI_LINEAR_NARROW_CASES(CASE, T)        \
  CASE(T, 1, 1, 8, 8, false, 1, 12, kAnyTiles)     \
  CASE(T, 1, 1, 8, 6, false, 1, 4, kAnyTiles)      \
  CASE(T, 1, 1, 8, 3, false, 2, 0, kAnyTiles)      \
  CASE(T, 1, 1, 8, 4, true, 2, 0, kAnyTiles)       \
  CASE(T, 1, 1, 8, 2, true, 2, 0, kAnyTiles)       \
  CASE(T, 1, 2, 8, 4, false, 1, 0, kAnyTiles)      \
  CASE(T, 1, 2, 8, 3, false, 2, 0, 2048)

// CASE(T, kRowTiles, kWarpsDown, kWarpsAcross, kTiles, kStages, kSumRows, kGroups, blocks a multiprocessor, least tiles)
#define ASTRAI_LINEAR_WIDE_CASES(CASE, T)         \
  CASE(T, 2, 4, 1, 1, 6, 16, false, 3, 1)         \
  CASE(T, 4, 4, 1, 1, 6, 32, false, 2, 1)         \
  CASE(T, 8, 4, 1, 1, 5, 64, true, 2, 1)          \
  CASE(T, 16, 8, 1, 1, 5, 32, true, 1, 96)        \
  CASE(T, 16, 4, 1, 1, 3, 128, true, 2, 1)        \
  CASE(T, 16, 4, 2, 1, 2, 128, false, 1, 1)

#ifndef __CUDACC_RTC__

namespace astrai {

constexpr int kLinearMostNormBytes = 65536;  // of x, where it is normalised first: each block keeps all of it
constexpr int kAnyTiles = 1 << 30;

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

/// The slices that linear_slices found are added in their order, however many blocks share them.
template <typename Shape>
bool keeps_slices(const LinearParams& params) {
  return Shape::kKeepsSlices && (params.fixed_order || params.rows <= kNarrowRows);
}

/// Blocks that share a tile's slices. Where a block keeps its slices apart, all or one: several each took an H200 up to
/// twice as long. Else as many as give a multiprocessor one and a half blocks or fewer.
///
/// `most` limits them.
template <typename Shape>
int wide_cluster(const LinearParams& params, const LinearDevice& device, int most) {
  if (device.major < 9) return 1;
  const int tiles = linear_tiles(params, Shape::kWidth);
  if (keeps_slices<Shape>(params)) {
    const int resident = device.multiprocessors * Shape::kBlocks;
    return params.slices <= most && params.slices * tiles <= resident ? params.slices : 1;
  }
  int cluster = 1;
  while (cluster < params.slices && 2 * cluster <= most && 4 * cluster * tiles <= 3 * device.multiprocessors) {
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
  if (!keeps_slices<Shape>(params)) {
    const int steps = (params.depth + kLinearStep - 1) / kLinearStep;
    params.slices = params.cluster;
    params.slice_steps = (steps + params.slices - 1) / params.slices;
  }
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
  return params.rows <= Shape::kRows && params.norm_weight == nullptr && (!params.fixed_order || Shape::kKeepsSlices) &&
         Shape::shared_bytes(params.slices, wide_cluster<Shape>(params, device, 1)) <= device.shared_bytes - 2048;
}

template <typename T>
cudaError_t launch_linear(LinearParams params, DType dtype, cudaStream_t stream) {
  LinearDevice device = {};
  const cudaError_t status = linear_device(&device);
  if (status != cudaSuccess) return status;
  if (params.rows <= kNarrowRows) {
    const cudaError_t launched = launch_linear_narrow_bulk<T>(params, device, dtype, stream);
    if (launched != cudaErrorInvalidValue) return launched;
  }
  const int tiles = linear_tiles(params, 16);
  const bool in_one_go = (tiles * params.slices + 7) / 8 <= device.multiprocessors;
  // Blocks that come back for more hold their multiprocessor: a successor let in early only takes their bandwidth.
  params.release_early = in_one_go;
#define ASTRAI_CASE(T_, TILES, ROW_TILES, WARPS, STAGES, NORM, BLOCKS, LEAST_STEPS, MOST_TILES)             \
  if ((BLOCKS > 1 || in_one_go) && params.slice_steps >= LEAST_STEPS && tiles <= MOST_TILES &&              \
      narrow_suits<TILES, ROW_TILES, WARPS, STAGES, NORM>(params, device)) {                                \
    return launch_linear_narrow<T_, TILES, ROW_TILES, WARPS, STAGES, NORM>(params, device, BLOCKS, stream); \
  }
  ASTRAI_LINEAR_NARROW_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  params.release_early = true;
  if (params.rows >= kStreamLeastRows) {
    const cudaError_t launched = launch_linear_stream<T>(params, device, dtype, stream);
    if (launched != cudaErrorInvalidValue) return launched;
  }
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
/// excepted; rows may be 0. cudaErrorInvalidValue where no kernel of these suits: tiled.cuh is for any number of rows.
inline cudaError_t linear(LinearParams params, DType dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.features == 0) return cudaSuccess;
  derive(params);
  switch (dtype) {
    case DType::kFloat16:
      return launch_linear<float16>(params, dtype, stream);
    case DType::kBFloat16:
      return launch_linear<bfloat16>(params, dtype, stream);
    case DType::kFloat32:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
