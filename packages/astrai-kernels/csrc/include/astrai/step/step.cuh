// A whole decode step in one kernel: one block a multiprocessor stays for all layers, from token ids to logits.
//
//   [norm + qkv] | [qk-norm, rotary, KV write, attention] | [o + residual] | [norm + gate and up, SwiGLU] | [down + residual]
//
// and behind the last layer [norm + head]; "|" is a barrier of the grid. At one to eight rows a step is bound by reading the
// weights, and a chain of launches by what lies between them: about 3 us for each of six a layer on an H200. Here the weights
// stream on through the barriers (stream.cuh), whose cost is hidden as long as the queues last. Norms are computed by every
// block for itself, since that is cheaper than a barrier.
//
// The projections, norms and rotations give the bits of the ops that they replace. Attention gives the same up to
// rounding: it cuts keys differently, by how many rows there are.
#pragma once

#include "astrai/common/launch.cuh"
#include "astrai/step/attend.cuh"
#include "astrai/step/derive.cuh"
#include "astrai/step/product.cuh"

namespace astrai {

enum StepPhase : int { kQkv = 0, kO = 1, kGateUp = 2, kDown = 3, kHead = 4 };

/// A worker's way through the step.
template <typename T, int kDim>
struct StepWorker {
  const StepParams& p;
  StepShared<kDim>& shared;
  const StepLayer* layers;
  uint4* norm_weight;
  char* scratch;

  /// The weight of the norm before a projection, on its way while the grid's barrier is.
  __device__ __forceinline__ void fetch_norm(int phase, int layer) const {
    const void* weight = phase == kHead ? p.final_norm : phase == kQkv ? layers[layer].input_norm : layers[layer].post_norm;
    for (int i = static_cast<int>(threadIdx.x); i < p.hidden / kOctet; i += kStepWorkers) {
      norm_weight[i] = load_readonly(static_cast<const uint4*>(weight) + i);
    }
  }

  static __device__ __forceinline__ bool has_norm(int phase) { return phase == kQkv || phase == kGateUp || phase == kHead; }

  /// The input of a projection, all rows of it.
  __device__ __forceinline__ void fill_input(int phase, int layer) const {
    const StepProduct& geometry = p.product[phase];
    const int depth = phase == kHead ? p.hidden : geometry.depth;
    if (phase == kO && shared.plan.late) {
      fill_merged<T, kDim>(scratch, p, shared.plan);
    } else {
      const StepWorkspace& memory = p.workspace;
      const bool is_first = phase == kQkv && layer == 0;
      const void* source = is_first ? p.embedding : phase == kO ? memory.attended : phase == kDown ? memory.activated : memory.stream;
      const int octets = depth / kOctet;
      fill_rows(scratch, p.rows, depth, [&](int row) {
        const int64_t line = is_first ? p.ids[row] : row;
        const bool exists = !is_first || (line >= 0 && line < p.vocab);
        return exists ? static_cast<const uint4*>(source) + line * octets : nullptr;
      });
    }
    workers_sync();
    if (has_norm(phase)) {
      normalise_in_place<T>(scratch, p.rows, depth, p.norm_threads, p.eps, norm_weight, shared.squares);
    }
  }

  __device__ __forceinline__ StepOutput output(int phase, int layer) const {
    const StepWorkspace& memory = p.workspace;
    const int64_t width = p.product[phase].features;
    switch (phase) {
      case kQkv:
        return {memory.qkv, width, layers[layer].qkv_bias, nullptr, 0, nullptr};
      case kO:
        if (layer == 0) return {memory.stream, width, layers[layer].o_bias, p.embedding, width, p.ids};
        return {memory.stream, width, layers[layer].o_bias, memory.stream, width, nullptr};
      case kGateUp:
        return {memory.activated, width, nullptr, nullptr, 0, nullptr};
      case kDown:
        return {memory.stream, width, nullptr, memory.stream, width, nullptr};
      default:
        return {p.logits, p.logits_stride, nullptr, nullptr, 0, nullptr};
    }
  }

  __device__ __forceinline__ void store_last_hidden() const {
    const int octets = p.hidden / kOctet;
    for (int item = static_cast<int>(threadIdx.x); item < p.rows * octets; item += kStepWorkers) {
      const int row = item / octets;
      static_cast<uint4*>(p.last_hidden)[item] =
          *reinterpret_cast<const uint4*>(normed_place(scratch, row, item - row * octets, p.rows));
    }
  }

  __device__ __forceinline__ void run(WeightStream& stream) const {
    if (static_cast<int>(blockIdx.x) < shared.plan.units) {
      const StepUnit unit(shared.plan, p, static_cast<int>(blockIdx.x));
      shared.first_slots[threadIdx.x] = Attend<T, kDim>(p, shared, nullptr).first_slots(unit);
    }
    int start = 0;  // block at which the dealing of the next projection's units starts
#pragma unroll 1
    for (int n = 0; n <= 4 * p.n_layers; ++n) {
      const int layer = n / 4;
      const int phase = layer == p.n_layers ? kHead : n % 4;
      if (has_norm(phase)) fetch_norm(phase, layer);
      if (n > 0) {
        await_keeper();
      } else {
        workers_sync();
      }
      const bool keeps_hidden = phase == kHead && p.last_hidden != nullptr && blockIdx.x == 0;
      if (first_unit(start) < p.product[phase].units || keeps_hidden) {
        fill_input(phase, layer);
        if (keeps_hidden) store_last_hidden();
        project<T>(stream, phase, start, scratch, output(phase, layer), shared.sums);
      }
      if (phase == kHead) break;
      start = next_start(start, p.product[phase].units);
      hand_over();
      if (phase == kQkv) {
        // An object for each layer: what it holds is not to be kept through the projections.
        Attend<T, kDim>(p, shared, reinterpret_cast<float*>(scratch)).run(layers[layer]);
        hand_over();
      }
    }
  }
};

/// Fetch the vectors of a layer into L2, long before anyone waits for them.
__device__ __forceinline__ void prefetch_vectors(const StepParams& p, const StepLayer& layer) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int byte = lane * 128; byte < p.hidden * 2; byte += 32 * 128) {
    prefetch_line(static_cast<const char*>(layer.input_norm) + byte);
    prefetch_line(static_cast<const char*>(layer.post_norm) + byte);
    if (layer.o_bias != nullptr) prefetch_line(static_cast<const char*>(layer.o_bias) + byte);
  }
  if (layer.qkv_bias != nullptr) {
    for (int byte = lane * 128; byte < p.product[kQkv].features * 2; byte += 32 * 128) {
      prefetch_line(static_cast<const char*>(layer.qkv_bias) + byte);
    }
  }
  if (layer.q_norm != nullptr && lane * 128 < p.head_dim * 2) {
    prefetch_line(static_cast<const char*>(layer.q_norm) + lane * 128);
    prefetch_line(static_cast<const char*>(layer.k_norm) + lane * 128);
  }
}

/// The keeper's way through the step: it meets the workers wherever they hand over.
template <int kDim>
__device__ __forceinline__ void keep_step(const StepParams& p, StepShared<kDim>& shared, const StepLayer* layers) {
  uint32_t* const counter = p.workspace.barrier;
  const int blocks = static_cast<int>(gridDim.x);
  const bool is_first_lane = threadIdx.x % 32 == 0;
  uint32_t arrivals = 0;
  for (int layer = 0; layer < p.n_layers; ++layer) {
    if (blockIdx.x == 0 && layer + 1 < p.n_layers) prefetch_vectors(p, layers[layer + 1]);
#pragma unroll 1
    for (int barrier = 0; barrier < 5; ++barrier) {
      if (barrier == 1) {  // attention, before whose end there may be tickets
        for (int index = static_cast<int>(blockIdx.x); index < shared.plan.units; index += blocks) {
          const StepUnit unit(shared.plan, p, index);
          if (!takes_ticket(shared.plan, unit)) continue;
          await_workers();
          if (is_first_lane) {
            int32_t* ticket = p.workspace.tickets + unit.row * p.n_kv_heads + unit.kv_head;
            shared.is_last = take_ticket(ticket) == unit.count - 1;
            if (shared.is_last) *ticket = 0;
          }
          __syncwarp();
          release_workers();
        }
      }
      await_workers();
      int64_t* const trace = p.trace == nullptr ? nullptr : p.trace + ((blockIdx.x * p.n_layers + layer) * 5 + barrier) * 2;
      if (trace != nullptr && is_first_lane) trace[0] = clock64();
      grid_barrier(counter, static_cast<uint32_t>(blocks), arrivals);
      if (trace != nullptr && is_first_lane) trace[1] = clock64();
      release_workers();
    }
  }
  if (is_first_lane) leave_grid(counter, blocks);
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kStepThreads, 1) step_kernel(const __grid_constant__ StepParams params) {
  __shared__ __align__(16) StepShared<kDim> shared;
  extern __shared__ __align__(128) char step_pool[];
  const StepParams& p = params;
  const StepLayout layout = step_layout(p.n_layers, p.hidden, p.scratch_bytes);
  StepLayer* const layers = reinterpret_cast<StepLayer*>(step_pool);
  const bool is_keeper = threadIdx.x >= kStepWorkers;
  constexpr int kLayerWords = static_cast<int>(sizeof(StepLayer) / sizeof(uint4));
  for (int i = static_cast<int>(threadIdx.x); i < p.n_layers * kLayerWords; i += kStepThreads) {
    reinterpret_cast<uint4*>(layers)[i] = load_readonly(reinterpret_cast<const uint4*>(p.layers) + i);
  }
  if (threadIdx.x == kStepWorkers) plan_step(p, shared.plan);
  if (!is_keeper) fill_angles<kDim>(p, shared.angles);
  __syncthreads();
  if (is_keeper) {
    keep_step<kDim>(p, shared, layers);
    return;
  }
  WeightStream stream(p, layers, shared_address(step_pool + layout.queues));
  StepWorker<T, kDim>{p, shared, layers, reinterpret_cast<uint4*>(step_pool + layout.norm_weight),
                      step_pool + layout.scratch}
      .run(stream);
  await_copies<0>();
}

// Every instance there is, as CASE(T, kDim).
#define ASTRAI_STEP_CASES(CASE, T) \
  CASE(T, 64)                      \
  CASE(T, 128)

#ifndef __CUDACC_RTC__

template <typename T, int kDim>
cudaError_t launch_step(StepParams params, cudaStream_t stream) {
  const auto kernel = step_kernel<T, kDim>;
  LinearDevice device = {};
  cudaError_t status = linear_device(&device);
  if (status != cudaSuccess) return status;
  const int bytes = fit_step(params, device.shared_bytes - fixed_bytes<kDim>(), kDim);
  if (bytes == 0) return cudaErrorInvalidConfiguration;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  // All blocks must be resident at once, or those that are would wait for ever: a cooperative launch is that or an error.
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(device.multiprocessors));
  config.blockDim = dim3(kStepThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<const StepParams>(params));
}

/// Launch on `stream` of the current device. `params` must be valid (bindings/step.cu checks them), the derived members
/// excepted; `workspace` is a piece of step_workspace_bytes.
inline cudaError_t decode_step(StepParams params, DType dtype, void* workspace, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  derive(params);
  int multiprocessors = 0;
  const cudaError_t status = multiprocessor_count(&multiprocessors);
  if (status != cudaSuccess) return status;
  place_workspace(params, multiprocessors, static_cast<char*>(workspace));
#define ASTRAI_CASE(T_, DIM) \
  if (params.head_dim == DIM) return launch_step<T_, DIM>(params, stream);
  if (dtype == DType::kBFloat16) {
    ASTRAI_STEP_CASES(ASTRAI_CASE, bfloat16)
  } else if (dtype == DType::kFloat16) {
    ASTRAI_STEP_CASES(ASTRAI_CASE, float16)
  }
#undef ASTRAI_CASE
  return cudaErrorInvalidValue;
}

#endif  // __CUDACC_RTC__

}  // namespace astrai
