// linear for 1 to 8 rows: a kernel that streams the weight and does little else.
//
// A warp takes one slice of K for 16 * kTiles weight rows. Its queue of kStages stages in shared memory is its own, so it
// needs no block-wide barrier, holds more loads in flight than registers could, and runs on across output tiles. The
// warps of a tile merge their sums in the order of the slices.
//
// The weight's first stages are requested before pdl_wait(), under the tail of the kernel before.
#pragma once

#include "astrai/common/pdl.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/linear/fragments.cuh"

namespace astrai {

constexpr int kNarrowRows = 8;

/// Where a lane is in its sequence of stages: output tile by output tile, each from the start of the slice to its end.
template <int kTiles>
struct NarrowCursor {
  const char* weight[2 * kTiles];  // this lane's next bytes of its weight rows
  const char* x;                   // and of its row of x
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

template <int kTiles>
__host__ __device__ constexpr NarrowLayout narrow_layout(int rows, int depth, bool with_norm) {
  const int row_bytes = rows * kStepBytes;
  const int steps = (depth + kLinearStep - 1) / kLinearStep;
  return {16 * kTiles * kStepBytes + (with_norm ? 0 : row_bytes), kNarrowRows * (16 * kTiles + 4) * 4, with_norm ? steps * row_bytes : 0};
}

/// Add the sums of all slices, `stride` floats apart, in their order; four are fetched before the first is added.
__device__ __forceinline__ void add_slices(float (&total)[kLinearQuad], const float* source, int stride, int slices) {
  constexpr int kAtOnce = 4;
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

/// RMS-normalise all rows of x into `normed`, step by step, with rms_norm's own tree and roundings.
template <typename T, int kWarps>
__device__ __forceinline__ void normalise_rows(const LinearParams& params, char* normed) {
  __shared__ float squares[kNarrowRows][32];
  const int lane = threadIdx.x % 32;
  const int octets = params.depth / kOctet;
  const int warps = (params.norm_threads + 31) / 32;
  const T* x = static_cast<const T*>(params.x);
  for (int item = threadIdx.x / 32; item < warps * params.rows; item += kWarps) {
    const int row = item / warps;
    const int warp = item - row * warps;
    float total = 0.0f;
    for (int i = warp * 32 + lane; i < octets; i += params.norm_threads) {
      total = sum_of_squares(load_octet<true, false>(x + row * params.x_stride + i * kOctet, kOctet), total);
    }
    total = lanes_sum<32>(total);
    if (lane == 0) squares[row][warp] = total;
  }
  __syncthreads();
  const int words = (params.depth + kLinearStep - 1) / kLinearStep * kStepParts;  // of a row, with its padding
  for (int row = 0; row < params.rows; ++row) {
    const float total = lanes_sum<32>(lane < warps ? squares[row][lane] : 0.0f);
    const float scale = inverse_rms(total, params.depth, params.norm_eps);
    for (int i = threadIdx.x; i < words; i += kWarps * 32) {
      Octet<T> value = {{0u, 0u, 0u, 0u}};
      if (i < octets) {
        value = load_octet<true, false>(x + row * params.x_stride + i * kOctet, kOctet);
        value = scale_and_weigh(
            value, scale, load_octet<true, true>(static_cast<const T*>(params.norm_weight) + i * kOctet, kOctet));
      }
      char* step = normed + i / kStepParts * params.rows * kStepBytes;
      *reinterpret_cast<uint4*>(step + word_offset(row, i % kStepParts)) =
          make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
    }
  }
  __syncthreads();
}

/// kTiles: 16-row tiles of the weight a warp has at a time; with swiglu 2, gate and up. kWarps: a multiple of `slices`.
template <typename T, int kTiles, int kWarps, int kStages, bool kNorm>
__global__ void __launch_bounds__(kWarps * 32, kWarps > 8 ? 1 : 2) linear_narrow_kernel(const LinearParams params) {
  extern __shared__ uint4 pool[];
  constexpr int kWidth = 16 * kTiles;
  constexpr int kPitch = kWidth + 4;  // floats; makes both the scattered stores and the vector loads free of conflicts
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

  const NarrowLayout layout = narrow_layout<kTiles>(params.rows, params.depth, kNorm);
  constexpr int kWeightBytes = 16 * kTiles * kStepBytes;
  const int queue_bytes = layout.stage * kStages;
  const int step_bytes = params.rows * kStepBytes;  // of x
  const uint32_t queue = shared_address(pool) + warp * queue_bytes;
  char* const after_queues = reinterpret_cast<char*>(pool) + kWarps * queue_bytes;
  float* const merge = reinterpret_cast<float*>(after_queues);  // [parity][group][slice][row][kPitch]
  char* const normed = after_queues + 2 * kWarps * layout.merge;
  const uint32_t normed_slice = shared_address(normed) + slice * params.slice_steps * step_bytes;
  // A lane copies words lane % 4 and lane % 4 + 4 of every eighth row, from row lane / 4 on.
  const uint32_t near_word = word_offset(lane / 4, lane % 4);
  const uint32_t far_word = word_offset(lane / 4, lane % 4 + 4);
  const uint32_t weight_offset = weight_matrices(lane);
  const uint32_t row_offset = row_matrices(lane, params.rows);
  const bool has_row = lane / 4 < params.rows;
  const char* const x = static_cast<const char*>(params.x) +
                        ((has_row ? lane / 4 * params.x_stride : 0) + begin) * static_cast<int>(sizeof(T));

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
  const auto fetch_rows = [&](const Cursor& at, uint32_t stage) {
    if (!at.live || !has_row) return;
    copy_cached(stage + kWeightBytes + near_word, at.x, at.left > 0);
    copy_cached(stage + kWeightBytes + far_word, at.x + 64, at.left > 32);
  };

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
  pdl_wait();
  pdl_release();
  if constexpr (kNorm) {
    normalise_rows<T, kWarps>(params, normed);
  } else {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      fetch_rows(rows_ahead, queue + i * layout.stage);
      commit_copies();
      advance(rows_ahead);
    }
  }

  int slot = 0;
  int parity = 0;
  for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
    // Output quads of the group's tile, spread over its warps: at most kTiles a lane.
    const int tile = unit * groups + group;
    const int quads = outputs / kLinearQuad;
    Quad residual[kTiles];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int item = (j * params.slices + slice) * 32 + lane;
      const int row = item / quads;
      const int feature = tile * outputs + item % quads * kLinearQuad;
      residual[j] = row < params.rows && feature < params.features ? load_residual(params, row, feature)
                                                                   : Quad{{0u, 0u}};
    }

    float sum[kTiles][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      await_copies<kStages - 1>();
      __syncwarp();  // now the copies of all its lanes have arrived
      const uint32_t stage = queue + slot;
      const uint32_t rows_of_step = kNorm ? normed_slice + step * step_bytes : stage + kWeightBytes;
      uint32_t weights[kTiles][4][4];
      uint32_t rows[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint32_t tile_rows = stage + t * 16 * kStepBytes;
          load_matrices(weights[t][2 * half], tile_rows + (weight_offset ^ 64 * half));
          load_matrices(weights[t][2 * half + 1], tile_rows + (weight_offset ^ (64 * half + 32)));
        }
        load_matrices(rows[half], rows_of_step + (row_offset ^ 64 * half));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          add_half<T>(sum[t], weights[t][2 * half], weights[t][2 * half + 1], rows[half]);
        }
      }
      __syncwarp();  // the stage has been read: the copies may overwrite it
      fetch_weights(ahead, stage);
      if constexpr (!kNorm) fetch_rows(ahead, stage);
      commit_copies();
      advance(ahead);
      slot = slot + layout.stage == queue_bytes ? 0 : slot + layout.stage;
    }

    float* sums = merge + (parity * kWarps + group * params.slices) * kNarrowRows * kPitch;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[(slice * kNarrowRows + lane % 4 * 2 + i % 2) * kPitch + t * 16 + i / 2 * 8 + lane / 4] = sum[t][i];
      }
    }
    if (params.slices == 1) {
      __syncwarp();
    } else {
      // One barrier a tile: nobody writes these sums again before the next tile's barrier, after they were read.
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int item = (j * params.slices + slice) * 32 + lane;
      const int row = item / quads;
      const int feature = tile * outputs + item % quads * kLinearQuad;
      if (row < params.rows && feature < params.features) {
        const float* source = sums + row * kPitch + item % quads * kLinearQuad;
        float total[kLinearQuad] = {};
        float up[kLinearQuad] = {};
        add_slices(total, source, kNarrowRows * kPitch, params.slices);
        if (params.swiglu) add_slices(up, source + kWidth / 2, kNarrowRows * kPitch, params.slices);
        store_outputs<T>(params, row, feature, total, up, residual[j]);
      }
    }
    parity ^= 1;
  }
}

}  // namespace astrai
