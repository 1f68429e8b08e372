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
  using Operands::first_key_of, Operands::keys_of, Operands::load_slots, Operands::low_of, Operands::share_of,
      Operands::values_of;
  using Operands::kBytes, Operands::kKeyParts, Operands::kPrefetch, Operands::kTile, Operands::kValueParts;
  using Operands::lane, Operands::of_key, Operands::uniform, Operands::warp;
  using typename Operands::KeyScales, typename Operands::Queries, typename Operands::Row, typename Operands::Shared;
  using typename Operands::Share, typename Operands::Unit;

  // The running softmax.
  float out[kRowTiles][kValueParts][4][4];
  float maximum[kRowTiles];  // of row g + 8 r
  float sum[kRowTiles][2];   // of rows 8 r + 2 q and the next

  __device__ __forceinline__ DecodeWarp(const typename KV::Params& params, Shared& memory) : Operands(params, memory) {}

  /// Scores of a warp's granules: [granule][eight keys][row g: keys 2q, 2q+1; row g+8: the same].
  using Scores = float[kTile][2][4];

  __device__ __forceinline__ void multiply(Scores& s) const {
    const uint4* fragments = this->queries();
    if constexpr (KV::kFresh) fragments = shared.queries + lane;
    const uint32_t source = static_cast<uint32_t>(__cvta_generic_to_shared(fragments));
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

  /// This warp's share of the unit. is_first: of those that the block takes.
  __device__ __forceinline__ void attend(const Unit& unit, bool is_first) {
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
    const int first_query = unit.seq_len - (KV::kFresh ? 1 : p.q_len);  // its position
    const int span = !KV::kFresh && p.window ? p.window : 0x3fffffff;  // with one query, `low` says it all
    const int low = low_of(unit);
    // Every row sees what lies between these two.
    const int all_from = KV::kFresh ? low : max(begin, first_query + p.q_len - span);
    const int all_to = min(end, first_query + 1);
    int high[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const Row row_g = this->row(unit, g + 8 * r);
      high[r] = !KV::kFresh && row_g.exists ? first_query + row_g.query + 1 : end;
    }

    const Share share = share_of(unit);
    if (!KV::kFresh && share.is_empty()) {
      if (is_first) join();
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

    int now = 0;
    int next_slots = 0;
    KeyScales scales = {};
    // Whether the chunk ends with the newest position; in a warp's last granules all keys from `newest_at` on are then
    // the one at hand: the newest and, as elsewhere, what lies behind the end; all of them where no other is visible,
    // since those before are clamped to it, too.
    const bool has_newest = KV::kFresh && end == first_query + 1;
    const auto newest_at = [&](int granule) {
      return (low == first_query ? begin : first_query) - first_key_of(unit, granule);
    };
    if constexpr (KV::kFresh) {
      // Two granules at once: with them, one step of the warp has the newest position and what is clamped to it.
      static_assert(kPrefetch && kTile == 2 && kRowTiles == 1 && !kExtras, "what the lines below rely on");
      typename Operands::Heads heads(p.heads);
      if (is_first && !p.overlap) join();
      heads.fetch(request);
      if (!share.is_empty()) {
        // The newest slot may be read here, too, while this very block writes it: what comes of that is replaced.
        now = load_slots(unit, skipped);
        next_slots = load_slots(unit, skipped + 2);
        this->load_keys(k_base, k_stride, now, 0);
        this->load_values(v_base, v_stride, now, 0);
      }
      if (is_first && p.overlap) join();
      heads.prepare(request, kv_head, this->group, has_newest, shared);
      if (share.is_empty()) return;
    } else {
      now = load_slots(unit, skipped);
      next_slots = load_slots(unit, skipped + 2);
      // Keys of earlier steps are there already; the kernel before this one writes those of this step.
      constexpr int kEarly = KV::kNarrow ? 2 : kTile;  // scales come for two granules at once
      const int last_position = first_key_of(unit, skipped + kEarly - 1) + kGranule;
      const bool early = p.overlap && min(last_position, end) <= first_query;
      if (is_first && !early) join();
      scales = this->load_scales(k_scale, v_scale, now);
      if (kPrefetch) {
        this->load_keys(k_base, k_stride, now, 0);
        this->load_values(v_base, v_stride, now, 0);
      }
      if (is_first && early) join();
      Queries query;
      this->load_queries(unit, query);
      this->keep_queries(query);
    }
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
        if (has_newest && !has_more) {
#pragma unroll
          for (int t = 0; t < kTile; ++t) this->put_newest_key(t, newest_at(granule + step + t));
        }
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
          const int position = first_key_of(unit, granule + step + t);
          const bool all_visible = position >= all_from && position + kGranule <= all_to && !(kExtras && p.mask);
          finish_scores(s[t], position, high, low, end, span, request, first_query, all_visible);
        }
        raise_maxima(s);
        if (has_newest && !has_more) {
#pragma unroll
          for (int t = 0; t < kTile; ++t) this->put_newest_value(t, newest_at(granule + step + t));
        }
        accumulate(s, scales, step);
        if (kPrefetch && has_more) this->load_values(v_base, v_stride, from, half);
      }
      now = next_slots;
      scales = next_scales;
      next_slots = load_slots(unit, granule + 4);
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
          float4* target = reinterpret_cast<float4*>(&this->warp_rows()[warp][8 * r + 2 * q + column][begin]);
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
