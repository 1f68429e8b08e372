// Tensor-core steps of the attention kernels on fragments that come straight from global memory.
//
// mma.sync.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): with g = lane / 4 and q = lane % 4,
//   A (16 x 16): a0 = (row g, k 2q..2q+1), a1 = (row g+8, same k), a2 = (row g, k 2q+8..2q+9), a3 = (row g+8, same k)
//   B (16 x 8):  b0 = (k 2q..2q+1, column g), b1 = (k 2q+8..2q+9, column g)
//   C (16 x 8):  c0, c1 = (row g, columns 2q, 2q+1), c2, c3 = (row g+8, columns 2q, 2q+1)
// The index that is summed over may be permuted as long as A and B agree, so a thread's sixteen contiguous bytes of a
// row serve as the fragments of two steps: no shared memory and no ldmatrix lie between memory and the tensor cores.
#pragma once

#include "astrai/common/types.cuh"

namespace astrai {

template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1);

template <>
__device__ __forceinline__ void mma<bfloat16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                              uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<float16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Two fp32 values as one register of 16-bit ones, `low` in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack_pair<bfloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <>
__device__ __forceinline__ uint32_t pack_pair<float16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Two ones as 16-bit values: an operand that adds up the other's.
template <typename T>
__host__ __device__ constexpr uint32_t pair_of_ones();

template <>
__host__ __device__ constexpr uint32_t pair_of_ones<bfloat16>() {
  return 0x3f803f80u;
}

template <>
__host__ __device__ constexpr uint32_t pair_of_ones<float16>() {
  return 0x3c003c00u;
}

/// The low (high) halves of two registers as one: elements of two rows become neighbours along the summed index.
__device__ __forceinline__ uint32_t low_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x5410);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x7632);
}

/// Sixteen bytes that are read once. L2::256B measured 10 % slower over random pages. Plain, not .nc: under programmatic launch the writer may still run beside us.
__device__ __forceinline__ uint4 load_streaming(const void* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ uint2 load_streaming_half(const void* address) {
  uint2 value;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(address)
               : "memory");
  return value;
}

/// Sixteen bytes of shared memory, read where it stands: a compiler that keeps them in registers instead runs short.
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 value;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

/// Not a constant: NVRTC has no header that names it.
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace astrai
