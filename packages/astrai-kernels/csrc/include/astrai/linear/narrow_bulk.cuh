// linear for up to 16 rows on compute capability 9.0a: what narrow.cuh does, with the copy engine for the copies.
//
// As there, a warp has one slice of K for 16 rows of the weight at a time, a ring of its own, and waits for others only to
// merge the slices; the bits are the same. But one request by one lane brings kChunk steps of the weight, where each lane of
// the narrow kernel has four copies and their addresses for every step; and whatever does not need x is done before
// pdl_wait(): addresses, bias, the ring's first round.
//
// x comes with each chunk of the weight, or (kKeeps) once for the whole slice, which is for blocks that have several tiles.
// Boxes of x have as many rows as there are: what a box has beyond the tensor costs time.
//
// A step lies in shared memory as fragments.cuh has it, `rows` lines of 128 bytes for x, step after step: the engine permutes
// the words of a line by the line's address, so by its number from a start at a multiple of 1,024 bytes.
//
// A stage is refilled by the warp that has read it: every lane's loads, a fence between its reads and what the engine
// writes, __syncwarp(), and then the request of lane 0, which therefore follows the reads of all lanes. The sums have memory
// of their own, so that no thread writes where the engine does.
#pragma once

#include "astrai/common/bulk.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/linear/fragments.cuh"
#include "astrai/linear/halves.cuh"
#include "astrai/linear/narrow.cuh"

namespace astrai {

constexpr int kBulkWarps = 8;
constexpr int kBulkPitch = 20;         // floats; makes both the scattered stores and the vector loads free of conflicts
constexpr int kBulkLine = 1024;        // bytes at which the engine's permutation repeats
constexpr int kTileBytes = 16 * kStepBytes;  // a step of 16 rows of the weight

/// When the next kernel may start. A ring that holds all there is has no use for waiting.
enum class BulkRelease : int { kAtOnce, kBehindWait, kWhenAllIsAsked };

/// What the host works out (narrow_bulk_launch.cuh).
struct NarrowBulk {
  int stages;        // of a warp's ring, a chunk each
  int tiles, units;  // 16 rows of the weight; what the warps of a block take at a time
  int slice_chunks;  // of every slice but the last
  int all_chunks;
  bool by_threads;   // kKeeps: the lanes copy x, not the engine
  BulkRelease release;
};

/// Bytes of shared memory: rings, kept rows, sums, scales, barriers.
struct BulkLayout {
  int stage;  // weights, then rows of x unless they are kept
  int kept;   // of a warp
  int sums;   // of a warp
  int merges;
  int total;
};

template <int kRowTiles, int kChunk, bool kKeeps>
__host__ __device__ constexpr BulkLayout bulk_layout(int rows, int stages, int slice_chunks, bool is_single) {
  const int chunk_rows = kChunk * rows * kStepBytes;
  BulkLayout layout = {kChunk * kTileBytes, 0, rows * kBulkPitch * 4, is_single ? 1 : narrow_merges(kRowTiles), 0};
  if (kKeeps) {
    layout.kept = (slice_chunks * chunk_rows + kBulkLine - 1) / kBulkLine * kBulkLine;
  } else {
    layout.stage += (chunk_rows + kBulkLine - 1) / kBulkLine * kBulkLine;
  }
  layout.total = kBulkWarps * (stages * layout.stage + layout.kept + layout.merges * layout.sums + (stages + 1) * 8) +
                 8 * kRowTiles * static_cast<int>(sizeof(float));
  return layout;
}

/// Where the engine puts word `part` of a line.
__device__ __forceinline__ uint32_t line_offset(uint32_t line, uint32_t part) {
  return line * kStepBytes + ((part ^ line) & 7u) * 16u;
}

/// Named barriers: one for each group of warps that share a tile, one for all.
__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void announce(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// kRowTiles: 8-row tiles of x. kChunk: steps of a request; it divides every slice.
template <typename T, int kRowTiles, int kChunk, bool kKeeps>
__global__ void __launch_bounds__(kBulkWarps * 32, 2)
    linear_narrow_bulk_kernel(const LinearParams p, const __grid_constant__ TensorMap weight_map,
                              const __grid_constant__ TensorMap x_map, const NarrowBulk plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char bulk_pool[];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int slice = warp & (p.slices - 1);
  const int group = warp / p.slices;
  const int groups = kBulkWarps / p.slices;
  const int rows = p.rows;
  const int stages = plan.stages;
  const bool is_single = plan.units <= static_cast<int>(gridDim.x);
  const int chunks = min(plan.slice_chunks, plan.all_chunks - slice * plan.slice_chunks);
  const int first_step = slice * plan.slice_chunks * kChunk;

  const BulkLayout layout = bulk_layout<kRowTiles, kChunk, kKeeps>(rows, stages, plan.slice_chunks, is_single);
  const int sums_pitch = layout.sums / 4;  // floats from a warp's sums to the next warp's
  const uint32_t ring = shared_address(bulk_pool) + warp * stages * layout.stage;
  const uint32_t kept = shared_address(bulk_pool) + kBulkWarps * stages * layout.stage + warp * layout.kept;
  float* const sums = reinterpret_cast<float*>(bulk_pool + kBulkWarps * (stages * layout.stage + layout.kept));
  float* const scales = sums + layout.merges * kBulkWarps * sums_pitch;
  const uint32_t full = shared_address(scales + 8 * kRowTiles) + warp * (stages + 1) * 8;  // a stage's barrier each ...
  const uint32_t kept_full = full + stages * 8;                                            // ... and that of kept rows
  const uint32_t kept_bytes = static_cast<uint32_t>(plan.slice_chunks * kChunk * rows * kStepBytes);

  // Where the ring is filled.
  int ask_unit = static_cast<int>(blockIdx.x);
  int ask_chunk = 0;
  const auto live = [&] { return ask_unit < plan.units && ask_unit * groups + group < plan.tiles; };
  const auto ask_rows = [&](int slot, int chunk) {
    if (lane == 0) {
      copy_steps(ring + slot * layout.stage + kChunk * kTileBytes, x_map, 0, first_step + chunk * kChunk, full + 8 * slot,
                 kReadAgain);
    }
  };
  const auto ask_weight = [&](int slot) {
    if (lane == 0) {
      const int tile = ask_unit * groups + group;
      const int step = first_step + ask_chunk * kChunk;
      const uint32_t target = ring + slot * layout.stage;
      const uint32_t barrier = full + 8 * slot;
      barrier_expect(barrier, kChunk * (kTileBytes + (kKeeps ? 0 : rows * kStepBytes)));
      if (p.swiglu) {
        copy_paired_steps(target, weight_map, tile, step, barrier, kReadOnce);
      } else {
        copy_steps(target, weight_map, tile * 16, step, barrier, kReadOnce);
      }
    }
    if (++ask_chunk == chunks) {
      ask_chunk = 0;
      ask_unit += static_cast<int>(gridDim.x);
    }
  };
  // Every lane has read the stage; its next chunk may come.
  const auto refill = [&](int slot) {
    if (!live()) return;
    fence_for_copies();
    __syncwarp();
    if (!kKeeps) ask_rows(slot, ask_chunk);
    ask_weight(slot);
    if (plan.release == BulkRelease::kWhenAllIsAsked && !live()) pdl_release();
  };

  if (plan.release == BulkRelease::kAtOnce) pdl_release();
  if (lane == 0) {
    prefetch_map(weight_map);
    if (!kKeeps || !plan.by_threads) prefetch_map(x_map);
    for (int i = 0; i <= stages; ++i) barrier_init(full + 8 * i, 1);
    barrier_publish();
  }
  __syncwarp();
  const bool has_work = live();
  int asked = 0;
  for (; asked < stages && live(); ++asked) ask_weight(asked);
  if (plan.release == BulkRelease::kWhenAllIsAsked && !live()) pdl_release();

  // What this lane reads of a stage, and the output quad that it finishes.
  uint32_t weight_offset = weight_matrices(lane);
  uint32_t row[kRowTiles];
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) row[n] = static_cast<uint32_t>(min(n * 8 + lane % 8, rows - 1));
  const int outputs = p.swiglu ? 8 : 16;
  const int quad_bits = p.swiglu ? 1 : 2;
  const int column = lane % 4 * 2;
  float* const own_sums = sums + warp * sums_pitch + column * kBulkPitch + lane / 4;
  int out_row = 0;
  int out_feature = 0;
  Quad residual = {{0u, 0u}};
  Quad bias = {{0u, 0u}};
  Quad next_norm = {{0u, 0u}};
  bool ends = false;
  // Warps take turns to finish a tile. Of all that belongs to an output only the residual has to wait.
  const auto enter = [&](int unit, int turn) {
    const int item = ((slice - turn) & (p.slices - 1)) * 32 + lane;
    out_row = item >> quad_bits;
    out_feature = (unit * groups + group) * outputs + (item & ((1 << quad_bits) - 1)) * kLinearQuad;
    ends = out_row < rows && out_feature < p.features;
    if (!ends) return;
    bias = load_bias(p, out_feature);
    if (weighs_rows<T>(p)) next_norm = load_next_norm(p, out_feature);
  };
  enter(static_cast<int>(blockIdx.x), 0);
  asm volatile("" : "+r"(weight_offset), "+r"(row[0]));  // not behind the wait

  pdl_wait();
  if (has_work) {
    if (!kKeeps) {
      for (int i = 0, chunk = 0; i < asked; ++i) {
        ask_rows(i, chunk);
        if (++chunk == chunks) chunk = 0;
      }
    } else if (!plan.by_threads) {
      if (lane == 0) {
        barrier_expect(kept_full, kept_bytes);
        copy_steps(kept, x_map, 0, first_step, kept_full, kReadAgain);
      }
    } else {
      const int words = chunks * kChunk * kStepParts;  // of a row
      const char* source = static_cast<const char*>(p.x) + static_cast<int64_t>(first_step) * kStepBytes;
#pragma unroll 1
      for (int r = 0; r < rows; ++r, source += p.x_stride * static_cast<int>(sizeof(T))) {
#pragma unroll 1
        for (int word = lane; word < words; word += 32) {
          copy_streamed(kept + line_offset(word / kStepParts * rows + r, word % kStepParts), source + word * 16, true);
        }
      }
      commit_copies();
    }
  }
  if (plan.release == BulkRelease::kBehindWait) pdl_release();
  if (ends) residual = load_residual(p, out_row, out_feature);
  float4 squares_ahead[kRowTiles];
  if (scales_rows<T>(p)) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) squares_ahead[n] = load_squares(p, warp + n * 8, lane);
  }

  int slot = 0;
  uint32_t parity = 0;
  bool awaits_kept = kKeeps;
  int turn = 0;
#pragma unroll 1
  for (int unit = static_cast<int>(blockIdx.x); unit < plan.units; unit += static_cast<int>(gridDim.x), ++turn) {
    if (turn > 0) {
      enter(unit, turn);
      if (ends) residual = load_residual(p, out_row, out_feature);
    }
    float sum[kRowTiles][4] = {};
    if (unit * groups + group < plan.tiles) {
#pragma unroll 1
      for (int c = 0; c < chunks; ++c) {
        barrier_await(full + 8 * slot, parity);
        const uint32_t stage = ring + slot * layout.stage;
        uint32_t weight[kChunk][4][4];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) load_matrices(weight[i][j], stage + i * kTileBytes + (weight_offset ^ j * 32));
        }
        if (kKeeps) refill(slot);
        if (awaits_kept) {
          awaits_kept = false;
          if (plan.by_threads) {
            await_copies<0>();
            __syncwarp();
          } else {
            barrier_await(kept_full, 0);
          }
        }
        const uint32_t rows_at = kKeeps ? kept : stage + kChunk * kTileBytes;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          uint32_t part[kRowTiles][2][4];
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
            const uint32_t at = rows_at + line_offset((kKeeps ? c * kChunk + i : i) * rows + row[n], lane / 8);
            load_matrices(part[n][0], at);
            load_matrices(part[n][1], at ^ 64);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int n = 0; n < kRowTiles; ++n) {
              add_half<T>(sum[n], weight[i][2 * half], weight[i][2 * half + 1], part[n][half]);
            }
          }
        }
        if (!kKeeps) refill(slot);
        if (++slot == stages) {
          slot = 0;
          parity ^= 1;
        }
      }
    }

    const bool finds_scales = turn == 0 && scales_rows<T>(p);
    const int barrier = finds_scales ? 1 + kBulkWarps : 1 + group;
    const int threads = finds_scales ? kBulkWarps * 32 : p.slices * 32;
    // With two merges nobody writes these sums again before the next tile's barrier, after they were read.
    if (layout.merges == 1 && turn > 0) meet(barrier, threads);
    const int merge = layout.merges == 2 ? turn % 2 : 0;
    float* const put = own_sums + merge * kBulkWarps * sums_pitch;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (n * 8 + column + i % 2 < rows) put[(n * 8 + i % 2) * kBulkPitch + i / 2 * 8] = sum[n][i];
      }
    }
    if (finds_scales) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) store_scale(p, scales, warp + n * 8, lane, squares_ahead[n]);
    }
    if (is_single && !__any_sync(0xffffffffu, ends)) {
      announce(barrier, threads);
      return;
    }
    meet(barrier, threads);
    float2 squares = make_float2(0.0f, 0.0f);
    if (ends) {
      const float* source = sums + (merge * kBulkWarps + group * p.slices) * sums_pitch + out_row * kBulkPitch +
                            (out_feature & (outputs - 1));
      float total[kLinearQuad] = {};
      float up[kLinearQuad] = {};
      add_slices<kLinearMostSlices>(total, source, sums_pitch, p.slices);
      if (p.swiglu) add_slices<kLinearMostSlices>(up, source + 8, sums_pitch, p.slices);
      if (scales_rows<T>(p)) {
        scale_quad(total, scales[out_row]);
        if (p.swiglu) scale_quad(up, scales[out_row]);
      }
      const Quad stored = store_outputs<T>(p, out_row, out_feature, total, up, bias, residual);
      if (weighs_rows<T>(p)) squares = store_weighed<T>(p, out_row, out_feature, stored, next_norm);
    }
    if (weighs_rows<T>(p)) store_squares(p, out_row, out_feature, squares, ends);
  }
#elif defined(__CUDA_ARCH__)
  asm volatile("trap;");  // launched by a build that has no code for 9.0a
#endif
}

}  // namespace astrai
