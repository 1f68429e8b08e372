// The rotary kernel against a double-precision reference; bandwidth over buffers that L2 cannot hold.

#include "astrai/rotary/rotary.cuh"

#include "ladder.h"

namespace {

using ladder::Storage;

struct Case {
  int64_t tokens;
  int q_heads;
  int k_heads;
  int head_dim;
  int rotary_dim;
  int gap;  // poisoned elements after each head
};

constexpr int64_t kMaxPos = 4096;

template <typename T>
std::string name_of(const Case& c, bool interleaved, bool in_place) {
  char text[160];
  std::snprintf(text, sizeof text, "rotary %s %s%s tokens %lld heads %d/%d dim %d of %d gap %d", Storage<T>::kName,
                interleaved ? "interleaved" : "half-split", in_place ? " in place" : "",
                static_cast<long long>(c.tokens), c.q_heads, c.k_heads, c.rotary_dim, c.head_dim, c.gap);
  return text;
}

struct Tables {
  std::vector<float> cos;
  std::vector<float> sin;
  explicit Tables(int half) : cos(kMaxPos * half), sin(kMaxPos * half) {
    for (int64_t position = 0; position < kMaxPos; ++position) {
      for (int i = 0; i < half; ++i) {
        const double angle = position * std::pow(10000.0, -static_cast<double>(i) / half);
        cos[position * half + i] = static_cast<float>(std::cos(angle));
        sin[position * half + i] = static_cast<float>(std::sin(angle));
      }
    }
  }
};

template <typename T>
astrai::RotaryParams parameters(const Case& c, const T* in, T* out, const float* cos, const float* sin,
                                const int64_t* positions) {
  const int64_t head_stride = c.head_dim + c.gap;
  const int64_t token_stride = head_stride * (c.q_heads + c.k_heads);
  const int64_t k_offset = head_stride * c.q_heads;
  astrai::RotaryParams params = {};
  params.q = astrai::RotaryTensor{in, out, token_stride, head_stride, token_stride, head_stride, c.q_heads};
  params.k = astrai::RotaryTensor{in + k_offset, out + k_offset, token_stride, head_stride,
                                  token_stride,  head_stride,    c.k_heads};
  params.cos = cos;
  params.sin = sin;
  params.cos_stride = params.sin_stride = c.rotary_dim / 2;
  params.max_pos = kMaxPos;
  params.position_ids = positions;
  params.position_stride = 1;
  params.positions_are_64_bit = true;
  params.tokens = c.tokens;
  params.head_dim = c.head_dim;
  params.rotary_dim = c.rotary_dim;
  return params;
}

template <typename T>
double verify(const Case& c, bool interleaved, bool in_place) {
  const int half = c.rotary_dim / 2;
  const int heads = c.q_heads + c.k_heads;
  const int64_t stride = c.head_dim + c.gap;
  const std::size_t count = static_cast<std::size_t>(c.tokens) * heads * stride;
  std::vector<T> x = ladder::random_values<T>(count, 1);
  for (std::size_t i = 0; i < count; ++i) {
    if (static_cast<int64_t>(i % stride) >= c.head_dim) x[i] = Storage<T>::pack(NAN);
  }
  std::vector<int64_t> positions(c.tokens);
  for (int64_t token = 0; token < c.tokens; ++token) positions[token] = token * 977 % kMaxPos;
  if (c.tokens > 2) positions[1] = kMaxPos;  // outside the table: must come out as NaN
  const Tables tables(half);
  const ladder::Buffer<T> d_x(x), d_out(ladder::poison<T>(count));
  const ladder::Buffer<float> d_cos(tables.cos), d_sin(tables.sin);
  const ladder::Buffer<int64_t> d_positions(positions);
  const auto params =
      parameters<T>(c, d_x.get(), in_place ? d_x.get() : d_out.get(), d_cos.get(), d_sin.get(), d_positions.get());
  ladder::check(astrai::rotary(params, Storage<T>::kDType, interleaved, nullptr), "rotary");
  ladder::check(cudaDeviceSynchronize(), "rotary");
  const std::vector<T> out = in_place ? d_x.read() : d_out.read();

  double worst = 0.0;
#pragma omp parallel for reduction(max : worst)
  for (int64_t row = 0; row < c.tokens * heads; ++row) {
    const int64_t position = positions[row / heads];
    const T* source = x.data() + row * stride;
    const T* result = out.data() + row * stride;
    for (int d = 0; d < stride; ++d) {
      const double got = Storage<T>::unpack(result[d]);
      if (d >= c.head_dim || (d < c.rotary_dim && position >= kMaxPos)) {
        if (got == got) worst = INFINITY;  // the gap was written, or an angle was made up
        continue;
      }
      if (d >= c.rotary_dim) {
        if (got != Storage<T>::unpack(source[d])) worst = INFINITY;  // passes through exactly
        continue;
      }
      const int pair = interleaved ? d / 2 : d % half;
      const double a = Storage<T>::unpack(source[interleaved ? 2 * pair : pair]);
      const double b = Storage<T>::unpack(source[interleaved ? 2 * pair + 1 : pair + half]);
      const double cos = tables.cos[position * half + pair];
      const double sin = tables.sin[position * half + pair];
      const bool is_first = interleaved ? d % 2 == 0 : d < half;
      const double expected = is_first ? a * cos - b * sin : b * cos + a * sin;
      const double allowed = std::fabs(expected) * Storage<T>::kEpsilon * 1.01 + (std::fabs(a) + std::fabs(b)) * 2e-7;
      const double error = std::fabs(got - expected) / (allowed + 4e-8);  // half the smallest fp16, and a little more
      if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
    }
  }
  return worst;
}

template <typename T>
void measure(ladder::Report& report, const Case& c, bool interleaved) {
  const int half = c.rotary_dim / 2;
  const std::size_t count = static_cast<std::size_t>(c.tokens) * (c.q_heads + c.k_heads) * c.head_dim;
  const double bytes = 2.0 * static_cast<double>(count) * sizeof(T) + static_cast<double>(c.tokens) * (8.0 * half + 8.0);
  const int buffers = ladder::buffer_sets(bytes);
  const Tables tables(half);
  const ladder::Buffer<T> x(count * buffers);
  const ladder::Buffer<float> cos(tables.cos), sin(tables.sin);
  std::vector<int64_t> positions(c.tokens);
  for (int64_t token = 0; token < c.tokens; ++token) positions[token] = token % kMaxPos;
  const ladder::Buffer<int64_t> d_positions(positions);
  ladder::check(cudaMemset(x.get(), 0, count * buffers * sizeof(T)), "cudaMemset");
  const double microseconds = ladder::median_microseconds(buffers, [&](int i, cudaStream_t stream) {
    T* data = x.get() + count * i;
    return astrai::rotary(parameters<T>(c, data, data, cos.get(), sin.get(), d_positions.get()), Storage<T>::kDType,
                          interleaved, stream);
  });
  report.bandwidth(name_of<T>(c, interleaved, true), microseconds, bytes);
}

template <typename T>
void verify_all(ladder::Report& report) {
  const Case cases[] = {{1, 1, 0, 64, 64, 0},   {5, 9, 3, 64, 64, 8},    {7, 3, 1, 80, 80, 0},    {6, 5, 2, 96, 48, 8},
                        {4, 6, 1, 100, 40, 1},  {4, 6, 1, 72, 20, 0},    {3, 2, 1, 6, 6, 2},      {3, 70, 64, 256, 256, 0},
                        {3, 40, 9, 128, 2, 0},  {2, 7, 6, 65, 34, 0},    {301, 24, 4, 64, 64, 0}, {4000, 32, 8, 128, 128, 0}};
  for (const Case& c : cases) {
    for (const bool interleaved : {false, true}) {
      for (const bool in_place : {false, true}) {
        report.row(name_of<T>(c, interleaved, in_place), verify<T>(c, interleaved, in_place));
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  ladder::Report report;
  verify_all<float>(report);
  verify_all<astrai::float16>(report);
  verify_all<astrai::bfloat16>(report);
  if (!ladder::is_quick(argc, argv)) {
    for (const Case& c : {Case{1, 32, 8, 128, 128, 0}, Case{128, 32, 8, 128, 128, 0}, Case{16384, 24, 4, 64, 64, 0},
                          Case{16384, 32, 8, 128, 128, 0}}) {
      for (const bool interleaved : {false, true}) measure<astrai::bfloat16>(report, c, interleaved);
    }
  }
  return report.finish();
}
