// Prefill attention on mma.sync: ragged queries against paged or contiguous KV, causal (rows K1-K3; sm_80 and later).
//
// A thread block takes a tile of query rows of one request and head and walks the keys in tiles through shared memory,
// with the online softmax of FlashAttention-2 (arXiv:2307.08691, section 3): the scores stay in registers and are the
// A operand of the second product. While a block multiplies Q with K, V is on its way; while it multiplies P with V, the
// next K is. Two blocks a multiprocessor hide each other's softmax.
#pragma once

#include "astrai/attention/prefill_tile.cuh"
#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"

namespace astrai {

template <typename T, typename KV, int kDim, bool kExtras>
struct Prefill : PrefillTile<T, KV, kDim, kExtras> {
  using Tile = PrefillTile<T, KV, kDim, kExtras>;
  using typename Tile::Scores;
  using Tile::first_row, Tile::first_token, Tile::head, Tile::kv_head, Tile::q_len, Tile::seq_len;
  using Tile::k_tile, Tile::lane, Tile::p, Tile::slots, Tile::thread, Tile::v_tile;
  using Tile::kHoldQueries, Tile::kKeys, Tile::kQueries, Tile::kRowTiles, Tile::kSharedBytes, Tile::kSteps;
  using Tile::kValueTiles, Tile::maximum, Tile::out, Tile::sum;

  __device__ __forceinline__ Prefill(const AttentionParams& params, unsigned char* memory) : Tile(params, memory) {}

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[m][half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const float top = maximum[m][half] * kLn2;
        float denominator = total;
        if (kExtras && p.sinks) denominator += __expf(p.sinks[head] - top);
        const float inverse = total > 0.0f ? 1.0f / denominator : 0.0f;
        const int row = this->query_position(m, half) - (seq_len - q_len);
        if (row >= q_len) continue;
        const int64_t token = first_token + row;
        T* target = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < kValueTiles; ++d) {
          *reinterpret_cast<uint32_t*>(target + d * 8) =
              pack_pair<T>(out[m][d][2 * half] * inverse, out[m][d][2 * half + 1] * inverse);
        }
        if (p.lse && lane % 4 == 0) {
          p.lse[token * p.n_heads + head] =
              denominator > 0.0f && (total > 0.0f || (kExtras && p.sinks)) ? top + __logf(denominator)
                                                                           : -infinity();
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    pdl_wait();
    pdl_release();
    head = static_cast<int>(blockIdx.x);
    kv_head = head / (p.n_heads / p.n_kv_heads);
    if (!this->find_tile(static_cast<int>(blockIdx.y))) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[m][half] = kNoMaximum;
        sum[m][half] = 0.0f;
      }
#pragma unroll
      for (int d = 0; d < kValueTiles; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][d][i] = 0.0f;
      }
    }
    const int first_position = seq_len - q_len + first_row;
    const int last_position = min(first_position + kQueries, seq_len) - 1;
    const int low = p.window ? max(0, first_position + 1 - p.window) : 0;
    const int high = last_position + 1;
    // Between these two every row of the tile sees every key.
    const int all_from = p.window ? max(0, last_position + 1 - p.window) : 0;
    const int all_to = first_position + 1;
    const float scale_log2 = p.scale * kLog2e;

    int position = low / kKeys * kKeys;
    int* now = slots;
    int* next = slots + kKeys;
    this->copy_queries();
    if (thread < kKeys) now[thread] = this->find_slot(position, low, high);
    __syncthreads();
    this->copy_rows(k_tile, now, p.k, p.k_slot_stride, p.k_head_stride, p.k_batch_stride);
    commit_copies();
#pragma unroll 1
    for (; position < high; position += kKeys) {
      wait_copies();
      __syncthreads();  // K has landed, and V of the tile before has been read
      if constexpr (kHoldQueries) {
        if (position < low + kKeys) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) this->load_queries(step, step);
        }
      }
      this->copy_rows(v_tile, now, p.v, p.v_slot_stride, p.v_head_stride, p.v_batch_stride);
      commit_copies();
      const bool has_next = position + kKeys < high;
      const int next_slot = has_next ? this->find_slot(position + kKeys, low, high) : -1;
      Scores s;
      this->multiply(s);
      if (position < all_from || position + kKeys > all_to || (kExtras && p.mask)) this->mask_scores(s, position, high);
      this->soften(s, scale_log2);
      if (thread < kKeys) next[thread] = next_slot;
      wait_copies();
      __syncthreads();  // V has landed, K has been read, and the next slots are there
      if (has_next) this->copy_rows(k_tile, next, p.k, p.k_slot_stride, p.k_head_stride, p.k_batch_stride);
      commit_copies();
      int* const other = now;
      now = next;
      next = other;
      this->accumulate(s);
    }
    wait_copies();
    store();
  }
};

template <typename T, typename KV, int kDim, bool kExtras>
__global__ void __launch_bounds__(kPrefillThreads, 2) prefill_kernel(const AttentionParams params) {
  extern __shared__ __align__(16) unsigned char prefill_memory[];
  Prefill<T, KV, kDim, kExtras>(params, prefill_memory).run();
}

#ifndef __CUDACC_RTC__

/// max_tiles: at least the sum over requests of ceil(query rows / kQueries); the grid follows from it.
template <typename T, typename KV, int kDim, bool kExtras>
cudaError_t launch_prefill(const AttentionParams& params, int64_t n_tokens, cudaStream_t stream) {
  using Kernel = Prefill<T, KV, kDim, kExtras>;
  const auto kernel = prefill_kernel<T, KV, kDim, kExtras>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes);
  if (status != cudaSuccess) return status;
  const int64_t tiles = n_tokens / Kernel::kQueries + params.batch;
  if (tiles > 65535) return cudaErrorInvalidValue;
  return launch(kernel, dim3(static_cast<unsigned int>(params.n_heads), static_cast<unsigned int>(tiles)),
                dim3(kPrefillThreads), Kernel::kSharedBytes, stream, params);
}

#endif  // __CUDACC_RTC__

// Every instance of a type and head size, as CASE(T, KV, kDim, kExtras).
#define ASTRAI_PREFILL_CASES(CASE, T, DIM) \
  CASE(T, PagedKV, DIM, false)             \
  CASE(T, PagedKV, DIM, true)              \
  CASE(T, ContigKV, DIM, false)            \
  CASE(T, ContigKV, DIM, true)

}  // namespace astrai
