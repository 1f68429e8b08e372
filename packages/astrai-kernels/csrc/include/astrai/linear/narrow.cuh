// linear for few rows: a kernel that streams the weight and does little else.
//
// A warp takes one slice of K for 16 * kTiles weight rows. Its queue of kStages stages in shared memory is its own, so it
// needs no block-wide barrier, holds more loads in flight than registers could, and runs on across output tiles. The
// warps of a tile merge their sums in the order of the slices.
//
// The weight's first stages are requested before pdl_wait(), under the kernel before; a kernel therefore leaves room on
// its multiprocessors for a block of the next one.
#pragma once

#include "astrai/common/pdl.cuh"
#include "astrai/linear/fragments.cuh"
#include "astrai/linear/halves.cuh"
#include "astrai/linear/narrow_norm.cuh"

namespace astrai {

/// Where a lane is in its sequence of stages: output tile by output tile, each from the start of the slice to its end.
template <int kTiles>
struct NarrowCursor {
  const char* weight[2 * kTiles];  // this lane's next bytes of its weight rows
  const char* x;                   // and of its first row of x
  int left;                        // k from there to the end of the row
  int steps;                       // left of the slice
  int unit;
  bool live;  // the tile exists
};

/// Bytes of shared memory.
struct NarrowLayout {
  int stage;  // weights, then rows of x (which a norm keeps in `normed` instead)
  int merge;  // sums of one warp
  int normed;
};

/// Copies of the sums' memory: with two, one barrier a tile is enough.
__host__ __device__ constexpr int narrow_merges(int row_tiles) { return row_tiles == 1 ? 2 : 1; }

template <int kTiles, int kRowTiles>
__host__ __device__ constexpr NarrowLayout narrow_layout(int rows, int depth, bool with_norm) {
  const int row_bytes = rows * kStepBytes;
  const int steps = (depth + kLinearStep - 1) / kLinearStep;
  return {16 * kTiles * kStepBytes + (with_norm ? 0 : row_bytes), 8 * kRowTiles * (16 * kTiles + 4) * 4,
          with_norm ? steps * row_bytes : 0};
}

/// Add the sums of all slices, `stride` floats apart, in their order; kAtOnce are fetched before the first is added.
template <int kAtOnce = 4>
__device__ __forceinline__ void add_slices(float (&total)[kLinearQuad], const float* source, int stride, int slices) {
#pragma unroll
  for (int first = 0; first < kLinearMostSlices; first += kAtOnce) {
    float4 part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < slices) part[i] = *reinterpret_cast<const float4*>(source + (first + i) * stride);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < slices) add_quad(total, part[i], first + i == 0);
    }
  }
}

/// kTiles: 16-row tiles of the weight a warp has at a time. kRowTiles: 8-row tiles of x. kWarps: a multiple of `slices`.
template <typename T, int kTiles, int kRowTiles, int kWarps, int kStages, bool kNorm>
__global__ void __launch_bounds__(kWarps * 32, kTiles * kRowTiles > 4 ? 1 : 2)
    linear_narrow_kernel(const LinearParams params) {
  static_assert(!kNorm || 8 * kRowTiles == kNormRows, "normalised rows are one tile");
  extern __shared__ uint4 pool[];
  constexpr int kWidth = 16 * kTiles;
  constexpr int kPitch = kWidth + 4;  // floats; makes both the scattered stores and the vector loads free of conflicts
  constexpr int kItems = kTiles * kRowTiles;  // output quads of a lane, at most
  constexpr int kMerges = narrow_merges(kRowTiles);
  constexpr int kSums = 8 * kRowTiles * kPitch;  // floats of one warp
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int slice = warp % params.slices;
  const int group = warp / params.slices;
  const int groups = kWarps / params.slices;
  const int outputs = params.swiglu ? kWidth / 2 : kWidth;  // of a tile
  const int tiles = (params.features + outputs - 1) / outputs;
  const int units = (tiles + groups - 1) / groups;
  const int all_steps = (params.depth + kLinearStep - 1) / kLinearStep;
  const int steps = min(params.slice_steps, all_steps - slice * params.slice_steps);
  const int begin = slice * params.slice_steps * kLinearStep + lane % 4 * kOctet;  // this lane's first k

  const NarrowLayout layout = narrow_layout<kTiles, kRowTiles>(params.rows, params.depth, kNorm);
  constexpr int kWeightBytes = kWidth * kStepBytes;
  const int queue_bytes = layout.stage * kStages;
  const int step_bytes = params.rows * kStepBytes;  // of x
  const uint32_t queue = shared_address(pool) + warp * queue_bytes;
  char* const after_queues = reinterpret_cast<char*>(pool) + kWarps * queue_bytes;
  // [kMerges][group][slice][row][kPitch]; where each warp has one tile, over the stages that it has read.
  const bool is_single = units <= static_cast<int>(gridDim.x);
  static_assert(kStages * kWeightBytes >= kSums * 4, "a queue has room for its warp's sums");
  float* const merge = reinterpret_cast<float*>(is_single ? reinterpret_cast<char*>(pool) : after_queues);
  const int sums_pitch = is_single ? queue_bytes / 4 : kSums;  // floats from a warp's sums to the next warp's
  char* const normed = after_queues + (is_single ? 0 : kMerges * kWarps * layout.merge);
  const uint32_t normed_slice = shared_address(normed) + slice * params.slice_steps * step_bytes;
  // A lane copies words lane % 4 and lane % 4 + 4 of every eighth row, from row lane / 4 on.
  const uint32_t near_word = word_offset(lane / 4, lane % 4);
  const uint32_t far_word = word_offset(lane / 4, lane % 4 + 4);
  const uint32_t weight_offset = weight_matrices(lane);
  uint32_t row_offset[kRowTiles];
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) row_offset[n] = row_matrices(lane, n, params.rows);
  const bool has_row = lane / 4 < params.rows;
  const char* const x = static_cast<const char*>(params.x) +
                        ((has_row ? lane / 4 * params.x_stride : 0) + begin) * static_cast<int>(sizeof(T));
  const int64_t x_skip = 8 * params.x_stride * static_cast<int>(sizeof(T));

  using Cursor = NarrowCursor<kTiles>;
  const auto enter_unit = [&](Cursor& at) {
    const int tile = at.unit * groups + group;
    at.live = at.unit < units && tile < tiles;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int64_t row = weight_row(params, min(tile, tiles - 1), kWidth, i * 8 + lane / 4);
      at.weight[i] = static_cast<const char*>(params.weight) +
                     (row * params.weight_stride + begin) * static_cast<int>(sizeof(T));
    }
    at.x = x;
    at.left = params.depth - begin;
    at.steps = steps;
  };
  const auto advance = [&](Cursor& at) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) at.weight[i] += kStepBytes;
    at.x += kStepBytes;
    at.left -= kLinearStep;
    if (--at.steps > 0) return;
    at.unit += static_cast<int>(gridDim.x);
    enter_unit(at);
  };
  const auto fetch_weights = [&](const Cursor& at, uint32_t stage) {
    if (!at.live) return;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      copy_streamed(stage + near_word + i * 8 * kStepBytes, at.weight[i], at.left > 0);
      copy_streamed(stage + far_word + i * 8 * kStepBytes, at.weight[i] + 64, at.left > 32);
    }
  };
  // `source`: this lane's words in its first row, `left` k from the end.
  const auto fetch_rows = [&](const char* source, int left, uint32_t stage) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      if (lane / 4 + n * 8 >= params.rows) break;
      copy_cached(stage + kWeightBytes + near_word + n * 8 * kStepBytes, source + n * x_skip, left > 0);
      copy_cached(stage + kWeightBytes + far_word + n * 8 * kStepBytes, source + n * x_skip + 64, left > 32);
    }
  };

  if (params.release_early) pdl_release();
  Cursor ahead;
  ahead.unit = static_cast<int>(blockIdx.x);
  enter_unit(ahead);
  Cursor rows_ahead = ahead;
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) {
    fetch_weights(ahead, queue + i * layout.stage);
    commit_copies();
    advance(ahead);
  }
  // What the queue has no room for, a line of 128 bytes a lane: DRAM would idle while the kernel before ends.
  if (rows_ahead.live) {
    const int last = min(steps, kStages + params.prefetch_steps);
    for (int item = lane; item < (last - kStages) * kWidth; item += 32) {
      const int64_t row = weight_row(params, rows_ahead.unit * groups + group, kWidth, item % kWidth);
      const int k = (slice * params.slice_steps + kStages + item / kWidth) * kLinearStep;
      prefetch_line(static_cast<const T*>(params.weight) + row * params.weight_stride + k);
    }
  }
  pdl_wait();
  if (!params.release_early) pdl_release();
  if constexpr (kNorm) {
    normalise_rows<T, kWarps>(params, normed);
  } else {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      if (steps >= kStages) {
        const int left = params.depth - begin - i * kLinearStep;
        if (rows_ahead.live) fetch_rows(x + i * kStepBytes, left, queue + i * layout.stage);
      } else {
        if (rows_ahead.live) fetch_rows(rows_ahead.x, rows_ahead.left, queue + i * layout.stage);
        advance(rows_ahead);
      }
      commit_copies();
    }
  }
  constexpr bool kScales = !kNorm && kHasHalves<T>;
  static_assert(kWarps == 8, "a warp for every eighth row");
  __shared__ float scales[8 * kRowTiles];
  float4 squares_ahead[kRowTiles];
  if (kScales && params.squares != nullptr) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) squares_ahead[n] = load_squares(params, warp + n * 8, lane);
  }

  int slot = 0;
  int parity = 0;
  for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
    // Output quads of the group's tile, spread over its warps.
    const int tile = unit * groups + group;
    const int quads = outputs / kLinearQuad;
    constexpr int kAhead = kItems <= 2 ? kItems : 0;  // fetched before they are needed, where registers suffice
    Quad residual[kItems];
    Quad bias[kItems];
    Quad next_norm[kItems];
    const auto fetch_addends = [&](int j) {
      const int item = (j * params.slices + slice) * 32 + lane;
      const int row = item / quads;
      const int feature = tile * outputs + item % quads * kLinearQuad;
      const bool wanted = row < params.rows && feature < params.features;
      residual[j] = wanted ? load_residual(params, row, feature) : Quad{{0u, 0u}};
      bias[j] = wanted ? load_bias(params, feature) : Quad{{0u, 0u}};
      if (weighs_rows<T>(params)) next_norm[j] = wanted ? load_next_norm(params, feature) : Quad{{0u, 0u}};
    };
#pragma unroll
    for (int j = 0; j < kAhead; ++j) fetch_addends(j);

    float sum[kTiles][kRowTiles][4] = {};
    const auto multiply = [&](uint32_t stage, int step) {
      const uint32_t rows_of_step = kNorm ? normed_slice + step * step_bytes : stage + kWeightBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t early[kTiles][4];
        uint32_t late[kTiles][4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint32_t tile_rows = stage + t * 16 * kStepBytes;
          load_matrices(early[t], tile_rows + (weight_offset ^ 64 * half));
          load_matrices(late[t], tile_rows + (weight_offset ^ (64 * half + 32)));
        }
        uint32_t rows[kRowTiles][4];
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) load_matrices(rows[n], rows_of_step + (row_offset[n] ^ 64 * half));
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) add_half<T>(sum[t][n], early[t], late[t], rows[n]);
        }
      }
    };
    if (steps == kStages && is_single) {
      // The queue holds all that this warp does: nothing to refill, and loads overlap products.
      await_copies<0>();
      __syncwarp();
#pragma unroll
      for (int step = 0; step < kStages; ++step) multiply(queue + step * layout.stage, step);
      __syncwarp();  // the stages have been read: the sums may overwrite them
    } else {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        await_copies<kStages - 1>();
        __syncwarp();  // now the copies of all its lanes have arrived
        const uint32_t stage = queue + slot;
        multiply(stage, step);
        __syncwarp();  // the stage has been read: the copies may overwrite it
        fetch_weights(ahead, stage);
        if constexpr (!kNorm) {
          if (ahead.live) fetch_rows(ahead.x, ahead.left, stage);
        }
        commit_copies();
        advance(ahead);
        slot = slot + layout.stage == queue_bytes ? 0 : slot + layout.stage;
      }
    }

    const auto barrier = [&] {
      if (params.slices == 1) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    };
    // With two merges nobody writes these sums again before the next tile's barrier, after they were read.
    if (kMerges == 1 && unit != static_cast<int>(blockIdx.x)) barrier();
    float* sums = merge + (parity * kWarps + group * params.slices) * sums_pitch;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = n * 8 + lane % 4 * 2 + i % 2;
          sums[slice * sums_pitch + row * kPitch + t * 16 + i / 2 * 8 + lane / 4] = sum[t][n][i];
        }
      }
    }
    if (kScales && params.squares != nullptr && unit == static_cast<int>(blockIdx.x)) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) store_scale(params, scales, warp + n * 8, lane, squares_ahead[n]);
      __syncthreads();
    } else {
      barrier();
    }
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int item = (j * params.slices + slice) * 32 + lane;
      const int row = item / quads;
      const int feature = tile * outputs + item % quads * kLinearQuad;
      if (j >= kAhead) fetch_addends(j);
      const bool wanted = row < params.rows && feature < params.features;
      float2 squares = make_float2(0.0f, 0.0f);
      if (wanted) {
        const float* source = sums + row * kPitch + item % quads * kLinearQuad;
        float total[kLinearQuad] = {};
        float up[kLinearQuad] = {};
        add_slices(total, source, sums_pitch, params.slices);
        if (params.swiglu) add_slices(up, source + kWidth / 2, sums_pitch, params.slices);
        if (kScales && params.squares != nullptr) {
          scale_quad(total, scales[row]);
          if (params.swiglu) scale_quad(up, scales[row]);
        }
        const Quad stored = store_outputs<T>(params, row, feature, total, up, bias[j], residual[j]);
        if (weighs_rows<T>(params)) squares = store_weighed<T>(params, row, feature, stored, next_norm[j]);
      }
      if (weighs_rows<T>(params)) store_squares(params, row, feature, squares, wanted);
    }
    parity = (parity + 1) % kMerges;
  }
}

}  // namespace astrai
