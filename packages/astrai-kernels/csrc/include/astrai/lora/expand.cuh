// The second half of LoRA: from the rank up to the projection's width, scaled and added to its output.
//
// Plain fp32 arithmetic: hidden stays as shrink made it. A thread has two features of eight rows and sums over the rank
// in rising order, so that a row's bits depend on that row and its adapter alone.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pair.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/linear/fragments.cuh"
#include "astrai/lora/rows.cuh"

namespace astrai {

constexpr int kExpandThreads = 128;
constexpr int kExpandRows = 8;
constexpr int kExpandFeatures = 2 * kExpandThreads;  // of a block

template <typename T>
__global__ void __launch_bounds__(kExpandThreads)
    lora_expand_kernel(const LoraExpandParams params, const int feature_tiles) {
  __shared__ int ids[kExpandRows];
  __shared__ __align__(16) float hidden[kExpandRows][kLoraMostRank];
  const int feature_tile = static_cast<int>(blockIdx.x) % feature_tiles;
  const int feature = feature_tile * kExpandFeatures + static_cast<int>(threadIdx.x) * 2;
  const int first_row = static_cast<int>(blockIdx.x) / feature_tiles * kExpandRows;
  const int rows = min(kExpandRows, params.rows - first_row);
  const int left = params.features - feature;  // features from here on; not positive past the end
  pdl_wait();
  pdl_release();
  if (threadIdx.x < kExpandRows) {
    const int row = static_cast<int>(threadIdx.x);
    ids[row] = row < rows ? adapter_of(params.adapters, first_row + row) : -1;
  }
  for (int item = static_cast<int>(threadIdx.x); item < kExpandRows * kLoraMostRank; item += kExpandThreads) {
    const int row = item / kLoraMostRank;
    const int rank = item % kLoraMostRank;
    if (row < rows && rank < params.rank) {
      hidden[row][rank] = params.hidden[(first_row + row) * params.hidden_stride + rank];
    }
  }
  uint32_t base[kExpandRows];  // fetched long before it is needed
#pragma unroll
  for (int row = 0; row < kExpandRows; ++row) {
    const uint16_t* source =
        static_cast<const uint16_t*>(params.base) + (first_row + row) * params.base_stride + feature;
    base[row] = load_pair(source, row < rows ? left : 0, params.pairs_aligned);
  }
  __syncthreads();

  float sum[kExpandRows][2] = {};
  for (int adapter = next_adapter(ids, -1, params.adapters.count); adapter < params.adapters.count;
       adapter = next_adapter(ids, adapter, params.adapters.count)) {
    const T* const of_adapter = static_cast<const T*>(params.b) + adapter * params.b_stride;
    const T* const first = of_adapter + min(feature, params.features - 1) * params.b_row_stride;
    const T* const second = of_adapter + min(feature + 1, params.features - 1) * params.b_row_stride;
    const float scaling = params.scaling[adapter];
#pragma unroll 2
    for (int rank = 0; rank < params.rank; rank += kOctet) {
      float weight[2][kOctet];
      unpack(load_octet<true, true>(first + rank, kOctet), weight[0]);
      unpack(load_octet<true, true>(second + rank, kOctet), weight[1]);
#pragma unroll
      for (int row = 0; row < kExpandRows; ++row) {
        if (ids[row] != adapter) continue;
        const float4 low = *reinterpret_cast<const float4*>(&hidden[row][rank]);
        const float4 high = *reinterpret_cast<const float4*>(&hidden[row][rank + 4]);
        const float value[kOctet] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          sum[row][0] = __fmaf_rn(weight[0][i], value[i], sum[row][0]);
          sum[row][1] = __fmaf_rn(weight[1][i], value[i], sum[row][1]);
        }
      }
    }
#pragma unroll
    for (int row = 0; row < kExpandRows; ++row) {
      if (ids[row] != adapter) continue;
      sum[row][0] = __fmul_rn(sum[row][0], scaling);
      sum[row][1] = __fmul_rn(sum[row][1], scaling);
    }
  }

#pragma unroll
  for (int row = 0; row < kExpandRows; ++row) {
    if (row >= rows || left <= 0) break;
    uint32_t result = base[row];
    if (ids[row] >= 0) {
      const bool is_known = ids[row] < params.adapters.count;
      float value[kLinearQuad];
      unpack(Quad{{base[row], 0u}}, value, T());
      value[0] = is_known ? __fadd_rn(value[0], sum[row][0]) : lora_nan();
      value[1] = is_known ? __fadd_rn(value[1], sum[row][1]) : lora_nan();
      result = pack(value, T()).word[0];
    }
    uint16_t* target = static_cast<uint16_t*>(params.out) + (first_row + row) * params.out_stride + feature;
    store_pair(target, result, left, params.pairs_aligned);
  }
}

#ifndef __CUDACC_RTC__

template <typename T>
cudaError_t launch_lora_expand(const LoraExpandParams& params, cudaStream_t stream) {
  const int feature_tiles = (params.features + kExpandFeatures - 1) / kExpandFeatures;
  const int64_t blocks = (static_cast<int64_t>(params.rows) + kExpandRows - 1) / kExpandRows * feature_tiles;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  return launch(lora_expand_kernel<T>, dim3(static_cast<unsigned int>(blocks)), dim3(kExpandThreads), 0, stream, params,
                feature_tiles);
}

/// Launch on `stream` of the current device. `params` must be valid (bindings/lora.cu checks them), the derived member
/// excepted.
inline cudaError_t lora_expand(LoraExpandParams params, DType dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.features == 0) return cudaSuccess;
  params.pairs_aligned = is_aligned(params.base, 4) && is_aligned(params.out, 4) &&
                         (params.rows == 1 || (params.base_stride % 2 == 0 && params.out_stride % 2 == 0));
  switch (dtype) {
    case DType::kFloat16:
      return launch_lora_expand<float16>(params, stream);
    case DType::kBFloat16:
      return launch_lora_expand<bfloat16>(params, stream);
    case DType::kFloat32:
      break;
  }
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
