// RMSNorm, alone and behind a residual add, over rows of `hidden` elements.
//
//   sum    = round(x + residual)                        stored as the new residual; sum = x without a residual
//   normed = round(round(sum / sqrt(mean(sum^2) + eps)) * weight)
//
// where round() is to the storage type and everything between is fp32: what Hugging Face's LlamaRMSNorm computes.
//
// Reduction contract: the tree is a function of `hidden` alone. Octet i of a row belongs to thread i % threads, which
// accumulates its octets in rising order; lanes and then warps are summed by a fixed butterfly. Row count, strides,
// alignment and the variant of the kernel change how octets are loaded, never the order of additions.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/reduce.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/fused/params.h"
#include "astrai/fused/rms_norm_bulk.cuh"

namespace astrai {

/// Load a thread's octets of a row; those that the row does not have are left as they are.
template <bool kAligned, int kOctets, typename T>
__device__ __forceinline__ void load_row(Octet<T> (&value)[kOctets], const T* row, int team, int rank, int hidden) {
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    const int begin = (j * team + rank) * kOctet;
    if (begin < hidden) value[j] = load_octet<kAligned, false>(row + begin, hidden - begin);
  }
}

/// Whether a block fetches its next row before it reduces this one, so that its loads never pause: worth it where a
/// row is one operand; with the residual the two operands keep enough loads in flight (3.8 TB/s on an H200).
__host__ __device__ constexpr bool rms_norm_prefetches(int octets, bool add) { return octets > 0 && !add; }

/// Threads a block may have, and blocks that must fit a multiprocessor: what bounds the registers of each instance.
__host__ __device__ constexpr int rms_norm_threads(int team, int octets) {
  return team ? 128 : octets == 0 ? 1024 : octets == 1 ? 256 : 512;
}
__host__ __device__ constexpr int rms_norm_blocks(int team, int octets, int element_bytes) {
  const int threads = octets * element_bytes <= 2 ? 1536 : octets * element_bytes <= 8 ? 1024 : 512;
  return octets == 0 ? 1 : threads / rms_norm_threads(team, octets);
}

/// One row per team of threads.
///
/// kTeam: 8, 16 or 32 neighbouring lanes of a warp, several rows a block; 0: the whole block takes one row.
/// kOctets: octets of the row that each thread keeps in registers; 0: any number, read twice (kTeam 0 only).
/// kAligned: every row of every tensor starts at a 16-byte boundary and hidden is a multiple of 8.
/// overlap: the residual may be read before pdl_wait(); see there.
template <typename T, int kTeam, int kOctets, bool kAdd, bool kAligned>
__global__ void __launch_bounds__(rms_norm_threads(kTeam, kOctets), rms_norm_blocks(kTeam, kOctets, sizeof(T))) rms_norm_kernel(const RmsNormParams params, const bool overlap) {
  static_assert(kTeam == 0 || kOctets == 1, "a team within a warp holds one octet per thread");
  __shared__ float scratch[2][32];
  // Where registers do not hold a long row, its successor and the weight, the weight lies in shared memory: read anew for
  // each row it would be evicted from L1 by the rows that pass through.
  constexpr bool kShareWeight = kOctets == 4 && !kAdd && sizeof(T) == 2;
  __shared__ uint4 shared_weight[kShareWeight ? kOctets : 1][kShareWeight ? rms_norm_threads(kTeam, kOctets) : 1];
  const int team = kTeam ? kTeam : static_cast<int>(blockDim.x);
  const int rank = kTeam ? static_cast<int>(threadIdx.x) % team : static_cast<int>(threadIdx.x);
  const int row_in_block = kTeam ? static_cast<int>(threadIdx.x) / team : 0;
  const int rows_per_block = kTeam ? static_cast<int>(blockDim.x) / team : 1;
  const T* weight_source = static_cast<const T*>(params.weight);

  // The weight does not depend on the row: where registers allow, it is fetched once, beside the first row.
  constexpr bool kPrefetch = rms_norm_prefetches(kOctets, kAdd);
  constexpr bool kHoldWeight = kOctets > 0 && kOctets * sizeof(T) <= (kPrefetch ? 4 : 8);
  Octet<T> weight[kHoldWeight ? kOctets : 1];
  if constexpr (kHoldWeight) {
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      const int begin = (j * team + rank) * kOctet;
      if (begin < params.hidden) {
        weight[j] = load_octet<kAligned, true>(weight_source + begin, params.hidden - begin);
      }
    }
  }

  if constexpr (kShareWeight) {
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      const int begin = (j * team + rank) * kOctet;
      // Each thread reads back only what it wrote itself.
      if (begin < params.hidden) {
        shared_weight[j][rank] = load_readonly(reinterpret_cast<const uint4*>(weight_source + begin));
      }
    }
  }

  const int64_t step = static_cast<int64_t>(gridDim.x) * rows_per_block;
  // The residual of the block's first row, where it may be read already; the others follow row by row.
  constexpr bool kEarly = kAdd && kOctets > 0;
  Octet<T> residual[kEarly ? kOctets : 1];
  bool has_residual = false;
  if constexpr (kEarly) {
    if (overlap) {
      const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_per_block + row_in_block;
      const int64_t outer = params.inner == 1 ? row : row / params.inner;
      const int64_t inner = params.inner == 1 ? 0 : row - outer * params.inner;
      load_row<kAligned>(residual, row_source<T>(params.residual, outer, inner), team, rank, row < params.rows ? params.hidden : 0);
      has_residual = true;
    }
  }

  pdl_wait();
  pdl_release();

  int parity = 0;
  Octet<T> next[kPrefetch ? kOctets : 1] = {};
  if constexpr (kPrefetch) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_per_block + row_in_block;
    if (row < params.rows) {
      const int64_t outer = params.inner == 1 ? row : row / params.inner;
      const int64_t inner = params.inner == 1 ? 0 : row - outer * params.inner;
      load_row<kAligned>(next, row_source<T>(params.x, outer, inner), team, rank, params.hidden);
    }
  }
  // `first` is the same for the whole block, so that every lane reaches the shuffles and the barrier.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_per_block; first < params.rows; first += step) {
    const int64_t row = first + row_in_block;
    const int hidden = row < params.rows ? params.hidden : 0;  // a team without a row has nothing to load or store
    const int64_t outer = params.inner == 1 ? row : row / params.inner;
    const int64_t inner = params.inner == 1 ? 0 : row - outer * params.inner;
    const T* x = row_source<T>(params.x, outer, inner);
    T* out = row_target<T>(params.out, outer, inner);

    float total = 0.0f;
    if constexpr (kOctets > 0) {
      Octet<T> value[kOctets];
      if constexpr (kPrefetch) {
#pragma unroll
        for (int j = 0; j < kOctets; ++j) value[j] = next[j];
        // In place, this thread's later stores are to other rows than these loads.
        if (row + step < params.rows) {
          const int64_t next_outer = params.inner == 1 ? row + step : (row + step) / params.inner;
          const int64_t next_inner = params.inner == 1 ? 0 : row + step - next_outer * params.inner;
          load_row<kAligned>(next, row_source<T>(params.x, next_outer, next_inner), team, rank, params.hidden);
        }
      } else {
        load_row<kAligned>(value, x, team, rank, hidden);
      }
      if constexpr (kAdd) {
        if (!has_residual) load_row<kAligned>(residual, row_source<T>(params.residual, outer, inner), team, rank, hidden);
        has_residual = false;
        T* residual_out = row_target<T>(params.residual_out, outer, inner);
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
          if ((j * team + rank) * kOctet < hidden) value[j] = add(value[j], residual[j]);
        }
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
          const int begin = (j * team + rank) * kOctet;
          if (begin < hidden) store_octet<kAligned>(residual_out + begin, value[j], hidden - begin);
        }
      }
#pragma unroll
      for (int j = 0; j < kOctets; ++j) {
        if ((j * team + rank) * kOctet < hidden) total = sum_of_squares(value[j], total);
      }
      if constexpr (kTeam > 0) {
        total = lanes_sum<kTeam>(total);
      } else {
        total = block_sum(total, scratch[parity]);
      }
      const float scale = inverse_rms(total, params.hidden, params.eps);
#pragma unroll
      for (int j = 0; j < kOctets; ++j) {
        const int begin = (j * team + rank) * kOctet;
        if (begin < hidden) {
          if constexpr (kHoldWeight) {
            store_octet<kAligned>(out + begin, scale_and_weigh(value[j], scale, weight[j]), hidden - begin);
          } else if constexpr (kShareWeight) {
            const uint4 word = shared_weight[j][rank];
            const Octet<T> factor = {{word.x, word.y, word.z, word.w}};
            store_octet<kAligned>(out + begin, scale_and_weigh(value[j], scale, factor), kOctet);
          } else {
            const Octet<T> factor = load_octet<kAligned, true>(weight_source + begin, hidden - begin);
            store_octet<kAligned>(out + begin, scale_and_weigh(value[j], scale, factor), hidden - begin);
          }
        }
      }
    } else {
      const T* source = x;
      if constexpr (kAdd) {
        const T* other = row_source<T>(params.residual, outer, inner);
        T* residual_out = row_target<T>(params.residual_out, outer, inner);
        for (int begin = rank * kOctet; begin < hidden; begin += team * kOctet) {
          const Octet<T> value = add(load_octet<kAligned, false>(x + begin, hidden - begin),
                                     load_octet<kAligned, false>(other + begin, hidden - begin));
          store_octet<kAligned>(residual_out + begin, value, hidden - begin);
          total = sum_of_squares(value, total);
        }
        source = residual_out;  // each thread reads back only what it wrote itself
      } else {
        for (int begin = rank * kOctet; begin < hidden; begin += team * kOctet) {
          total = sum_of_squares(load_octet<kAligned, false>(x + begin, hidden - begin), total);
        }
      }
      const float scale = inverse_rms(block_sum(total, scratch[parity]), params.hidden, params.eps);
      for (int begin = rank * kOctet; begin < hidden; begin += team * kOctet) {
        const Octet<T> value = load_octet<kAligned, false>(source + begin, hidden - begin);
        const Octet<T> factor = load_octet<kAligned, true>(weight_source + begin, hidden - begin);
        store_octet<kAligned>(out + begin, scale_and_weigh(value, scale, factor), hidden - begin);
      }
    }
    parity ^= 1;
  }
}

// Every instance there is, as CASE(T, kTeam, kOctets, kAdd, kAligned): the dispatcher below and the explicit
// instantiations of bindings/fused.cu both expand this list.
#define ASTRAI_RMS_NORM_CASES(CASE, T, ADD) \
  CASE(T, 8, 1, ADD, true)                  \
  CASE(T, 8, 1, ADD, false)                 \
  CASE(T, 16, 1, ADD, true)                 \
  CASE(T, 16, 1, ADD, false)                \
  CASE(T, 32, 1, ADD, true)                 \
  CASE(T, 32, 1, ADD, false)                \
  CASE(T, 0, 1, ADD, true)                  \
  CASE(T, 0, 2, ADD, true)                  \
  CASE(T, 0, 4, ADD, true)                  \
  CASE(T, 0, 0, ADD, true)                  \
  CASE(T, 0, 0, ADD, false)

#ifndef __CUDACC_RTC__

template <typename Pointer>
bool rows_are_aligned(const RowView<Pointer>& view, const RmsNormParams& params, std::size_t element_bytes) {
  const int64_t elements = static_cast<int64_t>(16 / element_bytes);
  return is_aligned(view.data, 16) && (params.rows <= params.inner || view.outer_stride % elements == 0) &&
         (params.inner == 1 || view.inner_stride % elements == 0);
}

template <typename T, int kTeam, int kOctets, bool kAdd, bool kAligned>
cudaError_t launch_rms_norm_instance(const RmsNormParams& params, bool overlap, int threads, cudaStream_t stream) {
  int multiprocessors = 0;
  const cudaError_t status = multiprocessor_count(&multiprocessors);
  if (status != cudaSuccess) return status;
  const int64_t rows_per_block = kTeam ? threads / kTeam : 1;
  const int64_t wanted = (params.rows + rows_per_block - 1) / rows_per_block;
  // No more blocks than are sure to be resident at once: each takes every gridDim.x-th row, and a second wave of
  // blocks would start late with as many rows to do.
  const int64_t resident = static_cast<int64_t>(multiprocessors) * rms_norm_blocks(kTeam, kOctets, sizeof(T)) *
                           rms_norm_threads(kTeam, kOctets) / threads;
  const dim3 grid(static_cast<unsigned int>(wanted < resident ? wanted : resident));
  return launch(rms_norm_kernel<T, kTeam, kOctets, kAdd, kAligned>, grid, dim3(static_cast<unsigned int>(threads)),
                0, stream, params, overlap);
}

template <typename T, bool kAdd>
cudaError_t launch_rms_norm(const RmsNormParams& params, bool overlap, cudaStream_t stream) {
  const bool aligned = params.hidden % kOctet == 0 && is_aligned(params.weight, 16) &&
                       rows_are_aligned(params.x, params, sizeof(T)) &&
                       rows_are_aligned(params.out, params, sizeof(T)) &&
                       (!kAdd || (rows_are_aligned(params.residual, params, sizeof(T)) &&
                                  rows_are_aligned(params.residual_out, params, sizeof(T))));
  const RmsNormShape shape = rms_norm_shape(params.hidden);
  if constexpr (sizeof(T) == 2) {
    const BulkShape bulk = bulk_shape(params.hidden, kAdd);
    int multiprocessors = 0;
    const cudaError_t status = multiprocessor_count(&multiprocessors);
    if (status != cudaSuccess) return status;
    // Fewer rows need more threads each.
    if (aligned && bulk.team > 0 && params.rows * bulk.team >= static_cast<int64_t>(multiprocessors) * 384 * bulk.rows) {
      return launch_rms_norm_bulk<T, kAdd>(params, bulk, stream);
    }
  }
  // Unaligned rows take the kernel that reads twice; its tree is the same, since `threads` is.
  const int octets = shape.team == 0 && !aligned ? 0 : shape.octets;
#define ASTRAI_CASE(T_, TEAM, OCTETS, ADD, ALIGNED)                                                       \
  if (shape.team == TEAM && octets == OCTETS && aligned == ALIGNED) {                                    \
    return launch_rms_norm_instance<T_, TEAM, OCTETS, ADD, ALIGNED>(params, overlap, shape.threads, stream);  \
  }
  ASTRAI_RMS_NORM_CASES(ASTRAI_CASE, T, kAdd)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

/// Launch on `stream` of the current device. `params` must be valid (bindings/fused.cu checks them); rows may be 0.
/// overlap: as in the kernel; many rows do without.
inline cudaError_t rms_norm(const RmsNormParams& params, DType dtype, bool with_add, cudaStream_t stream,
                            bool overlap = false) {
  if (params.rows == 0) return cudaSuccess;
  switch (dtype) {
    case DType::kFloat32:
      return with_add ? launch_rms_norm<float, true>(params, overlap, stream)
                      : launch_rms_norm<float, false>(params, false, stream);
    case DType::kFloat16:
      return with_add ? launch_rms_norm<float16, true>(params, overlap, stream)
                      : launch_rms_norm<float16, false>(params, false, stream);
    case DType::kBFloat16:
      return with_add ? launch_rms_norm<bfloat16, true>(params, overlap, stream)
                      : launch_rms_norm<bfloat16, false>(params, false, stream);
  }
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
