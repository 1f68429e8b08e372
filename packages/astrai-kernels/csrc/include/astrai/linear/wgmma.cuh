// Warpgroup products (compute capability 9.0a; PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): 64 weight
// rows by 64 or 128 rows of x, both from shared memory as fragments.cuh lays them out, which is the K-major layout with
// 128-byte swizzle. A warp's sums lie as those of mma.m16n8k16 do.
#pragma once

#include "astrai/common/types.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace astrai {

/// Descriptor of rows of 128 bytes from `address` on: groups of 8 rows, which start at multiples of 1024 bytes.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupStride = uint64_t{1024 / 16} << 32;
  constexpr uint64_t kUnused = uint64_t{1} << 16;  // leading dimension offset
  return kSwizzle128 | kGroupStride | kUnused | ((address & 0x3ffffu) >> 4);
}

/// What this thread copied to shared memory becomes visible to wgmma, behind the next barrier.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Wait until at most `kPending` groups of products, the latest, are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_leave() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Wait for the products, which add to `sum`.
template <int kCount>
__device__ __forceinline__ void wgmma_wait(float (&sum)[kCount][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kCount * 4; ++i) asm volatile("" : "+f"(sum[i / 4][i % 4])::"memory");
}

#define ASTRAI_WGMMA_64(TYPE)                                                                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"                                       \
               "%0, %1, %2, %3, %4, %5, %6, %7, "                                                                     \
               "%8, %9, %10, %11, %12, %13, %14, %15, "                                                               \
               "%16, %17, %18, %19, %20, %21, %22, %23, "                                                             \
               "%24, %25, %26, %27, %28, %29, %30, %31"                                                               \
               "}, %32, %33, 1, 1, 1, 0, 0;"                                                                          \
               : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]),                                  \
                 "+f"(sum[1][0]), "+f"(sum[1][1]), "+f"(sum[1][2]), "+f"(sum[1][3]),                                  \
                 "+f"(sum[2][0]), "+f"(sum[2][1]), "+f"(sum[2][2]), "+f"(sum[2][3]),                                  \
                 "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]), "+f"(sum[3][3]),                                  \
                 "+f"(sum[4][0]), "+f"(sum[4][1]), "+f"(sum[4][2]), "+f"(sum[4][3]),                                  \
                 "+f"(sum[5][0]), "+f"(sum[5][1]), "+f"(sum[5][2]), "+f"(sum[5][3]),                                  \
                 "+f"(sum[6][0]), "+f"(sum[6][1]), "+f"(sum[6][2]), "+f"(sum[6][3]),                                  \
                 "+f"(sum[7][0]), "+f"(sum[7][1]), "+f"(sum[7][2]), "+f"(sum[7][3])                                   \
               : "l"(weights), "l"(rows))

__device__ __forceinline__ void wgmma(float (&sum)[8][4], uint64_t weights, uint64_t rows, bfloat16) {
  ASTRAI_WGMMA_64("bf16");
}
__device__ __forceinline__ void wgmma(float (&sum)[8][4], uint64_t weights, uint64_t rows, float16) {
  ASTRAI_WGMMA_64("f16");
}
#undef ASTRAI_WGMMA_64

#define ASTRAI_WGMMA_128(TYPE)                                                                                        \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"                                      \
               "%0, %1, %2, %3, %4, %5, %6, %7, "                                                                     \
               "%8, %9, %10, %11, %12, %13, %14, %15, "                                                               \
               "%16, %17, %18, %19, %20, %21, %22, %23, "                                                             \
               "%24, %25, %26, %27, %28, %29, %30, %31, "                                                             \
               "%32, %33, %34, %35, %36, %37, %38, %39, "                                                             \
               "%40, %41, %42, %43, %44, %45, %46, %47, "                                                             \
               "%48, %49, %50, %51, %52, %53, %54, %55, "                                                             \
               "%56, %57, %58, %59, %60, %61, %62, %63"                                                               \
               "}, %64, %65, 1, 1, 1, 0, 0;"                                                                          \
               : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]),                                  \
                 "+f"(sum[1][0]), "+f"(sum[1][1]), "+f"(sum[1][2]), "+f"(sum[1][3]),                                  \
                 "+f"(sum[2][0]), "+f"(sum[2][1]), "+f"(sum[2][2]), "+f"(sum[2][3]),                                  \
                 "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]), "+f"(sum[3][3]),                                  \
                 "+f"(sum[4][0]), "+f"(sum[4][1]), "+f"(sum[4][2]), "+f"(sum[4][3]),                                  \
                 "+f"(sum[5][0]), "+f"(sum[5][1]), "+f"(sum[5][2]), "+f"(sum[5][3]),                                  \
                 "+f"(sum[6][0]), "+f"(sum[6][1]), "+f"(sum[6][2]), "+f"(sum[6][3]),                                  \
                 "+f"(sum[7][0]), "+f"(sum[7][1]), "+f"(sum[7][2]), "+f"(sum[7][3]),                                  \
                 "+f"(sum[8][0]), "+f"(sum[8][1]), "+f"(sum[8][2]), "+f"(sum[8][3]),                                  \
                 "+f"(sum[9][0]), "+f"(sum[9][1]), "+f"(sum[9][2]), "+f"(sum[9][3]),                                  \
                 "+f"(sum[10][0]), "+f"(sum[10][1]), "+f"(sum[10][2]), "+f"(sum[10][3]),                              \
                 "+f"(sum[11][0]), "+f"(sum[11][1]), "+f"(sum[11][2]), "+f"(sum[11][3]),                              \
                 "+f"(sum[12][0]), "+f"(sum[12][1]), "+f"(sum[12][2]), "+f"(sum[12][3]),                              \
                 "+f"(sum[13][0]), "+f"(sum[13][1]), "+f"(sum[13][2]), "+f"(sum[13][3]),                              \
                 "+f"(sum[14][0]), "+f"(sum[14][1]), "+f"(sum[14][2]), "+f"(sum[14][3]),                              \
                 "+f"(sum[15][0]), "+f"(sum[15][1]), "+f"(sum[15][2]), "+f"(sum[15][3])                               \
               : "l"(weights), "l"(rows))

__device__ __forceinline__ void wgmma(float (&sum)[16][4], uint64_t weights, uint64_t rows, bfloat16) {
  ASTRAI_WGMMA_128("bf16");
}
__device__ __forceinline__ void wgmma(float (&sum)[16][4], uint64_t weights, uint64_t rows, float16) {
  ASTRAI_WGMMA_128("f16");
}
#undef ASTRAI_WGMMA_128

}  // namespace astrai

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
