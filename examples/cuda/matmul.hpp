// SPDX-License-Identifier: BSL-1.0
#pragma once
// Matrix products on a device, by cuBLASLt.

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <map>
#include <memory>

#include <gradsync/cuda/runtime.hpp>

namespace gradsync_train {

/// A row-major matrix, a factor, as it lies in memory, and whether its transpose is meant. `stride`: from one of a batch to the next.
struct Matrix {
    const void* data;
    std::size_t leading;  // elements from one row to the next
    bool transposed = false;
    std::size_t stride = 0;
};

/// Where a product goes, row-major, in `type`: f32, or that of the factors. Where they are not null, `bias`, one number for each column,
/// and `addend`, which lies as the product does and is of its type, are added before it is rounded. A bias is of the product's type and
/// aligned as matrices are.
struct Product {
    void* data;
    cudaDataType_t type;
    std::size_t leading;
    std::size_t stride = 0;
    const void* bias = nullptr;
    const void* addend = nullptr;
};

/// The products of one rank, for one thread at a time. Each shape is planned once: the same shape is computed in the same
/// order every time.
class Matmul {
public:
    Matmul();
    ~Matmul();
    Matmul(const Matmul&) = delete;
    Matmul& operator=(const Matmul&) = delete;

    struct Shape {
        std::size_t m, n, k;
        std::size_t batch = 1;
    };
    /// c[m, n] = a[m, k] b[k, n], for each of the batch; a and b of `type`, f32 or bf16, the sums f32: f32 is never rounded to less on
    /// the way. Pointers are aligned to 16 bytes. Throws gradsync::Error.
    void operator()(cudaDataType_t type, Shape shape, Matrix a, Matrix b, const Product& c, cudaStream_t stream);

private:
    struct Plan;
    using Key = std::array<std::size_t, 15>;

    const Plan& plan_for(const Key& key);

    cublasLtHandle_t handle_ = nullptr;
    gradsync::cuda::DeviceMemory workspace_;
    std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace gradsync_train
