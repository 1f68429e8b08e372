// The step kernel against the double-precision reference, and its projections bit by bit against `linear`.
#pragma once

#include <memory>

#include "step_model.h"

#include "astrai/step/maps.h"

#include "astrai/fused/rms_norm.cuh"
#include "astrai/linear/linear.cuh"

namespace step {

template <typename T>
struct DeviceLayer {
  ladder::Buffer<T> input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias, post_norm, gate_up, down, k, v;
  explicit DeviceLayer(const Layer<T>& h)
      : input_norm(h.input_norm), qkv(h.qkv), qkv_bias(some(h.qkv_bias)), q_norm(some(h.q_norm)), k_norm(some(h.k_norm)),
        o(h.o), o_bias(some(h.o_bias)), post_norm(h.post_norm), gate_up(h.gate_up), down(h.down), k(h.k), v(h.v) {}
  static std::vector<T> some(const std::vector<T>& values) { return values.empty() ? std::vector<T>(8) : values; }
};

/// A model on the device, and the parameters of a step of it.
template <typename T>
struct DeviceModel {
  const Model<T>& m;
  std::vector<std::unique_ptr<DeviceLayer<T>>> layers;
  ladder::Buffer<T> embedding, final_norm, head, logits, last_hidden;
  ladder::Buffer<float> cos, sin;
  ladder::Buffer<int64_t> ids, positions, locs, requests;
  ladder::Buffer<int32_t> lens, table;
  std::unique_ptr<ladder::Buffer<astrai::StepLayer>> layer_table;
  std::unique_ptr<ladder::Buffer<astrai::TensorMap>> maps;
  std::unique_ptr<ladder::Buffer<unsigned char>> workspace;
  astrai::StepParams params = {};

  explicit DeviceModel(const Model<T>& model)
      : m(model), embedding(m.embedding), final_norm(m.final_norm), head(m.head),
        logits(ladder::poison<T>(m.ids.size() * m.shape.vocab)), last_hidden(ladder::poison<T>(m.ids.size() * m.shape.hidden)),
        cos(m.cos), sin(m.sin), ids(m.ids), positions(m.positions), locs(m.locs), requests(m.requests), lens(m.lens),
        table(m.table) {
    const Shape& s = m.shape;
    std::vector<astrai::StepLayer> rows;
    for (const Layer<T>& host : m.layers) {
      layers.push_back(std::make_unique<DeviceLayer<T>>(host));
      const DeviceLayer<T>& d = *layers.back();
      astrai::StepLayer row = {};
      row.input_norm = d.input_norm.get();
      row.qkv = d.qkv.get();
      row.qkv_bias = s.bias ? d.qkv_bias.get() : nullptr;
      row.q_norm = s.qk_norm ? d.q_norm.get() : nullptr;
      row.k_norm = s.qk_norm ? d.k_norm.get() : nullptr;
      row.o = d.o.get();
      row.o_bias = s.bias ? d.o_bias.get() : nullptr;
      row.post_norm = d.post_norm.get();
      row.gate_up = d.gate_up.get();
      row.down = d.down.get();
      row.k_buffer = d.k.get();
      row.v_buffer = d.v.get();
      rows.push_back(row);
    }
    layer_table = std::make_unique<ladder::Buffer<astrai::StepLayer>>(rows);
    astrai::StepParams& p = params;
    p.layers = layer_table->get();
    p.n_layers = s.layers;
    p.rows = static_cast<int>(m.ids.size());
    p.hidden = s.hidden;
    p.intermediate = s.ffn;
    p.n_heads = s.heads;
    p.n_kv_heads = s.kv_heads;
    p.head_dim = s.dim;
    p.eps = 1e-5f;
    p.scale = static_cast<float>(1.0 / std::sqrt(s.dim));
    p.ids = ids.get();
    p.embedding = embedding.get();
    p.final_norm = final_norm.get();
    p.head = head.get();
    p.logits = logits.get();
    p.logits_stride = s.vocab;
    p.last_hidden = last_hidden.get();
    p.vocab = p.head_features = s.vocab;
    p.position_ids = positions.get();
    p.out_cache_loc = locs.get();
    p.seq_lens = lens.get();
    p.req_indices = requests.get();
    p.req_to_token = table.get();
    p.table_stride = m.table_stride;
    p.cos = cos.get();
    p.sin = sin.get();
    p.cos_stride = p.sin_stride = s.dim / 2;
    p.max_pos = static_cast<int64_t>(m.cos.size()) / (s.dim / 2);
    p.pool_size = m.pool;
    p.k_slot_stride = p.v_slot_stride = s.kv_heads * s.dim;
    p.k_head_stride = p.v_head_stride = s.dim;
    std::vector<astrai::TensorMap> encoded(astrai::step_maps(s.layers));
    ladder::check(astrai::encode_step_maps(p, rows.data(), Storage<T>::kDType, encoded.data()), "maps");
    maps = std::make_unique<ladder::Buffer<astrai::TensorMap>>(encoded);
    p.maps = maps->get();
    int blocks = 0;
    ladder::check(astrai::multiprocessor_count(&blocks), "multiprocessors");
    const int64_t bytes = astrai::place_workspace(p, blocks, nullptr);
    workspace = std::make_unique<ladder::Buffer<unsigned char>>(std::vector<unsigned char>(bytes, 0));
    astrai::derive(p);
    astrai::place_workspace(p, blocks, reinterpret_cast<char*>(workspace->get()));
  }

  void run(int late_bytes, int depth) {
    params.late_bytes = late_bytes;
    params.depth = depth;
    ladder::check(astrai::decode_step(params, Storage<T>::kDType, workspace->get(), nullptr), "decode_step");
    ladder::check(cudaDeviceSynchronize(), "decode_step");
  }
};

/// Largest deviation in units of what the same roundings cause in the reference itself.
template <typename T>
double deviation(const std::vector<T>& got, const std::vector<double>& exact, const std::vector<double>& rounded) {
  double allowed = 0.0, size = 0.0, worst = 0.0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    allowed = std::max(allowed, std::fabs(rounded[i] - exact[i]));
    size = std::max(size, std::fabs(exact[i]));
  }
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double error = std::fabs(Storage<T>::unpack(got[i]) - exact[i]);
    worst = error > worst || error != error ? error : worst;
    if (worst != worst) return worst;
  }
  return worst / (2.0 * allowed + Storage<T>::kEpsilon * size);
}

/// The last layer once more by the ops themselves, from what the step left in its scratch: 0 if all bits agree.
template <typename T>
double against_ops(DeviceModel<T>& d) {
  const Model<T>& m = d.m;
  const Shape& s = m.shape;
  const astrai::StepParams& p = d.params;
  const DeviceLayer<T>& w = *d.layers.back();
  const int rows = p.rows;
  const int width = (s.heads + 2 * s.kv_heads) * s.dim;
  const auto scratch = [&](const void* source, int count) {
    std::vector<T> host(count);
    ladder::check(cudaMemcpy(host.data(), source, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  };
  std::vector<T> first(static_cast<std::size_t>(rows) * s.hidden);
  for (int row = 0; row < rows; ++row) {
    std::copy_n(m.embedding.begin() + m.ids[row] * s.hidden, s.hidden, first.begin() + row * s.hidden);
  }
  const ladder::Buffer<T> x(first);
  double worst = 0.0;
  const auto linear = [&](const void* source, const T* weight, const T* bias, const void* residual, const T* norm,
                          bool swiglu, int features, int depth, const std::vector<T>& expected) {
    auto out = std::make_unique<ladder::Buffer<T>>(ladder::poison<T>(static_cast<std::size_t>(rows) * features));
    const ladder::Buffer<T> normed(static_cast<std::size_t>(rows) * depth);
    if (norm != nullptr) {  // by a launch of its own, as core does it for more than one row
      astrai::RmsNormParams n = {};
      n.x = {source, depth, 0};
      n.out = {normed.get(), depth, 0};
      n.weight = norm;
      n.rows = rows;
      n.inner = 1;
      n.hidden = depth;
      n.eps = p.eps;
      ladder::check(astrai::rms_norm(n, Storage<T>::kDType, false, nullptr), "rms_norm");
    }
    astrai::LinearParams l = {};
    l.x = norm != nullptr ? normed.get() : source;
    l.x_stride = l.weight_stride = l.depth = depth;
    l.weight = weight;
    l.bias = bias;
    l.residual = residual;
    l.out = out->get();
    l.residual_stride = l.out_stride = l.features = features;
    l.rows = rows;
    l.swiglu = swiglu;
    ladder::check(astrai::linear(l, Storage<T>::kDType, nullptr), "linear");
    ladder::check(cudaDeviceSynchronize(), "linear");
    const std::vector<T> got = out->read();
    if (!expected.empty() && std::memcmp(got.data(), expected.data(), got.size() * sizeof(T)) != 0) worst = 2.0;
    return out;
  };
  // One layer: its input is the embedding. Attention's own result is compared with the reference alone.
  const T* o_bias = s.bias ? w.o_bias.get() : nullptr;
  linear(x.get(), w.qkv.get(), s.bias ? w.qkv_bias.get() : nullptr, nullptr, w.input_norm.get(), false, width, s.hidden,
         scratch(p.workspace.qkv, rows * width));
  const auto middle = linear(p.workspace.attended, w.o.get(), o_bias, x.get(), nullptr, false, s.hidden, s.heads * s.dim, {});
  const std::vector<T> act = scratch(p.workspace.activated, rows * s.ffn);
  const auto gated = linear(middle->get(), w.gate_up.get(), nullptr, nullptr, w.post_norm.get(), true, s.ffn, s.hidden, act);
  const auto last = linear(gated->get(), w.down.get(), nullptr, middle->get(), nullptr, false, s.hidden, s.ffn,
                           scratch(p.workspace.after_down, rows * s.hidden));
  linear(last->get(), d.head.get(), nullptr, nullptr, d.final_norm.get(), false, s.vocab, s.hidden, d.logits.read());
  return worst;
}

/// How a step is run. late_bytes: -1 merges chunks by tickets, a large one in the blocks that need them; depth 0: the
/// kernel's own choice.
struct Way {
  int late_bytes, depth;
};
constexpr Way kWays[] = {{-1, 0}, {1 << 24, 0}, {-1, 3}, {1 << 24, 4}};

/// One way: logits, new keys and values, what else lies in the pools, and the ops' bits.
template <typename T>
double error_of(DeviceModel<T>& device, const Way& way, const Result& exact, const Result& rounded) {
  const Model<T>& model = device.m;
  const Shape& s = model.shape;
  double worst = 0.0;
  const auto raise = [&](double error) { worst = error > worst || error != error ? error : worst; };
  for (int launch = 0; launch < 2; ++launch) {  // the second finds the scratch as the first left it
    device.run(way.late_bytes, way.depth);
    raise(deviation(device.logits.read(), exact.logits, rounded.logits));
  }
  for (int l = 0; l < s.layers; ++l) {
    const std::size_t size = static_cast<std::size_t>(s.kv_heads) * s.dim;
    for (const bool is_v : {false, true}) {
      const std::vector<T> pool = (is_v ? device.layers[l]->v : device.layers[l]->k).read();
      std::vector<T> expected = is_v ? model.layers[l].v : model.layers[l].k;
      std::vector<T> written;
      for (const int64_t slot : model.locs) {
        written.insert(written.end(), pool.begin() + slot * size, pool.begin() + (slot + 1) * size);
        std::copy_n(pool.begin() + slot * size, size, expected.begin() + slot * size);
      }
      raise(deviation(written, is_v ? exact.v[l] : exact.k[l], is_v ? rounded.v[l] : rounded.k[l]));
      if (std::memcmp(pool.data(), expected.data(), pool.size() * sizeof(T)) != 0) raise(3.0);  // wrote elsewhere
    }
  }
  // With parts merged late, attention's rows exist in shared memory only.
  if (s.layers == 1 && way.late_bytes < 0) raise(against_ops(device));
  return worst;
}

template <typename T>
void verify(ladder::Report& report, const Case& c) {
  const Model<T> model(c);
  DeviceModel<T> device(model);
  const Result exact = reference(model, false), rounded = reference(model, true);
  for (const Way& way : kWays) {
    char name[160];
    std::snprintf(name, sizeof name, "step %s %s, %zu rows, page %d, %s, queue %d", Storage<T>::kName, c.shape.name,
                  c.lens.size(), c.page, way.late_bytes < 0 ? "tickets" : "late", way.depth);
    report.row(name, error_of(device, way, exact, rounded));
  }
}

}  // namespace step
