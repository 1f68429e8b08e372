// The weights of a step as one stream without pauses: every warp copies what it will multiply, through a queue of its own.
//
// A warp takes one slice of K of 16 weight rows at a time, as in linear/narrow.cuh; which ones follows from its place in
// the grid alone. Its cursor runs on across tiles, projections and layers, as far ahead as the queue is long: while the
// block waits for activations the queue fills, and what comes behind a barrier starts from shared memory.
//
// Units are dealt to the blocks like cards, each projection going on where the last one ended, so that the blocks' shares
// of a step differ by little, though a projection rarely divides evenly.
#pragma once

#include "astrai/linear/fragments.cuh"
#include "astrai/step/sync.cuh"

// To be measured: whether weights, which are read once a step, should leave L2 before everything else.
#ifndef ASTRAI_STEP_EVICT_FIRST
#define ASTRAI_STEP_EVICT_FIRST 0
#endif

namespace astrai {

constexpr int kStageBytes = 16 * kStepBytes;  // 16 weight rows, 64 k

/// Copy 16 bytes of a weight to shared memory, past L1.
__device__ __forceinline__ void copy_weight(uint32_t target, const void* source) {
#if ASTRAI_STEP_EVICT_FIRST
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "l"(policy)
               : "memory");
#else
  copy_streamed(target, source, true);
#endif
}

/// A block's first unit of a projection whose dealing starts at block `start`, and where the next one starts.
__device__ __forceinline__ int first_unit(int start) {
  const int place = static_cast<int>(blockIdx.x) - start;
  return place < 0 ? place + static_cast<int>(gridDim.x) : place;
}
__device__ __forceinline__ int next_start(int start, int units) {
  return static_cast<int>((static_cast<uint32_t>(start) + static_cast<uint32_t>(units)) % gridDim.x);
}

/// Where a warp stands within a block's unit of a projection.
struct StepSlice {
  int slice, group, groups, steps;
  __device__ __forceinline__ StepSlice(const StepProduct& product, int warp)
      : slice(warp & (product.slices - 1)),
        group(warp >> product.slice_bits),
        groups(kStepWarps >> product.slice_bits),
        steps(min(product.slice_steps, product.steps - slice * product.slice_steps)) {}
};

struct WeightStream {
  const StepParams& p;
  const StepLayer* layers;  // in shared memory
  int warp, lane;
  uint32_t queue;      // of this warp, in shared memory
  uint32_t word;   // a lane copies word lane % 8 of every fourth row, from row lane / 8 (here) on
  int slot;  // offset of the oldest stage

  // The next stage to be copied.
  const char* source[2];  // this lane's bytes of its first row, and of the one eight rows on
  int four_rows;          // bytes
  int steps;              // left of the slice
  int unit, product, layer, start;  // product kStepProducts: none are left

  __device__ __forceinline__ WeightStream(const StepParams& params, const StepLayer* table, uint32_t queues)
      : p(params),
        layers(table),
        warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        queue(queues + static_cast<uint32_t>(warp * params.depth * kStageBytes)),
        word(static_cast<uint32_t>(word_offset(lane / 8, lane % 8))),
        slot(0),
        product(0),
        layer(0),
        start(0) {
    unit = first_unit(start);
    enter();
#pragma unroll 1
    for (int i = 0; i < p.depth; ++i) {
      copy(queue + static_cast<uint32_t>(i * kStageBytes));
      if (is_live()) advance(1);
    }
  }

  __device__ __forceinline__ bool is_live() const { return product < kStepProducts; }

  /// Go to the first tile from `unit` on that this warp has a part in.
  __device__ __forceinline__ void enter() {
    while (true) {
      const StepProduct& geometry = p.product[product];
      const StepSlice part(geometry, warp);
      const int tile = unit * part.groups + part.group;
      if (unit < geometry.units && tile < geometry.tiles) {
        const bool is_gated = product == 2;
        const int first = tile * (is_gated ? 8 : 16) + lane / 8;
        // The last tile may have eight rows only: it reads them twice.
        const int far_row = is_gated ? geometry.features + first : first + 8 < geometry.features ? first + 8 : first;
        const int k = part.slice * geometry.slice_steps * kLinearStep + lane % 8 * kOctet;
        const char* weight = static_cast<const char*>(weight_of(product));
        source[0] = weight + (static_cast<int64_t>(first) * geometry.depth + k) * 2;
        source[1] = weight + (static_cast<int64_t>(far_row) * geometry.depth + k) * 2;
        four_rows = geometry.depth * 8;
        steps = part.steps;
        return;
      }
      if (unit < geometry.units) {
        unit += static_cast<int>(gridDim.x);  // the last unit has no tile for this warp
        continue;
      }
      start = next_start(start, geometry.units);
      if (++product == kStepProducts) return;
      if (product == kStepProducts - 1 && ++layer < p.n_layers) product = 0;
      unit = first_unit(start);
    }
  }

  __device__ __forceinline__ const void* weight_of(int index) const {
    if (index == kStepProducts - 1) return p.head;
    const StepLayer& weights = layers[layer];
    return index == 0 ? weights.qkv : index == 1 ? weights.o : index == 2 ? weights.gate_up : weights.down;
  }

  /// Ask for the next stage, if there is one; a group is committed in any case, so that groups count stages.
  __device__ __forceinline__ void copy(uint32_t stage) {
    if (is_live()) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        copy_weight(stage + word + i * 8 * kStepBytes, source[i]);
        copy_weight(stage + (word ^ 64) + (i * 8 + 4) * kStepBytes, source[i] + four_rows);
        source[i] += kStepBytes;
      }
    }
    commit_copies();
  }

  /// Of the slice that is being copied, `count` more stages have been.
  __device__ __forceinline__ void advance(int count) {
    steps -= count;
    if (steps > 0) return;
    unit += static_cast<int>(gridDim.x);
    enter();
  }
};

}  // namespace astrai
