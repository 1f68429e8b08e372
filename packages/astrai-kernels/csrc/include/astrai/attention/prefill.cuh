// Prefill attention on mma.sync: ragged queries against paged or contiguous KV, causal (rows K1-K3; sm_80 and later).
//
// A thread block takes a tile of query rows of one request and head and walks the keys in tiles through shared memory,
// with the online softmax of FlashAttention-2 (arXiv:2307.08691, section 3): the scores stay in registers and are the
// A operand of the second product. While a block multiplies Q with K, V is on its way; while it multiplies P with V, the
// next K is. Two blocks a multiprocessor hide each other's softmax. Where shared memory and registers allow, two tiles of
// each are there instead, and a block multiplies the next tile's Q with K during this one's softmax, too.
#pragma once

#include "astrai/attention/prefill_tile.cuh"
#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"

namespace astrai {

template <typename T, typename KV, int kDim, bool kExtras>
struct Prefill : PrefillTile<T, KV, kDim, kExtras> {
  using Tile = PrefillTile<T, KV, kDim, kExtras>;
  using typename Tile::Scores;
  using typename Tile::Weights;
  using Tile::first_position, Tile::first_token, Tile::head, Tile::kv_head, Tile::seq_len;
  using Tile::k_tile, Tile::lane, Tile::p, Tile::slots, Tile::thread, Tile::v_tile;
  using Tile::kAhead, Tile::kKeys, Tile::kQueries, Tile::kRowTiles, Tile::kSharedBytes, Tile::kSteps;
  using Tile::kTileBytes, Tile::kValueTiles, Tile::maximum, Tile::out, Tile::sum;

  __device__ __forceinline__ Prefill(const AttentionParams& params, unsigned char* memory) : Tile(params, memory) {}

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = sum[m][half];
        // A row that sees nothing but its sink has no maximum.
        const float top = kExtras && p.sinks && !(total > 0.0f) ? p.sinks[head] : maximum[m][half] * kLn2;
        float denominator = total;
        if (kExtras && p.sinks) denominator += __expf(p.sinks[head] - top);
        const float inverse = total > 0.0f ? 1.0f / denominator : 0.0f;
        const int query = this->query_position(m, half);
        if (query >= seq_len) continue;
        const int64_t token = first_token + query;
        T* target = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + lane % 4 * 2;
        constexpr float kUnit = KV::kNarrow ? kWidenedUnit / kWeightUnit : 1.0f;
        const float factor = inverse * kUnit;
#pragma unroll
        for (int d = 0; d < kValueTiles; ++d) {
          if (d * 8 >= this->dim()) break;
          *reinterpret_cast<uint32_t*>(target + d * 8) =
              pack_result<T, KV>(p, out[m][d][2 * half] * factor, out[m][d][2 * half + 1] * factor);
        }
        if (p.lse && lane % 4 == 0) {
          p.lse[token * p.n_heads + head] =
              denominator > 0.0f && (total > 0.0f || (kExtras && p.sinks)) ? top + __logf(denominator)
                                                                           : -infinity();
        }
      }
    }
  }

  __device__ __forceinline__ void copy_keys(const int* tile_slots, uint32_t target) const {
    if constexpr (KV::kNarrow) {
      this->copy_narrow(0, tile_slots, p.k, p.k_slot_stride, p.k_head_stride, p.k_batch_stride);
    } else {
      this->copy_rows(target, tile_slots, p.k, p.k_slot_stride, p.k_head_stride, p.k_batch_stride);
    }
  }
  __device__ __forceinline__ void copy_values(const int* tile_slots, uint32_t target) const {
    if constexpr (KV::kNarrow) {
      this->copy_narrow(1, tile_slots, p.v, p.v_slot_stride, p.v_head_stride, p.v_batch_stride);
    } else {
      this->copy_rows(target, tile_slots, p.v, p.v_slot_stride, p.v_head_stride, p.v_batch_stride);
    }
  }

  /// Keys that some row of the tile sees, [low, high), and those that every row sees.
  struct Span {
    int low, high, all_from, all_to;
  };

  __device__ __forceinline__ void finish_scores(Scores& s, int position, const Span& span) const {
    if constexpr (kExtras) this->cap_scores(s);
    if (position < span.all_from || position + kKeys > span.all_to || (kExtras && p.mask)) {
      this->mask_scores(s, position, span.high);
    }
  }
  /// One tile of keys and one of values in shared memory.
  __device__ __forceinline__ void walk(const Span& span, float scale_log2) {
    int position = span.low / kKeys * kKeys;
    int* now = slots;
    int* next = slots + kKeys;
    const int first_slot = this->find_slot(position, span.low, span.high);
    this->copy_queries();  // behind the slots, which the first keys wait for
    if (thread < kKeys) now[thread] = first_slot;
    if constexpr (KV::kNarrow) this->store_scales(now, this->find_scales(first_slot));
    __syncthreads();
    copy_keys(now, k_tile);
    commit_copies();
#pragma unroll 1
    for (; position < span.high; position += kKeys) {
      wait_copies();
      if constexpr (KV::kNarrow) this->widen(0, k_tile);
      __syncthreads();  // K has landed, and V of the tile before has been read
      copy_values(now, v_tile);
      commit_copies();
      const bool has_next = position + kKeys < span.high;
      const int next_slot = has_next ? this->find_slot(position + kKeys, span.low, span.high) : -1;
      Scores s;
      this->multiply(s, k_tile);
      float2 next_scales = {};
      if constexpr (KV::kNarrow) {
        next_scales = this->find_scales(next_slot);
        this->template apply_scales<false>(s, this->scales_of(now));
      }
      finish_scores(s, position, span);
      this->raise_maxima(s, scale_log2);
      this->soften(s, scale_log2);
      Weights weights;
      this->pack_weights(s, weights);
      if (KV::kNarrow) this->add_weights(weights);
      if (thread < kKeys) next[thread] = next_slot;
      if constexpr (KV::kNarrow) {
        this->store_scales(next, next_scales);
        this->template apply_scales<true>(s, this->scales_of(now) + kKeys);
        this->pack_weights(s, weights);
      }
      wait_copies();
      if constexpr (KV::kNarrow) this->widen(1, v_tile);
      __syncthreads();  // V has landed, K has been read, and the next slots are there
      if (has_next) copy_keys(next, k_tile);
      commit_copies();
      int* const other = now;
      now = next;
      next = other;
      if (!KV::kNarrow) this->add_weights(weights);
      this->accumulate(weights, v_tile);
    }
  }

  /// Two tiles of each: the next values, and the keys behind the next, are on their way during the whole of this one.
  __device__ __forceinline__ void walk_ahead(const Span& span, float scale_log2) {
    this->copy_queries();
    int position = span.low / kKeys * kKeys;
    int* now = slots;
    int* next = slots + kKeys;
    int* behind = slots + 2 * kKeys;
    const int first_slot = this->find_slot(position, span.low, span.high);
    const int second_slot = this->find_slot(position + kKeys, span.low, span.high);
    int later_slot = this->find_slot(position + 2 * kKeys, span.low, span.high);
    if (thread < kKeys) {
      now[thread] = first_slot;
      next[thread] = second_slot;
    }
    __syncthreads();
    copy_keys(now, k_tile);
    copy_values(now, v_tile);
    commit_copies();
    wait_copies();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) this->load_queries(step, step);
    copy_keys(next, k_tile + kTileBytes);
    commit_copies();
    Scores s;
    this->multiply(s, k_tile);
    int stage = 0;
#pragma unroll 1
    for (; position < span.high; position += kKeys) {
      if (thread < kKeys) behind[thread] = later_slot;
      later_slot = this->find_slot(position + 3 * kKeys, span.low, span.high);
      wait_copies();
      __syncthreads();  // what was fetched last has landed, and the tiles of the step before have been read
      const uint32_t own = stage * kTileBytes;
      const uint32_t other = kTileBytes - own;
      if (position + 2 * kKeys < span.high) copy_keys(behind, k_tile + own);
      if (position + kKeys < span.high) copy_values(next, v_tile + other);
      commit_copies();
      finish_scores(s, position, span);
      this->raise_maxima(s, scale_log2);
      Scores coming;  // behind the last tile nobody asks for them
      this->multiply(coming, k_tile + other);
      this->soften(s, scale_log2);
      Weights weights;
      this->pack_weights(s, weights);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) s[m][i / 4][i % 4] = coming[m][i / 4][i % 4];
      }
      this->add_weights(weights);
      this->accumulate(weights, v_tile + own);
      int* const free = now;
      now = next;
      next = behind;
      behind = free;
      stage ^= 1;
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
    const int last_position = min(first_position + kQueries, seq_len) - 1;
    const Span span = {p.window ? max(0, first_position + 1 - p.window) : 0, last_position + 1,
                       p.window ? max(0, last_position + 1 - p.window) : 0, first_position + 1};
    if constexpr (kAhead) {
      walk_ahead(span, p.scale * kLog2e);
    } else {
      walk(span, p.scale * kLog2e);
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

// Every instance of a type and head size, as CASE(T, KV, kDim, kExtras); an e4m3 cache has one of a head size.
#define ASTRAI_PREFILL_CASES(CASE, T, DIM) \
  CASE(T, PagedKV, DIM, false)             \
  CASE(T, AnyKV, DIM, true)

}  // namespace astrai
