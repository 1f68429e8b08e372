// The heads of a unit before attention: norm, rotation, and the new key and value into the pool. Bit for bit what
// qkv_norm_rope_write (fused/qkv_paired.cuh) gives: a lane holds an octet of the first half of a head and its partner of the
// second.
#pragma once

#include "astrai/fused/norm_octet.cuh"
#include "astrai/rotary/turn.cuh"
#include "astrai/step/plan.cuh"
#include "astrai/step/rows.cuh"

namespace astrai {

/// Cosines and sines of all rows' positions; outside the table NaN. All workers.
template <int kDim>
__device__ __forceinline__ void fill_angles(const StepParams& p, float (&angles)[kStepRows][kDim]) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < p.rows * kDim; i += kStepWorkers) {
    const int row = i / kDim;
    const int d = i % kDim;
    const int64_t position = p.position_ids[row];
    float value = __uint_as_float(kNotANumber);
    if (position >= 0 && position < p.max_pos) {
      value = d < kDim / 2 ? p.cos[position * p.cos_stride + d] : p.sin[position * p.sin_stride + d - kDim / 2];
    }
    angles[row][d] = value;
  }
}

/// A team of kDim / 16 lanes of the first warps takes one of the query heads, the key, or the value.
template <typename T, int kDim>
struct HeadTeam {
  static constexpr int kLanes = kDim / (2 * kOctet);
  static constexpr int kHalf = kDim / 2;
  int index, begin;  // index: a query head of the group, or kStepHeads and the next for key and value

  __device__ __forceinline__ HeadTeam()
      : index(static_cast<int>(threadIdx.x) / kLanes), begin(static_cast<int>(threadIdx.x) % kLanes * kOctet) {}

  /// Warps that have nothing to do here may leave as a whole.
  static __device__ __forceinline__ bool is_idle() {
    return static_cast<int>(threadIdx.x) / 32 * 32 >= kHeadRows * kLanes;
  }

  /// The norms' weights, on their way before the heads are there. All workers.
  static __device__ __forceinline__ void fetch_norms(const StepLayer& layer, StepShared<kDim>& shared) {
    const int i = static_cast<int>(threadIdx.x);
    constexpr int kOctets = kDim / kOctet;
    if (layer.q_norm == nullptr || i >= 2 * kOctets) return;
    const void* source = i < kOctets ? layer.q_norm : layer.k_norm;
    shared.head_norms[i / kOctets][i % kOctets] = load_readonly(static_cast<const uint4*>(source) + i % kOctets);
  }

  __device__ __forceinline__ void prepare(const StepParams& p, const StepLayer& layer, const StepUnit& unit,
                                          StepShared<kDim>& shared) const {
    const int group = p.group;
    const bool is_q = index < group;
    const bool is_k = index == kStepHeads;
    const bool is_v = index == kStepHeads + 1;
    const bool wanted = is_q || (unit.has_newest() && (is_k || is_v));
    const int head = is_q ? unit.kv_head * group + index : p.n_heads + unit.kv_head + (is_v ? p.n_kv_heads : 0);
    Octet<T> first = {};
    Octet<T> second = {};
    if (wanted) {
      const int64_t heads = p.n_heads + 2 * p.n_kv_heads;
      const T* source = static_cast<const T*>(p.workspace.qkv) + (unit.row * heads + head) * kDim + begin;
      const uint4 a = load_fresh(source);
      const uint4 b = load_fresh(source + kHalf);
      first = {{a.x, a.y, a.z, a.w}};
      second = {{b.x, b.y, b.z, b.w}};
    }
    if (layer.q_norm != nullptr) {
      const float total = lanes_sum<kLanes>(__fadd_rn(sum_of_squares(first, 0.0f), sum_of_squares(second, 0.0f)));
      if (!is_v) {
        // Division by a power of two is exact as a product.
        const float scale = rsqrtf(__fadd_rn(__fmul_rn(total, 1.0f / kDim), p.eps));
        const uint4* weights = shared.head_norms[is_k] + begin / kOctet;
        const uint4 c = weights[0];
        const uint4 d = weights[kHalf / kOctet];
        first = scale_and_weigh(first, scale, Octet<T>{{c.x, c.y, c.z, c.w}});
        second = scale_and_weigh(second, scale, Octet<T>{{d.x, d.y, d.z, d.w}});
      }
    }
    if (!is_v) {
      float a[kOctet];
      float b[kOctet];
      unpack(first, a);
      unpack(second, b);
      const float* cos = shared.angles[unit.row] + begin;
      const float* sin = cos + kHalf;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const float turned = turn(a[i], b[i], cos[i], -sin[i]);
        b[i] = turn(b[i], a[i], cos[i], sin[i]);
        a[i] = turned;
      }
      pack(a, first);
      pack(b, second);
    }
    if (!wanted) return;
    uint4* target = shared.heads[index] + begin / kOctet;
    target[0] = make_uint4(first.word[0], first.word[1], first.word[2], first.word[3]);
    target[kHalf / kOctet] = make_uint4(second.word[0], second.word[1], second.word[2], second.word[3]);
    const int64_t slot = p.out_cache_loc[unit.row];
    if (is_q || slot < 0 || slot >= p.pool_size) return;
    T* pool = static_cast<T*>(is_v ? layer.v_buffer : layer.k_buffer) + begin +
              slot * (is_v ? p.v_slot_stride : p.k_slot_stride) + unit.kv_head * (is_v ? p.v_head_stride : p.k_head_stride);
    store_octet<true>(pool, first, kOctet);
    store_octet<true>(pool + kHalf, second, kOctet);
  }
};

}  // namespace astrai
