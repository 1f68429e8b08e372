// The arithmetic of RMSNorm on octets, and how a row is spread over threads: shared by every kernel that norms, so that
// all of them give the same bits. rms_norm.cuh has the formula and the reduction contract.
#pragma once

#include "astrai/common/reduce.cuh"
#include "astrai/common/types.cuh"
#include "astrai/fused/params.h"

namespace astrai {

template <typename T>
__device__ __forceinline__ const T* row_source(const RowView<const void*>& view, int64_t outer, int64_t inner) {
  return static_cast<const T*>(view.data) + outer * view.outer_stride + inner * view.inner_stride;
}

template <typename T>
__device__ __forceinline__ T* row_target(const RowView<void*>& view, int64_t outer, int64_t inner) {
  return static_cast<T*>(view.data) + outer * view.outer_stride + inner * view.inner_stride;
}

template <typename T>
__device__ __forceinline__ float sum_of_squares(const Octet<T>& octet, float total) {
  float value[kOctet];
  unpack(octet, value);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) total = fmaf(value[i], value[i], total);
  return total;
}

template <typename T>
__device__ __forceinline__ Octet<T> add(const Octet<T>& left, const Octet<T>& right) {
  float a[kOctet];
  float b[kOctet];
  unpack(left, a);
  unpack(right, b);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) a[i] = __fadd_rn(a[i], b[i]);
  Octet<T> sum;
  pack(a, sum);
  return sum;
}

/// round(left * right). The product of two 16-bit numbers is exact in fp32, so one packed rounding gives fp32's bits; it
/// saves a third of a norm's instructions. Adding -0 keeps the sign of a zero.
__device__ __forceinline__ Octet<bfloat16> multiply(const Octet<bfloat16>& left, const Octet<bfloat16>& right) {
  Octet<bfloat16> product;
#pragma unroll
  for (int i = 0; i < Octet<bfloat16>::kWords; ++i) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product.word[i]) : "r"(left.word[i]), "r"(right.word[i]), "r"(0x80008000u));
  }
  return product;
}

__device__ __forceinline__ Octet<float16> multiply(const Octet<float16>& left, const Octet<float16>& right) {
  Octet<float16> product;
#pragma unroll
  for (int i = 0; i < Octet<float16>::kWords; ++i) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product.word[i]) : "r"(left.word[i]), "r"(right.word[i]));
  }
  return product;
}

__device__ __forceinline__ Octet<float> multiply(const Octet<float>& left, const Octet<float>& right) {
  Octet<float> product;
#pragma unroll
  for (int i = 0; i < Octet<float>::kWords; ++i) {
    product.word[i] = __float_as_uint(__fmul_rn(__uint_as_float(left.word[i]), __uint_as_float(right.word[i])));
  }
  return product;
}

/// round(round(octet * scale) * weight)
template <typename T>
__device__ __forceinline__ Octet<T> scale_and_weigh(const Octet<T>& octet, float scale, const Octet<T>& weight) {
  float value[kOctet];
  unpack(octet, value);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) value[i] = __fmul_rn(value[i], scale);
  Octet<T> result;
  pack(value, result);
  return multiply(result, weight);
}

__device__ __forceinline__ float inverse_rms(float total, int hidden, float eps) {
  return rsqrtf(__fadd_rn(__fdiv_rn(total, static_cast<float>(hidden)), eps));
}

/// How a row of `hidden` elements is spread over threads: a function of `hidden` alone (the reduction contract).
struct RmsNormShape {
  int team;     // kTeam
  int octets;   // kOctets of the aligned kernel
  int threads;  // per block
};

__host__ __device__ constexpr RmsNormShape rms_norm_shape(int hidden) {
  const int octets = (hidden + kOctet - 1) / kOctet;
  if (octets <= 32) return {octets <= 8 ? 8 : octets <= 16 ? 16 : 32, 1, 128};
  if (octets > 2048) return {0, 0, 1024};
  const int per_thread = octets <= 256 ? 1 : octets <= 1024 ? 2 : 4;
  const int threads = (octets + per_thread - 1) / per_thread;
  return {0, per_thread, (threads + 31) / 32 * 32};
}

}  // namespace astrai
