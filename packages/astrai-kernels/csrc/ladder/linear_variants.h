// Kernels of linear with all their choices made: the released ones, and those that --tune compares them with.
#pragma once

#include <functional>

#include "astrai/linear/linear.cuh"
#include "ladder.h"

namespace ladder {

using astrai::LinearDevice;
using astrai::LinearParams;

/// A kernel with all its choices made.
struct Variant {
  std::string name;
  int most_rows;
  int least_rows;  // fewer are right too, but not worth timing
  int most_slices;
  std::function<int(const LinearParams&)> shared_bytes;
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

template <typename T, int kTiles, int kWarps, int kStages>
Variant narrow(int blocks) {
  char name[64];
  std::snprintf(name, sizeof name, "n%d/%dw/%ds/%db", kTiles, kWarps, kStages, blocks);
  return {name, 8, 1, kWarps, astrai::narrow_shared_bytes<kTiles, kWarps, kStages>,
          [blocks](const LinearParams& params, const LinearDevice& device) {
            return astrai::launch_linear_narrow<T, kTiles, kWarps, kStages, false>(params, device, blocks,
                                                                                  stream_of_the_program());
          }};
}

template <typename T, int kRowTiles, int kDown, int kAcross, int kTiles, int kStages>
Variant wide(int blocks, bool in_clusters) {
  using Shape = astrai::WideShape<kRowTiles, kDown, kAcross, kTiles, kStages>;
  char name[64];
  std::snprintf(name, sizeof name, "w%d/%dx%dx%d/%ds/%db%s", 8 * kRowTiles, kDown, kAcross, kTiles, kStages, blocks,
                in_clusters ? "" : "/seq");
  return {name, 8 * kRowTiles, 4 * kRowTiles + 1, astrai::kLinearMostSlices,
          [](const LinearParams&) { return Shape::kSharedBytes; },
          [blocks, in_clusters](const LinearParams& params, const LinearDevice& device) {
            return astrai::launch_linear_wide<T, kRowTiles, kDown, kAcross, kTiles, kStages>(
                params, device, blocks, in_clusters, stream_of_the_program());
          }};
}

/// The released kernels; the first column of what is timed.
template <typename T>
std::vector<Variant> released() {
  std::vector<Variant> all;
#define ASTRAI_CASE(T_, TILES, WARPS, STAGES, NORM) \
  if (!NORM) all.push_back(narrow<T_, TILES, WARPS, STAGES>(2));
  ASTRAI_LINEAR_NARROW_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
#define ASTRAI_CASE(T_, ROW_TILES, DOWN, ACROSS, TILES, STAGES, BLOCKS)                       \
  all.push_back(wide<T_, ROW_TILES, DOWN, ACROSS, TILES, STAGES>(BLOCKS, true));              \
  all.push_back(wide<T_, ROW_TILES, DOWN, ACROSS, TILES, STAGES>(BLOCKS, false));
  ASTRAI_LINEAR_WIDE_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return all;
}

inline std::vector<Variant> to_tune() {
  using T = astrai::bfloat16;
  std::vector<Variant> all;
  for (const int blocks : {1, 2}) {
    all.push_back(narrow<T, 1, 8, 3>(blocks));
    all.push_back(narrow<T, 1, 8, 4>(blocks));
    all.push_back(narrow<T, 2, 8, 2>(blocks));
    all.push_back(narrow<T, 2, 8, 3>(blocks));
  }
  all.push_back(narrow<T, 1, 8, 2>(4));
  all.push_back(narrow<T, 1, 8, 6>(1));
  all.push_back(narrow<T, 1, 16, 2>(1));
  all.push_back(narrow<T, 1, 16, 3>(1));
  all.push_back(wide<T, 2, 2, 1, 1, 6>(4, true));
  all.push_back(wide<T, 2, 4, 1, 1, 4>(4, true));
  all.push_back(wide<T, 2, 4, 1, 2, 4>(2, true));
  all.push_back(wide<T, 2, 8, 1, 1, 4>(2, true));
  all.push_back(wide<T, 4, 4, 1, 1, 4>(3, true));
  all.push_back(wide<T, 4, 4, 1, 2, 4>(2, true));
  all.push_back(wide<T, 4, 8, 1, 1, 4>(2, true));
  all.push_back(wide<T, 8, 4, 2, 1, 4>(2, true));
  all.push_back(wide<T, 8, 4, 1, 1, 4>(2, true));
  all.push_back(wide<T, 8, 4, 2, 2, 4>(1, true));
  all.push_back(wide<T, 8, 8, 1, 1, 4>(1, true));
  all.push_back(wide<T, 16, 4, 2, 1, 3>(2, true));
  all.push_back(wide<T, 16, 4, 2, 2, 3>(1, true));
  all.push_back(wide<T, 16, 8, 1, 1, 4>(1, true));
  all.push_back(wide<T, 16, 4, 4, 2, 4>(1, true));
  return all;
}

/// A variant can run these parameters on this device.
inline bool suits(const Variant& variant, const LinearParams& params, const LinearDevice& device) {
  return params.rows <= variant.most_rows && params.slices <= variant.most_slices &&
         variant.shared_bytes(params) + 1024 <= device.shared_bytes;
}

}  // namespace ladder
