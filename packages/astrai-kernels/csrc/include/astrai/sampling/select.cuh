// What a draw is made of: weights, the generator, and the search for the token at which a running sum passes a target.
// sampling.cuh says what they compute and in which order.
#pragma once

#include "astrai/common/types.cuh"
#include "astrai/sampling/cluster.cuh"
#include "astrai/sampling/params.h"
#include "astrai/sampling/row.cuh"

namespace astrai {

constexpr int kListCapacity = 2048;  // a tunable: tokens that are listed at most; a power of two

constexpr int kDigitBits = 9;
static_assert(1 << kDigitBits == kSamplingThreads, "a thread owns a bin of the histogram");
constexpr int kMostVocab = 1 << 21;  // rounds fit the histogram, sums of weights 64 bits

// Bins of equal width in the logarithm of the weight, 48 a factor of two: past the last there is no weight left.
constexpr int kBins = 4 * kSamplingThreads;
constexpr float kBinsPerOctave = 48.0f;
static_assert(kBins / 48 > 41, "weights below half a unit are 0");

struct SamplingShared {
  uint64_t scratch[kSamplingWarps];
  uint64_t slots[2];
  uint64_t found[2][3];                // see locate
  uint64_t kept;                       // weight that top-p keeps
  alignas(16) uint32_t low[kBins];     // histogram, low and high words: 64-bit shared atomics would be loops
  alignas(16) uint32_t high[kBins];
  uint32_t best[kSamplingThreads];     // largest key of each thread
  uint32_t bound;
  uint32_t n_listed[3];                // one for each time that a draw lists tokens
  uint32_t token;
  uint64_t listed[kListCapacity];      // ~key << 32 | id: rising in the order of the draw
};

/// SplitMix64's finaliser (Steele, Lea & Flood 2014), the twin of astrai_infer's sampling.strategies.uniform.
__device__ __forceinline__ uint64_t split_mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// u in [0, 1) with 53 bits, a function of seed and position alone.
__device__ __forceinline__ double uniform(int64_t seed, int64_t position) {
  const uint64_t x = split_mix(static_cast<uint64_t>(seed) ^ split_mix(static_cast<uint64_t>(position) + 1));
  return static_cast<double>(x >> 11) * 1.1102230246251565e-16;  // 2^-53
}

/// u as a position within `total`: floor(u * total), below total.
__device__ __forceinline__ uint64_t position_within(double u, uint64_t total) {
  const uint64_t position = static_cast<uint64_t>(u * static_cast<double>(total));
  return position < total ? position : total - 1;
}

/// A weight in two parts of 20 bits (and one more for 1 itself), so that a few thousand add up in 32-bit integers.
struct Weight {
  uint32_t high;
  uint32_t low;
  __device__ __forceinline__ uint64_t whole() const { return (static_cast<uint64_t>(high) << 20) + low; }
};

/// Weights of scores, relative to the row's largest.
struct Weigher {
  uint32_t largest_key;
  float largest;
  float scale;  // log2(e) / temperature

  /// (score - largest) / temperature in powers of two; the largest itself is 0 whatever the scale.
  __device__ __forceinline__ float exponent(float score) const {
    return score == largest ? 0.0f : __fmul_rn(__fsub_rn(score, largest), scale);
  }
  __device__ __forceinline__ float ratio(float score) const { return exp2f(exponent(score)); }

  /// round(ratio * 2^40): the likeliest token weighs 2^40. Adding 2^23 leaves the integer in the low bits: truncated, and
  /// then rounded to even as the whole would be, without the conversions to integers, which are slow.
  __device__ __forceinline__ Weight weight_of(float ratio) const {
    constexpr float kShift = 8388608.0f;
    const float scaled = __fmul_rn(ratio, 1048576.0f);
    const float high = __fadd_rz(scaled, kShift);
    const float rest = __fsub_rn(scaled, __fsub_rn(high, kShift));
    const float low = fmaf(rest, 1048576.0f, kShift);
    return {__float_as_uint(high) & 0x7fffffu, __float_as_uint(low) & 0x7fffffu};
  }
  __device__ __forceinline__ uint64_t weight(float score) const { return weight_of(ratio(score)).whole(); }

  /// Where a score lies among the bins; rises as the score falls.
  __device__ __forceinline__ float bin_position(float score) const {
    return __fmul_rn(-exponent(score), kBinsPerOctave);
  }
};

template <typename T>
__device__ __forceinline__ T value_or(const PerRow<T>& values, int64_t row, T otherwise) {
  return values.data ? values.data[row * values.stride] : otherwise;
}

/// What a row asks for.
struct Filters {
  uint64_t k;  // 0: every token
  float top_p;
  float min_p;
  bool by_mass;
  bool by_ratio;
};

/// Add to a bin. The low word's carry goes to the high word, so the pair is exact in any order of additions.
__device__ __forceinline__ void add_to_bin(SamplingShared& shared, int bin, uint64_t mass) {
  const uint32_t low = static_cast<uint32_t>(mass);
  uint32_t high = static_cast<uint32_t>(mass >> 32);
  if (low != 0 && atomicAdd(&shared.low[bin], low) > ~low) ++high;
  if (high != 0) atomicAdd(&shared.high[bin], high);
}

/// Mass of the digit's bin that this thread owns, over the `size` blocks that filled histograms.
__device__ __forceinline__ uint64_t own_bin(SamplingShared& shared, int size) {
  const int bin = static_cast<int>(threadIdx.x);
  if (size == 1) return (static_cast<uint64_t>(shared.high[bin]) << 32) + shared.low[bin];
  uint64_t mass = 0;
  for (int rank = 0; rank < size; ++rank) {
    const volatile uint32_t* low = at_peer(&shared.low[bin], rank);
    const volatile uint32_t* high = at_peer(&shared.high[bin], rank);
    mass += (static_cast<uint64_t>(*high) << 32) + *low;
  }
  return mass;
}

__device__ __forceinline__ uint64_t order_of(uint32_t largest_key, uint32_t key, uint32_t id, int index_bits) {
  return (static_cast<uint64_t>(largest_key - key) << index_bits) | id;
}

/// Weight at which top-p's share of `sum` is reached; the likeliest token is always kept.
__device__ __forceinline__ uint64_t share_of(float top_p, uint64_t sum) {
  const double part = ceil(static_cast<double>(top_p) * static_cast<double>(sum));
  return part >= 1.0 ? static_cast<uint64_t>(part) : 1;
}

/// What the blocks of a row carry from call to call.
struct Turns {
  int slot;
  int found;
};

constexpr uint64_t kNotFound = ~0ull;

/// Find the part in which the running mass reaches `target`: before < target <= before + mass of the part. Each thread
/// owns kParts neighbouring parts.
///
/// Writes the part to found[0] (kNotFound if all mass is less), the mass before it to [1] and that in it to [2], and
/// returns where. Begins after a barrier that ends the masses' making and ends with one.
template <int kParts>
__device__ __forceinline__ const uint64_t* locate(SamplingShared& shared, Turns& turns, const uint64_t (&mass)[kParts],
                                                  uint64_t before, uint64_t target) {
  uint64_t* found = shared.found[turns.found];
  turns.found ^= 1;  // readers of this result are not overtaken by the next one's writer
  if (threadIdx.x == 0) found[0] = kNotFound;
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) sum += mass[i];
  uint64_t total;
  uint64_t start = before + block_prefix(sum, shared.scratch, &total);  // its barriers order found[0]
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (start < target && target <= start + mass[i]) {
      found[0] = threadIdx.x * kParts + i;
      found[1] = start;
      found[2] = mass[i];
    }
    start += mass[i];
  }
  __syncthreads();
  return found;
}

}  // namespace astrai
