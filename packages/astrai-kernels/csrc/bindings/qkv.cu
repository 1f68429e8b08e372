// Family "qkv": qk-norm, rotary and KV write behind the QKV projection.

#include "astrai/fused/qkv.cuh"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
#define ASTRAI_INSTANTIATE(T, TEAM, HEADS, ALIGNED) \
  template __global__ void qkv_kernel<T, TEAM, HEADS, ALIGNED>(const QkvParams, const uint32_t);
ASTRAI_QKV_CASES(ASTRAI_INSTANTIATE, float)
ASTRAI_QKV_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_QKV_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE

#define ASTRAI_INSTANTIATE(T, LANES, HEADS, NORMS) \
  template __global__ void qkv_paired_kernel<T, LANES, HEADS, NORMS>(const QkvParams, const QkvPairedShape);
ASTRAI_QKV_PAIRED_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_QKV_PAIRED_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE

}  // namespace astrai

#ifndef __CUDACC_RTC__

#include "guard.h"
#include "ops.h"

namespace astrai {

void launch_qkv_norm_rope_write(const QkvParams& params, int dtype, int device, std::uintptr_t stream) {
  const char* what = "qkv_norm_rope_write";
  require(dtype >= 0 && dtype <= 2, what, "dtype must be 0 (float32), 1 (float16) or 2 (bfloat16)");
  require(params.tokens >= 0, what, "tokens must not be negative");
  require(params.n_heads >= 1 && params.n_kv_heads >= 1 && params.n_heads <= (1 << 16) &&
              params.n_kv_heads <= (1 << 16),
          what, "n_heads and n_kv_heads must lie between 1 and 2^16");
  require(params.head_dim >= 1 && params.head_dim <= 256, what, "head_dim must lie between 1 and 256");
  require(params.eps >= 0.0f, what, "eps must not be negative");
  require(params.pool_size >= 0, what, "pool_size must not be negative");
  if (params.tokens == 0) return;
  const std::size_t bytes = dtype == 0 ? 4 : 2;
  require(params.qkv && params.q && params.k_buffer && params.v_buffer && params.out_cache_loc, what,
          "qkv, q, k_buffer, v_buffer and out_cache_loc must not be null");
  require((params.k_scale == nullptr) == (params.v_scale == nullptr), what,
          "k_scale and v_scale must both be given or both be null");
  const std::size_t pool_bytes = params.k_scale ? 1 : bytes;
  require(is_aligned(params.qkv, bytes) && is_aligned(params.q, bytes) && is_aligned(params.q_norm, bytes) &&
              is_aligned(params.k_norm, bytes) && is_aligned(params.k_buffer, pool_bytes) &&
              is_aligned(params.v_buffer, pool_bytes) && is_aligned(params.k_scale, 4) &&
              is_aligned(params.v_scale, 4) && is_aligned(params.cos, 4) && is_aligned(params.sin, 4) &&
              is_aligned(params.position_ids, params.positions_are_64_bit ? 8 : 4) &&
              is_aligned(params.out_cache_loc, params.locs_are_64_bit ? 8 : 4),
          what, "every pointer must be a multiple of the element size");
  if (params.cos) {
    require(params.sin && params.position_ids, what, "sin and position_ids must not be null where cos is given");
    require(params.rotary_dim >= 2 && params.rotary_dim % 2 == 0 && params.rotary_dim <= params.head_dim, what,
            "rotary_dim must be even and lie between 2 and head_dim");
    require(params.max_pos >= 1, what, "max_pos must be at least 1");
  }
  require(params.tokens <= 0x7fffffff / (params.n_heads + 2 * params.n_kv_heads), what,
          "tokens times heads must be below 2^31");
  const DeviceGuard guard(device, what);
  check(qkv_norm_rope_write(params, static_cast<DType>(dtype), reinterpret_cast<cudaStream_t>(stream)), what);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
