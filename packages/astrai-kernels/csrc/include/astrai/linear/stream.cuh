// linear for 17 to 128 rows on compute capability 9.0a: the copy engine brings weight and x, warpgroups multiply.
//
// One warp keeps a ring of stages full, each of 64 k of a tile of the weight and of all rows of x; the others wait for a
// stage, multiply and hand it back, so that no thread spends instructions on addresses and nobody waits for everybody.
// Rows of x are the M operand (64 a warpgroup), output features the N operand, whose width is free: tiles and slices of K
// are chosen so that every multiprocessor has work (stream_launch.cuh).
//
// The slices of a tile belong to the blocks of a cluster, which leave their sums in the order of the fragments and add them
// in the order of the slices, a share each: the result does not depend on timing. (Pushing the sums, 16 bytes a thread and
// instruction, took 0.9 us more: a barrier that counts bytes takes every such store by itself.)
//
// Where a block has several tiles (kSets == 2), two sets of warpgroups take turns: one multiplies while the other finishes
// and stores.
//
// With swiglu eight gate rows of the weight take turns with the eight up rows of the same features (a dimension of the
// tensor map), which puts both into one thread.
//
// kFixed obeys the reduction contract (linear.cuh): the slices are linear_slices', each summed from zero in the order of
// the narrow kernel; that x is the first operand here and the weight there changes no bit (ladder_linear). The ring runs on
// from slice to slice. A block by itself, and the first of a cluster, adds up its slices as they end; the others keep theirs
// apart in registers, since sums of slices are added from the left. Without kFixed each block has a slice of its own.
#pragma once

#include "astrai/common/bulk.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/linear/derive.cuh"
#include "astrai/linear/stream_end.cuh"
#include "astrai/linear/wgmma.cuh"

namespace astrai {

template <typename T, int kWidth, int kGroups, int kSets, int kStages, bool kFixed>
struct LinearStream : StreamEnd<T, StreamShape<kWidth, kGroups, kSets, kStages, kFixed>> {
  using Shape = StreamShape<kWidth, kGroups, kSets, kStages, kFixed>;
  using End = StreamEnd<T, Shape>;
  using Sums = typename End::Sums;
  using End::kPairs, End::p, End::ring, End::set, End::warp, End::lane, End::outputs, End::rank, End::own;

  uint32_t full, empty;                // shared-memory addresses; a barrier each for every stage
  int tiles, first_tile, tile_stride;  // of this block
  int first_step, steps;               // its part of K

  __device__ __forceinline__ LinearStream(const LinearParams& params, void* memory, const float* row_scales)
      : End(params, shared_address(memory), row_scales), full(ring + Shape::kRingBytes), empty(full + 8 * kStages),
        tiles((params.features + outputs - 1) / outputs), first_tile(static_cast<int>(blockIdx.x) / params.cluster),
        tile_stride(static_cast<int>(gridDim.x) / params.cluster), first_step(rank * own * params.slice_steps),
        steps(min(own * params.slice_steps, (params.depth + kLinearStep - 1) / kLinearStep - first_step)) {}

  /// A place in the ring's sequence of stages.
  struct Cursor {
    int slot;
    uint32_t parity;
    __device__ __forceinline__ void advance(int count) {
      slot += count;
      while (slot >= kStages) {
        slot -= kStages;
        parity ^= 1;
      }
    }
  };

  __device__ __forceinline__ void copy_weight(const TensorMap& map, int tile, int step, int slot) const {
    const uint32_t target = ring + slot * Shape::kStageBytes;
    const int k = (first_step + step) * kLinearStep;
    barrier_expect(full + 8 * slot, Shape::kWeightBytes + p.rows * kStepBytes);
    if (p.swiglu) {
      copy_box(target, map, k, 0, 0, tile * kPairs, full + 8 * slot, kReadOnce);
    } else {
      copy_box(target, map, k, tile * kWidth, full + 8 * slot, kReadOnce);
    }
  }
  /// Rows that x does not have stay as they are: a row of sums depends on its own row alone.
  __device__ __forceinline__ void copy_x(const TensorMap& map, int step, int slot) const {
    const uint32_t target = ring + slot * Shape::kStageBytes + Shape::kWeightBytes;
    copy_box(target, map, (first_step + step) * kLinearStep, 0, full + 8 * slot, kReadAgain);
  }

  /// One thread: keep the ring full. Weights begin before the kernel ahead has ended.
  __device__ __forceinline__ void produce(const TensorMap& weight_map, const TensorMap& x_map) const {
    prefetch_map(weight_map);
    prefetch_map(x_map);
    const int total = (tiles - first_tile + tile_stride - 1) / tile_stride * steps;
    const int ahead = min(total, kStages);
    for (int i = 0; i < ahead; ++i) copy_weight(weight_map, first_tile + i / steps * tile_stride, i % steps, i);
    pdl_wait();
    for (int i = 0; i < ahead; ++i) copy_x(x_map, i % steps, i);
    Cursor at = {0, 0u};
    int tile = first_tile + ahead / steps * tile_stride, step = ahead % steps;
    for (int i = ahead; i < total; ++i, at.advance(1)) {
      barrier_await(empty + 8 * at.slot, at.parity);
      copy_weight(weight_map, tile, step, at.slot);
      copy_x(x_map, step, at.slot);
      if (++step == steps) {
        step = 0;
        tile += tile_stride;
      }
    }
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ __forceinline__ void hand_back(int slot) const {
    if (lane == 0) barrier_arrive(empty + 8 * slot);
  }

  /// The sums of one tile over a slice of `count` steps.
  __device__ __forceinline__ void multiply(Sums& sum, Cursor& at, int count) const {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) sum[i / 4][i % 4] = 0.0f;
    int before = at.slot;
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      barrier_await(full + 8 * at.slot, at.parity);
      const uint32_t stage = ring + at.slot * Shape::kStageBytes;
      const uint64_t of_rows = matrix_descriptor(stage + Shape::kWeightBytes + warp / 4 * 64 * kStepBytes);
      const uint64_t of_weight = matrix_descriptor(stage);
      wgmma_fence();
#pragma unroll
      for (int chunk = 0; chunk < kLinearStep / 16; ++chunk) wgmma(sum, of_rows + chunk * 2, of_weight + chunk * 2, T());
      wgmma_commit();
      wgmma_leave<1>();
      if (step > 0) hand_back(before);  // its products have ended
      before = at.slot;
      at.advance(1);
    }
    wgmma_wait(sum);
    hand_back(before);
  }
  __device__ __forceinline__ int steps_of(int slice) const { return min(p.slice_steps, steps - slice * p.slice_steps); }

  /// The sums of one tile over all that this block has of K: of a slice, or the total of its slices from left to right.
  __device__ __forceinline__ void multiply_all(Sums& total, Cursor& at) const {
    multiply(total, at, kFixed ? steps_of(0) : steps);
    if constexpr (kFixed) {
#pragma unroll 1
      for (int slice = 1; slice < own; ++slice) {
        Sums sum;
        multiply(sum, at, steps_of(slice));
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) total[i / 4][i % 4] = __fadd_rn(total[i / 4][i % 4], sum[i / 4][i % 4]);
      }
    }
  }

  /// The same, and leave it for the cluster: a total where nothing is on its left, else the sums of each slice.
  __device__ __forceinline__ void multiply_and_leave(Cursor& at) const {
    if constexpr (Shape::kMostOwn > 1) {
      if (rank > 0) {
        Sums sum[Shape::kMostOwn];
#pragma unroll
        for (int slice = 0; slice < Shape::kMostOwn; ++slice) {
          if (slice < own) multiply(sum[slice], at, steps_of(slice));
        }
        End::join_groups();
#pragma unroll
        for (int slice = 0; slice < Shape::kMostOwn; ++slice) {
          if (slice < own) End::leave_sums(sum[slice], slice);
        }
        return;
      }
    }
    Sums sum;
    multiply_all(sum, at);
    End::join_groups();
    End::leave_sums(sum, 0);
  }
#endif

  /// The two sets wait for each other: `multiply` of one begins when that of the other has ended.
  __device__ __forceinline__ void await_turn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + set), "n"(2 * 32 * Shape::kWarps) : "memory");
  }
  __device__ __forceinline__ void give_turn() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 - set), "n"(2 * 32 * Shape::kWarps) : "memory");
  }
};

/// A cluster takes one tile; a block by itself takes every gridDim.x-th. One that begins a norm is a cluster of its own, and
/// has a single tile.
template <typename T, int kWidth, int kGroups, int kSets, int kStages, bool kFixed>
__global__ void __launch_bounds__(StreamShape<kWidth, kGroups, kSets, kStages, kFixed>::kThreads, 1)
    linear_stream_kernel(const LinearParams params, const __grid_constant__ TensorMap weight_map,
                         const __grid_constant__ TensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kernel = LinearStream<T, kWidth, kGroups, kSets, kStages, kFixed>;
  using Shape = typename Kernel::Shape;
  extern __shared__ __align__(1024) uint4 stream_pool[];
  __shared__ float scales[Shape::kRows];
  const Kernel kernel(params, stream_pool, scales);
  const bool shares = Shape::kShares && (params.cluster > 1 || weighs_rows<T>(params));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(kernel.full + 8 * i, 1);
      barrier_init(kernel.empty + 8 * i, Shape::kWarps);
    }
    barrier_publish();
  }
  __syncthreads();
  pdl_release();  // before the wait, as in the narrow kernel: the successor's blocks take each multiprocessor that is done
  if (kernel.set == kSets) {
    if (kernel.lane == 0) kernel.produce(weight_map, x_map);
    __syncwarp();
    if (shares) {
      cluster_barrier();
      cluster_barrier_after_loads();
    }
    return;
  }
  pdl_wait();
  if (scales_rows<T>(params)) {
    constexpr int kMultiply = 32 * Shape::kWarps * kSets;  // threads that do not copy
    find_scales<kMultiply>(params, scales, static_cast<int>(threadIdx.x));
    asm volatile("bar.sync 3, %0;" ::"n"(kMultiply) : "memory");
  }
  typename Kernel::Cursor at = {0, 0u};
  if (shares) {
    typename Kernel::Addends addends[2] = {};
    kernel.fetch_addends(kernel.first_tile, kernel.first_item(), addends);
    kernel.multiply_and_leave(at);
    cluster_barrier();
    kernel.finish_shared(kernel.first_tile, addends);
    cluster_barrier_after_loads();  // before this block's shared memory goes, everybody must have read it
    return;
  }
  typename Kernel::Sums sum;
  if (kSets == 2 && kernel.set == 1) at.advance(kernel.steps);
  for (int turn = kernel.set;; turn += kSets) {
    const int tile = kernel.first_tile + turn * kernel.tile_stride;
    if (tile >= kernel.tiles) return;
    // A barrier's parity tells one use of a stage from the next only, so nobody looks at stages before their turn.
    if (kSets == 2 && turn > 0) kernel.await_turn();
    kernel.multiply_all(sum, at);
    if (kSets == 2 && tile + kernel.tile_stride < kernel.tiles) kernel.give_turn();
    if (kSets == 2) at.advance(kernel.steps);
    kernel.finish_own(sum, tile);
  }
#elif defined(__CUDA_ARCH__)
  asm volatile("trap;");  // launched by a build that has no code for 9.0a
#endif
}

}  // namespace astrai
