// Kernels of linear with all their choices made: the released ones, and those that --tune compares them with.
#pragma once

#include <functional>

#include "astrai/linear/linear.cuh"
#include "astrai/linear/stream_launch.cuh"
#include "astrai/linear/tiled.cuh"
#include "ladder.h"

namespace ladder {

using astrai::LinearDevice;
using astrai::LinearParams;

/// What the library launches; `fixed_order` as in bindings/ops.h.
inline cudaError_t run_linear(LinearParams params, astrai::DType dtype, cudaStream_t stream, bool fixed_order) {
  params.fixed_order = fixed_order;
  const cudaError_t few =
      params.rows <= astrai::kLinearFewRows ? astrai::linear(params, dtype, stream) : cudaErrorInvalidValue;
  return few == cudaErrorInvalidValue ? astrai::linear_tiled(params, dtype, stream) : few;
}

/// What a launch can choose beside the kernel; 0 or less: as the library does.
struct Choice {
  int blocks = 0;          // a multiprocessor, at most
  int cluster = 0;         // blocks, at most (wide kernel)
  int slices = 0;          // changes the bits
  int prefetch_steps = -1;
  bool release_late = false;
};

/// A kernel with all its choices made.
struct Variant {
  std::string name;
  int least_rows;  // fewer are right too, but not worth timing
  int most_rows;
  int slices;     // see Choice
  bool in_order;  // obeys the reduction contract
  std::function<bool(const LinearParams&, const LinearDevice&)> suits;
  std::function<cudaError_t(const LinearParams&, const LinearDevice&)> launch;
};

inline cudaStream_t stream_of_the_program() {
  static cudaStream_t stream = [] {
    cudaStream_t made;
    check(cudaStreamCreate(&made), "cudaStreamCreate");
    return made;
  }();
  return stream;
}

inline std::string name_of(const std::string& kernel, const Choice& choice) {
  std::string name = kernel;
  if (choice.blocks > 0) name += "/" + std::to_string(choice.blocks) + "b";
  if (choice.cluster > 0) name += "/c" + std::to_string(choice.cluster);
  if (choice.slices > 0) name += "/k" + std::to_string(choice.slices);
  if (choice.prefetch_steps >= 0) name += "/p" + std::to_string(choice.prefetch_steps);
  return choice.release_late ? name + "/late" : name;
}

inline LinearParams apply(LinearParams params, const Choice& choice) {
  if (choice.prefetch_steps >= 0) params.prefetch_steps = choice.prefetch_steps;
  if (choice.release_late) params.release_early = false;
  return params;
}

template <typename T, int kTiles, int kRowTiles, int kStages>
Variant narrow(const Choice& choice = {}) {
  char name[64];
  std::snprintf(name, sizeof name, "n%dx%d/%ds", 16 * kTiles, 8 * kRowTiles, kStages);
  return {name_of(name, choice), kRowTiles == 1 ? 1 : 4 * kRowTiles + 1, 8 * kRowTiles, choice.slices, choice.slices == 0,
          astrai::narrow_suits<kTiles, kRowTiles, 8, kStages, false>,
          [choice](const LinearParams& params, const LinearDevice& device) {
            return astrai::launch_linear_narrow<T, kTiles, kRowTiles, 8, kStages, false>(
                apply(params, choice), device, choice.blocks > 0 ? choice.blocks : 2, stream_of_the_program());
          }};
}

template <typename T, int kRowTiles, int kDown, int kAcross, int kTiles, int kStages, int kSumRows, bool kGroups = false>
Variant wide(const Choice& choice = {}) {
  using Shape = astrai::WideShape<kRowTiles, kDown, kAcross, kTiles, kStages, kSumRows>;
  char name[64];
  std::snprintf(name, sizeof name, "%s%dx%d/%dw/%ds", kGroups ? "g" : "w", Shape::kWidth, Shape::kRows, kDown * kAcross, kStages);
  return {name_of(name, choice), 4 * kRowTiles + 1, 8 * kRowTiles, choice.slices, Shape::kKeepsSlices && choice.slices == 0,
          [choice](const LinearParams& params, const LinearDevice& device) {
            // A limit that the shared memory does not allow would be another variant.
            return astrai::wide_suits<Shape>(params, device) &&
                   (choice.cluster == 0 || astrai::wide_cluster<Shape>(params, device, choice.cluster) <= choice.cluster);
          },
          [choice](const LinearParams& params, const LinearDevice& device) {
            return astrai::launch_linear_wide<T, kRowTiles, kDown, kAcross, kTiles, kStages, kSumRows, kGroups>(
                apply(params, choice), device, choice.blocks > 0 ? choice.blocks : 2,
                choice.cluster > 0 ? choice.cluster : astrai::kLinearMostSlices, stream_of_the_program());
          }};
}

template <typename T, bool kGroups>
Variant tiled() {
  return {kGroups ? "tiled by groups" : "tiled", astrai::kLinearFewRows + 1, 1 << 28, 0, true,
          astrai::tiled_suits<kGroups>,
          [](const LinearParams& params, const LinearDevice& device) {
            return astrai::launch_linear_tiled<T, kGroups>(params, device, stream_of_the_program());
          }};
}

/// linear/stream.cuh with so many blocks for a tile; "f" is its fixed order.
template <typename T, int kWidth, int kGroups, int kSets, int kStages, bool kFixed>
Variant streamed(int cluster) {
  char name[64];
  std::snprintf(name, sizeof name, "%s%dx%d/%ds/c%d", kFixed ? "f" : "t", kWidth, 64 * kGroups, kStages, cluster);
  return {name, kGroups == 1 ? 17 : 65, 64 * kGroups, 0, kFixed,
          [cluster](const LinearParams& params, const LinearDevice& device) {
            return astrai::stream_suits<kWidth, kGroups, kSets, kStages, kFixed>(params, device, cluster);
          },
          [cluster](const LinearParams& params, const LinearDevice& device) {
            return astrai::launch_linear_stream<T, kWidth, kGroups, kSets, kStages, kFixed>(
                params, device, cluster, Storage<T>::kDType, stream_of_the_program());
          }};
}

/// Every instance of linear/stream.cuh, with every number of blocks for a tile.
template <typename T>
std::vector<Variant> all_streamed() {
  std::vector<Variant> all;
#define ASTRAI_CASE(T_, WIDTH, GROUPS, SETS, STAGES, FIXED)                                                     \
  for (int cluster = 1; cluster <= astrai::StreamShape<WIDTH, GROUPS, SETS, STAGES, FIXED>::kMostPartials; ++cluster) { \
    all.push_back(streamed<T_, WIDTH, GROUPS, SETS, STAGES, FIXED>(cluster));                                  \
  }
  ASTRAI_LINEAR_STREAM_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return all;
}

/// linear/narrow_bulk.cuh; "e" has the engine keep x, "k" the lanes, "r" brings it with the weight.
template <typename T, int kRowTiles, int kChunk, bool kKeeps>
Variant bulk(int blocks, bool by_threads) {
  const astrai::BulkChoice choice = {blocks, by_threads, astrai::BulkRelease::kWhenAllIsAsked};
  char name[64];
  std::snprintf(name, sizeof name, "%s%dx%d/%db", kKeeps ? by_threads ? "k" : "e" : "r", 16 * kChunk, 8 * kRowTiles, blocks);
  return {name, 8 * kRowTiles - 7, 8 * kRowTiles, 0, true,
          [choice](const LinearParams& params, const LinearDevice& device) {
            return params.rows <= 8 * kRowTiles && astrai::bulk_suits(params, device) && astrai::bulk_chunk(params) == kChunk &&
                   astrai::plan_bulk<kRowTiles, kChunk, kKeeps>(params, device, choice).kernel.stages > 0;
          },
          [choice](const LinearParams& params, const LinearDevice& device) {
            const astrai::BulkPlan plan = astrai::plan_bulk<kRowTiles, kChunk, kKeeps>(params, device, choice);
            return astrai::launch_linear_narrow_bulk<T, kRowTiles, kChunk, kKeeps>(params, plan, Storage<T>::kDType,
                                                                                   stream_of_the_program());
          }};
}

/// Every instance of it, with one block a multiprocessor and two.
template <typename T>
std::vector<Variant> all_bulk() {
  std::vector<Variant> all;
#define ASTRAI_CASE(T_, ROW_TILES, CHUNK, KEEPS)                                        \
  for (const int blocks : {1, 2}) {                                                     \
    all.push_back(bulk<T_, ROW_TILES, CHUNK, KEEPS>(blocks, false));                    \
    if (KEEPS) all.push_back(bulk<T_, ROW_TILES, CHUNK, KEEPS>(blocks, true));          \
  }
  ASTRAI_LINEAR_NARROW_BULK_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return all;
}

/// The released kernels, the wide ones with every size of cluster.
template <typename T>
std::vector<Variant> released() {
  std::vector<Variant> all;
#define ASTRAI_CASE(T_, TILES, ROW_TILES, WARPS, STAGES, NORM, BLOCKS, LEAST_STEPS, MOST_TILES) \
  if (!NORM) all.push_back(narrow<T_, TILES, ROW_TILES, STAGES>());
  ASTRAI_LINEAR_NARROW_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
#define ASTRAI_CASE(T_, ROW_TILES, DOWN, ACROSS, TILES, STAGES, SUM_ROWS, GROUPS, BLOCKS, LEAST_TILES)  \
  for (const int cluster : {1, 2, 4, 8}) {                                                          \
    Choice choice;                                                                                  \
    choice.cluster = cluster;                                                                       \
    all.push_back(wide<T_, ROW_TILES, DOWN, ACROSS, TILES, STAGES, SUM_ROWS, GROUPS>(choice));      \
  }
  ASTRAI_LINEAR_WIDE_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
#define ASTRAI_CASE(T_, GROUPS) all.push_back(tiled<T_, GROUPS>());
  ASTRAI_LINEAR_TILED_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return all;
}

/// {blocks, cluster, slices, prefetched steps, release late}
inline std::vector<Variant> to_tune() {
  using T = astrai::bfloat16;
  std::vector<Variant> all = {
      // 1 to 8 rows: depth of the queue, blocks, early release
      narrow<T, 1, 1, 8>({1, 0, 0, 4, false}),
      narrow<T, 1, 1, 4>({2, 0, 0, 4, false}),
      narrow<T, 1, 1, 4>({2, 0, 0, 0, true}),
      // 9 to 16
      narrow<T, 1, 2, 5>({1, 0, 0, 4, false}),
      narrow<T, 1, 2, 3>({2, 0, 0, 0, true}),
      wide<T, 2, 4, 1, 1, 6, 16>({3, 8, 0, -1, false}),
      // 17 to 32
      narrow<T, 1, 4, 3>({1, 0, 0, -1, false}),
      wide<T, 4, 4, 1, 1, 6, 32>({2, 1, 0, -1, false}),
      wide<T, 4, 4, 1, 1, 6, 32>({2, 8, 0, -1, true}),
      wide<T, 4, 4, 2, 1, 6, 32>({2, 8, 0, -1, false}),
      wide<T, 4, 4, 1, 2, 5, 32>({2, 8, 0, -1, false}),
      // 33 to 64
      wide<T, 8, 4, 1, 1, 5, 64, true>({2, 1, 0, -1, false}),
      wide<T, 8, 4, 1, 1, 5, 64, true>({2, 8, 0, -1, true}),
      wide<T, 8, 4, 2, 1, 4, 64>({2, 8, 0, -1, false}),
      wide<T, 8, 8, 1, 1, 6, 64, true>({1, 8, 0, -1, false}),
      // 65 to 128
      wide<T, 16, 4, 1, 1, 4, 64, true>({2, 8, 0, -1, false}),
      wide<T, 16, 8, 1, 1, 5, 64, true>({1, 8, 0, -1, false}),
      wide<T, 16, 8, 1, 1, 6, 32, true>({1, 8, 0, -1, false}),
  };
  for (const Variant& variant : all_bulk<T>()) all.push_back(variant);
  for (const Variant& variant : all_streamed<T>()) all.push_back(variant);
  return all;
}

/// A variant can run these parameters on this device.
inline bool suits(const Variant& variant, const LinearParams& params, const LinearDevice& device) {
  return variant.suits(params, device);
}

}  // namespace ladder
