// Time of linear's kernels on the projections of three models, in a graph of many launches.
#pragma once

#include "linear_variants.h"

namespace ladder {

enum class End { kNothing, kResidual, kSwiglu };

struct Projection {
  const char* name;
  int features;
  int depth;
  End end;
};

constexpr Projection kProjections[] = {
    {"preset qkv", 2048, 1536, End::kNothing},       {"preset o", 1536, 1536, End::kResidual},
    {"preset gate_up", 6912, 1536, End::kSwiglu}, {"preset down", 1536, 6912, End::kResidual},
    {"preset lm_head", 100000, 1536, End::kNothing}, {"llama1b qkv", 3072, 2048, End::kNothing},
    {"llama1b o", 2048, 2048, End::kResidual},    {"llama1b gate_up", 8192, 2048, End::kSwiglu},
    {"llama1b down", 2048, 8192, End::kResidual}, {"llama1b lm_head", 128256, 2048, End::kNothing},
    {"qwen06 qkv", 4096, 1024, End::kNothing},       {"qwen06 o", 1024, 2048, End::kResidual},
    {"qwen06 gate_up", 3072, 1024, End::kSwiglu}, {"qwen06 down", 1024, 3072, End::kResidual},
    {"qwen06 lm_head", 151936, 1024, End::kNothing}};

/// Weights, larger than any of the projections and several times L2, and operands of 128 rows.
struct Pool {
  static constexpr std::size_t kWeights = 350u << 20;  // elements
  using T = astrai::bfloat16;
  Buffer<T> weights{kWeights}, x{128 * 8192}, out{static_cast<std::size_t>(128) * 151936};
  LinearDevice device = {};

  Pool() {
    const std::vector<T> some = random_values<T>(1u << 20, 1);
    for (std::size_t i = 0; i < kWeights; i += some.size()) {
      const std::size_t bytes = std::min(some.size(), kWeights - i) * sizeof(T);
      const T* source = i == 0 ? some.data() : weights.get();
      check(cudaMemcpy(weights.get() + i, source, bytes, cudaMemcpyDefault), "cudaMemcpy");
    }
    check(cudaMemcpy(x.get(), weights.get(), 128 * 8192 * sizeof(T), cudaMemcpyDeviceToDevice), "cudaMemcpy");
    check(cudaMemset(out.get(), 0, static_cast<std::size_t>(128) * 151936 * sizeof(T)), "cudaMemset");
    check(astrai::linear_device(&device), "linear_device");
  }
};

/// Median microseconds of a launch in a graph of many, each with weights of its own; the launches depend on each other
/// as they would in a model, through the stream.
template <typename Launch>
double graph_microseconds(int launches, Launch launch) {
  cudaStream_t stream = stream_of_the_program();
  cudaGraph_t graph;
  cudaGraphExec_t instance;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  for (int i = 0; i < launches; ++i) check(launch(i), "launch");
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&instance, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "cudaEventCreate");
  check(cudaEventCreate(&stop), "cudaEventCreate");
  std::vector<float> samples;
  for (int sample = -1; sample < 7; ++sample) {
    check(cudaEventRecord(start, stream), "cudaEventRecord");
    check(cudaGraphLaunch(instance, stream), "cudaGraphLaunch");
    check(cudaEventRecord(stop, stream), "cudaEventRecord");
    check(cudaEventSynchronize(stop), "cudaEventSynchronize");
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, start, stop), "cudaEventElapsedTime");
    if (sample >= 0) samples.push_back(milliseconds * 1e3f / static_cast<float>(launches));
  }
  check(cudaEventDestroy(start), "cudaEventDestroy");
  check(cudaEventDestroy(stop), "cudaEventDestroy");
  check(cudaGraphExecDestroy(instance), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  std::nth_element(samples.begin(), samples.begin() + 3, samples.end());
  return samples[3];
}

/// `variant` null: what the library launches. NaN: the variant does not suit.
inline double measure(const Pool& pool, const Projection& p, int rows, const Variant* variant, bool fixed_order = false) {
  LinearParams params = {};
  params.x = pool.x.get();
  params.x_stride = p.depth;
  params.weight_stride = p.depth;
  params.out = pool.out.get();
  params.out_stride = p.features;
  params.residual = p.end == End::kResidual ? pool.out.get() : nullptr;
  params.residual_stride = p.features;
  params.rows = rows;
  params.features = p.features;
  params.depth = p.depth;
  params.swiglu = p.end == End::kSwiglu;
  params.fixed_order = fixed_order;
  astrai::derive(params);
  if (variant && variant->slices > 0) {
    params.slices = variant->slices;
    params.slice_steps = ((p.depth + astrai::kLinearStep - 1) / astrai::kLinearStep + params.slices - 1) / params.slices;
  }
  if (variant && !suits(*variant, params, pool.device)) return NAN;
  const std::size_t weights = static_cast<std::size_t>(p.features) * p.depth * (params.swiglu ? 2 : 1);
  const int sets = static_cast<int>(Pool::kWeights / weights);
  const int launches = std::max(sets, static_cast<int>(8e8 / static_cast<double>(weights)));  // some 400 us
  return graph_microseconds(launches, [&](int i) {
    LinearParams own = params;
    own.weight = pool.weights.get() + weights * (i % sets);
    return variant ? variant->launch(own, pool.device)
                   : run_linear(own, astrai::DType::kBFloat16, stream_of_the_program(), fixed_order);
  });
}

inline double bytes_of(const Projection& p, int rows) {
  const double halves = p.end == End::kSwiglu ? 2.0 : 1.0;
  const double outputs = static_cast<double>(rows) * p.features * (p.end == End::kResidual ? 2.0 : 1.0);
  return 2.0 * (halves * p.features * p.depth + static_cast<double>(rows) * p.depth + outputs);
}

inline void measure_released(const Pool& pool) {
  for (const Projection& p : kProjections) {
    for (const int rows : {1, 2, 4, 8, 16, 32, 64, 128}) {
      const double microseconds = measure(pool, p, rows, nullptr);
      std::printf("%-16s %6d x %4d rows %3d  %9.2f us  %7.1f GB/s  %6.1f TFLOP/s\n", p.name, p.features, p.depth, rows,
                  microseconds, bytes_of(p, rows) / microseconds * 1e-3,
                  2e-6 * rows * p.features * p.depth * (p.end == End::kSwiglu ? 2 : 1) / microseconds);
    }
  }
}

/// Rates for more rows, of every kernel that the device can run.
inline void measure_many() {
  using T = astrai::bfloat16;
  LinearDevice device = {};
  check(astrai::linear_device(&device), "linear_device");
  for (const Projection& p : {Projection{"preset gate_up", 6912, 1536, End::kSwiglu},
                              Projection{"preset down", 1536, 6912, End::kResidual},
                              Projection{"llama1b qkv", 3072, 2048, End::kNothing},
                              Projection{"square", 8192, 8192, End::kNothing}}) {
    const std::size_t weight_rows = static_cast<std::size_t>(p.features) * (p.end == End::kSwiglu ? 2 : 1);
    for (const int rows : {512, 2048, 8192}) {
      const Buffer<T> weight(random_values<T>(weight_rows * p.depth, 1));
      const Buffer<T> x(random_values<T>(static_cast<std::size_t>(rows) * p.depth, 2));
      const Buffer<T> out(random_values<T>(static_cast<std::size_t>(rows) * p.features, 3));
      LinearParams params = {};
      params.x = x.get();
      params.x_stride = p.depth;
      params.weight = weight.get();
      params.weight_stride = p.depth;
      params.out = out.get();
      params.out_stride = p.features;
      params.residual = p.end == End::kResidual ? out.get() : nullptr;
      params.residual_stride = p.features;
      params.rows = rows;
      params.features = p.features;
      params.depth = p.depth;
      params.swiglu = p.end == End::kSwiglu;
      astrai::derive(params);
      for (const Variant& variant : {tiled<T, true>(), tiled<T, false>()}) {
        if (!suits(variant, params, device)) continue;
        const double microseconds = graph_microseconds(8, [&](int) { return variant.launch(params, device); });
        std::printf("%-16s %6d x %4d rows %4d  %-16s %9.2f us  %6.1f TFLOP/s\n", p.name, p.features, p.depth, rows,
                    variant.name.c_str(), microseconds, 2e-6 * rows * weight_rows * p.depth / microseconds);
      }
    }
  }
}

/// What a fixed order costs, in microseconds: what the library launches without and with it, linear/stream.cuh with every
/// number of blocks a tile, and the kernels that it took the place of. Then the four projections of a layer together.
inline void measure_fixed(const Pool& pool, const char* part) {
  using T = astrai::bfloat16;
  const Variant before[] = {wide<T, 4, 4, 1, 1, 6, 32>(), wide<T, 8, 4, 1, 1, 5, 64, true>(), tiled<T, true>()};
  const int rows[] = {32, 64, 128};
  double layer[3][3] = {};
  for (const Projection& p : kProjections) {
    if (std::strstr(p.name, part) == nullptr || std::strstr(p.name, "llama1b") != nullptr) continue;
    const bool is_head = std::strstr(p.name, "lm_head") != nullptr;
    for (int i = 0; i < 3; ++i) {
      const double times[] = {measure(pool, p, rows[i], nullptr), measure(pool, p, rows[i], &before[i], true),
                              measure(pool, p, rows[i], nullptr, true)};
      std::printf("%-16s rows %3d  default %6.2f  before %6.2f (%+4.0f %%)  now %6.2f (%+4.0f %%)", p.name, rows[i], times[0],
                  times[1], 100 * (times[1] / times[0] - 1), times[2], 100 * (times[2] / times[0] - 1));
      for (int j = 0; j < 3; ++j) layer[i][j] += is_head ? 0.0 : times[j];
      for (const Variant& variant : all_streamed<T>()) {
        if (!variant.in_order || rows[i] < variant.least_rows || rows[i] > variant.most_rows) continue;
        const double microseconds = measure(pool, p, rows[i], &variant, true);
        if (!std::isnan(microseconds)) std::printf(" | %s %.2f", variant.name.c_str(), microseconds);
      }
      std::printf("\n");
    }
    if (!is_head) continue;
    for (int i = 0; i < 3; ++i) {
      std::printf("%-16s rows %3d  default %6.2f  before %6.2f (%+4.0f %%)  now %6.2f (%+4.0f %%)\n", "  a layer", rows[i],
                  layer[i][0], layer[i][1], 100 * (layer[i][1] / layer[i][0] - 1), layer[i][2],
                  100 * (layer[i][2] / layer[i][0] - 1));
      layer[i][0] = layer[i][1] = layer[i][2] = 0.0;
    }
  }
}

/// Every variant that suits, in microseconds, and the fastest; a line for each number of rows. `part` of a projection's
/// name selects.
inline void tune(const Pool& pool, const char* part) {
  const std::vector<Variant> variants = to_tune();
  for (const Projection& p : kProjections) {
    if (std::strstr(p.name, part) == nullptr) continue;
    std::printf("%s, %d x %d, %d slices\n", p.name, p.features, p.depth,
                astrai::linear_slices(p.depth));
    for (const int rows : {1, 8, 16, 32, 64, 128}) {
      const double ours = measure(pool, p, rows, nullptr);
      std::printf(" %3d rows: released %.2f", rows, ours);
      double best = ours;
      std::string winner = "released";
      for (const Variant& variant : variants) {
        if (rows < variant.least_rows || rows > variant.most_rows) continue;
        const double microseconds = measure(pool, p, rows, &variant);
        if (std::isnan(microseconds)) continue;
        std::printf(" | %s %.2f", variant.name.c_str(), microseconds);
        if (microseconds < best) {
          best = microseconds;
          winner = variant.name;
        }
      }
      std::printf(" || %s %.2f, %.0f GB/s\n", winner.c_str(), best, bytes_of(p, rows) / best * 1e-3);
    }
  }
}

}  // namespace ladder
