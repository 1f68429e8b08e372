// The Python module astrai_kernels.lib._C: integers in, a launch on the caller's stream, nothing out.
//
// Tensors arrive as (address, stride, stride) tuples of integers; the module knows neither torch nor NumPy, keeps no
// reference to any Python object and holds the interpreter lock for the microseconds that a launch takes.

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>

#include "ops.h"

namespace py = pybind11;

namespace {

using RowTuple = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;
using MatrixTuple = std::tuple<std::uintptr_t, std::int64_t>;
using HalvesTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t>;
using AdapterTuple = std::tuple<std::uintptr_t, std::int64_t, bool, int>;  // ids, their stride and width, adapters
using HeadsTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, int>;

template <typename Pointer>
astrai::RowView<Pointer> row_view(const RowTuple& tuple) {
  return {reinterpret_cast<Pointer>(std::get<0>(tuple)), std::get<1>(tuple), std::get<2>(tuple)};
}

astrai::RotaryTensor heads_view(const HeadsTuple& tuple) {
  return {reinterpret_cast<const void*>(std::get<0>(tuple)),
          reinterpret_cast<void*>(std::get<1>(tuple)),
          std::get<2>(tuple),
          std::get<3>(tuple),
          std::get<4>(tuple),
          std::get<5>(tuple),
          std::get<6>(tuple)};
}

void rms_norm(int dtype, int device, std::uintptr_t stream, RowTuple x, std::uintptr_t weight, RowTuple out,
              std::int64_t rows, std::int64_t inner, int hidden, float eps) {
  astrai::RmsNormParams params = {};
  params.x = row_view<const void*>(x);
  params.out = row_view<void*>(out);
  params.weight = reinterpret_cast<const void*>(weight);
  params.rows = rows;
  params.inner = inner;
  params.hidden = hidden;
  params.eps = eps;
  astrai::launch_rms_norm(params, dtype, false, false, device, stream);
}

void add_rms_norm(int dtype, int device, std::uintptr_t stream, RowTuple x, RowTuple residual, std::uintptr_t weight,
                  RowTuple out, RowTuple residual_out, std::int64_t rows, std::int64_t inner, int hidden, float eps,
                  bool overlap) {
  astrai::RmsNormParams params = {};
  params.x = row_view<const void*>(x);
  params.residual = row_view<const void*>(residual);
  params.out = row_view<void*>(out);
  params.residual_out = row_view<void*>(residual_out);
  params.weight = reinterpret_cast<const void*>(weight);
  params.rows = rows;
  params.inner = inner;
  params.hidden = hidden;
  params.eps = eps;
  astrai::launch_rms_norm(params, dtype, true, overlap, device, stream);
}

void rotary(int dtype, int device, std::uintptr_t stream, HeadsTuple q, HeadsTuple k, std::uintptr_t cos,
            std::int64_t cos_stride, std::uintptr_t sin, std::int64_t sin_stride, std::int64_t max_pos,
            std::uintptr_t position_ids, std::int64_t position_stride, bool positions_are_64_bit, std::int64_t tokens,
            int head_dim, int rotary_dim, bool interleaved) {
  astrai::RotaryParams params = {};
  params.q = heads_view(q);
  params.k = heads_view(k);
  params.cos = reinterpret_cast<const float*>(cos);
  params.sin = reinterpret_cast<const float*>(sin);
  params.cos_stride = cos_stride;
  params.sin_stride = sin_stride;
  params.max_pos = max_pos;
  params.position_ids = reinterpret_cast<const void*>(position_ids);
  params.position_stride = position_stride;
  params.positions_are_64_bit = positions_are_64_bit;
  params.tokens = tokens;
  params.head_dim = head_dim;
  params.rotary_dim = rotary_dim;
  astrai::launch_rotary(params, dtype, interleaved, device, stream);
}

void linear(int dtype, int device, std::uintptr_t stream, MatrixTuple x, MatrixTuple weight, std::uintptr_t bias,
            MatrixTuple residual, MatrixTuple out, std::uintptr_t norm_weight, float norm_eps, std::uintptr_t squares,
            HalvesTuple next, int rows, int features, int depth, bool swiglu, bool fixed_order) {
  astrai::LinearParams params = {};
  params.x = reinterpret_cast<const void*>(std::get<0>(x));
  params.x_stride = std::get<1>(x);
  params.weight = reinterpret_cast<const void*>(std::get<0>(weight));
  params.weight_stride = std::get<1>(weight);
  params.bias = reinterpret_cast<const void*>(bias);
  params.residual = reinterpret_cast<const void*>(std::get<0>(residual));
  params.residual_stride = std::get<1>(residual);
  params.out = reinterpret_cast<void*>(std::get<0>(out));
  params.out_stride = std::get<1>(out);
  params.norm_weight = reinterpret_cast<const void*>(norm_weight);
  params.norm_eps = norm_eps;
  params.squares = reinterpret_cast<const float*>(squares);
  params.next_norm = reinterpret_cast<const void*>(std::get<0>(next));
  params.next_x = reinterpret_cast<void*>(std::get<1>(next));
  params.next_squares = reinterpret_cast<float*>(std::get<2>(next));
  params.rows = rows;
  params.features = features;
  params.depth = depth;
  params.swiglu = swiglu;
  params.fixed_order = fixed_order;
  astrai::launch_linear(params, dtype, device, stream);
}

astrai::LoraRows lora_rows(const AdapterTuple& tuple) {
  return {reinterpret_cast<const void*>(std::get<0>(tuple)), std::get<1>(tuple), std::get<2>(tuple), std::get<3>(tuple)};
}

void lora_shrink(int dtype, int device, std::uintptr_t stream, MatrixTuple x, RowTuple a, AdapterTuple adapters,
                 MatrixTuple out, int rows, int rank, int depth) {
  astrai::LoraShrinkParams params = {};
  params.x = reinterpret_cast<const void*>(std::get<0>(x));
  params.x_stride = std::get<1>(x);
  params.a = reinterpret_cast<const void*>(std::get<0>(a));
  params.a_stride = std::get<1>(a);
  params.a_row_stride = std::get<2>(a);
  params.adapters = lora_rows(adapters);
  params.out = reinterpret_cast<float*>(std::get<0>(out));
  params.out_stride = std::get<1>(out);
  params.rows = rows;
  params.rank = rank;
  params.depth = depth;
  astrai::launch_lora_shrink(params, dtype, device, stream);
}

void lora_expand(int dtype, int device, std::uintptr_t stream, MatrixTuple base, MatrixTuple hidden, RowTuple b,
                 AdapterTuple adapters, std::uintptr_t scaling, MatrixTuple out, int rows, int rank, int features) {
  astrai::LoraExpandParams params = {};
  params.base = reinterpret_cast<const void*>(std::get<0>(base));
  params.base_stride = std::get<1>(base);
  params.hidden = reinterpret_cast<const float*>(std::get<0>(hidden));
  params.hidden_stride = std::get<1>(hidden);
  params.b = reinterpret_cast<const void*>(std::get<0>(b));
  params.b_stride = std::get<1>(b);
  params.b_row_stride = std::get<2>(b);
  params.adapters = lora_rows(adapters);
  params.scaling = reinterpret_cast<const float*>(scaling);
  params.out = reinterpret_cast<void*>(std::get<0>(out));
  params.out_stride = std::get<1>(out);
  params.rows = rows;
  params.rank = rank;
  params.features = features;
  astrai::launch_lora_expand(params, dtype, device, stream);
}

void qkv_norm_rope_write(int dtype, int device, std::uintptr_t stream, MatrixTuple qkv, RowTuple q, RowTuple k_buffer,
                         RowTuple v_buffer, MatrixTuple k_scale, MatrixTuple v_scale, std::uintptr_t q_norm,
                         std::uintptr_t k_norm, MatrixTuple cos, MatrixTuple sin, std::int64_t max_pos,
                         MatrixTuple position_ids, bool positions_are_64_bit, MatrixTuple out_cache_loc,
                         bool locs_are_64_bit, std::int64_t pool_size, std::int64_t tokens, int n_heads, int n_kv_heads,
                         int head_dim, int rotary_dim, float eps, bool interleaved, bool overlap) {
  astrai::QkvParams params = {};
  params.qkv = reinterpret_cast<const void*>(std::get<0>(qkv));
  params.qkv_stride = std::get<1>(qkv);
  params.q = reinterpret_cast<void*>(std::get<0>(q));
  params.q_token_stride = std::get<1>(q);
  params.q_head_stride = std::get<2>(q);
  params.k_buffer = reinterpret_cast<void*>(std::get<0>(k_buffer));
  params.k_slot_stride = std::get<1>(k_buffer);
  params.k_head_stride = std::get<2>(k_buffer);
  params.v_buffer = reinterpret_cast<void*>(std::get<0>(v_buffer));
  params.v_slot_stride = std::get<1>(v_buffer);
  params.v_head_stride = std::get<2>(v_buffer);
  params.k_scale = reinterpret_cast<float*>(std::get<0>(k_scale));
  params.k_scale_stride = std::get<1>(k_scale);
  params.v_scale = reinterpret_cast<float*>(std::get<0>(v_scale));
  params.v_scale_stride = std::get<1>(v_scale);
  params.q_norm = reinterpret_cast<const void*>(q_norm);
  params.k_norm = reinterpret_cast<const void*>(k_norm);
  params.cos = reinterpret_cast<const float*>(std::get<0>(cos));
  params.cos_stride = std::get<1>(cos);
  params.sin = reinterpret_cast<const float*>(std::get<0>(sin));
  params.sin_stride = std::get<1>(sin);
  params.max_pos = max_pos;
  params.position_ids = reinterpret_cast<const void*>(std::get<0>(position_ids));
  params.position_stride = std::get<1>(position_ids);
  params.positions_are_64_bit = positions_are_64_bit;
  params.out_cache_loc = reinterpret_cast<const void*>(std::get<0>(out_cache_loc));
  params.loc_stride = std::get<1>(out_cache_loc);
  params.locs_are_64_bit = locs_are_64_bit;
  params.pool_size = pool_size;
  params.tokens = tokens;
  params.n_heads = n_heads;
  params.n_kv_heads = n_kv_heads;
  params.head_dim = head_dim;
  params.rotary_dim = rotary_dim;
  params.eps = eps;
  params.interleaved = interleaved;
  params.overlap = overlap;
  astrai::launch_qkv_norm_rope_write(params, dtype, device, stream);
}

void gated_activation(int dtype, int kind, int device, std::uintptr_t stream, RowTuple x, RowTuple out,
                      std::int64_t rows, std::int64_t inner, int width) {
  astrai::GatedParams params = {};
  params.x = row_view<const void*>(x);
  params.out = row_view<void*>(out);
  params.rows = rows;
  params.inner = inner;
  params.width = width;
  astrai::launch_gated_activation(params, dtype, kind, device, stream);
}

void embedding(int dtype, int device, std::uintptr_t stream, MatrixTuple ids, bool ids_are_64_bit, MatrixTuple table,
               MatrixTuple out, HalvesTuple next, std::int64_t tokens, std::int64_t vocab, int hidden) {
  astrai::EmbeddingParams params = {};
  params.ids = reinterpret_cast<const void*>(std::get<0>(ids));
  params.id_stride = std::get<1>(ids);
  params.ids_are_64_bit = ids_are_64_bit;
  params.table = reinterpret_cast<const void*>(std::get<0>(table));
  params.table_stride = std::get<1>(table);
  params.out = reinterpret_cast<void*>(std::get<0>(out));
  params.out_stride = std::get<1>(out);
  params.tokens = tokens;
  params.vocab = vocab;
  params.hidden = hidden;
  params.next_norm = reinterpret_cast<const void*>(std::get<0>(next));
  params.next_x = reinterpret_cast<void*>(std::get<1>(next));
  params.next_squares = reinterpret_cast<float*>(std::get<2>(next));
  astrai::launch_embedding(params, dtype, device, stream);
}

template <typename T>
astrai::PerRow<T> per_row(const MatrixTuple& tuple) {
  return {reinterpret_cast<const T*>(std::get<0>(tuple)), std::get<1>(tuple)};
}

// filters: temperature, top_k, top_p, min_p, seed, position; penalties: presence, frequency, repetition.
void sample(int dtype, int device, std::uintptr_t stream, MatrixTuple logits, MatrixTuple out, std::int64_t rows,
            int vocab, const std::array<MatrixTuple, 6>& filters,
            const std::array<MatrixTuple, 3>& penalties, MatrixTuple counts, MatrixTuple seen) {
  astrai::SamplingParams params = {};
  params.logits = reinterpret_cast<const void*>(std::get<0>(logits));
  params.logits_stride = std::get<1>(logits);
  params.out = reinterpret_cast<std::int64_t*>(std::get<0>(out));
  params.out_stride = std::get<1>(out);
  params.rows = rows;
  params.vocab = vocab;
  params.temperature = per_row<float>(filters[0]);
  params.top_k = per_row<std::int64_t>(filters[1]);
  params.top_p = per_row<float>(filters[2]);
  params.min_p = per_row<float>(filters[3]);
  params.seed = per_row<std::int64_t>(filters[4]);
  params.position = per_row<std::int64_t>(filters[5]);
  params.presence = per_row<float>(penalties[0]);
  params.frequency = per_row<float>(penalties[1]);
  params.repetition = per_row<float>(penalties[2]);
  params.counts = reinterpret_cast<const std::int32_t*>(std::get<0>(counts));
  params.counts_stride = std::get<1>(counts);
  params.seen = reinterpret_cast<const std::uint8_t*>(std::get<0>(seen));
  params.seen_stride = std::get<1>(seen);
  astrai::launch_sampling(params, dtype, device, stream);
}

py::dict build_info() {
  py::dict info;
  info["version"] = ASTRAI_VERSION;
  info["cudart_version"] = CUDART_VERSION;
  info["compiler"] = ASTRAI_CUDA_COMPILER;
  info["host_compiler"] = ASTRAI_HOST_COMPILER;
  info["architectures"] = ASTRAI_CUDA_ARCHITECTURES;
  return info;
}

}  // namespace

void bind_attention(py::module_& module);  // module_attention.cpp
void bind_step(py::module_& module);       // module_step.cpp

PYBIND11_MODULE(_C, module) {
  module.doc() = "Launchers of astrai's CUDA kernels; use the checked functions of astrai_kernels.";
  module.def("rms_norm", &rms_norm);
  module.def("add_rms_norm", &add_rms_norm);
  module.def("rotary", &rotary);
  module.def("linear", &linear);
  module.def("lora_shrink", &lora_shrink);
  module.def("lora_expand", &lora_expand);
  bind_attention(module);
  bind_step(module);
  module.def("qkv_norm_rope_write", &qkv_norm_rope_write);
  module.def("gated_activation", &gated_activation);
  module.def("embedding", &embedding);
  module.def("sample", &sample);
  module.def("build_info", &build_info);
}
