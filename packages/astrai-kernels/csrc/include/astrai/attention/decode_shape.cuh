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

/// How a head size is spread over thread blocks: warps of one, blocks that fit a multiprocessor, granules whose keys and
/// values a warp holds at once; ahead: whether a block's next unit starts to load while it merges the last. Eight warps a multiprocessor with 255 registers each, measured on an H200 against sixteen
/// with 128 (spills) and twelve with 168: what counts is bytes in flight and a short chain, not occupancy.
struct DecodeShape {
  int warps, blocks, tile;
  bool ahead;
};
__host__ __device__ constexpr DecodeShape decode_shape(int head_dim, int row_tiles) {
  if (head_dim <= 64) return {8, 1, 2, false};
  if (head_dim <= 128) return {4, 2, row_tiles == 1 ? 2 : 1, false};
  return {4, 2, 1, false};
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

/// Thread blocks that are resident at once on the current device.
inline cudaError_t decode_workers(int head_dim, int n_rows, int* workers) {
  int multiprocessors = 0;
  const cudaError_t status = multiprocessor_count(&multiprocessors);
  *workers = multiprocessors * decode_shape(head_dim, decode_row_tiles(head_dim, n_rows)).blocks;
  return status;
}

#endif  // __CUDACC_RTC__

// Every instance of a type, head size and number of row tiles, as CASE(T, KV, kDim, kRowTiles, kExtras); e4m3 has one.
#define ASTRAI_DECODE_CASES(CASE, T, DIM, TILES) \
  CASE(T, PagedKV, DIM, TILES, false)            \
  CASE(T, AnyKV, DIM, TILES, true)

}  // namespace astrai
