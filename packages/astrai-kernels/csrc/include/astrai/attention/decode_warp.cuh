// What one warp does for a chunk of keys: loads, the two products, the online softmax. See decode.cuh.
#pragma once

#include "astrai/attention/decode_shape.cuh"
#include "astrai/attention/mma.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/types.cuh"

namespace astrai {

template <typename T, typename KV, int kDim, int kRowTiles, bool kExtras>
struct DecodeWarp {
  static constexpr int kWarps = decode_shape(kDim, kRowTiles).warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kTile = decode_shape(kDim, kRowTiles).tile;  // granules held at once
  static constexpr int kKeyParts = (kDim + 31) / 32;    // 32-wide parts of a key; a thread holds 8 elements of each
  static constexpr int kValueParts = (kDim + 63) / 64;  // 64-wide parts of a value; likewise
  static constexpr bool kPrefetch = kDim <= 192;  // the next step's keys and values during this one; registers allow it
  static constexpr int kRowStride = 32 * kKeyParts + 4;           // floats between rows in shared memory

  struct Shared {
    float out[kWarps][kRows][kRowStride];
    float ml[kWarps][kRows][2];
    AttentionChunk chunk;  // what the end of a unit needs again; registers are scarce until then
    int is_last;
  };

  const AttentionParams& p;
  Shared& shared;
  int warp, lane, g, q;

  // The unit of work.
  int chunk_index, kv_head, group, first_row, n_rows;

  // Keys and values in flight, the running softmax.
  uint4 keys[kTile][2][kKeyParts];
  uint4 values[kTile][4][kValueParts];
  float out[kRowTiles][kValueParts][4][4];
  float maximum[kRowTiles];  // of row g + 8 r
  float sum[kRowTiles];      // of this lane's keys

  __device__ __forceinline__ DecodeWarp(const AttentionParams& params, Shared& memory)
      : p(params), shared(memory), warp(uniform(static_cast<int>(threadIdx.x) / 32)),
        lane(static_cast<int>(threadIdx.x) % 32), g(lane / 4), q(lane % 4) {}

  /// Tell the compiler that a value is the same in all lanes.
  static __device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

  /// Query row of a column: its query within the request, and its head.
  struct Row {
    bool exists;
    int query, head;
  };
  __device__ __forceinline__ Row row(int column) const {
    const int index = first_row + column;
    const int query = index / group;
    return {index < n_rows, query, kv_head * group + index - query * group};
  }

  /// This lane's part of the queries. It waits in the warp's share of `shared.out`, which is idle until the end.
  __device__ __forceinline__ uint4* queries() const { return reinterpret_cast<uint4*>(&shared.out[warp][0][0]) + lane; }
  static_assert(kKeyParts * 2 * 32 * 16 <= 8 * kRowStride * 4, "the queries fit there");

  /// As A fragments of rows g and g + 8, two steps a part; rows that do not exist are zero.
  __device__ __forceinline__ void load_queries(int request) {
    uint4 value[2][kKeyParts];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row row_g = row(8 * r + g);
      const T* source = static_cast<const T*>(p.q) +
                        (static_cast<int64_t>(request) * p.q_len + row_g.query) * p.q_token_stride +
                        row_g.head * p.q_head_stride + 8 * q;
#pragma unroll
      for (int c = 0; c < kKeyParts; ++c) {
        value[r][c] = make_uint4(0, 0, 0, 0);
        if (r < kRowTiles && row_g.exists && (kDim % 32 == 0 || 32 * c + 8 * q < kDim)) {
          value[r][c] = *reinterpret_cast<const uint4*>(source + 32 * c);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kKeyParts; ++c) {
      const uint4 a = value[0][c];
      const uint4 b = value[1][c];
      queries()[64 * c] = make_uint4(a.x, b.x, a.y, b.y);
      queries()[64 * c + 32] = make_uint4(a.z, b.z, a.w, b.w);
    }
  }

  /// Keys of kTile granules from half `half` of `slots`; `base` points at this lane's bytes of slot 0.
  __device__ __forceinline__ void load_keys(const char* base, uint32_t stride, int slots, int half) {
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t slot = __shfl_sync(0xffffffffu, slots, (half + t) * kGranule + g + 8 * i);
        const char* source = base + static_cast<uint64_t>(slot) * stride;
#pragma unroll
        for (int c = 0; c < kKeyParts; ++c) {
          if (kDim % 32 == 0 || 32 * c + 8 * q < kDim) {
            keys[t][i][c] = load_streaming(source + 64 * c);
          } else {
            keys[t][i][c] = make_uint4(0, 0, 0, 0);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void load_values(const char* base, uint32_t stride, int slots, int half) {
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 2 * q + (i & 1) + 8 * (i >> 1);
        const uint32_t slot = __shfl_sync(0xffffffffu, slots, (half + t) * kGranule + key);
        const char* source = base + static_cast<uint64_t>(slot) * stride;
#pragma unroll
        for (int c = 0; c < kValueParts; ++c) {
          if (kDim % 64 == 0 || 64 * c + 8 * g < kDim) {
            values[t][i][c] = load_streaming(source + 128 * c);
          } else {
            values[t][i][c] = make_uint4(0, 0, 0, 0);
          }
        }
      }
    }
  }

  /// Scores of a warp's granules: [granule][eight keys][row g: keys 2q, 2q+1; row g+8: the same].
  using Scores = float[kTile][2][4];

  __device__ __forceinline__ void multiply(Scores& s) const {
    const uint32_t source = static_cast<uint32_t>(__cvta_generic_to_shared(queries()));
    // Granule by granule, though the queries are then read once for each: rows g+8 of a finished granule are free.
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[t][i / 4][i % 4] = 0.0f;
#pragma unroll
      for (int c = 0; c < kKeyParts; ++c) {
        const uint4 first = load_shared(source + 1024 * c);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma<T>(s[t][i], first.x, first.y, first.z, first.w, keys[t][i][c].x, keys[t][i][c].y);
        }
        const uint4 second = load_shared(source + 1024 * c + 512);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma<T>(s[t][i], second.x, second.y, second.z, second.w, keys[t][i][c].z, keys[t][i][c].w);
        }
      }
    }
  }

  /// Scale, cap and mask the scores of one granule whose first key is at `position`. Row r sees the keys from
  /// high[r] - span up to high[r], as far as they lie within [low, end).
  __device__ __forceinline__ void finish_scores(float (&s)[2][4], int position, const int (&high)[kRowTiles], int low,
                                                int end, int span, int request, int first_query,
                                                bool all_visible) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2 * kRowTiles; ++e) {
        if constexpr (kExtras) {
          float score = s[i][e] * p.scale;
          if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
          s[i][e] = score * kLog2e;
        } else {
          s[i][e] *= p.scale * kLog2e;
        }
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
      sum[r] *= factor;
      const float even = __shfl_sync(0xffffffffu, factor, 8 * q);
      const float odd = __shfl_sync(0xffffffffu, factor, 8 * q + 4);
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

  __device__ __forceinline__ void accumulate(const Scores& s) {
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      uint32_t weights[kRowTiles][2];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float even = exp2_fast(s[t][i][2 * r] - maximum[r]);
          const float odd = exp2_fast(s[t][i][2 * r + 1] - maximum[r]);
          sum[r] += even + odd;
          weights[r][i] = pack_pair<T>(even, odd);
        }
      }
#pragma unroll
      for (int c = 0; c < kValueParts; ++c) {
        const uint32_t* v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = reinterpret_cast<const uint32_t*>(&values[t][i][c]);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const uint32_t a0 = low_halves(v[0][m], v[1][m]);
          const uint32_t a1 = high_halves(v[0][m], v[1][m]);
          const uint32_t a2 = low_halves(v[2][m], v[3][m]);
          const uint32_t a3 = high_halves(v[2][m], v[3][m]);
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

  /// This warp's share of the chunk.
  __device__ __forceinline__ void attend(const AttentionChunk& chunk, bool is_first) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      maximum[r] = kNoMaximum;
      sum[r] = 0.0f;
#pragma unroll
      for (int c = 0; c < kValueParts; ++c) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) out[r][c][m][i] = 0.0f;
        }
      }
    }
    const int begin = uniform(chunk.begin);
    const int end = uniform(chunk.end);
    const int request = uniform(chunk.request);
    const int first_query = uniform(chunk.seq_len) - p.q_len;  // its position
    const int span = p.window ? p.window : 0x3fffffff;
    // What the first query row sees begins here; no row sees anything before it.
    const int low = max(begin, first_query + 1 - span);
    // Every row sees what lies between these two.
    const int all_from = max(begin, first_query + p.q_len - span);
    const int all_to = min(end, first_query + 1);
    int high[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const Row row_g = row(g + 8 * r);
      high[r] = row_g.exists ? first_query + row_g.query + 1 : end;
    }

    const int n_granules = (end - begin - warp * kGranule + kWarps * kGranule - 1) / (kWarps * kGranule);
    const int skipped = (low - begin) / (kWarps * kGranule) / 2 * 2;
    if (skipped >= n_granules) {
      if (is_first) join();
      return;
    }

    const char* k_base = static_cast<const char*>(p.k) + 16 * q +
                         (kv_head * p.k_head_stride + (KV::kPaged ? 0 : request * p.k_batch_stride)) * sizeof(T);
    const char* v_base = static_cast<const char*>(p.v) + 16 * g +
                         (kv_head * p.v_head_stride + (KV::kPaged ? 0 : request * p.v_batch_stride)) * sizeof(T);
    const uint32_t k_stride = static_cast<uint32_t>(p.k_slot_stride) * sizeof(T);
    const uint32_t v_stride = static_cast<uint32_t>(p.v_slot_stride) * sizeof(T);
    const int32_t* table = KV::kPaged ? p.req_to_token + uniform(chunk.table_row) * p.table_stride : nullptr;

    // Slots of two granules, one a lane. Positions outside the chunk repeat one inside: what is read is always owned.
    const auto load_slots = [&](int granule) {
      int position = begin + ((granule + lane / kGranule) * kWarps + warp) * kGranule + lane % kGranule;
      position = max(min(position, end - 1), low);
      return KV::kPaged ? table[position] : position;
    };

    int slots = load_slots(skipped);
    int next_slots = load_slots(skipped + 2);
    // Keys of earlier steps are there already; the kernel before this one writes those of this step.
    const int last_position = begin + ((skipped + kTile - 1) * kWarps + warp) * kGranule + kGranule;
    const bool early = p.overlap && min(last_position, end) <= first_query;
    if (is_first && !early) join();
    if constexpr (kPrefetch) {
      load_keys(k_base, k_stride, slots, 0);
      load_values(v_base, v_stride, slots, 0);
    }
    if (is_first && early) join();
    load_queries(request);
#pragma unroll 1
    for (int granule = skipped; granule < n_granules; granule += 2) {
#pragma unroll
      for (int step = 0; step < 2; step += kTile) {
        if (step > 0 && granule + step >= n_granules) break;
        const bool has_next = granule + step + kTile < n_granules;
        constexpr bool kWhole = kTile == 2;
        const int from = kWhole || step > 0 ? next_slots : slots;
        const int half = kWhole || step > 0 ? 0 : 1;
        if constexpr (!kPrefetch) load_keys(k_base, k_stride, slots, step);
        Scores s;
        multiply(s);
        if constexpr (!kPrefetch) load_values(v_base, v_stride, slots, step);
        if (kPrefetch && has_next) load_keys(k_base, k_stride, from, half);
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          const int position = begin + ((granule + step + t) * kWarps + warp) * kGranule;
          const bool all_visible = position >= all_from && position + kGranule <= all_to && !(kExtras && p.mask);
          finish_scores(s[t], position, high, low, end, span, request, first_query, all_visible);
        }
        raise_maxima(s);
        accumulate(s);
        if (kPrefetch && has_next) load_values(v_base, v_stride, from, half);
      }
      slots = next_slots;
      next_slots = load_slots(granule + 4);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    }
  }

  __device__ __forceinline__ void to_shared() {
    __syncwarp();  // the queries that lay here have been read by all lanes
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if (q == 0) {
        shared.ml[warp][8 * r + g][0] = maximum[r];
        shared.ml[warp][8 * r + g][1] = sum[r];
      }
#pragma unroll
      for (int column = 0; column < 2; ++column) {
#pragma unroll
        for (int c = 0; c < kValueParts; ++c) {
          const int begin = 64 * c + 8 * g;
          if (kDim % 64 != 0 && begin >= kDim) continue;
          float4* target = reinterpret_cast<float4*>(&shared.out[warp][8 * r + 2 * q + column][begin]);
          const float(&o)[4][4] = out[r][c];
          target[0] = make_float4(o[0][column], o[0][2 + column], o[1][column], o[1][2 + column]);
          target[1] = make_float4(o[2][column], o[2][2 + column], o[3][column], o[3][2 + column]);
        }
      }
    }
  }
};

}  // namespace astrai
