// Blocks that share a row: a thread block cluster from compute capability 9.0 on, a single block before.
#pragma once

#include "astrai/common/types.cuh"

namespace astrai {

__device__ __forceinline__ int cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

__device__ __forceinline__ int cluster_size() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
#else
  return 1;
#endif
}

/// Barrier of all threads of the cluster, shared memory of every block included.
__device__ __forceinline__ void cluster_sync(int size) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (size > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}

/// The same variable in the shared memory of block `rank` of the cluster.
template <typename T>
__device__ __forceinline__ T* at_peer(T* own, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  T* peer;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(own), "r"(rank));
  return peer;
#else
  return own;
#endif
}

/// Warps of a block, a power of two up to 32. 16: the sampling kernel needs more than the 64 registers that 32 leave.
constexpr int kSamplingWarps = 16;
constexpr int kSamplingThreads = 32 * kSamplingWarps;

/// Sum of the values of the threads before this one; `total` is that of all. Integers: exact in any order.
///
/// `scratch` holds kSamplingWarps words in shared memory and is free again on return. All threads must call it.
__device__ __forceinline__ uint64_t block_prefix(uint64_t value, uint64_t* scratch, uint64_t* total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  uint64_t inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t lower = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += lower;
  }
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  uint64_t warps = lane < kSamplingWarps ? scratch[lane] : 0;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t lower = __shfl_up_sync(0xffffffffu, warps, offset);
    if (lane >= offset) warps += lower;
  }
  *total = __shfl_sync(0xffffffffu, warps, 31);
  const uint64_t before = __shfl_sync(0xffffffffu, warps, warp > 0 ? warp - 1 : 0);
  __syncthreads();
  return (warp > 0 ? before : 0) + inclusive - value;
}

struct Sum {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
struct Largest {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
struct Smallest {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return a < b ? a : b; }
};

/// Combine one value per lane over `kLanes` neighbours, by an operation that commutes and associates exactly.
template <int kLanes, typename Combine>
__device__ __forceinline__ uint64_t lanes_combine(uint64_t value, Combine combine) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

/// Combine one value per thread of a block; `scratch` as in block_prefix.
template <typename Combine>
__device__ __forceinline__ uint64_t block_combine(uint64_t value, uint64_t* scratch, Combine combine) {
  value = lanes_combine<32>(value, combine);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = lanes_combine<kSamplingWarps>(scratch[threadIdx.x % kSamplingWarps], combine);
  __syncthreads();
  return value;
}

/// Combine one value per block (the same in all its threads) over the cluster.
///
/// `slots` is a pair of words in shared memory, used in turn: a block that has passed the barrier of one call may
/// write for the next while a slower one still reads, but can be no further ahead.
template <typename Combine>
__device__ __forceinline__ uint64_t cluster_combine(uint64_t value, uint64_t* slots, int& parity, int size,
                                                    Combine combine) {
  if (size == 1) return value;
  uint64_t* slot = slots + parity;
  parity ^= 1;
  if (threadIdx.x == 0) *slot = value;
  cluster_sync(size);
  uint64_t all = *static_cast<volatile uint64_t*>(at_peer(slot, 0));
  for (int rank = 1; rank < size; ++rank) {
    all = combine(all, *static_cast<volatile uint64_t*>(at_peer(slot, rank)));
  }
  return all;
}

}  // namespace astrai
