// A small random model for the step kernel, on the host and on the device, and what one step of it must give.
#pragma once

#include <numeric>

#include "ladder.h"

#include "astrai/step/step.cuh"

namespace step {

using ladder::Storage;

struct Shape {
  const char* name;
  int vocab, hidden, layers, ffn, heads, kv_heads, dim;
  bool qk_norm, bias;  // bias: of qkv and o
};

/// One run: a row a request, each with a number of keys, its own included.
struct Case {
  Shape shape;
  std::vector<int> lens;
  int page;
};

template <typename T>
struct Layer {
  std::vector<T> input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias, post_norm, gate_up, down, k, v;
};

template <typename T>
struct Model {
  Shape shape;
  std::vector<T> embedding, final_norm, head;
  std::vector<float> cos, sin;
  std::vector<Layer<T>> layers;
  std::vector<int64_t> ids, positions, locs, requests;
  std::vector<int32_t> lens, table;
  int table_stride = 0;
  int pool = 0;

  /// Standard deviation `spread`; a weight's is 1 / sqrt(depth), so that nothing grows from layer to layer.
  static std::vector<T> values(std::size_t count, double spread, uint32_t seed, double mean = 0.0) {
    std::vector<T> result = ladder::random_values<T>(count, seed);
    for (T& value : result) value = Storage<T>::pack(mean + spread * Storage<T>::unpack(value));
    return result;
  }

  explicit Model(const Case& c) : shape(c.shape) {
    const Shape& s = shape;
    const int rows = static_cast<int>(c.lens.size());
    uint32_t seed = 1;
    const auto weight = [&](int features, int depth) {
      return values(static_cast<std::size_t>(features) * depth, 1.0 / std::sqrt(depth), seed++);
    };
    const int width = (s.heads + 2 * s.kv_heads) * s.dim;
    embedding = values(static_cast<std::size_t>(s.vocab) * s.hidden, 1.0, seed++);
    head = weight(s.vocab, s.hidden);
    final_norm = values(s.hidden, 0.2, seed++, 1.0);
    const int longest = *std::max_element(c.lens.begin(), c.lens.end());
    for (int position = 0; position <= longest; ++position) {
      for (int i = 0; i < s.dim / 2; ++i) {
        const double angle = position * std::pow(10000.0, -2.0 * i / s.dim);
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    place(c, longest);
    for (int l = 0; l < s.layers; ++l) {
      Layer<T> layer;
      layer.input_norm = values(s.hidden, 0.2, seed++, 1.0);
      layer.post_norm = values(s.hidden, 0.2, seed++, 1.0);
      layer.qkv = weight(width, s.hidden);
      layer.o = weight(s.hidden, s.heads * s.dim);
      layer.gate_up = weight(2 * s.ffn, s.hidden);
      layer.down = weight(s.hidden, s.ffn);
      if (s.bias) layer.qkv_bias = values(width, 0.5, seed++);
      if (s.bias) layer.o_bias = values(s.hidden, 0.5, seed++);
      if (s.qk_norm) layer.q_norm = values(s.dim, 0.2, seed++, 1.0);
      if (s.qk_norm) layer.k_norm = values(s.dim, 0.2, seed++, 1.0);
      layer.k = ladder::poison<T>(static_cast<std::size_t>(pool) * s.kv_heads * s.dim);
      layer.v = layer.k;
      for (int row = 0; row < rows; ++row) {
        for (int position = 0; position + 1 < lens[row]; ++position) {
          const std::size_t slot = table[requests[row] * table_stride + position];
          const std::vector<T> k = values(s.kv_heads * s.dim, 1.0, seed++), v = values(s.kv_heads * s.dim, 1.0, seed++);
          std::copy(k.begin(), k.end(), layer.k.begin() + slot * s.kv_heads * s.dim);
          std::copy(v.begin(), v.end(), layer.v.begin() + slot * s.kv_heads * s.dim);
        }
      }
      layers.push_back(std::move(layer));
    }
  }

 private:
  /// Slots: pages in disorder, the first one never given away; the tails of the table lead to it, and it is not a number.
  void place(const Case& c, int longest) {
    const int rows = static_cast<int>(c.lens.size());
    std::mt19937 generator(7);
    int pages = 1;
    for (const int len : c.lens) pages += (len + c.page - 1) / c.page;
    std::vector<int> order(pages - 1);
    std::iota(order.begin(), order.end(), 1);
    std::shuffle(order.begin(), order.end(), generator);
    pool = pages * c.page;
    table_stride = longest + 5;
    table.assign((rows + 2) * table_stride, 0);
    std::size_t next = 0;
    for (int row = 0; row < rows; ++row) {
      requests.push_back(rows + 1 - row);
      lens.push_back(c.lens[row]);
      positions.push_back(c.lens[row] - 1);
      for (int position = 0; position < c.lens[row]; ++position) {
        const int page = order[next + position / c.page];
        table[requests[row] * table_stride + position] = page * c.page + position % c.page;
      }
      next += (c.lens[row] + c.page - 1) / c.page;
      locs.push_back(table[requests[row] * table_stride + c.lens[row] - 1]);
      ids.push_back(static_cast<int64_t>(generator() % shape.vocab));
    }
  }
};

/// What a step gives: logits, and the new keys and values of each layer, [rows][kv_heads * dim].
struct Result {
  std::vector<double> logits;
  std::vector<std::vector<double>> k, v;
};

/// In double precision; rounds: to T wherever the ops store something.
template <typename T>
Result reference(const Model<T>& m, bool rounds) {
  const Shape& s = m.shape;
  const int rows = static_cast<int>(m.ids.size());
  const auto store = [&](double value) { return rounds ? Storage<T>::unpack(Storage<T>::pack(value)) : value; };
  const auto product = [&](const std::vector<double>& x, const std::vector<T>& weight, std::size_t first, int features,
                           const std::vector<T>& bias) {
    std::vector<double> out(features);
    for (int f = 0; f < features; ++f) {
      const T* w = weight.data() + (first + f) * x.size();
      double sum = bias.empty() ? 0.0 : Storage<T>::unpack(bias[f]);
      for (std::size_t k = 0; k < x.size(); ++k) sum += x[k] * Storage<T>::unpack(w[k]);
      out[f] = sum;
    }
    return out;
  };
  const auto norm = [&](const double* x, std::size_t count, const std::vector<T>& weight) {
    double squares = 0.0;
    for (std::size_t i = 0; i < count; ++i) squares += x[i] * x[i];
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(count) + 1e-5);
    std::vector<double> out(count);
    for (std::size_t i = 0; i < count; ++i) out[i] = store(store(x[i] * scale) * Storage<T>::unpack(weight[i]));
    return out;
  };
  Result result;
  result.k.resize(s.layers);
  result.v.resize(s.layers);
  const std::vector<T> none;
  for (int row = 0; row < rows; ++row) {
    std::vector<double> x(s.hidden);
    for (int i = 0; i < s.hidden; ++i) x[i] = Storage<T>::unpack(m.embedding[m.ids[row] * s.hidden + i]);
    for (int l = 0; l < s.layers; ++l) {
      const Layer<T>& layer = m.layers[l];
      const int heads = s.heads + 2 * s.kv_heads;
      std::vector<double> qkv = product(norm(x.data(), x.size(), layer.input_norm), layer.qkv, 0, heads * s.dim, layer.qkv_bias);
      for (double& value : qkv) value = store(value);
      for (int head = 0; head < s.heads + s.kv_heads; ++head) {
        double* own = qkv.data() + head * s.dim;
        if (s.qk_norm) {
          const std::vector<double> normed = norm(own, s.dim, head < s.heads ? layer.q_norm : layer.k_norm);
          std::copy(normed.begin(), normed.end(), own);
        }
        const std::size_t angle = m.positions[row] * (s.dim / 2);
        for (int i = 0; i < s.dim / 2; ++i) {
          const double a = own[i], b = own[i + s.dim / 2], c = m.cos[angle + i], sn = m.sin[angle + i];
          own[i] = store(a * c - b * sn);
          own[i + s.dim / 2] = store(b * c + a * sn);
        }
      }
      const double* new_k = qkv.data() + s.heads * s.dim;
      const double* new_v = new_k + s.kv_heads * s.dim;
      result.k[l].insert(result.k[l].end(), new_k, new_v);
      result.v[l].insert(result.v[l].end(), new_v, new_v + s.kv_heads * s.dim);
      std::vector<double> attended(s.heads * s.dim);
      for (int head = 0; head < s.heads; ++head) {
        const int kv = head / (s.heads / s.kv_heads);
        const auto at = [&](const std::vector<T>& pool, const double* newest, int position, int d) {
          if (position + 1 == m.lens[row]) return newest[kv * s.dim + d];
          const std::size_t slot = m.table[m.requests[row] * m.table_stride + position];
          return Storage<T>::unpack(pool[(slot * s.kv_heads + kv) * s.dim + d]);
        };
        std::vector<double> score(m.lens[row]);
        for (int position = 0; position < m.lens[row]; ++position) {
          for (int d = 0; d < s.dim; ++d) score[position] += qkv[head * s.dim + d] * at(layer.k, new_k, position, d);
          score[position] /= std::sqrt(s.dim);
        }
        const double top = *std::max_element(score.begin(), score.end());
        double total = 0.0;
        for (double& value : score) total += value = std::exp(value - top);
        for (int d = 0; d < s.dim; ++d) {
          double sum = 0.0;
          for (int position = 0; position < m.lens[row]; ++position) sum += score[position] * at(layer.v, new_v, position, d);
          attended[head * s.dim + d] = store(sum / total);
        }
      }
      const auto add = [&](const std::vector<double>& out) {
        for (int i = 0; i < s.hidden; ++i) x[i] = store(x[i] + store(out[i]));
      };
      add(product(attended, layer.o, 0, s.hidden, layer.o_bias));
      const std::vector<double> h = norm(x.data(), x.size(), layer.post_norm);
      const std::vector<double> gate = product(h, layer.gate_up, 0, s.ffn, none);
      std::vector<double> act = product(h, layer.gate_up, s.ffn, s.ffn, none);
      for (int i = 0; i < s.ffn; ++i) act[i] = store(gate[i] / (1.0 + std::exp(-gate[i])) * act[i]);
      add(product(act, layer.down, 0, s.hidden, none));
    }
    for (const double value : product(norm(x.data(), x.size(), m.final_norm), m.head, 0, s.vocab, none)) {
      result.logits.push_back(store(value));
    }
  }
  return result;
}

}  // namespace step
