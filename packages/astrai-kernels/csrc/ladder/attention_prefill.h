// The prefill part of the attention program.
#pragma once

#include "astrai/attention/prefill.cuh"
#include "astrai/attention/scalar.cuh"

#include "attention_reference.h"

namespace attention::prefill {

template <typename T>
cudaError_t launch(const astrai::AttentionParams& p, int64_t n_tokens, bool extras, cudaStream_t stream) {
  const int dim = p.head_dim == 80 ? 96 : p.head_dim;
  const bool narrow = p.k_scale != nullptr;
#define LADDER_CASE(T_, KV, DIM, EXTRAS)                                                            \
  if (dim == DIM && narrow == astrai::KV::kNarrow && (narrow || extras == EXTRAS)) {                \
    return astrai::launch_prefill<T_, astrai::KV, DIM, EXTRAS>(p, n_tokens, stream);                \
  }
#define LADDER_CASES(DIM)                  \
  ASTRAI_PREFILL_CASES(LADDER_CASE, T, DIM) \
  LADDER_CASE(astrai::float16, NarrowKV, DIM, true)
  LADDER_CASES(64)
  LADDER_CASES(96)
  LADDER_CASES(128)
  LADDER_CASES(256)
#undef LADDER_CASES
#undef LADDER_CASE
  return cudaErrorInvalidValue;
}

template <typename T>
void verify(ladder::Report& report, const Case& c, const std::vector<int>& q_lens) {
  const Operands<T> operands(c, q_lens);
  const bool extras = c.softcap > 0.0f || c.sinks || c.mask || !c.page;  // as bindings/attention.cu has it
  ladder::check(launch<T>(operands.params(), operands.q_start.back(), extras, nullptr), "prefill");
  ladder::check(cudaDeviceSynchronize(), "prefill");
  report.row(std::string("prefill ") + Storage<T>::kName + " " + c.name, operands.error());
  // The scalar twin over the same operands, into the same output.
  ladder::check(cudaMemset(operands.d_out.get(), 0xff, operands.q.size() * sizeof(T)), "memset");
  ladder::check(
      astrai::scalar_attention(operands.params(), Storage<T>::kDType, operands.q_start.back(), nullptr), "scalar");
  ladder::check(cudaDeviceSynchronize(), "scalar");
  report.row(std::string("scalar  ") + Storage<T>::kName + " " + c.name, operands.error());
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
  both({"d128 mask and sinks, rows that see the sink alone", {70, 1, 1, 1, 2}, 4, 2, 128, 1, 0, 0, true, true}, {3, 1, 1, 1, 2});
  both({"d64 softcap 2", lens, 6, 2, 64, 1, 0, 2.0f}, whole);
  both({"d64 e4m3", lens, 6, 2, 64, 1, 0, 0, false, false, 16, 0, true}, parts);
  both({"d80 e4m3, contiguous", lens, 4, 2, 80, 1, 0, 0, false, false, 0, 0, true}, parts);
  both({"d128 e4m3, window 33, sinks", lens, 4, 2, 128, 1, 33, 0, true, false, 1, 0, true}, whole);
  both({"d256 e4m3, mask, softcap 20", lens, 2, 1, 256, 1, 0, 20.0f, false, true, 16, 0, true}, parts);
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
