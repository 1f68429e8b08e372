// argmax and sample against a double-precision reference that sorts; time over buffers that L2 cannot hold.

#include "astrai/sampling/sampling.cuh"

#include <numeric>

#include "ladder.h"

namespace {

using ladder::Storage;

/// What one row asks for; rows of a case take these in turn.
struct Wish {
  float temperature;
  int64_t top_k;
  float top_p;
  float min_p;
};

const std::vector<Wish> kWishes = {
    {1.0f, 0, 1.0f, 0.0f},  {0.0f, 50, 0.9f, 0.0f},  {0.7f, 50, 0.9f, 0.0f},    {1.0f, 1, 1.0f, 0.0f},
    {1.0f, 0, 0.9f, 0.0f},  {1.5f, 0, 1.0f, 0.05f},  {1.0f, 300, 0.95f, 0.02f}, {0.8f, 5000, 0.97f, 0.0f},
    {1.0f, 0, 0.0f, 0.0f},  {1.0f, 1 << 30, 1.0f, 0.0f}, {2.0f, 512, 1.0f, 0.0f}, {1e-30f, 0, 0.5f, 0.0f},
    {1.0f, 0, 0.5f, 0.3f},  {1.0f, 64, 1.0f, 1.0f},
};

struct Case {
  int64_t rows;
  int vocab;
  int64_t gap;
  float spread;  // standard deviation of the logits
  bool penalises;
};

template <typename T>
std::string name_of(const char* what, const Case& c) {
  char text[128];
  std::snprintf(text, sizeof text, "%s %s rows %lld vocab %d gap %lld spread %g%s", what, Storage<T>::kName,
                static_cast<long long>(c.rows), c.vocab, static_cast<long long>(c.gap), c.spread,
                c.penalises ? " penalties" : "");
  return text;
}

double uniform(int64_t seed, int64_t position) {
  const auto mix = [](uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
  };
  return static_cast<double>(mix(static_cast<uint64_t>(seed) ^ mix(static_cast<uint64_t>(position) + 1)) >> 11) *
         std::ldexp(1.0, -53);
}

/// How far the drawn token is from the one that u points at, in units of the tolerance.
double judge(const std::vector<float>& scores, const Wish& wish, double u, int64_t token) {
  const int64_t vocab = static_cast<int64_t>(scores.size());
  if (token < 0 || token >= vocab) return INFINITY;
  int64_t best = 0;
  for (int64_t i = 1; i < vocab; ++i) {
    const bool is_nan = scores[i] != scores[i];
    if ((is_nan && scores[best] == scores[best]) || scores[i] > scores[best]) best = i;
  }
  const float largest = scores[best];
  if (!(wish.temperature > 0.0f) || !std::isfinite(largest)) return token == best ? 0.0 : INFINITY;

  const bool filters = wish.top_k > 0 || wish.top_p < 1.0f || wish.min_p > 0.0f;
  std::vector<int64_t> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  if (filters) {
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
  }
  std::vector<double> weight(vocab);
  for (int64_t i = 0; i < vocab; ++i) {
    const double distance = static_cast<double>(scores[order[i]]) - largest;
    weight[i] = distance == 0.0 ? 1.0 : std::exp(distance / wish.temperature);
  }
  int64_t kept = wish.top_k > 0 ? std::min(wish.top_k, vocab) : vocab;
  const double total = std::accumulate(weight.begin(), weight.begin() + kept, 0.0);
  double doubtful = 0.0;  // weight of tokens that rounding may keep or drop
  if (filters) {
    double before = 0.0;
    int64_t last = 0;
    for (int64_t i = 0; i < kept; ++i) {
      const double margin = before - static_cast<double>(wish.top_p) * total;
      const bool drop = i > 0 && ((wish.top_p < 1.0f && margin >= 0.0) || weight[i] < wish.min_p);
      const bool close = (wish.top_p < 1.0f && std::fabs(margin) < 2e-5 * total) ||
                         std::fabs(weight[i] - wish.min_p) < 1e-5 * wish.min_p;
      if (close) doubtful += weight[i];
      if (drop && !close) break;
      if (!drop) last = i + 1;
      before += weight[i];
    }
    kept = std::max<int64_t>(last, 1);
  }
  const double sum = std::accumulate(weight.begin(), weight.begin() + kept, 0.0);
  double begin = 0.0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (order[i] == token) {
      const double target = u * sum;
      const double distance = std::max(std::max(begin - target, target - (begin + weight[i])), 0.0);
      const bool excluded = i >= kept && doubtful == 0.0;
      return excluded ? INFINITY : distance / (2e-5 * sum + doubtful);
    }
    begin += weight[i];
  }
  return INFINITY;
}

template <typename T>
struct Operands {
  Case c;
  std::vector<T> logits;
  std::vector<float> temperature, top_p, min_p, presence, frequency, repetition;
  std::vector<int64_t> top_k, seed, position;
  std::vector<int32_t> counts;
  std::vector<uint8_t> seen;

  Operands(const Case& wanted, const std::vector<Wish>& wishes) : c(wanted) {
    logits = ladder::random_values<T>(c.rows * stride(), 1);
#pragma omp parallel for
    for (int64_t row = 0; row < c.rows; ++row) {
      T* values = logits.data() + row * stride();
      for (int i = 0; i < c.vocab; ++i) values[i] = Storage<T>::pack(c.spread * Storage<T>::unpack(values[i]));
      std::fill(values + c.vocab, values + stride(), Storage<T>::pack(NAN));
    }
    for (int64_t row = 0; row < c.rows; ++row) {
      const Wish& wish = wishes[row % wishes.size()];
      temperature.push_back(wish.temperature);
      top_k.push_back(wish.top_k);
      top_p.push_back(wish.top_p);
      min_p.push_back(wish.min_p);
      seed.push_back(row * 1000003 - 7);
      position.push_back(row * 31);
      presence.push_back(0.25f * (row % 3));
      frequency.push_back(0.5f * (row % 2));
      repetition.push_back(1.0f + 0.3f * (row % 4));
    }
    if (c.penalises) {
      for (int64_t i = 0; i < c.rows * c.vocab; ++i) {
        counts.push_back(i % 7 == 3 ? static_cast<int32_t>(i % 5) : 0);
        seen.push_back(i % 7 == 3 || i % 11 == 0);
      }
    } else {
      counts.push_back(0);
      seen.push_back(0);
    }
  }
  int64_t stride() const { return c.vocab + c.gap; }

  std::vector<float> scores(int64_t row) const {
    std::vector<float> values(c.vocab);
    for (int i = 0; i < c.vocab; ++i) {
      float score = static_cast<float>(Storage<T>::unpack(logits[row * stride() + i]));
      if (c.penalises) {
        const int64_t at = row * c.vocab + i;
        if (seen[at]) score = score > 0.0f ? score / repetition[row] : score * repetition[row];
        if (counts[at] > 0) score = score - presence[row];
        const float penalty = frequency[row] * static_cast<float>(counts[at]);
        score = score - penalty;
      }
      values[i] = score;
    }
    return values;
  }
};

/// The operands on the device, those of [rows, vocab] several times over.
template <typename T>
struct Device {
  const Case c;
  ladder::Buffer<T> logits;
  ladder::Buffer<float> temperature, top_p, min_p, presence, frequency, repetition;
  ladder::Buffer<int64_t> top_k, seed, position;
  ladder::Buffer<int32_t> counts;
  ladder::Buffer<uint8_t> seen;
  ladder::Buffer<int64_t> out;

  explicit Device(const Operands<T>& o, int copies = 1)
      : c(o.c),
        logits(o.logits, copies),
        temperature(o.temperature),
        top_p(o.top_p),
        min_p(o.min_p),
        presence(o.presence),
        frequency(o.frequency),
        repetition(o.repetition),
        top_k(o.top_k),
        seed(o.seed),
        position(o.position),
        counts(o.counts, copies),
        seen(o.seen, copies),
        out(std::vector<int64_t>(o.c.rows, -1)) {}

  astrai::SamplingParams parameters(bool draws, int copy = 0) const {
    astrai::SamplingParams params = {};
    params.logits = logits.get() + copy * c.rows * (c.vocab + c.gap);
    params.logits_stride = c.vocab + c.gap;
    params.out = out.get();
    params.out_stride = 1;
    params.rows = c.rows;
    params.vocab = c.vocab;
    if (draws) {
      params.temperature = {temperature.get(), 1};
      params.top_k = {top_k.get(), 1};
      params.top_p = {top_p.get(), 1};
      params.min_p = {min_p.get(), 1};
      params.seed = {seed.get(), 1};
      params.position = {position.get(), 1};
    }
    if (c.penalises) {
      params.presence = {presence.get(), 1};
      params.frequency = {frequency.get(), 1};
      params.repetition = {repetition.get(), 1};
      params.counts = counts.get() + copy * c.rows * c.vocab;
      params.seen = seen.get() + copy * c.rows * c.vocab;
      params.counts_stride = params.seen_stride = c.vocab;
    }
    return params;
  }
};

template <typename T>
double verify(const Case& c, bool draws) {
  Operands<T> o(c, kWishes);
  if (c.rows > 3 && c.vocab > 5) {
    T* row = o.logits.data() + 3 * o.stride();
    for (int i = 0; i < c.vocab; ++i) row[i] = Storage<T>::pack(-INFINITY);  // nothing to draw from
    o.logits[2 * o.stride() + 1] = Storage<T>::pack(-INFINITY);
  }
  if (c.rows > 9 && c.vocab > 5) {
    o.logits[8 * o.stride() + 5] = Storage<T>::pack(INFINITY);
    o.logits[9 * o.stride() + 4] = Storage<T>::pack(NAN);
  }
  const Device<T> device(o);
  ladder::check(astrai::launch_sampling<T>(device.parameters(draws), nullptr), "sampling");
  ladder::check(cudaDeviceSynchronize(), "sampling");
  const std::vector<int64_t> tokens = device.out.read();
  double worst = 0.0;
#pragma omp parallel for reduction(max : worst)
  for (int64_t row = 0; row < c.rows; ++row) {
    const Wish wish = {draws ? o.temperature[row] : 0.0f, o.top_k[row], o.top_p[row], o.min_p[row]};
    worst = std::max(worst, judge(o.scores(row), wish, uniform(o.seed[row], o.position[row]), tokens[row]));
  }
  return worst;
}

template <typename T>
void measure(ladder::Report& report, const char* what, const Case& c, const Wish& wish, bool draws) {
  const Operands<T> o(c, {wish});
  const double bytes = static_cast<double>(c.rows) * c.vocab * (sizeof(T) + (c.penalises ? 5.0 : 0.0));
  const int buffers = ladder::buffer_sets(bytes);
  const Device<T> device(o, buffers);
  const double microseconds = ladder::median_microseconds(buffers, [&](int i, cudaStream_t stream) {
    return astrai::launch_sampling<T>(device.parameters(draws, i), stream);
  });
  report.bandwidth(name_of<T>(what, c), microseconds, bytes);
}

template <typename T>
void verify_all(ladder::Report& report) {
  for (const Case& c : {Case{1, 1, 0, 1.0f, false}, Case{28, 7, 1, 1.0f, false}, Case{28, 1000, 8, 3.0f, false},
                        Case{14, 4104, 0, 2.0f, true}, Case{14, 5001, 3, 1.0f, true}, Case{2, 33000, 0, 0.2f, false}}) {
    report.row(name_of<T>("argmax", c), verify<T>(c, false));
    report.row(name_of<T>("sample", c), verify<T>(c, true));
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
    // One row on eight blocks, and so on to a block a row; flat and peaked; whole octets and not.
    for (const int64_t rows : {14, 28, 56, 140}) {
      for (const float spread : {0.5f, 4.0f}) {
        for (const int vocab : {151936, 50257}) {
          report.row(name_of<B>("sample", {rows, vocab, 0, spread, false}), verify<B>({rows, vocab, 0, spread, false}, true));
          report.row(name_of<float>("sample", {rows, vocab, 0, spread, false}),
                     verify<float>({rows, vocab, 0, spread, false}, true));
        }
      }
    }
    for (const int64_t rows : {1, 8, 32, 128}) {
      const Case c = {rows, 151936, 0, 3.0f, false};
      measure<B>(report, "argmax", c, {0.0f, 0, 1.0f, 0.0f}, false);
      measure<B>(report, "no filter", c, {1.0f, 0, 1.0f, 0.0f}, true);
      measure<B>(report, "top-k 50, top-p 0.9", c, {1.0f, 50, 0.9f, 0.0f}, true);
      measure<float>(report, "top-k 50, top-p 0.9", c, {1.0f, 50, 0.9f, 0.0f}, true);
      measure<B>(report, "top-p 0.9", c, {1.0f, 0, 0.9f, 0.0f}, true);
      measure<B>(report, "top-p 0.9, flat", c, {3.0f, 0, 0.9f, 0.0f}, true);
      measure<B>(report, "min-p 0.1", c, {1.0f, 0, 1.0f, 0.1f}, true);
      measure<B>(report, "top-k 50, top-p 0.9", {rows, 151936, 0, 3.0f, true}, {1.0f, 50, 0.9f, 0.0f}, true);
    }
  }
  return report.finish();
}
