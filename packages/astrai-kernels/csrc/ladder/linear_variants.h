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
  return params.rows > (fixed_order ? astrai::kContractRows : astrai::kLinearFewRows)
             ? astrai::linear_tiled(params, dtype, stream)
             : astrai::linear(params, dtype, stream);
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

/// linear/stream.cuh with so many slices of K.
template <typename T, int kWidth, int kGroups, int kSets, int kStages>
Variant streamed(int slices) {
  char name[64];
  std::snprintf(name, sizeof name, "t%dx%d/%ds/c%d", kWidth, 64 * kGroups, kStages, slices);
  return {name, kGroups == 1 ? 17 : 65, 64 * kGroups, 0, false,
          [slices](const LinearParams& params, const LinearDevice& device) {
            return astrai::stream_suits<kWidth, kGroups, kSets, kStages>(params, device, slices);
          },
          [slices](const LinearParams& params, const LinearDevice& device) {
            return astrai::launch_linear_stream<T, kWidth, kGroups, kSets, kStages>(
                params, device, slices, Storage<T>::kDType, stream_of_the_program());
          }};
}

/// Every instance of linear/stream.cuh, with every number of slices.
template <typename T>
std::vector<Variant> all_streamed() {
  std::vector<Variant> all;
#define ASTRAI_CASE(T_, WIDTH, GROUPS, SETS, STAGES)                                          \
  for (int slices = 1; slices <= (SETS == 1 ? astrai::kStreamMostSlices : 1); ++slices) {     \
    all.push_back(streamed<T_, WIDTH, GROUPS, SETS, STAGES>(slices));                         \
  }
  ASTRAI_LINEAR_STREAM_CASES(ASTRAI_CASE, T)
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
  for (const Variant& variant : all_streamed<T>()) all.push_back(variant);
  return all;
}

/// A variant can run these parameters on this device.
inline bool suits(const Variant& variant, const LinearParams& params, const LinearDevice& device) {
  return variant.suits(params, device);
}

}  // namespace ladder
