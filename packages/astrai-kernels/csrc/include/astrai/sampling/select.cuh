// What a draw is made of: weights, the generator, and the search for the token at which a running sum passes a target.
// sampling.cuh says what they compute and in which order.
#pragma once

#include "astrai/common/types.cuh"
#include "astrai/sampling/cluster.cuh"
#include "astrai/sampling/params.h"
#include "astrai/sampling/row.cuh"

namespace astrai {

constexpr int kListCapacity = 4096;  // a tunable: candidates that are listed at most

constexpr int kDigitBits = 9;
static_assert(1 << kDigitBits == kSamplingThreads, "a thread owns a bin of the histogram");
constexpr int kMostVocab = 1 << 21;    // rounds fit the histogram, sums of weights 64 bits
constexpr uint64_t kOne = 1ull << 40;  // weight of the likeliest token

struct SamplingShared {
  uint64_t scratch[kSamplingWarps];
  uint64_t slots[2];
  uint64_t found[2][3];               // bin, mass before it, mass in it
  uint32_t low[1 << kDigitBits];      // histogram, low and high words: 64-bit shared atomics would be loops
  uint32_t high[1 << kDigitBits];
  uint32_t n_listed;
  uint32_t token;
  uint64_t listed[kListCapacity];     // key << 32 | id
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

/// Weights of scores, relative to the row's largest.
struct Weigher {
  uint32_t largest_key;
  float largest;
  float scale;  // log2(e) / temperature

  /// exp((score - largest) / temperature); the largest itself is 1 whatever the scale.
  __device__ __forceinline__ float ratio(uint32_t key) const {
    return key == largest_key ? 1.0f : exp2f(__fmul_rn(__fsub_rn(score_of(key), largest), scale));
  }
  __device__ __forceinline__ uint64_t weight(uint32_t key) const {
    return __float2ull_rn(ratio(key) * static_cast<float>(kOne));
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

/// Mass of the bin that this thread owns, over the `size` blocks that filled histograms.
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

/// Shows the candidates; a functor with a template, since NVRTC takes a generic lambda for a host function.
struct ListedTokens {
  const uint64_t* listed;
  int n;
  uint32_t largest_key;
  int index_bits;

  template <typename Visit>
  __device__ __forceinline__ void operator()(Visit visit) const {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kSamplingThreads) {
      const uint32_t key = static_cast<uint32_t>(listed[i] >> 32);
      visit(order_of(largest_key, key, static_cast<uint32_t>(listed[i]), index_bits), key);
    }
  }
};

/// Shows all tokens of the row.
template <typename Reader>
struct RowTokens {
  const Reader& row;
  uint32_t largest_key;
  int index_bits;

  template <typename Visit>
  __device__ __forceinline__ void operator()(Visit visit) const {
    row.each_octet([&](int, int octet, const uint32_t(&key)[kOctet]) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        if (key[i] == kNoKey) continue;
        visit(order_of(largest_key, key[i], static_cast<uint32_t>(octet * kOctet + i), index_bits), key[i]);
      }
    });
  }
};

/// What the blocks of a row carry from call to call.
struct Turns {
  int slot;
  int found;
};

constexpr uint64_t kNotFound = ~0ull;

/// Find the bin in which the running mass reaches `target`: before < target <= before + mass of the bin.
///
/// Writes the bin to found[0] (kNotFound if all mass is less), the mass before it to [1] and that in it to [2], and
/// returns where. Begins after a barrier that ends the histogram's filling and ends with one.
__device__ __forceinline__ const uint64_t* locate(SamplingShared& shared, Turns& turns, uint64_t mass, uint64_t before,
                                                  uint64_t target) {
  uint64_t* found = shared.found[turns.found];
  turns.found ^= 1;  // readers of this result are not overtaken by the next one's writer
  if (threadIdx.x == 0) found[0] = kNotFound;
  uint64_t total;
  const uint64_t start = before + block_prefix(mass, shared.scratch, &total);  // its barriers order found[0]
  if (start < target && target <= start + mass) {
    found[0] = threadIdx.x;
    found[1] = start;
    found[2] = mass;
  }
  __syncthreads();
  return found;
}

/// Choose a token among those that `each(visit(order, key))` shows to the threads of `size` blocks.
///
/// order: distance of the key from the largest, then the id, in index_bits bits. span: bits that the distances take.
/// n: number of tokens shown, if that is known, or 2^63. of_row: weight of the row where top-k is off and not every
/// token is shown; else 0. Returns the id, the same in every thread.
template <typename Each>
__device__ __forceinline__ uint32_t choose(SamplingShared& shared, Turns& turns, const Weigher& weigher,
                                           const Filters& filters, double u, int index_bits, int span, uint64_t n,
                                           uint64_t of_row, int size, Each each) {
  const uint64_t index_mask = (1ull << index_bits) - 1;
  uint64_t last = ~0ull;  // the last token kept
  for (int stage = filters.k != 0 && n > filters.k ? 0 : filters.by_mass ? 1 : 2; stage < 3;
       stage += stage == 0 && !filters.by_mass ? 2 : 1) {
    uint64_t target = filters.k;
    if (stage > 0) {
      uint64_t sum = 0;
      each([&](uint64_t order, uint32_t key) {
        if (order <= last && !(stage == 2 && filters.by_ratio && weigher.ratio(key) < filters.min_p)) {
          sum += weigher.weight(key);
        }
      });
      sum = block_combine(sum, shared.scratch, Sum());
      if (size > 1) sum = cluster_combine(sum, shared.slots, turns.slot, size, Sum());
      if (stage == 1 && of_row != 0) sum = of_row;
      if (stage == 1) {
        const double part = ceil(static_cast<double>(filters.top_p) * static_cast<double>(sum));
        target = part >= 1.0 ? static_cast<uint64_t>(part) : 1;  // the likeliest token is always kept
      } else {
        target = position_within(u, sum) + 1;
      }
    }

    uint64_t base = 0;    // orders from here on,
    int bits = span + index_bits;  // as many as this many bits count, hold the target
    uint64_t before = 0;
    uint64_t inside = kNotFound;
    while (bits > 0) {
      if (bits == index_bits && stage < 2 && inside != kNotFound) {
        // All tokens of one score: if even the last has too little before it, none of them needs an order.
        const uint64_t each_mass =
            stage == 0 ? 1 : weigher.weight(weigher.largest_key - static_cast<uint32_t>(base >> index_bits));
        if (target + each_mass > before + inside) break;
      }
      const int shift = bits - kDigitBits > index_bits ? bits - kDigitBits
                        : bits > index_bits            ? index_bits
                        : bits > kDigitBits            ? bits - kDigitBits
                                                       : 0;
      if (size > 1) cluster_sync(size);  // peers may still read the last histogram
      shared.low[threadIdx.x] = 0;
      shared.high[threadIdx.x] = 0;
      __syncthreads();
      each([&](uint64_t order, uint32_t key) {
        const uint64_t offset = order - base;  // wraps for orders below base
        if ((offset >> bits) == 0) {
          add_to_bin(shared, static_cast<int>(offset >> shift), stage == 0 ? 1 : weigher.weight(key));
        }
      });
      cluster_sync(size);
      const uint64_t* found = locate(shared, turns, own_bin(shared, size), before, target);
      if (found[0] == kNotFound) {
        base = ~0ull;  // everything is kept
        break;
      }
      base += found[0] << shift;
      before = found[1];
      inside = found[2];
      bits = shift;
    }
    const uint64_t end = base == ~0ull ? base : bits > 0 ? base | index_mask : base;
    if (stage == 2) return static_cast<uint32_t>(base & index_mask);
    last = end < last ? end : last;
  }
  return 0;  // not reached: stage 2 returns
}

}  // namespace astrai
