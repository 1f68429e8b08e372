// What a block of linear/stream.cuh does with its sums: merge those of a cluster, finish and store outputs.
//
// A thread of warp `owner` has rows g and g + 8 of the warp's sixteen, features 2q and 2q + 1 of every tile of eight, where
// (g, q) = (lane / 4, lane % 4).
#pragma once

#include "astrai/common/pair.cuh"
#include "astrai/linear/cluster.cuh"
#include "astrai/linear/fragments.cuh"
#include "astrai/linear/halves.cuh"

namespace astrai {

constexpr int kStreamMostSlices = 5;  // without a fixed order: six took an H200 longer, whatever the shape
constexpr int kStreamMostOwn = 4;     // slices whose sums a thread keeps apart in registers

/// kWidth: weight rows of a tile. kGroups: warpgroups of a set, 64 rows of x each. kFixed: obeys the reduction contract.
template <int kTileWidth, int kGroups, int kSets, int kStages, bool kFixed>
struct StreamShape {
  static_assert(kTileWidth == 64 || kTileWidth == 128, "widths that wgmma.cuh has");
  static_assert(kSets == 1 || kSets == 2, "sets take turns");
  static constexpr int kWidth = kTileWidth;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kWarps = 4 * kGroups;  // of a set
  static constexpr int kThreads = 32 * kWarps * kSets + 32;
  static constexpr int kPairs = kWidth / 16;  // of neighbouring tiles of 8 features: what one thread finishes together
  static constexpr int kWeightBytes = kWidth * kStepBytes;
  static constexpr int kStageBytes = kWeightBytes + kRows * kStepBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kRingBytes + 2 * kStages * 8;
  static constexpr int kSumBytes = kWidth * kRows * 4;
  static constexpr bool kFixedOrder = kFixed;
  static constexpr bool kShares = kWidth == 64;  // a tile's slices may belong to several blocks
  static constexpr int kMostOwn = kFixed && kShares ? kStreamMostOwn : 1;
  static constexpr int kMostPartials = kFixed ? kLinearMostSlices : kStreamMostSlices;  // sums of an output, in a cluster
  static constexpr bool kOneSet = kSets == 1;
  static constexpr bool kWeighs = kShares;  // may begin a norm in halves: what completes a stream has few features
  static_assert(!kShares || kSets == 1, "all of a block leaves its sums at once");
  static_assert(!kShares || kMostOwn * kSumBytes <= kRingBytes, "sums take the ring's place when it has been read");
};

template <typename T, typename Shape>
struct StreamEnd {
  static constexpr int kPairs = Shape::kPairs;
  static constexpr bool kWeighs = Shape::kWeighs;
  using Sums = float[Shape::kWidth / 8][4];

  const LinearParams& p;
  const float* scales;  // of rows, in shared memory
  uint32_t ring;        // shared-memory address
  int set, warp, lane;  // warp: of the set
  int outputs;          // of a tile
  int rank, own;        // of this block in its cluster, and slices that each block of it has

  __device__ __forceinline__ StreamEnd(const LinearParams& params, uint32_t memory, const float* row_scales)
      : p(params), scales(row_scales), ring(memory), lane(static_cast<int>(threadIdx.x) % 32),
        outputs(params.swiglu ? Shape::kWidth / 2 : Shape::kWidth), rank(static_cast<int>(blockIdx.x) % params.cluster),
        own(Shape::kFixedOrder ? params.slices / params.cluster : 1) {
    const int index = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    set = index / Shape::kWarps;
    warp = index % Shape::kWarps;
  }

  /// What is added to two neighbouring features, fetched before it is needed.
  struct Addends {
    Quad residual;       // of rows `row` and `row` + 8
    uint32_t next_norm;  // weights of the norm behind
  };
  template <bool kWeigh>
  __device__ __forceinline__ Addends addends_at(int row, int feature) const {
    Addends found = {};
    const int count = p.features - feature;
    if (p.residual != nullptr) {
      const uint16_t* source = static_cast<const uint16_t*>(p.residual) + row * p.residual_stride + feature;
      if (row < p.rows) found.residual.word[0] = load_pair(source, count, p.pairs_aligned);
      if (row + 8 < p.rows) found.residual.word[1] = load_pair(source + 8 * p.residual_stride, count, p.pairs_aligned);
    }
    if (kWeigh && weighs_rows<T>(p)) {
      found.next_norm = load_pair(static_cast<const uint16_t*>(p.next_norm) + feature, count, true);
    }
    return found;
  }
  /// Where the sums of a thread lie: the first of two neighbouring features of tile `half` of a pair, and the row.
  __device__ __forceinline__ int feature_of(int tile, int pair, int half) const {
    return tile * outputs + pair * (p.swiglu ? 8 : 16) + half * 8 + lane % 4 * 2;
  }
  __device__ __forceinline__ int row_of(int owner) const { return owner * 16 + lane / 4; }

  /// Finish and store a pair of tiles that warp `owner` has summed: (row g, features 2q and 2q + 1), then row g + 8.
  ///
  /// kWeigh: may begin a norm. What is unrolled pays for every instruction, since each is fetched for one use: with all in
  /// place, a product of 8 MB took 5.8 us instead of 4.8.
  template <bool kWeigh>
  __device__ __forceinline__ void finish(int tile, int owner, int pair, float (&sum)[2][4],
                                         const Addends (&addends)[2]) const {
    const int row = row_of(owner);
    float squares[2] = {0.0f, 0.0f};  // of rows `row` and `row` + 8
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
      if (p.residual != nullptr) result = add_residual<T>(result, addends[half].residual);
      uint16_t* target = static_cast<uint16_t*>(p.out) + row * p.out_stride + feature;
      if (row < p.rows) store_pair(target, result.word[0], count, p.pairs_aligned);
      if (row + 8 < p.rows) store_pair(target + 8 * p.out_stride, result.word[1], count, p.pairs_aligned);
      if (kWeigh && weighs_rows<T>(p) && count > 0) {
        weigh_pair(row, feature, result, addends[half].next_norm, squares);
      }
    }
    if (kWeigh && weighs_rows<T>(p)) {
      const int feature = feature_of(tile, pair, 0);
      store_squares(p, row, feature, squares[0], row < p.rows && feature < p.features);
      store_squares(p, row + 8, feature, squares[1], row + 8 < p.rows && feature < p.features);
    }
  }

  /// Store two features of rows `row` and `row` + 8 times their norm's weights, and add their squares.
  __device__ __forceinline__ void weigh_pair(int row, int feature, const Quad& output, uint32_t weights,
                                             float (&squares)[2]) const {
    float2 of_pair;
    const Quad result = weigh<T>(output, Quad{{weights, weights}}, of_pair);
    squares[0] = __fadd_rn(squares[0], of_pair.x);
    squares[1] = __fadd_rn(squares[1], of_pair.y);
    if (row < p.rows) *reinterpret_cast<uint32_t*>(weighed_at(p, row, feature)) = result.word[0];
    if (row + 8 < p.rows) *reinterpret_cast<uint32_t*>(weighed_at(p, row + 8, feature)) = result.word[1];
  }

  /// The second half of a norm, if there is one.
  template <int kTiles>
  __device__ __forceinline__ void scale(int owner, float (&sum)[kTiles][4]) const {
    if (!scales_rows<T>(p)) return;
    const float factor[2] = {scales[row_of(owner)], scales[row_of(owner) + 8]};
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) sum[i / 4][i % 4] = __fmul_rn(sum[i / 4][i % 4], factor[i % 4 / 2]);
  }

  /// Warps of a set that have rows of x. The others leave theirs alone: a division of what is no number takes long.
  __device__ __forceinline__ int warps_with_rows() const { return (p.rows + 15) / 16; }

  /// A tile whose sums are whole. Residuals are fetched some pairs at a time, as registers allow.
  __device__ __forceinline__ void finish_own(Sums& sum, int tile) const {
    if (warp >= warps_with_rows()) return;
    scale(warp, sum);
    constexpr int kAtOnce = Shape::kOneSet ? 2 : 1;
#pragma unroll
    for (int first = 0; first < kPairs; first += kAtOnce) {
      Addends addends[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        addends[i / 2][i % 2] = addends_at<false>(row_of(warp), feature_of(tile, first + i / 2, i % 2));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float value[2][4];
#pragma unroll
        for (int j = 0; j < 8; ++j) value[j / 4][j % 4] = sum[2 * (first + i) + j / 4][j % 4];
        finish<false>(tile, warp, first + i, value, addends[i]);
      }
    }
  }

  /// Address of a thread's four sums of tile `index` of a block, the same in each block of the cluster.
  __device__ __forceinline__ uint32_t sums_at(int owner, int index) const {
    return ring + ((index * Shape::kWarps + owner) * 32 + lane) * 16;
  }
  /// Leave sums, the block's `slot`-th, where the cluster's other blocks find them. All of this block has read the ring.
  __device__ __forceinline__ void leave_sums(const Sums& sum, int slot) const {
    if (warp >= warps_with_rows()) return;
#pragma unroll
    for (int i = 0; i < Shape::kWidth / 8; ++i) {
      store_sums(sums_at(warp, i) + slot * Shape::kSumBytes, make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
    }
  }
  /// Every pair of tiles of every warp with rows is an item; the cluster's blocks share them out.
  __device__ __forceinline__ int first_item() const { return rank + p.cluster * warp; }
  __device__ __forceinline__ void fetch_addends(int tile, int item, Addends (&addends)[2]) const {
    const int owners = warps_with_rows();
    if (item >= kPairs * owners) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      addends[half] = addends_at<kWeighs>(row_of(item % owners), feature_of(tile, item / owners, half));
    }
  }
  /// Add up what the blocks have left, the first block one sum for all its slices. `addends`: of the first item.
  __device__ __forceinline__ void finish_shared(int tile, Addends (&addends)[2]) const {
    const int owners = warps_with_rows();
    const int stride = p.cluster * Shape::kWarps;
    const int partials = 1 + (p.cluster - 1) * own;
    for (int item = first_item(); item < kPairs * owners; item += stride) {
      const int pair = item / owners;
      const int owner = item % owners;
      const Addends now[2] = {addends[0], addends[1]};
      fetch_addends(tile, item + stride, addends);
      float4 part[Shape::kMostPartials][2];
      int block = 0, slot = 0;
#pragma unroll
      for (int i = 0; i < Shape::kMostPartials; ++i) {
        if (i >= partials) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          part[i][half] = load_cluster(sums_at(owner, 2 * pair + half) + slot * Shape::kSumBytes, block);
        }
        if (i == 0 || ++slot == own) {
          slot = 0;
          ++block;
        }
      }
      float total[2][kLinearQuad] = {};
#pragma unroll
      for (int i = 0; i < Shape::kMostPartials; ++i) {
        if (i >= partials) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) add_quad(total[half], part[i][half], i == 0);
      }
      scale(owner, total);
      finish<kWeighs>(tile, owner, pair, total, now);
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
};

}  // namespace astrai
