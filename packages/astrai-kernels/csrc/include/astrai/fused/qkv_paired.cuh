// The kernel of qkv_norm_rope_write for the common layouts: 16-bit types, head_dim 64, 128 or 256, all of the head rotated
// in halves (or none of it). The general kernel of qkv.cuh gives the same bits; it issues about 130 instructions for an
// octet, 220 with norms, which is more than memory leaves time for (3.2, 2.6 and, to fp8, 1.9 TB/s on an H200).
//
// A lane holds octet r of the first half of a head and octet r of the second: both partners of every rotation, so that
// nothing is exchanged and one read of the angles serves both. The sum of squares has the same tree: the butterfly over
// all octets of a head adds octets half a head apart first.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/reduce.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/fused/params.h"
#include "astrai/fused/qkv_octet.cuh"
#include "astrai/rotary/turn.cuh"

namespace astrai {

/// How the heads of a token are spread over warps: each takes `rounds` times as many neighbouring heads as it has teams.
struct QkvPairedShape {
  uint32_t groups;  // warps of a token
  int rounds;       // at most kHeads
};

/// Thread blocks that a multiprocessor must have room for where lanes norm several heads; 1: what the compiler leaves, five.
/// Six leave a thread 80 registers. On 9.0 bfloat16 does with them and is 9 % faster; float16 there, and 10.0, would spill.
template <typename T>
constexpr int kQkvNormBlocks = 1;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <>
constexpr int kQkvNormBlocks<bfloat16> = 6;
#endif

/// kLanes: lanes of a head, head_dim / 16. kHeads: heads of a token per lane, all of whose loads are in flight together.
template <typename T, int kLanes, int kHeads, bool kNorms>
__global__ void __launch_bounds__(kQkvThreads, kNorms && kHeads > 1 ? kQkvNormBlocks<T> : 1)
    qkv_paired_kernel(const QkvParams params, const QkvPairedShape shape) {
  constexpr int kHalf = kLanes * kOctet;
  constexpr int kDim = 2 * kHalf;
  constexpr int kTeams = 32 / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int begin = lane % kLanes * kOctet;
  const uint32_t unit = blockIdx.x * (kQkvThreads / 32) + threadIdx.x / 32;
  const int64_t token = unit / shape.groups;
  const int heads = params.n_heads + 2 * params.n_kv_heads;
  const int warp_head = static_cast<int>(unit % shape.groups) * shape.rounds * kTeams;  // the warp's first head
  const int first_head = warp_head + lane / kLanes;
  const bool has_token = token < params.tokens;

  // Weights of the norms: with one head a lane its own octets; with several, both heads' in shared memory, since there
  // registers decide how many blocks a multiprocessor has.
  constexpr int kUnits = kDim / kOctet;
  constexpr bool kShared = kNorms && kHeads > 1;
  __shared__ uint4 shared_weights[kShared ? 2 : 1][kShared ? kUnits : 1];
  Octet<T> own_weight[2] = {};
  if constexpr (kShared) {
    const int at = static_cast<int>(threadIdx.x);
    const void* norm = at < kUnits ? params.q_norm : params.k_norm;
    if (at < 2 * kUnits && norm) {
      shared_weights[at / kUnits][at % kUnits] = load_readonly(static_cast<const uint4*>(norm) + at % kUnits);
    }
    __syncthreads();
  } else if constexpr (kNorms) {
    const T* norm = static_cast<const T*>(first_head < params.n_heads ? params.q_norm : params.k_norm);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (norm) own_weight[side] = load_octet<true, true>(norm + begin + side * kHalf, kOctet);
    }
  }

  const bool rotates = params.cos != nullptr;
  int64_t slot = -1;
  float cos[kOctet] = {};
  float sin[kOctet] = {};
  const auto load_place = [&] {
    if (!has_token) return;
    slot = load_index(params.out_cache_loc, token * params.loc_stride, params.locs_are_64_bit);
    if (!rotates) return;
    const int64_t position =
        load_index(params.position_ids, token * params.position_stride, params.positions_are_64_bit);
    if (position >= 0 && position < params.max_pos) {
      unpack(load_octet<true, true>(params.cos + position * params.cos_stride + begin, kOctet), cos);
      unpack(load_octet<true, true>(params.sin + position * params.sin_stride + begin, kOctet), sin);
    } else {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) cos[i] = sin[i] = __uint_as_float(kNotANumber);
    }
  };
  // With many tokens the loads of others hide these, and the registers are needed for the heads.
  const bool early = kHeads == 1 && params.overlap;
  if (early) load_place();

  pdl_wait();
  pdl_release();

  Octet<T> first[kHeads] = {};
  Octet<T> second[kHeads] = {};
  const T* source = static_cast<const T*>(params.qkv) + token * params.qkv_stride + first_head * kDim + begin;
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (has_token && j < shape.rounds && first_head + j * kTeams < heads) {
      first[j] = load_octet<true, false>(source + j * kTeams * kDim, kOctet);
      second[j] = load_octet<true, false>(source + j * kTeams * kDim + kHalf, kOctet);
    }
  }

  if (!early) load_place();  // behind the heads, whose loads need not wait for these
  const bool has_slot = slot >= 0 && slot < params.pool_size;
  T* q_target = static_cast<T*>(params.q) + token * params.q_token_stride + begin;

#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const int warp_first = warp_head + j * kTeams;
    if (j >= shape.rounds || warp_first >= heads) break;  // the same for the whole warp
    const int head = first_head + j * kTeams;
    const bool wanted = has_token && head < heads;
    const bool is_q = head < params.n_heads;
    const bool is_v = head >= params.n_heads + params.n_kv_heads;

    if (kNorms && warp_first < params.n_heads + params.n_kv_heads) {  // v heads alone have no norm
      const float own = __fadd_rn(sum_of_squares(first[j], 0.0f), sum_of_squares(second[j], 0.0f));
      const float total = lanes_sum<kLanes>(own);
      if (!is_v && (is_q ? params.q_norm : params.k_norm) != nullptr) {
        // Division by a power of two is exact as a product.
        const float scale = rsqrtf(__fadd_rn(__fmul_rn(total, 1.0f / kDim), params.eps));
        Octet<T> weight[2] = {own_weight[0], own_weight[1]};
        if constexpr (kShared) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const uint4 w = shared_weights[is_q ? 0 : 1][(begin + side * kHalf) / kOctet];
            weight[side] = {{w.x, w.y, w.z, w.w}};
          }
        }
        first[j] = scale_and_weigh(first[j], scale, weight[0]);
        second[j] = scale_and_weigh(second[j], scale, weight[1]);
      }
    }
    if (rotates && !is_v) {
      float a[kOctet];
      float b[kOctet];
      unpack(first[j], a);
      unpack(second[j], b);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const float turned = turn(a[i], b[i], cos[i], -sin[i]);
        b[i] = turn(b[i], a[i], cos[i], sin[i]);
        a[i] = turned;
      }
      pack(a, first[j]);
      pack(b, second[j]);
    }

    if (wanted && is_q) {
      T* target = q_target + head * params.q_head_stride;
      store_octet<true>(target, first[j], kOctet);
      store_octet<true>(target + kHalf, second[j], kOctet);
    }
    if (warp_first + kTeams <= params.n_heads) continue;  // q heads alone
    const int row = head - params.n_heads - (is_v ? params.n_kv_heads : 0);
    const bool stores = wanted && !is_q && has_slot;
    if (params.k_scale == nullptr) {
      if (stores) {
        T* pool = static_cast<T*>(is_v ? params.v_buffer : params.k_buffer);
        T* target = pool + pool_offset(params, is_v, slot, row) + begin;
        store_octet<true>(target, first[j], kOctet);
        store_octet<true>(target + kHalf, second[j], kOctet);
      }
    } else {
      float a[kOctet];
      float b[kOctet];
      unpack(first[j], a);
      unpack(second[j], b);
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) largest = fmaxf(largest, fmaxf(fabsf(a[i]), fabsf(b[i])));
      const HeadScale scale = head_scale(lanes_max<kLanes>(largest));
      if (stores) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          a[i] = __fmul_rn(a[i], scale.inverse);
          b[i] = __fmul_rn(b[i], scale.inverse);
        }
        uint8_t* pool = static_cast<uint8_t*>(is_v ? params.v_buffer : params.k_buffer);
        uint8_t* target = pool + pool_offset(params, is_v, slot, row) + begin;
        store_e4m3<true>(target, a, kOctet);
        store_e4m3<true>(target + kHalf, b, kOctet);
        if (begin == 0) store_head_scale(params, is_v, slot, row, scale.scale);
      }
    }
  }
}

// Every instance there is, as CASE(T, kLanes, kHeads, kNorms): the dispatcher below and bindings/qkv.cu expand it.
#define ASTRAI_QKV_PAIRED_LANE_CASES(CASE, T, LANES) \
  CASE(T, LANES, 1, false)                           \
  CASE(T, LANES, 1, true)                            \
  CASE(T, LANES, kQkvHeads, false)                   \
  CASE(T, LANES, kQkvHeads, true)
#define ASTRAI_QKV_PAIRED_CASES(CASE, T)   \
  ASTRAI_QKV_PAIRED_LANE_CASES(CASE, T, 4) \
  ASTRAI_QKV_PAIRED_LANE_CASES(CASE, T, 8) \
  ASTRAI_QKV_PAIRED_LANE_CASES(CASE, T, 16)

#ifndef __CUDACC_RTC__

/// Whether the kernel above serves these arguments, of a 16-bit type and aligned (qkv_is_aligned).
inline bool qkv_is_paired(const QkvParams& params) {
  const bool fits = params.head_dim == 64 || params.head_dim == 128 || params.head_dim == 256;
  return fits && (params.cos == nullptr || (!params.interleaved && params.rotary_dim == params.head_dim));
}

template <typename T>
cudaError_t launch_qkv_paired(const QkvParams& params, int multiprocessors, cudaStream_t stream) {
  const int lanes = params.head_dim / (2 * kOctet);
  const bool norms = params.q_norm != nullptr || params.k_norm != nullptr;
  const int teams = 32 / lanes;
  const int all_rounds = (params.n_heads + 2 * params.n_kv_heads + teams - 1) / teams;
  // Several heads a lane once every multiprocessor has its warps anyway; a small batch needs the warps more.
  const bool many = params.tokens * all_rounds >= static_cast<int64_t>(multiprocessors) * 32 * kQkvHeads;
  const int heads = many ? kQkvHeads : 1;
  QkvPairedShape shape;
  shape.groups = static_cast<uint32_t>((all_rounds + heads - 1) / heads);
  shape.rounds = (all_rounds + static_cast<int>(shape.groups) - 1) / static_cast<int>(shape.groups);
  const int64_t units = params.tokens * shape.groups;
  if (units > 0x7fffffff) return cudaErrorInvalidValue;  // the kernel counts units in 32 bits
  constexpr int kWarps = kQkvThreads / 32;
  const dim3 grid(static_cast<unsigned int>((units + kWarps - 1) / kWarps));
#define ASTRAI_CASE(T_, LANES, HEADS, NORMS)                                                                      \
  if (lanes == LANES && heads == HEADS && norms == NORMS) {                                                       \
    return launch(qkv_paired_kernel<T_, LANES, HEADS, NORMS>, grid, dim3(kQkvThreads), 0, stream, params, shape); \
  }
  ASTRAI_QKV_PAIRED_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
