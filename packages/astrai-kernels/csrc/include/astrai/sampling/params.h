// Arguments of the sampling kernel: plain C++, filled by the bindings and passed to the kernel as they are.
#pragma once

#include "astrai/common/dtype.h"

namespace astrai {

/// One number per row: row r's is data[r * stride]. Null data: absent.
template <typename T>
struct PerRow {
  const T* data;
  int64_t stride;
};

/// One token per row of logits. Without `temperature` argmax for every row; other absent values mean "off".
struct SamplingParams {
  const void* logits;  // [rows, vocab], last dimension contiguous
  int64_t logits_stride;
  int64_t* out;  // [rows]
  int64_t out_stride;
  int64_t rows;
  int vocab;  // at least 1
  PerRow<float> temperature;  // not above 0: the row's argmax
  PerRow<int64_t> top_k;      // not above 0: off
  PerRow<float> top_p;        // 1 and more: off
  PerRow<float> min_p;        // not above 0: off
  PerRow<int64_t> seed;
  PerRow<int64_t> position;
  PerRow<float> presence;
  PerRow<float> frequency;
  PerRow<float> repetition;
  // The history that the penalties look at; null without penalties.
  const int32_t* counts;  // [rows, vocab]
  const uint8_t* seen;    // [rows, vocab], 0 or 1
  int64_t counts_stride;
  int64_t seen_stride;
  bool aligned;  // filled in by the launcher: every octet of logits, counts and seen is whole and can be loaded at once
};

}  // namespace astrai
