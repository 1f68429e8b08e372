// Launching linear/stream.cuh: its instances, descriptors for the copy engine, and which instance a shape gets.
#pragma once

#include "astrai/linear/stream.cuh"

// Every instance there is, as CASE(T, kWidth, kGroups, kSets, kStages): the most stages that a multiprocessor has room for.
// Narrow tiles share K among blocks where there are fewer tiles than multiprocessors; the others are for larger weights.
#define ASTRAI_LINEAR_STREAM_CASES(CASE, T) \
  CASE(T, 64, 1, 1, 12)                     \
  CASE(T, 64, 2, 1, 8)                      \
  CASE(T, 128, 1, 2, 8)                     \
  CASE(T, 128, 2, 2, 6)

#ifndef __CUDACC_RTC__

#include <atomic>

#include "astrai/linear/tensor_map.h"

namespace astrai {

template <typename T, int kWidth, int kGroups, int kSets, int kStages>
cudaLaunchConfig_t stream_config(int slices, int blocks, cudaLaunchAttribute (&attributes)[2], cudaStream_t stream) {
  using Shape = StreamShape<kWidth, kGroups, kSets, kStages>;
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned int>(slices);
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(blocks));
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(Shape::kSharedBytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = slices > 1 ? 2 : 1;
  return config;
}

/// Clusters of `slices` blocks that run at once: fewer than blocks / slices, since a cluster lies within a group of
/// multiprocessors and groups differ in size. 128 blocks in clusters of 4 took an H200 two rounds, 96 one.
template <typename T, int kWidth, int kGroups, int kSets, int kStages>
int stream_clusters(const LinearDevice& device, int slices) {
  if (slices == 1) return device.multiprocessors;
  static std::atomic<int> found[kStreamMostSlices + 1];  // 0: not asked yet; by the first device that asks
  int clusters = found[slices].load(std::memory_order_relaxed);
  if (clusters == 0) {
    const auto kernel = linear_stream_kernel<T, kWidth, kGroups, kSets, kStages>;
    cudaLaunchAttribute attributes[2] = {};
    const cudaLaunchConfig_t config =
        stream_config<T, kWidth, kGroups, kSets, kStages>(slices, device.multiprocessors * slices, attributes, nullptr);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(config.dynamicSmemBytes)) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
      clusters = 0;
      cudaGetLastError();
    }
    found[slices].store(clusters == 0 ? -1 : clusters, std::memory_order_relaxed);
  }
  return clusters;
}

/// Whether the kernel can run these parameters: the copy engine wants whole groups of eight gate rows.
template <int kWidth, int kGroups, int kSets, int kStages>
bool stream_suits(const LinearParams& params, const LinearDevice& device, int slices) {
  using Shape = StreamShape<kWidth, kGroups, kSets, kStages>;
  const int steps = (params.depth + kLinearStep - 1) / kLinearStep;
  return device.major == 9 && params.rows <= Shape::kRows && params.norm_weight == nullptr &&
         (!params.swiglu || params.features % kOctet == 0) && slices <= (Shape::kShares ? kStreamMostSlices : 1) &&
         steps >= slices && Shape::kSharedBytes <= device.shared_bytes;
}

/// `slices`: blocks that share a tile, at most kStreamMostSlices; with several, as many clusters as tiles are launched.
template <typename T, int kWidth, int kGroups, int kSets, int kStages>
cudaError_t launch_linear_stream(LinearParams params, const LinearDevice& device, int slices, DType dtype,
                                 cudaStream_t stream) {
  const int steps = (params.depth + kLinearStep - 1) / kLinearStep;
  params.slice_steps = (steps + slices - 1) / slices;
  params.cluster = (steps + params.slice_steps - 1) / params.slice_steps;  // no slice is empty

  TensorMap weight_map, x_map;
  const uint64_t depth = static_cast<uint64_t>(params.depth);
  const uint64_t features = static_cast<uint64_t>(params.features);
  const uint64_t row_bytes = static_cast<uint64_t>(params.weight_stride) * sizeof(T);
  cudaError_t status;
  if (params.swiglu) {
    status = encode_map<4>(&weight_map, dtype, params.weight, {depth, 8, 2, features / 8},
                           {row_bytes, features * row_bytes, 8 * row_bytes}, {kLinearStep, 8, 2, kWidth / 16});
  } else {
    status = encode_map<2>(&weight_map, dtype, params.weight, {depth, features}, {row_bytes}, {kLinearStep, kWidth});
  }
  if (status != cudaSuccess) return status;
  // As many rows as there are: an H200 took up to a fifth longer for boxes that reach beyond the tensor.
  const uint64_t rows = static_cast<uint64_t>(params.rows);
  status = encode_map<2>(&x_map, dtype, params.x, {depth, rows}, {static_cast<uint64_t>(params.x_stride) * sizeof(T)},
                         {kLinearStep, static_cast<uint32_t>(params.rows)});
  if (status != cudaSuccess) return status;

  const auto kernel = linear_stream_kernel<T, kWidth, kGroups, kSets, kStages>;
  const int tiles = linear_tiles(params, kWidth);
  const int blocks = params.cluster > 1 ? tiles * params.cluster : tiles < device.multiprocessors ? tiles : device.multiprocessors;
  cudaLaunchAttribute attributes[2] = {};
  const cudaLaunchConfig_t config =
      stream_config<T, kWidth, kGroups, kSets, kStages>(params.cluster, blocks, attributes, stream);
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(config.dynamicSmemBytes));
  if (status != cudaSuccess) return status;
  return cudaLaunchKernelEx(&config, kernel, static_cast<const LinearParams>(params),
                            static_cast<const TensorMap>(weight_map), static_cast<const TensorMap>(x_map));
}

/// The instance for 64 * kGroups rows, and slices so that as many blocks run as can at once; cudaErrorInvalidValue where
/// none suits.
template <typename T, int kGroups>
cudaError_t launch_linear_stream(const LinearParams& params, const LinearDevice& device, DType dtype, cudaStream_t stream) {
  constexpr int kNarrowStages = kGroups == 1 ? 12 : 8, kBroadStages = kGroups == 1 ? 8 : 6;
  const int tiles = linear_tiles(params, 64);
  // Where x is small, two rounds of narrow tiles are ahead of one of broad ones.
  const int rounds = kGroups == 1 ? 2 : 1;
  if (tiles > rounds * device.multiprocessors) {
    if (!stream_suits<128, kGroups, 2, kBroadStages>(params, device, 1)) return cudaErrorInvalidValue;
    return launch_linear_stream<T, 128, kGroups, 2, kBroadStages>(params, device, 1, dtype, stream);
  }
  constexpr int kLeastSteps = 6;  // of a slice; 16 steps took longer in two slices than in one
  const int steps = (params.depth + kLinearStep - 1) / kLinearStep;
  int slices = 1;
  for (int more = 2; more <= kStreamMostSlices && steps >= (more == 2 ? 20 : kLeastSteps * more); ++more) {
    if (stream_clusters<T, 64, kGroups, 1, kNarrowStages>(device, more) >= tiles) slices = more;
  }
  // Up to 32 rows the wide kernel of linear.cuh is ahead but for these.
  if (params.rows <= kStreamFewRows && (slices > 1 || params.swiglu)) return cudaErrorInvalidValue;
  if (!stream_suits<64, kGroups, 1, kNarrowStages>(params, device, slices)) return cudaErrorInvalidValue;
  return launch_linear_stream<T, 64, kGroups, 1, kNarrowStages>(params, device, slices, dtype, stream);
}

/// For up to 128 rows.
template <typename T>
cudaError_t launch_linear_stream(const LinearParams& params, const LinearDevice& device, DType dtype, cudaStream_t stream) {
  return params.rows <= 64 ? launch_linear_stream<T, 1>(params, device, dtype, stream)
                           : launch_linear_stream<T, 2>(params, device, dtype, stream);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
