// The decode part of the attention program: decode_kernel and the planner.
#pragma once

#include "astrai/attention/decode.cuh"
#include "astrai/attention/plan.cuh"

#include "attention_reference.h"

namespace attention::decode {

template <typename T>
cudaError_t launch(const astrai::AttentionParams& p, int64_t max_items, bool extras, cudaStream_t stream) {
  const int tiles = astrai::decode_row_tiles(p.head_dim, p.n_heads / p.n_kv_heads * p.q_len);
  const int dim = p.head_dim == 80 ? 96 : p.head_dim;
  const bool narrow = p.k_scale != nullptr;
#define LADDER_CASE(T_, KV, DIM, TILES, EXTRAS)                                                              \
  if (dim == DIM && tiles == TILES && narrow == astrai::KV::kNarrow && (narrow || extras == EXTRAS)) {       \
    return astrai::launch_decode<T_, astrai::KV, DIM, TILES, EXTRAS>(p, max_items, stream);                  \
  }
#define LADDER_CASES(DIM, TILES)                \
  ASTRAI_DECODE_CASES(LADDER_CASE, T, DIM, TILES) \
  LADDER_CASE(astrai::float16, NarrowKV, DIM, TILES, true)
  LADDER_CASES(64, 1)
  LADDER_CASES(64, 2)
  LADDER_CASES(96, 1)
  LADDER_CASES(128, 1)
  LADDER_CASES(128, 2)
  LADDER_CASES(256, 1)
#undef LADDER_CASES
#undef LADDER_CASE
  return cudaErrorInvalidValue;
}

/// Scratch of one launch; counters are zero before and after.
struct Scratch {
  int max_chunks;
  ladder::Buffer<int32_t> plan;
  ladder::Buffer<float> partial_out, partial_ml;
  ladder::Buffer<int32_t> counters;
  Scratch(const Case& c, int batch, int max_chunks_)
      : max_chunks(max_chunks_),
        plan(std::vector<int32_t>(4 + 8 * max_chunks_, 0)),
        partial_out(std::vector<float>(static_cast<std::size_t>(max_chunks_) * c.n_heads * c.q_len * c.head_dim, NAN)),
        partial_ml(std::vector<float>(static_cast<std::size_t>(max_chunks_) * c.n_heads * c.q_len * 2, NAN)),
        counters(std::vector<int32_t>(static_cast<std::size_t>(batch) * c.n_heads * c.q_len, 0)) {}
  void bind(astrai::AttentionParams& p) const {
    p.plan = reinterpret_cast<const astrai::AttentionPlan*>(plan.get());
    p.chunks = reinterpret_cast<const astrai::AttentionChunk*>(plan.get() + 4);
    p.partial_out = partial_out.get();
    p.partial_ml = partial_ml.get();
    p.counters = counters.get();
  }
};

/// As the launches of `batch` requests find it themselves.
astrai::DecodeLayout layout_of(const Case& c, int batch) {
  astrai::DecodeLayout layout = {};
  ladder::check(
      astrai::decode_layout(c.head_dim, c.n_heads, c.n_kv_heads, c.q_len, batch, c.fixed_len > 0, &layout), "layout");
  return layout;
}

cudaError_t run_plan(const Case& c, const Scratch& scratch, const int32_t* lens, int batch, cudaStream_t stream) {
  astrai::AttentionPlanParams p = {};
  p.seq_lens = lens;
  p.plan = reinterpret_cast<astrai::AttentionPlan*>(scratch.plan.get());
  p.chunks = reinterpret_cast<astrai::AttentionChunk*>(scratch.plan.get() + 4);
  p.batch = batch;
  p.max_chunks = scratch.max_chunks;
  p.units = astrai::decode_units(c.head_dim, c.n_heads, c.n_kv_heads, c.q_len);
  p.workers = layout_of(c, batch).workers;
  p.q_len = c.q_len;
  p.window = c.window;
  p.fixed_len = c.fixed_len;
  return astrai::plan(p, stream);
}

int default_chunks(const Case& c, int batch) {
  const int units = astrai::decode_units(c.head_dim, c.n_heads, c.n_kv_heads, c.q_len);
  const int workers = layout_of(c, batch).workers;
  int chunks = 2 * batch + 4 * ((workers + units - 1) / units);
  if (c.fixed_len) {
    chunks = 0;
    for (const int len : c.lens) chunks += len / c.fixed_len + 2;
  }
  return chunks;
}

template <typename T>
void verify(ladder::Report& report, const Case& c) {
  const Operands<T> operands(c, std::vector<int>(c.lens.size(), c.q_len));
  const Scratch scratch(c, operands.batch, default_chunks(c, operands.batch));
  ladder::check(run_plan(c, scratch, operands.d_lens.get(), operands.batch, nullptr), "plan");
  astrai::AttentionParams p = operands.params();
  scratch.bind(p);
  p.fixed_len = c.fixed_len;
  const int units = astrai::decode_units(c.head_dim, c.n_heads, c.n_kv_heads, c.q_len);
  const bool extras = c.softcap > 0.0f || c.sinks || c.mask || !c.page;  // as bindings/attention.cu has it
  // Twice: the second launch finds the counters as the first left them.
  for (int repeat = 0; repeat < 2; ++repeat) {
    ladder::check(launch<T>(p, static_cast<int64_t>(scratch.max_chunks) * units, extras, nullptr), "decode");
  }
  ladder::check(cudaDeviceSynchronize(), "decode");
  double worst = operands.error();
  for (const int32_t counter : scratch.counters.read()) {
    if (counter != 0) worst = INFINITY;
  }
  report.row(std::string("decode ") + Storage<T>::kName + " " + c.name, worst);
}

void measure(ladder::Report& report, Case c, int batch, int len) {
  using T = astrai::bfloat16;
  c.lens.assign(batch, len);
  const Table table(c.lens, c.page, 5);
  const std::size_t kv_count = static_cast<std::size_t>(table.slots) * c.n_kv_heads * c.head_dim;
  const double bytes = 2.0 * batch * len * c.n_kv_heads * c.head_dim * sizeof(T);
  const int buffers = static_cast<int>(std::min(64.0, std::max(2.0, std::ceil(200e6 / bytes))));
  const std::size_t q_count = static_cast<std::size_t>(batch) * c.n_heads * c.head_dim;
  const ladder::Buffer<T> d_q(ladder::random_values<T>(q_count, 1)), d_out(q_count);
  // Random values: what 0x3c3c3c3c... patterns would not show.
  const std::vector<T> sample = ladder::random_values<T>(std::min<std::size_t>(kv_count, 1 << 20), 2);
  const ladder::Buffer<T> d_k(kv_count * buffers), d_v(kv_count * buffers);
  const ladder::Buffer<T> d_sample(sample);
  for (std::size_t at = 0; at < kv_count * buffers; at += sample.size()) {
    const std::size_t n = std::min(sample.size(), kv_count * buffers - at) * sizeof(T);
    ladder::check(cudaMemcpyAsync(d_k.get() + at, d_sample.get(), n, cudaMemcpyDeviceToDevice), "copy");
    ladder::check(cudaMemcpyAsync(d_v.get() + at, d_sample.get(), n, cudaMemcpyDeviceToDevice), "copy");
  }
  const ladder::Buffer<int32_t> d_table(table.entries), d_lens(std::vector<int32_t>(c.lens.begin(), c.lens.end()));
  const Scratch scratch(c, batch, default_chunks(c, batch));
  ladder::check(run_plan(c, scratch, d_lens.get(), batch, nullptr), "plan");
  const int units = astrai::decode_units(c.head_dim, c.n_heads, c.n_kv_heads, 1);

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  ladder::check(cudaStreamCreate(&stream), "stream");
  ladder::check(cudaDeviceSynchronize(), "plan");
  ladder::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  const int launches = std::max(buffers, 20);
  for (int i = 0; i < launches; ++i) {
    astrai::AttentionParams p = {};
    set_strides<T>(p, c, table.max_len);
    scratch.bind(p);
    p.q = d_q.get();
    p.k = d_k.get() + kv_count * (i % buffers);
    p.v = d_v.get() + kv_count * (i % buffers);
    p.out = d_out.get();
    p.req_to_token = d_table.get();
    p.table_stride = table.max_len;
    p.overlap = true;
    p.batch = batch;
    ladder::check(launch<T>(p, static_cast<int64_t>(scratch.max_chunks) * units, false, stream), "decode");
  }
  ladder::check(cudaStreamEndCapture(stream, &graph), "capture");
  ladder::check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cudaEvent_t start, stop;
  ladder::check(cudaEventCreate(&start), "event");
  ladder::check(cudaEventCreate(&stop), "event");
  std::vector<float> samples;
  for (int s = -2; s < 9; ++s) {
    ladder::check(cudaEventRecord(start, stream), "event");
    ladder::check(cudaGraphLaunch(exec, stream), "graph");
    ladder::check(cudaEventRecord(stop, stream), "event");
    ladder::check(cudaEventSynchronize(stop), "decode");
    float ms = 0.0f;
    ladder::check(cudaEventElapsedTime(&ms, start, stop), "event");
    if (s >= 0) samples.push_back(ms * 1e3f / static_cast<float>(launches));
  }
  std::nth_element(samples.begin(), samples.begin() + 4, samples.end());
  const std::vector<int32_t> plan = scratch.plan.read();
  char name[128];
  std::snprintf(name, sizeof name, "%2d/%d d%d B %3d len %5d page %2d (chunk %d, %d chunks)", c.n_heads, c.n_kv_heads,
                c.head_dim, batch, len, c.page, plan[1], plan[0]);
  report.bandwidth(name, samples[4], bytes);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
}

std::vector<Case> cases() {
  const std::vector<int> ragged = {1, 15, 16, 17, 127, 128, 129, 500, 0, 2049, 64, 3};
  const std::vector<int> deep = {9, 8, 40, 300, 1025, 12};
  return {
      {"24/4 d64 ragged, page 16", ragged, 24, 4, 64},
      {"24/4 d64 ragged, page 1", ragged, 24, 4, 64, 1, 0, 0, false, false, 1},
      {"24/4 d64 ragged, page 64", ragged, 24, 4, 64, 1, 0, 0, false, false, 64},
      {"24/4 d64 ragged, contiguous", ragged, 24, 4, 64, 1, 0, 0, false, false, 0},
      {"32/8 d128 ragged", ragged, 32, 8, 128},
      {"32/8 d128 ragged, page 1, fixed 128", ragged, 32, 8, 128, 1, 0, 0, false, false, 1, 128},
      {"16/2 d80 ragged", ragged, 16, 2, 80},
      {"6/1 d256 ragged", ragged, 6, 1, 256},
      {"9/1 d64 (nine heads a kv head)", ragged, 9, 1, 64},
      {"16/1 d128 (sixteen)", ragged, 16, 1, 128},
      {"7/7 d64 (one)", ragged, 7, 7, 64},
      {"16/1 d256 (sixteen, two passes)", ragged, 16, 1, 256},
      {"10/2 d64 query rows 8", deep, 10, 2, 64, 8},
      {"32/8 d128 query rows 4", deep, 32, 8, 128, 4},
      {"8/2 d64 window 100", ragged, 8, 2, 64, 1, 100},
      {"8/2 d128 window 33, query rows 4, fixed 64", deep, 8, 2, 128, 4, 33, 0, false, false, 16, 64},
      {"8/2 d64 softcap 20", ragged, 8, 2, 64, 1, 0, 20.0f},
      {"8/2 d64 sinks", ragged, 8, 2, 64, 1, 0, 0, true},
      {"8/2 d128 mask, query rows 2", deep, 8, 2, 128, 2, 0, 0, false, true},
      {"24/4 d64 e4m3, ragged", ragged, 24, 4, 64, 1, 0, 0, false, false, 16, 0, true},
      {"24/4 d64 e4m3, contiguous", ragged, 24, 4, 64, 1, 0, 0, false, false, 0, 0, true},
      {"32/8 d128 e4m3, query rows 4, page 1, fixed 64", deep, 32, 8, 128, 4, 0, 0, false, false, 1, 64, true},
      {"16/2 d80 e4m3, window 33", ragged, 16, 2, 80, 1, 33, 0, false, false, 16, 0, true},
      {"6/1 d256 e4m3, softcap 20", ragged, 6, 1, 256, 1, 0, 20.0f, false, false, 16, 0, true},
      {"8/2 d128 e4m3, mask and sinks, query rows 2", deep, 8, 2, 128, 2, 0, 0, true, true, 16, 0, true},
      {"24/4 d64 one long request", {5000}, 24, 4, 64},
      {"24/4 d64 three hundred requests", std::vector<int>(300, 90), 24, 4, 64},
      // Between one and two units a multiprocessor of the H200, and beyond two: blocks of four warps, and of two.
      {"24/4 d64 fifty requests", std::vector<int>(50, 190), 24, 4, 64},
      {"10/2 d64 query rows 8, thirty requests", std::vector<int>(30, 190), 10, 2, 64, 8},
      {"32/8 d128 thirty requests", std::vector<int>(30, 700), 32, 8, 128},
      {"32/8 d128 ninety requests", std::vector<int>(90, 300), 32, 8, 128},
      {"32/8 d128 ninety requests, fixed 128", std::vector<int>(90, 300), 32, 8, 128, 1, 0, 0, false, false, 16, 128},
      {"32/8 d128 ninety requests, query rows 4", std::vector<int>(90, 300), 32, 8, 128, 4},
      {"6/1 d256 two hundred and eighty requests", std::vector<int>(280, 70), 6, 1, 256},
  };
}

inline void verify_all(ladder::Report& report) {
  for (const Case& c : cases()) {
    verify<astrai::bfloat16>(report, c);
    verify<astrai::float16>(report, c);
  }
}

inline void measure_all(ladder::Report& report) {
  for (const Case& c : {Case{"", {}, 24, 4, 64}, Case{"", {}, 32, 8, 128}, Case{"", {}, 32, 8, 64}}) {
    for (const int batch : {1, 8, 32, 128}) {
      for (const int len : {576, 2048, 8192, 32768}) {
        if (len == 32768 ? batch != 1 : len == 8192 && batch == 1) continue;
        if (len == 2048 && batch == 8) continue;
        measure(report, c, batch, len);
      }
    }
  }
  for (const int batch : {1, 32, 128}) {
    Case c{"", {}, 24, 4, 64};
    c.page = 1;
    measure(report, c, batch, 2048);
  }
}

}  // namespace attention::decode
