// A whole decode step in one kernel: one block a multiprocessor stays for all layers, from token ids to logits.
//
//   [norm + qkv] | [qk-norm, rotary, KV write, attention] | [o + residual] : [norm + gate and up, SwiGLU] : [down + residual] :
//
// and behind the last layer [norm + head]; "|" is a barrier of the grid. At ":" nobody meets: words are flags, and a block asks
// for its input until all words of it are there. On an H200 that takes 20 to 40 us less a step of one row than barriers: a
// fence, an addition and a look at the counter are some 1,400 cycles. The words are cleared while attention runs.
//
// At one to eight rows a step is bound by reading the weights, and a chain of launches by what lies between them: about 3 us
// for each of six a layer on an H200. Here the weights stream on through the waits (stream.cuh), whose cost is hidden as long
// as what has been asked for lasts. Norms are computed by every block for itself, since that is cheaper than another wait.
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
template <typename T, int kDim, bool kTrace>
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
  __device__ __forceinline__ void fill_input(int phase, int layer, const StepTrace<kTrace>& trace) const {
    if (has_norm(phase)) {
      const bool is_first = phase == kQkv && layer == 0;
      const void* rows = is_first ? p.embedding : phase == kGateUp ? p.workspace.after_o : after_down(layer - 1);
      const RowSource source = {static_cast<const uint4*>(rows), p.hidden / kOctet, is_first ? p.ids : nullptr, p.vocab,
                                        !is_first};
      fill_normed<T>(scratch, p, source, norm_weight, shared.squares, [&] { trace(kInput); });
    } else if (phase == kO && shared.plan.late) {
      fill_merged<T, kDim>(scratch, p, shared.plan);
      workers_sync();
      trace(kInput);
    } else {
      const int depth = p.product[phase].depth;
      const void* rows = phase == kO ? p.workspace.attended : p.workspace.activated;
      fill_rows(scratch, p.rows, depth, {static_cast<const uint4*>(rows), depth / kOctet, nullptr, 0, phase == kDown});
      trace(kInput);
    }
    trace(kNormed);
  }

  /// The residual stream behind a layer.
  __device__ __forceinline__ void* after_down(int layer) const {
    return static_cast<uint16_t*>(p.workspace.after_down) + layer % 2 * p.rows * p.hidden;
  }

  /// This block's share of what the projections behind attention will give, made absent. Behind the barrier of qkv nobody
  /// reads it any more, and nobody writes it before that of attention.
  __device__ __forceinline__ void clear_words(int layer) const {
    // The last blocks first: attention keeps the first ones busy.
    const int place = (static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x)) * kStepWorkers;
    const int streamed = p.rows * p.hidden / kOctet;
    const int activated = p.rows * p.intermediate / kOctet;
    const uint4 absent = make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
    for (int i = place + static_cast<int>(threadIdx.x); i < max(streamed, activated); i += static_cast<int>(gridDim.x) * kStepWorkers) {
      if (i < activated) static_cast<uint4*>(p.workspace.activated)[i] = absent;
      if (i >= streamed) continue;
      static_cast<uint4*>(p.workspace.after_o)[i] = absent;
      static_cast<uint4*>(after_down(layer))[i] = absent;
    }
  }

  __device__ __forceinline__ StepOutput output(int phase, int layer) const {
    const StepWorkspace& memory = p.workspace;
    const int64_t width = p.product[phase].features;
    switch (phase) {
      case kQkv:
        return {memory.qkv, width, layers[layer].qkv_bias, nullptr, 0, nullptr};
      case kO:
        if (layer == 0) return {memory.after_o, width, layers[layer].o_bias, p.embedding, width, p.ids};
        return {memory.after_o, width, layers[layer].o_bias, after_down(layer - 1), width, nullptr};
      case kGateUp:
        return {memory.activated, width, nullptr, nullptr, 0, nullptr};
      case kDown:
        return {after_down(layer), width, nullptr, memory.after_o, width, nullptr};
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

  __device__ __forceinline__ void run(WeightQueue& queue) const {
    if (static_cast<int>(blockIdx.x) < shared.plan.units) {
      const StepUnit unit(shared.plan, p, static_cast<int>(blockIdx.x));
      shared.first_slots[threadIdx.x] = Attend<T, kDim>(p, shared, nullptr).first_slots(unit);
    }
    int start = 0;  // block at which the dealing of the next projection's units starts
#pragma unroll 1
    for (int n = 0; n <= 4 * p.n_layers; ++n) {
      const int layer = n / 4;
      const int phase = layer == p.n_layers ? kHead : n % 4;
      const StepTrace<kTrace> trace(p, layer, phase == kQkv ? 0 : phase + 1);
      Projection<T, kTrace> projection(p, phase, start, scratch, output(phase, layer));
      if (has_norm(phase)) fetch_norm(phase, layer);
      if (n == 0) {
        workers_sync();
      } else if (phase == kO) {
        await_keeper();
      }
      trace(kStarted);
      const bool keeps_hidden = phase == kHead && p.last_hidden != nullptr && blockIdx.x == 0;
      if (projection.has_unit() || keeps_hidden) {
        fill_input(phase, layer, trace);
        if (keeps_hidden) store_last_hidden();
        projection.run(queue, shared.sums, trace);
      }
      if (phase == kHead) break;
      start = next_start(start, p.product[phase].units);
      if (phase == kQkv) {
        hand_over();
        // An object for each layer: what it holds is not to be kept through the projections.
        Attend<T, kDim>(p, shared, reinterpret_cast<float*>(scratch)).run(layers[layer], StepTrace<kTrace>(p, layer, 1));
        clear_words(layer);
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
template <int kDim, bool kTrace>
__device__ __forceinline__ void keep_step(const StepParams& p, StepShared<kDim>& shared, const StepLayer* layers) {
  uint32_t* const counter = p.workspace.barrier;
  const int blocks = static_cast<int>(gridDim.x);
  const bool is_first_lane = threadIdx.x % 32 == 0;
  uint32_t arrivals = 0;
  for (int layer = 0; layer < p.n_layers; ++layer) {
    if (blockIdx.x == 0 && layer + 1 < p.n_layers) prefetch_vectors(p, layers[layer + 1]);
#pragma unroll 1
    for (int barrier = 0; barrier < 2; ++barrier) {
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
      const StepTrace<kTrace> trace(p, layer, barrier);
      trace(kHandedOver);
      grid_barrier(counter, static_cast<uint32_t>(blocks), arrivals);
      trace(kOpen);
      release_workers();
    }
  }
  if (is_first_lane) leave_grid(counter, blocks);
}

template <typename T, int kDim, bool kTrace>
__global__ void __launch_bounds__(kStepThreads, 1) step_kernel(const __grid_constant__ StepParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kSwizzleBytes) char step_pool[];
  const StepParams& p = params;
  StepShared<kDim>& shared = *reinterpret_cast<StepShared<kDim>*>(step_pool);
  const StepLayout layout = step_layout(sizeof(StepShared<kDim>), p.n_layers, p.hidden, p.scratch_bytes);
  StepLayer* const layers = reinterpret_cast<StepLayer*>(step_pool + layout.layers);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);  // the same in all lanes: no divergence
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kLayerWords = static_cast<int>(sizeof(StepLayer) / sizeof(uint4));
  for (int i = static_cast<int>(threadIdx.x); i < p.n_layers * kLayerWords; i += kStepThreads) {
    reinterpret_cast<uint4*>(layers)[i] = load_readonly(reinterpret_cast<const uint4*>(p.layers) + i);
  }
  const auto queue_of = [&](int worker) {
    return WeightQueue{shared_address(step_pool + layout.queues) + static_cast<uint32_t>(worker * p.depth * kStageBytes),
                       shared_address(shared.full[worker]), shared_address(shared.empty[worker]), p.depth, {0, 0}};
  };
  if (warp < kStepWarps) {
    if (lane < p.depth) {
      const WeightQueue queue = queue_of(warp);
      barrier_init(queue.full + 8 * lane, 1);
      barrier_init(queue.empty + 8 * lane, 1);
    }
    barrier_publish();
    fill_angles<kDim>(p, shared.angles);
  } else if (threadIdx.x == kStepWorkers) {
    plan_step(p, shared.plan);
  }
  __syncthreads();
  if (warp < kStepWarps) {
    set_registers<kWorkerRegisters, true>();
    WeightQueue queue = queue_of(warp);
    StepWorker<T, kDim, kTrace>{p, shared, layers, reinterpret_cast<uint4*>(step_pool + layout.norm_weight),
                                step_pool + layout.scratch}
        .run(queue);
  } else {
    set_registers<kOtherRegisters, false>();
    if (warp == kStepWarps) {
      keep_step<kDim, kTrace>(p, shared, layers);
    } else if (warp == kStepWarps + 1 && lane < kStepWarps) {
      Feeder(p, lane).run(queue_of(lane));
    }
  }
#elif defined(__CUDA_ARCH__)
  asm volatile("trap;");  // launched by a build that has no code for 9.0a
#endif
}

// Every instance there is, as CASE(T, kDim).
#define ASTRAI_STEP_CASES(CASE, T) \
  CASE(T, 64)                      \
  CASE(T, 128)

#ifndef __CUDACC_RTC__

template <typename T, int kDim, bool kTrace>
cudaError_t launch_step(StepParams params, cudaStream_t stream) {
  const auto kernel = step_kernel<T, kDim, kTrace>;
  LinearDevice device = {};
  cudaError_t status = linear_device(&device);
  if (status != cudaSuccess) return status;
  const int bytes = fit_step(params, device, sizeof(StepShared<kDim>));
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
/// excepted; `workspace` is a piece of what place_workspace counts. kTrace: params.trace is filled.
template <bool kTrace = false>
cudaError_t decode_step(StepParams params, DType dtype, void* workspace, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  derive(params);
  int multiprocessors = 0;
  const cudaError_t status = multiprocessor_count(&multiprocessors);
  if (status != cudaSuccess) return status;
  place_workspace(params, multiprocessors, static_cast<char*>(workspace));
#define ASTRAI_CASE(T_, DIM) \
  if (params.head_dim == DIM) return launch_step<T_, DIM, kTrace>(params, stream);
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
