// A decode step in one kernel against a double-precision model, its projections bit by bit against `linear`, and its speed.
//
//   ladder_step                                   verify small models, then time the three shapes
//   ladder_step --quick                           verify only (for compute-sanitizer)
//   ladder_step --speed [NAME [ROWS [CONTEXT]]]   time only, of one shape, row count and context if given
//   ladder_step --tune NAME ROWS CONTEXT          length of the queues, and merging
//   ladder_step --trace NAME ROWS CONTEXT         where the cycles of a layer go, phase by phase

#include "step_speed.h"
#include "step_verify.h"

namespace {

using step::Case;
using step::Shape;

const Shape kModels[] = {
    {"preset", 100000, 1536, 24, 6912, 24, 4, 64, false, false},
    {"llama1b", 128256, 2048, 16, 8192, 32, 8, 64, false, false},
    {"qwen06", 151936, 1024, 28, 3072, 16, 8, 128, true, false},
};

template <typename T>
void verify_all(ladder::Report& report) {
  const Shape one = {"1 layer 192 ffn 320 4/2 d64", 88, 192, 1, 320, 4, 2, 64, false, false};
  const Shape wide = {"1 layer 1536 ffn 512 24/4 d64", 1000, 1536, 1, 512, 24, 4, 64, false, false};
  const Shape bias = {"2 layers 256 ffn 384 6/1 d64 bias", 48, 256, 2, 384, 6, 1, 64, false, true};
  const Shape norm = {"3 layers 192 ffn 128 4/2 d128 qk-norm", 40, 192, 3, 128, 4, 2, 128, true, false};
  const Shape deep = {"1 layer 1024 ffn 3072 16/8 d128 qk-norm bias", 520, 1024, 1, 3072, 16, 8, 128, true, true};
  step::verify<T>(report, Case{one, {5}, 1});
  step::verify<T>(report, Case{one, {1, 200, 17, 16, 129, 300, 2, 128}, 16});
  step::verify<T>(report, Case{wide, {577}, 16});
  step::verify<T>(report, Case{wide, {1, 64, 65, 600, 3, 128, 127, 2000}, 1});
  step::verify<T>(report, Case{bias, {700, 3, 33}, 1});
  step::verify<T>(report, Case{norm, {300}, 16});
  step::verify<T>(report, Case{norm, {40, 129, 1, 260}, 1});
  step::verify<T>(report, Case{deep, {31, 1, 900, 16, 17}, 16});
}

const Shape& shape_of(const std::string& name) {
  for (const Shape& shape : kModels) {
    if (name == shape.name) return shape;
  }
  std::fprintf(stderr, "ladder_step: no shape %s, expected preset, llama1b or qwen06\n", name.c_str());
  std::exit(2);
}

void speed(const Shape& shape, int only_rows, int only_context) {
  for (const int context : {576, 8192}) {
    if (only_context != 0 && context != only_context) continue;
    step::BigModel model(shape, context, 16);
    for (const int rows : {1, 2, 4, 8}) {
      if (only_rows != 0 && rows != only_rows) continue;
      model.measure(rows, {});
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const auto number = [&](int index) { return argc > index ? std::atoi(argv[index]) : 0; };
  if (mode == "--tune" || mode == "--trace") {
    if (argc < 5) {
      std::fprintf(stderr, "ladder_step: %s takes NAME ROWS CONTEXT\n", mode.c_str());
      return 2;
    }
    step::BigModel model(shape_of(argv[2]), number(4), 16);
    if (mode == "--trace") {
      model.trace(number(3), {});
      return 0;
    }
    model.measure(number(3), {});
    for (const int depth : {astrai::kMostStages, 10, 8, 6, 5, 3}) model.measure(number(3), {0, depth});
    for (const int late : {-1, 1 << 24}) model.measure(number(3), {late, 0});
    return 0;
  }
  ladder::Report report;
  if (mode != "--speed") {
    verify_all<astrai::bfloat16>(report);
    verify_all<astrai::float16>(report);
  }
  if (mode != "--quick") {
    for (const Shape& shape : kModels) {
      if (argc <= 2 || std::string(argv[2]) == shape.name) speed(shape, number(3), number(4));
    }
  }
  return report.finish();
}
