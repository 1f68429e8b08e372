// One tile of queries against one tile of keys: copies, the two products, the online softmax. See prefill.cuh.
#pragma once

#include "astrai/attention/decode_shape.cuh"
#include "astrai/attention/params.h"
#include "astrai/attention/prefill_place.cuh"
#include "astrai/attention/prefill_shape.cuh"
#include "astrai/attention/tile_copies.cuh"
#include "astrai/common/types.cuh"

namespace astrai {

template <typename T, typename KV, int kDim, bool kExtras>
struct PrefillTile {
  static constexpr PrefillShape kShape = prefill_shape(kDim, !kExtras && KV::kPaged && !KV::kNarrow);
  static constexpr int kQueries = kShape.queries;
  static constexpr int kKeys = kShape.keys;
  static constexpr bool kAhead = kShape.ahead;
  static constexpr int kStages = kAhead ? 2 : 1;  // tiles of keys and of values in shared memory
  static constexpr int kRowTiles = kQueries / (16 * kPrefillWarps);  // m16 tiles of a warp
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kValueTiles = kDim / 8;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kStride = kDim + 8;       // elements between rows: an odd number of 16-byte units, no conflicts
  static constexpr int kUnits = kDim / 8;        // 16-byte units of a row
  static constexpr int kCopies = kKeys * kUnits / kPrefillThreads;  // of a thread for one tile of keys
  // Tiles of 16-bit elements, slots; then, for an e4m3 cache, scales and what cp.async brings before it is widened.
  static constexpr int kTileBytes = kKeys * kStride * 2;
  static constexpr int kSlotsAt = kQueries * kStride * 2 + 2 * kStages * kTileBytes;
  static constexpr int kScalesAt = kSlotsAt + (kStages + 1) * kKeys * 4;
  static constexpr int kNarrowAt = kScalesAt + 4 * kKeys * 4;
  static constexpr int kSharedBytes = KV::kNarrow ? kNarrowAt + 2 * kKeys * kDim : kScalesAt;
  static_assert(kSharedBytes <= 99 * 1024, "what the smallest of the supported devices gives a thread block");
  static_assert(kKeys * kUnits % kPrefillThreads == 0 && kQueries * kUnits % kPrefillThreads == 0, "whole copies");

  const AttentionParams& p;
  uint32_t q_tile, k_tile, v_tile;  // shared-memory addresses; with two stages, of the first
  int* slots;                       // [kStages + 1][kKeys] in shared memory: where the keys of this and the next tiles lie
  float* scales;                    // [2][2][kKeys]: of the keys and the values there
  unsigned char* narrow;            // [2][kKeys][kDim]: a tile of e4m3 keys and one of values
  int warp, lane, thread;

  // The tile's place: first_position of its first row, first_token of position 0, whether or not that is a query.
  int head, kv_head, request, table_row, seq_len, first_position, first_token;

  uint32_t queries[kAhead ? kSteps : 1][kRowTiles][4];
  float out[kRowTiles][kValueTiles][4];
  float maximum[kRowTiles][2];
  float sum[kRowTiles][2];  // of rows g and g + 8, the same in the four lanes that share a row

  __device__ __forceinline__ PrefillTile(const AttentionParams& params, unsigned char* memory)
      : p(params), q_tile(static_cast<uint32_t>(__cvta_generic_to_shared(memory))),
        k_tile(q_tile + kQueries * kStride * 2), v_tile(k_tile + kStages * kTileBytes),
        slots(reinterpret_cast<int*>(memory + kSlotsAt)), scales(reinterpret_cast<float*>(memory + kScalesAt)),
        narrow(memory + kNarrowAt),
        warp(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32), thread(static_cast<int>(threadIdx.x)) {}

  /// Elements of a head: head_dim 80 runs in the instance of 96.
  __device__ __forceinline__ int dim() const { return kDim == 96 ? p.head_dim : kDim; }
  __device__ __forceinline__ bool paged() const { return KV::kPaged || p.req_to_token != nullptr; }

  /// Tell the compiler that a value is the same in all lanes.
  static __device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

  /// Find the `index`-th tile to start. False: there is none.
  __device__ __forceinline__ bool find_tile(int index) {
    const PrefillPlaces<kQueries> places = {p, lane};
    PrefillPlace place;
    if (!(kShape.most_keys_first ? places.most_keys_first(index, place) : places.last_first(index, place))) return false;
    request = place.request;
    seq_len = uniform(p.seq_lens[request]);
    first_token = uniform(p.qo_indptr[request + 1]) - seq_len;
    first_position = place.row + uniform(p.qo_indptr[request]) - first_token;
    table_row = uniform(p.req_indices ? static_cast<int>(p.req_indices[request]) : request);
    return true;
  }

  __device__ __forceinline__ void copy_queries() const {
    const T* base = static_cast<const T*>(p.q) + (first_token + first_position) * p.q_token_stride + head * p.q_head_stride;
#pragma unroll
    for (int i = 0; i < kQueries * kUnits / kPrefillThreads; ++i) {
      const int index = thread + i * kPrefillThreads;
      const int row = index / kUnits;
      const int unit = index - row * kUnits;
      const bool exists = first_position + row < seq_len && unit * 8 < dim();
      const T* source = base + (exists ? row * p.q_token_stride + unit * 8 : 0);
      const uint32_t target = q_tile + (row * kStride + unit * 8) * 2;
      if (KV::kNarrow && p.rows_are_bfloat16) {
        const uint4 value = exists ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
        store_shared(target, half_from_bfloat16(value));
      } else {
        copy_async(target, source, exists);
      }
    }
  }

  /// Slot of this thread's key in the tile that begins at `position`; -1 outside [low, high).
  __device__ __forceinline__ int find_slot(int position, int low, int high) const {
    const int key = position + thread;
    if (thread >= kKeys || key < low || key >= high) return -1;
    const int32_t* table = paged() ? p.req_to_token + static_cast<int64_t>(table_row) * p.table_stride : nullptr;
    return slot_of<KV>(table, key);
  }

  __device__ __forceinline__ void copy_rows(uint32_t tile, const int* tile_slots, const void* buffer,
                                            int64_t slot_stride, int64_t head_stride, int64_t batch_stride) const {
    const T* base = static_cast<const T*>(buffer) + kv_head * head_stride + (paged() ? 0 : request * batch_stride);
#pragma unroll(kDim == 128 ? 2 : kCopies)  // there ptxas runs out of registers over the addresses of four
    for (int i = 0; i < kCopies; ++i) {
      const int index = thread + i * kPrefillThreads;
      const int row = index / kUnits;
      const int unit = index - row * kUnits;
      const int slot = tile_slots[row];
      const bool exists = slot >= 0 && unit * 8 < dim();
      copy_async(tile + (row * kStride + unit * 8) * 2, base + (exists ? slot * slot_stride + unit * 8 : 0), exists);
    }
  }

  static constexpr int kNarrowUnits = kDim / 16;  // 16-byte units of an e4m3 row

  /// As copy_rows, of an e4m3 cache: raw, to where widen() finds it. which: 0 keys, 1 values.
  __device__ __forceinline__ void copy_narrow(int which, const int* tile_slots, const void* buffer, int64_t slot_stride,
                                              int64_t head_stride, int64_t batch_stride) const {
    const char* base =
        static_cast<const char*>(buffer) + kv_head * head_stride + (paged() ? 0 : request * batch_stride);
    const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(narrow)) + which * kKeys * kDim;
    for (int index = thread; index < kKeys * kNarrowUnits; index += kPrefillThreads) {
      const int row = index / kNarrowUnits;
      const int unit = index - row * kNarrowUnits;
      const int slot = tile_slots[row];
      const bool exists = slot >= 0 && unit * 16 < dim();
      copy_async(target + index * 16, base + (exists ? slot * slot_stride + unit * 16 : 0), exists);
    }
  }

  /// Widen what this thread itself has copied, so no barrier is needed before; one must follow.
  __device__ __forceinline__ void widen(int which, uint32_t tile) const {
    const unsigned char* source = narrow + which * kKeys * kDim;
    for (int index = thread; index < kKeys * kNarrowUnits; index += kPrefillThreads) {
      const int row = index / kNarrowUnits;
      const int unit = index - row * kNarrowUnits;
      const uint4 raw = *reinterpret_cast<const uint4*>(source + index * 16);
      const uint32_t target = tile + (row * kStride + unit * 16) * 2;
      store_shared(target, widen_e4m3(make_uint2(raw.x, raw.y)));
      store_shared(target + 16, widen_e4m3(make_uint2(raw.z, raw.w)));
    }
  }

  /// Scales of the key (x) and the value (y) in `slot`; zero where there is none.
  __device__ __forceinline__ float2 find_scales(int slot) const {
    if (slot < 0) return make_float2(0.0f, 0.0f);
    const float* k = p.k_scale + kv_head + (paged() ? 0 : request * p.k_scale_batch_stride);
    const float* v = p.v_scale + kv_head + (paged() ? 0 : request * p.v_scale_batch_stride);
    return make_float2(k[slot * p.k_scale_stride] * kWidenedUnit, v[slot * p.v_scale_stride] * kWeightUnit);
  }
  /// This thread's key's scales to their place beside `tile_slots`.
  __device__ __forceinline__ void store_scales(const int* tile_slots, float2 scale) const {
    if (thread >= kKeys) return;
    scales_of(tile_slots)[thread] = scale.x;
    scales_of(tile_slots)[kKeys + thread] = scale.y;
  }
  __device__ __forceinline__ float* scales_of(const int* tile_slots) const { return scales + 2 * (tile_slots - slots); }

  using Scores = float[kRowTiles][kKeyTiles][4];

  /// Multiply scores by the scales of their keys, or weights, which saturate, by those of their values.
  template <bool kWeights>
  __device__ __forceinline__ void apply_scales(Scores& s, const float* of_keys) const {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float2 scale = *reinterpret_cast<const float2*>(of_keys + n * 8 + lane % 4 * 2);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[m][n][i] *= i % 2 == 0 ? scale.x : scale.y;
          if (kWeights) s[m][n][i] = fminf(s[m][n][i], kLargestHalf);
        }
      }
    }
  }

  __device__ __forceinline__ void load_queries(int index, int step) {
    const uint32_t source = q_tile + ((warp * 16 * kRowTiles + lane % 16) * kStride + lane / 16 * 8) * 2;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) load_matrices(queries[index][m], source + (m * 16 * kStride + step * 16) * 2);
  }

  __device__ __forceinline__ void multiply(Scores& s, uint32_t keys) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = 0.0f;
      }
    }
    const uint32_t k_source = keys + ((lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (!kAhead) load_queries(0, step);
      const auto& a = queries[kAhead ? step : 0];
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t b[4];
        load_matrices(b, k_source + (n * 8 * kStride + step * 16) * 2);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma<T>(s[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          mma<T>(s[m][n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
    }
  }

  /// Position of a score's query: row g + 8 * half of m16 tile m.
  __device__ __forceinline__ int query_position(int m, int half) const {
    return first_position + (warp * kRowTiles + m) * 16 + half * 8 + lane / 4;
  }

  __device__ __forceinline__ void mask_scores(Scores& s, int position, int high) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = query_position(m, half);
        const int from = p.window ? query + 1 - p.window : 0;
        const int to = min(query + 1, high);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = position + n * 8 + lane % 4 * 2 + i;
            bool visible = key >= from && key < to;
            if constexpr (kExtras) {
              const int64_t token = first_token + query;
              if (p.mask && visible && query < seq_len) visible = p.mask[token * p.mask_stride + key] != 0;
            }
            if (!visible) s[m][n][2 * half + i] = -infinity();
          }
        }
      }
    }
  }

  /// Before the mask: the cap would lift what is hidden.
  __device__ __forceinline__ void cap_scores(Scores& s) const {
    if (!(p.softcap > 0.0f)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = p.softcap * tanhf(s[m][n][i] * p.scale / p.softcap) / p.scale;
      }
    }
  }

  /// The first half of a step of the online softmax: raise the maxima where a score exceeds them. They are kept as whole
  /// numbers in the log2 domain, so they rise rarely and rescaling is exact.
  __device__ __forceinline__ void raise_maxima(const Scores& s, float scale_log2) {
    float top[kRowTiles][2];
    bool rises = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float value = s[m][0][2 * half];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) value = fmaxf(value, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        top[m][half] = value * scale_log2;
        rises = rises || top[m][half] > maximum[m][half];
      }
    }
    if (__any_sync(0xffffffffu, rises)) raise(top);
  }
  /// The second half: scores become weights.
  __device__ __forceinline__ void soften(Scores& s, float scale_log2) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& value = s[m][n][2 * half + i];
            value = exp2_fast(fmaf(value, scale_log2, -maximum[m][half]));
          }
        }
      }
    }
  }

  __device__ __forceinline__ void raise(const float (&top)[kRowTiles][2]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float value = top[m][half];
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
        const float raised = fmaxf(maximum[m][half], ceilf(value));
        const float factor = exp2_fast(maximum[m][half] - raised);
        maximum[m][half] = raised;
        sum[m][half] *= factor;
#pragma unroll
        for (int d = 0; d < kValueTiles; ++d) {
          out[m][d][2 * half] *= factor;
          out[m][d][2 * half + 1] *= factor;
        }
      }
    }
  }

  /// Weights as A fragments of the second product.
  using Weights = uint32_t[kKeys / 16][kRowTiles][4];

  static __device__ __forceinline__ void pack_weights(const Scores& s, Weights& weights) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weights[step][m][i] = pack_pair<T>(s[m][2 * step + i / 2][i % 2 * 2], s[m][2 * step + i / 2][i % 2 * 2 + 1]);
        }
      }
    }
  }

  /// Sums of the rounded weights, so that they add up to one: a single key's output is then its value.
  __device__ __forceinline__ void add_weights(const Weights& weights) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float total[4] = {};  // of rows g and g + 8, each twice
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        const uint32_t(&a)[4] = weights[step][m];
        mma<T>(total, a[0], a[1], a[2], a[3], pair_of_ones<T>(), pair_of_ones<T>());
      }
      sum[m][0] += total[0];
      sum[m][1] += total[2];
    }
  }

  __device__ __forceinline__ void accumulate(const Weights& weights, uint32_t values) {
    const uint32_t v_source = values + (lane % 16 * kStride + lane / 16 * 8) * 2;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int d = 0; d < kValueTiles; d += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, v_source + (step * 16 * kStride + d * 8) * 2);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const uint32_t(&a)[4] = weights[step][m];
          mma<T>(out[m][d], a[0], a[1], a[2], a[3], b[0], b[1]);
          mma<T>(out[m][d + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
      }
    }
  }
};

}  // namespace astrai
