// One row of logits as a block of a cluster sees it: scores after penalties, as keys that integers can order.
#pragma once

#include "astrai/common/types.cuh"
#include "astrai/sampling/cluster.cuh"
#include "astrai/sampling/params.h"

namespace astrai {

// Keys: unsigned integers in the order of the scores. -0 equals +0; every NaN is the largest, as torch's argmax has it.
constexpr uint32_t kNoKey = 0;  // of no score
constexpr uint32_t kKeyOfMinusInfinity = 0x007fffffu;
constexpr uint32_t kKeyOfInfinity = 0xff800000u;
constexpr uint32_t kKeyOfNaN = 0xffffffffu;

__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(__fadd_rn(score, 0.0f));
  if (score != score) return kKeyOfNaN;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float score_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/// Larger of each half of two words of a 16-bit type; NaN wins, as it does among keys.
__device__ __forceinline__ uint32_t packed_max(bfloat16, uint32_t left, uint32_t right) {
  uint32_t largest;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(largest) : "r"(left), "r"(right));
  return largest;
}
__device__ __forceinline__ uint32_t packed_max(float16, uint32_t left, uint32_t right) {
  uint32_t largest;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(largest) : "r"(left), "r"(right));
  return largest;
}

/// Reads the octets of a row that belong to this block. Octet i of a row belongs to warp i / 32 of the cluster's warps
/// in turn, which are dealt over the blocks: likely ids lie together, and each block should get its share.
///
/// kPlain: no penalties, and every octet is whole and 16-byte aligned. What else there is shares one instance.
template <typename T, bool kPlain_>
struct Row {
  static constexpr bool kPlain = kPlain_;
  using Raw = Octet<T>;
  /// Octets of a thread whose loads are in flight together: in a pass that compares, in one that weighs every token (there
  /// arithmetic takes the longer, and the registers), and in the passes of rare rows.
  static constexpr int kComparing = kPlain ? (sizeof(T) == 2 ? 8 : 4) : 1;
  static constexpr int kWeighing = kPlain ? 4 : 1;
  static constexpr int kRare = 1;

  const T* logits;
  const int32_t* counts;
  const uint8_t* seen;
  float presence;
  float frequency;
  float repetition;
  bool penalises;
  bool aligned;
  int vocab;
  int octets;
  int step;   // octets that the cluster takes at a time
  int first;  // this thread's octet of those

  __device__ __forceinline__ Row(const SamplingParams& params, int64_t row, int rank, int size)
      : penalises(!kPlain && params.counts != nullptr), aligned(kPlain || params.aligned) {
    logits = static_cast<const T*>(params.logits) + row * params.logits_stride;
    vocab = params.vocab;
    octets = (vocab + kOctet - 1) / kOctet;
    step = size * kSamplingThreads;
    first = (static_cast<int>(threadIdx.x) / 32 * size + rank) * 32 + static_cast<int>(threadIdx.x) % 32;
    if (penalises) {
      counts = params.counts + row * params.counts_stride;
      seen = params.seen + row * params.seen_stride;
      presence = params.presence.data[row * params.presence.stride];
      frequency = params.frequency.data[row * params.frequency.stride];
      repetition = params.repetition.data[row * params.repetition.stride];
    }
  }

  __device__ __forceinline__ int rounds() const { return (octets + step - 1) / step; }

  /// Zeros from the row's end on.
  __device__ __forceinline__ Octet<T> load(int octet) const {
    if (octet >= octets) return {};
    const T* source = logits + octet * kOctet;
    return aligned ? load_octet<true, true>(source, kOctet) : load_octet<false, true>(source, vocab - octet * kOctet);
  }

  /// Scores of a loaded octet; minus infinity, which has no weight, from the row's end on.
  __device__ __forceinline__ void scores(const Octet<T>& raw, int octet, float (&score)[kOctet]) const {
    unpack(raw, score);
    const int begin = octet * kOctet;
    if (penalises && begin < vocab) penalise(begin, score);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (kPlain ? octet >= octets : begin + i >= vocab) score[i] = __uint_as_float(0xff800000u);
    }
  }

  /// Keys of a loaded octet; kNoKey from the row's end on.
  __device__ __forceinline__ void keys(const Octet<T>& raw, int octet, uint32_t (&key)[kOctet]) const {
    float score[kOctet];
    scores(raw, octet, score);
    keys(score, octet, key);
  }
  __device__ __forceinline__ void keys(const float (&score)[kOctet], int octet, uint32_t (&key)[kOctet]) const {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const bool exists = kPlain ? octet < octets : octet * kOctet + i < vocab;
      key[i] = exists ? key_of(score[i]) : kNoKey;
    }
  }

  /// The largest of keys(): four instructions and one key where the scores are the logits' own 16 bits.
  __device__ __forceinline__ uint32_t largest_key(const Octet<T>& raw, int octet) const {
    if constexpr (sizeof(T) == 2 && kPlain) {
      if (octet >= octets) return kNoKey;
      const uint32_t pair = packed_max(T(), packed_max(T(), raw.word[0], raw.word[1]), packed_max(T(), raw.word[2], raw.word[3]));
      const uint32_t largest = packed_max(T(), pair, pair >> 16);
      float value[kOctet];
      unpack(Octet<T>{{largest & 0xffffu, 0, 0, 0}}, value);
      return key_of(value[0]);
    } else {
      uint32_t key[kOctet];
      keys(raw, octet, key);
      uint32_t largest = key[0];
#pragma unroll
      for (int i = 1; i < kOctet; ++i) largest = key[i] > largest ? key[i] : largest;
      return largest;
    }
  }

  /// The roundings of astrai_kernels.reference.apply_penalties, one an operation.
  __device__ __forceinline__ void penalise(int begin, float (&score)[kOctet]) const {
    int32_t count[kOctet];
    uint32_t is_seen[kOctet];
    if (aligned) {
      const uint4 low = load_readonly(reinterpret_cast<const uint4*>(counts + begin));
      const uint4 high = load_readonly(reinterpret_cast<const uint4*>(counts + begin) + 1);
      const uint32_t word[kOctet] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      const uint32_t first_four = load_readonly(reinterpret_cast<const uint32_t*>(seen + begin));
      const uint32_t last_four = load_readonly(reinterpret_cast<const uint32_t*>(seen + begin) + 1);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        count[i] = static_cast<int32_t>(word[i]);
        is_seen[i] = ((i < 4 ? first_four : last_four) >> (8 * (i % 4))) & 0xffu;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const bool exists = begin + i < vocab;
        count[i] = exists ? counts[begin + i] : 0;
        is_seen[i] = exists ? seen[begin + i] : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (is_seen[i]) {
        score[i] = score[i] > 0.0f ? __fdiv_rn(score[i], repetition) : __fmul_rn(score[i], repetition);
      }
      if (count[i] != 0) {
        if (count[i] > 0) score[i] = __fsub_rn(score[i], presence);
        score[i] = __fsub_rn(score[i], __fmul_rn(frequency, static_cast<float>(count[i])));
      }
    }
  }

  /// visit(round, octet, raw) for each of this thread's octets in rising order; all threads call it equally often.
  template <int kBatch, typename Visit>
  __device__ __forceinline__ void each_octet(Visit visit) const {
    const int n_rounds = rounds();
    for (int round = 0; round < n_rounds; round += kBatch) {
      Octet<T> raw[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) raw[j] = load((round + j) * step + first);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) visit(round + j, (round + j) * step + first, raw[j]);
    }
  }
};

}  // namespace astrai
