// The weights of a step as one stream without pauses: a warp of its own ("feeder") asks for what the others will multiply,
// a queue for each of them.
//
// A warp multiplies one slice of K of 16 weight rows at a time, as in linear/narrow.cuh; which ones follows from its place
// in the grid alone. The feeder's cursors run on across tiles, projections and layers, as far ahead as the queues are long:
// while the block waits for activations the queues fill, and what comes behind a wait starts from shared memory. A layer may
// be longer than queues and waits (570 KB a multiprocessor against 180), and then DRAM is idle for a while. Having L2 fetch
// what the queues had no room for (cp.async.bulk.prefetch.tensor) took an H200 a third longer: the engine has one queue.
//
// The copy engine brings a stage (tensor maps, common/bulk.cuh). With copies by the threads themselves (cp.async), on an
// H200, a step took the time of its bytes and, on top of it, 17 to 20 us a layer of its chain of waits, whether queues had 3
// stages or 11: they did not run ahead. Those copies go through the pipeline of all shared and global loads, which waits
// where memory cannot take them; it is the likely cause, and the engine has a way of its own.
//
// Units are dealt to the blocks like cards, each projection going on where the last one ended, so that the blocks' shares
// of a step differ by little, though a projection rarely divides evenly.
#pragma once

#include "astrai/step/shared.cuh"

namespace astrai {

constexpr int kFeederRest = 40;  // nanoseconds between two looks at queues that take nothing
constexpr uint32_t kFeederLanes = (1u << kStepWarps) - 1;  // one for each queue

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

/// A position in a ring of p.depth stages; `parity` is that of the barrier's phase.
struct StageCursor {
  int slot;
  uint32_t parity;
  __device__ __forceinline__ void advance(int depth) {
    if (++slot < depth) return;
    slot = 0;
    parity ^= 1;
  }
};

/// A queue, and how far its worker warp has read it.
struct WeightQueue {
  uint32_t stages, full, empty;  // in shared memory
  int depth;
  StageCursor at;
};

/// Whether the phase of this parity has ended.
__device__ __forceinline__ bool barrier_has_ended(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred ended;\n\tmbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n\tselp.u32 %0, 1, 0, ended;\n\t}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return done != 0;
}

/// A lane of the feeder: the filling end of the queue of worker warp `warp`.
struct Feeder {
  const StepParams& p;
  int warp;
  int unit, product, layer, start;  // of the next stage; product kStepProducts: none is left
  int steps;                        // left of the slice
  int column, row;                  // where it starts in the weight; with gates and ups, `row` counts groups of eight
  const TensorMap* map;

  __device__ __forceinline__ Feeder(const StepParams& params, int worker)
      : p(params), warp(worker), product(0), layer(0), start(0), map(nullptr) {
    unit = first_unit(start);
    enter();
  }

  __device__ __forceinline__ bool is_live() const { return product < kStepProducts; }

  __device__ __forceinline__ const TensorMap* map_of(int index) const {
    return p.maps + (index == kStepProducts - 1 ? 4 * p.n_layers : 4 * layer + index);
  }

  /// Go to the first tile from `unit` on that this warp has a part in.
  __device__ __forceinline__ void enter() {
    while (true) {
      const StepProduct& geometry = p.product[product];
      const StepSlice part(geometry, warp);
      const int tile = unit * part.groups + part.group;
      if (unit < geometry.units && tile < geometry.tiles) {
        column = part.slice * geometry.slice_steps * kLinearStep;
        row = product == 2 ? tile : tile * 16;
        steps = part.steps;
        map = map_of(product);
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
      // Of the projection behind this one: the engine must not wait for a descriptor.
      if (warp == 0 && product + 1 < kStepProducts) prefetch_map(map_of(product)[1]);
    }
  }

  /// Have the stage at the cursor copied.
  __device__ __forceinline__ void ask(uint32_t target, uint32_t full) const {
    barrier_expect(full, kStageBytes);
    if (product == 2) {
      copy_box(target, *map, column, 0, 0, row, full, kReadOnce);
    } else {
      copy_box(target, *map, column, row, full, kReadOnce);
    }
  }

  __device__ __forceinline__ void advance() {
    column += kLinearStep;
    if (--steps > 0) return;
    unit += static_cast<int>(gridDim.x);
    enter();
  }

  /// Fill a queue until everything has been asked for. A lane a queue; all lanes of the feeder that have one call it.
  __device__ __forceinline__ void run(const WeightQueue& queue) {
    StageCursor next = {0, 1};  // of `empty`: the phase before the first has ended
#pragma unroll 1
    while (__any_sync(kFeederLanes, is_live())) {
      const bool may = is_live() && barrier_has_ended(queue.empty + 8 * next.slot, next.parity);
      if (may) {
        ask(queue.stages + next.slot * kStageBytes, queue.full + 8 * next.slot);
        next.advance(p.depth);
        advance();
      }
      if (!__any_sync(kFeederLanes, may)) __nanosleep(kFeederRest);
    }
  }
};

}  // namespace astrai
