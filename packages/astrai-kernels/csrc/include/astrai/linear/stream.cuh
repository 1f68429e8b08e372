// linear for 17 to 128 rows on compute capability 9.0a: the copy engine brings weight and x, warpgroups multiply.
//
// One warp keeps a ring of stages full, each of 64 k of a tile of the weight and of all rows of x; the others wait for a
// stage, multiply and hand it back, so that no thread spends instructions on addresses and nobody waits for everybody.
// Rows of x are the M operand (64 a warpgroup), output features the N operand, whose width is free: tiles and slices of K
// are chosen so that every multiprocessor has work. The slices of a tile belong to the blocks of a cluster, which leave
// their sums in the order of the fragments and add them in the order of the slices: the result does not depend on timing.
//
// With swiglu eight gate rows of the weight take turns with the eight up rows of the same features (a dimension of the
// tensor map), which puts both into one thread.
//
// Where there are tiles enough without slices, two blocks of a cluster (kPair) take neighbouring tiles: each brings half of
// the rows of x, to both, which saves L2 a third of its reads at 128 rows and a width of 128.
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

/// kWidth: weight rows of a tile. kGroups: warpgroups, 64 rows of x each.
template <int kWidth, int kGroups, int kStages>
struct StreamShape {
  static_assert(kWidth % 32 == 0 && kWidth <= 256, "widths that wgmma.cuh has");
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kWarps = 4 * kGroups;  // that multiply
  static constexpr int kThreads = 32 * kWarps + 32;
  static constexpr int kWeightBytes = kWidth * kStepBytes;
  static constexpr int kStageBytes = kWeightBytes + kRows * kStepBytes;
  static constexpr int kSumBytes = kWidth * kRows * 4;  // in place of the ring, when it has been read
  static constexpr int kRingBytes = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
  static constexpr int kSharedBytes = kRingBytes + 2 * kStages * 8;
  static constexpr int kBlocks = kSharedBytes <= 115 * 1024 ? 2 : 1;  // of a multiprocessor
};

template <typename T, int kWidth, int kGroups, int kStages, bool kPair>
struct LinearStream {
  using Shape = StreamShape<kWidth, kGroups, kStages>;
  static constexpr int kPairs = kWidth / 16;  // of neighbouring tiles of 8 features: what one thread finishes together
  using Sums = float[kWidth / 8][4];

  const LinearParams& p;
  uint32_t ring, full, empty;  // shared-memory addresses; a barrier each for every stage
  int warp, lane;
  int outputs, tiles, first_tile, tile_stride;  // of this block
  int rank, first_step, steps;                  // its slice of K
  int side;                                     // kPair: 0 or 1 of the pair. A pair goes on while the first has a tile.

  __device__ __forceinline__ LinearStream(const LinearParams& params, void* memory)
      : p(params), ring(shared_address(memory)), full(ring + Shape::kRingBytes), empty(full + 8 * kStages),
        warp(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32), outputs(params.swiglu ? kWidth / 2 : kWidth),
        tiles((params.features + outputs - 1) / outputs), first_tile(static_cast<int>(blockIdx.x) / params.cluster),
        tile_stride(static_cast<int>(gridDim.x) / params.cluster), rank(static_cast<int>(blockIdx.x) % params.cluster),
        first_step(rank * params.slice_steps),
        steps(min(params.slice_steps, (params.depth + kLinearStep - 1) / kLinearStep - first_step)),
        side(kPair ? static_cast<int>(blockIdx.x) % 2 : 0) {}

  __device__ __forceinline__ bool is_over(int tile) const { return tile - side >= tiles; }

  struct Cursor {
    int tile, step, slot;
  };
  __device__ __forceinline__ void advance(Cursor& at) const {
    at.slot = at.slot + 1 == kStages ? 0 : at.slot + 1;
    if (++at.step < steps) return;
    at.step = 0;
    at.tile += tile_stride;
  }

  __device__ __forceinline__ void copy_weight(const TensorMap& map, const Cursor& at) const {
    const uint32_t target = ring + at.slot * Shape::kStageBytes;
    const int k = (first_step + at.step) * kLinearStep;
    barrier_expect(full + 8 * at.slot, Shape::kStageBytes);
    if (p.swiglu) {
      copy_box(target, map, k, 0, 0, at.tile * kPairs, full + 8 * at.slot, kReadOnce);
    } else {
      copy_box(target, map, k, at.tile * kWidth, full + 8 * at.slot, kReadOnce);
    }
  }
  __device__ __forceinline__ void copy_x(const TensorMap& map, const Cursor& at) const {
    const uint32_t target = ring + at.slot * Shape::kStageBytes + Shape::kWeightBytes;
    const int k = (first_step + at.step) * kLinearStep;
    if constexpr (kPair) {
      constexpr int kHalf = Shape::kRows / 2;
      copy_box_to(3, target + side * kHalf * kStepBytes, map, k, side * kHalf, full + 8 * at.slot, kReadAgain);
    } else {
      copy_box(target, map, k, 0, full + 8 * at.slot, kReadAgain);
    }
  }
  /// A warp has read a stage: who fills it anew must know, with kPair both.
  __device__ __forceinline__ void hand_back(int slot) const {
    if (kPair && lane < 2) barrier_arrive_at(empty + 8 * slot, lane);
    if (!kPair && lane == 0) barrier_arrive(empty + 8 * slot);
  }

  /// One thread: keep the ring full. Weights begin before the kernel ahead has ended.
  __device__ __forceinline__ void produce(const TensorMap& weight_map, const TensorMap& x_map) const {
    prefetch_map(weight_map);
    prefetch_map(x_map);
    Cursor at = {first_tile, 0, 0};
    Cursor of_x = at;
    int filled = 0;
    for (; filled < kStages && !is_over(at.tile); ++filled, advance(at)) copy_weight(weight_map, at);
    pdl_wait();
    for (int i = 0; i < filled; ++i, advance(of_x)) copy_x(x_map, of_x);
    for (uint32_t parity = 0; !is_over(at.tile); advance(at)) {
      barrier_await(empty + 8 * at.slot, parity);
      copy_weight(weight_map, at);
      copy_x(x_map, at);
      if (at.slot == kStages - 1) parity ^= 1;
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
  /// Where the sums of a thread lie: the first of two neighbouring features, and the row, of tile `half` of a pair.
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
  /// The sums of one tile over this block's slice; `parity` and `slot` say where the ring stands.
  __device__ __forceinline__ void multiply(Sums& sum, int& slot, uint32_t& parity) const {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) sum[i / 4][i % 4] = 0.0f;
    int before = slot;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      barrier_await(full + 8 * slot, parity);
      const uint32_t stage = ring + slot * Shape::kStageBytes;
      const uint64_t of_rows = matrix_descriptor(stage + Shape::kWeightBytes + warp / 4 * 64 * kStepBytes);
      const uint64_t of_weight = matrix_descriptor(stage);
      wgmma_fence();
#pragma unroll
      for (int chunk = 0; chunk < kLinearStep / 16; ++chunk) wgmma(sum, of_rows + chunk * 2, of_weight + chunk * 2, T());
      wgmma_commit();
      wgmma_leave<1>();
      if (step > 0) hand_back(before);  // its products have ended
      before = slot;
      if (++slot == kStages) {
        slot = 0;
        parity ^= 1;
      }
    }
    wgmma_wait(sum);
    hand_back(before);
  }
#endif

  /// A block by itself: its sums are whole. Residuals are fetched some pairs at a time, as registers allow.
  __device__ __forceinline__ void finish_own(Sums& sum, int tile) const {
    constexpr int kAtOnce = 2;
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
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) {
      store_sums(sums_at(warp, i), make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
    }
  }
  /// Every pair of tiles of every warp is an item; the cluster's blocks share them out.
  __device__ __forceinline__ void finish_shared(int tile) const {
    for (int item = rank + p.cluster * warp; item < kPairs * Shape::kWarps; item += p.cluster * Shape::kWarps) {
      const int pair = item / Shape::kWarps;
      const int owner = item % Shape::kWarps;
      Quad residual[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) residual[half] = residual_at(row_of(owner), feature_of(tile, pair, half));
      float total[2][kLinearQuad] = {};
      constexpr int kAtOnce = 4;  // slices whose sums are under way together
#pragma unroll 1
      for (int first = 0; first < p.cluster; first += kAtOnce) {
        float4 part[kAtOnce][2];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i >= p.cluster) break;
#pragma unroll
          for (int half = 0; half < 2; ++half) part[i][half] = load_cluster(sums_at(owner, 2 * pair + half), first + i);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i >= p.cluster) break;
#pragma unroll
          for (int half = 0; half < 2; ++half) add_quad(total[half], part[i][half], first + i == 0);
        }
      }
      finish(tile, owner, pair, total, residual);
    }
  }

  static __device__ __forceinline__ void store_sums(uint32_t address, float4 value) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x), "f"(value.y), "f"(value.z),
                 "f"(value.w)
                 : "memory");
  }
  /// Of the warps that multiply.
  static __device__ __forceinline__ void join_groups() {
    asm volatile("bar.sync 1, %0;" ::"n"(32 * Shape::kWarps) : "memory");
  }
};

/// A cluster takes one tile, or with kPair two at a time; a block by itself takes every gridDim.x-th.
template <typename T, int kWidth, int kGroups, int kStages, bool kPair>
__global__ void __launch_bounds__(StreamShape<kWidth, kGroups, kStages>::kThreads,
                                  StreamShape<kWidth, kGroups, kStages>::kBlocks)
    linear_stream_kernel(const LinearParams params, const __grid_constant__ TensorMap weight_map,
                         const __grid_constant__ TensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kernel = LinearStream<T, kWidth, kGroups, kStages, kPair>;
  using Shape = typename Kernel::Shape;
  extern __shared__ __align__(1024) uint4 stream_pool[];
  const Kernel kernel(params, stream_pool);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(kernel.full + 8 * i, 1);
      barrier_init(kernel.empty + 8 * i, kPair ? 2 * Shape::kWarps : Shape::kWarps);
    }
    barrier_publish();
  }
  if constexpr (kPair) {
    cluster_barrier();  // the other's barriers are there before anything is sent to them
  } else {
    __syncthreads();
  }
  if (params.release_early) pdl_release();
  if (kernel.warp == Shape::kWarps) {
    if (kernel.lane == 0) kernel.produce(weight_map, x_map);
    __syncwarp();
    if (kPair) cluster_barrier();
    if (!kPair && params.cluster > 1) {
      cluster_barrier();
      cluster_barrier();
    }
    return;
  }
  pdl_wait();
  if (!params.release_early) pdl_release();
  typename Kernel::Sums sum;
  int slot = 0;
  uint32_t parity = 0;
  if (!kPair && params.cluster > 1) {
    kernel.multiply(sum, slot, parity);
    Kernel::join_groups();
    kernel.leave_sums(sum);
    cluster_barrier();
    kernel.finish_shared(kernel.first_tile);
    cluster_barrier();  // before this block's shared memory goes, everybody must have read it
    return;
  }
  for (int tile = kernel.first_tile; !kernel.is_over(tile); tile += kernel.tile_stride) {
    kernel.multiply(sum, slot, parity);
    kernel.finish_own(sum, tile);
  }
  if (kPair) cluster_barrier();  // the other block may still send and arrive here
#elif defined(__CUDA_ARCH__)
  asm volatile("trap;");  // launched by a build that has no code for 9.0a
#endif
}

}  // namespace astrai
