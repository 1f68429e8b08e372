// Launching linear/stream.cuh: its instances, descriptors for the copy engine, and which instance a shape gets.
//
// Not yet where `linear` sends anything: the kernel waits for its measurement.
#pragma once

#include "astrai/linear/stream.cuh"

// Every instance there is, as CASE(T, kWidth, kGroups, kStages); stages as two blocks a multiprocessor allow, or one of 256.
#define ASTRAI_LINEAR_STREAM_CASES(CASE, T) \
  CASE(T, 64, 1, 6)                         \
  CASE(T, 96, 1, 5)                         \
  CASE(T, 128, 1, 4)                        \
  CASE(T, 256, 1, 5)                        \
  CASE(T, 64, 2, 4)                         \
  CASE(T, 96, 2, 4)                         \
  CASE(T, 128, 2, 3)                        \
  CASE(T, 256, 2, 4)

#ifndef __CUDACC_RTC__

#include "astrai/linear/tensor_map.h"

namespace astrai {

/// Whether the kernel can run these parameters: the copy engine wants whole groups of eight gate rows.
template <int kWidth, int kGroups, int kStages>
bool stream_suits(const LinearParams& params, const LinearDevice& device) {
  using Shape = StreamShape<kWidth, kGroups, kStages>;
  return device.major == 9 && params.rows <= Shape::kRows && params.norm_weight == nullptr &&
         (!params.swiglu || params.features % kOctet == 0) && Shape::kSharedBytes <= device.shared_bytes - 1024;
}

/// `slices`: blocks that share a tile, at most kLinearMostSlices; with several, as many clusters as tiles are launched.
/// kPair takes one slice.
template <typename T, int kWidth, int kGroups, int kStages, bool kPair = false>
cudaError_t launch_linear_stream(LinearParams params, const LinearDevice& device, int slices, DType dtype,
                                 cudaStream_t stream) {
  using Shape = StreamShape<kWidth, kGroups, kStages>;
  if (kPair && slices != 1) return cudaErrorInvalidValue;
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
  status = encode_map<2>(&x_map, dtype, params.x, {depth, static_cast<uint64_t>(params.rows)},
                         {static_cast<uint64_t>(params.x_stride) * sizeof(T)}, {kLinearStep, kPair ? Shape::kRows / 2 : Shape::kRows});
  if (status != cudaSuccess) return status;

  const auto kernel = linear_stream_kernel<T, kWidth, kGroups, kStages, kPair>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (status != cudaSuccess) return status;
  const int tiles = linear_tiles(params, kWidth);
  const int resident = device.multiprocessors * Shape::kBlocks;
  const int single = tiles < resident ? tiles : resident;
  const int blocks = params.cluster > 1 ? tiles * params.cluster : kPair ? (single + 1) / 2 * 2 : single;
  const int cluster = kPair ? 2 : params.cluster;

  cudaLaunchAttribute attributes[2] = {};
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
  return cudaLaunchKernelEx(&config, kernel, static_cast<const LinearParams>(params),
                            static_cast<const TensorMap>(weight_map), static_cast<const TensorMap>(x_map));
}

/// What a launch is expected to take, in nanoseconds: the bytes that pass into the busiest multiprocessor, or those of the
/// weight from memory, and what sharing a tile costs. The constants are estimates for an H200, not yet fitted.
struct StreamCost {
  static constexpr double kStart = 2000.0, kMerge = 700.0;
  static constexpr double kIntoMultiprocessor = 48.0, kFromMemory = 4200.0, kBetweenBlocks = 30.0;  // bytes a nanosecond
};
template <int kWidth, int kGroups, int kStages>
double stream_cost(const LinearParams& params, const LinearDevice& device, int slices) {
  using Shape = StreamShape<kWidth, kGroups, kStages>;
  const int steps = (params.depth + kLinearStep - 1) / kLinearStep;
  const int tiles = linear_tiles(params, kWidth);
  const int rounds = (tiles * slices + device.multiprocessors - 1) / device.multiprocessors;
  if (slices > 1 && (rounds > Shape::kBlocks || steps < 2 * slices)) return 1e30;
  const int row_bytes = params.rows * kStepBytes;
  const double into = static_cast<double>(rounds) * ((steps + slices - 1) / slices) * (Shape::kWeightBytes + row_bytes);
  const double memory = 2.0 * params.depth * params.features * (params.swiglu ? 2 : 1);
  const double merge = slices > 1 ? StreamCost::kMerge + Shape::kSumBytes / StreamCost::kBetweenBlocks / slices : 0.0;
  const double copies = into / StreamCost::kIntoMultiprocessor, reads = memory / StreamCost::kFromMemory;
  return StreamCost::kStart + merge + (copies > reads ? copies : reads);
}

/// The instance and the slices of least cost; an error where no instance suits.
template <typename T>
cudaError_t launch_linear_stream(const LinearParams& params, const LinearDevice& device, DType dtype,
                                 cudaStream_t stream) {
  double least = 1e30;
  cudaError_t (*best)(LinearParams, const LinearDevice&, int, DType, cudaStream_t) = nullptr;
  int best_slices = 1;
#define ASTRAI_CASE(T_, WIDTH, GROUPS, STAGES)                                                                       \
  if (params.rows > 64 * (GROUPS - 1) && stream_suits<WIDTH, GROUPS, STAGES>(params, device)) {                      \
    for (int slices = 1; slices <= kLinearMostSlices; ++slices) {                                                    \
      const double cost = stream_cost<WIDTH, GROUPS, STAGES>(params, device, slices);                                \
      if (cost < least) {                                                                                            \
        least = cost;                                                                                                \
        best = launch_linear_stream<T_, WIDTH, GROUPS, STAGES>;                                                      \
        best_slices = slices;                                                                                        \
      }                                                                                                              \
    }                                                                                                                \
  }
  ASTRAI_LINEAR_STREAM_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return best == nullptr ? cudaErrorInvalidValue : best(params, device, best_slices, dtype, stream);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
