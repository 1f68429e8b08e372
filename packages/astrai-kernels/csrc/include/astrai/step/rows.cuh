// The input of a projection: all rows of it in shared memory, as linear/narrow.cuh lays out what it has normalised.
#pragma once

#include "astrai/attention/mma.cuh"
#include "astrai/fused/norm_octet.cuh"
#include "astrai/linear/narrow.cuh"
#include "astrai/step/shared.cuh"

namespace astrai {

constexpr int kRowLoads = 8;  // octets that a thread has under way

/// What other blocks wrote: from L2, never from L1 (see sync.cuh).
__device__ __forceinline__ uint4 load_fresh(const void* source) { return __ldcg(static_cast<const uint4*>(source)); }
__device__ __forceinline__ Quad load_fresh_quad(const void* source) {
  const uint2 both = __ldcg(static_cast<const uint2*>(source));
  return Quad{{both.x, both.y}};
}

/// Fill `rows` rows of `depth` elements; source(row) is where a row lies, null for one that is not a number.
template <typename Source>
__device__ __forceinline__ void fill_rows(const char* target, int rows, int depth, Source source) {
  const int octets = depth / kOctet;
  const int thread = static_cast<int>(threadIdx.x);
  const int row_step = kStepWorkers / octets;
  const int octet_step = kStepWorkers - row_step * octets;
  const uint32_t base = shared_address(target);
  int row = thread / octets;
  int i = thread - row * octets;
#pragma unroll 1
  while (row < rows) {
    uint4 held[kRowLoads];
    uint32_t place[kRowLoads];
#pragma unroll
    for (int j = 0; j < kRowLoads; ++j) {
      const uint4* from = row < rows ? source(row) : nullptr;
      place[j] = base + static_cast<uint32_t>(i / kStepParts * rows * kStepBytes + word_offset(row, i % kStepParts));
      if (row >= rows) place[j] = 0;  // where the table of layers is, not this
      held[j] = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);  // NaN
      if (from != nullptr) held[j] = load_fresh(from + i);
      row += row_step;
      i += octet_step;
      if (i >= octets) {
        i -= octets;
        ++row;
      }
    }
#pragma unroll
    for (int j = 0; j < kRowLoads; ++j) {
      if (place[j] != 0) store_shared(place[j], held[j]);
    }
  }
}

/// RMS-normalise rows where they lie, with rms_norm's tree and roundings. Behind a barrier; ends with one.
template <typename T>
__device__ __forceinline__ void normalise_in_place(char* x, int rows, int hidden, int threads, float eps,
                                                   const uint4* weight, float (&squares)[kStepRows][32]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int octets = hidden / kOctet;
  const int warps = (threads + 31) / 32;
  const int first = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int item = first; item < warps * rows; item += kStepWarps) {
    const int row = item / warps;
    const int warp = item - row * warps;
    float total = 0.0f;
#pragma unroll 1
    for (int i = warp * 32 + lane; i < octets; i += threads) {
      const uint4 word = *reinterpret_cast<const uint4*>(normed_place(x, row, i, rows));
      total = sum_of_squares(Octet<T>{{word.x, word.y, word.z, word.w}}, total);
    }
    total = lanes_sum<32>(total);
    if (lane == 0) squares[row][warp] = total;
  }
  workers_sync();
#pragma unroll 1
  for (int item = first; item < warps * rows; item += kStepWarps) {
    const int row = item / warps;
    const int warp = item - row * warps;
    const float total = lanes_sum<32>(lane < warps ? squares[row][lane] : 0.0f);
    const float scale = inverse_rms(total, hidden, eps);
#pragma unroll 1
    for (int i = warp * 32 + lane; i < octets; i += threads) {
      uint4* const place = reinterpret_cast<uint4*>(normed_place(x, row, i, rows));
      const uint4 word = *place;
      const uint4 factor = weight[i];
      const Octet<T> value = scale_and_weigh(Octet<T>{{word.x, word.y, word.z, word.w}}, scale,
                                             Octet<T>{{factor.x, factor.y, factor.z, factor.w}});
      *place = make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
    }
  }
  workers_sync();
}

}  // namespace astrai
