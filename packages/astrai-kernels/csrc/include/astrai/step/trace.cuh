// Where the cycles of a step go: what a block notes of each phase of each layer, in instances of the kernel that trace.
#pragma once

#include "astrai/step/sync.cuh"

namespace astrai {

/// Cycles at which: the workers may start; the input has come; it is normalised (attention: the heads are prepared); the
/// first stage has come (keys and values have been multiplied); the last products are done; the block's results are stored
/// (first worker warp); all its warps have handed over; the barrier of the grid is open (keeper).
enum StepMark : int { kStarted, kInput, kNormed, kFirstStage, kMultiplied, kStored, kHandedOver, kOpen, kStepMarks };

template <bool kTrace>
struct StepTrace {
  int64_t* marks;  // of this block, layer and phase

  __device__ __forceinline__ StepTrace(const StepParams& p, int layer, int phase)
      : marks(kTrace && layer < p.n_layers
                  ? p.trace + ((static_cast<int64_t>(blockIdx.x) * p.n_layers + layer) * 5 + phase) * kStepMarks
                  : nullptr) {}

  /// By all threads of a warp; the first of the block's workers, or of the keeper, writes.
  __device__ __forceinline__ void operator()(StepMark mark) const {
    if (kTrace && marks != nullptr && threadIdx.x % kStepWorkers == 0) marks[mark] = clock64();
  }
};

}  // namespace astrai
