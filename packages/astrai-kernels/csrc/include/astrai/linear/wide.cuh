// linear for more rows: a block multiplies a tile of the weight with all rows of x.
//
// Weight and x stream through a queue of kStages stages in shared memory. The slices of K are spread over the blocks of
// a cluster, each with one or more consecutive slices, which merge through distributed shared memory; a block by itself
// (always before compute capability 9.0) adds them up one after the other. Either way a sum is that of the narrow
// kernel, bit by bit: same instructions, same slices, merged in the same order. Beyond kContractRows rows registers do
// not suffice for that: each block sums all it has in one go, and the slices are as many as the blocks.
#pragma once

#include "astrai/common/pdl.cuh"
#include "astrai/linear/cluster.cuh"
#include "astrai/linear/fragments.cuh"
#include "astrai/linear/halves.cuh"
#include "astrai/linear/wgmma.cuh"

namespace astrai {

/// kRowTiles: tiles of 8 rows, all of x. kWarpsDown x kWarpsAcross: warps over the tile's weight rows and over x's rows.
/// kTiles: 16-row tiles of the weight that a warp has. kSumRows: rows of x whose sums are collected at a time; where that
/// is not all of them, a block of a cluster has one slice. kGroups: products by warpgroups, where the device has them.
template <int kRowTiles, int kWarpsDown, int kWarpsAcross, int kTiles, int kStages, int kSumRows>
struct WideShape {
  static_assert(kRowTiles % kWarpsAcross == 0, "warps share the rows evenly");
  static constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross;
  static constexpr int kWidth = 16 * kTiles * kWarpsDown;  // weight rows of a tile
  static constexpr int kQuadsShift = kWidth == 64 ? 4 : 5;
  static_assert(kWidth == 64 || kWidth == 128, "quads of a row are a power of two");
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kPitch = kWidth + 4;  // floats of a row of sums; see narrow.cuh
  static constexpr int kWeightBytes = kWidth * kStepBytes;
  static constexpr int kStageBytes = (kWidth + kRows) * kStepBytes;
  static constexpr bool kInParts = kSumRows < kRows;
  static constexpr bool kKeepsSlices = kRowTiles <= kContractRows / 8;  // registers hold the slices before, too
  static constexpr int kBlocks = kStageBytes * kStages <= 98304 ? 2 : 1;  // that a multiprocessor must have registers for
  static constexpr int kSums = kSumRows * kPitch;  // floats
  static_assert(kRows % kSumRows == 0 && kSumRows % 8 == 0, "rows are collected in equal parts");

  /// Bytes of shared memory. A block of a cluster keeps the sums of its slices apart.
  __host__ __device__ static constexpr int shared_bytes(int slices, int cluster) {
    return kStageBytes * kStages + (cluster == 1 || !kKeepsSlices ? 1 : slices / cluster) * kSums * 4;
  }
};

template <typename T, int kRowTiles, int kWarpsDown, int kWarpsAcross, int kTiles, int kStages, int kSumRows, bool kGroups>
__global__ void __launch_bounds__(32 * kWarpsDown* kWarpsAcross,
                                  WideShape<kRowTiles, kWarpsDown, kWarpsAcross, kTiles, kStages, kSumRows>::kBlocks)
    linear_wide_kernel(const LinearParams params) {
  using Shape = WideShape<kRowTiles, kWarpsDown, kWarpsAcross, kTiles, kStages, kSumRows>;
  constexpr int kRowsAtOnce = Shape::kThreads / kStepParts;    // rows that the block copies with one word a thread
  constexpr int kWeightCopies = Shape::kWidth / kRowsAtOnce;   // words a thread copies of a stage
  constexpr int kRowCopies = (Shape::kRows + kRowsAtOnce - 1) / kRowsAtOnce;
  constexpr int kAcross = kRowTiles / kWarpsAcross;  // tiles of 8 rows that a warp has
  static_assert(kAcross % 2 == 0, "tiles of rows are loaded in pairs");
  static_assert(kRowsAtOnce % 8 == 0, "a thread's words are at the same place of their rows");
  static_assert(Shape::kWidth % kRowsAtOnce == 0, "every thread copies the same number of weights");

  static_assert(!kGroups || (kWarpsDown % 4 == 0 && (kAcross == 8 || kAcross == 16)), "m64n64 or m64n128");

  extern __shared__ __align__(1024) uint4 wide_pool[];
  float* const sums = reinterpret_cast<float*>(wide_pool + Shape::kStageBytes * kStages / 16);  // [slice][row][kPitch]
  const int lane = threadIdx.x % 32;
  const int down = threadIdx.x / 32 % kWarpsDown;
  const int across = threadIdx.x / 32 / kWarpsDown;
  const int rank = static_cast<int>(blockIdx.x) % params.cluster;
  const int first_tile = static_cast<int>(blockIdx.x) / params.cluster;
  const int tile_stride = static_cast<int>(gridDim.x) / params.cluster;
  const int outputs = params.swiglu ? Shape::kWidth / 2 : Shape::kWidth;
  const int tiles = (params.features + outputs - 1) / outputs;
  const int all_steps = (params.depth + kLinearStep - 1) / kLinearStep;
  const int own_slices = params.slices / params.cluster;
  const int first_step = rank * own_slices * params.slice_steps;
  const int steps = min(own_slices * params.slice_steps, all_steps - first_step);

  // Words that this thread copies of a stage: the same 16 bytes of every kRowsAtOnce-th row.
  const int copy_row = static_cast<int>(threadIdx.x) / kStepParts;
  const int begin = first_step * kLinearStep + static_cast<int>(threadIdx.x) % kStepParts * kOctet;
  const uint32_t queue = shared_address(wide_pool);
  const uint32_t weight_offset = weight_matrices(lane);
  const uint32_t row_offset = word_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);  // of a pair of row tiles, k 0-15
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

  if (params.release_early) pdl_release();
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
    if (!params.release_early) pdl_release();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      fetch_rows(rows_ahead);
      commit_copies();
      advance(rows_ahead);
    }
  }

  __shared__ float scales[Shape::kRows];
  if (scales_rows<T>(params)) find_scales<Shape::kThreads>(params, scales, static_cast<int>(threadIdx.x));  // read behind barriers

  // What is added to four outputs, fetched long before it is needed.
  const int quads_shift = Shape::kQuadsShift - (params.swiglu ? 1 : 0);
  const auto row_of = [&](int item) { return item >> quads_shift; };
  const auto local_of = [&](int item) { return (item & ((1 << quads_shift) - 1)) * kLinearQuad; };
  const bool adds = params.residual != nullptr || params.bias != nullptr || params.next_norm != nullptr;
  struct Addends {
    Quad residual, bias, next_norm;
  };
  const auto fetch_addends = [&](int tile, int first_row, int item) {
    Addends found = {};
    const int row = first_row + row_of(item);
    const int feature = tile * outputs + local_of(item);
    if (adds && row < params.rows && feature < params.features) {
      found.residual = load_residual(params, row, feature);
      found.bias = load_bias(params, feature);
      if (weighs_rows<T>(params)) found.next_norm = load_next_norm(params, feature);
    }
    return found;
  };
  const int first_item = rank * Shape::kThreads + static_cast<int>(threadIdx.x);

  float sum[kTiles][kAcross][4] = {};
  float total_sum[kTiles][kAcross][4];  // of the slices before, in a block by itself
  const auto add_slice = [&](bool is_first) {
#pragma unroll
    for (int n = 0; n < kAcross; ++n) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total_sum[t][n][i] = is_first ? sum[t][n][i] : __fadd_rn(total_sum[t][n][i], sum[t][n][i]);
          sum[t][n][i] = 0.0f;
        }
      }
    }
  };
  // Put sums, of rows from `first_row` on, where the block collects them.
  const auto collect = [&](float* target, int first_row) {
#pragma unroll
    for (int n = 0; n < kAcross; ++n) {
      const int tile_row = (across * kAcross + n) * 8 - first_row;
      if (Shape::kInParts && (tile_row < 0 || tile_row >= kSumRows)) continue;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = tile_row + lane % 4 * 2 + i % 2;
          target[row * Shape::kPitch + (t * kWarpsDown + down) * 16 + i / 2 * 8 + lane / 4] = sum[t][n][i];
          sum[t][n][i] = 0.0f;
        }
      }
    }
  };
  const auto barrier = [&] {
    if (params.cluster > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  };
  const uint32_t sums_address = shared_address(sums);
  // The sum of all slices at `place` of their memories, in order; all are fetched before the first is added.
  const auto total_of = [&](float (&total)[kLinearQuad], int place) {
    if (params.cluster == 1) {
      add_quad(total, *reinterpret_cast<const float4*>(sums + place), true);
      return;
    }
    float4 part[kLinearMostSlices];
#pragma unroll
    for (int i = 0; i < kLinearMostSlices; ++i) {
      if (i >= params.slices) break;
      const int block = i / own_slices;
      part[i] = load_cluster(sums_address + ((i - block * own_slices) * Shape::kSums + place) * 4, block);
    }
#pragma unroll
    for (int i = 0; i < kLinearMostSlices; ++i) {
      if (i < params.slices) add_quad(total, part[i], i == 0);
    }
  };

  // Add the products of a stage: 16 weight rows of every 16 * kWarpsDown to each warp, or 64 to each warpgroup.
  const auto multiply = [&](uint32_t stage) {
    const uint32_t rows = stage + Shape::kWeightBytes + across * kAcross * 8 * kStepBytes;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (kGroups) {
      const uint64_t of_rows = matrix_descriptor(rows);
      const uint64_t of_weights = matrix_descriptor(stage + down / 4 * 64 * kStepBytes);
      constexpr int kSkip = kWarpsDown * 16 * kStepBytes / 16;  // to the next tile, in units of 16 bytes
      wgmma_fence();
#pragma unroll
      for (int chunk = 0; chunk < kLinearStep / 16; ++chunk) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) wgmma(sum[t], of_weights + t * kSkip + chunk * 2, of_rows + chunk * 2, T());
      }
      wgmma_commit();
#pragma unroll
      for (int t = 0; t < kTiles; ++t) wgmma_wait(sum[t]);
      return;
    }
#endif
    const uint32_t weights = stage + down * 16 * kStepBytes;
#pragma unroll
    for (int chunk = 0; chunk < kLinearStep / 16; ++chunk) {
      uint32_t part[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        load_matrices(part[t], weights + t * kWarpsDown * 16 * kStepBytes + (weight_offset ^ 32 * chunk));
      }
#pragma unroll
      for (int n = 0; n < kAcross; n += 2) {
        uint32_t pair[4];
        load_matrices(pair, rows + n * 8 * kStepBytes + (row_offset ^ 32 * chunk));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          mma(sum[t][n], part[t], pair[0], pair[1], T());
          mma(sum[t][n + 1], part[t], pair[2], pair[3], T());
        }
      }
    }
  };

  int slot = 0;
  for (int tile = first_tile; tile < tiles; tile += tile_stride) {
    int in_slice = 0;
    int slice = 0;  // of this block's
    Addends addends = fetch_addends(tile, 0, first_item);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (Shape::kKeepsSlices && in_slice == params.slice_steps) {
        if (params.cluster == 1) {
          add_slice(slice == 0);
        } else if constexpr (!Shape::kInParts) {
          collect(sums + slice * Shape::kSums, 0);
        }
        ++slice;
        in_slice = 0;
      }
      ++in_slice;
      await_copies<kStages - 2>();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      if constexpr (kGroups) fence_copies();
#endif
      __syncthreads();  // the stage is here, and everybody has left the one before, which is filled anew
      fetch_weights(ahead);
      fetch_rows(ahead);
      commit_copies();
      advance(ahead);
      multiply(queue + slot * Shape::kStageBytes);
      slot = slot + 1 == kStages ? 0 : slot + 1;
    }
    if (Shape::kKeepsSlices && params.cluster == 1 && slice > 0) {
#pragma unroll
      for (int n = 0; n < kAcross; ++n) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[t][n][i] = __fadd_rn(total_sum[t][n][i], sum[t][n][i]);
        }
      }
    }
    for (int first_row = 0; first_row < params.rows; first_row += kSumRows) {
      collect(sums + (params.cluster == 1 ? 0 : slice * Shape::kSums), first_row);
      barrier();
      const int items = min(params.rows - first_row, kSumRows) << quads_shift;
      const int stride = params.cluster * Shape::kThreads;
      for (int item = first_item; item < items; item += stride) {
        const int row = row_of(item);
        const int local = local_of(item);
        const int feature = tile * outputs + local;
        const Addends now = addends;
        const bool is_last = item + stride >= items;
        addends = fetch_addends(tile, is_last ? first_row + kSumRows : first_row, is_last ? first_item : item + stride);
        if (feature >= params.features) continue;
        float total[kLinearQuad] = {};
        float up[kLinearQuad] = {};
        total_of(total, row * Shape::kPitch + local);
        if (params.swiglu) total_of(up, row * Shape::kPitch + local + Shape::kWidth / 2);
        if (scales_rows<T>(params)) {
          scale_quad(total, scales[first_row + row]);
          if (params.swiglu) scale_quad(up, scales[first_row + row]);
        }
        const Quad stored = store_outputs<T>(params, first_row + row, feature, total, up, now.bias, now.residual);
        if (weighs_rows<T>(params)) {
          store_squares(params, first_row + row, feature,
                        store_weighed<T>(params, first_row + row, feature, stored, now.next_norm), true);
        }
      }
      // Before these sums are overwritten, or this block's shared memory goes, everybody must have read them.
      if (params.cluster > 1) {
        cluster_barrier_after_loads();
      } else {
        __syncthreads();
      }
    }
  }
}

}  // namespace astrai
