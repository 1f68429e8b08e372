// Attention against a double-precision reference over contiguous and paged KV; bandwidth of decode by graph replay over
// pools that L2 cannot hold, arithmetic rate of prefill (row K14).

#include "attention_decode.h"
#include "attention_fresh.h"
#include "attention_prefill.h"

// ladder_attention [--quick] [decode|prefill]
int main(int argc, char** argv) {
  const std::string part = argc > 1 && argv[argc - 1][0] != '-' ? argv[argc - 1] : "";
  ladder::Report report;
  if (part != "prefill") {
    attention::decode::verify_all(report);
    attention::fresh::verify_all(report);
  }
  if (part != "decode") attention::prefill::verify_all(report);
  if (!ladder::is_quick(argc, argv)) {
    if (part != "decode") attention::prefill::measure_all(report);
    if (part != "prefill") {
      attention::fresh::measure_all(report);
      attention::decode::measure_all(report);
    }
  }
  return report.finish();
}
