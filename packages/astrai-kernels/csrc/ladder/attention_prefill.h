// The prefill part of the attention program.
#pragma once

#include "astrai/attention/prefill.cuh"

#include "attention_reference.h"

namespace attention::prefill {

template <typename T>
cudaError_t launch(const astrai::AttentionParams& p, int64_t n_tokens, bool extras, cudaStream_t stream) {
  const bool paged = p.req_to_token != nullptr;
#define LADDER_CASE(T_, KV, DIM, EXTRAS)                                                      \
  if (p.head_dim == DIM && extras == EXTRAS && paged == astrai::KV::kPaged) {                 \
    return astrai::launch_prefill<T_, astrai::KV, DIM, EXTRAS>(p, n_tokens, stream);          \
  }
  ASTRAI_PREFILL_CASES(LADDER_CASE, T, 64)
  ASTRAI_PREFILL_CASES(LADDER_CASE, T, 80)
  ASTRAI_PREFILL_CASES(LADDER_CASE, T, 128)
  ASTRAI_PREFILL_CASES(LADDER_CASE, T, 256)
#undef LADDER_CASE
  return cudaErrorInvalidValue;
}

template <typename T>
void verify(ladder::Report& report, const Case& c, const std::vector<int>& q_lens) {
  const Operands<T> operands(c, q_lens);
  const bool extras = c.softcap > 0.0f || c.sinks || c.mask;
  ladder::check(launch<T>(operands.params(), operands.q_start.back(), extras, nullptr), "prefill");
  ladder::check(cudaDeviceSynchronize(), "prefill");
  report.row(std::string("prefill ") + Storage<T>::kName + " " + c.name, operands.error());
}

inline void verify_all(ladder::Report& report) {
  const std::vector<int> lens = {300, 1, 129, 0, 64, 65, 500};
  const std::vector<int> whole = lens;
  const std::vector<int> parts = {300, 1, 1, 0, 63, 1, 200};
  const auto both = [&](const Case& c, const std::vector<int>& q_lens) {
    verify<astrai::bfloat16>(report, c, q_lens);
    verify<astrai::float16>(report, c, q_lens);
  };
  both({"24/4 d64 whole prompts", lens, 6, 2, 64}, whole);
  both({"24/4 d64 chunks behind cached keys", lens, 6, 2, 64}, parts);
  both({"d64 page 1", lens, 6, 2, 64, 1, 0, 0, false, false, 1}, parts);
  both({"d64 contiguous", lens, 6, 2, 64, 1, 0, 0, false, false, 0}, parts);
  both({"d80", lens, 4, 2, 80}, parts);
  both({"d128", lens, 4, 1, 128}, parts);
  both({"d256", lens, 2, 1, 256}, parts);
  both({"d64 window 33", lens, 6, 2, 64, 1, 33}, parts);
  both({"d128 window 200", lens, 4, 2, 128, 1, 200}, whole);
  both({"d64 softcap 20", lens, 6, 2, 64, 1, 0, 20.0f}, parts);
  both({"d128 sinks", lens, 4, 2, 128, 1, 0, 0, true}, parts);
  both({"d64 mask", lens, 4, 2, 64, 1, 0, 0, false, true}, parts);
}

inline void measure(ladder::Report& report, int batch, int len, int n_heads, int n_kv_heads, int head_dim) {
  using T = astrai::bfloat16;
  Case c{"", std::vector<int>(batch, len), n_heads, n_kv_heads, head_dim};
  const Operands<T> operands(c, c.lens);
  const double microseconds = ladder::median_microseconds(
      5, [&](int, cudaStream_t stream) { return launch<T>(operands.params(), operands.q_start.back(), false, stream); });
  char name[96];
  std::snprintf(name, sizeof name, "prefill %d x %d, %d/%d d%d, causal, page 16", batch, len, n_heads, n_kv_heads, head_dim);
  report.rate(name, microseconds, 2.0 * batch * len * static_cast<double>(len) * n_heads * head_dim);
}

inline void measure_all(ladder::Report& report) {
  measure(report, 4, 2048, 24, 4, 64);
  measure(report, 1, 16384, 24, 4, 64);
  measure(report, 4, 2048, 32, 8, 128);
  measure(report, 1, 16384, 32, 8, 128);
  measure(report, 8, 512, 32, 8, 128);
}

}  // namespace attention::prefill
