// The first half of LoRA (Hu et al. 2021, arXiv:2106.09685): rows down to the rank of their adapters, in fp32.
//
// A block takes 16 ranks and a tile of rows, its warps take turns with chunks of 32 k and merge in their order: the
// order of additions follows from the depth alone. Sixteen contiguous bytes of a row, straight from global memory, are
// the operands of two products: the index that a product sums over may be permuted if both operands agree.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/linear/fragments.cuh"
#include "astrai/lora/rows.cuh"

namespace astrai {

constexpr int kShrinkWarps = 8;
constexpr int kShrinkRanks = 16;
constexpr int kShrinkChunk = 32;  // k

/// kRowTiles: 8-row tiles of a block. All have the same bits; more of them read the adapter less often.
template <typename T, int kRowTiles>
__global__ void __launch_bounds__(kShrinkWarps * 32)
    lora_shrink_kernel(const LoraShrinkParams params, const int rank_tiles) {
  constexpr int kRows = 8 * kRowTiles;
  constexpr int kPitch = kShrinkRanks + 4;  // floats
  __shared__ int ids[kRows];
  __shared__ float parts[kShrinkWarps][kRows * kPitch];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int first_rank = static_cast<int>(blockIdx.x) % rank_tiles * kShrinkRanks;
  const int first_row = static_cast<int>(blockIdx.x) / rank_tiles * kRows;
  const int own_k = lane % 4 * kOctet;
  pdl_wait();
  pdl_release();
  if (threadIdx.x < kRows) {
    const int row = first_row + static_cast<int>(threadIdx.x);
    ids[threadIdx.x] = row < params.rows ? adapter_of(params.adapters, row) : -1;
  }
  __syncthreads();

  float kept[kRowTiles][4] = {};
  for (int adapter = next_adapter(ids, -1, params.adapters.count); adapter < params.adapters.count;
       adapter = next_adapter(ids, adapter, params.adapters.count)) {
    const T* const of_adapter = static_cast<const T*>(params.a) + adapter * params.a_stride + own_k;
    const T* const low = of_adapter + min(first_rank + lane / 4, params.rank - 1) * params.a_row_stride;
    const T* const high = of_adapter + min(first_rank + lane / 4 + 8, params.rank - 1) * params.a_row_stride;
    const T* x[kRowTiles];
    bool wanted[kRowTiles];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int row = n * 8 + lane / 4;
      wanted[n] = ids[row] == adapter;
      x[n] = static_cast<const T*>(params.x) + (wanted[n] ? first_row + row : 0) * params.x_stride + own_k;
    }
    float sum[kRowTiles][4] = {};
#pragma unroll 4
    for (int k = warp * kShrinkChunk; k < params.depth; k += kShrinkWarps * kShrinkChunk) {
      const bool inside = k + own_k < params.depth;
      const auto load = [&](const T* row, bool has) {
        return has ? load_readonly(reinterpret_cast<const uint4*>(row + k)) : make_uint4(0u, 0u, 0u, 0u);
      };
      const uint4 above = load(low, inside);
      const uint4 below = load(high, inside);
      const uint32_t early[4] = {above.x, below.x, above.y, below.y};
      const uint32_t late[4] = {above.z, below.z, above.w, below.w};
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        const uint4 rows = load(x[n], inside && wanted[n]);
        mma(sum[n], early, rows.x, rows.y, T());
        mma(sum[n], late, rows.z, rows.w, T());
      }
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (ids[n * 8 + lane % 4 * 2 + i % 2] == adapter) kept[n][i] = sum[n][i];
      }
    }
  }

#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      parts[warp][(n * 8 + lane % 4 * 2 + i % 2) * kPitch + i / 2 * 8 + lane / 4] = kept[n][i];
    }
  }
  __syncthreads();
  for (int item = static_cast<int>(threadIdx.x); item < kRows * kShrinkRanks; item += kShrinkWarps * 32) {
    const int row = item / kShrinkRanks;
    const int rank = item % kShrinkRanks;
    if (first_row + row >= params.rows || first_rank + rank >= params.rank) continue;
    float total = parts[0][row * kPitch + rank];
#pragma unroll
    for (int i = 1; i < kShrinkWarps; ++i) total = __fadd_rn(total, parts[i][row * kPitch + rank]);
    if (ids[row] == params.adapters.count) total = lora_nan();
    params.out[(first_row + row) * params.out_stride + first_rank + rank] = total;
  }
}

// Every instance there is, as CASE(T, kRowTiles).
#define ASTRAI_LORA_SHRINK_CASES(CASE, T) \
  CASE(T, 1)                              \
  CASE(T, 4)

#ifndef __CUDACC_RTC__

template <typename T>
cudaError_t launch_lora_shrink(const LoraShrinkParams& params, cudaStream_t stream) {
  const int rank_tiles = (params.rank + kShrinkRanks - 1) / kShrinkRanks;
  int multiprocessors = 0;
  const cudaError_t status = multiprocessor_count(&multiprocessors);
  if (status != cudaSuccess) return status;
  // Large tiles only where there are enough of them to fill the device.
  const int row_tiles = static_cast<int64_t>(params.rows) * rank_tiles >= 64LL * multiprocessors ? 4 : 1;
  const int64_t blocks = (static_cast<int64_t>(params.rows) + 8 * row_tiles - 1) / (8 * row_tiles) * rank_tiles;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
#define ASTRAI_CASE(T_, ROW_TILES)                                                                                \
  if (row_tiles == ROW_TILES) {                                                                                   \
    return launch(lora_shrink_kernel<T_, ROW_TILES>, dim3(static_cast<unsigned int>(blocks)), dim3(kShrinkWarps * 32), \
                  0, stream, params, rank_tiles);                                                                 \
  }
  ASTRAI_LORA_SHRINK_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

/// Launch on `stream` of the current device. `params` must be valid (bindings/lora.cu checks them).
inline cudaError_t lora_shrink(const LoraShrinkParams& params, DType dtype, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  switch (dtype) {
    case DType::kFloat16:
      return launch_lora_shrink<float16>(params, stream);
    case DType::kBFloat16:
      return launch_lora_shrink<bfloat16>(params, stream);
    case DType::kFloat32:
      break;
  }
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
