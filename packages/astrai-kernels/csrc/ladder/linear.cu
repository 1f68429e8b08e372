// linear against a double-precision reference; every kernel and variant bit by bit against every other (the reduction
// contract); bandwidth of the projections of three models in one CUDA graph over weights that L2 cannot hold.
//
// `ladder_linear --tune [PART]` times further variants instead (queues, tiles, blocks a multiprocessor, clusters, early
// release) on the projections with PART in their name, after comparing their bits. `ladder_linear --fixed [PART]` compares
// the bits of what a fixed order takes for 17 to 128 rows with the narrow kernel's, and says what the order costs.

#include "linear_speed.h"

namespace {

using astrai::LinearDevice;
using astrai::LinearParams;
using ladder::Storage;
using ladder::Variant;

enum class Epilogue { kNone, kBias, kResidual, kBoth, kSwiglu, kNorm };
constexpr const char* kEpilogueNames[] = {"", " bias", " residual", " bias+residual", " swiglu", " norm"};

struct Case {
  int rows;
  int features;
  int depth;
  int gap;  // poisoned elements after each row of x, residual and out
};

std::string name_of(const char* type, const Case& c, const char* remark) {
  char text[128];
  std::snprintf(text, sizeof text, "linear %s %d x %d x %d gap %d%s", type, c.rows, c.features, c.depth, c.gap, remark);
  return text;
}

/// Everything that one case needs on the device.
template <typename T>
struct Operands {
  Case c;
  Epilogue epilogue;
  int64_t x_stride;
  int64_t out_stride;
  std::vector<T> x, weight, bias, residual, norm;
  ladder::Buffer<T> d_x, d_weight, d_bias, d_residual, d_norm, d_out;

  Operands(const Case& shape, Epilogue kind)
      : c(shape),
        epilogue(kind),
        x_stride(shape.depth + shape.gap / 8 * 8),
        out_stride(shape.features + shape.gap),
        x(with_gaps(ladder::random_values<T>(c.rows * x_stride, 1), c.depth, x_stride)),
        weight(scaled(ladder::random_values<T>(static_cast<std::size_t>(weight_rows()) * c.depth, 2))),
        bias(ladder::random_values<T>(c.features, 3)),
        residual(with_gaps(ladder::random_values<T>(c.rows * out_stride, 4), c.features, out_stride)),
        norm(ladder::random_values<T>(c.depth, 5)),
        d_x(x),
        d_weight(weight),
        d_bias(bias),
        d_residual(residual),
        d_norm(norm),
        d_out(ladder::poison<T>(c.rows * out_stride)) {}

  int weight_rows() const { return epilogue == Epilogue::kSwiglu ? 2 * c.features : c.features; }
  bool has_bias() const { return epilogue == Epilogue::kBias || epilogue == Epilogue::kBoth; }
  bool has_residual() const { return epilogue == Epilogue::kResidual || epilogue == Epilogue::kBoth; }

  static std::vector<T> with_gaps(std::vector<T> values, int64_t used, int64_t stride) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (static_cast<int64_t>(i) % stride >= used) values[i] = Storage<T>::pack(NAN);
    }
    return values;
  }
  std::vector<T> scaled(std::vector<T> values) const {
    for (T& value : values) value = Storage<T>::pack(Storage<T>::unpack(value) / std::sqrt(static_cast<double>(c.depth)));
    return values;
  }

  LinearParams params(int rows) const {
    LinearParams p = {};
    p.x = d_x.get();
    p.x_stride = x_stride;
    p.weight = d_weight.get();
    p.weight_stride = c.depth;
    p.bias = has_bias() ? d_bias.get() : nullptr;
    p.residual = has_residual() ? d_residual.get() : nullptr;
    p.residual_stride = out_stride;
    p.out = d_out.get();
    p.out_stride = out_stride;
    p.norm_weight = epilogue == Epilogue::kNorm ? d_norm.get() : nullptr;
    p.norm_eps = 1e-5f;
    p.rows = rows;
    p.features = c.features;
    p.depth = c.depth;
    p.swiglu = epilogue == Epilogue::kSwiglu;
    return p;
  }

  /// Run into poisoned memory and read it back.
  template <typename Launch>
  std::vector<T> run(Launch launch) const {
    const std::vector<T> nan = ladder::poison<T>(c.rows * out_stride);
    ladder::check(cudaMemcpy(d_out.get(), nan.data(), nan.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    ladder::check(launch(), "linear");
    ladder::check(cudaDeviceSynchronize(), "linear");
    return d_out.read();
  }
};

template <typename T>
double round_to(double value) {
  return Storage<T>::unpack(Storage<T>::pack(value));
}

/// Largest deviation in units of what rounding may cause: of the result, and of a sum of `depth` products in fp32.
///
/// `variant` null: of what the library launches. Negative: the variant does not suit.
template <typename T>
double verify(const Case& c, Epilogue epilogue, const Variant* variant = nullptr) {
  const Operands<T> o(c, epilogue);
  LinearDevice device = {};
  ladder::check(astrai::linear_device(&device), "linear_device");
  LinearParams params = o.params(c.rows);
  astrai::derive(params);
  if (variant && !ladder::suits(*variant, params, device)) return -1.0;
  const std::vector<T> out = o.run([&] {
    return variant ? variant->launch(params, device) : ladder::run_linear(params, Storage<T>::kDType, nullptr, false);
  });
  double worst = 0.0;
#pragma omp parallel for reduction(max : worst)
  for (int row = 0; row < c.rows; ++row) {
    std::vector<double> x(c.depth);
    double squares = 0.0;
    for (int k = 0; k < c.depth; ++k) {
      x[k] = Storage<T>::unpack(o.x[row * o.x_stride + k]);
      squares += x[k] * x[k];
    }
    double slack = 1e-6;  // of the sum of magnitudes
    if (epilogue == Epilogue::kNorm) {
      const double scale = 1.0 / std::sqrt(squares / c.depth + 1e-5);
      for (int k = 0; k < c.depth; ++k) x[k] = round_to<T>(round_to<T>(x[k] * scale) * Storage<T>::unpack(o.norm[k]));
      slack += 0.1 * Storage<T>::kEpsilon;  // a few elements are rounded the other way
    }
    for (int feature = 0; feature < o.out_stride; ++feature) {
      const double got = Storage<T>::unpack(out[row * o.out_stride + feature]);
      if (feature >= c.features) {
        if (got == got) worst = INFINITY;  // the gap was written
        continue;
      }
      double sums[2] = {}, magnitudes[2] = {};
      for (int half = 0; half < (epilogue == Epilogue::kSwiglu ? 2 : 1); ++half) {
        const T* weight = o.weight.data() + (static_cast<std::size_t>(half) * c.features + feature) * c.depth;
        for (int k = 0; k < c.depth; ++k) {
          const double product = x[k] * Storage<T>::unpack(weight[k]);
          sums[half] += product;
          magnitudes[half] += std::fabs(product);
        }
      }
      double expected = sums[0];
      double allowed = magnitudes[0] * slack;
      if (epilogue == Epilogue::kSwiglu) {
        const double gate = sums[0] / (1.0 + std::exp(-sums[0]));
        expected = gate * sums[1];
        allowed = (magnitudes[0] * std::fabs(sums[1]) + magnitudes[1] * std::fabs(gate)) * 2e-6;
      }
      if (o.has_bias()) expected += Storage<T>::unpack(o.bias[feature]);
      allowed += std::fabs(expected) * Storage<T>::kEpsilon * 1.01 + 4e-8;
      if (o.has_residual()) {
        expected += Storage<T>::unpack(o.residual[row * o.out_stride + feature]);
        allowed += std::fabs(expected) * Storage<T>::kEpsilon * 1.01;
      }
      const double error = std::fabs(got - expected) / allowed;
      if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
    }
  }
  return worst;
}

constexpr int kNarrowAtOnce = 8;  // rows that the narrow kernel takes whatever the weight
const std::vector<int> kEveryCount = {1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 100, 127, 128, 129, 256, 300};

/// 0 if every variant gives, for every one of `counts` rows, the bits that the narrow kernel gives; infinity otherwise.
template <typename T>
double same_bits(const Case& c, Epilogue epilogue, const std::vector<Variant>& variants, const std::vector<int>& counts,
                 std::string* culprit) {
  LinearDevice device = {};
  ladder::check(astrai::linear_device(&device), "linear_device");
  const Operands<T> o(c, epilogue);
  const auto run = [&](int rows) {
    return o.run([&] { return ladder::run_linear(o.params(rows), Storage<T>::kDType, nullptr, true); });
  };
  const std::vector<T> expected = o.run([&] {
    for (int first = 0; first < c.rows; first += kNarrowAtOnce) {
      LinearParams params = o.params(std::min(kNarrowAtOnce, c.rows - first));
      params.x = o.d_x.get() + first * o.x_stride;
      params.out = o.d_out.get() + first * o.out_stride;
      if (params.residual) params.residual = o.d_residual.get() + first * o.out_stride;
      const cudaError_t status = ladder::run_linear(params, Storage<T>::kDType, nullptr, true);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  });
  const auto differs = [&](const std::vector<T>& got, int rows) {
    return std::memcmp(got.data(), expected.data(), static_cast<std::size_t>(rows) * o.out_stride * sizeof(T)) != 0;
  };
  for (const int rows : counts) {
    if (rows > c.rows) continue;
    if (differs(run(rows), rows)) {
      *culprit = std::to_string(rows) + " rows";
      return INFINITY;
    }
    for (const Variant& variant : variants) {
      LinearParams params = o.params(rows);
      params.fixed_order = true;
      astrai::derive(params);
      if (!variant.in_order || !ladder::suits(variant, params, device)) continue;
      if (differs(o.run([&] { return variant.launch(params, device); }), rows)) {
        *culprit = variant.name + ", " + std::to_string(rows) + " rows";
        return INFINITY;
      }
    }
  }
  return 0.0;
}

template <typename T>
void compare_bits(ladder::Report& report, const Case& c, Epilogue epilogue, const std::vector<Variant>& variants,
                  const std::vector<int>& counts) {
  std::string culprit;
  const double error = same_bits<T>(c, epilogue, variants, counts, &culprit);
  const std::string remark = kEpilogueNames[static_cast<int>(epilogue)] + (" same bits " + culprit);
  report.row(name_of(Storage<T>::kName, c, remark.c_str()), error);
}

/// linear/stream.cuh's fixed order and what the library launches: one to eight slices, a last one that is shorter, a last
/// step that is not full, features that fill no tile.
template <typename T>
void verify_fixed(ladder::Report& report) {
  for (const Case& c : {Case{128, 515, 136, 4}, Case{128, 260, 392, 8}, Case{128, 264, 1032, 0}, Case{128, 520, 1544, 8},
                        Case{100, 65, 2056, 1}, Case{128, 2048, 1536, 0}, Case{128, 136, 6912, 0}, Case{128, 9000, 328, 0},
                        Case{128, 20000, 200, 0}}) {
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kBoth, Epilogue::kSwiglu}) {
      compare_bits<T>(report, c, epilogue, ladder::all_streamed<T>(), {17, 32, 33, 64, 65, 100, 127, 128});
    }
  }
}

/// linear/narrow_bulk.cuh against the narrow kernel, and both against what the library launches: requests of two steps and
/// three, four slices and eight, a last one that is shorter, several tiles a block, features that fill no tile.
template <typename T>
void verify_bulk(ladder::Report& report) {
  std::vector<Variant> variants = ladder::all_bulk<T>();
  variants.push_back(ladder::narrow<T, 1, 1, 3>());
  variants.push_back(ladder::narrow<T, 1, 2, 3>());
  for (const Case& c : {Case{16, 7, 1024, 1}, Case{16, 72, 896, 8}, Case{16, 1029, 1536, 0}, Case{16, 136, 6912, 4},
                        Case{16, 9000, 1024, 0}, Case{16, 5000, 2048, 8}}) {
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kBoth, Epilogue::kSwiglu}) {
      compare_bits<T>(report, c, epilogue, variants, {1, 2, 3, 5, 8, 9, 15, 16});
    }
  }
}

template <typename T>
void verify_all(ladder::Report& report, bool quick) {
  const char* type = Storage<T>::kName;
  const Case cases[] = {{1, 1, 8, 0},       {3, 7, 24, 5},      {8, 16, 64, 0},     {5, 100, 136, 4},  {8, 300, 1544, 8},
                        {2, 1536, 1536, 0}, {9, 33, 72, 3},     {16, 129, 200, 8},  {17, 260, 640, 4}, {32, 1000, 576, 0},
                        {33, 65, 1032, 1},  {64, 515, 264, 12}, {128, 520, 1096, 8}, {100, 130, 2056, 2},
                        {129, 70, 136, 5},  {300, 260, 1096, 8}, {1100, 130, 72, 1}};
  for (const Case& c : cases) {
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kBias, Epilogue::kResidual, Epilogue::kBoth,
                                    Epilogue::kSwiglu, Epilogue::kNorm}) {
      if (epilogue == Epilogue::kNorm && c.rows > astrai::kNormRows) continue;
      report.row(name_of(type, c, kEpilogueNames[static_cast<int>(epilogue)]), verify<T>(c, epilogue));
      if (c.rows <= astrai::kNarrowRows || c.rows > astrai::kLinearFewRows || epilogue == Epilogue::kNorm) continue;
      const bool is_large = static_cast<double>(c.rows) * c.features * c.depth > 2e7;
      if (epilogue != Epilogue::kBoth && epilogue != Epilogue::kSwiglu) continue;
      for (const Variant& variant : ladder::all_streamed<T>()) {
        if (quick && is_large) continue;  // the reference takes its time
        const double error = verify<T>(c, epilogue, &variant);
        if (error < 0.0) continue;
        const std::string remark = std::string(kEpilogueNames[static_cast<int>(epilogue)]) + " " + variant.name;
        report.row(name_of(type, c, remark.c_str()), error);
      }
    }
  }
  verify_bulk<T>(report);
  verify_fixed<T>(report);
  const std::vector<Variant> variants = ladder::released<T>();
  for (const Case& c : {Case{128, 264, 1096, 0}, Case{128, 1024, 512, 8}, Case{40, 13000, 328, 4}, Case{300, 200, 584, 5},
                        Case{300, 1536, 4096, 0}, Case{300, 13000, 328, 0}}) {
    if (quick && c.features > 1024) continue;
    for (const Epilogue epilogue : {Epilogue::kResidual, Epilogue::kSwiglu}) {
      compare_bits<T>(report, c, epilogue, variants, kEveryCount);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  ladder::Report report;
  if (argc > 1 && std::strcmp(argv[1], "--tune") == 0) {
    for (const Variant& variant : ladder::to_tune()) {
      if (!variant.in_order) continue;  // other bits by intent
      for (const Case& c : {Case{variant.most_rows, 1024, 512, 0}, Case{variant.most_rows, 13000, 136, 0}}) {
        std::string culprit;
        const double error = same_bits<astrai::bfloat16>(c, Epilogue::kSwiglu, {variant}, kEveryCount, &culprit);
        report.row(name_of("bf16", c, " same bits ") + (culprit.empty() ? variant.name : culprit), error);
      }
    }
    const ladder::Pool pool;
    ladder::tune(pool, argc > 2 ? argv[2] : "");
    return report.finish();
  }
  if (argc > 1 && std::strcmp(argv[1], "--fixed") == 0) {
    verify_fixed<astrai::float16>(report);
    verify_fixed<astrai::bfloat16>(report);
    const ladder::Pool pool;
    ladder::measure_fixed(pool, argc > 2 ? argv[2] : "");
    return report.finish();
  }
  const bool quick = ladder::is_quick(argc, argv);
  verify_all<astrai::float16>(report, quick);
  verify_all<astrai::bfloat16>(report, quick);
  if (!quick) {
    const ladder::Pool pool;
    ladder::measure_released(pool);
    ladder::measure_many();
  }
  return report.finish();
}
