// The launchers that the Python module calls, one family per translation unit. No CUDA syntax and no Python here.
#pragma once

#include <cstdint>
#include <string>

#include "astrai/attention/params.h"
#include "astrai/fused/params.h"
#include "astrai/linear/params.h"
#include "astrai/lora/params.h"
#include "astrai/rotary/params.h"
#include "astrai/sampling/params.h"
#include "astrai/step/params.h"

namespace astrai {

/// Checks `params`, launches on `stream` of `device`. dtype: an astrai::DType as an integer.
/// Throws std::invalid_argument for bad arguments and std::runtime_error when CUDA refuses the launch.
void launch_rms_norm(const RmsNormParams& params, int dtype, bool with_add, bool overlap, int device,
                     std::uintptr_t stream);
void launch_qkv_norm_rope_write(const QkvParams& params, int dtype, int device, std::uintptr_t stream);
void launch_gated_activation(const GatedParams& params, int dtype, int kind, int device, std::uintptr_t stream);
void launch_embedding(const EmbeddingParams& params, int dtype, int device, std::uintptr_t stream);
void launch_sampling(const SamplingParams& params, int dtype, int device, std::uintptr_t stream);
void launch_linear(const LinearParams& params, int dtype, int device, std::uintptr_t stream);
void launch_lora_shrink(const LoraShrinkParams& params, int dtype, int device, std::uintptr_t stream);
void launch_lora_expand(const LoraExpandParams& params, int dtype, int device, std::uintptr_t stream);
void launch_rotary(const RotaryParams& params, int dtype, bool interleaved, int device, std::uintptr_t stream);


/// Thread blocks of decode attention: how many run at once for `batch` requests or fewer, and how many take part in the
/// work on one chunk.
struct AttentionCapacity {
  int workers, units;
};
AttentionCapacity attention_capacity(int head_dim, int n_heads, int n_kv_heads, int q_len, int batch, int device);

/// `units` and `workers` of `params` are filled in.
void launch_attention_plan(AttentionPlanParams params, int head_dim, int n_heads, int n_kv_heads, int device,
                           std::uintptr_t stream);

/// max_chunks: chunks that the plan and the scratch have room for; the grid follows from it, not from the lengths.
void launch_attention_decode(const AttentionParams& params, int dtype, int max_chunks, int device,
                             std::uintptr_t stream);

/// One query a request, with qkv_norm_rope_write in front. q, k and v of `params` and their strides follow from its heads.
void launch_qkv_attention_decode(FreshAttentionParams params, int dtype, int max_chunks, int device,
                                 std::uintptr_t stream);
void launch_attention_prefill(const AttentionParams& params, int dtype, std::int64_t n_tokens, int device,
                              std::uintptr_t stream);
void launch_attention_scalar(const AttentionParams& params, int dtype, std::int64_t n_tokens, int device,
                             std::uintptr_t stream);

/// Scratch of a decode step, and the stages of a warp's queue with eight rows; 0: the device has too little shared memory.
/// `params` says layers and shape.
struct StepCapacity {
  std::int64_t workspace_bytes;
  int stages;
};
StepCapacity step_capacity(StepParams params, int device);
/// Descriptors of the weights, step_maps(n_layers) of them, of 128 bytes each; `layers` is the table, on the host.
std::string step_maps(const StepParams& params, const StepLayer* layers, int dtype, int device);
void launch_decode_step(const StepParams& params, int dtype, std::uintptr_t workspace, int device, std::uintptr_t stream);

}  // namespace astrai
