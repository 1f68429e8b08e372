// How long a step of a whole model takes: random weights made on the device, the cache full up to a context, CUDA graphs.
#pragma once

#include <memory>

#include "step_model.h"

#include "astrai/step/maps.h"

namespace step {

using astrai::bfloat16;

constexpr double kBytesPerMicrosecond = 4.24e6;  // what an H200 copies, read and written together

/// Uniform values around `mean`, from a hash of their place.
__global__ void fill_kernel(bfloat16* target, std::size_t count, float spread, float mean, uint32_t seed) {
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + static_cast<uint32_t>(i >> 32) * 40503u + seed;
    x = (x ^ (x >> 16)) * 2246822519u;
    x = (x ^ (x >> 13)) * 3266489917u;
    x ^= x >> 16;
    const float value = mean + spread * (static_cast<float>(x) * (2.0f / 4294967296.0f) - 1.0f);
    target[i] = {static_cast<uint16_t>(__float_as_uint(value) >> 16)};
  }
}

/// Device memory with such values.
struct Filled {
  ladder::Buffer<bfloat16> buffer;
  Filled(std::size_t count, double spread, double mean, uint32_t seed) : buffer(count) {
    fill_kernel<<<528, 256>>>(buffer.get(), count, static_cast<float>(spread), static_cast<float>(mean), seed);
    ladder::check(cudaGetLastError(), "fill");
  }
};

struct Options {  // as in StepParams; 0: the kernel's own choice
  int late_bytes = 0;
  int depth = 0;
  void apply(astrai::StepParams& p) const {
    p.late_bytes = late_bytes;
    p.depth = depth;
  }
};

/// A model of full size for up to kStepRows rows of `context` keys each.
class BigModel {
 public:
  BigModel(const Shape& shape, int context, int page) : s_(shape), context_(context) {
    const std::size_t hidden = s_.hidden;
    const std::size_t width = static_cast<std::size_t>(s_.heads + 2 * s_.kv_heads) * s_.dim;
    const int rows = astrai::kStepRows;
    const int pages = (context + page - 1) / page;
    const std::size_t slots = static_cast<std::size_t>(rows) * pages * page;
    const auto weight = [&](std::size_t features, std::size_t depth) {
      return make(features * depth, std::sqrt(3.0 / static_cast<double>(depth)), 0.0);
    };
    for (int l = 0; l < s_.layers; ++l) {
      astrai::StepLayer layer = {};
      layer.input_norm = make(hidden, 0.1, 1.0);
      layer.qkv = weight(width, hidden);
      layer.qkv_bias = s_.bias ? make(width, 0.1, 0.0) : nullptr;
      layer.q_norm = s_.qk_norm ? make(s_.dim, 0.1, 1.0) : nullptr;
      layer.k_norm = s_.qk_norm ? make(s_.dim, 0.1, 1.0) : nullptr;
      layer.o = weight(hidden, static_cast<std::size_t>(s_.heads) * s_.dim);
      layer.post_norm = make(hidden, 0.1, 1.0);
      layer.gate_up = weight(2 * static_cast<std::size_t>(s_.ffn), hidden);
      layer.down = weight(hidden, s_.ffn);
      layer.k_buffer = make(slots * s_.kv_heads * s_.dim, 1.0, 0.0);
      layer.v_buffer = make(slots * s_.kv_heads * s_.dim, 1.0, 0.0);
      layers_.push_back(layer);
    }
    const bfloat16* head = weight(s_.vocab, hidden);
    std::vector<int> order(static_cast<std::size_t>(rows) * pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(3));
    std::vector<int32_t> table(static_cast<std::size_t>(rows) * context);
    std::vector<int64_t> locs(rows);
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < context; ++i) table[row * context + i] = order[row * pages + i / page] * page + i % page;
      locs[row] = table[row * context + context - 1];
    }
    table_ = std::make_unique<ladder::Buffer<int32_t>>(table);
    locs_ = std::make_unique<ladder::Buffer<int64_t>>(locs);
    lens_ = std::make_unique<ladder::Buffer<int32_t>>(std::vector<int32_t>(rows, context));
    ids_ = std::make_unique<ladder::Buffer<int64_t>>(std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8});
    positions_ = std::make_unique<ladder::Buffer<int64_t>>(std::vector<int64_t>(rows, context - 1));
    angles_ = std::make_unique<ladder::Buffer<float>>(std::vector<float>(static_cast<std::size_t>(context) * s_.dim / 2, 0.5f));
    layer_table_ = std::make_unique<ladder::Buffer<astrai::StepLayer>>(layers_);

    astrai::StepParams& p = params_;
    p.layers = layer_table_->get();
    p.n_layers = s_.layers;
    p.hidden = s_.hidden;
    p.intermediate = s_.ffn;
    p.n_heads = s_.heads;
    p.n_kv_heads = s_.kv_heads;
    p.head_dim = s_.dim;
    p.eps = 1e-5f;
    p.scale = static_cast<float>(1.0 / std::sqrt(s_.dim));
    p.ids = ids_->get();
    p.embedding = p.head = head;
    p.final_norm = make(hidden, 0.1, 1.0);
    p.logits = make(static_cast<std::size_t>(rows) * s_.vocab, 0.0, 0.0);
    p.logits_stride = s_.vocab;
    p.vocab = p.head_features = s_.vocab;
    std::vector<astrai::TensorMap> maps(astrai::step_maps(s_.layers));
    ladder::check(astrai::encode_step_maps(p, layers_.data(), astrai::DType::kBFloat16, maps.data()), "maps");
    maps_ = std::make_unique<ladder::Buffer<astrai::TensorMap>>(maps);
    p.maps = maps_->get();
    p.position_ids = positions_->get();
    p.out_cache_loc = locs_->get();
    p.seq_lens = lens_->get();
    p.req_to_token = table_->get();
    p.table_stride = context;
    p.cos = p.sin = angles_->get();
    p.cos_stride = p.sin_stride = s_.dim / 2;
    p.max_pos = context;
    p.pool_size = static_cast<int64_t>(slots);
    p.k_slot_stride = p.v_slot_stride = s_.kv_heads * s_.dim;
    p.k_head_stride = p.v_head_stride = s_.dim;
    ladder::check(astrai::multiprocessor_count(&blocks_), "multiprocessors");
    const int64_t bytes = astrai::place_workspace(p, blocks_, nullptr);
    workspace_ = std::make_unique<ladder::Buffer<unsigned char>>(std::vector<unsigned char>(bytes, 0));
    ladder::check(cudaDeviceSynchronize(), "fill");
  }

  /// What a step must read: all weights once, keys and values of every row.
  double bytes(int rows) const {
    const double hidden = s_.hidden;
    const double layer = hidden * (s_.heads + 2.0 * s_.kv_heads) * s_.dim + hidden * s_.heads * s_.dim + 3.0 * hidden * s_.ffn;
    return 2.0 * (s_.layers * (layer + 2.0 * rows * context_ * s_.kv_heads * s_.dim) + hidden * s_.vocab);
  }

  void measure(int rows, const Options& options) {
    astrai::StepParams p = params_;
    p.rows = rows;
    options.apply(p);
    const double microseconds = ladder::median_microseconds(1, [&](int, cudaStream_t stream) {
      return astrai::decode_step(p, astrai::DType::kBFloat16, workspace_->get(), stream);
    });
    const double limit = bytes(rows) / kBytesPerMicrosecond;
    std::printf("%-8s rows %d context %5d queue %3d KB, late %8d  %8.1f us %8.0f tokens/s  %5.1f %% of the byte limit\n",
                s_.name, rows, context_, queue_kilobytes(p), options.late_bytes, microseconds,
                rows * 1e6 / microseconds, 100.0 * limit / microseconds);
  }

  /// Where the cycles go: of each phase the parts of its work, in the slowest block and in the mean one of those that have
  /// any, and what a barrier takes the last to come. Medians over the layers, in cycles.
  void trace(int rows, const Options& options) {
    astrai::StepParams p = params_;
    p.rows = rows;
    options.apply(p);
    const std::size_t records = static_cast<std::size_t>(blocks_) * 5 * s_.layers;
    const ladder::Buffer<int64_t> buffer(std::vector<int64_t>(records * astrai::kStepMarks, 0));
    p.trace = buffer.get();
    for (int i = 0; i < 3; ++i) {  // a mark that a block without work does not reach stays zero
      ladder::check(cudaMemset(buffer.get(), 0, records * astrai::kStepMarks * sizeof(int64_t)), "cudaMemset");
      ladder::check(astrai::decode_step<true>(p, astrai::DType::kBFloat16, workspace_->get(), nullptr), "decode_step");
      ladder::check(cudaDeviceSynchronize(), "decode_step");
    }
    const std::vector<int64_t> cycles = buffer.read();
    std::printf("%s rows %d context %d, queue %d KB\n", s_.name, rows, context_, queue_kilobytes(p));
    const char* names[] = {"qkv", "attention", "o", "gate_up", "down"};
    std::printf("  %-9s %6s %7s | slowest block: input norm stage product store hand-over | mean block: the same | barrier\n", "",
                "blocks", "work");
    for (int phase = 0; phase < 5; ++phase) {
      std::vector<double> found[2 * astrai::kStepMarks + 1];
      for (int layer = 1; layer < s_.layers; ++layer) {
        double slowest[astrai::kStepMarks] = {}, mean[astrai::kStepMarks] = {}, barrier = 1e30;
        int working = 0;
        for (int block = 0; block < blocks_; ++block) {
          const std::size_t record = (static_cast<std::size_t>(block) * s_.layers + layer) * 5 + phase;
          const int64_t* at = cycles.data() + record * astrai::kStepMarks;
          barrier = std::min(barrier, static_cast<double>(at[astrai::kOpen] - at[astrai::kHandedOver]));
          if (at[astrai::kStored] == 0) continue;
          ++working;
          double part[astrai::kStepMarks] = {};  // [0]: all of them
          int64_t last = at[astrai::kStarted];
          for (int mark = astrai::kInput; mark <= astrai::kHandedOver; ++mark) {
            const int64_t reached = std::max(last, at[mark]);
            part[mark] = static_cast<double>(reached - last);
            part[0] += part[mark];
            last = reached;
          }
          for (int mark = 0; mark <= astrai::kHandedOver; ++mark) mean[mark] += part[mark];
          if (part[0] > slowest[0]) std::copy(part, part + astrai::kStepMarks, slowest);
        }
        for (int mark = 0; mark <= astrai::kHandedOver; ++mark) {
          found[mark].push_back(slowest[mark]);
          found[astrai::kStepMarks + mark].push_back(working > 0 ? mean[mark] / working : 0.0);
        }
        found[astrai::kOpen].push_back(working);
        found[2 * astrai::kStepMarks].push_back(barrier);
      }
      const auto median = [](std::vector<double>& values) {
        std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
        return values[values.size() / 2];
      };
      std::printf("  %-9s %6.0f %7.0f |", names[phase], median(found[astrai::kOpen]), median(found[0]));
      for (int mark = 1; mark <= astrai::kHandedOver; ++mark) std::printf(" %5.0f", median(found[mark]));
      std::printf(" | %6.0f:", median(found[astrai::kStepMarks]));
      for (int mark = 1; mark <= astrai::kHandedOver; ++mark) std::printf(" %5.0f", median(found[astrai::kStepMarks + mark]));
      std::printf(" | %5.0f\n", median(found[2 * astrai::kStepMarks]));
    }
  }

 private:
  /// What the launch will choose, of a multiprocessor.
  int queue_kilobytes(astrai::StepParams p) const {
    astrai::LinearDevice device = {};
    ladder::check(astrai::linear_device(&device), "linear_device");
    astrai::derive(p);
    const std::size_t fixed = s_.dim == 64 ? sizeof(astrai::StepShared<64>) : sizeof(astrai::StepShared<128>);
    astrai::fit_step(p, device, static_cast<int>(fixed));
    return p.depth * astrai::kStepWarps * astrai::kStageBytes / 1024;
  }
  bfloat16* make(std::size_t count, double spread, double mean) {
    memory_.push_back(std::make_unique<Filled>(count, spread, mean, static_cast<uint32_t>(memory_.size()) * 7919u));
    return memory_.back()->buffer.get();
  }

  Shape s_;
  int context_;
  int blocks_ = 0;
  std::vector<std::unique_ptr<Filled>> memory_;
  std::vector<astrai::StepLayer> layers_;
  std::unique_ptr<ladder::Buffer<astrai::StepLayer>> layer_table_;
  std::unique_ptr<ladder::Buffer<astrai::TensorMap>> maps_;
  std::unique_ptr<ladder::Buffer<unsigned char>> workspace_;
  std::unique_ptr<ladder::Buffer<int32_t>> table_, lens_;
  std::unique_ptr<ladder::Buffer<int64_t>> locs_, ids_, positions_;
  std::unique_ptr<ladder::Buffer<float>> angles_;
  astrai::StepParams params_ = {};
};

}  // namespace step
