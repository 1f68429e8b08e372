// Programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch"): a kernel may become resident
// while the one before it on the stream still runs. No-ops below sm_90, where launches are serialised.
#pragma once

namespace astrai {

/// Wait until every earlier kernel of the stream has ended and its stores are visible.
///
/// Every kernel of this library calls it in every thread that touches memory, before its first store and before it
/// reads anything that an earlier kernel may have written; one that ends has therefore waited for all before it. The planner
/// may be told to store before it waits, in memory that the kernel ahead does not touch (attention/plan.cuh).
///
/// What may be read before it: weights, which no kernel writes, and whatever was written before the last kernel that
/// does not release early. Such a kernel has waited by the time that it releases, so all before it have ended; one that
/// releases early says nothing of the kernels before it, and all of them in a row may run at once. A kernel of cuBLAS counts
/// as one that does: it may. Arguments named `overlap` are the caller's word that operands are so old.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Allow the next kernel of the stream to become resident once every block has called this (or ended).
///
/// After pdl_wait(). Only `linear` releases early, before it, so that the weights of the kernels of a chain stream
/// while each waits for the one before.
__device__ __forceinline__ void pdl_release() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace astrai
