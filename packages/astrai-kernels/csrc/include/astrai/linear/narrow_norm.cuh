// RMSNorm in front of the narrow kernel: every block normalises all rows of x for itself, with rms_norm's own bits.
#pragma once

#include "astrai/fused/norm_octet.cuh"
#include "astrai/linear/fragments.cuh"

namespace astrai {

constexpr int kNormRows = 8;  // most rows that are normalised first

/// Where octet `i` of a row lies among the normalised rows.
__device__ __forceinline__ char* normed_place(char* normed, int row, int i, int rows) {
  return normed + i / kStepParts * rows * kStepBytes + word_offset(row, i % kStepParts);
}

/// normalise_rows where rms_norm gives a thread one octet of a row, and all rows fit the block's registers: everything is
/// loaded at once, and once. The other way waits for memory again and again, some 3 us for eight rows of 1,536.
template <typename T, int kWarps, int kHeld>
__device__ __forceinline__ void normalise_held_rows(const LinearParams& params, char* normed, float (&squares)[kNormRows][32]) {
  static_assert(kWarps >= kNormRows, "a warp for each row");
  __shared__ float scales[kNormRows];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int octets = params.depth / kOctet;
  const int warps = params.norm_threads / 32;
  Octet<T> held[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int item = warp + j * kWarps;
    const int row = item / warps;
    const int i = (item - row * warps) * 32 + lane;
    held[j] = {{0u, 0u, 0u, 0u}};
    if (row < params.rows && i < octets) {
      held[j] = load_octet<true, false>(static_cast<const T*>(params.x) + row * params.x_stride + i * kOctet, kOctet);
    }
  }
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int item = warp + j * kWarps;
    const float total = lanes_sum<32>(sum_of_squares(held[j], 0.0f));
    if (lane == 0 && item < warps * params.rows) squares[item / warps][item % warps] = total;
  }
  __syncthreads();
  if (warp < params.rows) {
    const float total = lanes_sum<32>(lane < warps ? squares[warp][lane] : 0.0f);
    if (lane == 0) scales[warp] = inverse_rms(total, params.depth, params.norm_eps);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int item = warp + j * kWarps;
    const int row = item / warps;
    const int i = (item - row * warps) * 32 + lane;
    if (row >= params.rows || i >= octets) continue;
    const Octet<T> value = scale_and_weigh(
        held[j], scales[row], load_octet<true, true>(static_cast<const T*>(params.norm_weight) + i * kOctet, kOctet));
    *reinterpret_cast<uint4*>(normed_place(normed, row, i, params.rows)) =
        make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
  }
  const int padding = (octets + kStepParts - 1) / kStepParts * kStepParts - octets;
  for (int item = threadIdx.x; item < params.rows * padding; item += kWarps * 32) {
    *reinterpret_cast<uint4*>(normed_place(normed, item / padding, octets + item % padding, params.rows)) = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
}

/// RMS-normalise all rows of x into `normed`, step by step, with rms_norm's own tree and roundings.
template <typename T, int kWarps>
__device__ __forceinline__ void normalise_rows(const LinearParams& params, char* normed) {
  __shared__ float squares[kNormRows][32];
  const int lane = threadIdx.x % 32;
  const int octets = params.depth / kOctet;
  const int warps = (params.norm_threads + 31) / 32;
  constexpr int kHeld = 8;
  if (octets <= params.norm_threads && warps * params.rows <= kHeld * kWarps) {
    normalise_held_rows<T, kWarps, kHeld>(params, normed, squares);
    return;
  }
  const T* x = static_cast<const T*>(params.x);
  for (int item = threadIdx.x / 32; item < warps * params.rows; item += kWarps) {
    const int row = item / warps;
    const int warp = item - row * warps;
    float total = 0.0f;
    for (int i = warp * 32 + lane; i < octets; i += params.norm_threads) {
      total = sum_of_squares(load_octet<true, false>(x + row * params.x_stride + i * kOctet, kOctet), total);
    }
    total = lanes_sum<32>(total);
    if (lane == 0) squares[row][warp] = total;
  }
  __syncthreads();
  const int words = (params.depth + kLinearStep - 1) / kLinearStep * kStepParts;  // of a row, with its padding
  for (int row = 0; row < params.rows; ++row) {
    const float total = lanes_sum<32>(lane < warps ? squares[row][lane] : 0.0f);
    const float scale = inverse_rms(total, params.depth, params.norm_eps);
    for (int i = threadIdx.x; i < words; i += kWarps * 32) {
      Octet<T> value = {{0u, 0u, 0u, 0u}};
      if (i < octets) {
        value = load_octet<true, false>(x + row * params.x_stride + i * kOctet, kOctet);
        value = scale_and_weigh(
            value, scale, load_octet<true, true>(static_cast<const T*>(params.norm_weight) + i * kOctet, kOctet));
      }
      *reinterpret_cast<uint4*>(normed_place(normed, row, i, params.rows)) =
          make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
    }
  }
  __syncthreads();
}

}  // namespace astrai
