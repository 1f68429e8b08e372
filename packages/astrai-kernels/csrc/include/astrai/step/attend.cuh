// Attention of a step, a thread block's units: warps' results merged, and the chunks of a row merged by the block that ends
// last with one of them or, where there is little to read, by every block that needs the row (rows of the o projection).
#pragma once

#include "astrai/step/attend_warp.cuh"
#include "astrai/step/heads.cuh"
#include "astrai/step/trace.cuh"

namespace astrai {

constexpr int kPartsAtOnce = 6;  // under way when the parts of a row are merged

template <typename T>
__device__ __forceinline__ uint2 pack_four(const float4& value, float factor) {
  return make_uint2(pack_pair<T>(value.x * factor, value.y * factor), pack_pair<T>(value.z * factor, value.w * factor));
}

__device__ __forceinline__ void add_part(float4& value, float old, const float4& part, float factor) {
  value.x = fmaf(part.x, factor, value.x * old);
  value.y = fmaf(part.y, factor, value.y * old);
  value.z = fmaf(part.z, factor, value.z * old);
  value.w = fmaf(part.w, factor, value.w * old);
}

/// Of one query head: the parts of a row's chunks, merged in their order. The eight elements from `d` on.
template <typename T, int kDim>
__device__ __forceinline__ uint4 merge_parts(const StepParams& p, const StepPlan& plan, int row, int kv_head, int index,
                                             int d) {
  float top = kStepNoMaximum;
  float total = 0.0f;
  float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float4 high = low;
  const int end = plan.first[row + 1];
  const int stride = p.n_kv_heads * kStepHeads;  // lines from one part to the next
  const int line = (plan.first[row] * p.n_kv_heads + kv_head) * kStepHeads + index;
  const float* out = p.workspace.part_out + line * kDim + d;
  const float* out_ml = p.workspace.part_ml + 2 * line;
#pragma unroll 1
  for (int begin = plan.first[row]; begin < end; begin += kPartsAtOnce) {
    float2 ml[kPartsAtOnce];
    float4 first[kPartsAtOnce], second[kPartsAtOnce];
    float higher = top;
#pragma unroll
    for (int j = 0; j < kPartsAtOnce; ++j) {
      ml[j] = make_float2(kStepNoMaximum, 0.0f);
      first[j] = second[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (begin + j >= end) continue;
      ml[j] = __ldcg(reinterpret_cast<const float2*>(out_ml));
      first[j] = __ldcg(reinterpret_cast<const float4*>(out));
      second[j] = __ldcg(reinterpret_cast<const float4*>(out + 4));
      out += stride * kDim;
      out_ml += stride * 2;
    }
#pragma unroll
    for (int j = 0; j < kPartsAtOnce; ++j) higher = fmaxf(higher, ml[j].x);
    float old = exp2_fast(top - higher);
    top = higher;
    total *= old;
#pragma unroll
    for (int j = 0; j < kPartsAtOnce; ++j) {
      const float factor = exp2_fast(ml[j].x - higher);
      total = fmaf(ml[j].y, factor, total);
      add_part(low, old, first[j], factor);
      add_part(high, old, second[j], factor);
      old = 1.0f;
    }
  }
  const float inverse = total > 0.0f ? __frcp_rn(total) : 0.0f;
  const uint2 a = pack_four<T>(low, inverse);
  const uint2 b = pack_four<T>(high, inverse);
  return make_uint4(a.x, a.y, b.x, b.y);
}

/// Fill the rows of attention's result, from the parts of all chunks.
template <typename T, int kDim>
__device__ __forceinline__ void fill_merged(char* target, const StepParams& p, const StepPlan& plan) {
  constexpr int kOctets = kDim / kOctet;
  const int octets = p.n_heads * kOctets;
#pragma unroll 1
  for (int row = 0; row < p.rows; ++row) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < octets; i += kStepWorkers) {
      const int head = i / kOctets;
      const int kv_head = head * p.group_inverse >> 16;
      *reinterpret_cast<uint4*>(normed_place(target, row, i, p.rows)) =
          merge_parts<T, kDim>(p, plan, row, kv_head, head - kv_head * p.group, i % kOctets * kOctet);
    }
  }
}

template <typename T, int kDim>
struct Attend : AttendWarp<T, kDim> {
  using Warp = AttendWarp<T, kDim>;
  using Warp::p, Warp::shared;

  float* results;  // [warps][heads][kDim + kOutPad], in scratch

  __device__ __forceinline__ Attend(const StepParams& params, StepShared<kDim>& memory, float* scratch)
      : Warp(params, memory), results(scratch) {}

  __device__ __forceinline__ void* target(const StepUnit& unit, int index, int d) const {
    const int head = unit.kv_head * p.group + index;
    return static_cast<T*>(p.workspace.attended) + (static_cast<int64_t>(unit.row) * p.n_heads + head) * kDim + d;
  }

  /// Merge what the warps left: the result itself where the row has one chunk, else this chunk's part of it.
  __device__ __forceinline__ void merge_warps(const StepUnit& unit) const {
    const bool is_final = !shared.plan.late && unit.count == 1;
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < p.group * (kDim / 4); e += kStepWorkers) {
      const int index = e / (kDim / 4);
      const int d = e % (kDim / 4) * 4;
      float top = shared.ml[0][index][0];
#pragma unroll
      for (int w = 1; w < kStepWarps; ++w) top = fmaxf(top, shared.ml[w][index][0]);
      float total = 0.0f;
      float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kStepWarps; ++w) {
        const float factor = exp2_fast(shared.ml[w][index][0] - top);
        const float4 part =
            *reinterpret_cast<const float4*>(results + w * out_floats<kDim>() + index * (kDim + kOutPad) + d);
        total = fmaf(factor, shared.ml[w][index][1], total);
        value.x = fmaf(factor, part.x, value.x);
        value.y = fmaf(factor, part.y, value.y);
        value.z = fmaf(factor, part.z, value.z);
        value.w = fmaf(factor, part.w, value.w);
      }
      if (is_final) {
        *static_cast<uint2*>(target(unit, index, d)) = pack_four<T>(value, total > 0.0f ? __frcp_rn(total) : 0.0f);
      } else {
        const int64_t line = (static_cast<int64_t>(unit.part) * p.n_kv_heads + unit.kv_head) * kStepHeads + index;
        *reinterpret_cast<float4*>(p.workspace.part_out + line * kDim + d) = value;
        if (d == 0) *reinterpret_cast<float2*>(p.workspace.part_ml + 2 * line) = make_float2(top, total);
      }
    }
  }

  __device__ __forceinline__ void merge_chunks(const StepUnit& unit) const {
    constexpr int kOctets = kDim / kOctet;
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < p.group * kOctets; e += kStepWorkers) {
      const int index = e / kOctets;
      const int d = e % kOctets * kOctet;
      *static_cast<uint4*>(target(unit, index, d)) =
          merge_parts<T, kDim>(p, shared.plan, unit.row, unit.kv_head, index, d);
    }
  }

  /// All units of this block, of a layer whose qkv projection is about to end. Keys and values of earlier steps are asked for
  /// before that end.
  template <bool kTrace>
  __device__ __forceinline__ void run(const StepLayer& layer, const StepTrace<kTrace>& trace) {
    const StepPlan& plan = shared.plan;
    const HeadTeam<T, kDim> team;
    int index = static_cast<int>(blockIdx.x);
    StepUnit unit(plan, p, min(index, plan.units - 1));
    if (index < plan.units) {
      this->table = p.req_to_token + plan.request[unit.row] * p.table_stride;
      this->begin(unit, layer, shared.first_slots[threadIdx.x]);
    }
    team.fetch_norms(layer, shared);  // behind the keys: it waits for what it loads
    await_keeper();
    trace(kStarted);
#pragma unroll 1
    while (index < plan.units) {
      if (!team.is_idle()) team.prepare(p, layer, unit, shared);
      workers_sync();
      trace(kNormed);
      this->attend(unit);
      trace(kFirstStage);
      this->store(results);
      workers_sync();
      trace(kMultiplied);
      merge_warps(unit);
      if (takes_ticket(plan, unit)) {
        hand_over();
        await_keeper();
        if (shared.is_last) merge_chunks(unit);
      }
      trace(kStored);
      index += static_cast<int>(gridDim.x);
      if (index < plan.units) {
        unit = StepUnit(plan, p, index);
        this->begin(unit, layer, this->first_slots(unit));
        workers_sync();  // heads and results are free again
      }
    }
  }
};

}  // namespace astrai
