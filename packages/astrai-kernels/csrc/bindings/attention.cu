// Family "attention": the planner, the scalar twin, and the checks in front of decode and prefill.

#include "astrai/attention/plan.cuh"
#include "astrai/attention/scalar.cuh"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
template __global__ void scalar_kernel<float16>(const AttentionParams, const int64_t);
template __global__ void scalar_kernel<bfloat16>(const AttentionParams, const int64_t);

}  // namespace astrai

#ifndef __CUDACC_RTC__

#include "decode.h"
#include "guard.h"
#include "ops.h"
#include "prefill.h"

namespace astrai {

namespace {

void check_heads(const char* what, int head_dim, int n_heads, int n_kv_heads, int q_len) {
  require(head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 192 || head_dim == 256,
          what, "head_dim must be 64, 80, 96, 128, 192 or 256");
  require(n_kv_heads >= 1 && n_heads >= n_kv_heads && n_heads % n_kv_heads == 0 && n_heads <= (1 << 20), what,
          "n_heads must be a multiple of n_kv_heads, which must be at least 1");
  require(q_len >= 1 && q_len <= 1024, what, "q_len must lie between 1 and 1024");
}

void check_operands(const char* what, const AttentionParams& params, int dtype) {
  require(dtype == 1 || dtype == 2, what, "dtype must be 1 (float16) or 2 (bfloat16)");
  require(params.q && params.out && params.k && params.v, what, "no tensor may be null");
  require(is_aligned(params.q, 16) && is_aligned(params.k, 16) && is_aligned(params.v, 16) &&
              is_aligned(params.out, 16),
          what, "q, k, v and out must start at multiples of 16 bytes");
  for (const int64_t stride :
       {params.q_token_stride, params.q_head_stride, params.k_slot_stride, params.k_head_stride, params.k_batch_stride,
        params.v_slot_stride, params.v_head_stride, params.v_batch_stride, params.out_token_stride,
        params.out_head_stride}) {
    require(stride % 8 == 0, what, "every stride must be a multiple of 8 elements");
  }
  require(params.k_slot_stride >= 0 && params.k_slot_stride < (int64_t{1} << 30) && params.v_slot_stride >= 0 &&
              params.v_slot_stride < (int64_t{1} << 30),
          what, "slots must lie less than 2^30 elements apart");
  require((params.k_scale == nullptr) == (params.v_scale == nullptr), what, "k_scale and v_scale belong together");
  if (params.k_scale) {
    for (const int64_t stride : {params.k_slot_stride, params.k_head_stride, params.k_batch_stride,
                                 params.v_slot_stride, params.v_head_stride, params.v_batch_stride}) {
      require(stride % 16 == 0, what, "every stride of an e4m3 cache must be a multiple of 16 elements");
    }
    require(is_aligned(params.k_scale, 4) && is_aligned(params.v_scale, 4), what, "scales must be 4-byte aligned");
  }
  require(params.window >= 0, what, "window must not be negative");
  require(params.softcap >= 0.0f, what, "softcap must not be negative");
}

bool has_extras(const AttentionParams& params) { return params.softcap > 0.0f || params.sinks || params.mask; }

}  // namespace

AttentionCapacity attention_capacity(int head_dim, int n_heads, int n_kv_heads, int q_len, int batch, int device) {
  const char* what = "attention_capacity";
  check_heads(what, head_dim, n_heads, n_kv_heads, q_len);
  require(batch >= 1, what, "batch must be at least 1");
  const DeviceGuard guard(device, what);
  DecodeLayout layout = {};
  check(decode_layout(head_dim, n_heads, n_kv_heads, q_len, batch, false, &layout), what);
  return {layout.workers, decode_units(head_dim, n_heads, n_kv_heads, q_len)};
}

void launch_attention_plan(AttentionPlanParams params, int head_dim, int n_heads, int n_kv_heads, int device,
                           std::uintptr_t stream) {
  const char* what = "plan_decode";
  check_heads(what, head_dim, n_heads, n_kv_heads, params.q_len);
  require(params.batch >= 0 && params.max_chunks >= params.batch, what, "max_chunks must be at least the batch");
  require(params.window >= 0, what, "window must not be negative");
  require(params.fixed_len >= 0 && params.fixed_len % kChunkAlign == 0, what, "fixed_len must be a multiple of 64");
  require(params.batch == 0 || params.seq_lens, what, "seq_lens must not be null");
  require(params.plan && is_aligned(params.plan, 16), what, "plan must be 16-byte aligned and not null");
  const DeviceGuard guard(device, what);
  params.units = decode_units(head_dim, n_heads, n_kv_heads, params.q_len);
  DecodeLayout layout = {};
  check(decode_layout(head_dim, n_heads, n_kv_heads, params.q_len, params.batch, params.fixed_len > 0, &layout), what);
  params.workers = layout.workers;
  check(plan(params, reinterpret_cast<cudaStream_t>(stream)), what);
}

void launch_attention_decode(const AttentionParams& params, int dtype, int max_chunks, int device,
                             std::uintptr_t stream) {
  const char* what = "decode_attention";
  check_heads(what, params.head_dim, params.n_heads, params.n_kv_heads, params.q_len);
  require(max_chunks >= 0 && max_chunks <= (1 << 24), what, "max_chunks must lie between 0 and 2^24");
  require(params.batch >= 0 && params.batch <= max_chunks, what, "max_chunks must be at least the batch");
  require(params.fixed_len >= 0, what, "fixed_len must not be negative");
  if (params.batch == 0) return;
  require(params.plan, what, "no tensor may be null");
  require(params.partial_out && params.partial_ml && params.counters, what, "no scratch may be null");
  check_operands(what, params, dtype);
  const DeviceGuard guard(device, what);
  const int64_t max_items = static_cast<int64_t>(max_chunks) *
                            decode_units(params.head_dim, params.n_heads, params.n_kv_heads, params.q_len);
  const bool extras = has_extras(params) || !params.req_to_token;
  const DType type = static_cast<DType>(dtype);
  const auto run = reinterpret_cast<cudaStream_t>(stream);
  switch (params.head_dim) {
    case 64: return check(decode_64(params, type, max_items, extras, run), what);
    case 80:
    case 96: return check(decode_80_96(params, type, max_items, extras, run), what);
    case 128: return check(decode_128(params, type, max_items, extras, run), what);
    case 192: return check(decode_192(params, type, max_items, extras, run), what);
    default: return check(decode_256(params, type, max_items, extras, run), what);
  }
}

void launch_qkv_attention_decode(FreshAttentionParams params, int dtype, int max_chunks, int device,
                                 std::uintptr_t stream) {
  const char* what = "qkv_decode_attention";
  const QkvParams& heads = params.heads;
  check_heads(what, params.head_dim, params.n_heads, params.n_kv_heads, params.q_len);
  require(params.head_dim == 64 || params.head_dim == 128, what, "head_dim must be 64 or 128");
  require(params.n_heads <= kFreshRows * params.n_kv_heads, what, "a kv head must have at most eight query heads");
  require(params.q_len == 1, what, "q_len must be 1");
  require(params.n_heads == heads.n_heads && params.n_kv_heads == heads.n_kv_heads &&
              params.head_dim == heads.head_dim && params.batch == heads.tokens,
          what, "plan and projection must have the same heads, head_dim and tokens");
  require(max_chunks >= params.batch && max_chunks <= (1 << 24), what, "max_chunks must be at least the batch");
  require(params.fixed_len >= 0, what, "fixed_len must not be negative");
  if (params.batch == 0) return;
  require(params.plan && params.req_to_token && heads.out_cache_loc, what, "no tensor may be null");
  require(params.partial_out && params.partial_ml && params.counters, what, "no scratch may be null");
  require(!params.lse && !has_extras(params) && !heads.k_scale && !heads.v_scale, what,
          "there is no lse, mask, sink, softcap or scale of a cache here");
  if (heads.cos) {
    require(heads.sin && heads.position_ids, what, "sin and position_ids must not be null where cos is given");
    require(heads.rotary_dim >= 16 && heads.rotary_dim % 16 == 0 && heads.rotary_dim <= heads.head_dim, what,
            "rotary_dim must be a multiple of 16 up to head_dim");
    require(heads.max_pos >= 1, what, "max_pos must be at least 1");
  }
  require(heads.eps >= 0.0f && heads.pool_size >= 0 && heads.pool_size <= 0x7fffffff, what,
          "eps and the pool's size must not be negative, and the latter below 2^31");
  params.q = heads.qkv;
  params.q_token_stride = heads.qkv_stride;
  params.q_head_stride = heads.head_dim;
  params.k = heads.k_buffer;
  params.v = heads.v_buffer;
  params.k_slot_stride = heads.k_slot_stride;
  params.k_head_stride = heads.k_head_stride;
  params.v_slot_stride = heads.v_slot_stride;
  params.v_head_stride = heads.v_head_stride;
  check_operands(what, params, dtype);
  require(qkv_is_aligned(heads, 2), what, "qkv, norms, cos, sin and pools must have rows at multiples of 16 bytes");
  const DeviceGuard guard(device, what);
  const int64_t max_items = static_cast<int64_t>(max_chunks) * params.n_kv_heads;
  const DType type = static_cast<DType>(dtype);
  const auto run = reinterpret_cast<cudaStream_t>(stream);
  check(params.head_dim == 64 ? decode_fresh_64(params, type, max_items, run)
                              : decode_fresh_128(params, type, max_items, run),
        what);
}

namespace {

/// False: there is nothing to do.
bool check_ragged(const char* what, const AttentionParams& params, int dtype, std::int64_t n_tokens) {
  check_heads(what, params.head_dim, params.n_heads, params.n_kv_heads, 1);
  require(n_tokens >= 0 && params.batch >= 0, what, "tokens and batch must not be negative");
  if (n_tokens == 0 || params.batch == 0) return false;
  require(params.qo_indptr && params.seq_lens, what, "qo_indptr and seq_lens must not be null");
  require(params.scale > 0.0f, what, "scale must be positive");
  check_operands(what, params, dtype);
  return true;
}

}  // namespace

void launch_attention_scalar(const AttentionParams& params, int dtype, std::int64_t n_tokens, int device,
                             std::uintptr_t stream) {
  const char* what = "scalar_attention";
  if (!check_ragged(what, params, dtype, n_tokens)) return;
  const DeviceGuard guard(device, what);
  check(scalar_attention(params, static_cast<DType>(dtype), n_tokens, reinterpret_cast<cudaStream_t>(stream)), what);
}

void launch_attention_prefill(const AttentionParams& params, int dtype, std::int64_t n_tokens, int device,
                              std::uintptr_t stream) {
  const char* what = "prefill_attention";
  if (!check_ragged(what, params, dtype, n_tokens)) return;
  const DeviceGuard guard(device, what);
  const bool extras = has_extras(params) || !params.req_to_token;
  const DType type = static_cast<DType>(dtype);
  const auto run = reinterpret_cast<cudaStream_t>(stream);
  switch (params.head_dim) {
    case 64: return check(prefill_64(params, type, n_tokens, extras, run), what);
    case 80:
    case 96: return check(prefill_80_96(params, type, n_tokens, extras, run), what);
    case 128: return check(prefill_128(params, type, n_tokens, extras, run), what);
    case 192: return check(prefill_192(params, type, n_tokens, extras, run), what);
    default: return check(prefill_256(params, type, n_tokens, extras, run), what);
  }
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
