// The Python module astrai_kernels.lib._C: integers in, a launch on the caller's stream, nothing out.
//
// Tensors arrive as (address, stride, stride) tuples of integers; the module knows neither torch nor NumPy, keeps no
// reference to any Python object and holds the interpreter lock for the microseconds that a launch takes.

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <tuple>

#include "ops.h"

namespace py = pybind11;

namespace {

using RowTuple = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;
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
  astrai::launch_rms_norm(params, dtype, false, device, stream);
}

void add_rms_norm(int dtype, int device, std::uintptr_t stream, RowTuple x, RowTuple residual, std::uintptr_t weight,
                  RowTuple out, RowTuple residual_out, std::int64_t rows, std::int64_t inner, int hidden, float eps) {
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
  astrai::launch_rms_norm(params, dtype, true, device, stream);
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

PYBIND11_MODULE(_C, module) {
  module.doc() = "Launchers of astrai's CUDA kernels; use the checked functions of astrai_kernels.";
  module.def("rms_norm", &rms_norm);
  module.def("add_rms_norm", &add_rms_norm);
  module.def("rotary", &rotary);
  module.def("build_info", &build_info);
}
