// The step launcher of the Python module: see module.cpp.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>
#include <vector>

#include "ops.h"

namespace py = pybind11;

namespace {

using Shape = std::tuple<int, int, int, int, int, int, int>;  // rows, hidden, intermediate, heads, kv heads, head_dim, vocab
using Table = std::tuple<std::uintptr_t, std::int64_t>;       // address; rows or stride of the rows
using Angles = std::tuple<std::uintptr_t, std::int64_t, std::uintptr_t, std::int64_t, std::int64_t>;  // cos, sin; positions
using Pool = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;  // size; strides of k, of v

astrai::StepParams with_shape(const Shape& shape, int n_layers) {
  astrai::StepParams p = {};
  std::tie(p.rows, p.hidden, p.intermediate, p.n_heads, p.n_kv_heads, p.head_dim, p.vocab) = shape;
  p.n_layers = n_layers;
  p.head_features = p.vocab;
  p.logits_stride = p.vocab;
  return p;
}

template <typename T>
const T* pointer(std::uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

// weights: of each layer, what StepLayer holds; head.
py::bytes step_maps(int dtype, int device, const Shape& shape, const std::vector<std::array<std::uintptr_t, 12>>& layers,
                    std::uintptr_t head) {
  astrai::StepParams p = with_shape(shape, static_cast<int>(layers.size()));
  p.head = pointer<void>(head);
  std::vector<astrai::StepLayer> table;
  for (const std::array<std::uintptr_t, 12>& at : layers) {
    astrai::StepLayer layer = {};
    layer.qkv = pointer<void>(at[1]);
    layer.o = pointer<void>(at[5]);
    layer.gate_up = pointer<void>(at[8]);
    layer.down = pointer<void>(at[9]);
    table.push_back(layer);
  }
  return py::bytes(astrai::step_maps(p, table.data(), dtype, device));
}

// inputs: ids, position_ids, out_cache_loc, seq_lens, req_indices; weights: embedding, final norm, head;
// outputs: logits, last hidden state.
void decode_step(int dtype, int device, std::uintptr_t stream, const Shape& shape,
                 const std::array<std::uintptr_t, 5>& inputs, const Table& req_to_token, const Table& layers, std::uintptr_t maps,
                 const std::array<std::uintptr_t, 3>& weights, const Angles& angles, const Pool& pool,
                 const std::array<std::uintptr_t, 2>& outputs, std::uintptr_t workspace, float eps, float scale) {
  astrai::StepParams p = with_shape(shape, static_cast<int>(std::get<1>(layers)));
  p.layers = pointer<astrai::StepLayer>(std::get<0>(layers));
  p.maps = pointer<astrai::TensorMap>(maps);
  p.eps = eps;
  p.scale = scale;
  p.ids = pointer<std::int64_t>(inputs[0]);
  p.position_ids = pointer<std::int64_t>(inputs[1]);
  p.out_cache_loc = pointer<std::int64_t>(inputs[2]);
  p.seq_lens = pointer<std::int32_t>(inputs[3]);
  p.req_indices = pointer<std::int64_t>(inputs[4]);
  p.req_to_token = pointer<std::int32_t>(std::get<0>(req_to_token));
  p.table_stride = std::get<1>(req_to_token);
  p.embedding = pointer<void>(weights[0]);
  p.final_norm = pointer<void>(weights[1]);
  p.head = pointer<void>(weights[2]);
  p.cos = pointer<float>(std::get<0>(angles));
  p.cos_stride = std::get<1>(angles);
  p.sin = pointer<float>(std::get<2>(angles));
  p.sin_stride = std::get<3>(angles);
  p.max_pos = std::get<4>(angles);
  std::tie(p.pool_size, p.k_slot_stride, p.k_head_stride, p.v_slot_stride, p.v_head_stride) = pool;
  p.logits = reinterpret_cast<void*>(outputs[0]);
  p.last_hidden = reinterpret_cast<void*>(outputs[1]);
  astrai::launch_decode_step(p, dtype, workspace, device, stream);
}

std::tuple<std::int64_t, int> step_capacity(int device, const Shape& shape, int n_layers) {
  astrai::StepParams p = with_shape(shape, n_layers);
  const astrai::StepCapacity capacity = astrai::step_capacity(p, device);
  return {capacity.workspace_bytes, capacity.stages};
}

}  // namespace

void bind_step(py::module_& module) {
  module.def("decode_step", &decode_step);
  module.def("step_capacity", &step_capacity);
  module.def("step_maps", &step_maps);
}
