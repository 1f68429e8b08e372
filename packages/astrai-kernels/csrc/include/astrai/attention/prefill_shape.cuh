// How prefill attention is laid over a GPU: tiles per head_dim.
#pragma once

namespace astrai {

constexpr int kPrefillWarps = 4;
constexpr int kPrefillThreads = 32 * kPrefillWarps;

/// Tiles of query rows and keys, chosen so that no register spills at two thread blocks a multiprocessor and that they fit
/// the shared memory of every device. ahead: two tiles of keys and of values are there, the queries are in registers, and the
/// next tile's scores are multiplied during this one's softmax; without, there is one tile of each.
/// most_keys_first: tiles start in the order of their keys, across requests (prefill_place.cuh).
struct PrefillShape {
  int queries, keys;
  bool ahead, most_keys_first;
};
/// lean: neither extras nor an e4m3 cache want registers.
__host__ __device__ constexpr PrefillShape prefill_shape(int head_dim, bool lean) {
  if (head_dim <= 64) return {128, 64, lean, false};
  if (head_dim <= 96) return {128, 32, false, false};
  if (head_dim <= 128) return {128, lean ? 64 : 32, false, true};
  return {64, 32, false, false};
}

}  // namespace astrai
