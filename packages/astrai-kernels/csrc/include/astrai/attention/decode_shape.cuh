// How decode attention is laid over a GPU: sizes per head_dim, and the list of instances.
#pragma once

#include "astrai/attention/kv.cuh"
#include "astrai/attention/params.h"
#include "astrai/common/launch.cuh"

namespace astrai {

constexpr int kGranule = 16;              // keys that one tensor-core step takes
constexpr float kNoMaximum = -1e30f;      // finite, so that differences of maxima are never NaN
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

/// Warps of a multiprocessor with 255 registers each, measured on an H200 against sixteen with 128 (spills) and
/// twelve with 168: what counts is bytes in flight and a short chain, not occupancy. A launch deals them to one, two or four
/// blocks (decode_layout).
constexpr int kDecodeWarps = 8;

/// What a head size allows: granules whose keys and values a warp holds at once, and whether the launch chooses the warps
/// of a block. Where it does not, there are always four: the results of eight would not fit 48 KiB of shared memory, and
/// there is no register left for a number that the compiler does not know.
struct DecodeShape {
  int tile;
  bool is_free;
  __host__ __device__ constexpr int most_warps() const { return is_free ? kDecodeWarps : 4; }
};
__host__ __device__ constexpr DecodeShape decode_shape(int head_dim, int row_tiles) {
  if (head_dim <= 64 || (head_dim <= 128 && row_tiles == 1)) return {2, true};
  return {1, false};
}

#ifndef __CUDACC_RTC__

/// Rows of one pass over the keys: 8, or 16 where a request has more and the head size is one that most models have.
inline int decode_row_tiles(int head_dim, int n_rows) { return n_rows > 8 && (head_dim == 64 || head_dim == 128) ? 2 : 1; }

/// Thread blocks that take part in the work on one chunk.
inline int decode_units(int head_dim, int n_heads, int n_kv_heads, int q_len) {
  const int n_rows = n_heads / n_kv_heads * q_len;
  const int rows = 8 * decode_row_tiles(head_dim, n_rows);
  return n_kv_heads * ((n_rows + rows - 1) / rows);
}

/// Warps of a block, and blocks that are resident at once on the current device.
struct DecodeLayout {
  int warps, workers;
};

/// The fewest blocks a multiprocessor that give each request and kv head one: a block's fixed cost is spread over its
/// warps, but eight that work on few keys wait for one another. Planner and attention of a step should agree, so it
/// follows from the batch alone; with chunks at fixed positions it is always the same, since the warps' sums are added in
/// their order and a row's bits must not depend on its batch.
inline cudaError_t decode_layout(int head_dim, int n_heads, int n_kv_heads, int q_len, int batch, bool is_fixed,
                                 DecodeLayout* layout) {
  int multiprocessors = 0;
  const cudaError_t status = multiprocessor_count(&multiprocessors);
  const int64_t units = static_cast<int64_t>(batch) * decode_units(head_dim, n_heads, n_kv_heads, q_len);
  const bool is_free = decode_shape(head_dim, decode_row_tiles(head_dim, n_heads / n_kv_heads * q_len)).is_free;
  layout->warps = is_fixed || !is_free ? 4 : units <= multiprocessors ? 8 : units <= 2 * multiprocessors ? 4 : 2;
  layout->workers = multiprocessors * (kDecodeWarps / layout->warps);
  return status;
}

#endif  // __CUDACC_RTC__

// Every instance of a type, head size and number of row tiles, as CASE(T, KV, kDim, kRowTiles, kExtras); e4m3 has one.
#define ASTRAI_DECODE_CASES(CASE, T, DIM, TILES) \
  CASE(T, PagedKV, DIM, TILES, false)            \
  CASE(T, AnyKV, DIM, TILES, true)

}  // namespace astrai
