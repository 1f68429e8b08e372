// Bulk copies of the tensor memory accelerator into shared memory, and the barriers that count their bytes (compute
// capability 9.0; PTX ISA, "cp.async.bulk.tensor" and "mbarrier"). Shared-memory addresses are of the block's own window.
#pragma once

#include "astrai/common/types.cuh"

namespace astrai {

/// What the driver encodes (linear/tensor_map.h). A kernel takes it as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

/// Whether what a copy brings is worth keeping in L2 (createpolicy's encodings of the whole range).
constexpr uint64_t kReadOnce = 0x12f0000000000000ull;   // evict_first
constexpr uint64_t kReadAgain = 0x14f0000000000000ull;  // evict_last

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

/// After the inits and before the __syncthreads() that hands the barriers on: the copy engine sees them too.
__device__ __forceinline__ void barrier_publish() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Arrive, and let the phase wait for this many bytes as well.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

/// Wait until the phase of this parity has ended; the first phase has parity 0.
__device__ __forceinline__ void barrier_await(uint32_t barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred done;\n\tAGAIN:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra AGAIN;\n\t}" ::"r"(barrier), "r"(parity)
      : "memory");
#endif
}

/// Fetch the descriptor itself, ahead of the first copy.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

/// Copy the box that starts at column `column` of row `row`. What lies outside the tensor arrives as zeros and counts.
__device__ __forceinline__ void copy_box(uint32_t target, const TensorMap& map, int column, int row, uint32_t barrier,
                                         uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

/// The same of a tensor of four dimensions, from the start of the two in the middle.
__device__ __forceinline__ void copy_box(uint32_t target, const TensorMap& map, int column, int row, int side, int group,
                                         uint32_t barrier, uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(side), "r"(group), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

/// The same of the weight in steps of K (linear/narrow_bulk.cuh): the innermost dimension is one step, the outermost is steps.
__device__ __forceinline__ void copy_steps(uint32_t target, const TensorMap& map, int row, int step, uint32_t barrier,
                                           uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
      "l"(&map), "r"(0), "r"(row), "r"(step), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

/// The same where eight gate rows take turns with the eight up rows of the same group.
__device__ __forceinline__ void copy_paired_steps(uint32_t target, const TensorMap& map, int group, int step, uint32_t barrier,
                                                  uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %2, %2, %3, %4}], [%5], %6;" ::"r"(target),
      "l"(&map), "r"(0), "r"(group), "r"(step), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

/// Before a barrier after which the copy engine may overwrite what this thread has read of shared memory.
__device__ __forceinline__ void fence_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace astrai
