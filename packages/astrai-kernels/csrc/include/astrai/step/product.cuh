// The projections of a step: bit for bit what `linear` (linear/narrow.cuh) gives for up to eight rows.
#pragma once

#include "astrai/linear/narrow.cuh"
#include "astrai/step/rows.cuh"
#include "astrai/step/stream.cuh"
#include "astrai/step/trace.cuh"

namespace astrai {

/// Where a projection's outputs go, and what is added to them.
struct StepOutput {
  void* out;
  int64_t stride;
  const void* bias;
  const void* residual;  // rows of `residual_stride`; by the ids of the embedding where `ids` is given
  int64_t residual_stride;
  const int64_t* ids;
};

/// A block's part of one projection. It is made before its input is waited for: what can be computed and
/// fetched ahead is.
template <typename T, bool kTrace>
struct Projection {
  const StepParams& p;
  const StepProduct& geometry;
  const StepOutput output;
  const StepSlice part;
  const bool is_gated;
  const bool flags;    // words of what it gives are flags
  const bool polls;    // and those of the residual
  int unit;           // the next one
  int outputs;        // of a tile
  int row, quad;      // of what this lane finishes
  int lane;
  uint32_t step_bytes, rows_of_slice, weight_offset, row_offset;
  Quad residual, bias;

  __device__ __forceinline__ Projection(const StepParams& params, int index, int start, const char* x,
                                        const StepOutput& target)
      : p(params), geometry(params.product[index]), output(target),
        part(params.product[index], static_cast<int>(threadIdx.x) / 32), is_gated(index == 2),
        flags(index != 0 && index != 4), polls(index == 3), unit(first_unit(start)),
        outputs(is_gated ? 8 : 16), lane(static_cast<int>(threadIdx.x) % 32) {
    const int quads_bits = is_gated ? 1 : 2;  // of a row of a tile
    row = lane >> quads_bits;
    quad = (lane & ((1 << quads_bits) - 1)) * kLinearQuad;
    step_bytes = static_cast<uint32_t>(p.rows * kStepBytes);
    rows_of_slice = shared_address(x) + static_cast<uint32_t>(part.slice * geometry.slice_steps) * step_bytes;
    weight_offset = static_cast<uint32_t>(weight_matrices(lane));
    row_offset = static_cast<uint32_t>(row_matrices(lane, 0, p.rows));
    // Kept in registers: computed anew they would be part of every step.
    asm volatile("" : "+r"(weight_offset), "+r"(row_offset), "+r"(lane));
    fetch(0);
  }

  __device__ __forceinline__ bool has_unit() const { return unit < geometry.units; }
  __device__ __forceinline__ int tile() const { return unit * part.groups + part.group; }
  __device__ __forceinline__ int feature() const { return tile() * outputs + quad; }

  /// The warps of a group take turns with the end of a tile, one for all its rows.
  __device__ __forceinline__ bool ends(int turn) const {
    return (turn & (geometry.slices - 1)) == part.slice && row < p.rows && has_unit() && feature() < geometry.features;
  }

  /// What is added to the outputs of this unit. Residuals are older than the last barrier, but that of the down projection,
  /// which may be on its way.
  __device__ __forceinline__ void fetch(int turn) {
    residual = {{0u, 0u}};
    bias = {{0u, 0u}};
    if (!ends(turn)) return;
    if (output.residual != nullptr) {
      const int64_t line = output.ids == nullptr ? row : output.ids[row];
      if (output.ids == nullptr || (line >= 0 && line < p.vocab)) {
        const uint16_t* from = static_cast<const uint16_t*>(output.residual) + line * output.residual_stride + feature();
        residual = polls ? load_relaxed_quad(from) : load_fresh_quad(from);
      } else {
        residual = {{0x7fff7fffu, 0x7fff7fffu}};  // NaN
      }
    }
    if (output.bias != nullptr) bias = load_fresh_quad(static_cast<const uint16_t*>(output.bias) + feature());
  }

  /// The operands of a step, 64 k: of 16 weight rows, and of 8 rows of the input.
  struct Operands {
    uint32_t weights[4][4];
    uint32_t rows[2][4];
  };

  /// Wait for the oldest stage, take it into registers with the input's rows at `rows_of_step`, and hand it back.
  __device__ __forceinline__ void take(Operands& step, WeightQueue& queue, uint32_t& rows_of_step) const {
    barrier_await(queue.full + 8 * queue.at.slot, queue.at.parity);
    const uint32_t stage = queue.stages + queue.at.slot * kStageBytes + weight_offset;
    // Bits 4 to 6 of an address choose a word of a row, permuted.
    load_matrices(step.rows[0], rows_of_step);
    load_matrices(step.weights[0], stage);
    load_matrices(step.weights[1], stage ^ 32);
    load_matrices(step.rows[1], rows_of_step ^ 64);
    load_matrices(step.weights[2], stage ^ 64);
    load_matrices(step.weights[3], stage ^ 96);
    __syncwarp();
    if (lane == 0) barrier_arrive(queue.empty + 8 * queue.at.slot);
    queue.at.advance(queue.depth);
    rows_of_step += step_bytes;
  }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Operands& step) {
    add_half<T>(sum, step.weights[0], step.weights[1], step.rows[0]);
    add_half<T>(sum, step.weights[2], step.weights[3], step.rows[1]);
  }

  /// All products of one slice with one tile of 16 weight rows, in rising order of k. A step is taken while the one before
  /// is multiplied.
  __device__ __forceinline__ void multiply_slice(float (&sum)[4], WeightQueue& queue, const StepTrace<kTrace>& trace,
                                                 bool is_first) const {
    uint32_t rows_of_step = rows_of_slice + row_offset;
    Operands even, odd;
    take(even, queue, rows_of_step);
    if (kTrace && is_first) trace(kFirstStage);
#pragma unroll 1
    for (int left = part.steps - 1;; left -= 2) {
      if (left == 0) {
        multiply(sum, even);
        break;
      }
      take(odd, queue, rows_of_step);
      multiply(sum, even);
      if (left == 1) {
        multiply(sum, odd);
        break;
      }
      take(even, queue, rows_of_step);
      multiply(sum, odd);
    }
  }

  /// Add the slices, and what is added to them, and store.
  __device__ __forceinline__ void finish(const float* source) {
    float total[kLinearQuad] = {};
    add_slices(total, source, kSums, geometry.slices);
    if (is_gated) {
      float up[kLinearQuad] = {};
      add_slices(up, source + 8, kSums, geometry.slices);
#pragma unroll
      for (int i = 0; i < kLinearQuad; ++i) total[i] = gated_silu(total[i], up[i]);
    }
    if (output.bias != nullptr) {
      float value[kLinearQuad];
      unpack(bias, value, T());
#pragma unroll
      for (int i = 0; i < kLinearQuad; ++i) total[i] = __fadd_rn(total[i], value[i]);
    }
    Quad result = pack(total, T());
    if (polls) {
      const uint16_t* line = static_cast<const uint16_t*>(output.residual) + row * output.residual_stride + feature();
      while (is_absent(residual)) residual = load_relaxed_quad(line);
    }
    if (output.residual != nullptr) result = add_residual<T>(result, residual);
    void* const target = static_cast<uint16_t*>(output.out) + row * output.stride + feature();
    if (flags) {
      store_relaxed_quad(target, result);
    } else {
      *static_cast<uint2*>(target) = make_uint2(result.word[0], result.word[1]);
    }
  }

  /// All units. One call in the kernel: it is the hot loop.
  __device__ __forceinline__ void run(WeightQueue& queue, float (&sums)[2][kStepWarps][kSums], const StepTrace<kTrace>& trace) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    int turn = 0;
#pragma unroll 1
    while (has_unit()) {
      if (tile() < geometry.tiles) {
        float sum[4] = {};
        multiply_slice(sum, queue, trace, turn == 0);
        float* const target = sums[turn % 2][warp];
#pragma unroll
        for (int i = 0; i < 4; ++i) target[(lane % 4 * 2 + i % 2) * kSumsPitch + i / 2 * 8 + lane / 4] = sum[i];
      }
      trace(kMultiplied);
      // Two sets of sums: nobody writes these again before the next tile's barrier, when they have been read.
      workers_sync();
      if (ends(turn)) finish(sums[turn % 2][part.group * geometry.slices] + row * kSumsPitch + quad);
      trace(kStored);
      ++turn;
      unit += static_cast<int>(gridDim.x);
      fetch(turn);
    }
  }
};

}  // namespace astrai
