// The readable twin of the attention kernels: one warp for a query row and head, one key after the other, all in fp32.
//
// It takes what prefill takes, decode being prefill of one query row a request, and shares nothing with the tensor-core
// kernels but the parameters: a second opinion for the tests, and where to read what they compute.
#pragma once

#include "astrai/attention/params.h"
#include "astrai/common/fp8.cuh"
#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/reduce.cuh"
#include "astrai/common/types.cuh"

namespace astrai {

constexpr int kScalarWarps = 4;
constexpr int kScalarParts = 8;  // elements of a head that a lane holds: up to head_dim 256

__device__ __forceinline__ float element_of(const bfloat16* source) {
  return __uint_as_float(static_cast<uint32_t>(source->bits) << 16);
}
__device__ __forceinline__ float element_of(const float16* source) {
  float value[kOctet];
  unpack(Octet<float16>{{source->bits, 0, 0, 0}}, value);
  return value[0];
}

/// One element of a row of keys or values.
template <typename T>
__device__ __forceinline__ float cache_element(const void* buffer, int64_t at, bool narrow) {
  return narrow ? float_from_e4m3(static_cast<const uint8_t*>(buffer)[at])
                : element_of(static_cast<const T*>(buffer) + at);
}

template <typename T>
__global__ void __launch_bounds__(32 * kScalarWarps) scalar_kernel(const AttentionParams p, const int64_t n_tokens) {
  pdl_wait();
  pdl_release();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kScalarWarps + threadIdx.x / 32;
  const int64_t token = unit / p.n_heads;
  const int head = static_cast<int>(unit % p.n_heads);
  if (token >= n_tokens || token < p.qo_indptr[0] || token >= p.qo_indptr[p.batch]) return;
  int request = 0;
  while (token >= p.qo_indptr[request + 1]) ++request;

  const int kv_head = head / (p.n_heads / p.n_kv_heads);
  const int seq_len = p.seq_lens[request];
  const int position = seq_len - p.qo_indptr[request + 1] + static_cast<int>(token);  // of the query
  const int64_t table_row = p.req_indices ? p.req_indices[request] : request;
  const bool narrow = p.k_scale != nullptr;
  const int64_t batch = p.req_to_token ? 0 : request;  // a paged cache has no batch dimension

  float query[kScalarParts] = {};
  float out[kScalarParts] = {};
  for (int i = 0; i < kScalarParts; ++i) {
    const int d = lane + 32 * i;
    if (d < p.head_dim) {
      query[i] = element_of(static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride + d);
    }
  }
  // A sink is a key without a value: the softmax starts from it.
  const float minus_infinity = __uint_as_float(0xff800000u);
  float top = p.sinks ? p.sinks[head] : minus_infinity;
  float total = p.sinks ? 1.0f : 0.0f;

  for (int key = p.window ? max(0, position + 1 - p.window) : 0; key <= position; ++key) {
    if (p.mask && !p.mask[token * p.mask_stride + key]) continue;
    const int64_t slot = p.req_to_token ? p.req_to_token[table_row * p.table_stride + key] : key;
    const int64_t k_at = batch * p.k_batch_stride + slot * p.k_slot_stride + kv_head * p.k_head_stride;
    const int64_t v_at = batch * p.v_batch_stride + slot * p.v_slot_stride + kv_head * p.v_head_stride;
    float dot = 0.0f;
    for (int i = 0; i < kScalarParts; ++i) {
      const int d = lane + 32 * i;
      if (d < p.head_dim) dot += query[i] * cache_element<T>(p.k, k_at + d, narrow);
    }
    float score = lanes_sum<32>(dot) * p.scale;
    float v_scale = 1.0f;
    if (narrow) {
      score *= p.k_scale[batch * p.k_scale_batch_stride + slot * p.k_scale_stride + kv_head];
      v_scale = p.v_scale[batch * p.v_scale_batch_stride + slot * p.v_scale_stride + kv_head];
    }
    if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);

    const float higher = fmaxf(top, score);
    const float factor = top == minus_infinity ? 0.0f : expf(top - higher);
    const float weight = expf(score - higher);
    top = higher;
    total = total * factor + weight;
    for (int i = 0; i < kScalarParts; ++i) {
      const int d = lane + 32 * i;
      if (d < p.head_dim) out[i] = out[i] * factor + weight * v_scale * cache_element<T>(p.v, v_at + d, narrow);
    }
  }

  for (int i = 0; i < kScalarParts; ++i) {
    const int d = lane + 32 * i;
    if (d >= p.head_dim) continue;
    float value[kOctet] = {total > 0.0f ? out[i] / total : 0.0f};
    Octet<T> rounded;
    pack(value, rounded);
    T* target = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + d;
    target->bits = static_cast<uint16_t>(rounded.word[0]);
  }
  if (p.lse && lane == 0) p.lse[token * p.n_heads + head] = total > 0.0f ? top + logf(total) : minus_infinity;
}

#ifndef __CUDACC_RTC__

inline cudaError_t scalar_attention(const AttentionParams& params, DType dtype, int64_t n_tokens, cudaStream_t stream) {
  const int64_t blocks = (n_tokens * params.n_heads + kScalarWarps - 1) / kScalarWarps;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned int>(blocks));
  return dtype == DType::kFloat16
             ? launch(scalar_kernel<float16>, grid, dim3(32 * kScalarWarps), 0, stream, params, n_tokens)
             : launch(scalar_kernel<bfloat16>, grid, dim3(32 * kScalarWarps), 0, stream, params, n_tokens);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
