// Decode attention that norms, rotates and writes the new token itself: bit for bit the two launches in sequence, and the
// time of both behind a kernel that lets them in early.
#pragma once

#include "astrai/attention/decode.cuh"
#include "astrai/fused/qkv.cuh"

#include "attention_decode.h"

namespace attention::fresh {

constexpr int64_t kMaxPos = 65536;

struct Case {
  attention::Case attention;
  int rotary_dim;  // 0: not rotated
  bool interleaved = false;
  bool norms = true;
};

template <typename T>
cudaError_t launch(const astrai::FreshAttentionParams& p, int max_chunks, cudaStream_t stream) {
  const int64_t items = static_cast<int64_t>(max_chunks) * p.n_kv_heads;
  return p.head_dim == 64 ? astrai::launch_decode<T, astrai::FreshKV, 64, 1, false>(p, items, stream)
                          : astrai::launch_decode<T, astrai::FreshKV, 128, 1, false>(p, items, stream);
}

/// Operands of one step; the slots of the new tokens are poison.
template <typename T>
struct Step {
  Case c;
  int batch, width, row;
  Table table;
  std::size_t pool_count, q_count;
  ladder::Buffer<T> qkv, q, q_norm, k_norm, old_k, old_v, k, v, out;
  ladder::Buffer<float> cos, sin;
  ladder::Buffer<int64_t> positions, slots;
  ladder::Buffer<int32_t> entries, lens;
  decode::Scratch scratch;

  explicit Step(const Case& wanted)
      : c(wanted), batch(static_cast<int>(c.attention.lens.size())),
        width((c.attention.n_heads + 2 * c.attention.n_kv_heads) * c.attention.head_dim),
        row(c.attention.n_kv_heads * c.attention.head_dim), table(c.attention.lens, c.attention.page, 5),
        pool_count(static_cast<std::size_t>(table.slots) * row),
        q_count(static_cast<std::size_t>(batch) * c.attention.n_heads * c.attention.head_dim),
        qkv(ladder::random_values<T>(static_cast<std::size_t>(batch) * width, 1)),
        q(q_count),
        q_norm(ladder::random_values<T>(c.attention.head_dim, 2)),
        k_norm(ladder::random_values<T>(c.attention.head_dim, 3)), old_k(pool(4)), old_v(pool(5)), k(pool_count),
        v(pool_count), out(q_count), cos(angles(true)), sin(angles(false)), positions(newest(false)),
        slots(newest(true)), entries(table.entries),
        lens(std::vector<int32_t>(c.attention.lens.begin(), c.attention.lens.end())),
        scratch(c.attention, batch, decode::default_chunks(c.attention, batch)) {}

  std::vector<T> pool(uint32_t seed) const {
    std::vector<T> values = ladder::random_values<T>(pool_count, seed);
    for (const int64_t slot : newest(true)) {
      std::fill_n(values.begin() + slot * row, row, Storage<T>::pack(NAN));
    }
    return values;
  }
  std::vector<int64_t> newest(bool as_slots) const {
    std::vector<int64_t> values;
    for (int b = 0; b < batch; ++b) {
      const int position = c.attention.lens[b] - 1;
      values.push_back(as_slots ? table.entries[static_cast<std::size_t>(b) * table.max_len + position] : position);
    }
    return values;
  }
  std::vector<float> angles(bool cosine) const {
    const int half = std::max(c.rotary_dim / 2, 1);
    std::vector<float> values;
    for (int64_t i = 0; i < kMaxPos * half; ++i) {
      const double angle = (i / half) * std::pow(10000.0, -static_cast<double>(i % half) / half);
      values.push_back(static_cast<float>(cosine ? std::cos(angle) : std::sin(angle)));
    }
    return values;
  }

  astrai::FreshAttentionParams params(T* k_pool, T* v_pool, bool overlap) const {
    astrai::FreshAttentionParams p = {};
    set_strides<T>(p, c.attention, table.max_len);
    scratch.bind(p);
    p.k = k_pool;
    p.v = v_pool;
    p.out = out.get();
    p.q = q.get();
    p.req_to_token = entries.get();
    p.table_stride = table.max_len;
    p.batch = batch;
    p.fixed_len = c.attention.fixed_len;
    p.overlap = overlap;
    astrai::QkvParams& heads = p.heads;
    heads.qkv = qkv.get();
    heads.qkv_stride = width;
    heads.q = q.get();
    heads.q_token_stride = p.q_token_stride;
    heads.q_head_stride = p.q_head_stride;
    heads.k_buffer = k_pool;
    heads.v_buffer = v_pool;
    heads.k_slot_stride = heads.v_slot_stride = row;
    heads.k_head_stride = heads.v_head_stride = p.head_dim;
    heads.q_norm = c.norms ? q_norm.get() : nullptr;
    heads.k_norm = c.norms ? k_norm.get() : nullptr;
    heads.cos = c.rotary_dim ? cos.get() : nullptr;
    heads.sin = c.rotary_dim ? sin.get() : nullptr;
    heads.cos_stride = heads.sin_stride = c.rotary_dim / 2;
    heads.max_pos = kMaxPos;
    heads.position_ids = positions.get();
    heads.out_cache_loc = slots.get();
    heads.position_stride = heads.loc_stride = 1;
    heads.positions_are_64_bit = heads.locs_are_64_bit = true;
    heads.pool_size = table.slots;
    heads.tokens = batch;
    heads.n_heads = p.n_heads;
    heads.n_kv_heads = p.n_kv_heads;
    heads.head_dim = p.head_dim;
    heads.rotary_dim = c.rotary_dim;
    heads.eps = 1e-6f;
    heads.interleaved = c.interleaved;
    heads.overlap = overlap;
    return p;
  }

  cudaError_t two(const astrai::FreshAttentionParams& p, cudaStream_t stream) const {
    const cudaError_t status = astrai::qkv_norm_rope_write(p.heads, Storage<T>::kDType, stream);
    if (status != cudaSuccess) return status;
    return decode::launch<T>(p, static_cast<int64_t>(scratch.max_chunks) * p.n_kv_heads, false, stream);
  }
};

template <typename T>
void verify(ladder::Report& report, const Case& c) {
  const Step<T> step(c);
  ladder::check(decode::run_plan(c.attention, step.scratch, step.lens.get(), step.batch, nullptr), "plan");
  std::vector<std::vector<T>> results[2];
  for (int one = 0; one < 2; ++one) {
    const std::size_t bytes = step.pool_count * sizeof(T);
    ladder::check(cudaMemcpy(step.k.get(), step.old_k.get(), bytes, cudaMemcpyDeviceToDevice), "copy");
    ladder::check(cudaMemcpy(step.v.get(), step.old_v.get(), bytes, cudaMemcpyDeviceToDevice), "copy");
    ladder::check(cudaMemset(step.out.get(), 0xff, step.q_count * sizeof(T)), "clear");
    ladder::check(cudaDeviceSynchronize(), "clear");
    const astrai::FreshAttentionParams p = step.params(step.k.get(), step.v.get(), true);
    ladder::check(one ? launch<T>(p, step.scratch.max_chunks, nullptr) : step.two(p, nullptr), "decode");
    ladder::check(cudaDeviceSynchronize(), "decode");
    results[one] = {step.out.read(), step.k.read(), step.v.read()};
  }
  double worst = 0.0;
  for (int i = 0; i < 3; ++i) {
    if (std::memcmp(results[0][i].data(), results[1][i].data(), results[0][i].size() * sizeof(T)) != 0) worst = INFINITY;
  }
  for (const T& value : results[1][0]) {
    if (std::isnan(Storage<T>::unpack(value))) worst = INFINITY;
  }
  report.row(std::string("decode fresh ") + Storage<T>::kName + " " + c.attention.name, worst);
}

/// Pairs of launches, or single ones, one after the other, over pools that L2 cannot hold.
inline void measure(ladder::Report& report, Case c, int batch, int len) {
  using T = astrai::bfloat16;
  c.attention.lens.assign(batch, len);
  const Step<T> step(c);
  const double bytes = 2.0 * batch * len * step.row * sizeof(T);
  const int buffers = static_cast<int>(std::min(64.0, std::max(2.0, std::ceil(200e6 / bytes))));
  const ladder::Buffer<T> k(step.pool_count * buffers), v(step.pool_count * buffers);
  for (int i = 0; i < buffers; ++i) {
    const std::size_t n = step.pool_count * sizeof(T);
    ladder::check(cudaMemcpy(k.get() + step.pool_count * i, step.old_k.get(), n, cudaMemcpyDeviceToDevice), "copy");
    ladder::check(cudaMemcpy(v.get() + step.pool_count * i, step.old_v.get(), n, cudaMemcpyDeviceToDevice), "copy");
  }
  ladder::check(decode::run_plan(c.attention, step.scratch, step.lens.get(), batch, nullptr), "plan");
  ladder::check(cudaDeviceSynchronize(), "plan");
  for (int one = 0; one < 2; ++one) {
    const double us = ladder::median_microseconds(buffers, [&](int i, cudaStream_t stream) {
      const std::size_t at = step.pool_count * i;
      const astrai::FreshAttentionParams p = step.params(k.get() + at, v.get() + at, true);
      return one ? launch<T>(p, step.scratch.max_chunks, stream) : step.two(p, stream);
    });
    char name[128];
    std::snprintf(name, sizeof name, "%2d/%d d%d B %d len %5d, norm to attention in %s", c.attention.n_heads,
                  c.attention.n_kv_heads, c.attention.head_dim, batch, len, one ? "one launch" : "two launches");
    report.bandwidth(name, us, bytes);
  }
}

inline void verify_all(ladder::Report& report) {
  const std::vector<int> ragged = {1, 2, 15, 16, 17, 300, 1025, 129};
  attention::Case window{"window 1", ragged, 8, 2, 64, 1, 1};
  attention::Case fixed{"window 33, fixed 64", ragged, 8, 2, 128, 1, 33};
  fixed.fixed_len = 64;
  for (const Case& c : {
           Case{{"24/4 d64 halves", ragged, 24, 4, 64}, 64},
           Case{{"24/4 d64 interleaved", ragged, 24, 4, 64}, 64, true},
           Case{{"16/8 d128 halves", ragged, 16, 8, 128}, 128},
           Case{{"32/8 d128 interleaved, 32 dimensions, no norm", ragged, 32, 8, 128}, 32, true, false},
           Case{{"32/4 d128 halves, 32 dimensions", ragged, 32, 4, 128}, 32},
           Case{{"9/3 d64 not rotated", ragged, 9, 3, 64}, 0},
           Case{{"16/8 d128 one long request", {5000}, 16, 8, 128}, 128},
           Case{{"24/4 d64 fifty requests", std::vector<int>(50, 190), 24, 4, 64}, 64},
           Case{{"16/4 d128 ninety requests", std::vector<int>(90, 300), 16, 4, 128}, 128},
           Case{window, 64},
           Case{fixed, 128},
       }) {
    verify<astrai::bfloat16>(report, c);
    verify<astrai::float16>(report, c);
  }
}

inline void measure_all(ladder::Report& report) {
  for (const Case& c : {Case{{"", {}, 16, 8, 128}, 128}, Case{{"", {}, 24, 4, 64}, 64}, Case{{"", {}, 32, 8, 64}, 64}}) {
    for (const int batch : {1, 4, 8}) {
      for (const int len : {128, 576, 4096}) measure(report, c, batch, len);
    }
  }
}

}  // namespace attention::fresh
