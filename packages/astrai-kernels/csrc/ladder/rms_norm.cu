// rms_norm and add_rms_norm against a double-precision reference; bandwidth over buffers that L2 cannot hold.

#include "astrai/fused/rms_norm.cuh"

#include "ladder.h"

namespace {

using ladder::Storage;

struct Case {
  int64_t rows;
  int hidden;
  int64_t gap;  // elements between the end of a row and the next, poisoned
};

template <typename T>
std::string name_of(const Case& c, bool with_add, const char* remark) {
  char text[128];
  std::snprintf(text, sizeof text, "%s %s rows %lld hidden %d gap %lld%s", with_add ? "add_rms_norm" : "rms_norm",
                Storage<T>::kName, static_cast<long long>(c.rows), c.hidden, static_cast<long long>(c.gap), remark);
  return text;
}

/// Rows of a case on the host, the gaps between them poisoned.
template <typename T>
std::vector<T> random_rows(const Case& c, int seed) {
  std::vector<T> rows = ladder::random_values<T>(static_cast<std::size_t>(c.rows) * (c.hidden + c.gap), seed);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (static_cast<int64_t>(i) % (c.hidden + c.gap) >= c.hidden) rows[i] = Storage<T>::pack(NAN);
  }
  return rows;
}

constexpr float kEps = 1e-6f;

/// Largest deviation of a result in units of the rounding allowed: of the normed row, of its product, and fp32 noise.
/// `residual` and `residual_out` are null without an addition, which must be exact.
template <typename T>
double deviation(const Case& c, const std::vector<T>& x, const std::vector<T>* residual, const std::vector<T>& weight,
                 const std::vector<T>& out, const std::vector<T>* residual_out) {
  const int64_t stride = c.hidden + c.gap;
  double worst = 0.0;
#pragma omp parallel for reduction(max : worst)
  for (int64_t row = 0; row < c.rows; ++row) {
    const int64_t begin = row * stride;
    std::vector<double> sum(c.hidden);
    double squares = 0.0;
    for (int i = 0; i < c.hidden; ++i) {
      sum[i] = Storage<T>::unpack(x[begin + i]);
      if (residual) {
        const float exact = static_cast<float>(sum[i]) + static_cast<float>(Storage<T>::unpack((*residual)[begin + i]));
        sum[i] = Storage<T>::unpack(Storage<T>::pack(exact));
        if (!(Storage<T>::unpack((*residual_out)[begin + i]) == sum[i])) worst = INFINITY;
      }
      squares += sum[i] * sum[i];
    }
    const double scale = 1.0 / std::sqrt(squares / c.hidden + kEps);
    for (int i = 0; i < c.hidden; ++i) {
      const double factor = Storage<T>::unpack(weight[i]);
      const double expected = sum[i] * scale * factor;
      const double allowed = std::fabs(expected) * (2.0 * Storage<T>::kEpsilon + 4e-7) + 1e-7;
      const double error = std::fabs(Storage<T>::unpack(out[begin + i]) - expected) / allowed;
      if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
    }
    for (int64_t i = c.hidden; i < stride; ++i) {
      const double beyond = Storage<T>::unpack(out[begin + i]);
      if (beyond == beyond) worst = INFINITY;  // the gap was written
    }
  }
  return worst;
}

template <typename T>
double verify(const Case& c, bool with_add, bool overlap) {
  const int64_t stride = c.hidden + c.gap;
  const std::vector<T> x = random_rows<T>(c, 1), residual = random_rows<T>(c, 2);
  const std::vector<T> weight = ladder::random_values<T>(c.hidden, 3);
  const ladder::Buffer<T> d_x(x), d_residual(residual), d_weight(weight);
  const ladder::Buffer<T> d_out(ladder::poison<T>(x.size())), d_residual_out(ladder::poison<T>(x.size()));
  const astrai::RmsNormParams params = {{d_x.get(), stride, 0},
                                        {d_residual.get(), stride, 0},
                                        {d_out.get(), stride, 0},
                                        {d_residual_out.get(), stride, 0},
                                        d_weight.get(),
                                        c.rows,
                                        1,
                                        c.hidden,
                                        kEps};
  ladder::check(astrai::rms_norm(params, Storage<T>::kDType, with_add, nullptr, overlap), "rms_norm");
  ladder::check(cudaDeviceSynchronize(), "rms_norm");
  const std::vector<T> residual_out = d_residual_out.read();
  return deviation(c, x, with_add ? &residual : nullptr, weight, d_out.read(), with_add ? &residual_out : nullptr);
}

template <typename T>
void measure(ladder::Report& report, const Case& c, bool with_add) {
  const std::size_t count = static_cast<std::size_t>(c.rows) * c.hidden;
  const double bytes = static_cast<double>(count) * sizeof(T) * (with_add ? 4 : 2);
  const int buffers = ladder::buffer_sets(bytes);
  const ladder::Buffer<T> x(count * buffers), residual(count * buffers), out(count * buffers);
  const ladder::Buffer<T> residual_out(count * buffers), weight(c.hidden);
  ladder::check(cudaMemset(x.get(), 0, count * buffers * sizeof(T)), "cudaMemset");
  ladder::check(cudaMemset(residual.get(), 0, count * buffers * sizeof(T)), "cudaMemset");
  ladder::check(cudaMemset(weight.get(), 0, c.hidden * sizeof(T)), "cudaMemset");
  const double microseconds = ladder::median_microseconds(buffers, [&](int i, cudaStream_t stream) {
    const std::size_t offset = count * i;
    const astrai::RmsNormParams params = {{x.get() + offset, c.hidden, 0},
                                          {residual.get() + offset, c.hidden, 0},
                                          {out.get() + offset, c.hidden, 0},
                                          {residual_out.get() + offset, c.hidden, 0},
                                          weight.get(),
                                          c.rows,
                                          1,
                                          c.hidden,
                                          kEps};
    return astrai::rms_norm(params, Storage<T>::kDType, with_add, stream);
  });
  report.bandwidth(name_of<T>(c, with_add, ""), microseconds, bytes);
}

template <typename T>
void verify_all(ladder::Report& report) {
  const Case cases[] = {{1, 1, 0},     {37, 7, 3},    {300, 64, 8},  {300, 100, 4},  {65, 128, 128}, {33, 256, 0}, {33, 264, 0},
                        {17, 576, 0},  {9, 1536, 24}, {9, 2048, 0},  {9, 4096, 0},   {9, 4096, 1},   {5, 8192, 0}, {3, 16384, 0},
                        {3, 16392, 8}, {2, 40000, 0}, {2, 20001, 0}, {5000, 576, 0}};
  for (const Case& c : cases) {
    for (const bool with_add : {false, true}) report.row(name_of<T>(c, with_add, ""), verify<T>(c, with_add, false));
    report.row(name_of<T>(c, true, " overlap"), verify<T>(c, true, true));
  }
}

}  // namespace

int main(int argc, char** argv) {
  ladder::Report report;
  verify_all<float>(report);
  verify_all<astrai::float16>(report);
  verify_all<astrai::bfloat16>(report);
  if (!ladder::is_quick(argc, argv)) {
    // Enough rows for the kernel that takes many.
    for (const Case& c : {Case{60001, 64, 0}, Case{30001, 128, 8}, Case{15001, 256, 0}, Case{7001, 512, 0},
                          Case{4001, 960, 0}, Case{2001, 1536, 0}, Case{2001, 2048, 0}, Case{2001, 2056, 0}, Case{2001, 4096, 8}}) {
      for (const bool with_add : {false, true}) {
        report.row(name_of<astrai::bfloat16>(c, with_add, ""), verify<astrai::bfloat16>(c, with_add, false));
      }
    }
    for (const Case& c : {Case{1, 4096, 0}, Case{32, 4096, 0}, Case{8192, 1536, 0}, Case{8192, 2048, 0},
                          Case{8192, 4096, 0}, Case{8192, 8192, 0}, Case{4096, 16384, 0}, Case{524288, 128, 0}}) {
      for (const bool with_add : {false, true}) measure<astrai::bfloat16>(report, c, with_add);
    }
  }
  return report.finish();
}
