// Thread block clusters (compute capability 9.0 and later): shared memory of the neighbours, and their barrier.
#pragma once

#include "astrai/common/types.cuh"

namespace astrai {

/// Wait until all threads of the cluster's blocks are here; their earlier stores to shared memory are visible then.
__device__ __forceinline__ void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// The same without that promise, and without the wait for stores to arrive: what threads have loaded, and used, before it
/// may be overwritten, or go, behind it.
__device__ __forceinline__ void cluster_barrier_after_loads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

/// Load 16 bytes from where `address`, in this block's shared memory, lies in that of block `rank` of the cluster.
///
/// Ordered by the barriers alone, so that several loads can be under way at once.
__device__ __forceinline__ float4 load_cluster(uint32_t address, int rank) {
  float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(remote));
#endif
  return value;
}

}  // namespace astrai
