// In which order prefill's thread blocks take the tiles of query rows: no plan is made ahead, each warp searches for itself.
#pragma once

#include "astrai/attention/params.h"

namespace astrai {

/// A tile of query rows: its request, and which of the request's rows is its first.
struct PrefillPlace {
  int request, row;
};

/// Searches for the `index`-th tile in one of two orders; false: there is none. All 32 lanes of a warp must call them.
template <int kQueries>
struct PrefillPlaces {
  const AttentionParams& p;
  int lane;

  /// The last request's last rows first, so that the longest rows of a request start ahead of its others.
  __device__ __forceinline__ bool last_first(int index, PrefillPlace& place) const {
    int total = 0;
    for (int first = 0; first < p.batch; first += 32) total += warp_total(count_of(first + lane));
    int wanted = total - 1 - index;
    if (wanted < 0) return false;
    for (int first = 0;; first += 32) {
      const int own = count_of(first + lane);
      int inclusive = own;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, inclusive, offset);
        if (lane >= offset) inclusive += below;
      }
      const uint32_t beyond = __ballot_sync(0xffffffffu, inclusive > wanted);
      if (beyond) {
        const int at = __ffs(static_cast<int>(beyond)) - 1;
        place = {first + at, (wanted - __shfl_sync(0xffffffffu, inclusive - own, at)) * kQueries};
        return true;
      }
      wanted -= __shfl_sync(0xffffffffu, inclusive, 31);
    }
  }

  /// Those behind the most keys first, whosever they are, so that what starts last is short.
  __device__ __forceinline__ bool most_keys_first(int index, PrefillPlace& place) const {
    const Levels own = levels_of(lane);  // of the first 32 requests; the others' are in L1
    const auto count_from = [&](int level) {
      int count = own.count_from(level);
      for (int first = 32; first < p.batch; first += 32) count += levels_of(first + lane).count_from(level);
      return warp_total(count);
    };
    int top = own.top;
    for (int first = 32; first < p.batch; first += 32) top = max(top, levels_of(first + lane).top);
    int level = 1;
    int above = warp_largest(top) + 1;  // no tile is there
    if (index >= count_from(level)) return false;
    int before = 0;  // tiles from `above` on
    while (above - level > 1) {
      const int middle = (level + above) / 2;
      const int count = count_from(middle);
      if (count > index) {
        level = middle;
      } else {
        above = middle;
        before = count;
      }
    }
    int wanted = index - before;
    Levels levels = own;
    for (int first = 0;; first += 32) {
      if (first > 0) levels = levels_of(first + lane);
      const bool has = levels.top >= level && levels.top - levels.count < level;
      const uint32_t there = __ballot_sync(0xffffffffu, has);
      const int n_there = __popc(there);
      if (wanted < n_there) {
        const bool is_it = has && __popc(there & ((1u << lane) - 1)) == wanted;
        const int at = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, is_it))) - 1;
        const int row = (levels.count - 1 - (levels.top - level)) * kQueries;
        place = {first + at, __shfl_sync(0xffffffffu, row, at)};
        return true;
      }
      wanted -= n_there;
    }
  }

 private:
  /// A request's tiles by level: the last one is at `top`, its keys in tiles of queries, and each before lies one below.
  struct Levels {
    int count, top;
    __device__ __forceinline__ int count_from(int level) const { return max(0, min(top - level + 1, count)); }
  };
  __device__ __forceinline__ Levels levels_of(int index) const {
    return {count_of(index), index < p.batch ? (p.seq_lens[index] + kQueries - 1) / kQueries : 0};
  }
  __device__ __forceinline__ int count_of(int index) const {
    return index < p.batch ? (p.qo_indptr[index + 1] - p.qo_indptr[index] + kQueries - 1) / kQueries : 0;
  }

  static __device__ __forceinline__ int warp_total(int value) {
    return static_cast<int>(__reduce_add_sync(0xffffffffu, value));
  }
  static __device__ __forceinline__ int warp_largest(int value) {
    return static_cast<int>(__reduce_max_sync(0xffffffffu, value));
  }
};

}  // namespace astrai
