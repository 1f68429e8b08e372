// LoRA's two halves against a double-precision reference; rows alone bit by bit against rows in a batch; bandwidth.

#include "astrai/lora/expand.cuh"
#include "astrai/lora/shrink.cuh"
#include "ladder.h"

namespace {

using astrai::LoraExpandParams;
using astrai::LoraShrinkParams;
using ladder::Storage;

struct Case {
  int rows;
  int depth;
  int features;
  int rank;
  int adapters;
  int gap;  // poisoned elements after each row of x, base and out
};

template <typename T>
std::string name_of(const Case& c, const char* what) {
  char text[128];
  std::snprintf(text, sizeof text, "%s %s %d rows %d -> %d -> %d, %d adapters, gap %d", what, Storage<T>::kName, c.rows,
                c.depth, c.rank, c.features, c.adapters, c.gap);
  return text;
}

template <typename T>
std::vector<T> with_gaps(std::vector<T> values, int64_t used, int64_t stride) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (static_cast<int64_t>(i) % stride >= used) values[i] = Storage<T>::pack(NAN);
  }
  return values;
}

/// Everything that one case needs, on the host and on the device.
template <typename T>
struct Operands {
  Case c;
  int64_t x_stride;
  int64_t out_stride;
  std::vector<T> x, a, b, base;
  std::vector<float> scaling;
  std::vector<int64_t> ids;  // all adapters, none (-3) and one that does not exist
  ladder::Buffer<T> d_x, d_a, d_b, d_base, d_out;
  ladder::Buffer<float> d_scaling, d_hidden;
  ladder::Buffer<int64_t> d_ids;

  explicit Operands(const Case& shape)
      : c(shape),
        x_stride(shape.depth + shape.gap / 8 * 8),
        out_stride(shape.features + shape.gap),
        x(with_gaps(ladder::random_values<T>(c.rows * x_stride, 1), c.depth, x_stride)),
        a(ladder::random_values<T>(static_cast<std::size_t>(c.adapters) * c.rank * c.depth, 2)),
        b(ladder::random_values<T>(static_cast<std::size_t>(c.adapters) * c.features * c.rank, 3)),
        base(with_gaps(ladder::random_values<T>(c.rows * out_stride, 4), c.features, out_stride)),
        scaling(ladder::random_values<float>(c.adapters, 5)),
        ids(mixed_ids(shape)),
        d_x(x),
        d_a(a),
        d_b(b),
        d_base(base),
        d_out(ladder::poison<T>(c.rows * out_stride)),
        d_scaling(scaling),
        d_hidden(ladder::poison<float>(static_cast<std::size_t>(c.rows) * c.rank)),
        d_ids(ids) {}

  static std::vector<int64_t> mixed_ids(const Case& c) {
    std::mt19937 generator(6);
    std::vector<int64_t> ids(c.rows);
    for (int64_t& id : ids) {
      id = static_cast<int64_t>(generator() % (c.adapters + 2)) - 1;
      if (id < 0) id = -3;
    }
    return ids;
  }

  LoraShrinkParams shrink(int first, int rows) const {
    LoraShrinkParams p = {};
    p.x = d_x.get() + first * x_stride;
    p.x_stride = x_stride;
    p.a = d_a.get();
    p.a_stride = static_cast<int64_t>(c.rank) * c.depth;
    p.a_row_stride = c.depth;
    p.adapters = {d_ids.get() + first, 1, true, c.adapters};
    p.out = d_hidden.get() + first * c.rank;
    p.out_stride = c.rank;
    p.rows = rows;
    p.rank = c.rank;
    p.depth = c.depth;
    return p;
  }

  LoraExpandParams expand(int first, int rows) const {
    LoraExpandParams p = {};
    p.base = d_base.get() + first * out_stride;
    p.base_stride = out_stride;
    p.hidden = d_hidden.get() + first * c.rank;
    p.hidden_stride = c.rank;
    p.b = d_b.get();
    p.b_stride = static_cast<int64_t>(c.features) * c.rank;
    p.b_row_stride = c.rank;
    p.adapters = {d_ids.get() + first, 1, true, c.adapters};
    p.scaling = d_scaling.get();
    p.out = d_out.get() + first * out_stride;
    p.out_stride = out_stride;
    p.rows = rows;
    p.rank = c.rank;
    p.features = c.features;
    return p;
  }

  void run(int first, int rows, cudaStream_t stream = nullptr) const {
    ladder::check(astrai::lora_shrink(shrink(first, rows), Storage<T>::kDType, stream), "lora_shrink");
    ladder::check(astrai::lora_expand(expand(first, rows), Storage<T>::kDType, stream), "lora_expand");
  }
};

/// Largest deviation in units of what rounding may cause, of both halves.
template <typename T>
double deviation(const Operands<T>& o) {
  const Case& c = o.c;
  const std::vector<float> hidden = o.d_hidden.read();
  const std::vector<T> out = o.d_out.read();
  double worst = 0.0;
  const auto note = [&](double got, double expected, double allowed, bool exists) {
    if (!exists) {
      if (got == got) worst = INFINITY;
      return;
    }
    const double error = std::fabs(got - expected) / allowed;
    if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
  };
  for (int row = 0; row < c.rows; ++row) {
    const int64_t id = o.ids[row];
    const bool exists = id < c.adapters;
    for (int r = 0; r < c.rank; ++r) {
      double sum = 0.0, magnitude = 0.0;
      for (int k = 0; exists && id >= 0 && k < c.depth; ++k) {
        const double product = Storage<T>::unpack(o.x[row * o.x_stride + k]) *
                               Storage<T>::unpack(o.a[(id * c.rank + r) * static_cast<int64_t>(c.depth) + k]);
        sum += product;
        magnitude += std::fabs(product);
      }
      note(hidden[row * c.rank + r], sum, 1e-6 * magnitude + 1e-30, exists);
    }
    for (int f = 0; f < o.out_stride; ++f) {
      double expected = Storage<T>::unpack(o.base[row * o.out_stride + f]);
      double magnitude = std::fabs(expected);
      for (int r = 0; f < c.features && exists && id >= 0 && r < c.rank; ++r) {
        const double product = static_cast<double>(o.scaling[id]) * hidden[row * c.rank + r] *
                               Storage<T>::unpack(o.b[(id * c.features + f) * static_cast<int64_t>(c.rank) + r]);
        expected += product;
        magnitude += std::fabs(product);
      }
      const double allowed = std::fabs(expected) * Storage<T>::kEpsilon * 1.01 + 1e-6 * magnitude + 4e-8;
      note(Storage<T>::unpack(out[row * o.out_stride + f]), expected, allowed, exists && f < c.features);
    }
  }
  return worst;
}

/// 0 if each row alone, and each half of the batch, gives the bits that the whole batch gives; infinity otherwise.
template <typename T>
double same_bits(const Operands<T>& o) {
  const std::vector<float> hidden = o.d_hidden.read();
  const std::vector<T> out = o.d_out.read();
  const auto differs = [&] {
    const std::vector<float> hidden_now = o.d_hidden.read();
    const std::vector<T> out_now = o.d_out.read();
    return std::memcmp(hidden.data(), hidden_now.data(), hidden.size() * sizeof(float)) != 0 ||
           std::memcmp(out.data(), out_now.data(), out.size() * sizeof(T)) != 0;
  };
  const auto clear = [&] {
    const std::vector<float> no_hidden = ladder::poison<float>(hidden.size());
    const std::vector<T> nothing = ladder::poison<T>(out.size());
    ladder::check(cudaMemcpy(o.d_hidden.get(), no_hidden.data(), hidden.size() * sizeof(float), cudaMemcpyHostToDevice),
                  "cudaMemcpy");
    ladder::check(cudaMemcpy(o.d_out.get(), nothing.data(), out.size() * sizeof(T), cudaMemcpyHostToDevice),
                  "cudaMemcpy");
  };
  for (const int part : {1, (o.c.rows + 1) / 2}) {
    clear();
    for (int first = 0; first < o.c.rows; first += part) o.run(first, std::min(part, o.c.rows - first));
    if (differs()) return INFINITY;
  }
  return 0.0;
}

template <typename T>
void verify_all(ladder::Report& report, bool quick) {
  for (const Case& c : {Case{1, 8, 1, 8, 1, 0}, Case{7, 24, 7, 16, 3, 3}, Case{9, 264, 300, 24, 4, 8},
                        Case{33, 520, 258, 64, 5, 4}, Case{128, 1536, 1000, 16, 2, 1}, Case{5, 64, 66, 32, 0, 2},
                        Case{2500, 24, 18, 56, 3, 0}, Case{3000, 1096, 130, 64, 3, 0}}) {
    if (quick && c.depth * c.rows > 1 << 20) continue;
    const Operands<T> o(c);
    o.run(0, c.rows);
    report.row(name_of<T>(c, "lora"), deviation(o));
    if (!quick || c.rows <= 64) report.row(name_of<T>(c, "lora same bits"), same_bits(o));
  }
}

void measure(ladder::Report& report) {
  using T = astrai::bfloat16;
  for (const int rows : {1, 32, 128, 2048, 8192}) {
    for (const int rank : {16, 64}) {
      const Operands<T> o({rows, 2048, 2048, rank, 4, 0});
      const double adapters = 2.0 * std::min(rows, 4) * rank * 2048;
      const double shrink = ladder::median_microseconds(1, [&](int, cudaStream_t stream) {
        return astrai::lora_shrink(o.shrink(0, rows), Storage<T>::kDType, stream);
      });
      report.bandwidth(name_of<T>(o.c, "lora shrink"), shrink, 2.0 * rows * 2048 + adapters + 4.0 * rows * rank);
      const double expand = ladder::median_microseconds(1, [&](int, cudaStream_t stream) {
        return astrai::lora_expand(o.expand(0, rows), Storage<T>::kDType, stream);
      });
      report.bandwidth(name_of<T>(o.c, "lora expand"), expand, 4.0 * rows * 2048 + adapters + 4.0 * rows * rank);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  ladder::Report report;
  const bool quick = ladder::is_quick(argc, argv);
  verify_all<astrai::float16>(report, quick);
  verify_all<astrai::bfloat16>(report, quick);
  if (!quick) measure(report);
  return report.finish();
}
