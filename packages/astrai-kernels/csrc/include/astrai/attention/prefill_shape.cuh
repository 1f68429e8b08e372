// How prefill attention is laid over a GPU: tiles per head_dim.
#pragma once

namespace astrai {

constexpr int kPrefillWarps = 4;
constexpr int kPrefillThreads = 32 * kPrefillWarps;

/// Tiles of query rows and keys, chosen so that no register spills at two thread blocks a multiprocessor. stages: tiles of
/// keys and of values in shared memory. ahead (two stages): the next tile's scores are multiplied during this one's softmax.
struct PrefillShape {
  int queries, keys, stages;
  bool ahead;
};
/// lean: neither extras nor an e4m3 cache want registers.
__host__ __device__ constexpr PrefillShape prefill_shape(int head_dim, bool lean) {
  if (head_dim <= 80) return {128, 64, 1, false};
  if (head_dim <= 96) return {128, 32, 1, false};
  if (head_dim <= 128) return lean ? PrefillShape{128, 48, 1, false} : PrefillShape{128, 32, 1, false};
  return {64, 32, 1, false};
}

}  // namespace astrai
