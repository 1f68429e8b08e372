// How attention finds and reads keys and values: the addressing policies (row K2) and the e4m3 cache.
//
// An e4m3 cache has a scale per token and head (fused/qkv.cuh writes it): the value is scale * element. Elements become
// fp16 in registers, exactly; the scale of a key multiplies its scores and that of a value its weight, so no element is
// ever scaled. Products are then taken in fp16 whatever the type of the queries and the output.
#pragma once

#include "astrai/attention/mma.cuh"
#include "astrai/attention/params.h"
#include "astrai/common/types.cuh"

namespace astrai {

/// A policy says where a key lies and how wide its elements are. kPaged: through req_to_token, known when compiled.
/// kFresh: the newest key and value, and the queries, come from the projection, not yet normed, rotated or written.
struct PagedKV {
  using Params = AttentionParams;
  static constexpr bool kFresh = false;
  static constexpr bool kPaged = true;
  static constexpr bool kNarrow = false;
};
/// Paged or contiguous, as the parameters say.
struct AnyKV {
  using Params = AttentionParams;
  static constexpr bool kFresh = false;
  static constexpr bool kPaged = false;
  static constexpr bool kNarrow = false;
};
/// Likewise, of e4m3.
struct NarrowKV {
  using Params = AttentionParams;
  static constexpr bool kFresh = false;
  static constexpr bool kPaged = false;
  static constexpr bool kNarrow = true;
};
struct FreshKV {
  using Params = FreshAttentionParams;
  static constexpr bool kFresh = true;
  static constexpr bool kPaged = true;
  static constexpr bool kNarrow = false;
};

/// Slot of the key at `position`, relative to kv_base.
template <typename KV>
__device__ __forceinline__ int slot_of(const int32_t* table, int position) {
  return KV::kPaged || table != nullptr ? table[position] : position;
}

/// Eight neighbouring elements of a key or value.
template <bool kNarrow>
struct KVPiece {
  using Type = uint4;
};
template <>
struct KVPiece<true> {
  using Type = uint2;
};

__device__ __forceinline__ void load_piece(uint4& piece, const void* address) { piece = load_streaming(address); }
__device__ __forceinline__ void load_piece(uint2& piece, const void* address) { piece = load_streaming_half(address); }
__device__ __forceinline__ void clear_piece(uint4& piece) { piece = make_uint4(0, 0, 0, 0); }
__device__ __forceinline__ void clear_piece(uint2& piece) { piece = make_uint2(0, 0); }

// What widen_e4m3 yields, times this, is the element. Before sm_89 the exponent keeps e4m3's bias of 7 instead of 15.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
constexpr float kWidenedUnit = 1.0f;
#else
constexpr float kWidenedUnit = 256.0f;
#endif

/// Four e4m3 elements as two pairs of fp16, in their order. Before sm_89 a NaN becomes 480.
__device__ __forceinline__ uint2 widen_e4m3(uint32_t four) {
  uint2 pairs;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, low;\n\t"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
      : "=r"(pairs.x), "=r"(pairs.y)
      : "r"(four));
#else
  const uint32_t even = ((four & 0x007f007fu) << 7) | ((four & 0x00800080u) << 8);
  const uint32_t odd = ((four & 0x7f007f00u) >> 1) | (four & 0x80008000u);
  pairs = make_uint2(low_halves(even, odd), high_halves(even, odd));
#endif
  return pairs;
}

__device__ __forceinline__ uint4 widen_e4m3(uint2 eight) {
  const uint2 first = widen_e4m3(eight.x);
  const uint2 second = widen_e4m3(eight.y);
  return make_uint4(first.x, first.y, second.x, second.y);
}
__device__ __forceinline__ uint4 as_16_bit(uint4 piece) { return piece; }
__device__ __forceinline__ uint4 as_16_bit(uint2 piece) { return widen_e4m3(piece); }

/// Weights times the scales of their values are kept in fp16 and carry this factor: it puts values of up to 28,000 and
/// down to a thousandth in range. Larger ones saturate.
constexpr float kWeightUnit = 1024.0f;
constexpr float kLargestHalf = 65504.0f;

/// Eight bf16 as eight fp16; beyond fp16's range they saturate.
__device__ __forceinline__ uint4 half_from_bfloat16(uint4 eight) {
  Octet<bfloat16> wide = {{eight.x, eight.y, eight.z, eight.w}};
  float value[kOctet];
  unpack(wide, value);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) value[i] = fminf(fmaxf(value[i], -kLargestHalf), kLargestHalf);
  Octet<float16> narrow;
  pack(value, narrow);
  return make_uint4(narrow.word[0], narrow.word[1], narrow.word[2], narrow.word[3]);
}

/// A pair of results in the output's type.
template <typename T, typename KV>
__device__ __forceinline__ uint32_t pack_result(const AttentionParams& p, float low, float high) {
  if constexpr (KV::kNarrow) {
    if (p.rows_are_bfloat16) return pack_pair<bfloat16>(low, high);
  }
  return pack_pair<T>(low, high);
}

}  // namespace astrai
