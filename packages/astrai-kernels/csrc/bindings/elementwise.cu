// Family "elementwise": gated activations and the embedding gather.

#include "astrai/fused/embedding.cuh"
#include "astrai/fused/gated.cuh"

namespace astrai {

// Instantiated by name as well, so that NVRTC, which compiles no launch code, compiles every kernel.
#define ASTRAI_INSTANTIATE(T, KIND, OCTETS, ALIGNED) \
  template __global__ void gated_kernel<T, KIND, OCTETS, ALIGNED>(const GatedParams, const uint32_t, const uint32_t);
ASTRAI_GATED_CASES(ASTRAI_INSTANTIATE, float)
ASTRAI_GATED_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_GATED_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE

#define ASTRAI_INSTANTIATE(T, OCTETS, ALIGNED) \
  template __global__ void embedding_kernel<T, OCTETS, ALIGNED>(const EmbeddingParams, const uint32_t, const uint32_t);
ASTRAI_EMBEDDING_CASES(ASTRAI_INSTANTIATE, float)
ASTRAI_EMBEDDING_CASES(ASTRAI_INSTANTIATE, float16)
ASTRAI_EMBEDDING_CASES(ASTRAI_INSTANTIATE, bfloat16)
#undef ASTRAI_INSTANTIATE

}  // namespace astrai

#ifndef __CUDACC_RTC__

#include "guard.h"
#include "ops.h"

namespace astrai {

void launch_gated_activation(const GatedParams& params, int dtype, int kind, int device, std::uintptr_t stream) {
  const char* what = "gated_activation";
  require(dtype >= 0 && dtype <= 2, what, "dtype must be 0 (float32), 1 (float16) or 2 (bfloat16)");
  require(kind >= 0 && kind <= 2, what, "kind must be 0 (silu), 1 (gelu_tanh) or 2 (gelu)");
  require(params.rows >= 0, what, "rows must not be negative");
  require(params.inner >= 1, what, "inner must be at least 1");
  require(params.width >= 1 && params.width <= (1 << 29), what, "width must lie between 1 and 2^29");
  if (params.rows == 0) return;
  const std::size_t bytes = dtype == 0 ? 4 : 2;
  require(params.x.data && params.out.data, what, "x and out must not be null");
  require(is_aligned(params.x.data, bytes) && is_aligned(params.out.data, bytes), what,
          "every pointer must be a multiple of the element size");
  const DeviceGuard guard(device, what);
  check(gated_activation(params, static_cast<DType>(dtype), static_cast<Activation>(kind),
                         reinterpret_cast<cudaStream_t>(stream)),
        what);
}

void launch_embedding(const EmbeddingParams& params, int dtype, int device, std::uintptr_t stream) {
  const char* what = "embedding";
  require(dtype >= 0 && dtype <= 2, what, "dtype must be 0 (float32), 1 (float16) or 2 (bfloat16)");
  require(params.tokens >= 0, what, "tokens must not be negative");
  require(params.vocab >= 0, what, "vocab must not be negative");
  require(params.hidden >= 1 && params.hidden <= (1 << 30), what, "hidden must lie between 1 and 2^30");
  if (params.tokens == 0) return;
  const std::size_t bytes = dtype == 0 ? 4 : 2;
  require(params.ids && params.out && (params.table || params.vocab == 0), what, "ids, table and out must not be null");
  require(is_aligned(params.ids, params.ids_are_64_bit ? 8 : 4) && is_aligned(params.table, bytes) &&
              is_aligned(params.out, bytes),
          what, "every pointer must be a multiple of the element size");
  if (params.next_norm) {
    require(dtype == 2 && params.hidden % kHalfMultiple == 0 && params.table_stride % kOctet == 0 &&
                params.out_stride % kOctet == 0,
            what, "next_norm takes bfloat16, hidden a multiple of 64 and rows at multiples of 16 bytes");
    require(params.next_x && params.next_squares && is_aligned(params.next_norm, 16) && is_aligned(params.next_x, 16) &&
                is_aligned(params.next_squares, 16) && is_aligned(params.table, 16) && is_aligned(params.out, 16),
            what, "next_norm wants table, out and the halves' memory, at multiples of 16 bytes");
  }
  const DeviceGuard guard(device, what);
  check(embedding(params, static_cast<DType>(dtype), reinterpret_cast<cudaStream_t>(stream)), what);
}

}  // namespace astrai

#endif  // __CUDACC_RTC__
