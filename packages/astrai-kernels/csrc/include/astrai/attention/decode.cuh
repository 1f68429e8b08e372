// Decode attention: a few query rows a request against its whole KV cache (rows K1-K9).
//
// The unit of work is (chunk of a request's keys, kv head): the planner cut the chunks, a thread block takes every
// gridDim.x-th unit. Within a block, granules of sixteen keys go to the warps in turn, and each warp runs alone until
// the end: no barrier and, for K and V, no shared memory lie on the road from memory to the tensor cores. The query
// heads of a kv head (and the query rows of a request) share one product, so K and V are read once:
//
//   S [8 or 16 rows, keys] = Q K^T        softmax over the keys, online        O^T [head_dim, rows] += V^T P^T
//
// K is the B operand of the first product and V^T the A operand of the second, so that the scores of a thread are, once
// exponentiated and packed, its B operand of the second: nothing moves between threads.
//
// Partial results of a request's chunks meet in the block that finishes last (a ticket per request and kv head), so
// attention is one launch. Maxima are kept as whole numbers in the log2 domain: rescaling is then by a power of two and
// exact, and when it happens leaves no trace in the result. With chunks at fixed positions (`fixed_len`), whose blocks
// all have four warps, a row's bits therefore depend on that row, its keys and its values alone: not on the batch, and
// not on the other query rows.
#pragma once

#include "astrai/attention/decode_warp.cuh"
#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/ticket.cuh"

namespace astrai {

/// A thread block: its warps' results merged, and the chunks of a request merged by the block that finishes last.
template <typename T, typename KV, int kDim, int kRowTiles, bool kExtras>
struct Decode : DecodeWarp<T, KV, kDim, kRowTiles, kExtras> {
  using Warp = DecodeWarp<T, KV, kDim, kRowTiles, kExtras>;
  using Warp::chunk_index, Warp::first_row, Warp::group, Warp::kv_head, Warp::n_rows;
  using Warp::kMaxWarps, Warp::kRows;
  using Warp::lane, Warp::n_warps, Warp::p, Warp::shared, Warp::warp, Warp::warp_rows;
  using typename Warp::Row;
  using typename Warp::Unit;

  __device__ __forceinline__ Decode(const typename KV::Params& params, typename Warp::Shared& memory)
      : Warp(params, memory) {}

  /// Merge what the warps left in shared memory and store it: the result itself, or this chunk's part of it.
  __device__ __forceinline__ void merge_warps(bool is_final) {
    const int rows = min(kRows, n_rows - first_row);
    const int request = shared.chunk.request;
    const int quads = this->dim() / 4;
    for (int e = static_cast<int>(threadIdx.x); e < rows * quads; e += 32 * n_warps()) {
      const int r = e / quads;
      const int d = (e - r * quads) * 4;
      float top = shared.ml[0][r][0];
#pragma unroll
      for (int w = 1; w < kMaxWarps; ++w) {
        if (w < n_warps()) top = fmaxf(top, shared.ml[w][r][0]);
      }
      float total = 0.0f;
      float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kMaxWarps; ++w) {
        if (w >= n_warps()) continue;
        const float factor = exp2_fast(shared.ml[w][r][0] - top);
        const float4 part = *reinterpret_cast<const float4*>(&warp_rows()[w][r][d]);
        total = fmaf(factor, shared.ml[w][r][1], total);
        value.x = fmaf(factor, part.x, value.x);
        value.y = fmaf(factor, part.y, value.y);
        value.z = fmaf(factor, part.z, value.z);
        value.w = fmaf(factor, part.w, value.w);
      }
      if (is_final) {
        store_result(request, r, d, top, total, value);
      } else {
        const int64_t slot = partial_row(chunk_index, r);
        *reinterpret_cast<float4*>(p.partial_out + slot * this->dim() + d) = value;
        if (d == 0) *reinterpret_cast<float2*>(p.partial_ml + 2 * slot) = make_float2(top, total);
      }
    }
  }

  __device__ __forceinline__ int64_t partial_row(int index, int r) const {
    return static_cast<int64_t>(index) * p.n_kv_heads * n_rows + kv_head * n_rows + first_row + r;
  }

  __device__ __forceinline__ void store_result(int request, int r, int d, float top, float total, float4 value) const {
    const Row row_r = this->row(Unit{kv_head, first_row}, r);
    const int64_t token = static_cast<int64_t>(request) * p.q_len + row_r.query;
    if (kExtras && p.sinks) {
      const float sink = p.sinks[row_r.head] * kLog2e;
      const float higher = fmaxf(top, ceilf(sink));
      const float factor = exp2_fast(top - higher);
      total = fmaf(total, factor, exp2_fast(sink - higher));
      value = make_float4(value.x * factor, value.y * factor, value.z * factor, value.w * factor);
      top = higher;
    }
    const float inverse = total > 0.0f ? __frcp_rn(total) : 0.0f;
    uint2 packed;
    packed.x = pack_result<T, KV>(p, value.x * inverse, value.y * inverse);
    packed.y = pack_result<T, KV>(p, value.z * inverse, value.w * inverse);
    T* target = static_cast<T*>(p.out) + token * p.out_token_stride + row_r.head * p.out_head_stride;
    *reinterpret_cast<uint2*>(target + d) = packed;
    if (d == 0 && p.lse) {
      p.lse[token * p.n_heads + row_r.head] = total > 0.0f ? (top + log2f(total)) * kLn2 : -infinity();
    }
  }

  /// Merge the parts of all chunks of the request: chunk c in warp c % n_warps, then as at the end of a chunk.
  __device__ __forceinline__ void merge_chunks() {
    const int dim = this->dim();
    const int elements = min(kRows, n_rows - first_row) * dim;
    const int first_chunk = shared.chunk.first;
    const int count = shared.chunk.count;
    constexpr int kLoads = 4;
#pragma unroll 1
    for (int first = lane * 4; first < elements; first += 128 * kLoads) {
      float4 value[kLoads];
      float top[kLoads];
      float total[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        value[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        top[j] = kNoMaximum;
        total[j] = 0.0f;
      }
#pragma unroll 4
      for (int c = warp; c < count; c += n_warps()) {
        float4 part[kLoads];
        float2 ml[kLoads];
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          const int e = first + 128 * j;
          if (e < elements) {
            const int64_t slot = partial_row(first_chunk + c, e / dim);
            ml[j] = __ldcg(reinterpret_cast<const float2*>(p.partial_ml + 2 * slot));
            part[j] = __ldcg(reinterpret_cast<const float4*>(p.partial_out + slot * dim + e % dim));
          }
        }
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          if (first + 128 * j >= elements) continue;
          const float higher = fmaxf(top[j], ml[j].x);
          const float old = exp2_fast(top[j] - higher);
          const float factor = exp2_fast(ml[j].x - higher);
          top[j] = higher;
          total[j] = fmaf(ml[j].y, factor, total[j] * old);
          value[j].x = fmaf(part[j].x, factor, value[j].x * old);
          value[j].y = fmaf(part[j].y, factor, value[j].y * old);
          value[j].z = fmaf(part[j].z, factor, value[j].z * old);
          value[j].w = fmaf(part[j].w, factor, value[j].w * old);
        }
      }
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int e = first + 128 * j;
        if (e >= elements) continue;
        *reinterpret_cast<float4*>(&warp_rows()[warp][e / dim][e % dim]) = value[j];
        if (e % dim == 0) {
          shared.ml[warp][e / dim][0] = top[j];
          shared.ml[warp][e / dim][1] = total[j];
        }
      }
    }
    __syncthreads();
    merge_warps(true);
  }

  /// The unit of an item; its chunk is read by every thread.
  __device__ __forceinline__ Unit unit_of(int item, int units) const {
    const int index = item / units;
    const int unit = item - index * units;
    const AttentionChunk chunk = p.chunks[index];
    return {unit % p.n_kv_heads,
            unit / p.n_kv_heads * kRows,
            this->uniform(chunk.begin),
            this->uniform(chunk.end),
            this->uniform(chunk.request),
            this->uniform(chunk.table_row),
            this->uniform(chunk.seq_len)};
  }

  __device__ __forceinline__ void run() {
    group = p.n_heads / p.n_kv_heads;
    n_rows = group * p.q_len;
    const int units = p.n_kv_heads * ((n_rows + kRows - 1) / kRows);
    const int n_items = p.plan->n_chunks * units;
    const int stride = static_cast<int>(gridDim.x);
    if (static_cast<int>(blockIdx.x) >= n_items) Warp::join();
    for (int item = static_cast<int>(blockIdx.x); item < n_items; item += stride) {
      chunk_index = item / units;
      const int unit = item - chunk_index * units;
      const Unit now = unit_of(item, units);
      kv_head = now.kv_head;
      first_row = now.first_row;
      if (threadIdx.x == 0) shared.chunk = p.chunks[chunk_index];
      this->attend(now, item == static_cast<int>(blockIdx.x));
      this->to_shared();
      __syncthreads();
      const int count = shared.chunk.count;
      merge_warps(count == 1);
      if (count > 1) {
        // The barriers carry the block's stores to, and the others' stores from, the thread that holds the ticket.
        __syncthreads();
        if (threadIdx.x == 0) {
          int32_t* counter = p.counters + static_cast<int64_t>(shared.chunk.request) * units + unit;
          shared.is_last = take_ticket(counter) == count - 1;
          if (shared.is_last) *counter = 0;
        }
        __syncthreads();
        if (shared.is_last) merge_chunks();
      }
      __syncthreads();  // shared memory is free again
    }
  }
};

template <typename T, typename KV, int kDim, int kRowTiles, bool kExtras>
__global__ void __launch_bounds__(32 * decode_shape(kDim, kRowTiles).most_warps(),
                                  kDecodeWarps / decode_shape(kDim, kRowTiles).most_warps())
    decode_kernel(const typename KV::Params params) {
  using Kernel = Decode<T, KV, kDim, kRowTiles, kExtras>;
  __shared__ __align__(16) typename Kernel::Shared shared;
  Kernel(params, shared).run();
}

#ifndef __CUDACC_RTC__

template <typename T, typename KV, int kDim, int kRowTiles, bool kExtras>
cudaError_t launch_decode(const typename KV::Params& params, int64_t max_items, cudaStream_t stream) {
  using Kernel = Decode<T, KV, kDim, kRowTiles, kExtras>;
  DecodeLayout layout = {};
  const cudaError_t status = decode_layout(params.head_dim, params.n_heads, params.n_kv_heads, params.q_len,
                                           params.batch, params.fixed_len > 0, &layout);
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned int>(max_items < layout.workers ? max_items : layout.workers));
  return launch(decode_kernel<T, KV, kDim, kRowTiles, kExtras>, grid, dim3(32 * layout.warps),
                layout.warps * sizeof(typename Kernel::WarpRows), stream, params);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
