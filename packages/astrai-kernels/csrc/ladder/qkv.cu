// qkv_norm_rope_write against a double-precision reference; bandwidth over buffers that L2 cannot hold.

#include "astrai/fused/qkv.cuh"

#include "ladder.h"

namespace {

using ladder::Storage;

enum class Layout { kNone, kHalves, kInterleaved };

struct Case {
  int64_t tokens;
  int q_heads;
  int kv_heads;
  int head_dim;
  int rotary_dim;
  Layout layout;
  bool norms;
  bool fp8;
  int gap;  // poisoned elements after each row of qkv and each head of q and of the pools
};

constexpr int64_t kMaxPos = 512;
constexpr float kEps = 1e-6f;

template <typename T>
std::string name_of(const Case& c) {
  const char* layouts[] = {"", " halves", " interleaved"};
  char text[160];
  std::snprintf(text, sizeof text, "qkv %s%s%s%s tokens %lld heads %d/%d dim %d of %d gap %d", Storage<T>::kName,
                c.norms ? " norm" : "", layouts[static_cast<int>(c.layout)], c.fp8 ? " fp8" : "",
                static_cast<long long>(c.tokens), c.q_heads, c.kv_heads, c.rotary_dim, c.head_dim, c.gap);
  return text;
}

double e4m3(uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

/// Operands on the device. Pools hold `pool` bytes an element and are poisoned with the bits of a NaN.
template <typename T>
struct Operands {
  Case c;
  int64_t pool_size;
  std::vector<T> qkv, q_norm, k_norm;
  std::vector<float> cos, sin;
  std::vector<int64_t> positions, slots;

  explicit Operands(const Case& wanted) : c(wanted), pool_size(wanted.tokens + 3) {
    qkv = ladder::random_values<T>(c.tokens * row_stride(), 1);
    for (int64_t i = 0; i < static_cast<int64_t>(qkv.size()); ++i) {
      if (i % row_stride() >= row_stride() - c.gap) qkv[i] = Storage<T>::pack(NAN);
    }
    q_norm = ladder::random_values<T>(c.head_dim, 2);
    k_norm = ladder::random_values<T>(c.head_dim, 3);
    const int half = c.rotary_dim / 2;
    for (int64_t position = 0; position < kMaxPos; ++position) {
      for (int i = 0; i < half; ++i) {
        const double angle = position * std::pow(10000.0, -static_cast<double>(i) / half);
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    for (int64_t token = 0; token < c.tokens; ++token) {
      positions.push_back(token * 97 % kMaxPos);
      slots.push_back(pool_size - 1 - token);
    }
    if (c.tokens > 3) {
      positions[1] = kMaxPos;   // outside the table: rotated elements must come out as NaN
      slots[2] = -1;            // must not be written
      slots[3] = pool_size;     // nor that
    }
  }
  int64_t row_stride() const { return static_cast<int64_t>(c.q_heads + 2 * c.kv_heads) * c.head_dim + c.gap; }
  int64_t head_stride() const { return c.head_dim + c.gap; }
  int64_t q_count() const { return c.tokens * c.q_heads * head_stride(); }
  int64_t pool_count() const { return pool_size * c.kv_heads * head_stride(); }
};

template <typename T>
astrai::QkvParams parameters(const Operands<T>& o, const T* qkv, T* q, void* k, void* v, float* k_scale, float* v_scale,
                             const T* q_norm, const T* k_norm, const float* cos, const float* sin,
                             const int64_t* positions, const int64_t* slots) {
  astrai::QkvParams params = {};
  params.qkv = qkv;
  params.qkv_stride = o.row_stride();
  params.q = q;
  params.q_token_stride = o.c.q_heads * o.head_stride();
  params.q_head_stride = o.head_stride();
  params.k_buffer = k;
  params.v_buffer = v;
  params.k_slot_stride = params.v_slot_stride = o.c.kv_heads * o.head_stride();
  params.k_head_stride = params.v_head_stride = o.head_stride();
  params.k_scale = o.c.fp8 ? k_scale : nullptr;
  params.v_scale = o.c.fp8 ? v_scale : nullptr;
  params.k_scale_stride = params.v_scale_stride = o.c.kv_heads;
  params.q_norm = o.c.norms ? q_norm : nullptr;
  params.k_norm = o.c.norms ? k_norm : nullptr;
  if (o.c.layout != Layout::kNone) {
    params.cos = cos;
    params.sin = sin;
    params.rotary_dim = o.c.rotary_dim;
  }
  params.cos_stride = params.sin_stride = o.c.rotary_dim / 2;
  params.max_pos = kMaxPos;
  params.position_ids = positions;
  params.out_cache_loc = slots;
  params.position_stride = params.loc_stride = 1;
  params.positions_are_64_bit = params.locs_are_64_bit = true;
  params.pool_size = o.pool_size;
  params.tokens = o.c.tokens;
  params.n_heads = o.c.q_heads;
  params.n_kv_heads = o.c.kv_heads;
  params.head_dim = o.c.head_dim;
  params.eps = kEps;
  params.interleaved = o.c.layout == Layout::kInterleaved;
  return params;
}

/// A head after norm and rotation, and how far rounding alone may move each element.
template <typename T>
void expected_head(const Operands<T>& o, int64_t token, int head, std::vector<double>& value,
                   std::vector<double>& allowed) {
  const Case& c = o.c;
  const double eps = Storage<T>::kEpsilon * 1.01;
  const T* source = o.qkv.data() + token * o.row_stride() + static_cast<int64_t>(head) * c.head_dim;
  const bool is_v = head >= c.q_heads + c.kv_heads;
  for (int d = 0; d < c.head_dim; ++d) {
    value[d] = Storage<T>::unpack(source[d]);
    allowed[d] = 0.0;
  }
  if (is_v) return;
  if (c.norms) {
    double squares = 0.0;
    for (int d = 0; d < c.head_dim; ++d) squares += value[d] * value[d];
    const double scale = 1.0 / std::sqrt(squares / c.head_dim + kEps);
    for (int d = 0; d < c.head_dim; ++d) {
      value[d] *= scale * Storage<T>::unpack(head < c.q_heads ? o.q_norm[d] : o.k_norm[d]);
      allowed[d] = std::fabs(value[d]) * (2.0 * eps + 1e-6) + 8e-8;
    }
  }
  if (c.layout == Layout::kNone) return;
  const std::vector<double> before = value;
  const std::vector<double> slack = allowed;
  const int half = c.rotary_dim / 2;
  const int64_t position = o.positions[token];
  for (int d = 0; d < c.rotary_dim; ++d) {
    if (position >= kMaxPos) {
      value[d] = NAN;
      continue;
    }
    const bool interleaved = c.layout == Layout::kInterleaved;
    const int pair = interleaved ? d / 2 : d % half;
    const int a = interleaved ? 2 * pair : pair;
    const int b = interleaved ? 2 * pair + 1 : pair + half;
    const double cos = o.cos[position * half + pair];
    const double sin = o.sin[position * half + pair];
    value[d] = d == a ? before[a] * cos - before[b] * sin : before[b] * cos + before[a] * sin;
    allowed[d] = std::fabs(value[d]) * eps + (std::fabs(before[a]) + std::fabs(before[b])) * 2e-7 + slack[a] +
                 slack[b] + 4e-8;
  }
}

template <typename T>
double verify(const Case& c, bool overlap = false) {
  const Operands<T> o(c);
  const ladder::Buffer<T> qkv(o.qkv), q_norm(o.q_norm), k_norm(o.k_norm), q(ladder::poison<T>(o.q_count()));
  const ladder::Buffer<float> cos(o.cos), sin(o.sin);
  const ladder::Buffer<int64_t> positions(o.positions), slots(o.slots);
  const std::vector<T> wide_poison = ladder::poison<T>(c.fp8 ? 1 : o.pool_count());
  const std::vector<uint8_t> narrow_poison(c.fp8 ? o.pool_count() : 1, 0x7f);
  const std::vector<float> scale_poison(o.pool_size * c.kv_heads, NAN);
  const ladder::Buffer<T> k(wide_poison), v(wide_poison);
  const ladder::Buffer<uint8_t> k8(narrow_poison), v8(narrow_poison);
  const ladder::Buffer<float> k_scale(scale_poison), v_scale(scale_poison);
  void* k_pool = c.fp8 ? static_cast<void*>(k8.get()) : k.get();
  void* v_pool = c.fp8 ? static_cast<void*>(v8.get()) : v.get();
  auto params = parameters<T>(o, qkv.get(), q.get(), k_pool, v_pool, k_scale.get(), v_scale.get(), q_norm.get(),
                              k_norm.get(), cos.get(), sin.get(), positions.get(), slots.get());
  params.overlap = overlap;
  ladder::check(astrai::qkv_norm_rope_write(params, Storage<T>::kDType, nullptr), "qkv_norm_rope_write");
  ladder::check(cudaDeviceSynchronize(), "qkv_norm_rope_write");
  const std::vector<T> got_q = q.read();
  const std::vector<T> wide[2] = {k.read(), v.read()};
  const std::vector<uint8_t> narrow[2] = {k8.read(), v8.read()};
  const std::vector<float> scales[2] = {k_scale.read(), v_scale.read()};

  std::vector<int64_t> token_of(o.pool_size, -1);
  for (int64_t token = 0; token < c.tokens; ++token) {
    if (o.slots[token] >= 0 && o.slots[token] < o.pool_size) token_of[o.slots[token]] = token;
  }
  double worst = 0.0;
  const auto compare = [&](double got, double wanted, double allowed) {
    const bool both_nan = got != got && wanted != wanted;
    const double error = both_nan ? 0.0 : std::fabs(got - wanted) / (allowed + 1e-30);
    if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
  };
  std::vector<double> value(c.head_dim), allowed(c.head_dim);
  for (int64_t row = 0; row < c.tokens * c.q_heads; ++row) {
    expected_head(o, row / c.q_heads, static_cast<int>(row % c.q_heads), value, allowed);
    for (int d = 0; d < o.head_stride(); ++d) {
      compare(Storage<T>::unpack(got_q[row * o.head_stride() + d]), d < c.head_dim ? value[d] : NAN,
              d < c.head_dim ? allowed[d] : 0.0);
    }
  }
  for (int64_t row = 0; row < o.pool_size * c.kv_heads; ++row) {
    const int64_t token = token_of[row / c.kv_heads];
    for (int part = 0; part < 2; ++part) {
      double largest = 0.0;
      if (token >= 0) {
        expected_head(o, token, c.q_heads + part * c.kv_heads + static_cast<int>(row % c.kv_heads), value, allowed);
        for (const double x : value) largest = std::fmax(largest, std::fabs(x));
      }
      if (c.fp8) {
        compare(scales[part][row], token < 0 ? NAN : largest / 448.0, largest / 448.0 * (4.0 * Storage<T>::kEpsilon + 1e-6));
      }
      for (int d = 0; d < o.head_stride(); ++d) {
        const int64_t at = row * o.head_stride() + d;
        const bool written = token >= 0 && d < c.head_dim;
        if (!c.fp8) {
          compare(Storage<T>::unpack(wide[part][at]), written ? value[d] : NAN, written ? allowed[d] : 0.0);
        } else if (!written) {
          compare(e4m3(narrow[part][at]), NAN, 0.0);
        } else {
          // Half a unit in the last of four significant bits, or half the smallest subnormal.
          const double slack = std::fabs(value[d]) / 15.5 + largest / 448.0 * 0.001 + 2.0 * allowed[d];
          compare(e4m3(narrow[part][at]) * scales[part][row], value[d], slack);
        }
      }
    }
  }
  return worst;
}

template <typename T>
void measure(ladder::Report& report, const Case& c) {
  const Operands<T> o(c);
  const int64_t heads = c.q_heads + 2 * c.kv_heads;
  const double written = c.fp8 ? static_cast<double>(c.q_heads) * sizeof(T) + 2.0 * c.kv_heads
                               : static_cast<double>(heads) * sizeof(T);
  const double bytes = static_cast<double>(c.tokens) *
                       (c.head_dim * (static_cast<double>(heads) * sizeof(T) + written) + 4.0 * c.rotary_dim + 16.0);
  const int buffers = ladder::buffer_sets(bytes);
  const int64_t qkv_count = c.tokens * o.row_stride();
  const ladder::Buffer<T> qkv(qkv_count * buffers), q(o.q_count() * buffers), q_norm(o.q_norm), k_norm(o.k_norm);
  const ladder::Buffer<T> k(o.pool_count() * buffers), v(o.pool_count() * buffers);
  const ladder::Buffer<float> k_scale(o.pool_size * c.kv_heads), v_scale(o.pool_size * c.kv_heads);
  const ladder::Buffer<float> cos(o.cos), sin(o.sin);
  const ladder::Buffer<int64_t> positions(o.positions), slots(o.slots);
  ladder::check(cudaMemset(qkv.get(), 0, qkv_count * buffers * sizeof(T)), "cudaMemset");
  const double microseconds = ladder::median_microseconds(buffers, [&](int i, cudaStream_t stream) {
    return astrai::qkv_norm_rope_write(
        parameters<T>(o, qkv.get() + qkv_count * i, q.get() + o.q_count() * i, k.get() + o.pool_count() * i,
                      v.get() + o.pool_count() * i, k_scale.get(), v_scale.get(), q_norm.get(), k_norm.get(), cos.get(),
                      sin.get(), positions.get(), slots.get()),
        Storage<T>::kDType, stream);
  });
  report.bandwidth(name_of<T>(c), microseconds, bytes);
}

template <typename T>
void verify_all(ladder::Report& report) {
  const Layout none = Layout::kNone;
  const Layout halves = Layout::kHalves;
  const Layout turned = Layout::kInterleaved;
  const Case cases[] = {
      {1, 1, 1, 64, 64, halves, true, false, 0},    {5, 5, 2, 64, 64, turned, false, false, 8},
      {7, 3, 1, 80, 80, halves, true, false, 0},    {6, 6, 2, 96, 48, turned, true, false, 8},
      {9, 4, 2, 128, 128, halves, true, false, 8},  {4, 2, 1, 192, 64, halves, false, false, 0},
      {5, 2, 2, 256, 256, turned, true, false, 0},  {5, 7, 1, 80, 20, halves, true, false, 0},
      {6, 3, 2, 96, 24, halves, false, false, 1},   {4, 9, 3, 128, 6, turned, true, false, 3},
      {5, 2, 1, 128, 128, none, true, false, 0},    {5, 2, 1, 64, 64, none, false, false, 4},
      {5, 2, 1, 100, 40, halves, true, false, 0},   {6, 4, 2, 128, 128, halves, true, true, 8},
      {6, 4, 2, 64, 64, turned, false, true, 0},    {5, 3, 1, 80, 20, halves, true, true, 1},
      {6, 2, 2, 256, 128, halves, false, true, 8},
  };
  for (const Case& c : cases) {
    report.row(name_of<T>(c), verify<T>(c));
    report.row(name_of<T>(c) + " overlap", verify<T>(c, true));
  }
}

}  // namespace

int main(int argc, char** argv) {
  ladder::Report report;
  verify_all<float>(report);
  verify_all<astrai::float16>(report);
  verify_all<astrai::bfloat16>(report);
  if (!ladder::is_quick(argc, argv)) {
    using B = astrai::bfloat16;
    // Enough tokens for several heads a team.
    report.row("many tokens", verify<B>({9000, 6, 2, 128, 128, Layout::kHalves, true, false, 8}));
    report.row("many tokens, fp8", verify<B>({9000, 6, 2, 64, 64, Layout::kHalves, true, true, 0}));
    report.row("many tokens, interleaved, fp8", verify<B>({9000, 12, 2, 64, 64, Layout::kInterleaved, true, true, 0}));
    for (const int64_t tokens : {1, 8, 32, 128, 16384}) {
      measure<B>(report, {tokens, 24, 4, 64, 64, Layout::kHalves, false, false, 0});
      measure<B>(report, {tokens, 32, 8, 64, 64, Layout::kHalves, false, false, 0});
      measure<B>(report, {tokens, 16, 8, 128, 128, Layout::kHalves, true, false, 0});
      measure<B>(report, {tokens, 16, 8, 128, 128, Layout::kHalves, true, true, 0});
    }
  }
  return report.finish();
}
