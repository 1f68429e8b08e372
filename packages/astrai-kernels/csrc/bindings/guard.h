// What every binding does around a launch: choose the device, check the status, refuse bad arguments.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace astrai {

/// Throws std::runtime_error (RuntimeError in Python) unless `status` is success.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("astrai_kernels.") + what + ": " + cudaGetErrorString(status) + " (" +
                           cudaGetErrorName(status) + ")");
}

/// Throws std::invalid_argument (ValueError in Python) unless `condition` holds.
inline void require(bool condition, const char* what, const char* requirement) {
  if (!condition) throw std::invalid_argument(std::string("astrai_kernels.") + what + ": " + requirement);
}

/// Makes `device` current for the lifetime of the object (row K10).
///
/// cudaSetDevice is called even when the device is current already: this module has its own copy of the CUDA runtime,
/// and the call makes sure that the copy uses the device's primary context, the one torch allocates in.
class DeviceGuard {
 public:
  DeviceGuard(int device, const char* what) {
    check(cudaGetDevice(&previous_), what);
    check(cudaSetDevice(device), what);
    changed_ = previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace astrai
