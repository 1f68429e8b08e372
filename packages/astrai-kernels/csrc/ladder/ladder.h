// What the standalone programs share: device buffers, storage types on the host, a verdict, and bandwidth.
//
// Each program compares its kernels with a double-precision CPU reference, prints one line a case and exits with 1 if a
// case fails. `--quick` leaves out the bandwidth cases: that is the run for compute-sanitizer.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "astrai/common/types.cuh"

namespace ladder {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s (%s)\n", what, cudaGetErrorString(status), cudaGetErrorName(status));
  std::exit(1);
}

// Storage types on the host; round to nearest even.
template <typename T>
struct Storage;

template <>
struct Storage<float> {
  static constexpr const char* kName = "fp32";
  static constexpr astrai::DType kDType = astrai::DType::kFloat32;
  static constexpr double kEpsilon = 5.9604645e-8;  // half a unit in the last place of 1
  static float pack(double value) { return static_cast<float>(value); }
  static double unpack(float value) { return value; }
};

template <>
struct Storage<astrai::bfloat16> {
  static constexpr const char* kName = "bf16";
  static constexpr astrai::DType kDType = astrai::DType::kBFloat16;
  static constexpr double kEpsilon = 0.00390625;
  static astrai::bfloat16 pack(double value) {
    const float narrow = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &narrow, 4);
    if (narrow != narrow) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
  static double unpack(astrai::bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
  }
};

template <>
struct Storage<astrai::float16> {
  static constexpr const char* kName = "fp16";
  static constexpr astrai::DType kDType = astrai::DType::kFloat16;
  static constexpr double kEpsilon = 0.00048828125;
  static astrai::float16 pack(double value) {
    if (value != value) return {0x7fff};
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (magnitude == 0.0) return {sign};  // frexp gives zero the exponent of one half
    if (magnitude >= 65520.0) return {static_cast<uint16_t>(sign | 0x7c00)};
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    const int unit = std::max(exponent - 11, -24);  // exponent of the last place; -24 for subnormals
    const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -unit)));
    // A mantissa that rounds up to 2048 carries into the exponent by itself.
    const uint32_t biased = static_cast<uint32_t>(unit + 24);
    return {static_cast<uint16_t>(sign | (biased * 1024 + steps))};
  }
  static double unpack(astrai::float16 value) {
    const int exponent = (value.bits >> 10) & 31;
    const int mantissa = value.bits & 1023;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent == 31) return mantissa ? NAN : (value.bits & 0x8000 ? -INFINITY : INFINITY);
    return value.bits & 0x8000 ? -magnitude : magnitude;
  }
};

/// Device memory, freed at scope end.
template <typename T>
class Buffer {
 public:
  explicit Buffer(std::size_t count) : count_(count) { check(cudaMalloc(&data_, count * sizeof(T)), "cudaMalloc"); }
  /// `copies` of `host`, one behind the other.
  explicit Buffer(const std::vector<T>& host, int copies = 1) : Buffer(host.size() * copies) {
    const std::size_t bytes = host.size() * sizeof(T);
    check(cudaMemcpy(data_, host.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy to device");
    for (int i = 1; i < copies; ++i) {
      check(cudaMemcpy(data_ + host.size() * i, data_, bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy on the device");
    }
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* get() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> host(count_);
    check(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy to host");
    return host;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

/// Normal values. A million are drawn and then repeated: drawing takes the host longer than the GPU takes for all else.
/// The period is a prime, so that rows of a tensor differ.
template <typename T>
std::vector<T> random_values(std::size_t count, uint32_t seed) {
  constexpr std::size_t kPeriod = 1000003;
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<T> values(count);
  for (std::size_t i = 0; i < std::min(count, kPeriod); ++i) values[i] = Storage<T>::pack(normal(generator));
  for (std::size_t i = kPeriod; i < count; ++i) values[i] = values[i - kPeriod];
  return values;
}

template <typename T>
std::vector<T> poison(std::size_t count) {
  return std::vector<T>(count, Storage<T>::pack(NAN));
}

/// Counts failures and prints the table.
class Report {
 public:
  /// `error` is in units of what rounding alone may cause; NaN fails.
  void row(const std::string& name, double error) {
    const bool good = error <= 1.0;
    std::printf("%-72s error %8.3f  %s\n", name.c_str(), error, good ? "ok" : "FAILED");
    failures_ += good ? 0 : 1;
  }
  void bandwidth(const std::string& name, double microseconds, double bytes) {
    std::printf("%-72s %9.2f us  %7.1f GB/s\n", name.c_str(), microseconds, bytes / microseconds * 1e-3);
  }
  void rate(const std::string& name, double microseconds, double operations) {
    std::printf("%-72s %9.2f us  %7.1f TFLOP/s\n", name.c_str(), microseconds, operations / microseconds * 1e-6);
  }
  int finish() const {
    std::printf("%s\n", failures_ ? "FAILED" : "all cases passed");
    return failures_ ? 1 : 0;
  }

 private:
  int failures_ = 0;
};

/// Sets of buffers to rotate so that a launch finds little of its operands in L2 (60 MB on an H200). At most 500: small
/// operands stay in L2, as they do between the kernels of a decode step.
inline int buffer_sets(double bytes) { return std::min(500, std::max(2, static_cast<int>(300e6 / bytes))); }

/// Median time of one launch in microseconds, by replay of a CUDA graph; `launch(i, stream)` uses the i-th of `buffers`
/// buffer sets.
template <typename Launch>
double median_microseconds(int buffers, Launch launch) {
  constexpr int kSamples = 15;
  const int rounds = (31 + buffers) / buffers;  // at least 32 launches a graph: its own start must not count
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cudaEvent_t start;
  cudaEvent_t stop;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaEventCreate(&start), "cudaEventCreate");
  check(cudaEventCreate(&stop), "cudaEventCreate");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the buffers were filled on stream 0
  for (int i = 0; i < buffers; ++i) check(launch(i, stream), "launch");  // outside the capture: loads the kernel
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  for (int i = 0; i < rounds * buffers; ++i) check(launch(i % buffers, stream), "launch in a capture");
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  std::vector<float> samples;
  for (int sample = -2; sample < kSamples; ++sample) {
    check(cudaEventRecord(start, stream), "cudaEventRecord");
    check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    check(cudaEventRecord(stop, stream), "cudaEventRecord");
    check(cudaEventSynchronize(stop), "cudaEventSynchronize");
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, start, stop), "cudaEventElapsedTime");
    if (sample >= 0) samples.push_back(milliseconds * 1e3f / static_cast<float>(rounds * buffers));
  }
  check(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaEventDestroy(start), "cudaEventDestroy");
  check(cudaEventDestroy(stop), "cudaEventDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  std::nth_element(samples.begin(), samples.begin() + kSamples / 2, samples.end());
  return samples[kSamples / 2];
}

inline bool is_quick(int argc, char** argv) { return argc > 1 && std::strcmp(argv[1], "--quick") == 0; }

}  // namespace ladder
