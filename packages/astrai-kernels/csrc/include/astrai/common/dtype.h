// Fixed-width integers and the element types' numbers: plain C++, shared by device code, launchers and bindings.
#pragma once

#ifdef __CUDACC_RTC__
// `long`, not `long long`: nvcc's <cstdint> says so, and mangled names must agree.
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
#else
#include <cstdint>
#endif

namespace astrai {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

}  // namespace astrai
