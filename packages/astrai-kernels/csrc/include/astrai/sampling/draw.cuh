// The three ways to draw behind filters, from the cheapest: from a list of candidates, from bins of equal width in the
// logarithm of the weight, and digit by digit through the order. All yield the same token; sampling.cuh says when which runs.
#pragma once

#include "astrai/common/types.cuh"
#include "astrai/sampling/cluster.cuh"
#include "astrai/sampling/row.cuh"
#include "astrai/sampling/select.cuh"

namespace astrai {

/// Put a token into the list, which may be another block's; past its capacity only count it.
__device__ __forceinline__ void list_token(uint32_t* n_listed, uint64_t* listed, uint32_t key, uint32_t id) {
  const uint32_t place = atomicAdd(n_listed, 1u);
  if (place < kListCapacity) listed[place] = (static_cast<uint64_t>(~key) << 32) | id;
}

__device__ __forceinline__ float listed_score(uint64_t token) { return score_of(~static_cast<uint32_t>(token >> 32)); }

/// Sort the first n listed tokens by a bitonic network (Batcher 1968). Begins after a barrier that ends the listing and
/// ends with one. Elements up to 32 apart are a warp's own.
__device__ __forceinline__ void sort_listed(SamplingShared& shared, int n) {
  const int tid = static_cast<int>(threadIdx.x);
  int padded = 64;
  while (padded < n) padded *= 2;
  for (int i = n + tid; i < padded; i += kSamplingThreads) shared.listed[i] = ~0ull;
  __syncthreads();
  for (int width = 2; width <= padded; width *= 2) {
    for (int apart = width / 2; apart > 0; apart /= 2) {
      for (int i = tid; i < padded / 2; i += kSamplingThreads) {
        const int low = 2 * i - (i & (apart - 1));
        const uint64_t first = shared.listed[low];
        const uint64_t second = shared.listed[low + apart];
        if ((first > second) == ((low & width) == 0)) {
          shared.listed[low] = second;
          shared.listed[low + apart] = first;
        }
      }
      const int next = apart > 1 ? apart / 2 : width;
      if (apart > 32 || next > 32) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

/// The first of n sorted tokens at which the running weight, `before` ahead of the first, reaches `target`: its place in
/// found[0] (kNotFound: not reached), the weight before it in [1] and its own in [2].
__device__ __forceinline__ const uint64_t* locate_listed(SamplingShared& shared, Turns& turns, const Weigher& weigher,
                                                         int n, uint64_t before, uint64_t target) {
  constexpr int kParts = kListCapacity / kSamplingThreads;
  if (n <= kSamplingThreads) {
    const int place = static_cast<int>(threadIdx.x);
    const uint64_t mass[1] = {place < n ? weigher.weight(listed_score(shared.listed[place])) : 0};
    return locate(shared, turns, mass, before, target);
  }
  uint64_t mass[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int place = static_cast<int>(threadIdx.x) * kParts + i;
    mass[i] = place < n ? weigher.weight(listed_score(shared.listed[place])) : 0;
  }
  return locate(shared, turns, mass, before, target);
}

/// Draw from n listed tokens, which are all that top-k, top-p and min-p may keep. of_row: weight of the row without top-k.
__device__ __forceinline__ uint32_t draw_listed(SamplingShared& shared, Turns& turns, const Weigher& weigher,
                                                const Filters& filters, double u, int n, uint64_t of_row) {
  sort_listed(shared, n);
  if (filters.k != 0 && static_cast<uint64_t>(n) > filters.k) n = static_cast<int>(filters.k);
  uint64_t of_listed = 0;
  uint64_t likely = 0;  // what min-p keeps
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kSamplingThreads) {
    const float ratio = weigher.ratio(listed_score(shared.listed[i]));
    const uint64_t weight = weigher.weight_of(ratio).whole();
    of_listed += weight;
    if (!(ratio < filters.min_p)) likely += weight;
  }
  uint64_t kept = of_listed = block_combine(of_listed, shared.scratch, Sum());
  if (filters.by_mass) {
    const uint64_t target = share_of(filters.top_p, filters.k != 0 ? of_listed : of_row);
    const uint64_t* found = locate_listed(shared, turns, weigher, n, 0, target);
    if (found[0] != kNotFound) kept = found[1] + found[2];
  }
  if (filters.by_ratio) {
    likely = block_combine(likely, shared.scratch, Sum());
    kept = likely < kept ? likely : kept;
  }
  const uint64_t* found = locate_listed(shared, turns, weigher, n, 0, position_within(u, kept) + 1);
  return static_cast<uint32_t>(shared.listed[found[0]]);
}

/// List the tokens of a bin at the first block and return how many they are. `slot` of n_listed must still be 0.
template <typename Reader>
__device__ __forceinline__ uint32_t list_bin(SamplingShared& shared, const Weigher& weigher, const Reader& row, int bin,
                                             int slot, int size) {
  uint32_t* n_listed = at_peer(&shared.n_listed[slot], 0);
  uint64_t* listed = at_peer(shared.listed, 0);
  const float begin = static_cast<float>(bin);
  row.template each_octet<(Reader::kComparing + 1) / 2>([&](int, int octet, const typename Reader::Raw& raw) {
    float score[kOctet];
    row.scores(raw, octet, score);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float position = weigher.bin_position(score[i]);
      if (position >= begin && position < begin + 1.0f) {
        list_token(n_listed, listed, key_of(score[i]), static_cast<uint32_t>(octet * kOctet + i));
      }
    }
  });
  cluster_sync(size);
  return *static_cast<volatile uint32_t*>(n_listed);
}

/// Draw without top-k by a histogram of the row's weight. False, the same in all blocks, if a bin holds more tokens than
/// can be listed; otherwise the first block has the token.
template <typename Reader>
__device__ __forceinline__ bool draw_binned(SamplingShared& shared, Turns& turns, const Weigher& weigher,
                                            const Filters& filters, double u, const Reader& row, int rank, int size,
                                            uint32_t* token) {
  const int tid = static_cast<int>(threadIdx.x);
  reinterpret_cast<uint4*>(shared.low)[tid] = make_uint4(0, 0, 0, 0);
  reinterpret_cast<uint4*>(shared.high)[tid] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  uint64_t likely = 0;  // what min-p keeps
  row.template each_octet<(Reader::kWeighing + 1) / 2>([&](int, int octet, const typename Reader::Raw& raw) {
    float score[kOctet];
    row.scores(raw, octet, score);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float ratio = weigher.ratio(score[i]);
      const uint64_t weight = weigher.weight_of(ratio).whole();
      if (weight != 0) {
        add_to_bin(shared, static_cast<int>(weigher.bin_position(score[i])), weight);
        if (filters.by_ratio && !(ratio < filters.min_p)) likely += weight;
      }
    }
  });
  if (filters.by_ratio) {
    likely = block_combine(likely, shared.scratch, Sum());
    likely = cluster_combine(likely, shared.slots, turns.slot, size, Sum());
  }
  cluster_sync(size);

  uint64_t mass[4] = {};  // of this thread's bins
  for (int peer = 0; peer < size; ++peer) {
    const uint4 low = reinterpret_cast<const uint4*>(at_peer(shared.low, peer))[tid];
    const uint4 high = reinterpret_cast<const uint4*>(at_peer(shared.high, peer))[tid];
    mass[0] += (static_cast<uint64_t>(high.x) << 32) + low.x;
    mass[1] += (static_cast<uint64_t>(high.y) << 32) + low.y;
    mass[2] += (static_cast<uint64_t>(high.z) << 32) + low.z;
    mass[3] += (static_cast<uint64_t>(high.w) << 32) + low.w;
  }
  const uint64_t of_row = block_combine(mass[0] + mass[1] + mass[2] + mass[3], shared.scratch, Sum());

  uint64_t kept = of_row;
  uint64_t listed_bin = kNotFound;
  int n = 0;
  // First where top-p ends, then where the drawn token lies: each in a bin, and then in the bin's list.
  for (int stage = filters.by_mass ? 0 : 1; stage < 2; ++stage) {
    if (stage == 1 && filters.by_ratio) kept = likely < kept ? likely : kept;
    const uint64_t target = stage == 0 ? share_of(filters.top_p, of_row) : position_within(u, kept) + 1;
    const uint64_t* found = locate(shared, turns, mass, 0, target);
    const uint64_t bin = found[0];
    const uint64_t before = found[1];
    if (stage == 0 && filters.by_ratio && likely <= before) continue;  // min-p alone decides
    if (bin != listed_bin) {
      n = static_cast<int>(list_bin(shared, weigher, row, static_cast<int>(bin), stage + 1, size));
      if (n > kListCapacity) return false;
      if (rank == 0) sort_listed(shared, n);
      listed_bin = bin;
    }
    if (rank == 0) {
      const uint64_t* place = locate_listed(shared, turns, weigher, n, before, target);
      if (stage == 0) {
        if (tid == 0) shared.kept = place[1] + place[2];
      } else {
        *token = static_cast<uint32_t>(shared.listed[place[0]]);
      }
    }
    if (stage == 0) {
      cluster_sync(size);
      kept = *static_cast<volatile uint64_t*>(at_peer(&shared.kept, 0));
    }
  }
  return true;
}

/// Shows all tokens of a row with their order: the distance of the key from the largest, then the id. A functor with a
/// template, since NVRTC takes a generic lambda for a host function.
template <typename Reader>
struct RowTokens {
  const Reader& row;
  uint32_t largest_key;
  int index_bits;

  template <typename Visit>
  __device__ __forceinline__ void operator()(Visit visit) const {
    row.template each_octet<Reader::kRare>([&](int, int octet, const typename Reader::Raw& raw) {
      uint32_t key[kOctet];
      row.keys(raw, octet, key);
#pragma unroll 1
      for (int i = 0; i < kOctet; ++i) {
        uint32_t own = key[0];  // not by index: that would put the keys into local memory
#pragma unroll
        for (int j = 1; j < kOctet; ++j) own = i == j ? key[j] : own;
        if (own == kNoKey) continue;
        visit(order_of(largest_key, own, static_cast<uint32_t>(octet * kOctet + i), index_bits), own);
      }
    });
  }
};

/// Draw from the whole row, whatever it looks like: a sum or a count over the order passes a target in the bin of a digit,
/// and then within that bin by the next digit. Returns the id, the same in every thread of `size` blocks.
template <typename Reader>
__device__ __forceinline__ uint32_t draw_by_digits(SamplingShared& shared, Turns& turns, const Weigher& weigher,
                                                   const Filters& filters, double u, const Reader& row, int size) {
  const int index_bits = 32 - __clz(row.vocab - 1);
  const RowTokens<Reader> each = {row, weigher.largest_key, index_bits};
  const uint64_t index_mask = (1ull << index_bits) - 1;
  uint64_t last = ~0ull;  // the last token kept
  for (int stage = filters.k != 0 ? 0 : filters.by_mass ? 1 : 2; stage < 3;
       stage += stage == 0 && !filters.by_mass ? 2 : 1) {
    uint64_t target = filters.k;
    if (stage > 0) {
      uint64_t sum = 0;
      each([&](uint64_t order, uint32_t key) {
        if (order <= last && !(stage == 2 && filters.by_ratio && weigher.ratio(score_of(key)) < filters.min_p)) {
          sum += weigher.weight(score_of(key));
        }
      });
      sum = block_combine(sum, shared.scratch, Sum());
      sum = cluster_combine(sum, shared.slots, turns.slot, size, Sum());
      target = stage == 1 ? share_of(filters.top_p, sum) : position_within(u, sum) + 1;
    }

    uint64_t base = 0;    // orders from here on,
    int bits = 32 + index_bits;  // as many as this many bits count, hold the target
    uint64_t before = 0;
    uint64_t inside = kNotFound;
    while (bits > 0) {
      if (bits == index_bits && stage < 2 && inside != kNotFound) {
        // All tokens of one score: if even the last has too little before it, none of them needs an order.
        const uint64_t each_mass =
            stage == 0 ? 1 : weigher.weight(score_of(weigher.largest_key - static_cast<uint32_t>(base >> index_bits)));
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
          add_to_bin(shared, static_cast<int>(offset >> shift), stage == 0 ? 1 : weigher.weight(score_of(key)));
        }
      });
      cluster_sync(size);
      const uint64_t mass[1] = {own_bin(shared, size)};
      const uint64_t* found = locate(shared, turns, mass, before, target);
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
