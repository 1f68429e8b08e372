// Rotary position embedding (Su et al. 2021, RoFormer, section 3.4.2) of q and k in one launch.
//
// With half = rotary_dim / 2, pair i < half of a head is turned by the angle whose cosine and sine the tables hold:
//   (a, b) -> (a cos - b sin, b cos + a sin)
// where the pair is (x[i], x[i + half]) in the half-split ("neox") layout and (x[2i], x[2i + 1]) in the interleaved one.
// fp32 arithmetic, one rounding to the storage type. Elements from rotary_dim on pass through.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/types.cuh"
#include "astrai/rotary/params.h"
#include "astrai/rotary/turn.cuh"

namespace astrai {

/// How a token's work is cut: a unit is one octet of pairs (or of pass-through elements) in `kHeads` heads.
struct RotaryTiling {
  int pair_octets;       // per head
  int items;             // pair_octets + octets of elements to pass through
  int head_groups;       // heads of one unit lie head_groups apart
  int tokens_per_block;  // 1 when a token needs several blocks (gridDim.y)
};

template <bool kInterleaved>
__device__ __forceinline__ void rotate(float (&first)[kOctet], float (&second)[kOctet], const float (&cos)[kOctet],
                                       const float (&sin)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    float& a = kInterleaved ? (i < 4 ? first[2 * i % 8] : second[2 * i % 8]) : first[i];
    float& b = kInterleaved ? (i < 4 ? first[2 * i % 8 + 1] : second[2 * i % 8 + 1]) : second[i];
    const float turned_a = turn(a, b, cos[i], -sin[i]);
    const float turned_b = turn(b, a, cos[i], sin[i]);
    a = turned_a;
    b = turned_b;
  }
}

/// Four values each from two places that are multiples of 16 bytes.
__device__ __forceinline__ void load_quads(const float* first, const float* second, float (&value)[kOctet]) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(first));
  const float4 b = __ldg(reinterpret_cast<const float4*>(second));
  value[0] = a.x, value[1] = a.y, value[2] = a.z, value[3] = a.w;
  value[4] = b.x, value[5] = b.y, value[6] = b.z, value[7] = b.w;
}

/// kHeads: heads per thread, which share one read of the tables. kAligned: every octet touched starts at a 16-byte
/// boundary and is whole. Neither changes a bit of the result.
template <typename T, bool kInterleaved, bool kAligned, int kHeads>
__global__ void __launch_bounds__(256, kHeads == 1 ? 4 : 2) rotary_kernel(const RotaryParams params, const RotaryTiling tiling) {
  pdl_wait();
  pdl_release();
  const int units = tiling.items * tiling.head_groups;
  const int local = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  const int token_in_block = local / units;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * tiling.tokens_per_block + token_in_block;
  if (token_in_block >= tiling.tokens_per_block || token >= params.tokens) return;
  const int unit = local - token_in_block * units;
  const int group = unit / tiling.items;
  const int item = unit - group * tiling.items;
  const bool rotates = item < tiling.pair_octets;

  // Where the two octets of this thread lie within a head, and how many of their elements exist.
  const int half = params.rotary_dim / 2;
  int first_begin;
  int second_begin;
  int first_count;
  int second_count;
  if (!rotates) {
    first_begin = params.rotary_dim + (item - tiling.pair_octets) * kOctet;
    first_count = params.head_dim - first_begin;
    second_begin = 0;
    second_count = 0;
  } else if constexpr (kInterleaved && !kAligned) {
    first_begin = 2 * item * kOctet;
    first_count = params.rotary_dim - first_begin;
    second_begin = first_begin + kOctet;
    second_count = params.rotary_dim - second_begin;
  } else {  // interleaved too: two octets side by side would leave each load and store half a sector
    first_begin = item * kOctet;
    first_count = half - first_begin;
    second_begin = half + first_begin;
    second_count = first_count;
  }
  const bool has_second = second_count > 0;

  const T* source[kHeads];
  T* target[kHeads];
  Octet<T> first[kHeads];
  Octet<T> second[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const int head = group + j * tiling.head_groups;
    const bool is_q = head < params.q.heads;
    const RotaryTensor& tensor = is_q ? params.q : params.k;
    const int row = is_q ? head : head - params.q.heads;
    source[j] = nullptr;
    target[j] = nullptr;
    const bool wanted = row < tensor.heads && (rotates || tensor.in != tensor.out);
    if (wanted) {
      source[j] = static_cast<const T*>(tensor.in) + token * tensor.in_token_stride + row * tensor.in_head_stride;
      target[j] = static_cast<T*>(tensor.out) + token * tensor.out_token_stride + row * tensor.out_head_stride;
      first[j] = load_octet<kAligned, false>(source[j] + first_begin, first_count);
      if (has_second) second[j] = load_octet<kAligned, false>(source[j] + second_begin, second_count);
    }
  }

  if (!rotates) {
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      if (source[j] != nullptr) store_octet<kAligned>(target[j] + first_begin, first[j], first_count);
    }
    return;
  }

  const int64_t position = params.positions_are_64_bit
                               ? static_cast<const int64_t*>(params.position_ids)[token * params.position_stride]
                               : static_cast<const int32_t*>(params.position_ids)[token * params.position_stride];
  float cos[kOctet];
  float sin[kOctet];
  if (position >= 0 && position < params.max_pos) {
    const float* cos_row = params.cos + position * params.cos_stride;
    const float* sin_row = params.sin + position * params.sin_stride;
    if constexpr (kInterleaved && kAligned) {
      const int pair = item * kOctet / 2;
      load_quads(cos_row + pair, cos_row + half / 2 + pair, cos);
      load_quads(sin_row + pair, sin_row + half / 2 + pair, sin);
    } else {
      const int pair = item * kOctet;
      unpack(load_octet<kAligned, true>(cos_row + pair, half - pair), cos);
      unpack(load_octet<kAligned, true>(sin_row + pair, half - pair), sin);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) cos[i] = sin[i] = __uint_as_float(kNotANumber);
  }

#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (source[j] == nullptr) continue;
    float a[kOctet];
    float b[kOctet];
    if (!has_second) second[j] = first[j];  // an interleaved tail of at most four pairs; keeps `b` defined
    unpack(first[j], a);
    unpack(second[j], b);
    rotate<kInterleaved>(a, b, cos, sin);
    pack(a, first[j]);
    pack(b, second[j]);
    store_octet<kAligned>(target[j] + first_begin, first[j], first_count);
    if (has_second) store_octet<kAligned>(target[j] + second_begin, second[j], second_count);
  }
}

// Every instance there is, as CASE(T, kInterleaved, kAligned, kHeads): expanded by the dispatcher below and by the
// explicit instantiations of bindings/rotary.cu.
#define ASTRAI_ROTARY_CASES(CASE, T) \
  CASE(T, false, true, 1)            \
  CASE(T, false, true, 4)            \
  CASE(T, false, false, 1)           \
  CASE(T, true, true, 1)             \
  CASE(T, true, true, 4)             \
  CASE(T, true, false, 1)

#ifndef __CUDACC_RTC__

inline bool rotary_tensor_is_aligned(const RotaryTensor& tensor, int64_t tokens, std::size_t element_bytes) {
  const int64_t elements = static_cast<int64_t>(16 / element_bytes);
  const bool tokens_are_aligned =
      tokens <= 1 || (tensor.in_token_stride % elements == 0 && tensor.out_token_stride % elements == 0);
  const bool heads_are_aligned =
      tensor.heads <= 1 || (tensor.in_head_stride % elements == 0 && tensor.out_head_stride % elements == 0);
  return tensor.heads == 0 ||
         (is_aligned(tensor.in, 16) && is_aligned(tensor.out, 16) && tokens_are_aligned && heads_are_aligned);
}

template <typename T>
cudaError_t launch_rotary(const RotaryParams& params, bool interleaved, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const int half = params.rotary_dim / 2;
  const int heads = params.q.heads + params.k.heads;
  const bool passes = params.rotary_dim < params.head_dim &&
                      (params.q.in != params.q.out || (params.k.heads > 0 && params.k.in != params.k.out));
  const bool aligned = half % kOctet == 0 && (!passes || params.head_dim % kOctet == 0) &&
                       rotary_tensor_is_aligned(params.q, params.tokens, sizeof(T)) &&
                       rotary_tensor_is_aligned(params.k, params.tokens, sizeof(T)) && is_aligned(params.cos, 16) &&
                       is_aligned(params.sin, 16) && params.cos_stride % 4 == 0 && params.sin_stride % 4 == 0;

  int multiprocessors = 0;
  const cudaError_t status = multiprocessor_count(&multiprocessors);
  if (status != cudaSuccess) return status;

  RotaryTiling tiling = {};
  tiling.pair_octets = (half + kOctet - 1) / kOctet;
  tiling.items = tiling.pair_octets + (passes ? (params.head_dim - params.rotary_dim + kOctet - 1) / kOctet : 0);
  // Four heads a thread read the tables a quarter as often; a small batch needs the threads more.
  const bool many = params.tokens * heads * tiling.items >= static_cast<int64_t>(multiprocessors) * 2048 * 4;
  const int heads_per_thread = aligned && many && heads >= 4 ? 4 : 1;
  tiling.head_groups = (heads + heads_per_thread - 1) / heads_per_thread;
  const int64_t units = static_cast<int64_t>(tiling.items) * tiling.head_groups;
  const int64_t blocks_per_token = (units + kThreads - 1) / kThreads;
  tiling.tokens_per_block = units < kThreads ? static_cast<int>(kThreads / units) : 1;
  const int64_t blocks = (params.tokens + tiling.tokens_per_block - 1) / tiling.tokens_per_block;
  if (blocks > 0x7fffffff || blocks_per_token > 65535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned int>(blocks), static_cast<unsigned int>(blocks_per_token));

#define ASTRAI_CASE(T_, INTERLEAVED, ALIGNED, HEADS)                                                             \
  if (interleaved == INTERLEAVED && aligned == ALIGNED && heads_per_thread == HEADS) {                           \
    return launch(rotary_kernel<T_, INTERLEAVED, ALIGNED, HEADS>, grid, dim3(kThreads), 0, stream, params, tiling); \
  }
  ASTRAI_ROTARY_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

/// Launch on `stream` of the current device. `params` must be valid (bindings/rotary.cu checks them); tokens may be 0.
inline cudaError_t rotary(const RotaryParams& params, DType dtype, bool interleaved, cudaStream_t stream) {
  if (params.tokens == 0 || params.q.heads + params.k.heads == 0) return cudaSuccess;
  switch (dtype) {
    case DType::kFloat32:
      return launch_rotary<float>(params, interleaved, stream);
    case DType::kFloat16:
      return launch_rotary<float16>(params, interleaved, stream);
    case DType::kBFloat16:
      return launch_rotary<bfloat16>(params, interleaved, stream);
  }
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
