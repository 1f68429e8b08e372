// gated_activation and embedding against a double-precision reference; bandwidth over buffers that L2 cannot hold.

#include "astrai/fused/embedding.cuh"
#include "astrai/fused/gated.cuh"

#include "ladder.h"

namespace {

using ladder::Storage;
using astrai::Activation;

struct Case {
  int64_t rows;
  int width;
  int64_t gap;  // poisoned elements after each row
};

double activate(Activation kind, double x) {
  switch (kind) {
    case Activation::kSilu:
      return x / (1.0 + std::exp(-x));
    case Activation::kGeluTanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
  }
  return NAN;
}

template <typename T>
std::string name_of(const char* op, const Case& c) {
  char text[128];
  std::snprintf(text, sizeof text, "%s %s rows %lld width %d gap %lld", op, Storage<T>::kName,
                static_cast<long long>(c.rows), c.width, static_cast<long long>(c.gap));
  return text;
}

const char* name_of(Activation kind) {
  return kind == Activation::kSilu ? "silu" : kind == Activation::kGelu ? "gelu" : "gelu_tanh";
}

template <typename T>
astrai::GatedParams gated_parameters(const Case& c, const T* x, T* out) {
  return {{x, 2 * c.width + c.gap, 0}, {out, c.width + c.gap, 0}, c.rows, 1, c.width};
}

template <typename T>
double verify_gated(const Case& c, Activation kind) {
  const int64_t in_stride = 2 * c.width + c.gap;
  const int64_t out_stride = c.width + c.gap;
  std::vector<T> x = ladder::random_values<T>(c.rows * in_stride, 1);
  for (int64_t i = 0; i < c.rows * in_stride; ++i) {
    const int64_t d = i % in_stride;
    if (d >= 2 * c.width) x[i] = Storage<T>::pack(NAN);
    if (d < c.width && i % 5 == 0) x[i] = Storage<T>::pack(20.0 * Storage<T>::unpack(x[i]));  // far tails too
  }
  const ladder::Buffer<T> d_x(x), d_out(ladder::poison<T>(c.rows * out_stride));
  ladder::check(astrai::gated_activation(gated_parameters(c, d_x.get(), d_out.get()), Storage<T>::kDType, kind, nullptr),
                "gated_activation");
  ladder::check(cudaDeviceSynchronize(), "gated_activation");
  const std::vector<T> out = d_out.read();
  double worst = 0.0;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t d = 0; d < out_stride; ++d) {
      const double got = Storage<T>::unpack(out[row * out_stride + d]);
      if (d >= c.width) {
        if (got == got) worst = INFINITY;  // the gap was written
        continue;
      }
      const double gate = activate(kind, Storage<T>::unpack(x[row * in_stride + d]));
      const double value = Storage<T>::unpack(x[row * in_stride + c.width + d]);
      // Two roundings, each of half a unit; fp32 noise in between. exp and erf cancel to about 1e-7 of the gate's input.
      const double noise = std::fabs(value) * (std::fabs(gate) * 4e-7 + 4e-7 + 4e-8);
      const double allowed = std::fabs(gate * value) * Storage<T>::kEpsilon * 2.02 + noise + 4e-8;
      const double error = std::fabs(got - gate * value) / allowed;
      if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
    }
  }
  return worst;
}

template <typename T>
double verify_embedding(const Case& c) {
  const int64_t vocab = 37;
  const int64_t stride = c.width + c.gap;
  const std::vector<T> table = ladder::random_values<T>(vocab * stride, 1);
  std::vector<int64_t> ids(c.rows);
  for (int64_t i = 0; i < c.rows; ++i) ids[i] = i * 11 % vocab;
  if (c.rows > 2) {
    ids[1] = vocab;
    ids[2] = -1;
  }
  const ladder::Buffer<T> d_table(table), d_out(ladder::poison<T>(c.rows * stride));
  const ladder::Buffer<int64_t> d_ids(ids);
  const astrai::EmbeddingParams params = {d_ids.get(), 1,      d_table.get(), stride,  d_out.get(),
                                          stride,      c.rows, vocab,         c.width, true};
  ladder::check(astrai::embedding(params, Storage<T>::kDType, nullptr), "embedding");
  ladder::check(cudaDeviceSynchronize(), "embedding");
  const std::vector<T> out = d_out.read();
  for (int64_t i = 0; i < c.rows * stride; ++i) {
    const int64_t id = ids[i / stride];
    const double got = Storage<T>::unpack(out[i]);
    if (i % stride >= c.width || id < 0 || id >= vocab) {
      if (got == got) return INFINITY;
    } else if (!(got == Storage<T>::unpack(table[id * stride + i % stride]))) {
      return INFINITY;
    }
  }
  return 0.0;
}

/// The halves of the norm behind: half a unit in the last place for a product, 2^-20 for a sum of squares.
double verify_begun_norm(const Case& c) {
  using T = astrai::bfloat16;
  const int64_t vocab = 37;
  const std::vector<T> table = ladder::random_values<T>(vocab * c.width, 1), norm = ladder::random_values<T>(c.width, 2);
  std::vector<int64_t> ids(c.rows);
  for (int64_t i = 0; i < c.rows; ++i) ids[i] = i * 11 % vocab;
  const ladder::Buffer<T> d_table(table), d_norm(norm), d_out(ladder::poison<T>(c.rows * c.width)),
      d_weighed(ladder::poison<T>(c.rows * c.width));
  const ladder::Buffer<float> d_squares(c.rows * (c.width / astrai::kHalfWidth));
  const ladder::Buffer<int64_t> d_ids(ids);
  const astrai::EmbeddingParams params = {d_ids.get(), 1,      d_table.get(), c.width,      d_out.get(),
                                          c.width,     c.rows, vocab,         c.width,      true,
                                          d_norm.get(), d_weighed.get(),      d_squares.get()};
  ladder::check(astrai::embedding(params, Storage<T>::kDType, nullptr), "embedding");
  ladder::check(cudaDeviceSynchronize(), "embedding");
  const std::vector<T> weighed = d_weighed.read();
  const std::vector<float> squares = d_squares.read();
  double worst = 0.0;
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int begin = 0; begin < c.width; begin += astrai::kHalfWidth) {
      double sum = 0.0;
      for (int f = begin; f < begin + astrai::kHalfWidth; ++f) {
        const double x = Storage<T>::unpack(table[ids[i] * c.width + f]);
        const double exact = x * Storage<T>::unpack(norm[f]);
        worst = std::max(worst, std::fabs(Storage<T>::unpack(weighed[i * c.width + f]) - exact) / (std::fabs(exact) * 0x1p-8));
        sum += x * x;
      }
      const double got = squares[i * (c.width / astrai::kHalfWidth) + begin / astrai::kHalfWidth];
      worst = std::max(worst, std::fabs(got - sum) / (sum * 0x1p-20));
    }
  }
  return worst;
}

template <typename T>
void measure_gated(ladder::Report& report, const Case& c, Activation kind) {
  const std::size_t count = static_cast<std::size_t>(c.rows) * c.width;
  const double bytes = 3.0 * static_cast<double>(count) * sizeof(T);
  const int buffers = ladder::buffer_sets(bytes);
  const ladder::Buffer<T> x(2 * count * buffers), out(count * buffers);
  ladder::check(cudaMemset(x.get(), 0, 2 * count * buffers * sizeof(T)), "cudaMemset");
  const double microseconds = ladder::median_microseconds(buffers, [&](int i, cudaStream_t stream) {
    return astrai::gated_activation(gated_parameters(c, x.get() + 2 * count * i, out.get() + count * i),
                                    Storage<T>::kDType, kind, stream);
  });
  report.bandwidth(name_of<T>(name_of(kind), c), microseconds, bytes);
}

template <typename T>
void measure_embedding(ladder::Report& report, const Case& c) {
  const int64_t vocab = 150000;
  const std::size_t count = static_cast<std::size_t>(c.rows) * c.width;
  const double bytes = 2.0 * static_cast<double>(count) * sizeof(T) + 8.0 * static_cast<double>(c.rows);
  const int buffers = ladder::buffer_sets(bytes);
  const ladder::Buffer<T> table(vocab * c.width), out(count * buffers);
  ladder::check(cudaMemset(table.get(), 0, vocab * c.width * sizeof(T)), "cudaMemset");
  std::vector<int64_t> ids(c.rows * buffers);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 7919 % vocab);
  const ladder::Buffer<int64_t> d_ids(ids);
  const double microseconds = ladder::median_microseconds(buffers, [&](int i, cudaStream_t stream) {
    const astrai::EmbeddingParams params = {d_ids.get() + c.rows * i, 1,      table.get(), c.width, out.get() + count * i,
                                            c.width,                  c.rows, vocab,       c.width, true};
    return astrai::embedding(params, Storage<T>::kDType, stream);
  });
  report.bandwidth(name_of<T>("embedding", c), microseconds, bytes);
}

template <typename T>
void verify_all(ladder::Report& report) {
  for (const Case& c : {Case{1, 1, 0}, Case{3, 7, 2}, Case{5, 64, 8}, Case{33, 100, 4}, Case{9, 1536, 0},
                        Case{3, 6912, 0}, Case{2, 2048, 1}}) {
    for (const Activation kind : {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu}) {
      report.row(name_of<T>(name_of(kind), c), verify_gated<T>(c, kind));
    }
    report.row(name_of<T>("embedding", c), verify_embedding<T>(c));
  }
}

}  // namespace

int main(int argc, char** argv) {
  ladder::Report report;
  verify_all<float>(report);
  verify_all<astrai::float16>(report);
  verify_all<astrai::bfloat16>(report);
  for (const Case& c : {Case{1, 64, 0}, Case{9, 1536, 0}, Case{700, 1024, 0}}) {
    report.row(name_of<astrai::bfloat16>("embedding before norm", c), verify_begun_norm(c));
  }
  if (!ladder::is_quick(argc, argv)) {
    using B = astrai::bfloat16;
    report.row("silu, many rows", verify_gated<B>({3000, 2048, 0}, Activation::kSilu));
    report.row("embedding, many rows", verify_embedding<B>({3000, 2048, 0}));
    for (const Case& c : {Case{1, 6912, 0}, Case{128, 6912, 0}, Case{128, 8192, 0}, Case{8192, 6912, 0},
                          Case{8192, 8192, 0}, Case{16384, 3072, 0}}) {
      measure_gated<B>(report, c, Activation::kSilu);
    }
    measure_gated<B>(report, {8192, 8192, 0}, Activation::kGeluTanh);
    measure_gated<B>(report, {8192, 8192, 0}, Activation::kGelu);
    for (const Case& c : {Case{1, 2048, 0}, Case{128, 2048, 0}, Case{16384, 2048, 0}}) measure_embedding<B>(report, c);
  }
  return report.finish();
}
