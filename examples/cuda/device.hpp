// SPDX-License-Identifier: BSL-1.0
#pragma once
// Is there a device?

#include <cuda_runtime_api.h>

#include <string>

namespace gradsync_train {

/// Empty if there is one; else why not, in words.
inline std::string why_no_device() {
    int count = 0;
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code == cudaSuccess && count > 0) return {};
    return "no CUDA device is to be found (" + std::string(code == cudaSuccess ? "there are 0" : cudaGetErrorString(code)) + ")";
}

}  // namespace gradsync_train
