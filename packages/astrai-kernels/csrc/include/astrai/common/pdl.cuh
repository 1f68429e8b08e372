// Programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch"): a kernel may become resident
// while the one before it on the stream still runs. No-ops below sm_90, where launches are serialised.
#pragma once

namespace astrai {

/// Wait until every earlier kernel of the stream has ended and its stores are visible.
///
/// Every kernel of this library calls it in every thread that touches memory, before its first store and before it
/// reads anything that an earlier kernel may have written. What may be read before it: weights, and whatever the
/// kernel *two or more* launches back wrote, since pdl_release() comes after the wait in every kernel.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Allow the next kernel of the stream to become resident once every block has called this (or ended).
///
/// Only after pdl_wait(): otherwise the kernel after the next could start before this one's predecessor has ended.
__device__ __forceinline__ void pdl_release() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace astrai
