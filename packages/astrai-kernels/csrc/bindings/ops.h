// The launchers that the Python module calls, one family per translation unit. No CUDA syntax and no Python here.
#pragma once

#include "astrai/fused/params.h"
#include "astrai/rotary/params.h"

namespace astrai {

/// Checks `params`, launches on `stream` of `device`. dtype: an astrai::DType as an integer.
/// Throws std::invalid_argument for bad arguments and std::runtime_error when CUDA refuses the launch.
void launch_rms_norm(const RmsNormParams& params, int dtype, bool with_add, int device, std::uintptr_t stream);
void launch_rotary(const RotaryParams& params, int dtype, bool interleaved, int device, std::uintptr_t stream);

}  // namespace astrai
