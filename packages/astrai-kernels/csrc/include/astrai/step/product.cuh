// The projections of a step: bit for bit what `linear` (linear/narrow.cuh) gives for up to eight rows.
#pragma once

#include "astrai/linear/narrow.cuh"
#include "astrai/step/rows.cuh"
#include "astrai/step/stream.cuh"

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

/// Where a warp's products of one slice with one tile stand.
struct SliceProduct {
  uint32_t rows;        // the input's next step, in shared memory
  uint32_t step_bytes;  // from one to the next
  uint32_t weight_offset, row_offset;
  float sum[4];
};

/// `count` steps, and as many copies, none of which begins another tile. kDepth is p.depth: the wait takes a constant.
template <typename T, int kDepth>
__device__ __forceinline__ void multiply_steps(WeightStream& stream, int count, SliceProduct& at) {
#pragma unroll 1
  for (; count > 0; --count) {
    await_copies<kDepth - 1>();
    __syncwarp();  // the copies of all its lanes
    const uint32_t stage = stream.queue + static_cast<uint32_t>(stream.slot);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t early[4];
      uint32_t late[4];
      uint32_t rows[4];
      load_matrices(early, stage + (at.weight_offset ^ 64 * half));
      load_matrices(late, stage + (at.weight_offset ^ (64 * half + 32)));
      load_matrices(rows, at.rows + (at.row_offset ^ 64 * half));
      add_half<T>(at.sum, early, late, rows);
    }
    at.rows += at.step_bytes;
    __syncwarp();  // the stage has been read: the copies may overwrite it
    stream.copy(stage);
    stream.slot = stream.slot == (kDepth - 1) * kStageBytes ? 0 : stream.slot + kStageBytes;
  }
}

/// All products of one slice with one tile of 16 weight rows, in rising order of k.
template <typename T>
__device__ __forceinline__ void multiply_slice(WeightStream& stream, int steps, SliceProduct& at) {
#pragma unroll 1
  while (steps > 0) {
    const bool is_live = stream.is_live();
    const int count = is_live ? min(steps, stream.steps) : steps;
    switch (stream.p.depth) {  // kQueueLengths
      case 11: multiply_steps<T, 11>(stream, count, at); break;
      case 10: multiply_steps<T, 10>(stream, count, at); break;
      case 8: multiply_steps<T, 8>(stream, count, at); break;
      case 6: multiply_steps<T, 6>(stream, count, at); break;
      case 5: multiply_steps<T, 5>(stream, count, at); break;
      case 4: multiply_steps<T, 4>(stream, count, at); break;
      default: multiply_steps<T, 3>(stream, count, at);
    }
    steps -= count;
    if (is_live) stream.advance(count);
  }
}

/// This block's part of projection `index`, whose input lies in `x`. One call in the kernel: it is the hot loop.
template <typename T>
__device__ __forceinline__ void project(WeightStream& stream, int index, int start, const char* x,
                                        const StepOutput& output, float (&sums)[2][kStepWarps][kSums]) {
  const StepParams& p = stream.p;
  const StepProduct& geometry = p.product[index];
  const StepSlice part(geometry, stream.warp);
  const int lane = stream.lane;
  const bool is_gated = index == 2;
  const int outputs = is_gated ? 8 : 16;  // of a tile
  const int quads = outputs / kLinearQuad;
  const int row = lane / quads;
  const int quad = lane % quads * kLinearQuad;
  const uint32_t step_bytes = static_cast<uint32_t>(p.rows * kStepBytes);
  const uint32_t rows_of_slice = shared_address(x) + static_cast<uint32_t>(part.slice * geometry.slice_steps) * step_bytes;
  int turn = 0;
#pragma unroll 1
  for (int unit = first_unit(start); unit < geometry.units; unit += static_cast<int>(gridDim.x)) {
    const int tile = unit * part.groups + part.group;
    const bool has_tile = tile < geometry.tiles;
    const int feature = tile * outputs + quad;
    // The warps of a group take turns with the end of a tile, one for all its rows; what it adds is on its way meanwhile.
    const bool ends = has_tile && (turn & (geometry.slices - 1)) == part.slice && row < p.rows && feature < geometry.features;
    Quad residual = {{0u, 0u}};
    Quad bias = {{0u, 0u}};
    if (ends && output.residual != nullptr) {
      const int64_t line = output.ids == nullptr ? row : output.ids[row];
      if (output.ids == nullptr || (line >= 0 && line < p.vocab)) {
        residual = load_fresh_quad(static_cast<const uint16_t*>(output.residual) + line * output.residual_stride + feature);
      } else {
        residual = {{0x7fff7fffu, 0x7fff7fffu}};  // NaN
      }
    }
    if (ends && output.bias != nullptr) bias = load_fresh_quad(static_cast<const uint16_t*>(output.bias) + feature);

    if (has_tile) {
      SliceProduct at = {rows_of_slice, step_bytes, static_cast<uint32_t>(weight_matrices(lane)),
                         static_cast<uint32_t>(row_matrices(lane, 0, p.rows)), {}};
      multiply_slice<T>(stream, part.steps, at);
      float* const target = sums[turn % 2][stream.warp];
#pragma unroll
      for (int i = 0; i < 4; ++i) target[(lane % 4 * 2 + i % 2) * kSumsPitch + i / 2 * 8 + lane / 4] = at.sum[i];
    }
    // Two sets of sums: nobody writes these again before the next tile's barrier, when they have been read.
    workers_sync();
    if (ends) {
      const float* source = sums[turn % 2][part.group * geometry.slices] + row * kSumsPitch + quad;
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
      if (output.residual != nullptr) result = add_residual<T>(result, residual);
      void* const target = static_cast<uint16_t*>(output.out) + row * output.stride + feature;
      *static_cast<uint2*>(target) = make_uint2(result.word[0], result.word[1]);
    }
    ++turn;
  }
}

}  // namespace astrai
