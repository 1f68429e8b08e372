// Launching linear/stream.cuh: its instances, descriptors for the copy engine, and which instance a shape gets.
#pragma once

#include "astrai/linear/stream.cuh"

// Every instance there is, as CASE(T, kWidth, kGroups, kSets, kStages, kFixed): the most stages that a multiprocessor has room
// for. Narrow tiles share K among blocks where there are fewer tiles than multiprocessors; the others are for larger weights.
// In a fixed order totals take as many registers as sums, which leaves none for a second set of two warpgroups.
#define ASTRAI_LINEAR_STREAM_CASES(CASE, T) \
  CASE(T, 64, 1, 1, 12, false)              \
  CASE(T, 64, 2, 1, 8, false)               \
  CASE(T, 128, 1, 2, 8, false)              \
  CASE(T, 128, 2, 2, 6, false)              \
  CASE(T, 64, 1, 1, 12, true)               \
  CASE(T, 64, 2, 1, 8, true)                \
  CASE(T, 128, 1, 2, 8, true)               \
  CASE(T, 128, 2, 1, 6, true)

#ifndef __CUDACC_RTC__

#include <atomic>

#include "astrai/linear/tensor_map.h"

namespace astrai {

template <typename T, int kWidth, int kGroups, int kSets, int kStages, bool kFixed>
cudaLaunchConfig_t stream_config(int cluster, int blocks, cudaLaunchAttribute (&attributes)[2], cudaStream_t stream) {
  using Shape = StreamShape<kWidth, kGroups, kSets, kStages, kFixed>;
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned int>(cluster);
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(blocks));
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(Shape::kSharedBytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return config;
}

/// Clusters of `cluster` blocks that run at once: fewer than blocks / cluster, since a cluster lies within a group of
/// multiprocessors and groups differ in size. 128 blocks in clusters of 4 took an H200 two rounds, 96 one.
template <typename T, int kWidth, int kGroups, int kSets, int kStages, bool kFixed>
int stream_clusters(const LinearDevice& device, int cluster) {
  if (cluster == 1) return device.multiprocessors;
  static std::atomic<int> found[kLinearMostSlices + 1];  // 0: not asked yet; by the first device that asks
  int clusters = found[cluster].load(std::memory_order_relaxed);
  if (clusters == 0) {
    const auto kernel = linear_stream_kernel<T, kWidth, kGroups, kSets, kStages, kFixed>;
    cudaLaunchAttribute attributes[2] = {};
    const cudaLaunchConfig_t config = stream_config<T, kWidth, kGroups, kSets, kStages, kFixed>(
        cluster, device.multiprocessors * cluster, attributes, nullptr);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(config.dynamicSmemBytes)) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
      clusters = 0;
      cudaGetLastError();
    }
    found[cluster].store(clusters == 0 ? -1 : clusters, std::memory_order_relaxed);
  }
  return clusters;
}

/// Blocks can share a tile: in a fixed order each has as many of the slices, and registers for their sums.
template <typename Shape, bool kFixed>
bool stream_shares(const LinearParams& params, int cluster) {
  if (cluster == 1) return true;
  if (!Shape::kShares) return false;
  if (!kFixed) return cluster <= kStreamMostSlices && (params.depth + kLinearStep - 1) / kLinearStep >= cluster;
  return params.slices % cluster == 0 && params.slices / cluster <= kStreamMostOwn;
}

/// Whether the kernel can run these parameters: the copy engine wants whole groups of eight gate rows.
template <int kWidth, int kGroups, int kSets, int kStages, bool kFixed>
bool stream_suits(const LinearParams& params, const LinearDevice& device, int cluster) {
  using Shape = StreamShape<kWidth, kGroups, kSets, kStages, kFixed>;
  return device.major == 9 && params.rows <= Shape::kRows && params.norm_weight == nullptr &&
         (!params.swiglu || params.features % kOctet == 0) && stream_shares<Shape, kFixed>(params, cluster) &&
         Shape::kSharedBytes <= device.shared_bytes;
}

/// `cluster`: blocks that share a tile; with several, as many clusters as tiles are launched.
template <typename T, int kWidth, int kGroups, int kSets, int kStages, bool kFixed>
cudaError_t launch_linear_stream(LinearParams params, const LinearDevice& device, int cluster, DType dtype,
                                 cudaStream_t stream) {
  params.cluster = cluster;
  if (!kFixed) {
    const int steps = (params.depth + kLinearStep - 1) / kLinearStep;
    params.slice_steps = (steps + cluster - 1) / cluster;
    params.cluster = (steps + params.slice_steps - 1) / params.slice_steps;  // no slice is empty
  }

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

  const auto kernel = linear_stream_kernel<T, kWidth, kGroups, kSets, kStages, kFixed>;
  const int tiles = linear_tiles(params, kWidth);
  const int most = params.cluster > 1 ? tiles : device.multiprocessors;
  const int blocks = (tiles < most ? tiles : most) * params.cluster;
  cudaLaunchAttribute attributes[2] = {};
  const cudaLaunchConfig_t config =
      stream_config<T, kWidth, kGroups, kSets, kStages, kFixed>(params.cluster, blocks, attributes, stream);
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(config.dynamicSmemBytes));
  if (status != cudaSuccess) return status;
  return cudaLaunchKernelEx(&config, kernel, static_cast<const LinearParams>(params),
                            static_cast<const TensorMap>(weight_map), static_cast<const TensorMap>(x_map));
}

/// Blocks that share a tile of 64: as many as run at once.
template <typename T, int kGroups, int kStages, bool kFixed>
int stream_cluster(const LinearParams& params, const LinearDevice& device) {
  using Shape = StreamShape<64, kGroups, 1, kStages, kFixed>;
  constexpr int kLeastSteps = 6, kLeastToCut = 20;  // of a block, and of K: 16 took longer in two slices than in one
  const int tiles = linear_tiles(params, 64);
  const int steps = (params.depth + kLinearStep - 1) / kLinearStep;
  int cluster = 1;
  for (int more = 2; more <= Shape::kMostPartials && steps >= kLeastToCut && steps >= kLeastSteps * more; ++more) {
    if (stream_shares<Shape, kFixed>(params, more) &&
        stream_clusters<T, 64, kGroups, 1, kStages, kFixed>(device, more) >= tiles) {
      cluster = more;
    }
  }
  return cluster;
}

/// The instance for 64 * kGroups rows, and clusters so that as many blocks run as can at once; cudaErrorInvalidValue where
/// none suits, or the wide kernel of linear.cuh is ahead.
template <typename T, int kGroups, bool kFixed>
cudaError_t launch_linear_stream(const LinearParams& params, const LinearDevice& device, DType dtype, cudaStream_t stream) {
  constexpr int kNarrowStages = kGroups == 1 ? 12 : 8, kBroadStages = kGroups == 1 ? 8 : 6;
  constexpr int kBroadSets = kFixed && kGroups == 2 ? 1 : 2;
  const int tiles = linear_tiles(params, 64);
  // Two blocks of the wide kernel have a multiprocessor: what takes them one round takes blocks of this one two.
  const bool wide_once = kGroups == 1 && tiles > device.multiprocessors && tiles <= 2 * device.multiprocessors;
  if (wide_once) return cudaErrorInvalidValue;
  if (tiles > device.multiprocessors) {
    if (params.next_norm != nullptr || !stream_suits<128, kGroups, kBroadSets, kBroadStages, kFixed>(params, device, 1)) {
      return cudaErrorInvalidValue;
    }
    return launch_linear_stream<T, 128, kGroups, kBroadSets, kBroadStages, kFixed>(params, device, 1, dtype, stream);
  }
  const int cluster = stream_cluster<T, kGroups, kNarrowStages, kFixed>(params, device);
  if (!kFixed && params.next_norm != nullptr && cluster == 1) return cudaErrorInvalidValue;
  if (!stream_suits<64, kGroups, 1, kNarrowStages, kFixed>(params, device, cluster)) return cudaErrorInvalidValue;
  return launch_linear_stream<T, 64, kGroups, 1, kNarrowStages, kFixed>(params, device, cluster, dtype, stream);
}

/// For up to 128 rows.
template <typename T>
cudaError_t launch_linear_stream(const LinearParams& params, const LinearDevice& device, DType dtype, cudaStream_t stream) {
  if (params.fixed_order) {
    return params.rows <= 64 ? launch_linear_stream<T, 1, true>(params, device, dtype, stream)
                             : launch_linear_stream<T, 2, true>(params, device, dtype, stream);
  }
  return params.rows <= 64 ? launch_linear_stream<T, 1, false>(params, device, dtype, stream)
                           : launch_linear_stream<T, 2, false>(params, device, dtype, stream);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
