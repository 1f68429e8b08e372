// Arguments of the fused ops: plain C++, filled by the bindings and passed to the kernels as they are.
#pragma once

#include "astrai/common/dtype.h"

namespace astrai {

/// Rows of a tensor: row r starts at data + (r / inner) * outer_stride + (r % inner) * inner_stride (elements).
template <typename Pointer>
struct RowView {
  Pointer data;
  int64_t outer_stride;
  int64_t inner_stride;
};

struct RmsNormParams {
  RowView<const void*> x;
  RowView<const void*> residual;  // read by the add variant only
  RowView<void*> out;             // may be x or residual itself
  RowView<void*> residual_out;    // written by the add variant only; may be x or residual itself
  const void* weight;             // [hidden]; nothing may write it meanwhile
  int64_t rows;
  int64_t inner;  // rows per outer index, at least 1
  int hidden;
  float eps;
};

/// qkv_norm_rope_write: see fused/qkv.cuh. Strides in elements; a pool's element (slot, head, d) is at
/// slot * slot_stride + head * head_stride + d.
struct QkvParams {
  const void* qkv;  // [tokens, (n_heads + 2 n_kv_heads) * head_dim]
  int64_t qkv_stride;
  void* q;  // [tokens, n_heads, head_dim]; may be the q part of qkv itself
  int64_t q_token_stride;
  int64_t q_head_stride;
  void* k_buffer;  // [pool_size, n_kv_heads, head_dim] of qkv's type, or e4m3 with k_scale
  void* v_buffer;
  int64_t k_slot_stride;
  int64_t k_head_stride;
  int64_t v_slot_stride;
  int64_t v_head_stride;
  float* k_scale;  // [pool_size, n_kv_heads], null unless the pool is e4m3
  float* v_scale;
  int64_t k_scale_stride;
  int64_t v_scale_stride;
  const void* q_norm;  // [head_dim] of qkv's type, or null: not normed
  const void* k_norm;
  const float* cos;  // [max_pos, rotary_dim / 2], or null: not rotated
  const float* sin;
  int64_t cos_stride;
  int64_t sin_stride;
  int64_t max_pos;
  const void* position_ids;  // [tokens], int32 or int64
  int64_t position_stride;
  const void* out_cache_loc;  // [tokens], int32 or int64; outside [0, pool_size): k and v are not written
  int64_t loc_stride;
  int64_t pool_size;
  int64_t tokens;
  int n_heads;
  int n_kv_heads;
  int head_dim;
  int rotary_dim;
  float eps;
  bool positions_are_64_bit;
  bool locs_are_64_bit;
  bool interleaved;
  bool overlap;  // position_ids, out_cache_loc, cos and sin may be read before pdl_wait(): see there
};

enum class Activation : int { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

struct GatedParams {
  RowView<const void*> x;  // [rows, 2 * width]: the gates, then the values
  RowView<void*> out;      // [rows, width]
  int64_t rows;
  int64_t inner;
  int width;
};

struct EmbeddingParams {
  const void* ids;  // [tokens], int32 or int64; outside [0, vocab): the token's row becomes NaN
  int64_t id_stride;
  const void* table;  // [vocab, hidden]; nothing may write it meanwhile
  int64_t table_stride;
  void* out;  // [tokens, hidden]
  int64_t out_stride;
  int64_t tokens;
  int64_t vocab;
  int hidden;
  bool ids_are_64_bit;
  // As in LinearParams: what the product that reads the rows' norm wants of it. Null, or bfloat16 and hidden a kHalfMultiple.
  const void* next_norm;
  void* next_x;
  float* next_squares;
};

}  // namespace astrai
