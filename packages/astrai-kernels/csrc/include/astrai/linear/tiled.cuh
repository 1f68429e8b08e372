// linear for any number of rows: a block multiplies tiles of the weight with tiles of x, one after the other.
//
// Deterministic mode's kernel for what the streaming kernels are too narrow for: the same instruction over the same
// chunks of 16 k, the same slices of K merged in the same order, the same roundings behind them, so that a row's bits
// are those that it gets alone. A tile runs over all slices by itself; the total of those before stays in registers.
//
// kGroups: products by warpgroups where the code is for compute capability 9.0a; their sums are mma.sync's, bit by bit.
#pragma once

#include "astrai/common/pair.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/linear/derive.cuh"
#include "astrai/linear/fragments.cuh"
#include "astrai/linear/halves.cuh"
#include "astrai/linear/wgmma.cuh"

namespace astrai {

constexpr int kTiledWidth = 128;  // weight rows of a tile
constexpr int kTiledRows = 128;   // rows of x of a tile
constexpr int kTiledThreads = 256;
constexpr int kTiledBand = 8;    // tiles of x that are walked together: they stay in L2 while the weight passes by
constexpr int kTiledCells = 16;  // 16 x 8 tiles of sums that a warp has
constexpr int kTiledStageBytes = (kTiledWidth + kTiledRows) * kStepBytes;
constexpr int kTiledCopyRows = kTiledThreads / kStepParts;    // rows that the block copies with one word a thread
constexpr int kTiledCopies = kTiledWidth / kTiledCopyRows;    // words of each operand that a thread copies of a stage
static_assert(kTiledRows == kTiledWidth, "both operands are copied alike");

/// Three stages fit 99 KiB, the least that a multiprocessor of compute capability 8.0 or later gives a block.
__host__ __device__ constexpr int tiled_stages(bool groups) { return groups ? 6 : 3; }

/// Row of the weight that is row `local` of tile `tile`, or any valid one where the tile reaches past the end.
///
/// With swiglu eight gate rows take turns with the eight up rows of the same features, so that a thread has both.
__device__ __forceinline__ int64_t tiled_weight_row(const LinearParams& params, int tile, int local) {
  if (!params.swiglu) return min(tile * kTiledWidth + local, params.features - 1);
  const int feature = min(tile * (kTiledWidth / 2) + local / 16 * 8 + local % 8, params.features - 1);
  return local % 16 >= 8 ? static_cast<int64_t>(params.features) + feature : feature;
}

/// Transpose an 8x8 matrix of 16-bit elements: lane (g, q) has elements 2q and 2q + 1 of row g.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

/// Store a row's features `feature`, + 1, + 8 and + 9, all there, times their norm's weights, and the squares of sixteen.
template <typename T>
__device__ __forceinline__ void weigh_cell(const LinearParams& params, int row, int feature, const Quad& output) {
  const auto* weight = reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(params.next_norm) + feature);
  float2 squares;
  const Quad result = weigh<T>(output, Quad{{__ldg(weight), __ldg(weight + 4)}}, squares);
  auto* target = reinterpret_cast<uint32_t*>(weighed_at(params, row, feature));
  target[0] = result.word[0];
  target[4] = result.word[1];
  store_squares(params, row, feature, __fadd_rn(squares.x, squares.y), true);
}

/// Finish and store a warp's sums: cell i is weight rows `local(i)` .. + 15 of the tile and rows `row(i)` .. + 7 of x.
/// `scales`: of the tile's rows, where a norm is in halves.
///
/// The sums of a lane are (feature g, row 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1). Rounded and turned over they
/// are pairs of neighbouring features of row g; what comes after the rounding is done there.
template <typename T, typename Local, typename Row>
__device__ __forceinline__ void store_tile(const LinearParams& params, int tile, int first_row,
                                           float (&sum)[kTiledCells][4], const float* scales, const Local& local,
                                           const Row& row) {
  const int lane = threadIdx.x % 32;
  const int shrink = params.swiglu ? 2 : 1;  // weight rows of an output
  const int first_feature = tile * (kTiledWidth / shrink);
  const auto row_of = [&](int i) { return first_row + row(i) + lane / 4; };
  const auto feature_of = [&](int i) { return first_feature + local(i) / shrink + lane % 4 * 2; };
  Quad residual[kTiledCells];  // all are fetched before the first store, which may overwrite what it belongs to
  if (params.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kTiledCells; ++i) {
      const int left = row_of(i) < params.rows ? params.features - feature_of(i) : 0;
      const uint16_t* source =
          static_cast<const uint16_t*>(params.residual) + row_of(i) * params.residual_stride + feature_of(i);
      residual[i].word[0] = load_pair(source, left, params.pairs_aligned);
      residual[i].word[1] = load_pair(source + 8, left - 8, params.pairs_aligned);
    }
  }
#pragma unroll
  for (int i = 0; i < kTiledCells; ++i) {
    float (&value)[4] = sum[i];
    if (scales_rows<T>(params)) {
      const float2 scale = *reinterpret_cast<const float2*>(scales + row(i) + lane % 4 * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) value[j] = __fmul_rn(value[j], j % 2 == 0 ? scale.x : scale.y);
    }
    if (params.swiglu) {
      value[0] = gated_silu(value[0], value[2]);
      value[1] = gated_silu(value[1], value[3]);
    }
    if (params.bias != nullptr) {
      const int feature = first_feature + local(i) + lane / 4;
      const uint16_t* source = static_cast<const uint16_t*>(params.bias) + feature;
      Quad bias = {{0u, 0u}};
      if (feature < params.features) bias.word[0] = __ldg(source);
      if (feature + 8 < params.features) bias.word[1] = __ldg(source + 8);
      float addend[kLinearQuad];
      unpack(bias, addend, T());
#pragma unroll
      for (int j = 0; j < 4; ++j) value[j] = __fadd_rn(value[j], addend[j / 2 * 2]);
    }
    Quad result = pack(value, T());
    result.word[0] = transpose_matrix(result.word[0]);
    result.word[1] = transpose_matrix(result.word[1]);
    if (params.residual != nullptr) result = add_residual<T>(result, residual[i]);
    if (row_of(i) >= params.rows) continue;
    const int left = params.features - feature_of(i);
    uint16_t* target = static_cast<uint16_t*>(params.out) + row_of(i) * params.out_stride + feature_of(i);
    store_pair(target, result.word[0], left, params.pairs_aligned);
    if (!params.swiglu) store_pair(target + 8, result.word[1], left - 8, params.pairs_aligned);
    if (weighs_rows<T>(params) && left > 0) weigh_cell<T>(params, row_of(i), feature_of(i), result);
  }
}

template <typename T, bool kGroups>
__global__ void __launch_bounds__(kTiledThreads, 1) linear_tiled_kernel(const LinearParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kByGroups = kGroups;
#else
  constexpr bool kByGroups = false;
#endif
  constexpr int kStages = tiled_stages(kGroups);
  // Steps after which a stage is filled anew: products of warpgroups are still reading while the next ones are issued.
  constexpr int kLag = kByGroups ? 2 : 1;
  constexpr int kWeightBytes = kTiledWidth * kStepBytes;
  constexpr int kCopyBytes = kTiledCopyRows * kStepBytes;

  extern __shared__ __align__(1024) uint4 tiled_pool[];
  __shared__ __align__(8) float scales[kTiledRows];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int outputs = params.swiglu ? kTiledWidth / 2 : kTiledWidth;
  const int across = (params.features + outputs - 1) / outputs;    // tiles of the weight
  const int down = (params.rows + kTiledRows - 1) / kTiledRows;    // tiles of x
  const int tiles = across * down;
  const int all_steps = (params.depth + kLinearStep - 1) / kLinearStep;
  const uint32_t queue = shared_address(tiled_pool);

  // Words that this thread copies of a stage: the same 16 bytes of every kTiledCopyRows-th row.
  const int copy_row = static_cast<int>(threadIdx.x) / kStepParts;
  const int copy_part = static_cast<int>(threadIdx.x) % kStepParts;
  const uint32_t copy_queue = queue + word_offset(copy_row, copy_part);

  // Band by band; in a band, for each tile of the weight all tiles of x.
  const auto place_of = [&](int tile, int& weight_tile, int& row_tile) {
    const int band = tile / (kTiledBand * across);
    const int height = min(kTiledBand, down - band * kTiledBand);
    const int within = tile - band * kTiledBand * across;
    weight_tile = within / height;
    row_tile = band * kTiledBand + within % height;
  };
  struct Cursor {
    const char* weight[kTiledCopies];
    const char* x[kTiledCopies];
    int left;   // k to the end of the row
    int steps;  // left of the tile
    int tile;
    int slot;
  };
  const auto enter_tile = [&](Cursor& at) {
    int weight_tile, row_tile;
    place_of(min(at.tile, tiles - 1), weight_tile, row_tile);
#pragma unroll
    for (int i = 0; i < kTiledCopies; ++i) {
      const int local = copy_row + i * kTiledCopyRows;
      const int64_t weight_at = tiled_weight_row(params, weight_tile, local) * params.weight_stride;
      // Rows that x does not have repeat the last one: their sums are columns of their own, which nobody stores.
      const int64_t x_at = min(row_tile * kTiledRows + local, params.rows - 1) * params.x_stride;
      at.weight[i] =
          static_cast<const char*>(params.weight) + (weight_at + copy_part * kOctet) * static_cast<int>(sizeof(T));
      at.x[i] = static_cast<const char*>(params.x) + (x_at + copy_part * kOctet) * static_cast<int>(sizeof(T));
    }
    at.left = params.depth - copy_part * kOctet;
    at.steps = all_steps;
  };
  const auto fetch = [&](Cursor& at) {
    if (at.tile < tiles) {
      const uint32_t target = copy_queue + at.slot * kTiledStageBytes;
#pragma unroll
      for (int i = 0; i < kTiledCopies; ++i) copy_streamed(target + i * kCopyBytes, at.weight[i], at.left > 0);
#pragma unroll
      for (int i = 0; i < kTiledCopies; ++i) {
        copy_streamed(target + kWeightBytes + i * kCopyBytes, at.x[i], at.left > 0);
      }
    }
    commit_copies();
#pragma unroll
    for (int i = 0; i < kTiledCopies; ++i) {
      at.weight[i] += kStepBytes;
      at.x[i] += kStepBytes;
    }
    at.left -= kLinearStep;
    at.slot = at.slot + 1 == kStages ? 0 : at.slot + 1;
    if (--at.steps > 0) return;
    at.tile += static_cast<int>(gridDim.x);
    enter_tile(at);
  };

  // Where a cell of this warp's sums lies in the tile: 16 weight rows by all rows of x, or 64 by 32.
  const auto cell_local = [&](int i) { return kByGroups ? warp * 16 : warp % 2 * 64 + i / 4 * 16; };
  const auto cell_row = [&](int i) { return kByGroups ? i * 8 : warp / 2 * 32 + i % 4 * 8; };
  const uint32_t weight_offset = weight_matrices(lane);
  const uint32_t row_offset = word_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);  // of a pair of row tiles, k 0-15

  float sum[kTiledCells][4];
  const auto multiply = [&](uint32_t stage) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (kByGroups) {
      const uint64_t of_weights = matrix_descriptor(stage + warp / 4 * 64 * kStepBytes);
      const uint64_t of_rows = matrix_descriptor(stage + kWeightBytes);
      wgmma_fence();
#pragma unroll
      for (int chunk = 0; chunk < kLinearStep / 16; ++chunk) {
        wgmma(sum, of_weights + chunk * 2, of_rows + chunk * 2, T());
      }
      wgmma_commit();
      wgmma_leave<1>();  // those of the step before have ended: after the next barrier their stage is free
      return;
    }
#endif
    const uint32_t weights = stage + warp % 2 * 64 * kStepBytes;
    const uint32_t rows = stage + kWeightBytes + warp / 2 * 32 * kStepBytes;
#pragma unroll
    for (int chunk = 0; chunk < kLinearStep / 16; ++chunk) {
      uint32_t part[4][4];
      uint32_t pair[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) load_matrices(pair[n], rows + n * 16 * kStepBytes + (row_offset ^ 32 * chunk));
#pragma unroll
      for (int t = 0; t < 4; ++t) load_matrices(part[t], weights + t * 16 * kStepBytes + (weight_offset ^ 32 * chunk));
#pragma unroll
      for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          mma(sum[t * 4 + n], part[t], pair[n / 2][n % 2 * 2], pair[n / 2][n % 2 * 2 + 1], T());
        }
      }
    }
  };

  pdl_wait();
  pdl_release();
  Cursor ahead;
  ahead.tile = static_cast<int>(blockIdx.x);
  ahead.slot = 0;
  enter_tile(ahead);
#pragma unroll 1
  for (int i = 0; i < kStages - kLag; ++i) fetch(ahead);

  int slot = 0;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
    int weight_tile, row_tile;
    place_of(tile, weight_tile, row_tile);
    constexpr int kScaleRows = kTiledRows / (kTiledThreads / 32);  // rows whose scales a warp finds
    ScaleRounds<kScaleRows> rounds;
    if (scales_rows<T>(params)) rounds.start(params, row_tile * kTiledRows + warp * kScaleRows, lane);
    float total[kTiledCells][4];
#pragma unroll 1
    for (int slice = 0; slice < params.slices; ++slice) {
#pragma unroll
      for (int i = 0; i < kTiledCells * 4; ++i) sum[i / 4][i % 4] = 0.0f;
      const int steps = min(params.slice_steps, all_steps - slice * params.slice_steps);
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        await_copies<kStages - kLag - 1>();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        if constexpr (kByGroups) fence_copies();
#endif
        __syncthreads();  // the stage is here, and everybody has left the one that is filled anew
        fetch(ahead);
        multiply(queue + slot * kTiledStageBytes);
        if (scales_rows<T>(params)) rounds.advance(params, scales + warp * kScaleRows, lane);
        slot = slot + 1 == kStages ? 0 : slot + 1;
      }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      if constexpr (kByGroups) wgmma_wait(sum);
#endif
#pragma unroll
      for (int i = 0; i < kTiledCells * 4; ++i) {
        float& whole = total[i / 4][i % 4];
        whole = slice == 0 ? sum[i / 4][i % 4] : __fadd_rn(whole, sum[i / 4][i % 4]);
      }
    }
    if (scales_rows<T>(params)) {
      while (rounds.left > 0) rounds.advance(params, scales + warp * kScaleRows, lane);
      __syncthreads();  // before the next tile's are stored there is the barrier of its first step
    }
    store_tile<T>(params, weight_tile, row_tile * kTiledRows, total, scales, cell_local, cell_row);
  }
}

// Every instance there is, most wanted first, as CASE(T, kGroups).
#define ASTRAI_LINEAR_TILED_CASES(CASE, T) \
  CASE(T, true)                            \
  CASE(T, false)

#ifndef __CUDACC_RTC__

/// One block a multiprocessor, which takes every so-manieth tile.
template <typename T, bool kGroups>
cudaError_t launch_linear_tiled(const LinearParams& params, const LinearDevice& device, cudaStream_t stream) {
  const auto kernel = linear_tiled_kernel<T, kGroups>;
  constexpr int kBytes = tiled_stages(kGroups) * kTiledStageBytes;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  const int64_t down = (static_cast<int64_t>(params.rows) + kTiledRows - 1) / kTiledRows;
  const int64_t tiles = down * linear_tiles(params, kTiledWidth);
  if (tiles > 0x7fffffff - device.multiprocessors) return cudaErrorInvalidValue;  // counted in 32 bits
  const int blocks = tiles < device.multiprocessors ? static_cast<int>(tiles) : device.multiprocessors;
  return launch(kernel, dim3(static_cast<unsigned int>(blocks)), dim3(kTiledThreads), kBytes, stream, params);
}

/// A block's static shared memory counts too.
template <bool kGroups>
bool tiled_suits(const LinearParams& params, const LinearDevice& device) {
  return params.norm_weight == nullptr && (!kGroups || device.major == 9) &&
         tiled_stages(kGroups) * kTiledStageBytes <= device.shared_bytes - 1024;
}

template <typename T>
cudaError_t launch_linear_tiled(const LinearParams& params, cudaStream_t stream) {
  LinearDevice device = {};
  const cudaError_t status = linear_device(&device);
  if (status != cudaSuccess) return status;
#define ASTRAI_CASE(T_, GROUPS) \
  if (tiled_suits<GROUPS>(params, device)) return launch_linear_tiled<T_, GROUPS>(params, device, stream);
  ASTRAI_LINEAR_TILED_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

/// As linear() (linear.cuh), for any number of rows and without a norm.
inline cudaError_t linear_tiled(LinearParams params, DType dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.features == 0) return cudaSuccess;
  derive(params);
  switch (dtype) {
    case DType::kFloat16:
      return launch_linear_tiled<float16>(params, stream);
    case DType::kBFloat16:
      return launch_linear_tiled<bfloat16>(params, stream);
    case DType::kFloat32:
      break;
  }
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
