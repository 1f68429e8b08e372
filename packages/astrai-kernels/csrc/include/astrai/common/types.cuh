// Element types and eight-element vectors, without any CUDA header, so that NVRTC compiles them as they stand.
#pragma once

#include "astrai/common/dtype.h"

#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>
#endif

namespace astrai {

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

/// Number of elements that every kernel of this directory moves at a time, whatever their type.
constexpr int kOctet = 8;

/// Eight consecutive elements in their storage format: one 16-byte access of 16-bit types, two of fp32.
template <typename T>
struct Octet {
  static constexpr int kWords = kOctet * static_cast<int>(sizeof(T)) / 4;
  uint32_t word[kWords];
};

/// Read-only 16-byte load. Only for memory that nothing writes while the kernel runs.
__device__ __forceinline__ uint4 load_readonly(const uint4* address) { return __ldg(address); }
__device__ __forceinline__ uint16_t load_readonly(const uint16_t* address) { return __ldg(address); }
__device__ __forceinline__ uint32_t load_readonly(const uint32_t* address) { return __ldg(address); }

/// Load `count` (at most 8) elements; the others are zero.
///
/// kAligned: `source` is 16-byte aligned and `count` is 8.  kReadOnly: see load_readonly; without it the load may
/// alias what the same thread stores later.
template <bool kAligned, bool kReadOnly, typename T>
__device__ __forceinline__ Octet<T> load_octet(const T* source, int count) {
  Octet<T> octet;
  if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < Octet<T>::kWords / 4; ++i) {
      const uint4* address = reinterpret_cast<const uint4*>(source) + i;
      const uint4 value = kReadOnly ? load_readonly(address) : *address;
      octet.word[4 * i] = value.x;
      octet.word[4 * i + 1] = value.y;
      octet.word[4 * i + 2] = value.z;
      octet.word[4 * i + 3] = value.w;
    }
  } else if constexpr (sizeof(T) == 4) {
    const uint32_t* address = reinterpret_cast<const uint32_t*>(source);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      octet.word[i] = i < count ? (kReadOnly ? load_readonly(address + i) : address[i]) : 0u;
    }
  } else {
    const uint16_t* address = reinterpret_cast<const uint16_t*>(source);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      uint32_t bits = 0;
      if (i < count) bits = kReadOnly ? load_readonly(address + i) : address[i];
      octet.word[i / 2] = i % 2 ? octet.word[i / 2] | (bits << 16) : bits;
    }
  }
  return octet;
}

/// Store the first `count` (at most 8) elements; kAligned as in load_octet.
template <bool kAligned, typename T>
__device__ __forceinline__ void store_octet(T* target, const Octet<T>& octet, int count) {
  if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < Octet<T>::kWords / 4; ++i) {
      reinterpret_cast<uint4*>(target)[i] = make_uint4(octet.word[4 * i], octet.word[4 * i + 1],
                                                       octet.word[4 * i + 2], octet.word[4 * i + 3]);
    }
  } else if constexpr (sizeof(T) == 4) {
    uint32_t* address = reinterpret_cast<uint32_t*>(target);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i < count) address[i] = octet.word[i];
    }
  } else {
    uint16_t* address = reinterpret_cast<uint16_t*>(target);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i < count) address[i] = static_cast<uint16_t>(octet.word[i / 2] >> (16 * (i % 2)));
    }
  }
}

__device__ __forceinline__ void unpack(const Octet<float>& octet, float (&value)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) value[i] = __uint_as_float(octet.word[i]);
}

__device__ __forceinline__ void unpack(const Octet<bfloat16>& octet, float (&value)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    value[2 * i] = __uint_as_float(octet.word[i] << 16);
    value[2 * i + 1] = __uint_as_float(octet.word[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void unpack(const Octet<float16>& octet, float (&value)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
        : "=f"(value[2 * i]), "=f"(value[2 * i + 1])
        : "r"(octet.word[i]));
  }
}

__device__ __forceinline__ void pack(const float (&value)[kOctet], Octet<float>& octet) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) octet.word[i] = __float_as_uint(value[i]);
}

// Round to nearest even; the PTX operand order is {high, low}.
__device__ __forceinline__ void pack(const float (&value)[kOctet], Octet<bfloat16>& octet) {
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(octet.word[i]) : "f"(value[2 * i + 1]), "f"(value[2 * i]));
  }
}

__device__ __forceinline__ void pack(const float (&value)[kOctet], Octet<float16>& octet) {
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(octet.word[i]) : "f"(value[2 * i + 1]), "f"(value[2 * i]));
  }
}

}  // namespace astrai
