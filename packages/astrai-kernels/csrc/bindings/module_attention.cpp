// The attention launchers of the Python module: see module.cpp.

#include <pybind11/pybind11.h>

#include <tuple>

#include "ops.h"

namespace py = pybind11;

namespace {

using Heads = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;                // address, token and head stride
using Keys = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t>;   // address; slot, head, batch stride
using Scales = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;               // address; slot and batch stride
using Rows = std::tuple<std::uintptr_t, std::int64_t>;                               // address, row stride
using Shape = std::tuple<int, int, int, int, int>;                                   // heads, kv heads, head_dim, q_len, window
using Batch = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, int>;        // qo_indptr, seq_lens, req_indices, size
using Scratch = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, int>;

constexpr std::uintptr_t kPlanHeaderBytes = sizeof(astrai::AttentionPlan);

astrai::AttentionParams operands(int dtype, Heads q, Heads out, std::uintptr_t lse, Keys k, Keys v, Scales k_scale,
                                 Scales v_scale, Rows table, Rows mask, std::uintptr_t sinks, Shape shape, float scale,
                                 float softcap) {
  astrai::AttentionParams p = {};
  p.rows_are_bfloat16 = dtype == 2;
  p.k_scale = reinterpret_cast<const float*>(std::get<0>(k_scale));
  p.k_scale_stride = std::get<1>(k_scale);
  p.k_scale_batch_stride = std::get<2>(k_scale);
  p.v_scale = reinterpret_cast<const float*>(std::get<0>(v_scale));
  p.v_scale_stride = std::get<1>(v_scale);
  p.v_scale_batch_stride = std::get<2>(v_scale);
  p.q = reinterpret_cast<const void*>(std::get<0>(q));
  p.q_token_stride = std::get<1>(q);
  p.q_head_stride = std::get<2>(q);
  p.out = reinterpret_cast<void*>(std::get<0>(out));
  p.out_token_stride = std::get<1>(out);
  p.out_head_stride = std::get<2>(out);
  p.lse = reinterpret_cast<float*>(lse);
  p.k = reinterpret_cast<const void*>(std::get<0>(k));
  p.k_slot_stride = std::get<1>(k);
  p.k_head_stride = std::get<2>(k);
  p.k_batch_stride = std::get<3>(k);
  p.v = reinterpret_cast<const void*>(std::get<0>(v));
  p.v_slot_stride = std::get<1>(v);
  p.v_head_stride = std::get<2>(v);
  p.v_batch_stride = std::get<3>(v);
  p.req_to_token = reinterpret_cast<const std::int32_t*>(std::get<0>(table));
  p.table_stride = std::get<1>(table);
  p.mask = reinterpret_cast<const std::uint8_t*>(std::get<0>(mask));
  p.mask_stride = std::get<1>(mask);
  p.sinks = reinterpret_cast<const float*>(sinks);
  std::tie(p.n_heads, p.n_kv_heads, p.head_dim, p.q_len, p.window) = shape;
  p.scale = scale;
  p.softcap = softcap;
  return p;
}

void bind_scratch(astrai::AttentionParams& p, const Scratch& scratch) {
  p.plan = reinterpret_cast<const astrai::AttentionPlan*>(std::get<0>(scratch));
  p.chunks = reinterpret_cast<const astrai::AttentionChunk*>(std::get<0>(scratch) + kPlanHeaderBytes);
  p.partial_out = reinterpret_cast<float*>(std::get<1>(scratch));
  p.partial_ml = reinterpret_cast<float*>(std::get<2>(scratch));
  p.counters = reinterpret_cast<std::int32_t*>(std::get<3>(scratch));
}

void attention_decode(int dtype, int device, std::uintptr_t stream, Heads q, Heads out, std::uintptr_t lse, Keys k, Keys v,
                      Scales k_scale, Scales v_scale, Rows table, Rows mask, std::uintptr_t sinks, Shape shape,
                      float scale, float softcap, bool overlap, int batch, int fixed_len, Scratch scratch) {
  astrai::AttentionParams p =
      operands(dtype, q, out, lse, k, v, k_scale, v_scale, table, mask, sinks, shape, scale, softcap);
  p.overlap = overlap;
  p.batch = batch;
  p.fixed_len = fixed_len;
  bind_scratch(p, scratch);
  astrai::launch_attention_decode(p, dtype, std::get<4>(scratch), device, stream);
}

void qkv_attention_decode(int dtype, int device, std::uintptr_t stream, Rows qkv, Heads k_buffer, Heads v_buffer,
                          std::uintptr_t q_norm, std::uintptr_t k_norm, Rows cos, Rows sin, std::int64_t max_pos,
                          Rows position_ids, bool positions_are_64_bit, Rows out_cache_loc, bool locs_are_64_bit,
                          std::int64_t pool_size, int batch, int rotary_dim, float eps, bool interleaved, bool overlap,
                          Heads out, Rows table, Shape shape, float scale, int fixed_len, Scratch scratch) {
  astrai::FreshAttentionParams p = {};
  std::tie(p.n_heads, p.n_kv_heads, p.head_dim, p.q_len, p.window) = shape;
  p.out = reinterpret_cast<void*>(std::get<0>(out));
  p.out_token_stride = std::get<1>(out);
  p.out_head_stride = std::get<2>(out);
  p.req_to_token = reinterpret_cast<const std::int32_t*>(std::get<0>(table));
  p.table_stride = std::get<1>(table);
  p.scale = scale;
  p.batch = batch;
  p.fixed_len = fixed_len;
  p.overlap = overlap;
  bind_scratch(p, scratch);
  astrai::QkvParams& heads = p.heads;
  heads.qkv = reinterpret_cast<const void*>(std::get<0>(qkv));
  heads.qkv_stride = std::get<1>(qkv);
  heads.k_buffer = reinterpret_cast<void*>(std::get<0>(k_buffer));
  heads.k_slot_stride = std::get<1>(k_buffer);
  heads.k_head_stride = std::get<2>(k_buffer);
  heads.v_buffer = reinterpret_cast<void*>(std::get<0>(v_buffer));
  heads.v_slot_stride = std::get<1>(v_buffer);
  heads.v_head_stride = std::get<2>(v_buffer);
  heads.q_norm = reinterpret_cast<const void*>(q_norm);
  heads.k_norm = reinterpret_cast<const void*>(k_norm);
  heads.cos = reinterpret_cast<const float*>(std::get<0>(cos));
  heads.cos_stride = std::get<1>(cos);
  heads.sin = reinterpret_cast<const float*>(std::get<0>(sin));
  heads.sin_stride = std::get<1>(sin);
  heads.max_pos = max_pos;
  heads.position_ids = reinterpret_cast<const void*>(std::get<0>(position_ids));
  heads.position_stride = std::get<1>(position_ids);
  heads.positions_are_64_bit = positions_are_64_bit;
  heads.out_cache_loc = reinterpret_cast<const void*>(std::get<0>(out_cache_loc));
  heads.loc_stride = std::get<1>(out_cache_loc);
  heads.locs_are_64_bit = locs_are_64_bit;
  heads.pool_size = pool_size;
  heads.tokens = batch;
  heads.n_heads = p.n_heads;
  heads.n_kv_heads = p.n_kv_heads;
  heads.head_dim = p.head_dim;
  heads.rotary_dim = rotary_dim;
  heads.eps = eps;
  heads.interleaved = interleaved;
  astrai::launch_qkv_attention_decode(p, dtype, std::get<4>(scratch), device, stream);
}

/// attention_prefill and attention_scalar.
template <void (*kLaunch)(const astrai::AttentionParams&, int, std::int64_t, int, std::uintptr_t)>
void attention_ragged(int dtype, int device, std::uintptr_t stream, Heads q, Heads out, std::uintptr_t lse, Keys k,
                      Keys v, Scales k_scale, Scales v_scale, Rows table, Rows mask, std::uintptr_t sinks, Shape shape,
                      float scale, float softcap, Batch batch, std::int64_t n_tokens) {
  astrai::AttentionParams p =
      operands(dtype, q, out, lse, k, v, k_scale, v_scale, table, mask, sinks, shape, scale, softcap);
  p.qo_indptr = reinterpret_cast<const std::int32_t*>(std::get<0>(batch));
  p.seq_lens = reinterpret_cast<const std::int32_t*>(std::get<1>(batch));
  p.req_indices = reinterpret_cast<const std::int64_t*>(std::get<2>(batch));
  p.batch = std::get<3>(batch);
  kLaunch(p, dtype, n_tokens, device, stream);
}

void attention_plan(int device, std::uintptr_t stream, std::uintptr_t seq_lens, std::uintptr_t req_indices,
                    std::uintptr_t plan, int batch, int max_chunks, Shape shape, int fixed_len, bool overlap) {
  astrai::AttentionPlanParams p = {};
  p.seq_lens = reinterpret_cast<const std::int32_t*>(seq_lens);
  p.req_indices = reinterpret_cast<const std::int64_t*>(req_indices);
  p.plan = reinterpret_cast<astrai::AttentionPlan*>(plan);
  p.chunks = reinterpret_cast<astrai::AttentionChunk*>(plan + kPlanHeaderBytes);
  p.batch = batch;
  p.max_chunks = max_chunks;
  p.fixed_len = fixed_len;
  p.overlap = overlap;
  int n_heads = 0;
  int n_kv_heads = 0;
  int head_dim = 0;
  std::tie(n_heads, n_kv_heads, head_dim, p.q_len, p.window) = shape;
  astrai::launch_attention_plan(p, head_dim, n_heads, n_kv_heads, device, stream);
}

std::tuple<int, int> attention_capacity(int head_dim, int n_heads, int n_kv_heads, int q_len, int batch, int device) {
  const astrai::AttentionCapacity capacity =
      astrai::attention_capacity(head_dim, n_heads, n_kv_heads, q_len, batch, device);
  return {capacity.workers, capacity.units};
}

}  // namespace

void bind_attention(py::module_& module) {
  module.def("attention_decode", &attention_decode);
  module.def("qkv_attention_decode", &qkv_attention_decode);
  module.def("attention_prefill", &attention_ragged<astrai::launch_attention_prefill>);
  module.def("attention_scalar", &attention_ragged<astrai::launch_attention_scalar>);
  module.def("attention_plan", &attention_plan);
  module.def("attention_capacity", &attention_capacity);
}
