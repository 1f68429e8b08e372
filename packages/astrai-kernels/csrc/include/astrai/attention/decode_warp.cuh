// What one warp does for a chunk of keys: the two products and the online softmax between them. See decode.cuh.
#pragma once

#include "astrai/attention/decode_operands.cuh"
#include "astrai/attention/mma.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/types.cuh"

namespace astrai {

template <typename T, typename KV, int kDim, int kRowTiles, bool kExtras>
struct DecodeWarp : DecodeOperands<T, KV, kDim, kRowTiles, kExtras> {
  using Operands = DecodeOperands<T, KV, kDim, kRowTiles, kExtras>;
  using Operands::g, Operands::keys, Operands::kv_head, Operands::p, Operands::q, Operands::shared, Operands::values;
  using Operands::kBytes, Operands::kKeyParts, Operands::kPrefetch, Operands::kTile, Operands::kValueParts;
  using Operands::kWarps, Operands::lane, Operands::of_key, Operands::uniform, Operands::warp;
  using typename Operands::KeyScales, typename Operands::Queries, typename Operands::Row, typename Operands::Shared;
  using typename Operands::Unit;

  // The running softmax.
  float out[kRowTiles][kValueParts][4][4];
  float maximum[kRowTiles];  // of row g + 8 r
  float sum[kRowTiles][2];   // of rows 8 r + 2 q and the next

  __device__ __forceinline__ DecodeWarp(const AttentionParams& params, Shared& memory) : Operands(params, memory) {}

  /// Scores of a warp's granules: [granule][eight keys][row g: keys 2q, 2q+1; row g+8: the same].
  using Scores = float[kTile][2][4];

  __device__ __forceinline__ void multiply(Scores& s) const {
    const uint32_t source = static_cast<uint32_t>(__cvta_generic_to_shared(this->queries()));
    // Granule by granule, though the queries are then read once for each: rows g+8 of a finished granule are free.
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[t][i / 4][i % 4] = 0.0f;
#pragma unroll
      for (int c = 0; c < kKeyParts; ++c) {
        const uint4 key[2] = {as_16_bit(keys[t][0][c]), as_16_bit(keys[t][1][c])};
        const uint4 first = load_shared(source + 1024 * c);
#pragma unroll
        for (int i = 0; i < 2; ++i) mma<T>(s[t][i], first.x, first.y, first.z, first.w, key[i].x, key[i].y);
        const uint4 second = load_shared(source + 1024 * c + 512);
#pragma unroll
        for (int i = 0; i < 2; ++i) mma<T>(s[t][i], second.x, second.y, second.z, second.w, key[i].z, key[i].w);
      }
    }
  }

  /// Multiply the scores by the scales of their keys; `half` as in accumulate.
  __device__ __forceinline__ void scale_scores(Scores& s, const KeyScales& scales, int half) const {
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = of_key(scales.k, half + t, 8 * (i / 2) + 2 * q + i % 2);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) s[t][i / 2][2 * r + i % 2] *= scale;
      }
    }
  }

  /// Scale, cap and mask the scores of one granule whose first key is at `position`. Row r sees the keys from
  /// high[r] - span up to high[r], as far as they lie within [low, end).
  __device__ __forceinline__ void finish_scores(float (&s)[2][4], int position, const int (&high)[kRowTiles], int low,
                                                int end, int span, int request, int first_query,
                                                bool all_visible) const {
    if (kExtras && p.softcap > 0.0f) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 2 * kRowTiles; ++e) {
          s[i][e] = p.softcap * tanhf(s[i][e] * p.scale / p.softcap) * kLog2e;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 2 * kRowTiles; ++e) s[i][e] *= p.scale * kLog2e;
      }
    }
    if (all_visible) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2 * kRowTiles; ++e) {
        const int key = position + 8 * i + 2 * q + e % 2;
        const int limit = high[e / 2];
        bool visible = key >= max(low, limit - span) && key < min(limit, end);
        if constexpr (kExtras) {
          if (p.mask && visible) {
            const int query = max(0, min(limit - 1 - first_query, p.q_len - 1));  // a row that does not exist has any
            visible = p.mask[(static_cast<int64_t>(request) * p.q_len + query) * p.mask_stride + key] != 0;
          }
        }
        if (!visible) s[i][e] = -infinity();
      }
    }
  }

  /// Raise the maxima where a score exceeds them. They are whole numbers, so the rescaling is exact.
  __device__ __forceinline__ void raise_maxima(const Scores& s) {
    float highest[kRowTiles];
    bool exceeds = false;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      highest[r] = -infinity();
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          highest[r] = fmaxf(highest[r], fmaxf(s[t][i][2 * r], s[t][i][2 * r + 1]));
        }
      }
      exceeds = exceeds || highest[r] > maximum[r];
    }
    if (!__any_sync(0xffffffffu, exceeds)) return;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      float value = highest[r];
      value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
      value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
      const float raised = fmaxf(maximum[r], ceilf(value));
      const float factor = exp2_fast(maximum[r] - raised);
      maximum[r] = raised;
      const float even = __shfl_sync(0xffffffffu, factor, 8 * q);
      const float odd = __shfl_sync(0xffffffffu, factor, 8 * q + 4);
      sum[r][0] *= even;
      sum[r][1] *= odd;
#pragma unroll
      for (int c = 0; c < kValueParts; ++c) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          out[r][c][m][0] *= even;
          out[r][c][m][1] *= odd;
          out[r][c][m][2] *= even;
          out[r][c][m][3] *= odd;
        }
      }
    }
  }

  /// half: of the slots that `scales` belong to, the first granule's.
  __device__ __forceinline__ void accumulate(const Scores& s, const KeyScales& scales, int half) {
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      uint32_t weights[kRowTiles][2];
      float v_scale[2][2];
      if constexpr (KV::kNarrow) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v_scale[i / 2][i % 2] = of_key(scales.v, half + t, 8 * (i / 2) + 2 * q + i % 2);
      }
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        uint32_t scaled[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float even = exp2_fast(s[t][i][2 * r] - maximum[r]);
          const float odd = exp2_fast(s[t][i][2 * r + 1] - maximum[r]);
          weights[r][i] = pack_pair<T>(even, odd);
          if constexpr (KV::kNarrow) {
            scaled[i] = pack_pair<T>(fminf(even * v_scale[i][0], kLargestHalf), fminf(odd * v_scale[i][1], kLargestHalf));
          }
        }
        // Of the rounded weights, so that they add up to one: a single key's output is its value.
        constexpr uint32_t kOnes = pair_of_ones<T>();
        float total[4] = {};  // each sum twice
        mma<T>(total, kOnes, kOnes, kOnes, kOnes, weights[r][0], weights[r][1]);
        sum[r][0] += total[0];
        sum[r][1] += total[1];
        if constexpr (KV::kNarrow) {
          weights[r][0] = scaled[0];
          weights[r][1] = scaled[1];
        }
      }
#pragma unroll
      for (int c = 0; c < kValueParts; ++c) {
        const uint4 v[4] = {as_16_bit(values[t][0][c]), as_16_bit(values[t][1][c]), as_16_bit(values[t][2][c]),
                            as_16_bit(values[t][3][c])};
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const auto word = [&](int i) { return m == 0 ? v[i].x : m == 1 ? v[i].y : m == 2 ? v[i].z : v[i].w; };
          const uint32_t a0 = low_halves(word(0), word(1));
          const uint32_t a1 = high_halves(word(0), word(1));
          const uint32_t a2 = low_halves(word(2), word(3));
          const uint32_t a3 = high_halves(word(2), word(3));
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) mma<T>(out[r][c][m], a0, a1, a2, a3, weights[r][0], weights[r][1]);
        }
      }
    }
  }

  static __device__ __forceinline__ void join() {
    pdl_wait();
    pdl_release();
  }

  // Whether the first loads of a unit are issued before the unit ahead of it is merged.
  static constexpr bool kAhead = decode_shape(kDim, kRowTiles).ahead && !kExtras && Operands::kPrefetch && !KV::kNarrow;
  int slots;        // of the first two granules of a unit, one a lane
  Queries query;    // of a unit that is ahead

  /// The part of a unit that falls to this warp, in granules of its own.
  struct Share {
    int skipped, end;
    __device__ __forceinline__ bool is_empty() const { return skipped >= end; }
  };
  /// What the first query row sees begins here; no row sees anything before it.
  __device__ __forceinline__ int low_of(const Unit& unit) const {
    const int span = p.window ? p.window : 0x3fffffff;
    return max(unit.begin, unit.seq_len - p.q_len + 1 - span);
  }
  __device__ __forceinline__ Share share_of(const Unit& unit) const {
    const int granules =
        (unit.end - unit.begin - warp * kGranule + kWarps * kGranule - 1) / (kWarps * kGranule);
    return {(low_of(unit) - unit.begin) / (kWarps * kGranule) / 2 * 2, granules};
  }

  /// Slots of two granules, one a lane. Positions outside the chunk repeat one inside: what is read is always owned.
  __device__ __forceinline__ int load_slots(const Unit& unit, int granule) const {
    const bool paged = KV::kPaged || p.req_to_token != nullptr;
    const int32_t* table = paged ? p.req_to_token + unit.table_row * p.table_stride : nullptr;
    int position = unit.begin + ((granule + lane / kGranule) * kWarps + warp) * kGranule + lane % kGranule;
    position = max(min(position, unit.end - 1), low_of(unit));
    return slot_of<KV>(table, position);
  }
  /// This lane's bytes of slot 0.
  __device__ __forceinline__ const char* keys_of(const Unit& unit) const {
    const bool paged = KV::kPaged || p.req_to_token != nullptr;
    return static_cast<const char*>(p.k) + 8 * kBytes * q +
           (unit.kv_head * p.k_head_stride + (paged ? 0 : unit.request * p.k_batch_stride)) * kBytes;
  }
  __device__ __forceinline__ const char* values_of(const Unit& unit) const {
    const bool paged = KV::kPaged || p.req_to_token != nullptr;
    return static_cast<const char*>(p.v) + 8 * kBytes * g +
           (unit.kv_head * p.v_head_stride + (paged ? 0 : unit.request * p.v_batch_stride)) * kBytes;
  }

  /// The first keys and values of a unit and its queries, while another is merged; `slots` are its.
  __device__ __forceinline__ void run_ahead(const Unit& unit) {
    if (share_of(unit).is_empty()) return;
    this->load_keys(keys_of(unit), static_cast<uint32_t>(p.k_slot_stride) * kBytes, slots, 0);
    this->load_values(values_of(unit), static_cast<uint32_t>(p.v_slot_stride) * kBytes, slots, 0);
    this->load_queries(unit, query);
  }

  /// This warp's share of the unit. is_ahead: run_ahead has been here. kAhead: `next` is the unit to come.
  __device__ __forceinline__ void attend(const Unit& unit, bool is_first, bool is_ahead, bool has_next,
                                         const Unit& next) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      maximum[r] = kNoMaximum;
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[r][i] = 0.0f;
#pragma unroll
      for (int c = 0; c < kValueParts; ++c) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) out[r][c][m][i] = 0.0f;
        }
      }
    }
    const int begin = unit.begin;
    const int end = unit.end;
    const int request = unit.request;
    const int first_query = unit.seq_len - p.q_len;  // its position
    const int span = p.window ? p.window : 0x3fffffff;
    const int low = low_of(unit);
    // Every row sees what lies between these two.
    const int all_from = max(begin, first_query + p.q_len - span);
    const int all_to = min(end, first_query + 1);
    int high[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const Row row_g = this->row(unit, g + 8 * r);
      high[r] = row_g.exists ? first_query + row_g.query + 1 : end;
    }

    const Share share = share_of(unit);
    if (share.is_empty()) {
      if (is_first) join();
      if (kAhead && has_next) slots = load_slots(next, share_of(next).skipped);
      return;
    }
    const int skipped = share.skipped;
    const int n_granules = share.end;
    const char* k_base = keys_of(unit);
    const char* v_base = values_of(unit);
    const uint32_t k_stride = static_cast<uint32_t>(p.k_slot_stride) * kBytes;
    const uint32_t v_stride = static_cast<uint32_t>(p.v_slot_stride) * kBytes;
    const float* k_scale = nullptr;
    const float* v_scale = nullptr;
    if constexpr (KV::kNarrow) {
      const bool paged = p.req_to_token != nullptr;
      k_scale = p.k_scale + kv_head + (paged ? 0 : request * p.k_scale_batch_stride);
      v_scale = p.v_scale + kv_head + (paged ? 0 : request * p.v_scale_batch_stride);
    }

    if (!is_ahead) slots = load_slots(unit, skipped);
    int now = slots;
    int next_slots = load_slots(unit, skipped + 2);
    // Keys of earlier steps are there already; the kernel before this one writes those of this step.
    constexpr int kEarly = KV::kNarrow ? 2 : kTile;  // scales come for two granules at once
    const int last_position = begin + ((skipped + kEarly - 1) * kWarps + warp) * kGranule + kGranule;
    const bool early = p.overlap && min(last_position, end) <= first_query;
    if (is_first && !early) join();
    KeyScales scales = this->load_scales(k_scale, v_scale, now);
    if (kPrefetch && !is_ahead) {
      this->load_keys(k_base, k_stride, now, 0);
      this->load_values(v_base, v_stride, now, 0);
    }
    if (is_first && early) join();
    if (!is_ahead) this->load_queries(unit, query);
    this->keep_queries(query);
#pragma unroll 1
    for (int granule = skipped; granule < n_granules; granule += 2) {
      const KeyScales next_scales = this->load_scales(k_scale, v_scale, next_slots);
#pragma unroll
      for (int step = 0; step < 2; step += kTile) {
        if (step > 0 && granule + step >= n_granules) break;
        const bool has_more = granule + step + kTile < n_granules;
        constexpr bool kWhole = kTile == 2;
        const int from = kWhole || step > 0 ? next_slots : now;
        const int half = kWhole || step > 0 ? 0 : 1;
        if constexpr (!kPrefetch) this->load_keys(k_base, k_stride, now, step);
        Scores s;
        multiply(s);
        if constexpr (KV::kNarrow) scale_scores(s, scales, step);
        if constexpr (!kPrefetch) {
          if (kExtras) __syncwarp();  // else ptxas lifts the loads above the product and runs out of registers
          this->load_values(v_base, v_stride, now, step);
        }
        if (kPrefetch && has_more) this->load_keys(k_base, k_stride, from, half);
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          const int position = begin + ((granule + step + t) * kWarps + warp) * kGranule;
          const bool all_visible = position >= all_from && position + kGranule <= all_to && !(kExtras && p.mask);
          finish_scores(s[t], position, high, low, end, span, request, first_query, all_visible);
        }
        raise_maxima(s);
        accumulate(s, scales, step);
        if (kPrefetch && has_more) this->load_values(v_base, v_stride, from, half);
      }
      now = next_slots;
      scales = next_scales;
      next_slots = load_slots(unit, granule + 4);
      // Behind the first products: the next unit's chunk has arrived by now, and its slots will by the end of this one.
      if (kAhead && has_next && granule == skipped) slots = load_slots(next, share_of(next).skipped);
    }
  }

  __device__ __forceinline__ void to_shared() {
    __syncwarp();  // the queries that lay here have been read by all lanes
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if (q == 0) shared.ml[warp][8 * r + g][0] = maximum[r];
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        if (g == 0) shared.ml[warp][8 * r + 2 * q + column][1] = sum[r][column];
#pragma unroll
        for (int c = 0; c < kValueParts; ++c) {
          const int begin = 64 * c + 8 * g;
          if (kDim % 64 != 0 && begin >= kDim) continue;
          float4* target = reinterpret_cast<float4*>(&shared.out[warp][8 * r + 2 * q + column][begin]);
          const float(&o)[4][4] = out[r][c];
          constexpr float kUnit = KV::kNarrow ? kWidenedUnit / kWeightUnit : 1.0f;
          const auto four = [&](int m) {
            return make_float4(o[m][column] * kUnit, o[m][2 + column] * kUnit, o[m + 1][column] * kUnit,
                               o[m + 1][2 + column] * kUnit);
          };
          target[0] = four(0);
          target[1] = four(2);
        }
      }
    }
  }
};

}  // namespace astrai
