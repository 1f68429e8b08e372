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
// This is none of the kernels that obey the reduction contract (linear.cuh): it has no fixed slices.
#pragma once

#include "astrai/common/bulk.cuh"
#include "astrai/common/pair.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/linear/cluster.cuh"
#include "astrai/linear/derive.cuh"
#include "astrai/linear/fragments.cuh"
#include "astrai/linear/wgmma.cuh"

namespace astrai {

constexpr int kStreamMostSlices = 5;  // six took an H200 longer, whatever the shape

/// kWidth: weight rows of a tile. kGroups: warpgroups of a set, 64 rows of x each.
template <int kWidth, int kGroups, int kSets, int kStages>
struct StreamShape {
  static_assert(kWidth % 32 == 0 && kWidth <= 256, "widths that wgmma.cuh has");
  static_assert(kSets == 1 || kSets == 2, "sets take turns");
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kWarps = 4 * kGroups;  // of a set
  static constexpr int kThreads = 32 * kWarps * kSets + 32;
  static constexpr int kPairs = kWidth / 16;  // of neighbouring tiles of 8 features: what one thread finishes together
  static constexpr int kWeightBytes = kWidth * kStepBytes;
  static constexpr int kStageBytes = kWeightBytes + kRows * kStepBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kRingBytes + 2 * kStages * 8;
  static constexpr bool kShares = kSets == 1;  // a tile's slices may belong to several blocks
  static_assert(!kShares || kWidth * kRows * 4 <= kRingBytes, "sums take the ring's place when it has been read");
};

template <typename T, int kWidth, int kGroups, int kSets, int kStages>
struct LinearStream {
  using Shape = StreamShape<kWidth, kGroups, kSets, kStages>;
  static constexpr int kPairs = Shape::kPairs;
  using Sums = float[kWidth / 8][4];

  const LinearParams& p;
  uint32_t ring, full, empty;  // shared-memory addresses; a barrier each for every stage
  int set, warp, lane;                         // warp: of the set
  int outputs, tiles, first_tile, tile_stride;  // of this block
  int rank, first_step, steps;                  // its slice of K

  __device__ __forceinline__ LinearStream(const LinearParams& params, void* memory)
      : p(params), ring(shared_address(memory)), full(ring + Shape::kRingBytes), empty(full + 8 * kStages),
        lane(static_cast<int>(threadIdx.x) % 32), outputs(params.swiglu ? kWidth / 2 : kWidth),
        tiles((params.features + outputs - 1) / outputs), first_tile(static_cast<int>(blockIdx.x) / params.cluster),
        tile_stride(static_cast<int>(gridDim.x) / params.cluster), rank(static_cast<int>(blockIdx.x) % params.cluster),
        first_step(rank * params.slice_steps),
        steps(min(params.slice_steps, (params.depth + kLinearStep - 1) / kLinearStep - first_step)) {
    const int index = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    set = index / Shape::kWarps;
    warp = index % Shape::kWarps;
  }

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

  /// The residual's two neighbouring features at `feature`, of rows `row` and `row` + 8.
  __device__ __forceinline__ Quad residual_at(int row, int feature) const {
    Quad quad = {{0u, 0u}};
    if (p.residual == nullptr) return quad;
    const uint16_t* source = static_cast<const uint16_t*>(p.residual) + row * p.residual_stride + feature;
    const int count = p.features - feature;
    if (row < p.rows) quad.word[0] = load_pair(source, count, p.pairs_aligned);
    if (row + 8 < p.rows) quad.word[1] = load_pair(source + 8 * p.residual_stride, count, p.pairs_aligned);
    return quad;
  }
  /// Where the sums of a thread lie: the first of two neighbouring features of tile `half` of a pair, and the row.
  __device__ __forceinline__ int feature_of(int tile, int pair, int half) const {
    return tile * outputs + pair * (p.swiglu ? 8 : 16) + half * 8 + lane % 4 * 2;
  }
  __device__ __forceinline__ int row_of(int owner) const { return owner * 16 + lane / 4; }

  /// Finish and store a pair of tiles that warp `owner` has summed: (row g, features 2q and 2q + 1), then row g + 8.
  __device__ __forceinline__ void finish(int tile, int owner, int pair, float (&sum)[2][4],
                                         const Quad (&residual)[2]) const {
    const int row = row_of(owner);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (p.swiglu && half == 1) break;
      const int feature = feature_of(tile, pair, half);
      const int count = p.features - feature;
      float (&value)[4] = sum[half];
      if (p.swiglu) {
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = gated_silu(value[i], sum[1][i]);
      }
      if (p.bias != nullptr) {
        Quad bias = {{load_pair(static_cast<const uint16_t*>(p.bias) + feature, count, false), 0u}};
        float addend[kLinearQuad];
        unpack(bias, addend, T());
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = __fadd_rn(value[i], addend[i % 2]);
      }
      Quad result = pack(value, T());
      if (p.residual != nullptr) result = add_residual<T>(result, residual[half]);
      uint16_t* target = static_cast<uint16_t*>(p.out) + row * p.out_stride + feature;
      if (row < p.rows) store_pair(target, result.word[0], count, p.pairs_aligned);
      if (row + 8 < p.rows) store_pair(target + 8 * p.out_stride, result.word[1], count, p.pairs_aligned);
    }
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ __forceinline__ void hand_back(int slot) const {
    if (lane == 0) barrier_arrive(empty + 8 * slot);
  }

  /// The sums of one tile over this block's slice.
  __device__ __forceinline__ void multiply(Sums& sum, Cursor& at) const {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) sum[i / 4][i % 4] = 0.0f;
    int before = at.slot;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
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
#endif

  /// Warps of a set that have rows of x. The others leave theirs alone: a division of what is no number takes long.
  __device__ __forceinline__ int warps_with_rows() const { return (p.rows + 15) / 16; }

  /// A tile whose sums are whole. Residuals are fetched some pairs at a time, as registers allow.
  __device__ __forceinline__ void finish_own(Sums& sum, int tile) const {
    if (warp >= warps_with_rows()) return;
    constexpr int kAtOnce = kSets == 1 ? 2 : 1;
#pragma unroll
    for (int first = 0; first < kPairs; first += kAtOnce) {
      Quad residual[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        residual[i / 2][i % 2] = residual_at(row_of(warp), feature_of(tile, first + i / 2, i % 2));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float value[2][4];
#pragma unroll
        for (int j = 0; j < 8; ++j) value[j / 4][j % 4] = sum[2 * (first + i) + j / 4][j % 4];
        finish(tile, warp, first + i, value, residual[i]);
      }
    }
  }

  /// Address of a thread's four sums of tile `index` of a block, the same in each block of the cluster.
  __device__ __forceinline__ uint32_t sums_at(int owner, int index) const {
    return ring + ((index * Shape::kWarps + owner) * 32 + lane) * 16;
  }
  /// Leave the sums where the cluster's other blocks find them. The ring has been read by all of this block.
  __device__ __forceinline__ void leave_sums(const Sums& sum) const {
    if (warp >= warps_with_rows()) return;
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) {
      store_sums(sums_at(warp, i), make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
    }
  }
  /// Every pair of tiles of every warp with rows is an item; the cluster's blocks share them out.
  __device__ __forceinline__ void finish_shared(int tile) const {
    const int owners = warps_with_rows();
    for (int item = rank + p.cluster * warp; item < kPairs * owners; item += p.cluster * Shape::kWarps) {
      const int pair = item / owners;
      const int owner = item % owners;
      Quad residual[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) residual[half] = residual_at(row_of(owner), feature_of(tile, pair, half));
      float4 part[kStreamMostSlices][2];
#pragma unroll
      for (int slice = 0; slice < kStreamMostSlices; ++slice) {
        if (slice >= p.cluster) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) part[slice][half] = load_cluster(sums_at(owner, 2 * pair + half), slice);
      }
      float total[2][kLinearQuad] = {};
#pragma unroll
      for (int slice = 0; slice < kStreamMostSlices; ++slice) {
        if (slice >= p.cluster) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) add_quad(total[half], part[slice][half], slice == 0);
      }
      finish(tile, owner, pair, total, residual);
    }
  }

  static __device__ __forceinline__ void store_sums(uint32_t address, float4 value) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x), "f"(value.y), "f"(value.z),
                 "f"(value.w)
                 : "memory");
  }
  /// Of the warps that multiply, where they are one set.
  static __device__ __forceinline__ void join_groups() {
    asm volatile("bar.sync 1, %0;" ::"n"(32 * Shape::kWarps) : "memory");
  }

  /// The two sets wait for each other: `multiply` of one begins when that of the other has ended.
  __device__ __forceinline__ void await_turn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + set), "n"(2 * 32 * Shape::kWarps) : "memory");
  }
  __device__ __forceinline__ void give_turn() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 - set), "n"(2 * 32 * Shape::kWarps) : "memory");
  }
};

/// A cluster takes one tile; a block by itself takes every gridDim.x-th.
template <typename T, int kWidth, int kGroups, int kSets, int kStages>
__global__ void __launch_bounds__(StreamShape<kWidth, kGroups, kSets, kStages>::kThreads, 1)
    linear_stream_kernel(const LinearParams params, const __grid_constant__ TensorMap weight_map,
                         const __grid_constant__ TensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kernel = LinearStream<T, kWidth, kGroups, kSets, kStages>;
  using Shape = typename Kernel::Shape;
  extern __shared__ __align__(1024) uint4 stream_pool[];
  const Kernel kernel(params, stream_pool);
  const bool shares = Shape::kShares && params.cluster > 1;
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
      cluster_barrier();
    }
    return;
  }
  pdl_wait();
  typename Kernel::Sums sum;
  typename Kernel::Cursor at = {0, 0u};
  if (shares) {
    kernel.multiply(sum, at);
    Kernel::join_groups();
    kernel.leave_sums(sum);
    cluster_barrier();
    kernel.finish_shared(kernel.first_tile);
    cluster_barrier();  // before this block's shared memory goes, everybody must have read it
    return;
  }
  if (kSets == 2 && kernel.set == 1) at.advance(kernel.steps);
  for (int turn = kernel.set;; turn += kSets) {
    const int tile = kernel.first_tile + turn * kernel.tile_stride;
    if (tile >= kernel.tiles) return;
    // A barrier's parity tells one use of a stage from the next only, so nobody looks at stages before their turn.
    if (kSets == 2 && turn > 0) kernel.await_turn();
    kernel.multiply(sum, at);
    if (kSets == 2 && tile + kernel.tile_stride < kernel.tiles) kernel.give_turn();
    if (kSets == 2) at.advance(kernel.steps);
    kernel.finish_own(sum, tile);
  }
#elif defined(__CUDA_ARCH__)
  asm volatile("trap;");  // launched by a build that has no code for 9.0a
#endif
}

}  // namespace astrai
