// Where the operands of decode attention come from: what a warp loads, and who its lanes are. See decode.cuh.
#pragma once

#include "astrai/attention/decode_shape.cuh"
#include "astrai/attention/kv.cuh"
#include "astrai/common/types.cuh"

namespace astrai {

template <typename T, typename KV, int kDim, int kRowTiles, bool kExtras>
struct DecodeOperands {
  static constexpr int kWarps = decode_shape(kDim, kRowTiles).warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 8 * kRowTiles;
  // Granules held at once. What the extras need leaves no registers for two of them beyond head_dim 64.
  static constexpr int kTile = KV::kNarrow             ? (kDim <= 128 ? 2 : 1)
                               : kExtras && kDim > 64 ? 1
                                                       : decode_shape(kDim, kRowTiles).tile;
  static constexpr int kBytes = KV::kNarrow ? 1 : 2;  // of an element of a key
  using Piece = typename KVPiece<KV::kNarrow>::Type;
  static constexpr int kKeyParts = (kDim + 31) / 32;    // 32-wide parts of a key; a thread holds 8 elements of each
  static constexpr int kValueParts = (kDim + 63) / 64;  // 64-wide parts of a value; likewise
  static constexpr bool kPrefetch = kDim <= 192 || KV::kNarrow;  // the next step's keys and values during this one; registers allow it
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

  // Keys and values in flight.
  Piece keys[kTile][2][kKeyParts];
  Piece values[kTile][4][kValueParts];

  __device__ __forceinline__ DecodeOperands(const AttentionParams& params, Shared& memory)
      : p(params), shared(memory), warp(uniform(static_cast<int>(threadIdx.x) / 32)),
        lane(static_cast<int>(threadIdx.x) % 32), g(lane / 4), q(lane % 4) {}

  /// Tell the compiler that a value is the same in all lanes.
  static __device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

  /// Elements of a head: head_dim 80 runs in the instance of 96.
  __device__ __forceinline__ int dim() const { return kDim == 96 ? p.head_dim : kDim; }

  /// A unit of work: a chunk of a request's keys, for a pass over the query rows of a kv head.
  struct Unit {
    int kv_head, first_row;
    int begin, end, request, table_row, seq_len;  // of the chunk
  };

  /// Query row of a column: its query within the request, and its head.
  struct Row {
    bool exists;
    int query, head;
  };
  __device__ __forceinline__ Row row(const Unit& unit, int column) const {
    const int index = unit.first_row + column;
    const int query = index / group;
    return {index < n_rows, query, unit.kv_head * group + index - query * group};
  }

  /// This lane's part of the queries. It waits in the warp's share of `shared.out`, which is idle until the end.
  __device__ __forceinline__ uint4* queries() const { return reinterpret_cast<uint4*>(&shared.out[warp][0][0]) + lane; }
  static_assert(kKeyParts * 2 * 32 * 16 <= 8 * kRowStride * 4, "the queries fit there");

  /// This lane's part of the queries of a unit; rows that do not exist are zero.
  using Queries = uint4[2][kKeyParts];
  __device__ __forceinline__ void load_queries(const Unit& unit, Queries& value) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row row_g = row(unit, 8 * r + g);
      const T* source = static_cast<const T*>(p.q) +
                        (static_cast<int64_t>(unit.request) * p.q_len + row_g.query) * p.q_token_stride +
                        row_g.head * p.q_head_stride + 8 * q;
#pragma unroll
      for (int c = 0; c < kKeyParts; ++c) {
        value[r][c] = make_uint4(0, 0, 0, 0);
        if (r < kRowTiles && row_g.exists && 32 * c + 8 * q < dim()) {
          value[r][c] = *reinterpret_cast<const uint4*>(source + 32 * c);
          if (KV::kNarrow && p.rows_are_bfloat16) value[r][c] = half_from_bfloat16(value[r][c]);
        }
      }
    }
  }
  /// To their place, as A fragments of rows g and g + 8, two steps a part.
  __device__ __forceinline__ void keep_queries(const Queries& value) const {
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
          if (32 * c + 8 * q < dim()) {
            load_piece(keys[t][i][c], source + 32 * kBytes * c);
          } else {
            clear_piece(keys[t][i][c]);
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
          if (64 * c + 8 * g < dim()) {
            load_piece(values[t][i][c], source + 64 * kBytes * c);
          } else {
            clear_piece(values[t][i][c]);
          }
        }
      }
    }
  }

  /// Scales of an e4m3 cache, of the keys whose slots the lanes hold.
  struct KeyScales {
    float k, v;
  };
  __device__ __forceinline__ KeyScales load_scales(const float* k_scale, const float* v_scale, int slots) const {
    if constexpr (!KV::kNarrow) return {};
    return {k_scale[static_cast<int64_t>(slots) * p.k_scale_stride] * kWidenedUnit,
            v_scale[static_cast<int64_t>(slots) * p.v_scale_stride] * kWeightUnit};
  }
  static __device__ __forceinline__ float of_key(float scales, int half, int key) {
    return __shfl_sync(0xffffffffu, scales, half * kGranule + key);
  }
};

}  // namespace astrai
