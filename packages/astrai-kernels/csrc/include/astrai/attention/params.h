// Arguments of the attention kernels (row K1: one struct for contiguous and paged KV): plain C++, filled by the bindings
// and passed to the kernels as they are. Strides count elements.
#pragma once

#include "astrai/common/dtype.h"
#include "astrai/fused/params.h"

namespace astrai {

/// One piece of one request's keys, as the planner writes it: 32 bytes, two 16-byte loads.
struct alignas(16) AttentionChunk {
  int32_t request;
  int32_t table_row;  // row of req_to_token; the request itself when the KV is contiguous
  int32_t begin;      // first key
  int32_t end;        // behind the last key
  int32_t seq_len;    // keys of the request
  int32_t first;      // index of the request's first chunk in the plan
  int32_t count;      // chunks of the request
  int32_t unused;
};

/// What the planner leaves for the kernels of a step. `chunks` follows at 16-byte alignment.
struct AttentionPlan {
  int32_t n_chunks;
  int32_t chunk_len;  // the longest chunk's bound in tokens
  int32_t unused[2];
};

struct AttentionParams {
  const void* q;  // [batch * q_len, n_heads, head_dim]
  void* out;      // [batch * q_len, n_heads, head_dim]
  float* lse;     // [batch * q_len, n_heads], natural logarithm; null: not wanted
  const void* k;  // paged: [slots, n_kv_heads, head_dim]; contiguous: [batch, max_len, n_kv_heads, head_dim]
  const void* v;
  int64_t q_token_stride, q_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t k_slot_stride, k_head_stride, k_batch_stride;  // batch strides: contiguous KV only
  int64_t v_slot_stride, v_head_stride, v_batch_stride;

  const float* k_scale;  // of an e4m3 cache: [slots, n_kv_heads] or [batch, max_len, n_kv_heads]; null: k and v of q's type
  const float* v_scale;
  int64_t k_scale_stride, k_scale_batch_stride;  // a slot's heads lie together
  int64_t v_scale_stride, v_scale_batch_stride;
  bool rows_are_bfloat16;  // q and out beside an e4m3 cache; fp16 otherwise

  const int32_t* req_to_token;  // [rows, table_stride]: slot of each position; null: contiguous
  int64_t table_stride;

  const uint8_t* mask;  // [batch * q_len, mask_stride] bool, true = visible; null: none
  int64_t mask_stride;
  const float* sinks;  // [n_heads] logits that take part in the softmax and carry no value; null: none

  int batch;  // requests

  // Prefill only: ragged queries, the last of each request's keys' positions.
  const int32_t* qo_indptr;    // [batch + 1]
  const int32_t* seq_lens;     // [batch]
  const int64_t* req_indices;  // [batch] rows of req_to_token; null: row = request

  int n_heads;
  int n_kv_heads;
  int head_dim;
  int q_len;        // decode only: query rows of each request, the last of its keys' positions
  int window;       // keys a query sees, its own included; 0: all
  float scale;      // of the scores
  float softcap;    // 0: none
  bool overlap;     // all keys but those of the q_len newest positions were written two launches ago or earlier

  // Decode only.
  int fixed_len;  // as the planner had it
  const AttentionPlan* plan;
  const AttentionChunk* chunks;
  float* partial_out;  // [max_chunks, n_kv_heads * group * q_len, head_dim]
  float* partial_ml;   // [max_chunks, n_kv_heads * group * q_len, 2]: maximum (log2 domain) and sum
  int32_t* counters;   // [max_requests, n_kv_heads * passes], zero before and after every launch
};

/// Decode attention of one query a request, with qkv_norm_rope_write in front: q is read from heads.qkv, heads.q is not
/// written. heads.out_cache_loc is the slot of each request's newest position, or outside the pool.
struct FreshAttentionParams : AttentionParams {
  QkvParams heads;
};

/// Arguments of the planner, one thread block once a step.
struct AttentionPlanParams {
  const int32_t* seq_lens;     // [batch]
  const int64_t* req_indices;  // [batch] rows of req_to_token; null: row = request
  AttentionPlan* plan;
  AttentionChunk* chunks;
  int batch;
  int max_chunks;  // at least batch
  int workers;     // thread blocks that run at once
  int units;       // thread blocks per chunk: kv heads times passes over the query rows
  int q_len;
  int window;     // 0: none
  int fixed_len;  // chunk length of deterministic mode, a multiple of kChunkAlign; 0: chosen from the lengths
  bool overlap;   // see plan_kernel
};

}  // namespace astrai
