// Between the QKV projection and attention, in one launch: RMSNorm of each q and k head (Qwen3's qk-norm), rotary
// position embedding, and k and v into their slots of the pool.
//
// The same bits as rms_norm, apply_rotary and two index_copy_ in sequence: the norm's and the rotary's own device
// functions run on the same octets in the same tree, and the normed head is rounded before it is turned.
//
// An e4m3 pool holds round(x / s) with s = max|x| / 448 per token and head, of the values that a wider pool would hold.
#pragma once

#include "astrai/common/fp8.cuh"
#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/reduce.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/fused/params.h"
#include "astrai/fused/qkv_octet.cuh"
#include "astrai/fused/qkv_paired.cuh"
#include "astrai/rotary/turn.cuh"

namespace astrai {

/// kTeam: neighbouring lanes that share a head, an octet each (rms_norm_shape: the reduction contract).
/// kHeads: heads of a token per team, `groups` apart.
/// kAligned: every octet starts at a 16-byte boundary and is whole, and so is each half of the rotated part.
template <typename T, int kTeam, int kHeads, bool kAligned>
__global__ void __launch_bounds__(kQkvThreads) qkv_kernel(const QkvParams params, const uint32_t groups) {
  static_assert(kAligned || kHeads == 1, "the exchange below holds one head a team");
  const int rank = static_cast<int>(threadIdx.x) % kTeam;
  const int begin = rank * kOctet;
  const int count = params.head_dim - begin;  // elements of this lane's octet; none if not positive
  const uint32_t unit = blockIdx.x * (kQkvThreads / kTeam) + threadIdx.x / kTeam;
  const int64_t token = unit / groups;
  const int group = static_cast<int>(unit % groups);
  const int heads = params.n_heads + 2 * params.n_kv_heads;
  const bool has_token = token < params.tokens && count > 0;
  const bool norms = params.q_norm != nullptr || params.k_norm != nullptr;
  const bool rotates = params.cos != nullptr;

  Octet<T> q_weight = {};
  Octet<T> k_weight = {};
  if (count > 0) {
    if (params.q_norm) q_weight = load_octet<kAligned, true>(static_cast<const T*>(params.q_norm) + begin, count);
    if (params.k_norm) k_weight = load_octet<kAligned, true>(static_cast<const T*>(params.k_norm) + begin, count);
  }

  // What the step's inputs say of the token, which may be read while the projection still runs.
  const bool turns = rotates && has_token && begin < params.rotary_dim;
  int64_t slot = -1;
  OctetAngles angles = {};
  const auto load_place = [&] {
    if (has_token) slot = load_index(params.out_cache_loc, token * params.loc_stride, params.locs_are_64_bit);
    if (turns) {
      const int64_t position =
          load_index(params.position_ids, token * params.position_stride, params.positions_are_64_bit);
      angles = load_angles<kAligned>(params, position, begin);
    }
  };
  // With many tokens the loads of others hide these, and the registers are needed for the heads.
  const bool early = kHeads == 1 && params.overlap;
  if (early) load_place();

  pdl_wait();
  pdl_release();

  Octet<T> value[kHeads] = {};
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const int head = group + j * static_cast<int>(groups);
    if (has_token && head < heads) {
      const T* source = static_cast<const T*>(params.qkv) + token * params.qkv_stride;
      value[j] = load_octet<kAligned, false>(source + static_cast<int64_t>(head) * params.head_dim + begin, count);
    }
  }

  if (!early) load_place();  // behind the heads, whose loads need not wait for these

#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const int head = group + j * static_cast<int>(groups);
    const bool wanted = has_token && head < heads;
    const bool is_q = head < params.n_heads;
    const bool is_v = head >= params.n_heads + params.n_kv_heads;

    if (norms) {
      const float total = lanes_sum<kTeam>(wanted ? sum_of_squares(value[j], 0.0f) : 0.0f);
      if (wanted && !is_v && (is_q ? params.q_norm : params.k_norm) != nullptr) {
        const float scale = inverse_rms(total, params.head_dim, params.eps);
        Octet<T> weight;  // word by word: a choice between the two objects would put them into local memory
#pragma unroll
        for (int i = 0; i < Octet<T>::kWords; ++i) weight.word[i] = is_q ? q_weight.word[i] : k_weight.word[i];
        value[j] = scale_and_weigh(value[j], scale, weight);
      }
    }

    if (rotates) {
      float own[kOctet];
      float partner[kOctet];
      unpack(value[j], own);
      if constexpr (kAligned) {
        find_partner(params, value[j], rank, partner);
      } else {
        __shared__ float exchange[kQkvThreads * kOctet];
        float* row = exchange + (threadIdx.x / kTeam) * kTeam * kOctet;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) row[begin + i] = own[i];
        __syncwarp();
        const int half = params.rotary_dim / 2;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          const int d = begin + i;
          const int from = params.interleaved ? d ^ 1 : d < half ? d + half : d - half;
          partner[i] = d < params.rotary_dim ? row[from] : 0.0f;
        }
      }
      if (turns && wanted && !is_v) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          if (kAligned || begin + i < params.rotary_dim) {
            own[i] = turn(own[i], partner[i], angles.cos[i], angles.sin[i]);
          }
        }
        pack(own, value[j]);
      }
    }

    if (params.k_scale != nullptr) {
      float own[kOctet];
      unpack(value[j], own);
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) largest = fmaxf(largest, fabsf(own[i]));
      largest = lanes_max<kTeam>(wanted ? largest : 0.0f);
      if (wanted && !is_q && slot >= 0 && slot < params.pool_size) {
        const int row = head - params.n_heads - (is_v ? params.n_kv_heads : 0);
        const HeadScale scale = head_scale(largest);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) own[i] = __fmul_rn(own[i], scale.inverse);
        uint8_t* pool = static_cast<uint8_t*>(is_v ? params.v_buffer : params.k_buffer);
        store_e4m3<kAligned>(pool + pool_offset(params, is_v, slot, row) + begin, own, count);
        if (rank == 0) store_head_scale(params, is_v, slot, row, scale.scale);
      }
    } else if (wanted && !is_q && slot >= 0 && slot < params.pool_size) {
      const int row = head - params.n_heads - (is_v ? params.n_kv_heads : 0);
      T* pool = static_cast<T*>(is_v ? params.v_buffer : params.k_buffer);
      store_octet<kAligned>(pool + pool_offset(params, is_v, slot, row) + begin, value[j], count);
    }
    if (wanted && is_q) {
      T* target = static_cast<T*>(params.q) + token * params.q_token_stride + head * params.q_head_stride;
      store_octet<kAligned>(target + begin, value[j], count);
    }
  }
}

// Every instance there is, as CASE(T, kTeam, kHeads, kAligned): the dispatcher below and bindings/qkv.cu expand it.
#define ASTRAI_QKV_CASES(CASE, T) \
  CASE(T, 8, 1, true)             \
  CASE(T, 8, kQkvHeads, true)     \
  CASE(T, 8, 1, false)            \
  CASE(T, 16, 1, true)            \
  CASE(T, 16, kQkvHeads, true)    \
  CASE(T, 16, 1, false)           \
  CASE(T, 32, 1, true)            \
  CASE(T, 32, kQkvHeads, true)    \
  CASE(T, 32, 1, false)

#ifndef __CUDACC_RTC__

template <typename T>
cudaError_t launch_qkv(const QkvParams& params, cudaStream_t stream) {
  const int team = rms_norm_shape(params.head_dim).team;
  const bool aligned = qkv_is_aligned(params, sizeof(T));
  int multiprocessors = 0;
  const cudaError_t status = multiprocessor_count(&multiprocessors);
  if (status != cudaSuccess) return status;
  if constexpr (sizeof(T) == 2) {
    if (aligned && qkv_is_paired(params)) return launch_qkv_paired<T>(params, multiprocessors, stream);
  }
  const int total = params.n_heads + 2 * params.n_kv_heads;
  // Several heads a team once every multiprocessor has its threads anyway; a small batch needs the teams more.
  const bool many = params.tokens * total * team >= static_cast<int64_t>(multiprocessors) * 2048 * kQkvHeads;
  const int heads = aligned && many ? kQkvHeads : 1;
  const uint32_t groups = static_cast<uint32_t>((total + heads - 1) / heads);
  const int64_t teams_per_block = kQkvThreads / team;
  const int64_t units = params.tokens * groups;
  const int64_t blocks = (units + teams_per_block - 1) / teams_per_block;
  if (units > 0x7fffffff) return cudaErrorInvalidValue;  // the kernel counts units in 32 bits
  const dim3 grid(static_cast<unsigned int>(blocks));
#define ASTRAI_CASE(T_, TEAM, HEADS, ALIGNED)                                                                    \
  if (team == TEAM && heads == HEADS && aligned == ALIGNED) {                                                    \
    return launch(qkv_kernel<T_, TEAM, HEADS, ALIGNED>, grid, dim3(kQkvThreads), 0, stream, params, groups);     \
  }
  ASTRAI_QKV_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

/// Launch on `stream` of the current device. `params` must be valid (bindings/qkv.cu checks them); tokens may be 0.
inline cudaError_t qkv_norm_rope_write(const QkvParams& params, DType dtype, cudaStream_t stream) {
  if (params.tokens == 0) return cudaSuccess;
  switch (dtype) {
    case DType::kFloat32:
      return launch_qkv<float>(params, stream);
    case DType::kFloat16:
      return launch_qkv<float16>(params, stream);
    case DType::kBFloat16:
      return launch_qkv<bfloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
