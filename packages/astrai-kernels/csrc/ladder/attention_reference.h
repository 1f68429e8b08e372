// What the decode and prefill parts of the attention program share: cases, page tables, operands, the reference.
#pragma once

#include "astrai/attention/params.h"

#include <numeric>

#include "ladder.h"

namespace attention {

using ladder::Storage;

struct Case {
  const char* name;
  std::vector<int> lens;
  int n_heads, n_kv_heads, head_dim;
  int q_len = 1;
  int window = 0;
  float softcap = 0.0f;
  bool sinks = false;
  bool mask = false;
  int page = 16;      // 0: contiguous
  int fixed_len = 0;  // deterministic mode
  bool narrow = false;  // e4m3 keys and values
};

/// Slots of every position, pages in random order; the pool is a little larger than what is used.
struct Table {
  int max_len = 0;
  int slots = 0;
  std::vector<int32_t> entries;
  Table(const std::vector<int>& lens, int page, uint32_t seed) {
    max_len = std::max(1, *std::max_element(lens.begin(), lens.end()));
    const int rounded = (max_len + page - 1) / page * page;
    int pages = 1;
    for (const int len : lens) pages += (len + page - 1) / page;
    std::vector<int> order(pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    slots = pages * page;
    max_len = rounded;
    entries.assign(lens.size() * rounded, 0x3fffffff);  // what lies behind a request's last key must not be read
    int next = 0;
    for (std::size_t b = 0; b < lens.size(); ++b) {
      for (int position = 0; position < lens[b]; ++position) {
        if (position % page == 0) ++next;
        entries[b * rounded + position] = order[next - 1] * page + position % page;
      }
    }
  }
};

template <typename T>
void set_strides(astrai::AttentionParams& p, const Case& c, int max_len) {
  p.q_token_stride = p.out_token_stride = static_cast<int64_t>(c.n_heads) * c.head_dim;
  p.q_head_stride = p.out_head_stride = c.head_dim;
  p.k_slot_stride = p.v_slot_stride = static_cast<int64_t>(c.n_kv_heads) * c.head_dim;
  p.k_head_stride = p.v_head_stride = c.head_dim;
  p.k_batch_stride = p.v_batch_stride = p.k_slot_stride * max_len;
  p.n_heads = c.n_heads;
  p.n_kv_heads = c.n_kv_heads;
  p.head_dim = c.head_dim;
  p.q_len = c.q_len;
  p.window = c.window;
  p.softcap = c.softcap;
  p.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
}

/// Value of an e4m3 byte, and the nearest byte to a value of at most 448.
inline double widened(uint8_t byte) {
  const int exponent = (byte >> 3) & 15;
  const int mantissa = byte & 7;
  if ((byte & 127) == 127) return NAN;
  const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return byte & 128 ? -magnitude : magnitude;
}
inline uint8_t narrowed(double value) {
  int best = 0;
  for (int byte = 0; byte < 127; ++byte) {
    if (std::fabs(widened(byte) - std::fabs(value)) < std::fabs(widened(best) - std::fabs(value))) best = byte;
  }
  return static_cast<uint8_t>(best | (value < 0 ? 128 : 0));
}

/// A cache as e4m3 and scales: of a wide one, whose poison stays poison.
struct NarrowCache {
  std::vector<uint8_t> bytes;
  std::vector<float> scales;
  template <typename T>
  NarrowCache(const std::vector<T>& wide, int head_dim) : bytes(wide.size(), 127), scales(wide.size() / head_dim, NAN) {
    for (std::size_t r = 0; r < scales.size(); ++r) {
      double largest = 0.0;
      for (int d = 0; d < head_dim; ++d) largest = std::max(largest, std::fabs(Storage<T>::unpack(wide[r * head_dim + d])));
      if (std::isnan(Storage<T>::unpack(wide[r * head_dim]))) continue;
      scales[r] = static_cast<float>(largest / 448.0);
      for (int d = 0; d < head_dim; ++d) {
        bytes[r * head_dim + d] = narrowed(Storage<T>::unpack(wide[r * head_dim + d]) / scales[r]);
      }
    }
  }
  double at(std::size_t index, int head_dim) const { return widened(bytes[index]) * scales[index / head_dim]; }
};

/// Operands on host and device; slots that no query may see, and outputs, are poison.
template <typename T>
struct Operands {
  Case c;
  int batch;
  std::vector<int> q_lens;   // query rows of each request
  std::vector<int> q_start;  // prefix sum
  Table table;
  int row;
  std::vector<T> q, k, v;
  std::vector<float> sinks;
  std::vector<uint8_t> mask;
  ladder::Buffer<T> d_q, d_k, d_v, d_out;
  ladder::Buffer<float> d_lse, d_sinks;
  ladder::Buffer<int32_t> d_table, d_lens, d_starts;
  ladder::Buffer<uint8_t> d_mask;
  NarrowCache k8, v8;  // empty unless the case is narrow
  ladder::Buffer<uint8_t> d_k8, d_v8;
  ladder::Buffer<float> d_k_scale, d_v_scale;

  static std::vector<int> starts_of(const std::vector<int>& lens) {
    std::vector<int> starts(1, 0);
    for (const int len : lens) starts.push_back(starts.back() + len);
    return starts;
  }

  Operands(const Case& c_, const std::vector<int>& q_lens_)
      : c(c_), batch(static_cast<int>(c.lens.size())), q_lens(q_lens_), q_start(starts_of(q_lens)),
        table(c.lens, c.page ? c.page : 1, 5), row(c.n_kv_heads * c.head_dim),
        q(ladder::random_values<T>(static_cast<std::size_t>(q_start.back()) * c.n_heads * c.head_dim, 1)),
        k(ladder::poison<T>(static_cast<std::size_t>(slots()) * row)), v(k), sinks(c.n_heads),
        mask(static_cast<std::size_t>(q_start.back()) * table.max_len), d_q(q), d_k(filled(&k, 2)), d_v(filled(&v, 3)),
        d_out(ladder::poison<T>(q.size())),
        d_lse(std::vector<float>(static_cast<std::size_t>(q_start.back()) * c.n_heads, NAN)), d_sinks(filled_sinks()),
        d_table(table.entries), d_lens(std::vector<int32_t>(c.lens.begin(), c.lens.end())),
        d_starts(std::vector<int32_t>(q_start.begin(), q_start.end())), d_mask(filled_mask()),
        k8(c.narrow ? k : std::vector<T>(), c.head_dim), v8(c.narrow ? v : std::vector<T>(), c.head_dim), d_k8(k8.bytes),
        d_v8(v8.bytes), d_k_scale(k8.scales), d_v_scale(v8.scales) {}

  int slots() const { return c.page ? table.slots : batch * table.max_len; }
  int slot_of(int b, int position) const {
    return c.page ? table.entries[static_cast<std::size_t>(b) * table.max_len + position]
                  : b * table.max_len + position;
  }
  const std::vector<T>& filled(std::vector<T>* buffer, uint32_t seed) {
    const std::vector<T> fresh = ladder::random_values<T>(buffer->size(), seed);
    for (int b = 0; b < batch; ++b) {
      const int low = c.window ? std::max(0, c.lens[b] - q_lens[b] + 1 - c.window) : 0;
      for (int position = low; position < c.lens[b]; ++position) {
        const std::size_t at = static_cast<std::size_t>(slot_of(b, position)) * row;
        std::copy_n(&fresh[at], row, &(*buffer)[at]);
      }
    }
    return *buffer;
  }
  const std::vector<float>& filled_sinks() {
    for (int h = 0; h < c.n_heads; ++h) sinks[h] = 0.5f * static_cast<float>(h % 5) - 1.0f;
    return sinks;
  }
  const std::vector<uint8_t>& filled_mask() {
    std::mt19937 generator(9);
    for (uint8_t& bit : mask) bit = generator() % 4 != 0;
    return mask;
  }

  astrai::AttentionParams params() const {
    astrai::AttentionParams p = {};
    set_strides<T>(p, c, table.max_len);
    p.q = d_q.get();
    p.k = d_k.get();
    p.v = d_v.get();
    if (c.narrow) {
      p.k = d_k8.get();
      p.v = d_v8.get();
      p.k_scale = d_k_scale.get();
      p.v_scale = d_v_scale.get();
      p.k_scale_stride = p.v_scale_stride = c.n_kv_heads;
      p.k_scale_batch_stride = p.v_scale_batch_stride = static_cast<int64_t>(c.n_kv_heads) * table.max_len;
      p.rows_are_bfloat16 = Storage<T>::kDType == astrai::DType::kBFloat16;
    }
    p.out = d_out.get();
    p.lse = d_lse.get();
    p.req_to_token = c.page ? d_table.get() : nullptr;
    p.table_stride = table.max_len;
    p.sinks = c.sinks ? d_sinks.get() : nullptr;
    p.mask = c.mask ? d_mask.get() : nullptr;
    p.mask_stride = table.max_len;
    p.qo_indptr = d_starts.get();
    p.seq_lens = d_lens.get();
    p.batch = batch;
    return p;
  }

  /// Largest deviation of what the device holds from the reference, in units of what rounding alone may cause.
  double error() const {
    const std::vector<T> out = d_out.read();
    const std::vector<float> lse = d_lse.read();
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    double worst = 0.0;
#pragma omp parallel for collapse(2) reduction(max : worst)
    for (int b = 0; b < batch; ++b) {
      for (int h = 0; h < c.n_heads; ++h) {
        for (int i = 0; i < q_lens[b]; ++i) {
          const int high = c.lens[b] - q_lens[b] + i + 1;
          const int low = c.window ? std::max(0, high - c.window) : 0;
          const std::size_t token = static_cast<std::size_t>(q_start[b]) + i;
          const T* query = &q[(token * c.n_heads + h) * c.head_dim];
          std::vector<double> score;
          std::vector<int> position;
          double top = c.sinks ? sinks[h] : -INFINITY;
          for (int j = low; j < high; ++j) {
            if (c.mask && !mask[token * table.max_len + j]) continue;
            const std::size_t key = static_cast<std::size_t>(slot_of(b, j)) * row + h / (c.n_heads / c.n_kv_heads) * c.head_dim;
            double dot = 0.0;
            for (int d = 0; d < c.head_dim; ++d) {
              dot += Storage<T>::unpack(query[d]) * (c.narrow ? k8.at(key + d, c.head_dim) : Storage<T>::unpack(k[key + d]));
            }
            dot *= scale;
            if (c.softcap > 0.0f) dot = c.softcap * std::tanh(dot / c.softcap);
            score.push_back(dot);
            position.push_back(j);
            top = std::max(top, dot);
          }
          double total = c.sinks ? std::exp(sinks[h] - top) : 0.0;
          double absolute = 0.0;
          std::vector<double> expected(c.head_dim, 0.0);
          for (std::size_t n = 0; n < score.size(); ++n) {
            const double weight = std::exp(score[n] - top);
            total += weight;
            const std::size_t value =
                static_cast<std::size_t>(slot_of(b, position[n])) * row + h / (c.n_heads / c.n_kv_heads) * c.head_dim;
            for (int d = 0; d < c.head_dim; ++d) {
              expected[d] += weight * (c.narrow ? v8.at(value + d, c.head_dim) : Storage<T>::unpack(v[value + d]));
            }
          }
          for (int d = 0; d < c.head_dim; ++d) {
            if (total > 0.0) expected[d] /= total;
            absolute = std::max(absolute, std::fabs(expected[d]));
          }
          const double allowed = Storage<T>::kEpsilon * (2.0 * absolute + 1.0) + 1e-6;
          for (int d = 0; d < c.head_dim; ++d) {
            const double error =
                std::fabs(Storage<T>::unpack(out[(token * c.n_heads + h) * c.head_dim + d]) - expected[d]) / allowed;
            if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
          }
          const double expected_lse = total > 0.0 ? top + std::log(total) : -INFINITY;
          const double got = lse[token * c.n_heads + h];
          const double lse_error = expected_lse == got ? 0.0 : std::fabs(got - expected_lse) / Storage<T>::kEpsilon;
          if (!(lse_error <= worst)) worst = std::isnan(lse_error) ? INFINITY : lse_error;
        }
      }
    }
    return worst;
  }
};

}  // namespace attention
