// The input of a projection: all rows of it in shared memory, as linear/narrow.cuh lays out what it has normalised.
#pragma once

#include "astrai/attention/mma.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/linear/narrow.cuh"
#include "astrai/step/shared.cuh"

namespace astrai {

constexpr int kHeldOctets = 8;  // of a thread: rows up to that are normalised without going back to memory

/// What other blocks wrote: from L2, never from L1 (see sync.cuh).
__device__ __forceinline__ uint4 load_fresh(const void* source) { return __ldcg(static_cast<const uint4*>(source)); }
__device__ __forceinline__ Quad load_fresh_quad(const void* source) {
  const uint2 both = __ldcg(static_cast<const uint2*>(source));
  return Quad{{both.x, both.y}};
}

// Words as flags (see step.cuh): what is not there yet is kAbsent in each 32-bit word, which no result is: a rounding
// to 16 bits gives but one NaN, 0x7fff.
constexpr uint32_t kAbsent = 0xffffffffu;

__device__ __forceinline__ bool is_absent(const uint4& octet) {
  return octet.x == kAbsent || octet.y == kAbsent || octet.z == kAbsent || octet.w == kAbsent;
}
__device__ __forceinline__ bool is_absent(const Quad& quad) { return quad.word[0] == kAbsent || quad.word[1] == kAbsent; }

/// What another block may be writing: every word is the old one or the new one.
__device__ __forceinline__ uint4 load_relaxed(const void* source) {
  uint4 octet;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(octet.x), "=r"(octet.y), "=r"(octet.z), "=r"(octet.w)
               : "l"(source)
               : "memory");
  return octet;
}
__device__ __forceinline__ Quad load_relaxed_quad(const void* source) {
  Quad quad;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(quad.word[0]), "=r"(quad.word[1]) : "l"(source) : "memory");
  return quad;
}
__device__ __forceinline__ void store_relaxed_quad(void* target, const Quad& quad) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(quad.word[0]), "r"(quad.word[1]) : "memory");
}

__device__ __forceinline__ uint4 nan_octet() { return make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu); }

/// Rows of an input: where they lie, and whether their words are flags.
struct RowSource {
  const uint4* rows;
  int64_t octets;      // of a row
  const int64_t* ids;  // null: row by row; else rows of an embedding with `vocab` rows
  int vocab;
  bool polls;

  /// Null for one that is not a number.
  __device__ __forceinline__ const uint4* operator()(int row) const {
    if (ids == nullptr) return rows + row * octets;
    const int64_t id = ids[row];
    return id >= 0 && id < vocab ? rows + id * octets : nullptr;
  }
  __device__ __forceinline__ uint4 load(const uint4* from) const { return polls ? load_relaxed(from) : load_fresh(from); }
  /// Ask again until all words are there.
  __device__ __forceinline__ void await(uint4& octet, const uint4* from) const {
    while (polls && is_absent(octet)) octet = load_relaxed(from);
  }
};

/// Fill `rows` rows of `depth` elements. All of it is asked for before anything is waited for. Ends with a barrier.
__device__ __forceinline__ void fill_rows(char* target, int rows, int depth, const RowSource& source) {
  const int octets = depth / kOctet;
  int row = 0;
  int i = static_cast<int>(threadIdx.x);
  const auto wrap = [&] {
    while (i >= octets && row < rows) {
      i -= octets;
      ++row;
    }
  };
  wrap();
#pragma unroll 1
  while (row < rows) {
    uint4 held[kHeldOctets];
    const uint4* from[kHeldOctets];
    char* place[kHeldOctets];
#pragma unroll
    for (int j = 0; j < kHeldOctets; ++j) {
      from[j] = nullptr;
      place[j] = nullptr;
      held[j] = nan_octet();
      if (row >= rows) continue;
      place[j] = normed_place(target, row, i, rows);
      from[j] = source(row);
      if (from[j] != nullptr) held[j] = source.load(from[j] += i);
      i += kStepWorkers;
      wrap();
    }
#pragma unroll
    for (int j = 0; j < kHeldOctets; ++j) {
      if (place[j] == nullptr) continue;
      if (from[j] != nullptr) source.await(held[j], from[j]);
      *reinterpret_cast<uint4*>(place[j]) = held[j];
    }
  }
  workers_sync();
}

/// The sum of a row's `warps` sums of squares, with the bits of rms_norm's tree (lanes_sum over a warp, absent ones zero).
__device__ __forceinline__ float sum_of_warps(const float (&squares)[32], int warps) {
  if (warps > 8) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return lanes_sum<32>(lane < warps ? squares[lane] : 0.0f);
  }
  float s[8];
  *reinterpret_cast<float4*>(s) = *reinterpret_cast<const float4*>(squares);
  *reinterpret_cast<float4*>(s + 4) = *reinterpret_cast<const float4*>(squares + 4);
#pragma unroll
  for (int i = 0; i < 8; ++i) s[i] = i < warps ? s[i] : 0.0f;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) s[i] = __fadd_rn(s[i], s[i + half]);
  }
  return s[0];
}

/// How rms_norm spreads a row over warps, and the rows' warps over this block's: those of this warp, one after the other.
struct NormShare {
  int row, warp;
  __device__ __forceinline__ void next(int warps, int by) {
    warp += by;
    while (warp >= warps) {
      warp -= warps;
      ++row;
    }
  }
};

/// Fill and RMS-normalise rows, with rms_norm's tree and roundings, in registers: a warp takes kItems warps' parts of rows,
/// of kPer octets a lane. arrived() is called when the rows are there. Ends with a barrier.
template <typename T, int kItems, int kPer, typename Arrived>
__device__ __forceinline__ void fill_normed_held(char* target, const StepParams& p, const RowSource& source,
                                                 const uint4* weight,
                                                 float (&squares)[kStepRows][32], Arrived arrived) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int octets = p.hidden / kOctet;
  const int warps = p.norm_threads / 32;
  NormShare share[kItems];
  share[0] = {0, 0};
  share[0].next(warps, static_cast<int>(threadIdx.x) / 32);
  uint4 held[kItems][kPer];
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if (j > 0) {
      share[j] = share[j - 1];
      share[j].next(warps, kStepWarps);
    }
    const uint4* from = share[j].row < p.rows ? source(share[j].row) : nullptr;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = k * p.norm_threads + share[j].warp * 32 + lane;
      held[j][k] = make_uint4(0, 0, 0, 0);
      if (share[j].row < p.rows && i < octets) {
        held[j][k] = from == nullptr ? nan_octet() : source.load(from + i);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if (share[j].row >= p.rows) break;
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      uint4& word = held[j][k];
      const int i = k * p.norm_threads + share[j].warp * 32 + lane;
      if (i < octets) {
        const uint4* from = source(share[j].row);
        if (from != nullptr) source.await(word, from + i);
        total = sum_of_squares(Octet<T>{{word.x, word.y, word.z, word.w}}, total);
      }
    }
    total = lanes_sum<32>(total);
    if (lane == 0) squares[share[j].row][share[j].warp] = total;
  }
  arrived();
  workers_sync();
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if (share[j].row >= p.rows) break;
    const float scale = inverse_rms(sum_of_warps(squares[share[j].row], warps), p.hidden, p.eps);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = k * p.norm_threads + share[j].warp * 32 + lane;
      if (i >= octets) continue;
      const uint4& word = held[j][k];
      const uint4 factor = weight[i];
      const Octet<T> value = scale_and_weigh(Octet<T>{{word.x, word.y, word.z, word.w}}, scale,
                                             Octet<T>{{factor.x, factor.y, factor.z, factor.w}});
      *reinterpret_cast<uint4*>(normed_place(target, share[j].row, i, p.rows)) =
          make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
    }
  }
  workers_sync();
}

/// The same for rows that lie in shared memory already. Behind a barrier; ends with one.
template <typename T>
__device__ __forceinline__ void normalise_in_place(char* x, const StepParams& p, const uint4* weight,
                                                   float (&squares)[kStepRows][32]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int octets = p.hidden / kOctet;
  const int warps = p.norm_threads / 32;
  NormShare first = {0, 0};
  first.next(warps, static_cast<int>(threadIdx.x) / 32);
#pragma unroll 1
  for (NormShare at = first; at.row < p.rows; at.next(warps, kStepWarps)) {
    float total = 0.0f;
#pragma unroll 1
    for (int i = at.warp * 32 + lane; i < octets; i += p.norm_threads) {
      const uint4 word = *reinterpret_cast<const uint4*>(normed_place(x, at.row, i, p.rows));
      total = sum_of_squares(Octet<T>{{word.x, word.y, word.z, word.w}}, total);
    }
    total = lanes_sum<32>(total);
    if (lane == 0) squares[at.row][at.warp] = total;
  }
  workers_sync();
#pragma unroll 1
  for (NormShare at = first; at.row < p.rows; at.next(warps, kStepWarps)) {
    const float scale = inverse_rms(sum_of_warps(squares[at.row], warps), p.hidden, p.eps);
#pragma unroll 1
    for (int i = at.warp * 32 + lane; i < octets; i += p.norm_threads) {
      uint4* const place = reinterpret_cast<uint4*>(normed_place(x, at.row, i, p.rows));
      const uint4 word = *place;
      const uint4 factor = weight[i];
      const Octet<T> value = scale_and_weigh(Octet<T>{{word.x, word.y, word.z, word.w}}, scale,
                                             Octet<T>{{factor.x, factor.y, factor.z, factor.w}});
      *place = make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
    }
  }
  workers_sync();
}

/// Fill and normalise rows, in the way that their number and size ask for.
template <typename T, typename Arrived>
__device__ __forceinline__ void fill_normed(char* target, const StepParams& p, const RowSource& source,
                                            const uint4* weight, float (&squares)[kStepRows][32], Arrived arrived) {
  const int octets = p.hidden / kOctet;
  const int shares = p.norm_threads / 32 * p.rows;
  if (octets <= p.norm_threads && shares <= kStepWarps) {
    fill_normed_held<T, 1, 1>(target, p, source, weight, squares, arrived);
  } else if (octets <= p.norm_threads && shares <= kHeldOctets * kStepWarps) {
    fill_normed_held<T, kHeldOctets, 1>(target, p, source, weight, squares, arrived);
  } else {
    fill_rows(target, p.rows, p.hidden, source);
    arrived();
    normalise_in_place<T>(target, p, weight, squares);
  }
}

}  // namespace astrai
