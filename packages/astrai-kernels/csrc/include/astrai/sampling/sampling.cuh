// One token per row of logits: argmax, or a draw after penalties, temperature, top-k, top-p and min-p, without sorting.
//
//   score   = penalised logit, fp32; a row that does not draw takes its argmax, the smallest id of the largest score
//   weight  = exp((score - largest score) / temperature) in fixed point, 40 bits after the point
//   order   = falling score, ties by rising id
//   top-k   keeps the first k of that order
//   top-p   keeps tokens before which less than p of the weight lies; of the weight that top-k left
//   min-p   keeps tokens whose weight is at least min_p of the largest
//   draw    with u of [0, 1) from a counter-based generator, the first token at which the sum of the kept weights
//           passes u times the whole: in the order above, or in the order of the ids if the row asks for no filter
//
// Weights are integers, so a sum has the same bits in any order: neither the number of blocks that share a row nor the
// order of their atomics can change a token (the reduction contract).
//
// Nothing is sorted but a list of candidates. Those of top-k are the tokens from a bound on that the maxima of the threads
// yield: of n values one per thread, the k-th largest is at most the k-th largest of the row. Without top-k the same list
// serves a peaked row; where it does not hold enough weight, a histogram says in which narrow bins the nucleus ends and
// the drawn token lies, and those are listed (draw.cuh). Two to five passes over a row, which L2 holds.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/types.cuh"
#include "astrai/sampling/cluster.cuh"
#include "astrai/sampling/draw.cuh"
#include "astrai/sampling/params.h"
#include "astrai/sampling/row.cuh"
#include "astrai/sampling/select.cuh"

namespace astrai {

// Tunables.
constexpr int kMostListed = kSamplingThreads;  // top-k up to which candidates are listed; at most kSamplingThreads
constexpr int kNucleusCandidates = 384;        // candidates to aim for without top-k; likewise
constexpr int kMostBlocksPerRow = 8;  // a power of two; more than 8 blocks a cluster is not portable

/// Key from which on each block has its share of the wanted number of tokens: the share-th largest of its threads' maxima
/// (rounded down, where keys have more bits than the search looks at).
template <typename T, bool kPlain>
__device__ __forceinline__ uint32_t candidate_bound(SamplingShared& shared, Turns& turns, uint32_t best, int share,
                                                    int size) {
  constexpr int kBits = sizeof(T) == 2 && kPlain ? 16 : 24;
  shared.best[threadIdx.x] = best;
  __syncthreads();
  if (threadIdx.x < 32) {  // one warp: no barriers in the search
    uint32_t most[kSamplingWarps];
#pragma unroll
    for (int i = 0; i < kSamplingWarps; ++i) most[i] = shared.best[32 * i + threadIdx.x];
    uint32_t bound = 0;
    for (int bit = 31; bit > 31 - kBits; --bit) {
      const uint32_t trial = bound | (1u << bit);
      uint32_t reach = 0;
#pragma unroll
      for (int i = 0; i < kSamplingWarps; ++i) reach += most[i] >= trial ? 1 : 0;
      if (__reduce_add_sync(0xffffffffu, reach) >= static_cast<uint32_t>(share)) bound = trial;
    }
    if (threadIdx.x == 0) shared.bound = bound;
  }
  __syncthreads();
  const uint32_t bound = static_cast<uint32_t>(cluster_combine(shared.bound, shared.slots, turns.slot, size, Smallest()));
  return bound == kNoKey ? 1 : bound;  // 1, all tokens: fewer threads with tokens than wanted
}

/// List the tokens from `bound` on at the first block. Whether they are all that may be drawn; without top-k, of_row
/// becomes the weight of the row.
template <typename Reader>
__device__ __forceinline__ bool list_candidates(SamplingShared& shared, Turns& turns, const Weigher& weigher,
                                                const Filters& filters, const Reader& row, uint32_t bound, int size,
                                                uint64_t* of_row) {
  uint32_t* n_listed = at_peer(&shared.n_listed[0], 0);
  uint64_t* listed = at_peer(shared.listed, 0);
  const bool weighs = filters.k == 0 && filters.by_mass;
  uint64_t all = 0;
  uint64_t of_listed = 0;
  row.template each_octet<Reader::kWeighing>([&](int, int octet, const typename Reader::Raw& raw) {
    float score[kOctet];
    if (weighs || !Reader::kPlain) row.scores(raw, octet, score);
    if (weighs) {
      uint32_t high = 0;
      uint32_t low = 0;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const Weight weight = weigher.weight_of(weigher.ratio(score[i]));
        high += weight.high;
        low += weight.low;
      }
      all += Weight{high, low}.whole();
    }
    uint32_t key[kOctet];
    if constexpr (Reader::kPlain) {
      if (row.largest_key(raw, octet) < bound) return;
      row.keys(raw, octet, key);
    } else {
      row.keys(score, octet, key);
    }
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (key[i] < bound) continue;
      if (weighs) of_listed += weigher.weight(score_of(key[i]));
      list_token(n_listed, listed, key[i], static_cast<uint32_t>(octet * kOctet + i));
    }
  });
  cluster_sync(size);
  const bool fits = *static_cast<volatile uint32_t*>(n_listed) <= kListCapacity;
  if (filters.k != 0) return fits;
  // Tokens that are not listed must be excluded by top-p or by min-p.
  bool enough = bound == 1 || (filters.by_ratio && weigher.ratio(score_of(bound)) < filters.min_p);
  if (weighs) {
    all = block_combine(all, shared.scratch, Sum());
    *of_row = cluster_combine(all, shared.slots, turns.slot, size, Sum());
    of_listed = block_combine(of_listed, shared.scratch, Sum());
    of_listed = cluster_combine(of_listed, shared.slots, turns.slot, size, Sum());
    enough = enough || of_listed >= share_of(filters.top_p, *of_row);
  }
  return fits && enough;
}

/// Draw without filters, in the order of the ids; the first block has the token. A bin for each round of the cluster,
/// which covers consecutive ids.
template <typename Reader>
__device__ __forceinline__ uint32_t draw_by_ids(SamplingShared& shared, Turns& turns, const Weigher& weigher, double u,
                                                const Reader& row, int rank, int size) {
  shared.low[threadIdx.x] = 0;
  shared.high[threadIdx.x] = 0;
  __syncthreads();
  row.template each_octet<Reader::kWeighing>([&](int round, int octet, const typename Reader::Raw& raw) {
    float score[kOctet];
    row.scores(raw, octet, score);
    uint32_t high = 0;
    uint32_t low = 0;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const Weight weight = weigher.weight_of(weigher.ratio(score[i]));
      high += weight.high;
      low += weight.low;
    }
    const Weight warp = {__reduce_add_sync(0xffffffffu, high), __reduce_add_sync(0xffffffffu, low)};
    if (threadIdx.x % 32 == 0 && warp.whole() != 0) add_to_bin(shared, round, warp.whole());
  });
  cluster_sync(size);
  if (rank != 0) return 0;
  const uint64_t mass[1] = {own_bin(shared, size)};
  const uint64_t position = position_within(u, block_combine(mass[0], shared.scratch, Sum()));
  const uint64_t* found = locate(shared, turns, mass, 0, position + 1);
  // The round's octets, in their order: `size` neighbours to a thread.
  const int begin = static_cast<int>(found[0]) * row.step + static_cast<int>(threadIdx.x) * size;
  uint64_t weight[kMostBlocksPerRow] = {};
  uint64_t sum = 0;
#pragma unroll(Reader::kPlain ? kMostBlocksPerRow : 1)
  for (int part = 0; part < kMostBlocksPerRow; ++part) {
    if (part >= size) continue;
    float score[kOctet];
    row.scores(row.load(begin + part), begin + part, score);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) weight[part] += weigher.weight(score[i]);
    sum += weight[part];
  }
  uint64_t total;
  uint64_t start = found[1] + block_prefix(sum, shared.scratch, &total);
  if (start <= position && position < start + sum) {
    int part = 0;
    uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < kMostBlocksPerRow; ++i) {  // the octet; indexed by constants, so that registers hold the array
      if (i < size && start + own <= position) {
        start += own;
        own = weight[i];
        part = i;
      }
    }
    float score[kOctet];
    row.scores(row.load(begin + part), begin + part, score);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const uint64_t mine = weigher.weight(score[i]);
      if (start <= position && position < start + mine) {
        shared.token = static_cast<uint32_t>((begin + part) * kOctet + i);
      }
      start += mine;
    }
  }
  __syncthreads();
  return shared.token;
}

template <typename T, bool kPlain>
__global__ void __launch_bounds__(kSamplingThreads, 1) sampling_kernel(const SamplingParams params) {
  __shared__ SamplingShared shared;
  pdl_wait();
  pdl_release();
  const int size = cluster_size();
  const int rank = cluster_rank();
  const int64_t index = blockIdx.x / size;
  const Row<T, kPlain> row(params, index, rank, size);
  Turns turns = {};

  if (threadIdx.x < 3) shared.n_listed[threadIdx.x] = 0;

  // The largest score, and the largest that each thread saw.
  uint32_t best = kNoKey;
  uint32_t best_octet = 0;
  row.template each_octet<Row<T, kPlain>::kComparing>([&](int, int octet, const Octet<T>& raw) {
    const uint32_t largest = row.largest_key(raw, octet);
    if (largest > best) {
      best = largest;
      best_octet = static_cast<uint32_t>(octet);
    }
  });
  uint64_t top = best == kNoKey ? 0 : (static_cast<uint64_t>(best) << 32) | ~best_octet;  // ties: the smallest id
  top = block_combine(top, shared.scratch, Largest());
  top = cluster_combine(top, shared.slots, turns.slot, size, Largest());

  Weigher weigher;
  weigher.largest_key = static_cast<uint32_t>(top >> 32);
  weigher.largest = score_of(weigher.largest_key);
  const float temperature = value_or(params.temperature, index, 0.0f);
  weigher.scale = __fdiv_rn(1.44269504088896341f, temperature);

  // A row whose largest score is infinite or NaN has no distribution: it gives its argmax too.
  const bool draws = temperature > 0.0f && weigher.largest_key > kKeyOfMinusInfinity &&
                     weigher.largest_key < kKeyOfInfinity;
  uint32_t token = 0;
  if (!draws) {
    const int octet = static_cast<int>(~static_cast<uint32_t>(top));
    uint32_t key[kOctet];
    row.keys(row.load(octet), octet, key);
#pragma unroll
    for (int i = kOctet - 1; i >= 0; --i) {
      if (key[i] == weigher.largest_key) token = static_cast<uint32_t>(octet * kOctet + i);
    }
  } else {
    const double u = uniform(value_or<int64_t>(params.seed, index, 0), value_or<int64_t>(params.position, index, 0));
    const int64_t top_k = value_or<int64_t>(params.top_k, index, 0);
    Filters filters;
    filters.k = top_k > 0 && top_k < params.vocab ? static_cast<uint64_t>(top_k) : 0;
    filters.top_p = value_or(params.top_p, index, 1.0f);
    filters.min_p = value_or(params.min_p, index, 0.0f);
    filters.by_mass = filters.top_p < 1.0f;
    filters.by_ratio = filters.min_p > 0.0f;

    if (top_k <= 0 && !filters.by_mass && !filters.by_ratio) {
      token = draw_by_ids(shared, turns, weigher, u, row, rank, size);
    } else {
      const uint64_t wanted = filters.k != 0 ? filters.k : kNucleusCandidates;
      bool drawn = false;
      if (wanted <= kMostListed) {
        const int share = static_cast<int>((wanted + size - 1) / size);
        const uint32_t bound = candidate_bound<T, kPlain>(shared, turns, best, share, size);
        uint64_t of_row = 0;
        if (list_candidates(shared, turns, weigher, filters, row, bound, size, &of_row)) {
          drawn = true;
          if (rank == 0) {
            token = draw_listed(shared, turns, weigher, filters, u, static_cast<int>(shared.n_listed[0]), of_row);
          }
        }
      }
      if (!drawn && filters.k == 0) drawn = draw_binned(shared, turns, weigher, filters, u, row, rank, size, &token);
      if (!drawn) token = draw_by_digits(shared, turns, weigher, filters, u, row, size);
    }
  }
  if (rank == 0 && threadIdx.x == 0) params.out[index * params.out_stride] = static_cast<int64_t>(token);
  if (size > 1) cluster_sync(size);  // no block leaves while another may read its shared memory
}

#ifndef __CUDACC_RTC__

/// Blocks that share a row: as many as keep all of them resident, each with a round of work at least.
inline int sampling_blocks_per_row(int64_t rows, int vocab, int multiprocessors, int major) {
  int blocks = major >= 9 ? kMostBlocksPerRow : 1;
  while (blocks > 1 && (rows * blocks > multiprocessors || vocab < blocks * kSamplingThreads * kOctet)) blocks /= 2;
  return blocks;
}

/// Launch on `stream` of the current device. `params` must be valid (bindings/sampling.cu checks them); rows may be 0, and
/// `params.aligned` is filled in.
template <typename T>
cudaError_t launch_sampling(SamplingParams params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  const bool penalises = params.counts != nullptr;
  const int64_t elements = static_cast<int64_t>(16 / sizeof(T));
  params.aligned =
      params.vocab % kOctet == 0 && is_aligned(params.logits, 16) &&
      (params.rows <= 1 || params.logits_stride % elements == 0) &&
      (!penalises || (is_aligned(params.counts, 16) && is_aligned(params.seen, 4) &&
                      (params.rows <= 1 || (params.counts_stride % 4 == 0 && params.seen_stride % 4 == 0))));
  int device = 0;
  int major = 0;
  int multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = multiprocessor_count(&multiprocessors);
  if (status != cudaSuccess) return status;
  const int blocks = sampling_blocks_per_row(params.rows, params.vocab, multiprocessors, major);
  if (params.rows > 0x7fffffff / kMostBlocksPerRow) return cudaErrorInvalidValue;

  // launch() of common/launch.cuh knows no clusters.
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned int>(blocks);
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(params.rows * blocks));
  config.blockDim = dim3(kSamplingThreads);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = major < 9 ? 0 : blocks > 1 ? 2 : 1;
  return params.aligned && !penalises ? cudaLaunchKernelEx(&config, sampling_kernel<T, true>, params)
                                      : cudaLaunchKernelEx(&config, sampling_kernel<T, false>, params);
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
