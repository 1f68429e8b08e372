// The heads of a request's one new token, when decode attention does the work of qkv_norm_rope_write (fused/qkv.cuh):
// the query heads of a kv head are normed and rotated on their way to the tensor cores, and the block that has the newest
// position among its keys does the same to the key, keeps it and the value at hand, and writes both to the pool.
//
// The same bits as that launch: the same octets in the same tree, and a normed head is rounded before it is turned.
#pragma once

#include "astrai/common/reduce.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/fused/qkv_octet.cuh"
#include "astrai/rotary/turn.cuh"

namespace astrai {

constexpr int kFreshRows = 8;  // query heads of a kv head at most

/// kFresh: the policy's (attention/kv.cuh); without, nothing is kept.
template <typename T, int kDim, bool kFresh>
struct DecodeHeads {
  struct Shared {};
};

/// A team of kDim / 8 lanes takes a head, an octet each; the block's teams take query heads, key and value in turn.
template <typename T, int kDim>
struct DecodeHeads<T, kDim, true> {
  static constexpr int kTeam = kDim / kOctet;
  static constexpr int kTeamsOfWarp = 32 / kTeam;
  static constexpr int kKey = kFreshRows;
  static constexpr int kValue = kFreshRows + 1;

  struct Shared {
    uint4 queries[kDim / 32 * 64];  // as A fragments, in the order of DecodeOperands::keep_queries
    uint4 newest[2][kTeam];         // key and value
  };

  const QkvParams& params;
  int rank, team, begin;
  int slot;  // -1: outside the pool
  bool turns;
  OctetAngles angles;
  Octet<T> weight;  // of the first head that this lane's team takes

  __device__ __forceinline__ explicit DecodeHeads(const QkvParams& heads)
      : params(heads), rank(static_cast<int>(threadIdx.x) % kTeam), team(static_cast<int>(threadIdx.x) / kTeam),
        begin(rank * kOctet) {}

  __device__ __forceinline__ const void* norm_of(int index) const {
    return index < kKey ? params.q_norm : index == kKey ? params.k_norm : nullptr;
  }
  __device__ __forceinline__ void load_weight(int index) {
    const void* norm = norm_of(index);
    if (norm) weight = load_octet<true, true>(static_cast<const T*>(norm) + begin, kOctet);
  }

  /// What the step's inputs say of the token, and the norm: what may be read while the projection still runs.
  __device__ __forceinline__ void fetch(int request) {
    weight = {};
    load_weight(team);
    const int64_t place = load_index(params.out_cache_loc, request * params.loc_stride, params.locs_are_64_bit);
    slot = place >= 0 && place < params.pool_size ? static_cast<int>(place) : -1;
    turns = params.cos != nullptr && begin < params.rotary_dim;
    angles = {};
    if (turns) {
      const int64_t position =
          load_index(params.position_ids, request * params.position_stride, params.positions_are_64_bit);
      angles = load_angles<true>(params, position, begin);
    }
  }

  /// All threads of the block, behind the projection.
  __device__ __forceinline__ void prepare(int request, int kv_head, int group, bool has_newest, Shared& shared) {
    const int n_teams = static_cast<int>(blockDim.x) / kTeam;
    const T* row = static_cast<const T*>(params.qkv) + request * params.qkv_stride + begin;
#pragma unroll 1
    for (int index = team; index / kTeamsOfWarp * kTeamsOfWarp <= kValue; index += n_teams) {  // a warp as a whole
      const bool is_q = index < kKey;
      const bool is_v = index == kValue;
      const bool wanted = is_q ? index < group : has_newest && index <= kValue;
      const int head = is_q ? kv_head * group + index : params.n_heads + kv_head + (is_v ? params.n_kv_heads : 0);
      Octet<T> value = {};
      if (wanted) value = load_octet<true, false>(row + static_cast<int64_t>(head) * kDim, kOctet);
      if (index != team) load_weight(index);
      if (params.q_norm || params.k_norm) {
        const float total = lanes_sum<kTeam>(sum_of_squares(value, 0.0f));
        if (norm_of(index)) {
          // Division by a power of two is exact as a product.
          const float scale = rsqrtf(__fadd_rn(__fmul_rn(total, 1.0f / kDim), params.eps));
          value = scale_and_weigh(value, scale, weight);
        }
      }
      if (params.cos) {
        float own[kOctet];
        float partner[kOctet];
        unpack(value, own);
        find_partner(params, value, rank, partner);
        if (turns && !is_v) {
#pragma unroll
          for (int i = 0; i < kOctet; ++i) own[i] = turn(own[i], partner[i], angles.cos[i], angles.sin[i]);
          pack(own, value);
        }
      }
      if (is_q) {
        // Lane 4 * row + octet % 4 of part octet / 4; rows 8 to 15 do not exist. Rows from `group` on are zero.
        uint4* target = shared.queries + rank / 4 * 64 + 4 * index + rank % 4;
        if (!wanted) value = {};
        target[0] = make_uint4(value.word[0], 0, value.word[1], 0);
        target[32] = make_uint4(value.word[2], 0, value.word[3], 0);
      } else if (wanted) {
        shared.newest[is_v][rank] = make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
        if (slot >= 0) {
          T* pool = static_cast<T*>(is_v ? params.v_buffer : params.k_buffer);
          store_octet<true>(pool + pool_offset(params, is_v, slot, kv_head) + begin, value, kOctet);
        }
      }
    }
    __syncthreads();
  }
};

}  // namespace astrai
