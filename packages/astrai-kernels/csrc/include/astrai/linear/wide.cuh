// linear for 9 to 128 rows: a block multiplies a tile of the weight with all rows of x.
//
// Weight and x stream through a queue of kStages stages in shared memory. The slices of K
// are the blocks of a cluster, which merge through distributed shared memory; where there are no clusters (before
// compute capability 9.0) or they do not pay, one block takes its slices one after the other. Either way a sum is that
// of the narrow kernel, bit by bit: same instructions, same slices, merged in the same order.
#pragma once

#include "astrai/common/pdl.cuh"
#include "astrai/linear/cluster.cuh"
#include "astrai/linear/fragments.cuh"

namespace astrai {

/// kRowTiles: tiles of 8 rows, all of x. kWarpsDown x kWarpsAcross: warps over the tile's weight rows and over x's rows.
/// kTiles: 16-row tiles of the weight that a warp has.
template <int kRowTiles, int kWarpsDown, int kWarpsAcross, int kTiles, int kStages>
struct WideShape {
  static_assert(kRowTiles % kWarpsAcross == 0, "warps share the rows evenly");
  static constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross;
  static constexpr int kWidth = 16 * kTiles * kWarpsDown;  // weight rows of a tile
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kPitch = kWidth + 4;  // floats of a row of sums; see narrow.cuh
  static constexpr int kWeightBytes = kWidth * kStepBytes;
  static constexpr int kStageBytes = (kWidth + kRows) * kStepBytes;
  static constexpr int kSharedBytes = kStageBytes * kStages + kRows * kPitch * 4;
};

template <typename T, int kRowTiles, int kWarpsDown, int kWarpsAcross, int kTiles, int kStages>
__global__ void __launch_bounds__(32 * kWarpsDown* kWarpsAcross, 1) linear_wide_kernel(const LinearParams params) {
  using Shape = WideShape<kRowTiles, kWarpsDown, kWarpsAcross, kTiles, kStages>;
  constexpr int kRowsAtOnce = Shape::kThreads / kStepParts;    // rows that the block copies with one word a thread
  constexpr int kWeightCopies = Shape::kWidth / kRowsAtOnce;   // words a thread copies of a stage
  constexpr int kRowCopies = (Shape::kRows + kRowsAtOnce - 1) / kRowsAtOnce;
  constexpr int kAcross = kRowTiles / kWarpsAcross;  // tiles of 8 rows that a warp has
  static_assert(kRowsAtOnce % 8 == 0, "a thread's words are at the same place of their rows");
  static_assert(Shape::kWidth % kRowsAtOnce == 0, "every thread copies the same number of weights");

  extern __shared__ uint4 pool[];
  float* sums = reinterpret_cast<float*>(pool + Shape::kStageBytes * kStages / 16);  // [row][kPitch]
  const int lane = threadIdx.x % 32;
  const int down = threadIdx.x / 32 % kWarpsDown;
  const int across = threadIdx.x / 32 / kWarpsDown;
  const int rank = static_cast<int>(blockIdx.x) % params.cluster;
  const int first_tile = static_cast<int>(blockIdx.x) / params.cluster;
  const int tile_stride = static_cast<int>(gridDim.x) / params.cluster;
  const int outputs = params.swiglu ? Shape::kWidth / 2 : Shape::kWidth;
  const int tiles = (params.features + outputs - 1) / outputs;
  const int all_steps = (params.depth + kLinearStep - 1) / kLinearStep;
  // A cluster's block takes the slice of its rank; a block by itself takes them all.
  const int first_step = rank * params.slice_steps;
  const int steps = params.cluster == 1 ? all_steps : min(params.slice_steps, all_steps - first_step);

  // Words that this thread copies of a stage: the same 16 bytes of every kRowsAtOnce-th row.
  const int copy_row = static_cast<int>(threadIdx.x) / kStepParts;
  const int begin = first_step * kLinearStep + static_cast<int>(threadIdx.x) % kStepParts * kOctet;
  const uint32_t queue = shared_address(pool);
  const uint32_t weight_offset = weight_matrices(lane);
  const uint32_t row_offset = row_matrices(lane, 8);
  const uint32_t copy_queue = queue + word_offset(copy_row, static_cast<int>(threadIdx.x) % kStepParts);
  constexpr int kCopyBytes = kRowsAtOnce * kStepBytes;
  const char* const x = static_cast<const char*>(params.x) +
                        (copy_row * params.x_stride + begin) * static_cast<int>(sizeof(T));
  const int64_t x_skip = kRowsAtOnce * params.x_stride * static_cast<int>(sizeof(T));

  struct Cursor {
    const char* weight[kWeightCopies];
    const char* x;
    int left;   // k to the end of the row
    int steps;  // left of what this block does of the tile
    int tile;
    int slot;
  };
  const auto enter_tile = [&](Cursor& at) {
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i) {
      const int64_t row = weight_row(params, min(at.tile, tiles - 1), Shape::kWidth, copy_row + i * kRowsAtOnce);
      at.weight[i] = static_cast<const char*>(params.weight) +
                     (row * params.weight_stride + begin) * static_cast<int>(sizeof(T));
    }
    at.x = x;
    at.left = params.depth - begin;
    at.steps = steps;
  };
  const auto advance = [&](Cursor& at) {
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i) at.weight[i] += kStepBytes;
    at.x += kStepBytes;
    at.left -= kLinearStep;
    at.slot = at.slot + 1 == kStages ? 0 : at.slot + 1;
    if (--at.steps > 0) return;
    at.tile += tile_stride;
    enter_tile(at);
  };
  const auto fetch_weights = [&](const Cursor& at) {
    if (at.tile >= tiles) return;
    const uint32_t target = copy_queue + at.slot * Shape::kStageBytes;
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i) copy_streamed(target + i * kCopyBytes, at.weight[i], at.left > 0);
  };
  const auto fetch_rows = [&](const Cursor& at) {
    if (at.tile >= tiles) return;
    const uint32_t target = copy_queue + at.slot * Shape::kStageBytes + Shape::kWeightBytes;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const int row = copy_row + i * kRowsAtOnce;
      if (Shape::kRows % kRowsAtOnce != 0 && row >= Shape::kRows) break;
      copy_cached(target + i * kCopyBytes, at.x + i * x_skip, row < params.rows && at.left > 0);
    }
  };

  Cursor ahead;
  ahead.tile = first_tile;
  ahead.slot = 0;
  enter_tile(ahead);
  {
    Cursor rows_ahead = ahead;
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      fetch_weights(ahead);
      commit_copies();
      advance(ahead);
    }
    pdl_wait();
    pdl_release();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      fetch_rows(rows_ahead);
      commit_copies();
      advance(rows_ahead);
    }
  }

  float sum[kTiles][kAcross][4] = {};
  // Put the slice's sums where the block collects them; later slices of the same block are added in their order.
  const auto fold = [&](bool is_first) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int n = 0; n < kAcross; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = (across * kAcross + n) * 8 + lane % 4 * 2 + i % 2;
          float& total = sums[row * Shape::kPitch + (down * kTiles + t) * 16 + i / 2 * 8 + lane / 4];
          total = is_first ? sum[t][n][i] : __fadd_rn(total, sum[t][n][i]);
          sum[t][n][i] = 0.0f;
        }
      }
    }
  };

  int slot = 0;
  for (int tile = first_tile; tile < tiles; tile += tile_stride) {
    int in_slice = 0;
    bool is_first = true;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (in_slice == params.slice_steps) {
        fold(is_first);
        is_first = false;
        in_slice = 0;
      }
      ++in_slice;
      await_copies<kStages - 2>();
      __syncthreads();  // the stage is here, and everybody has left the one before, which is filled anew
      fetch_weights(ahead);
      fetch_rows(ahead);
      commit_copies();
      advance(ahead);
      const uint32_t weights = queue + slot * Shape::kStageBytes + down * kTiles * 16 * kStepBytes;
      const uint32_t rows = queue + slot * Shape::kStageBytes + Shape::kWeightBytes + across * kAcross * 8 * kStepBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t early[kTiles][4];
        uint32_t late[kTiles][4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          load_matrices(early[t], weights + t * 16 * kStepBytes + (weight_offset ^ 64 * half));
          load_matrices(late[t], weights + t * 16 * kStepBytes + (weight_offset ^ (64 * half + 32)));
        }
#pragma unroll
        for (int n = 0; n < kAcross; ++n) {
          uint32_t part[4];
          load_matrices(part, rows + n * 8 * kStepBytes + (row_offset ^ 64 * half));
#pragma unroll
          for (int t = 0; t < kTiles; ++t) add_half<T>(sum[t][n], early[t], late[t], part);
        }
      }
      slot = slot + 1 == kStages ? 0 : slot + 1;
    }
    fold(is_first);

    if (params.cluster > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
    const int quads = outputs / kLinearQuad;
    const uint32_t base = shared_address(sums);
    for (int item = rank * Shape::kThreads + static_cast<int>(threadIdx.x); item < params.rows * quads;
         item += params.cluster * Shape::kThreads) {
      const int row = item / quads;
      const int local = item % quads * kLinearQuad;
      const int feature = tile * outputs + local;
      if (feature >= params.features) continue;
      const Quad residual = load_residual(params, row, feature);
      float total[kLinearQuad] = {};
      float up[kLinearQuad] = {};
      const int place = row * Shape::kPitch + local;
      if (params.cluster > 1) {
        for (int part = 0; part < params.cluster; ++part) {
          add_quad(total, load_cluster(base + place * 4, part), part == 0);
          if (params.swiglu) add_quad(up, load_cluster(base + (place + Shape::kWidth / 2) * 4, part), part == 0);
        }
      } else {
        add_quad(total, *reinterpret_cast<const float4*>(sums + place), true);
        if (params.swiglu) add_quad(up, *reinterpret_cast<const float4*>(sums + place + Shape::kWidth / 2), true);
      }
      store_outputs<T>(params, row, feature, total, up, residual);
    }
    // Before these sums are overwritten, or this block's shared memory goes, everybody must have read them.
    if (params.cluster > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }
}

}  // namespace astrai
