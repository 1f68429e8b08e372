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
// Where a sum or a count over the order passes a given target is found digit by digit: a histogram of the next nine
// bits of the order, the bin in which the target lies, then only that bin. Most rows need this only over a list of
// candidates, those from a bound on that the maxima of the threads yield: of n values one per thread, the k-th largest
// is at most the k-th largest of the row.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/common/pdl.cuh"
#include "astrai/common/types.cuh"
#include "astrai/sampling/cluster.cuh"
#include "astrai/sampling/params.h"
#include "astrai/sampling/row.cuh"
#include "astrai/sampling/select.cuh"

namespace astrai {

// Tunables.
constexpr int kMostListed = kSamplingThreads;  // top-k up to which candidates are listed; at most kSamplingThreads
constexpr int kNucleusCandidates = 384;        // candidates to aim for without top-k; likewise
constexpr int kMostBlocksPerRow = 8;  // a power of two; more than 8 blocks a cluster is not portable

template <typename T, bool kPenalties, bool kAligned>
__global__ void __launch_bounds__(kSamplingThreads, 1) sampling_kernel(const SamplingParams params) {
  __shared__ SamplingShared shared;
  pdl_wait();
  pdl_release();
  const int size = cluster_size();
  const int rank = cluster_rank();
  const int64_t index = blockIdx.x / size;
  const Row<T, kPenalties, kAligned> row(params, index, rank, size);
  Turns turns = {};

  // The largest score, and the largest that each thread saw.
  uint32_t best = kNoKey;
  uint32_t best_id = 0;
  row.each_octet([&](int, int octet, const uint32_t(&key)[kOctet]) {
    uint32_t most = key[0];
#pragma unroll
    for (int i = 1; i < kOctet; ++i) most = key[i] > most ? key[i] : most;
    if (most > best) {
      best = most;
#pragma unroll
      for (int i = kOctet - 1; i >= 0; --i) {
        if (key[i] == most) best_id = static_cast<uint32_t>(octet * kOctet + i);
      }
    }
  });
  uint64_t top = (static_cast<uint64_t>(best) << 32) | (~best_id);  // ties: the smallest id
  if (best == kNoKey) top = 0;
  top = block_combine(top, shared.scratch, Largest());
  top = cluster_combine(top, shared.slots, turns.slot, size, Largest());
  uint32_t token = ~static_cast<uint32_t>(top);

  Weigher weigher;
  weigher.largest_key = static_cast<uint32_t>(top >> 32);
  weigher.largest = score_of(weigher.largest_key);
  const float temperature = value_or(params.temperature, index, 0.0f);
  weigher.scale = __fdiv_rn(1.44269504088896341f, temperature);

  // A row whose largest score is infinite or NaN has no distribution: it gives its argmax too.
  const bool draws = temperature > 0.0f && weigher.largest_key > kKeyOfMinusInfinity &&
                     weigher.largest_key < kKeyOfInfinity;
  if (draws) {
    const double u = uniform(value_or<int64_t>(params.seed, index, 0), value_or<int64_t>(params.position, index, 0));
    const int64_t top_k = value_or<int64_t>(params.top_k, index, 0);
    Filters filters;
    filters.k = top_k > 0 && top_k < params.vocab ? static_cast<uint64_t>(top_k) : 0;
    filters.top_p = value_or(params.top_p, index, 1.0f);
    filters.min_p = value_or(params.min_p, index, 0.0f);
    filters.by_mass = filters.top_p < 1.0f;
    filters.by_ratio = filters.min_p > 0.0f;

    if (top_k <= 0 && !filters.by_mass && !filters.by_ratio) {
      // No filter: the order of the ids. A bin for each round of the cluster, which covers consecutive ids.
      shared.low[threadIdx.x] = 0;
      shared.high[threadIdx.x] = 0;
      __syncthreads();
      row.each_octet([&](int round, int, const uint32_t(&key)[kOctet]) {
        uint64_t sum = 0;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          if (key[i] != kNoKey) sum += weigher.weight(key[i]);
        }
        sum = lanes_combine<32>(sum, Sum());
        if (threadIdx.x % 32 == 0 && sum != 0) add_to_bin(shared, round, sum);
      });
      cluster_sync(size);
      if (rank == 0) {
        const uint64_t mass = own_bin(shared, size);
        uint64_t total;
        block_prefix(mass, shared.scratch, &total);
        const uint64_t position = position_within(u, total);
        const uint64_t* found = locate(shared, turns, mass, 0, position + 1);
        uint64_t before = found[1];
        const int begin = static_cast<int>(found[0]) * row.step;
        for (int part = 0; part < size; ++part) {
          const int octet = begin + part * kSamplingThreads + static_cast<int>(threadIdx.x);
          uint32_t key[kOctet];
          row.keys(row.load(octet), octet, key);
          uint64_t weight[kOctet];
          uint64_t sum = 0;
#pragma unroll
          for (int i = 0; i < kOctet; ++i) {
            weight[i] = key[i] != kNoKey ? weigher.weight(key[i]) : 0;
            sum += weight[i];
          }
          uint64_t start = before + block_prefix(sum, shared.scratch, &total);
          if (start <= position && position < start + sum) {
#pragma unroll
            for (int i = 0; i < kOctet; ++i) {
              if (start <= position && position < start + weight[i]) {
                shared.token = static_cast<uint32_t>(octet * kOctet + i);
              }
              start += weight[i];
            }
          }
          before += total;
        }
        __syncthreads();
        token = shared.token;
      }
    } else {
      const int index_bits = 32 - __clz(params.vocab - 1);
      const uint64_t wanted = filters.k != 0 ? filters.k : kNucleusCandidates;
      bool complete = false;
      uint32_t bound = 0;
      if (wanted <= kMostListed) {
        // Each block's share of the k largest maxima of its threads: together at least k tokens, all from `bound` on.
        const int share = static_cast<int>((wanted + size - 1) / size);
        for (int bit = 31; bit >= 0; --bit) {
          const uint32_t trial = bound | (1u << bit);
          if (__syncthreads_count(best >= trial) >= share) bound = trial;
        }
        if (rank == 0 && threadIdx.x == 0) shared.n_listed = 0;
        bound = static_cast<uint32_t>(cluster_combine(bound, shared.slots, turns.slot, size, Smallest()));
        if (bound == kNoKey) bound = 1;  // fewer threads with tokens than wanted: all tokens
        __syncthreads();

        // List the candidates at the first block; without top-k, weigh the row and the candidates.
        uint32_t* n_listed = at_peer(&shared.n_listed, 0);
        uint64_t* listed = at_peer(shared.listed, 0);
        const bool weighs = filters.k == 0 && filters.by_mass;
        uint64_t of_row = 0;
        uint64_t of_listed = 0;
        row.each_octet([&](int, int octet, const uint32_t(&key)[kOctet]) {
#pragma unroll
          for (int i = 0; i < kOctet; ++i) {
            if (weighs && key[i] != kNoKey) {
              const uint64_t weight = weigher.weight(key[i]);
              of_row += weight;
              if (key[i] >= bound) of_listed += weight;
            }
            if (key[i] >= bound) {
              const uint32_t place = atomicAdd(n_listed, 1u);
              if (place < kListCapacity) {
                listed[place] = (static_cast<uint64_t>(key[i]) << 32) | static_cast<uint32_t>(octet * kOctet + i);
              }
            }
          }
        });
        cluster_sync(size);
        complete = *static_cast<volatile uint32_t*>(n_listed) <= kListCapacity;
        if (filters.k == 0) {
          // Tokens that are not listed must be excluded by top-p or by min-p.
          bool enough = bound == 1 || (filters.by_ratio && weigher.ratio(bound) < filters.min_p);
          if (weighs) {
            of_row = block_combine(of_row, shared.scratch, Sum());
            of_row = cluster_combine(of_row, shared.slots, turns.slot, size, Sum());
            of_listed = block_combine(of_listed, shared.scratch, Sum());
            of_listed = cluster_combine(of_listed, shared.slots, turns.slot, size, Sum());
            enough = enough || static_cast<double>(of_listed) >=
                                   ceil(static_cast<double>(filters.top_p) * static_cast<double>(of_row));
          }
          complete = complete && enough;
        }
        if (complete && rank == 0) {
          const int n = static_cast<int>(shared.n_listed);
          const int span = 32 - __clz(weigher.largest_key - bound);
          token = choose(shared, turns, weigher, filters, u, index_bits, span, static_cast<uint64_t>(n), of_row, 1,
                         ListedTokens{shared.listed, n, weigher.largest_key, index_bits});
        }
      }
      if (!complete) {
        token = choose(shared, turns, weigher, filters, u, index_bits, 32, 1ull << 63, 0, size,
                       RowTokens<Row<T, kPenalties, kAligned>>{row, weigher.largest_key, index_bits});
      }
    }
  }
  if (rank == 0 && threadIdx.x == 0) params.out[index * params.out_stride] = static_cast<int64_t>(token);
  if (size > 1) cluster_sync(size);  // no block leaves while another may read its shared memory
}

// Every instance there is, as CASE(T, kPenalties, kAligned): the dispatcher below and bindings/sampling.cu expand it.
#define ASTRAI_SAMPLING_CASES(CASE, T) \
  CASE(T, false, true)                 \
  CASE(T, false, false)                \
  CASE(T, true, true)                  \
  CASE(T, true, false)

#ifndef __CUDACC_RTC__

/// Blocks that share a row: as many as keep all of them resident, each with a round of work at least.
inline int sampling_blocks_per_row(int64_t rows, int vocab, int multiprocessors, int major) {
  int blocks = major >= 9 ? kMostBlocksPerRow : 1;
  while (blocks > 1 && (rows * blocks > multiprocessors || vocab < blocks * kSamplingThreads * kOctet)) blocks /= 2;
  return blocks;
}

template <typename T>
cudaError_t launch_sampling(const SamplingParams& params, cudaStream_t stream) {
  const bool penalises = params.counts != nullptr;
  const int64_t elements = static_cast<int64_t>(16 / sizeof(T));
  const bool aligned =
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
#define ASTRAI_CASE(T_, PENALTIES, ALIGNED)                                                \
  if (penalises == PENALTIES && aligned == ALIGNED) {                                      \
    return cudaLaunchKernelEx(&config, sampling_kernel<T_, PENALTIES, ALIGNED>, params);   \
  }
  ASTRAI_SAMPLING_CASES(ASTRAI_CASE, T)
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

/// Launch on `stream` of the current device. `params` must be valid (bindings/sampling.cu checks them); rows may be 0.
inline cudaError_t sampling(const SamplingParams& params, DType dtype, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  switch (dtype) {
    case DType::kFloat32:
      return launch_sampling<float>(params, stream);
    case DType::kFloat16:
      return launch_sampling<float16>(params, stream);
    case DType::kBFloat16:
      return launch_sampling<bfloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
