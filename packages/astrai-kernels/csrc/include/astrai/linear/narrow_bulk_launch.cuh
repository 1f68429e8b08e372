// Launching linear/narrow_bulk.cuh: its instances, descriptors for the copy engine, and which shapes get it.
#pragma once

#include "astrai/linear/derive.cuh"
#include "astrai/linear/narrow_bulk.cuh"

// Every instance there is, as CASE(T, kRowTiles, kChunk, kKeeps).
#define ASTRAI_LINEAR_NARROW_BULK_CASES(CASE, T) \
  CASE(T, 1, 3, true)                            \
  CASE(T, 1, 3, false)                           \
  CASE(T, 1, 2, true)                            \
  CASE(T, 1, 2, false)                           \
  CASE(T, 2, 3, true)                            \
  CASE(T, 2, 3, false)                           \
  CASE(T, 2, 2, true)                            \
  CASE(T, 2, 2, false)

#ifndef __CUDACC_RTC__

#include "astrai/linear/tensor_map.h"

namespace astrai {

/// What a launch can choose beside the instance. `blocks`: of a multiprocessor.
struct BulkChoice {
  int blocks;
  bool by_threads;
  BulkRelease release;
};

/// Steps of a request, or 0 where none divides every slice.
inline int bulk_chunk(const LinearParams& params) {
  const int last = params.depth / kLinearStep - (params.slices - 1) * params.slice_steps;
  for (const int chunk : {3, 2}) {
    if (params.slice_steps % chunk == 0 && last % chunk == 0) return chunk;
  }
  return 0;
}

constexpr int kMostBoxSteps = 256;  // an extent that the engine takes

/// Whether there is an instance for these parameters: whole steps, whole groups of gate rows.
inline bool bulk_suits(const LinearParams& params, const LinearDevice& device) {
  return device.major == 9 && params.rows <= kNarrowRows && params.norm_weight == nullptr &&
         params.depth % kLinearStep == 0 && params.slices >= 4 && params.slice_steps <= kMostBoxSteps &&
         (!params.swiglu || params.features % kOctet == 0) && bulk_chunk(params) != 0;
}

struct BulkPlan {
  NarrowBulk kernel;
  int grid, bytes;
};

/// The longest ring that `choice.blocks` blocks leave room for, and no longer than there is work; no stage: it does not suit.
template <int kRowTiles, int kChunk, bool kKeeps>
BulkPlan plan_bulk(const LinearParams& params, const LinearDevice& device, const BulkChoice& choice) {
  BulkPlan plan = {};
  NarrowBulk& kernel = plan.kernel;
  const int groups = kBulkWarps / params.slices;
  const int most = device.multiprocessors * choice.blocks;
  constexpr int kReserved = 1024;  // of each block, by the system
  const int room = (device.shared_bytes + kReserved) / choice.blocks - kReserved;
  kernel.tiles = linear_tiles(params, 16);
  kernel.units = (kernel.tiles + groups - 1) / groups;
  kernel.slice_chunks = params.slice_steps / kChunk;
  kernel.all_chunks = params.depth / kLinearStep / kChunk;
  kernel.by_threads = choice.by_threads;
  kernel.release = choice.release;
  plan.grid = kernel.units < most ? kernel.units : most;
  const int needed = (kernel.units + plan.grid - 1) / plan.grid * kernel.slice_chunks;
  const auto bytes = [&](int stages) {
    return bulk_layout<kRowTiles, kChunk, kKeeps>(params.rows, stages, kernel.slice_chunks, kernel.units <= plan.grid).total;
  };
  while (kernel.stages < needed && bytes(kernel.stages + 1) <= room) ++kernel.stages;
  plan.bytes = bytes(kernel.stages);
  return plan;
}

template <typename T, int kRowTiles, int kChunk, bool kKeeps>
cudaError_t launch_linear_narrow_bulk(const LinearParams& params, const BulkPlan& plan, DType dtype, cudaStream_t stream) {
  TensorMap weight_map;
  TensorMap x_map = {};
  const uint64_t steps = static_cast<uint64_t>(params.depth / kLinearStep);
  const uint64_t features = static_cast<uint64_t>(params.features);
  const uint64_t pitch = static_cast<uint64_t>(params.weight_stride) * sizeof(T);
  cudaError_t status;
  if (params.swiglu) {
    status = encode_map<5>(&weight_map, dtype, params.weight, {kLinearStep, 8, 2, features / 8, steps},
                           {pitch, features * pitch, 8 * pitch, kStepBytes}, {kLinearStep, 8, 2, 1, kChunk});
  } else {
    status = encode_map<3>(&weight_map, dtype, params.weight, {kLinearStep, features, steps}, {pitch, kStepBytes},
                           {kLinearStep, 16, kChunk});
  }
  if (status != cudaSuccess) return status;
  if (!plan.kernel.by_threads) {
    const int64_t x_stride = params.rows == 1 ? params.depth : params.x_stride;  // a single row's may be anything
    const uint32_t box_steps = static_cast<uint32_t>(kKeeps ? params.slice_steps : kChunk);
    status = encode_map<3>(&x_map, dtype, params.x, {kLinearStep, static_cast<uint64_t>(params.rows), steps},
                           {static_cast<uint64_t>(x_stride) * sizeof(T), kStepBytes},
                           {kLinearStep, static_cast<uint32_t>(params.rows), box_steps});
    if (status != cudaSuccess) return status;
  }
  const auto kernel = linear_narrow_bulk_kernel<T, kRowTiles, kChunk, kKeeps>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes);
  if (status != cudaSuccess) return status;
  return launch(kernel, dim3(static_cast<unsigned int>(plan.grid)), dim3(kBulkWarps * 32),
                static_cast<std::size_t>(plan.bytes), stream, params, static_cast<const TensorMap>(weight_map),
                static_cast<const TensorMap>(x_map), static_cast<const NarrowBulk>(plan.kernel));
}

constexpr int kBulkFewRows = 3;     // up to these the lanes copy x; 1 row was measured, and 8
constexpr int kBulkLeastSteps = 6;  // of the weight that a multiprocessor's warps each have under way: 96 KB in all

/// Where the narrow kernel stays ahead (us on an H200 at 8 rows, its time and the best of this kernel's): few blocks, 1024 x
/// 2048 2.29 and 2.44, 1024 x 3072 2.74 and 2.98; a queue that holds a slice, on every multiprocessor, 2048 x 1536 2.73 and
/// 2.85, but not on fewer, 1536 x 1536 2.53 and 2.20. At 1 row and 16 this one is nowhere behind.
///
/// But for K in four slices, of which a block has two tiles: a decode step of Qwen3 0.6B (K 1024) at 8 rows took 907 us without
/// this kernel, 962 with it for gate and up and 923 for qkv, at 16 rows 1,132, 1,193 and 1,114; the language model's head gains.
inline bool narrow_is_ahead(const LinearParams& params, const LinearDevice& device, int units) {
  constexpr int kManyRounds = 8;
  if (params.slices < kLinearMostSlices && params.rows > kBulkFewRows && units <= kManyRounds * device.multiprocessors) {
    return params.swiglu || params.rows <= 8;
  }
  if (params.rows <= kBulkFewRows || params.rows > 8 || units > device.multiprocessors) return false;
  return 2 * units <= device.multiprocessors || (params.slice_steps == 3 && 8 * units > 7 * device.multiprocessors);
}

/// Plan and launch; cudaErrorInvalidValue where the ring of kept rows would be too short.
template <typename T, int kRowTiles, int kChunk, bool kKeeps>
cudaError_t launch_linear_narrow_bulk(const LinearParams& params, const LinearDevice& device, BulkChoice choice, DType dtype,
                                      cudaStream_t stream) {
  BulkPlan plan = plan_bulk<kRowTiles, kChunk, kKeeps>(params, device, choice);
  const int turns = (plan.kernel.units + plan.grid - 1) / plan.grid;
  const bool holds_all = plan.kernel.stages >= turns * plan.kernel.slice_chunks;
  const bool is_short = kKeeps && !holds_all && choice.blocks * plan.kernel.stages * kChunk < kBulkLeastSteps;
  if (plan.kernel.stages == 0 || is_short) return cudaErrorInvalidValue;
  if (!holds_all) plan.kernel.release = BulkRelease::kWhenAllIsAsked;
  return launch_linear_narrow_bulk<T, kRowTiles, kChunk, kKeeps>(params, plan, dtype, stream);
}

/// Where all blocks run at once, one a multiprocessor with x beside the weight: microseconds on an H200, with kept rows and
/// with these, 1536 x 6912 6.9 and 5.8 at 8 rows, 1536 x 1536 3.0 and 2.6 at 16, but 2.0 and 2.4 at 1. Elsewhere rows are
/// kept, and blocks two a multiprocessor as long as their rings suffice.
template <typename T, int kRowTiles, int kChunk>
cudaError_t launch_linear_narrow_bulk(const LinearParams& params, const LinearDevice& device, int units, DType dtype,
                                      cudaStream_t stream) {
  const bool few = params.rows <= kBulkFewRows;
  const bool in_one_go = units <= device.multiprocessors;
  if (few || !in_one_go) {
    for (int blocks = in_one_go ? 1 : 2; blocks > 0; --blocks) {
      const BulkChoice choice = {blocks, few, in_one_go ? BulkRelease::kAtOnce : BulkRelease::kWhenAllIsAsked};
      const cudaError_t status = launch_linear_narrow_bulk<T, kRowTiles, kChunk, true>(params, device, choice, dtype, stream);
      if (status != cudaErrorInvalidValue) return status;
    }
  }
  const BulkChoice choice = {1, false, BulkRelease::kAtOnce};
  return launch_linear_narrow_bulk<T, kRowTiles, kChunk, false>(params, device, choice, dtype, stream);
}

/// For up to kNarrowRows rows; cudaErrorInvalidValue where the narrow kernel is ahead, or the only one that suits.
template <typename T>
cudaError_t launch_linear_narrow_bulk(const LinearParams& params, const LinearDevice& device, DType dtype,
                                      cudaStream_t stream) {
  if (!bulk_suits(params, device)) return cudaErrorInvalidValue;
  const int groups = kBulkWarps / params.slices;
  const int units = (linear_tiles(params, 16) + groups - 1) / groups;
  if (narrow_is_ahead(params, device, units)) return cudaErrorInvalidValue;
  const bool threes = bulk_chunk(params) == 3;
  if (params.rows <= 8) {
    return threes ? launch_linear_narrow_bulk<T, 1, 3>(params, device, units, dtype, stream)
                  : launch_linear_narrow_bulk<T, 1, 2>(params, device, units, dtype, stream);
  }
  return threes ? launch_linear_narrow_bulk<T, 2, 3>(params, device, units, dtype, stream)
                : launch_linear_narrow_bulk<T, 2, 2>(params, device, units, dtype, stream);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
