// What the kernels of linear share: asynchronous copies, tensor-core fragments, the end of an output.
//
// The weight is the A operand of mma.m16n8k16 (16 output features), x the B operand (8 rows), so that few rows waste
// little. Both lie in shared memory as rows of one step (64 k, 128 bytes), their 16-byte words permuted within the row
// (word u of row r is at u ^ r % 8), so that the copies in and the matrix loads out are free of bank conflicts.
#pragma once

#include "astrai/common/types.cuh"
#include "astrai/linear/params.h"

namespace astrai {

constexpr int kStepBytes = kLinearStep * 2;  // of a row, in a stage
constexpr int kStepParts = kStepBytes / 16;  // 16-byte words of a row, in a stage

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Copy 16 bytes to shared memory, past L1: weights, which are read once. `wanted` false: zeros, nothing is read.
__device__ __forceinline__ void copy_streamed(uint32_t target, const void* source, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(wanted ? 16 : 0)
               : "memory");
}

/// The same through L1: rows of x, which every warp of a multiprocessor reads.
__device__ __forceinline__ void copy_cached(uint32_t target, const void* source, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(wanted ? 16 : 0)
               : "memory");
}

/// Fetch the 128-byte line of `address` into L2.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Wait until all but the `kPending` latest groups of this thread's copies have arrived.
template <int kPending>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Offset of 16-byte word `part` of row `row` in a stage.
__device__ __forceinline__ int word_offset(int row, int part) { return row * kStepBytes + (part ^ row % 8) * 16; }

/// Load four 8x8 matrices of 16-bit elements; lanes 8i .. 8i+7 give the addresses of the rows of the i-th.
///
/// Kept in order with the copies and the waits for them.
__device__ __forceinline__ void load_matrices(uint32_t (&part)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3])
               : "r"(address));
}

__device__ __forceinline__ void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Where this lane's matrix rows start in 16 weight rows, for k 0-15 of a step; k 16i .. 16i+15 are at `offset ^ i * 32`.
__device__ __forceinline__ uint32_t weight_matrices(int lane) { return word_offset(lane % 16, lane / 16); }

/// The same in 8-row tile `tile` of `rows` rows of x, for k 0-31; k 32-63 are at `offset ^ 64`.
///
/// Rows that x does not have repeat the last one: their sums are columns of their own, which nobody stores.
__device__ __forceinline__ uint32_t row_matrices(int lane, int tile, int rows) {
  return word_offset(min(tile * 8 + lane % 8, rows - 1), lane / 8);
}

/// Add the products of half a step, 32 k: `early` and `late` are 16 weight rows, `rows` 8 rows of x.
///
/// sum[0..3] are (feature g, row 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1) of lane (g, q) = (lane / 4, lane % 4).
/// Every kernel adds 16 k at a time in rising order, with this instruction: that is part of the reduction contract.
template <typename T>
__device__ __forceinline__ void add_half(float (&sum)[4], const uint32_t (&early)[4], const uint32_t (&late)[4],
                                         const uint32_t (&rows)[4]) {
  mma(sum, early, rows[0], rows[1], T());
  mma(sum, late, rows[2], rows[3], T());
}

/// Row of the weight for feature `local` of tile `tile`, or of any valid one where the tile reaches past the end.
///
/// A tile is `width` weight rows. With swiglu its first half are gate rows and its second half the matching up rows.
__device__ __forceinline__ int64_t weight_row(const LinearParams& params, int tile, int width, int local) {
  if (!params.swiglu) return min(tile * width + local, params.features - 1);
  const int half = width / 2;
  const bool is_up = local >= half;
  const int feature = min(tile * half + (is_up ? local - half : local), params.features - 1);
  return is_up ? static_cast<int64_t>(params.features) + feature : feature;
}

/// Add four sums of one slice; the slices' order is the caller's, and part of the reduction contract.
__device__ __forceinline__ void add_quad(float (&total)[kLinearQuad], const float4& part, bool is_first) {
  total[0] = is_first ? part.x : __fadd_rn(total[0], part.x);
  total[1] = is_first ? part.y : __fadd_rn(total[1], part.y);
  total[2] = is_first ? part.z : __fadd_rn(total[2], part.z);
  total[3] = is_first ? part.w : __fadd_rn(total[3], part.w);
}

/// Elements of a quad as fp32, and back with rounding to nearest even.
struct Quad {
  uint32_t word[2];
};

__device__ __forceinline__ void unpack(const Quad& quad, float (&value)[kLinearQuad], bfloat16) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    value[2 * i] = __uint_as_float(quad.word[i] << 16);
    value[2 * i + 1] = __uint_as_float(quad.word[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void unpack(const Quad& quad, float (&value)[kLinearQuad], float16) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
        : "=f"(value[2 * i]), "=f"(value[2 * i + 1])
        : "r"(quad.word[i]));
  }
}

__device__ __forceinline__ Quad pack(const float (&value)[kLinearQuad], bfloat16) {
  Quad quad;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(quad.word[i]) : "f"(value[2 * i + 1]), "f"(value[2 * i]));
  }
  return quad;
}

__device__ __forceinline__ Quad pack(const float (&value)[kLinearQuad], float16) {
  Quad quad;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(quad.word[i]) : "f"(value[2 * i + 1]), "f"(value[2 * i]));
  }
  return quad;
}

/// Load the first `count` (1 to 4) elements; the others are zero. kReadOnly: nothing writes them while the kernel runs.
template <bool kReadOnly>
__device__ __forceinline__ Quad load_quad(const uint16_t* source, int count, bool aligned) {
  Quad quad = {{0u, 0u}};
  if (aligned && count >= kLinearQuad) {
    const uint2* address = reinterpret_cast<const uint2*>(source);
    const uint2 both = kReadOnly ? __ldg(address) : *address;
    quad.word[0] = both.x;
    quad.word[1] = both.y;
  } else {
#pragma unroll
    for (int i = 0; i < kLinearQuad; ++i) {
      if (i < count) {
        const uint32_t bits = kReadOnly ? __ldg(source + i) : source[i];
        quad.word[i / 2] |= bits << (16 * (i % 2));
      }
    }
  }
  return quad;
}

/// The residual of four outputs, fetched long before it is needed; zeros without one.
__device__ __forceinline__ Quad load_residual(const LinearParams& params, int row, int feature) {
  if (params.residual == nullptr) return Quad{{0u, 0u}};
  const uint16_t* source = static_cast<const uint16_t*>(params.residual) + row * params.residual_stride + feature;
  return load_quad<false>(source, params.features - feature, params.quads_aligned);
}

/// The bias of four outputs, likewise.
__device__ __forceinline__ Quad load_bias(const LinearParams& params, int feature) {
  if (params.bias == nullptr) return Quad{{0u, 0u}};
  const uint16_t* source = static_cast<const uint16_t*>(params.bias) + feature;
  return load_quad<true>(source, params.features - feature, params.quads_aligned);
}

/// silu(gate) * up.
__device__ __forceinline__ float gated_silu(float gate, float up) {
  return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, __expf(-gate))), up);
}

/// The rounded output plus the residual, rounded again.
template <typename T>
__device__ __forceinline__ Quad add_residual(const Quad& result, const Quad& residual) {
  float rounded[kLinearQuad];
  float other[kLinearQuad];
  unpack(result, rounded, T());
  unpack(residual, other, T());
#pragma unroll
  for (int i = 0; i < kLinearQuad; ++i) rounded[i] = __fadd_rn(rounded[i], other[i]);
  return pack(rounded, T());
}

/// Finish and store outputs `feature` .. `feature + 3` of a row (those that exist): `sum` are the dot products, or the
/// gates, and `up` then the other half. One rounding; with a residual a second one, of the rounded output plus it.
/// Returns what was stored.
template <typename T>
__device__ __forceinline__ Quad store_outputs(const LinearParams& params, int row, int feature,
                                              float (&sum)[kLinearQuad], const float (&up)[kLinearQuad],
                                              const Quad& bias, const Quad& residual) {
  const int count = params.features - feature;
  if (params.swiglu) {
#pragma unroll
    for (int i = 0; i < kLinearQuad; ++i) sum[i] = gated_silu(sum[i], up[i]);
  }
  if (params.bias != nullptr) {
    float value[kLinearQuad];
    unpack(bias, value, T());
#pragma unroll
    for (int i = 0; i < kLinearQuad; ++i) sum[i] = __fadd_rn(sum[i], value[i]);
  }
  Quad result = pack(sum, T());
  if (params.residual != nullptr) result = add_residual<T>(result, residual);
  uint16_t* target = static_cast<uint16_t*>(params.out) + row * params.out_stride + feature;
  if (params.quads_aligned && count >= kLinearQuad) {
    *reinterpret_cast<uint2*>(target) = make_uint2(result.word[0], result.word[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kLinearQuad; ++i) {
      if (i < count) target[i] = static_cast<uint16_t>(result.word[i / 2] >> (16 * (i % 2)));
    }
  }
  return result;
}

}  // namespace astrai
