// Attention of a step, one warp: the same products and the same online softmax as decode attention (attention/decode.cuh),
// for one query row a request and up to eight query heads a kv head. Maxima are whole numbers in the log2 domain.
#pragma once

#include "astrai/attention/mma.cuh"
#include "astrai/step/plan.cuh"

namespace astrai {

constexpr float kStepNoMaximum = -1e30f;  // finite, so that differences of maxima are never NaN

template <typename T, int kDim>
struct AttendWarp {
  static_assert(kDim == 64 || kDim == 128, "head sizes of dense models");
  static constexpr int kTile = kDim == 64 ? 2 : 1;  // granules at once; registers hold no more beside the stream
  static constexpr int kKeyParts = kDim / 32;
  static constexpr int kValueParts = kDim / 64;

  const StepParams& p;
  StepShared<kDim>& shared;
  int warp, lane, g, q;

  // Keys and values under way, and where the next ones are. They are cleared, though nobody reads what was not loaded: what
  // may reach its use without a value is live from the start of the kernel, and takes its registers from the hot loop.
  uint4 keys[kTile][2][kKeyParts];
  uint4 values[kTile][4][kValueParts];
  int next_slots;
  const int32_t* table;
  const char* k_base;
  const char* v_base;

  float out[kValueParts][4][4];
  float maximum;  // of head g
  float sum[2];   // of heads 2q and 2q + 1

  __device__ __forceinline__ AttendWarp(const StepParams& params, StepShared<kDim>& memory)
      : p(params),
        shared(memory),
        warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        g(lane / 4),
        q(lane % 4),
        keys{},
        values{},
        next_slots(0),
        table(nullptr),
        k_base(nullptr),
        v_base(nullptr) {}

  /// First key of granule `t` of this warp's step `step`.
  __device__ __forceinline__ int granule(const StepUnit& unit, int step, int t) const {
    return unit.begin + ((step * kTile + t) * kStepWarps + warp) * kStepGranule;
  }
  __device__ __forceinline__ int steps(const StepUnit& unit) const {
    const int keys_left = unit.end - unit.begin - warp * kStepGranule;
    constexpr int kStride = kTile * kStepWarps * kStepGranule;
    return keys_left <= 0 ? 0 : (keys_left + kStride - 1) / kStride;
  }

  /// Slots of a step's keys, one a lane. The newest key is not read from the pool, which this step writes, and what lies
  /// behind the chunk repeats its last one: what is read is always owned.
  __device__ __forceinline__ int load_slots(const StepUnit& unit, int step) const {
    const int position = granule(unit, step, kTile == 2 ? lane / kStepGranule : 0) + lane % kStepGranule;
    return table[max(min(position, min(unit.end, unit.len - 1) - 1), 0)];
  }

  /// Granules behind the chunk are zeros.
  __device__ __forceinline__ void load_keys(const StepUnit& unit, int step, int slots) {
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      if (t > 0 && granule(unit, step, t) >= unit.end) {
#pragma unroll
        for (int i = 0; i < 2 * kKeyParts; ++i) keys[t][i / kKeyParts][i % kKeyParts] = make_uint4(0, 0, 0, 0);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t slot = __shfl_sync(0xffffffffu, slots, t * kStepGranule + g + 8 * i);
        const char* source = k_base + slot * p.k_slot_stride * 2;
#pragma unroll
        for (int c = 0; c < kKeyParts; ++c) keys[t][i][c] = load_streaming(source + 64 * c);
      }
    }
  }

  __device__ __forceinline__ void load_values(const StepUnit& unit, int step, int slots) {
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      if (t > 0 && granule(unit, step, t) >= unit.end) {
#pragma unroll
        for (int i = 0; i < 4 * kValueParts; ++i) values[t][i / kValueParts][i % kValueParts] = make_uint4(0, 0, 0, 0);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 2 * q + (i & 1) + 8 * (i >> 1);
        const int64_t slot = __shfl_sync(0xffffffffu, slots, t * kStepGranule + key);
        const char* source = v_base + slot * p.v_slot_stride * 2;
#pragma unroll
        for (int c = 0; c < kValueParts; ++c) values[t][i][c] = load_streaming(source + 128 * c);
      }
    }
  }

  /// Ask for the first keys and values: they are of earlier steps and wait for nothing in this one.
  __device__ __forceinline__ void begin(const StepUnit& unit, const StepLayer& layer, const int2& slots) {
    k_base = static_cast<const char*>(layer.k_buffer) + (unit.kv_head * p.k_head_stride + 8 * q) * 2;
    v_base = static_cast<const char*>(layer.v_buffer) + (unit.kv_head * p.v_head_stride + 8 * g) * 2;
    next_slots = slots.y;
    if (steps(unit) == 0) return;
    load_keys(unit, 0, slots.x);
    load_values(unit, 0, slots.x);
  }

  /// Slots of a unit's first two steps. They are the same in every layer.
  __device__ __forceinline__ int2 first_slots(const StepUnit& unit) {
    table = p.req_to_token + shared.plan.request[unit.row] * p.table_stride;
    return make_int2(load_slots(unit, 0), load_slots(unit, 1));
  }

  /// Take the newest key and value from shared memory; whatever lies behind it, too, since it must be finite.
  __device__ __forceinline__ void patch(const StepUnit& unit, int step) {
    if (!unit.has_newest()) return;
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      const int position = granule(unit, step, t);
      if (position + kStepGranule < unit.len) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (position + g + 8 * i < unit.len - 1) continue;
#pragma unroll
        for (int c = 0; c < kKeyParts; ++c) keys[t][i][c] = shared.heads[kStepHeads][4 * c + q];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (position + 2 * q + (i & 1) + 8 * (i >> 1) < unit.len - 1) continue;
#pragma unroll
        for (int c = 0; c < kValueParts; ++c) values[t][i][c] = shared.heads[kStepHeads + 1][8 * c + g];
      }
    }
  }

  using Scores = float[kTile][2][4];  // [granule][eight keys][head g: keys 2q, 2q + 1; two that are not used]

  __device__ __forceinline__ void multiply(Scores& s, bool has_head) const {
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[t][i / 4][i % 4] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < kKeyParts; ++c) {
      const uint4 head = has_head ? shared.heads[g][4 * c + q] : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 key = keys[t][i][c];
          mma<T>(s[t][i], head.x, 0u, head.y, 0u, key.x, key.y);
          mma<T>(s[t][i], head.z, 0u, head.w, 0u, key.z, key.w);
        }
      }
    }
  }

  __device__ __forceinline__ void raise_maximum(const Scores& s) {
    float highest = -infinity();
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) highest = fmaxf(highest, fmaxf(s[t][i][0], s[t][i][1]));
    }
    if (!__any_sync(0xffffffffu, highest > maximum)) return;
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
    const float raised = fmaxf(maximum, ceilf(highest));
    const float factor = exp2_fast(maximum - raised);
    maximum = raised;
    const float even = __shfl_sync(0xffffffffu, factor, 8 * q);
    const float odd = __shfl_sync(0xffffffffu, factor, 8 * q + 4);
    sum[0] *= even;
    sum[1] *= odd;
#pragma unroll
    for (int c = 0; c < kValueParts; ++c) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        out[c][m][0] *= even;
        out[c][m][1] *= odd;
        out[c][m][2] *= even;
        out[c][m][3] *= odd;
      }
    }
  }

  __device__ __forceinline__ void accumulate(const Scores& s) {
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      uint32_t weights[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weights[i] = pack_pair<T>(exp2_fast(s[t][i][0] - maximum), exp2_fast(s[t][i][1] - maximum));
      }
      // Of the rounded weights, so that they add up to one: a single key's output is its value.
      constexpr uint32_t kOnes = pair_of_ones<T>();
      float total[4] = {};  // each sum twice
      mma<T>(total, kOnes, kOnes, kOnes, kOnes, weights[0], weights[1]);
      sum[0] += total[0];
      sum[1] += total[1];
#pragma unroll
      for (int c = 0; c < kValueParts; ++c) {
        const uint4(&v)[4][kValueParts] = values[t];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const auto word = [&](int i) {
            return m == 0 ? v[i][c].x : m == 1 ? v[i][c].y : m == 2 ? v[i][c].z : v[i][c].w;
          };
          mma<T>(out[c][m], low_halves(word(0), word(1)), high_halves(word(0), word(1)), low_halves(word(2), word(3)),
                 high_halves(word(2), word(3)), weights[0], weights[1]);
        }
      }
    }
  }

  /// This warp's keys; its queries, and the newest key, lie in shared memory.
  __device__ __forceinline__ void attend(const StepUnit& unit) {
    maximum = kStepNoMaximum;
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int c = 0; c < kValueParts; ++c) {
#pragma unroll
      for (int i = 0; i < 16; ++i) out[c][i / 4][i % 4] = 0.0f;
    }
    const bool has_head = g < p.group;
    const int n_steps = steps(unit);
    const float scale = p.scale * 1.44269504088896340736f;  // of the log2 domain
#pragma unroll 1
    for (int step = 0; step < n_steps; ++step) {
      const bool has_next = step + 1 < n_steps;
      patch(unit, step);
      Scores s;
      multiply(s, has_head);
      if (has_next) load_keys(unit, step + 1, next_slots);
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        const int position = granule(unit, step, t) + 2 * q;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            s[t][i][e] = position + 8 * i + e < unit.end ? s[t][i][e] * scale : -infinity();
          }
        }
      }
      raise_maximum(s);
      accumulate(s);
      if (has_next) {
        load_values(unit, step + 1, next_slots);
        next_slots = load_slots(unit, step + 2);
      }
    }
  }

  /// Leave the result where merge_warps (attend.cuh) finds it.
  __device__ __forceinline__ void store(float* results) const {
    float* const own = results + warp * out_floats<kDim>();
    if (q == 0) shared.ml[warp][g][0] = maximum;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      if (g == 0) shared.ml[warp][2 * q + column][1] = sum[column];
#pragma unroll
      for (int c = 0; c < kValueParts; ++c) {
        float4* target = reinterpret_cast<float4*>(own + (2 * q + column) * (kDim + kOutPad) + 64 * c + 8 * g);
        const float(&o)[4][4] = out[c];
        target[0] = make_float4(o[0][column], o[0][2 + column], o[1][column], o[1][2 + column]);
        target[1] = make_float4(o[2][column], o[2][2 + column], o[3][column], o[3][2 + column]);
      }
    }
  }
};

}  // namespace astrai
