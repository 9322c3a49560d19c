// SPDX-License-Identifier: BSL-1.0
#pragma once
// How kernels are started.

#include <cuda_runtime_api.h>

#ifdef __CUDACC__

#include <gradsync/cuda/runtime.hpp>

namespace gradsync_train {

template <class... P>
void launch(cudaStream_t stream, dim3 blocks, unsigned threads, void (*kernel)(P...), P... arguments) {
    kernel<<<blocks, threads, 0, stream>>>(arguments...);
    gradsync::cuda::check(cudaGetLastError(), "a kernel of the trainer's");
}

}  // namespace gradsync_train

#else  // for the tests: see tests/support/fake/kernels.hpp, which comes before

namespace gradsync_train {

template <class... P>
void launch(cudaStream_t stream, dim3 blocks, unsigned threads, void (*kernel)(P...), P... arguments) {
    gradsync_fake::launch(stream, blocks, threads, [=] { kernel(arguments...); });
}

}  // namespace gradsync_train

#endif
