// Where the operands of decode attention come from: what a warp loads, and who its lanes are. See decode.cuh.
#pragma once

#include "astrai/attention/decode_heads.cuh"
#include "astrai/attention/decode_shape.cuh"
#include "astrai/attention/kv.cuh"
#include "astrai/common/types.cuh"

namespace astrai {

template <typename T, typename KV, int kDim, int kRowTiles, bool kExtras>
struct DecodeOperands {
  static constexpr bool kFree = decode_shape(kDim, kRowTiles).is_free;
  static constexpr int kMaxWarps = decode_shape(kDim, kRowTiles).most_warps();
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

  using Heads = DecodeHeads<T, kDim, KV::kFresh>;
  struct Shared : Heads::Shared {
    float ml[kMaxWarps][kRows][2];
    AttentionChunk chunk;  // what the end of a unit needs again; registers are scarce until then
    int is_last;
  };
  /// What a warp leaves of each row, behind one another in dynamic shared memory.
  using WarpRows = float[kRows][kRowStride];
  static __device__ __forceinline__ WarpRows* warp_rows() {
    extern __shared__ __align__(16) unsigned char decode_memory[];
    return reinterpret_cast<WarpRows*>(decode_memory);
  }

  const typename KV::Params& p;
  Shared& shared;
  int warp, lane, g, q;
  int round_shift;  // log2 of the keys that the warps take in one turn

  // The unit of work.
  int chunk_index, kv_head, group, first_row, n_rows;

  // Keys and values in flight.
  Piece keys[kTile][2][kKeyParts];
  Piece values[kTile][4][kValueParts];

  __device__ __forceinline__ DecodeOperands(const typename KV::Params& params, Shared& memory)
      : p(params), shared(memory), warp(uniform(static_cast<int>(threadIdx.x) / 32)),
        lane(static_cast<int>(threadIdx.x) % 32), g(lane / 4), q(lane % 4),
        round_shift(n_warps() == 4 ? 6 : n_warps() == 8 ? 7 : 5) {
    static_assert(kGranule == 16, "two, four or eight warps take 32, 64 or 128 keys in a turn");
  }

  static __device__ __forceinline__ int n_warps() { return kFree ? static_cast<int>(blockDim.x) / 32 : 4; }

  /// Tell the compiler that a value is the same in all lanes.
  static __device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

  /// Elements of a head: head_dim 80 runs in the instance of 96.
  __device__ __forceinline__ int dim() const { return kDim == 96 ? p.head_dim : kDim; }

  /// A unit of work: a chunk of a request's keys, for a pass over the query rows of a kv head.
  struct Unit {
    int kv_head, first_row;
    int begin, end, request, table_row, seq_len;  // of the chunk
  };

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
    const int granules = (unit.end - unit.begin - warp * kGranule + (1 << round_shift) - 1) >> round_shift;
    return {(low_of(unit) - unit.begin) >> round_shift & ~1, granules};
  }

  /// Position of the first key of a granule of this warp.
  __device__ __forceinline__ int first_key_of(const Unit& unit, int granule) const {
    return unit.begin + (granule << round_shift) + warp * kGranule;
  }

  /// Slots of two granules, one a lane. Positions outside the chunk repeat one inside: what is read is always owned.
  __device__ __forceinline__ int load_slots(const Unit& unit, int granule) const {
    const bool paged = KV::kPaged || p.req_to_token != nullptr;
    const int32_t* table = paged ? p.req_to_token + unit.table_row * p.table_stride : nullptr;
    int position = first_key_of(unit, granule + lane / kGranule) + lane % kGranule;
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

  /// This lane's part of the queries. It waits in the warp's share of `warp_rows`, which is idle until the end.
  __device__ __forceinline__ uint4* queries() const {
    return reinterpret_cast<uint4*>(&warp_rows()[warp][0][0]) + lane;
  }
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

  /// Of granule t, whose positions from `at` on are those of the newest key and what repeats it: the key at hand.
  __device__ __forceinline__ void put_newest_key(int t, int at) {
    if constexpr (KV::kFresh) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (g + 8 * i < at) continue;
#pragma unroll
      for (int c = 0; c < kKeyParts; ++c) keys[t][i][c] = shared.newest[0][4 * c + q];
    }
    }
  }
  __device__ __forceinline__ void put_newest_value(int t, int at) {
    if constexpr (KV::kFresh) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (2 * q + (i & 1) + 8 * (i >> 1) < at) continue;
#pragma unroll
      for (int c = 0; c < kValueParts; ++c) values[t][i][c] = shared.newest[1][8 * c + g];
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
