// Descriptors of a model's weights for the copy engine, made once a model. Host only, not for NVRTC.
#pragma once

#include "astrai/linear/tensor_map.h"
#include "astrai/step/derive.cuh"

namespace astrai {

/// How many there are: what p.maps points to.
inline int step_maps(int n_layers) { return 4 * n_layers + 1; }

/// Fill `maps`, on the host, for the model that `p` describes; `layers`: its table, on the host. Without a head the last
/// descriptor is that of the last layer's down projection, which nobody reads.
inline cudaError_t encode_step_maps(StepParams p, const StepLayer* layers, DType dtype, TensorMap* maps) {
  derive(p);
  const auto encode = [&](TensorMap* map, int index, const void* weight) {
    const StepProduct& product = p.product[index];
    const uint64_t depth = static_cast<uint64_t>(product.depth);
    const uint64_t features = static_cast<uint64_t>(product.features);
    const uint64_t row_bytes = 2 * depth;
    // A stage is 16 rows; with gate and up eight rows of one and the matching ones of the other.
    if (index != 2) return encode_map<2>(map, dtype, weight, {depth, features}, {row_bytes}, {kLinearStep, 16});
    return encode_map<4>(map, dtype, weight, {depth, 8, 2, features / 8}, {row_bytes, features * row_bytes, 8 * row_bytes},
                         {kLinearStep, 8, 2, 1});
  };
  for (int layer = 0; layer < p.n_layers; ++layer) {
    const StepLayer& weights = layers[layer];
    const void* const all[] = {weights.qkv, weights.o, weights.gate_up, weights.down};
    for (int index = 0; index < 4; ++index) {
      const cudaError_t status = encode(maps + 4 * layer + index, index, all[index]);
      if (status != cudaSuccess) return status;
    }
  }
  if (p.head == nullptr) return encode(maps + 4 * p.n_layers, 3, layers[p.n_layers - 1].down);
  return encode(maps + 4 * p.n_layers, 4, p.head);
}

}  // namespace astrai
