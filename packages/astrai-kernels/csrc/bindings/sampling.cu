// Family "sampling": argmax, and draws by temperature, top-k, top-p and min-p behind optional penalties.

#include "astrai/sampling/sampling.cuh"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
template __global__ void sampling_kernel<float, true>(const SamplingParams);
template __global__ void sampling_kernel<float, false>(const SamplingParams);

}  // namespace astrai

#ifndef __CUDACC_RTC__

#include "guard.h"
#include "ops.h"

namespace astrai {

// Defined in sampling_16bit.cu.
cudaError_t sampling_16bit(const SamplingParams& params, DType dtype, cudaStream_t stream);

void launch_sampling(const SamplingParams& params, int dtype, int device, std::uintptr_t stream) {
  const char* what = params.temperature.data ? "sample" : "argmax";
  require(dtype >= 0 && dtype <= 2, what, "dtype must be 0 (float32), 1 (float16) or 2 (bfloat16)");
  require(params.rows >= 0, what, "rows must not be negative");
  require(params.vocab >= 1 && params.vocab <= kMostVocab, what, "vocab must lie between 1 and 2^21");
  if (params.rows == 0) return;
  const std::size_t bytes = dtype == 0 ? 4 : 2;
  require(params.logits && params.out, what, "logits and out must not be null");
  require(!params.temperature.data || (params.seed.data && params.position.data), what,
          "seed and position must not be null where temperature is given");
  const bool penalises = params.counts != nullptr;
  require(penalises == (params.seen != nullptr) && penalises == (params.presence.data != nullptr) &&
              penalises == (params.frequency.data != nullptr) && penalises == (params.repetition.data != nullptr),
          what, "counts, seen, presence, frequency and repetition must all be given or all be null");
  require(is_aligned(params.logits, bytes) && is_aligned(params.out, 8) && is_aligned(params.temperature.data, 4) &&
              is_aligned(params.top_k.data, 8) && is_aligned(params.top_p.data, 4) && is_aligned(params.min_p.data, 4) &&
              is_aligned(params.seed.data, 8) && is_aligned(params.position.data, 8) && is_aligned(params.presence.data, 4) &&
              is_aligned(params.frequency.data, 4) && is_aligned(params.repetition.data, 4) && is_aligned(params.counts, 4),
          what, "every pointer must be a multiple of the element size");
  const DeviceGuard guard(device, what);
  const auto run = reinterpret_cast<cudaStream_t>(stream);
  const DType type = static_cast<DType>(dtype);
  check(type == DType::kFloat32 ? launch_sampling<float>(params, run) : sampling_16bit(params, type, run), what);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
