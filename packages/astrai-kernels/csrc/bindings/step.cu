// Family "step": a whole decode step in one kernel.

#include "astrai/step/step.cuh"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
#define ASTRAI_INSTANTIATE(T, DIM) template __global__ void step_kernel<T, DIM, false>(const __grid_constant__ StepParams);
ASTRAI_STEP_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_STEP_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE

}  // namespace astrai

#ifndef __CUDACC_RTC__

#include <string>
#include <vector>

#include "astrai/step/maps.h"
#include "guard.h"
#include "ops.h"

namespace astrai {

StepCapacity step_capacity(StepParams params, int device) {
  const char* what = "step_capacity";
  require(params.head_dim == 64 || params.head_dim == 128, what, "head_dim must be 64 or 128");
  DeviceGuard guard(device, what);
  LinearDevice found = {};
  check(linear_device(&found), what);
  params.rows = kStepRows;
  derive(params);
  const std::size_t fixed = params.head_dim == 64 ? sizeof(StepShared<64>) : sizeof(StepShared<128>);
  const bool fits = fit_step(params, found, static_cast<int>(fixed)) > 0;
  return {place_workspace(params, found.multiprocessors, nullptr), fits ? params.depth : 0};
}

std::string step_maps(const StepParams& params, const StepLayer* layers, int dtype, int device) {
  const char* what = "step_maps";
  require(dtype == 1 || dtype == 2, what, "dtype must be 1 (float16) or 2 (bfloat16)");
  require(params.n_layers >= 1, what, "there must be layers");
  DeviceGuard guard(device, what);
  std::vector<TensorMap> maps(step_maps(params.n_layers));
  check(encode_step_maps(params, layers, static_cast<DType>(dtype), maps.data()), what);
  return std::string(reinterpret_cast<const char*>(maps.data()), maps.size() * sizeof(TensorMap));
}

void launch_decode_step(const StepParams& params, int dtype, std::uintptr_t workspace, int device, std::uintptr_t stream) {
  const char* what = "decode_step";
  require(dtype == 1 || dtype == 2, what, "dtype must be 1 (float16) or 2 (bfloat16)");
  require(params.rows >= 0 && params.rows <= kStepRows, what, "rows must lie between 0 and 8");
  if (params.rows == 0) return;
  require(params.n_layers >= 1 && params.layers && params.maps, what, "there must be layers and their descriptors");
  require(params.n_kv_heads >= 1 && params.n_heads >= 1 && params.n_heads % params.n_kv_heads == 0 &&
              params.n_heads / params.n_kv_heads <= kStepHeads,
          what, "n_heads must be 1 to 8 times n_kv_heads");
  require(params.hidden >= kLinearStep && params.hidden % kLinearStep == 0 && params.intermediate >= kLinearStep &&
              params.intermediate % kLinearStep == 0,
          what, "hidden and intermediate must be multiples of 64");
  require(params.head_features % kOctet == 0 && params.logits_stride % kOctet == 0, what,
          "the vocabulary must be a multiple of 8");
  require(is_aligned(params.embedding, 16) && is_aligned(params.final_norm, 16) && is_aligned(params.head, 16) &&
              is_aligned(params.logits, 16) && is_aligned(params.last_hidden, 16) && is_aligned(params.layers, 16) &&
              is_aligned(params.maps, 64) && workspace % 128 == 0,
          what, "every address must be a multiple of 16, the descriptors' of 64, the workspace's of 128");
  require(params.k_slot_stride % kOctet == 0 && params.k_head_stride % kOctet == 0 &&
              params.v_slot_stride % kOctet == 0 && params.v_head_stride % kOctet == 0,
          what, "slots and heads of the pool must start at multiples of 16 bytes");
  DeviceGuard guard(device, what);
  check(decode_step(params, static_cast<DType>(dtype), reinterpret_cast<void*>(workspace),
                    reinterpret_cast<cudaStream_t>(stream)),
        what);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
