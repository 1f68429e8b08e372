// Warpgroup products (compute capability 9.0a; PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): 64 rows of
// one operand by 64 or 128 of the other, both from shared memory as fragments.cuh lays them out, which is the K-major
// layout with 128-byte swizzle. A warp's sums lie as those of mma.m16n8k16 do.
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

// Sums 16i .. 16i+15 of a thread as placeholders, and 4i .. 4i+3 of its tiles as operands.
#define ASTRAI_SUMS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ASTRAI_SUMS_1 ASTRAI_SUMS_0 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ASTRAI_SUMS_2 ASTRAI_SUMS_1 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define ASTRAI_SUMS_3 ASTRAI_SUMS_2 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ASTRAI_TILE(i) "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
#define ASTRAI_TILES_0 ASTRAI_TILE(0), ASTRAI_TILE(1), ASTRAI_TILE(2), ASTRAI_TILE(3)
#define ASTRAI_TILES_1 ASTRAI_TILES_0, ASTRAI_TILE(4), ASTRAI_TILE(5), ASTRAI_TILE(6), ASTRAI_TILE(7)
#define ASTRAI_TILES_2 ASTRAI_TILES_1, ASTRAI_TILE(8), ASTRAI_TILE(9), ASTRAI_TILE(10), ASTRAI_TILE(11)
#define ASTRAI_TILES_3 ASTRAI_TILES_2, ASTRAI_TILE(12), ASTRAI_TILE(13), ASTRAI_TILE(14), ASTRAI_TILE(15)

/// Add the products of 64 rows of `left` and COLUMNS rows of `right` over 16 k; LAST is COLUMNS / 32 - 1, and LEFT and
/// RIGHT number the operands behind the COLUMNS / 2 sums.
#define ASTRAI_WGMMA(T, TYPE, COLUMNS, LAST, LEFT, RIGHT)                                                       \
  __device__ __forceinline__ void wgmma(float (&sum)[COLUMNS / 8][4], uint64_t left, uint64_t right, T) {       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" ASTRAI_SUMS_##LAST  \
                 "}, %" #LEFT ", %" #RIGHT ", 1, 1, 1, 0, 0;"                                                   \
                 : ASTRAI_TILES_##LAST                                                                          \
                 : "l"(left), "l"(right));                                                                      \
  }
#define ASTRAI_WGMMA_TYPES(COLUMNS, LAST, LEFT, RIGHT)             \
  ASTRAI_WGMMA(bfloat16, "bf16", COLUMNS, LAST, LEFT, RIGHT)       \
  ASTRAI_WGMMA(float16, "f16", COLUMNS, LAST, LEFT, RIGHT)

ASTRAI_WGMMA_TYPES(64, 1, 32, 33)
ASTRAI_WGMMA_TYPES(128, 3, 64, 65)

#undef ASTRAI_WGMMA_TYPES
#undef ASTRAI_WGMMA
#undef ASTRAI_TILE
#undef ASTRAI_TILES_0
#undef ASTRAI_TILES_1
#undef ASTRAI_TILES_2
#undef ASTRAI_TILES_3
#undef ASTRAI_SUMS_0
#undef ASTRAI_SUMS_1
#undef ASTRAI_SUMS_2
#undef ASTRAI_SUMS_3

}  // namespace astrai

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
